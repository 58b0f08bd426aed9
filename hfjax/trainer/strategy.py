"""The strategy of a run: the sizes of its mesh say what is on.

`choose_strategy` joins a strategy for each axis that is on; `--strategy` names a table of one's own
in place of that. `mesh_sizes` and `build_mesh` make the mesh.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import reduce
from operator import or_
from typing import Any

import jax

import hfjax
from hfjax.parallel.mesh import AXES
from hfjax.trainer.config import MeshConfig, TrainConfig
from hfjax.trainer.config_io import load_object
from hfjax.trainer.old_config import strategy_flags
from hfjax.utils.tables import quote

ZERO = (hfjax.DDP, hfjax.ZERO1, hfjax.ZERO2, hfjax.FSDP)  # by the stage of --zero


def choose_strategy(config: TrainConfig) -> hfjax.Strategy:
    """Return the strategy of a configuration.

    >>> choose_strategy(TrainConfig(mesh=MeshConfig(fsdp=4, tensor=2))).name
    'FSDP|TENSOR|SEQUENCE'
    """
    return reduce(or_, [*_strategies(config), *_host_strategies(config)])


def _strategies(config: TrainConfig) -> list[hfjax.Strategy]:
    if config.strategy is not None:
        return [load_strategy(config.strategy)]
    mesh = config.mesh
    stage = zero_stage(config)
    hybrid = stage == 3 and mesh.is_on("fsdp") and mesh.data not in (None, 1)
    tensor = [hfjax.TENSOR, *([hfjax.SEQUENCE] if config.sequence_parallel else [])]
    by_axis = {
        "tensor": [hfjax.GRID] if mesh.is_on("row") else tensor,
        **{"context": [hfjax.CONTEXT], "expert": [hfjax.EXPERT], "pipe": [hfjax.PIPE]},
    }
    return [
        hfjax.HSDP if hybrid else ZERO[stage],
        *(strategy for axis, of in by_axis.items() if mesh.is_on(axis) for strategy in of),
    ]


def _host_strategies(config: TrainConfig) -> list[hfjax.Strategy]:
    offload = config.offload
    optimizer = [hfjax.HOST_OPTIMIZER] if offload.optimizer else []
    return [*optimizer, *([hfjax.HOST_PARAMETERS] if offload.parameters else [])]


def zero_stage(config: TrainConfig) -> int:
    """Return the ZeRO stage of a configuration: 3 is FSDP.

    >>> zero_stage(TrainConfig(mesh=MeshConfig(fsdp=4))), zero_stage(TrainConfig(zero=1))
    (3, 1)
    """
    default = 3 if config.mesh.is_on("fsdp") else 0
    return default if config.zero is None else config.zero


def load_strategy(name: str) -> hfjax.Strategy:
    """Return the strategy that --strategy names: file.py:name, or package.module:name."""
    if flags := strategy_flags(name):
        raise ValueError(f"--strategy {quote(name)}: the mesh's sizes say that. Give {flags}.")
    is_strategy = lambda x: isinstance(x, hfjax.Strategy)
    return load_object(name, "--strategy", "strategy", is_strategy)


def build_mesh(config: TrainConfig, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
    """Return the mesh: no device is idle, except those that `config.devices` leaves out."""
    more_flag = "--cpu-devices" if devices is None else "--count"
    devices = _take_devices(config.devices, devices or jax.devices())
    return hfjax.make_mesh(devices=devices, **mesh_sizes(config.mesh, len(devices), more_flag))


def mesh_sizes(mesh: MeshConfig, count: int, more_flag: str = "--count") -> dict[str, int]:
    """Return the axis sizes of a mesh of `count` devices.

    Args:
        mesh: The sizes; -1 and no size of `data` mean all remaining devices.
        count: Number of devices.
        more_flag: The flag that requests more of them.

    >>> mesh_sizes(MeshConfig(tensor=2), 8)["data"], mesh_sizes(MeshConfig(fsdp=-1), 8)["fsdp"]
    (4, 8)
    """
    sizes = asdict(mesh)
    if sizes["data"] is None:
        sizes["data"] = 1 if -1 in sizes.values() else -1
    _check_device_count(mesh, sizes, count, more_flag)
    remaining = count // math.prod(size for size in sizes.values() if size != -1)
    return {axis: remaining if sizes[axis] == -1 else sizes[axis] for axis in AXES}


def _take_devices(count: int | None, devices: Sequence[Any]) -> Sequence[Any]:
    """Return the first `count` devices; refuse more than are available."""
    if count is None:
        return devices
    if count > (available := len(devices)):
        are = "is 1" if available == 1 else f"are {available}"
        raise ValueError(f"--devices {count}: there {are}. Give a number from 1 to {available}.")
    if (processes := jax.process_count()) > 1 and count < available:
        raise ValueError(
            f"--devices {count}: in a run of {processes} processes each takes part with all of its "
            f"devices, {available} together. Start them with fewer, or start fewer."
        )
    return devices[:count]


def _check_device_count(
    mesh: MeshConfig, sizes: dict[str, int], available: int, more_flag: str
) -> None:
    """Refuse a mesh that does not fit the number of devices; name its flags."""
    free = [axis for axis, size in sizes.items() if size == -1]
    if wrong := [axis for axis, size in sizes.items() if size == 0 or size < -1]:
        raise ValueError(
            f"--mesh.{wrong[0]} {sizes[wrong[0]]}: a number of devices is needed, or -1 for all "
            "remaining ones."
        )
    if len(free) > 1:
        flags = " and ".join(f"--mesh.{axis} -1" for axis in free)
        raise ValueError(
            f"{flags}: only one axis can take all remaining devices. Give a number for the other."
        )
    needed = math.prod(size for size in sizes.values() if size != -1)
    if available % needed == 0 if free else available == needed:
        return
    if not free and available > needed:
        raise ValueError(f"{mesh.flags}: {_idle_message(sizes, available, more_flag)}")
    are = "is 1" if available == 1 else f"are {available}"
    fake = " makes simulated ones" * (more_flag == "--cpu-devices")
    todo = (
        f"Lower a size, or ask for more devices: {more_flag} {needed}{fake}."
        if available < needed
        else f"Give sizes whose product divides {available}."
    )
    raise ValueError(f"{mesh.flags}: {needed} devices are needed, and there {are}. {todo}")


def _idle_message(sizes: dict[str, int], available: int, more_flag: str) -> str:
    """Return the message about devices that a mesh leaves idle."""
    needed = math.prod(sizes.values())
    others = needed // sizes["data"]
    todo = (
        f"Leave out --mesh.data, which then is {available // others}"
        if available % others == 0
        else f"Give sizes whose product is {available}"
    )
    flag = "--count" if more_flag == "--count" else "--devices"
    fewer = f", or say that so few are meant: {flag} {needed}" * (jax.process_count() == 1)
    return (
        f"{needed} of the {available} devices {'is' if needed == 1 else 'are'} used, and "
        f"{available - needed} would stay idle. {todo}{fewer}."
    )
