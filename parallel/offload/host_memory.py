"""Host memory: what is kept in it, and how it is copied there and back.

An array on the host is an array like any other, of another memory kind: it is copied to the device
before any arithmetic.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from hfjax.parallel.mesh import describe_mesh
from hfjax.utils.paths import Tree

HOST_MEMORY_KIND = "pinned_host"
Key = TypeVar("Key", int, str)
STATE_PARTS = ("optimizer_state", "master", "parameters")  # that may be on the host


def memory_rules(rules: Mapping[str, Any]) -> Mapping[str, str | float]:
    """Return the rules of a strategy's column `memory`, checked.

    >>> dict(memory_rules({"optimizer_state": 1.0, "master": "host"}))
    {'optimizer_state': 'host', 'master': 'host'}
    """
    checked: dict[str, str | float] = {}
    for rule, memory in rules.items():
        if rule not in STATE_PARTS:
            raise ValueError(f"memory row {rule!r}: one of {', '.join(STATE_PARTS)}.")
        checked[rule] = _memory_of(rule, memory)
    return MappingProxyType(checked)


def _memory_of(rule: str, memory: Any) -> str | float:
    if memory in ("host", "device"):
        return memory
    is_number = isinstance(memory, int | float) and not isinstance(memory, bool)
    if rule == "optimizer_state" and is_number and 0 <= memory <= 1:
        return "device" if memory == 0 else "host" if memory == 1 else float(memory)
    if is_number:
        raise ValueError(
            f"memory row {rule} -> {memory!r}: "
            + (
                "the fraction of its bytes in host memory is from 0 to 1."
                if rule == "optimizer_state"
                else f'a fraction is of optimizer_state; {rule} are on "host" or "device".'
            )
        )
    share = ", or a fraction of the bytes from 0 (device) to 1 (host)" * (rule == STATE_PARTS[0])
    raise ValueError(f'memory row {rule} -> {memory!r}: "host" or "device"{share}.')


def show_memory(memory: str | float) -> str:
    """Return a rule of the column `memory` in readable form.

    >>> show_memory(0.25)
    '25% host'
    """
    return memory if isinstance(memory, str) else f"{100 * memory:.4g}% host"


def largest_first(sizes: Mapping[Key, int], room: float) -> tuple[list[Key], list[Key]]:
    """Return the keys that fit into `room`, the largest first, and those that do not.

    >>> largest_first({"a": 3, "b": 5, "c": 4, "d": 1}, 6.5)
    (['b', 'd'], ['c', 'a'])
    """
    chosen, rest = [], []
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        has_room = sizes[key] <= room
        (chosen if has_room else rest).append(key)
        room -= sizes[key] * has_room
    return chosen, rest


def to_host(tree: Tree) -> Any:
    """Return the arrays, copied into host memory."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host), tree)


def to_device(tree: Tree) -> Any:
    """Return the arrays, copied into device memory if they are on the host."""
    return jax.tree.map(
        lambda x: jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x, tree
    )


def map_one_by_one(change: Callable, tree: Tree, *rest: Any) -> Any:
    """Map a function over the arrays of a tree; those on the host go to the device one by one."""
    leaves, treedef = jax.tree.flatten(tree)
    others = [jax.tree.leaves(leaf_tree) for leaf_tree in rest]
    new, last = [], None
    for x, *more in zip(leaves, *others, strict=True):
        if not is_on_host(x):
            new.append(change(x, *more))
            continue
        if last is not None:
            x, last = lax.optimization_barrier((x, last))
        last = to_host(change(to_device(x), *more))
        new.append(last)
    return treedef.unflatten(new)


def is_on_host(x: object) -> bool:
    """Return whether an array or tracer is in host memory."""
    return getattr(jax.typeof(x), "memory_space", None) == jax.memory.Space.Host


def match_memory(old: jax.Array, new: jax.Array) -> jax.Array:
    """Return the new array in the memory where the old one is."""
    return to_host(new) if is_on_host(old) else new


def host_sharding(mesh: Mesh, spec: P) -> NamedSharding:
    """Return the sharding by `spec` in host memory."""
    check_has_host_memory(mesh)
    if is_compile_only(mesh):
        return _CompileOnlyHostSharding(mesh, spec)
    return NamedSharding(mesh, spec, memory_kind=HOST_MEMORY_KIND)


def is_host_sharding(sharding: jax.sharding.Sharding) -> bool:
    """Return whether a sharding is in host memory."""
    return sharding.memory_kind == HOST_MEMORY_KIND


def result_shardings(shardings: Any) -> Any:
    """Return the shardings to declare for a program's results, from those of its arguments.

    On devices that can only be compiled for, jax knows no memory kinds: that of a result follows
    from the program.
    """
    return jax.tree.map(
        lambda s: NamedSharding(s.mesh, s.spec) if isinstance(s, _CompileOnlyHostSharding) else s,
        shardings,
    )


def check_has_host_memory(mesh: Mesh) -> None:
    """Refuse a mesh whose devices have no host memory."""
    memory_kinds = _memory_kinds(mesh)
    if memory_kinds and HOST_MEMORY_KIND not in memory_kinds:
        raise ValueError(
            f"{describe_mesh(mesh)} of {mesh.devices.flat[0].device_kind}: these devices have no "
            f"{HOST_MEMORY_KIND} memory (only {', '.join(memory_kinds)}), so nothing can be kept "
            "on the host. Leave out the offload, or run on a GPU, a TPU or a CPU with a newer jax."
        )


def is_compile_only(mesh: Mesh) -> bool:
    """Return whether the devices can only be compiled for."""
    return not _memory_kinds(mesh)


def _memory_kinds(mesh: Mesh) -> list[str]:
    device = mesh.local_devices[0] if mesh.local_devices else mesh.devices.flat[0]
    return sorted({memory.kind for memory in device.addressable_memories()})


class _CompileOnlyHostSharding(NamedSharding):
    """A sharding in host memory, of devices that can only be compiled for.

    jax forgets the memory kind of a sharding over such devices, since they do not list theirs. With
    this one for arguments (not for results: theirs follows from the program) a program is compiled
    as for real devices, and its host memory is counted apart.
    """

    memory_kind = _memory_kind = HOST_MEMORY_KIND  # pyright: ignore

    def __hash__(self) -> int:
        return hash((self.mesh, self.spec, HOST_MEMORY_KIND))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _CompileOnlyHostSharding)
            and self.mesh == other.mesh
            and self.spec == other.spec
        )
