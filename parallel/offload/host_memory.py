"""Memory of the host beside that of the devices: what lies there, and how it goes there and back.

An array on the host is an array like any other, of another memory kind: no arithmetic is done on
it before it is on the device.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from hfjax.parallel.mesh import describe_mesh
from hfjax.utils.paths import Tree

KIND = "pinned_host"
Key = TypeVar("Key", int, str)
KEPT = ("moments", "master", "parameters")  # what of a state may lie on the host


def memory_rules(rules: Mapping[str, Any]) -> Mapping[str, str | float]:
    """Return the rules of a strategy's column `memory`, checked.

    >>> dict(memory_rules({"moments": 1.0, "master": "host"}))
    {'moments': 'host', 'master': 'host'}
    """
    tidy: dict[str, str | float] = {}
    for rule, where in rules.items():
        if rule not in KEPT:
            raise ValueError(f"memory row {rule!r}: one of {', '.join(KEPT)}.")
        tidy[rule] = _memory_of(rule, where)
    return MappingProxyType(tidy)


def _memory_of(rule: str, where: Any) -> str | float:
    if where in ("host", "device"):
        return where
    number = isinstance(where, int | float) and not isinstance(where, bool)
    if rule == "moments" and number and 0 <= where <= 1:
        return "device" if where == 0 else "host" if where == 1 else float(where)
    if number:
        raise ValueError(
            f"memory row {rule} -> {where!r}: "
            + (
                "the share of the moments' bytes that lies on the host is from 0 to 1."
                if rule == "moments"
                else f'only moments can be shared out; {rule} are on the "host" or the "device".'
            )
        )
    share = ", or a share of the bytes from 0 (device) to 1 (host)" if rule == "moments" else ""
    raise ValueError(f'memory row {rule} -> {where!r}: "host" or "device"{share}.')


def show_memory(where: str | float) -> str:
    """Return a rule of the column `memory` as people read it.

    >>> show_memory(0.25)
    '25% host'
    """
    return where if isinstance(where, str) else f"{100 * where:.4g}% host"


def largest_first(sizes: Mapping[Key, int], room: float) -> tuple[list[Key], list[Key]]:
    """Return which of these have room, the largest first, and which have not.

    >>> largest_first({"a": 3, "b": 5, "c": 4, "d": 1}, 6.5)
    (['b', 'd'], ['c', 'a'])
    """
    chosen, rest = [], []
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        fits = sizes[key] <= room
        (chosen if fits else rest).append(key)
        room -= sizes[key] * fits
    return chosen, rest


def to_host(tree: Tree) -> Any:
    """Return the arrays, copied into host memory."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host), tree)


def to_device(tree: Tree) -> Any:
    """Return the arrays, copied into device memory where they are not there."""
    fetch = lambda x: jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x
    return jax.tree.map(fetch, tree)


def one_by_one(change: Callable, tree: Tree, *rest: Any) -> Any:
    """Return what becomes of the arrays of a tree; those on the host take turns on the device."""
    leaves, form = jax.tree.flatten(tree)
    others = [jax.tree.leaves(of) for of in rest]
    new, last = [], None
    for x, *more in zip(leaves, *others, strict=True):
        if not is_on_host(x):
            new.append(change(x, *more))
            continue
        if last is not None:
            x, last = lax.optimization_barrier((x, last))
        last = to_host(change(to_device(x), *more))
        new.append(last)
    return form.unflatten(new)


def is_on_host(x: object) -> bool:
    """Return whether an array, or what stands for one in a trace, lies in host memory."""
    return getattr(jax.typeof(x), "memory_space", None) == jax.memory.Space.Host


def on_host(mesh: Mesh, spec: P) -> NamedSharding:
    """Return the sharding that splits an array like `spec` does, in host memory."""
    check_has_host_memory(mesh)
    if is_target(mesh):
        return _OnTargetHost(mesh, spec)
    return NamedSharding(mesh, spec, memory_kind=KIND)


def is_host_sharding(sharding: jax.sharding.Sharding) -> bool:
    """Return whether what is placed so lies in host memory."""
    return sharding.memory_kind == KIND


def of_results(shardings: Any) -> Any:
    """Return the shardings to give for what a program returns, of those of its arguments.

    On devices that are there to compile for only, jax knows no memory kinds: that of a result
    follows from the program.
    """
    plain = lambda s: NamedSharding(s.mesh, s.spec) if isinstance(s, _OnTargetHost) else s
    return jax.tree.map(plain, shardings)


def check_has_host_memory(mesh: Mesh) -> None:
    """Refuse a mesh whose devices cannot reach memory of the host."""
    kinds = _kinds(mesh)
    if kinds and KIND not in kinds:
        raise ValueError(
            f"{describe_mesh(mesh)} of {mesh.devices.flat[0].device_kind}: these devices have no "
            f"{KIND} memory (only {', '.join(kinds)}), so nothing can be kept on the host. Leave "
            "out the offload, or run on a GPU, a TPU or a CPU with a newer jax."
        )


def is_target(mesh: Mesh) -> bool:
    """Return whether the devices are there to compile for only."""
    return not _kinds(mesh)


def _kinds(mesh: Mesh) -> list[str]:
    device = mesh.local_devices[0] if mesh.local_devices else mesh.devices.flat[0]
    return sorted({memory.kind for memory in device.addressable_memories()})


class _OnTargetHost(NamedSharding):
    """A sharding in host memory, of devices that are there to compile for only.

    jax forgets the memory kind of a sharding over such devices, since they cannot tell which they
    have. With this one for arguments (not for results: theirs follows from the program) a program
    is compiled as for real devices, and its memory is told apart.
    """

    memory_kind = _memory_kind = KIND  # pyright: ignore

    def __hash__(self) -> int:
        return hash((self.mesh, self.spec, KIND))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _OnTargetHost) and self.mesh == other.mesh and self.spec == other.spec
        )
