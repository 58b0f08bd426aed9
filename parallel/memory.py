"""Memory of the host beside that of the devices: what lies there, and how it goes there and back.

An array on the host is an array like any other, of another memory kind: no arithmetic is done on
it before it is on the device.
"""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from hfjax.parallel.mesh import describe_mesh

KIND = "pinned_host"


def to_host(tree: Any) -> Any:
    """Return the arrays, copied into host memory."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host), tree)


def to_device(tree: Any) -> Any:
    """Return the arrays, copied into device memory where they are not there."""
    fetch = lambda x: jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x
    return jax.tree.map(fetch, tree)


def is_on_host(x: Any) -> bool:
    """Return whether an array, or what stands for one in a trace, lies in host memory."""
    return getattr(jax.typeof(x), "memory_space", None) == jax.memory.Space.Host


def on_host(mesh: Mesh, spec: P) -> NamedSharding:
    """Return the sharding that splits an array like `spec` does, in host memory."""
    check_has_host_memory(mesh)
    if _is_target(mesh):
        return _OnTargetHost(mesh, spec)
    return NamedSharding(mesh, spec, memory_kind=KIND)


def check_has_host_memory(mesh: Mesh) -> None:
    """Refuse a mesh whose devices cannot reach memory of the host."""
    kinds = _kinds(mesh)
    if kinds and KIND not in kinds:
        raise ValueError(
            f"{describe_mesh(mesh)} of {mesh.devices.flat[0].device_kind}: these devices have no "
            f"{KIND} memory (only {', '.join(kinds)}), so nothing can be kept on the host. Leave "
            "out the offload, or run on a GPU, a TPU or a CPU with a newer jax."
        )


def _is_target(mesh: Mesh) -> bool:
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

    def __eq__(self, other: Any) -> bool:
        return (
            isinstance(other, _OnTargetHost) and self.mesh == other.mesh and self.spec == other.spec
        )
