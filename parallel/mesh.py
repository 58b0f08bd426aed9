"""The mesh: always the same named axes, from the slowest link to the fastest; size 1 means off.

`MEANING` says what an axis is for. Batches, placement, gathers, reductions, random keys and checks
derive what they do from it: to the engine a new axis is one line there. The command line does not
follow by itself: add a field to `Mesh` in hfjax/run/config.py. Then run `make test`: tests and
doctests that print the axes fail and show the line.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from hfjax.base.read_files import shown

STACK = "layers"  # the dimension that stacks equal layers: sliced by a scan, split by stages only
EXPERTS = "experts"  # the dimension that stacks the experts of a layer: tokens go to them
ANY = "*"  # whatever a dimension is called
STAYS = "stays_split"  # how a module marks a parameter of which it takes the pieces


@dataclass(frozen=True)
class Axis:
    """What a mesh axis does. One that does nothing yet has to be of size 1.

    Attributes:
        rows: It splits the rows of a batch. Gradients are summed over it, and a parameter that it
            splits is gathered when it is read.
        sequence: Its devices share rows: each computes with positions of its own. Gradients are
            summed over it too.
        stays: The logical name of a dimension, or `ANY`. Parameters that the axis splits along it
            are never gathered: the computation goes to the pieces, as microbatches go to a stage's
            layers and tokens to experts. Other parameters are not concerned.
        marked: Only parameters stay that their module marks (`STAYS`), since it takes pieces. Those
            of other modules are gathered when they are read, as over any axis of rows.
        partitioner: XLA's partitioner derives the collectives over it. Those over all other axes
            are written in our source, and so are these on a grid (`on_grid`).
    """

    rows: bool = False
    sequence: bool = False
    stays: str | None = None
    marked: bool = False
    partitioner: bool = False


# In the order of the links, from the slowest to the fastest: the axis that sends most comes last. A
# new axis of rows goes before fsdp: the last axis of rows in use, expert or fsdp, is taken to lie
# within a node (reduction="hierarchical"). ZERO1 and ZERO2 then split over it too, but a model's or
# loss's own psum(..., ("data", "fsdp")) misses it. The partitioner's axes come after all others.
MEANING: Mapping[str, Axis] = {
    "pipe": Axis(stays=STACK),
    "data": Axis(rows=True),
    "fsdp": Axis(rows=True),
    "expert": Axis(rows=True, stays=EXPERTS, marked=True),
    "context": Axis(sequence=True),
    "row": Axis(stays=ANY),
    "tensor": Axis(partitioner=True),
}


def _axes(wanted: Callable[[Axis], bool]) -> tuple[str, ...]:
    return tuple(name for name, axis in MEANING.items() if wanted(axis))


def stays_split(axis: str, dimension: str | None, marked: bool = True) -> bool:
    """Return whether an axis keeps a dimension of this name split where it is read."""
    meaning = MEANING[axis]
    if meaning.partitioner or meaning.stays == ANY:
        return True
    return stays_by_name(axis, dimension, marked)


def stays_by_name(axis: str, dimension: str | None, marked: bool = True) -> bool:
    """Return whether it does so because the dimension has this name.

    `marked` says whether the module of the parameter takes pieces of it.
    """
    meaning = MEANING[axis]
    return dimension is not None and meaning.stays == dimension and (marked or not meaning.marked)


AXES = tuple(MEANING)
PIPE_AXIS = "pipe"  # that of the stages of a pipeline
ROW_AXIS, COLUMN_AXIS = "row", "tensor"  # of a grid of tensor parallelism
BATCH_AXES = _axes(lambda axis: axis.rows)
SEQUENCE_AXES = _axes(lambda axis: axis.sequence)
EXPERT_AXES = _axes(lambda axis: axis.stays == EXPERTS)
TENSOR_AXES = _axes(lambda axis: axis.partitioner)
MANUAL_AXES = _axes(lambda axis: not axis.partitioner)
SAMPLE_AXES = (*BATCH_AXES, *SEQUENCE_AXES)  # each device computes with its own part of a batch


def make_mesh(*, devices: Sequence[Any] | None = None, **sizes: int) -> Mesh:
    """Return a mesh with every axis of `AXES`: pipe, data, fsdp, expert, context, row, tensor.

    It is of the first devices; where some are left over, a warning says so.

    Args:
        devices: The devices to take, in order. None: `jax.devices()`.
        sizes: The size of each axis by name, for instance `data=2, tensor=4`. Axes that are not
            named have size 1, which is off. One may be -1: it takes the devices that are left.

    Raises:
        ValueError: An axis is unknown, or the sizes do not fit the number of devices; or, where
            none are given, a process would have no device of the mesh.

    Example:
        >>> import hfjax
        >>> mesh = hfjax.make_mesh(data=2, fsdp=-1, tensor=2)
        >>> mesh.shape["fsdp"]
        2
    """
    given, devices = devices, jax.devices() if devices is None else list(devices)
    _check_devices(devices)
    _check_sizes(sizes)
    shape = {axis: sizes.get(axis, 1) for axis in AXES}
    shape = _infer(shape, len(devices))
    needed = math.prod(shape.values())
    if needed > len(devices):
        raise ValueError(
            f"mesh {_show(shape)} needs {needed} devices, found {len(devices)}. "
            "Lower one axis, let one be inferred with -1, or run on more devices (on a CPU: "
            f'jax.config.update("jax_num_cpu_devices", {needed}) before the first use of JAX).'
        )
    grid = np.array(devices[:needed]).reshape(tuple(shape.values()))
    mesh = Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    if given is None:
        check_processes(mesh)
    if needed < len(devices):
        _warn_of_idle(shape, needed, len(devices))
    return mesh


def _check_devices(devices: list[Any]) -> None:
    """Refuse what is no device, and one that is there twice: it would be two parts of a mesh."""
    if other := [device for device in devices if not hasattr(device, "platform")]:
        raise ValueError(
            f"make_mesh(devices={shown(other)}): devices are expected, as jax.devices() lists them."
        )
    device, times = next(iter(Counter(devices).most_common(1)), (None, 0))
    if times > 1:
        raise ValueError(
            f"make_mesh(devices={shown(devices)}): the same device is there {times} times, "
            f"{device}. Give each once."
        )


def check_processes(mesh: Mesh) -> None:
    """Refuse, in all processes, a mesh for all of them that has no device of some."""
    found = {device.process_index for device in mesh.devices.flat}
    if out := [str(process) for process in range(jax.process_count()) if process not in found]:
        raise ValueError(
            f"{_without(mesh, *out)}: it would never take part, and be waited for. Let an axis "
            "take the devices that are left with -1 (data=-1; hfjax train: --mesh.data -1), or "
            "start fewer processes."
        )


def check_own_process(mesh: Mesh) -> None:
    """Refuse a mesh without a device of this process, which could compute nothing on it."""
    me, real = jax.process_index(), {*jax.devices()}  # those of `target_devices` are not
    own = any(device.process_index == me for device in mesh.devices.flat)
    if jax.process_count() > 1 and not own and not real.isdisjoint(mesh.devices.flat):
        raise ValueError(
            f"{_without(mesh, str(me))}, which is this one: it could compute nothing. Give "
            "make_mesh devices of all processes that use the mesh (devices=…), or use it in the "
            "others only."
        )


def _without(mesh: Mesh, *out: str) -> str:
    processes = f"process{'es' * (len(out) > 1)} {', '.join(out)}"
    shape = _show(dict(mesh.shape))
    return f"mesh {shape} has no device of {processes} of {jax.process_count()}"


def _warn_of_idle(shape: dict[str, int], needed: int, found: int) -> None:
    warnings.warn(
        f"mesh {_show(shape)} takes {needed} of {found} devices: {found - needed} stay idle. Let "
        "an axis take what is left with -1 (data=-1), or, if it is meant, give the mesh its "
        f"devices: make_mesh(devices=jax.devices()[:{needed}], …).",
        UserWarning,
        stacklevel=3,
    )


def _check_sizes(sizes: dict[str, int]) -> None:
    for axis, size in sizes.items():
        if axis not in AXES:
            raise ValueError(f"unknown mesh axis {axis!r}. Axes: {', '.join(AXES)}.")
        if not _is_size(size):
            raise ValueError(
                f"mesh axis {axis}={size!r}: a size is a positive integer, "
                "or -1 to take the devices that are left."
            )
    if sum(size == -1 for size in sizes.values()) > 1:
        raise ValueError(f"mesh {_show(sizes)}: only one axis can be -1.")


def _is_size(size: Any) -> bool:
    """Whether it is the size of an axis: a positive integer, or -1 for what is left."""
    whole = isinstance(size, int | np.integer) and not isinstance(size, bool)
    return whole and bool(size >= 1 or size == -1)


def _infer(shape: dict[str, int], n_devices: int) -> dict[str, int]:
    known = math.prod(size for size in shape.values() if size != -1)
    if -1 not in shape.values():
        return shape
    if n_devices % known:
        raise ValueError(
            f"mesh {_show(shape)}: {n_devices} devices do not split into groups of {known}. "
            "Change the given axes so that their product divides the number of devices."
        )
    return {axis: n_devices // known if size == -1 else size for axis, size in shape.items()}


def _show(shape: dict[str, int]) -> str:
    shown = {axis: size for axis, size in shape.items() if size != 1} or shape
    return " x ".join(f"{axis}={size}" for axis, size in shown.items())


def grid_2d(row: int, tensor: int) -> dict[str, Any]:
    """Return the sizes of a grid in two dimensions: weights are split over both, not gathered.

    Args:
        row: Over how many devices the residual stream is split along its width.
        tensor: Over how many devices heads, the MLP and the vocabulary are split.

    Example:
        >>> import hfjax
        >>> hfjax.make_mesh(data=2, **hfjax.grid_2d(2, 2)).shape["row"]
        2
    """
    if not (_is_size(row) and _is_size(tensor)) or row == tensor == -1:
        raise ValueError(
            f"hfjax.grid_2d({row!r}, {tensor!r}): row and tensor are positive integers, whose "
            "product is the number of devices of a grid; one of them may be -1 for the devices "
            "that are left."
        )
    return {ROW_AXIS: row, COLUMN_AXIS: tensor}


def cube(side: int) -> dict[str, Any]:
    """Return the sizes of the cube of "3D" tensor parallelism: fsdp = row = tensor = side.

    Args:
        side: The number of devices along each of the three axes.

    Example:
        >>> import hfjax
        >>> hfjax.cube(2)
        {'fsdp': 2, 'row': 2, 'tensor': 2}
    """
    if not _is_size(side) or side < 1:
        raise ValueError(
            f"hfjax.cube({side!r}): its side is a positive integer, of which the third power is "
            "the number of devices: hfjax.cube(2) has 8. For other numbers give the sizes: "
            "make_mesh(fsdp=4, row=2, tensor=2)."
        )
    return {"fsdp": side, **grid_2d(side, side)}


def platform_of(mesh: Mesh) -> str:
    """Return what its devices are: cpu, gpu, tpu."""
    return mesh.devices.flat[0].platform


def describe_mesh(mesh: Mesh) -> str:
    """Return the axes in use, e.g. `data=2 x tensor=4` (`one device` if none is).

    >>> describe_mesh(make_mesh(data=2, tensor=4))
    'data=2 x tensor=4'
    """
    used = {axis: size for axis, size in mesh.shape.items() if size > 1}
    return _show(used) if used else "one device"


def in_use(mesh: Any, axes: Sequence[str]) -> tuple[str, ...]:
    """Return those of the axes that are larger than 1: over others nothing is sent.

    >>> in_use(make_mesh(data=2, tensor=4), BATCH_AXES)
    ('data',)
    """
    return tuple(axis for axis in axes if mesh.shape[axis] > 1)


def size_of(axes: Sequence[str], mesh: Mesh | Mapping[str, int]) -> int:
    """Return into how many pieces these axes split a dimension.

    >>> size_of(TENSOR_AXES, make_mesh(data=2, tensor=4))
    4
    """
    shape = mesh.shape if isinstance(mesh, Mesh) else mesh
    return math.prod(shape[axis] for axis in axes)


def on_grid(mesh: Mesh) -> bool:
    """Return whether the devices form a grid of tensor parallelism: row is larger than 1."""
    return mesh.shape[ROW_AXIS] > 1


def partitioned(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes in use whose collectives XLA's partitioner derives: on a grid none.

    >>> partitioned(make_mesh(data=2, tensor=4)), partitioned(make_mesh(row=2, tensor=4))
    (('tensor',), ())
    """
    return () if on_grid(mesh) else in_use(mesh, TENSOR_AXES)


def manual_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes whose collectives our source writes: on a grid all."""
    return AXES if on_grid(mesh) else MANUAL_AXES


def row_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes over which rows are split, as a model may name them in a collective.

    Empty where all have size 1: XLA's partitioner refuses a collective over devices that are alone.
    """
    return batch_axes(mesh) if in_use(mesh, BATCH_AXES) else ()


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes that split a batch: data and fsdp, and expert where it is in use.

    >>> batch_axes(make_mesh(data=8))
    ('data', 'fsdp')
    """
    return tuple(axis for axis in BATCH_AXES if axis not in off(mesh))


def off(mesh: Mesh) -> set[str]:
    """Return the axes of size 1 that a row `*` leaves out: those that most meshes have no use for.

    >>> sorted(off(make_mesh(data=4, context=2)))
    ['expert']
    """
    rare = [name for name, axis in MEANING.items() if axis.sequence or (axis.rows and axis.stays)]
    return set(rare) - set(in_use(mesh, rare))
