"""Make a mesh: with all axes, from the devices and processes that exist."""

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from hfjax.parallel.mesh import AXES, COLUMN_AXIS, ROW_AXIS, show_sizes
from hfjax.utils.keywords import is_int
from hfjax.utils.read_files import brief


def make_mesh(*, devices: Sequence[Any] | None = None, **sizes: int) -> Mesh:
    """Return a mesh with every axis of `AXES`: pipe, data, fsdp, expert, context, row, tensor.

    It takes the first devices, and warns if some are left over.

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
    requested, devices = devices, jax.devices() if devices is None else list(devices)
    _check_devices(devices)
    _check_sizes(sizes)
    shape = {axis: sizes.get(axis, 1) for axis in AXES}
    shape = _infer(shape, len(devices))
    needed = math.prod(shape.values())
    if needed > len(devices):
        raise ValueError(
            f"mesh {show_sizes(shape)} needs {needed} devices, found {len(devices)}. "
            "Lower one axis, let one be inferred with -1, or simulate devices on the CPU: "
            f"hfjax.simulate_devices({needed}), before JAX is first used."
        )
    grid = np.array(devices[:needed]).reshape(tuple(shape.values()))
    mesh = Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    if requested is None:
        check_processes(mesh)
    if needed < len(devices):
        idle = len(devices) - needed
        warnings.warn(
            f"mesh {show_sizes(shape)} takes {needed} of {len(devices)} devices: {idle} stay idle. "
            "Let an axis take what is left with -1 (data=-1), or, if it is meant, give the mesh "
            f"its devices: make_mesh(devices=jax.devices()[:{needed}], …).",
            UserWarning,
            stacklevel=2,
        )
    return mesh


def as_mesh(mesh: Mesh, mesh_axes: Mapping[str, str | None] | None = None) -> Mesh:
    """Return a mesh of one's own as one with every axis of `AXES`.

    Each device keeps its coordinates along the axes that the mesh has; the others get size 1. The
    array of devices is transposed to the order of `AXES`, from the slowest links to the fastest:
    that order says nothing of where the devices are.

    Args:
        mesh: As `jax.make_mesh` or `jax.sharding.Mesh` makes it, axes in any order, of any type. A
            mesh with all axes of `AXES` keeps their names.
        mesh_axes: {its name of an axis: ours}; None in place of ours: an axis of size 1, left out.
            Names that it does not list are ours. It may list names that the mesh does not have.

    Raises:
        ValueError: An axis larger than 1 has no name of ours, or two axes have one.

    Example:
        >>> import jax
        >>> mesh = as_mesh(jax.make_mesh((2, 4), ("y", "x")), {"x": "data", "y": "tensor"})
        >>> mesh.shape["data"], mesh.shape["tensor"], mesh.shape["fsdp"]
        (4, 2, 1)
    """
    names = axis_names(mesh, mesh_axes)
    _check_unique(mesh_axes or {})
    if mesh.axis_names == AXES and set(mesh.axis_types) == {AxisType.Auto}:
        return mesh
    if mesh.empty:
        raise ValueError(
            "this mesh has no devices, as jax.sharding.get_mesh() returns it where none is set. "
            "Give one that has: hfjax.make_mesh(data=-1)."
        )
    _check_known(mesh, names)
    sizes = {axis: mesh.shape[name] for axis, name in names.items()}
    order = [mesh.axis_names.index(names[axis]) for axis in AXES if axis in names]
    rest = [dim for dim in range(mesh.devices.ndim) if dim not in order]  # of size 1
    devices = mesh.devices.transpose(*order, *rest).reshape([sizes.get(axis, 1) for axis in AXES])
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def axis_names(
    mesh: Mesh | AbstractMesh, mesh_axes: Mapping[str, str | None] | None = None
) -> dict[str, str]:
    """Return {axis of hfjax: the name that it has in a mesh of one's own}.

    >>> import jax
    >>> axis_names(jax.make_mesh((2, 4), ("y", "data")), {"y": "tensor", "z": "pipe"})
    {'tensor': 'y', 'data': 'data'}
    """
    check_mesh_axes(mesh_axes)
    mapping = {} if set(AXES) == set(mesh.axis_names) else mesh_axes or {}
    names: dict[str, str] = {}
    for name, size in mesh.shape.items():
        axis = mapping.get(name, name)
        if axis is None and size > 1:
            raise ValueError(
                f"mesh_axes: {name} is None, and has size {size} in the mesh: only an axis of size "
                f"1 can be left out. Map it to one of {', '.join(AXES)}."
            )
        if axis in names:
            raise ValueError(
                f"{names[axis]} and {name} of the mesh are both {axis}: each of its axes needs one "
                f"of its own. Map one to another of {', '.join(AXES)}, or to None if it has size "
                f'1: mesh_axes={{"{name}": …}}.'
            )
        if axis in AXES:
            names[axis] = name
    return names


def check_mesh_axes(mesh_axes: Any) -> None:
    """Refuse what does not map names to axes of hfjax."""
    is_name = lambda x: isinstance(x, str)
    if mesh_axes is not None and not (
        isinstance(mesh_axes, Mapping) and all(map(is_name, mesh_axes))
    ):
        raise ValueError(
            f"mesh_axes={brief(mesh_axes)}: a dictionary of names is expected, for instance "
            '{"x": "data", "y": "tensor"}.'
        )
    for name, axis in (mesh_axes or {}).items():
        if axis is not None and axis not in AXES:
            raise ValueError(
                f"mesh_axes: {name} is {axis!r}, which is no axis of hfjax. Map it to one of "
                f"{', '.join(AXES)}, or to None if it has size 1."
            )


def _check_unique(mesh_axes: Mapping[str, str | None]) -> None:
    """Refuse two names for one axis, over which a spec could then split two dimensions."""
    first: dict[str, str] = {}
    for name, axis in mesh_axes.items():
        if axis is not None and first.setdefault(axis, name) != name:
            raise ValueError(
                f"mesh_axes: {first[axis]} and {name} are both {axis}. Map one of them to None (it "
                "splits nothing) or to another axis."
            )


def _check_known(mesh: Mesh, names: Mapping[str, str]) -> None:
    """Refuse an axis larger than 1 of which nothing says what it is for."""
    unknown = [name for name, n in mesh.shape.items() if n > 1 and name not in names.values()]
    if unknown:
        raise ValueError(
            f"mesh {show_sizes(dict(mesh.shape))}: hfjax does not know what {unknown[0]} is for. "
            f"Its own axes are {', '.join(AXES)}: give the mesh their names, or say which one it "
            f'is: hfjax.layout(…, mesh_axes={{"{unknown[0]}": "data"}}).'
        )


def _check_devices(devices: list[Any]) -> None:
    """Refuse what is no device, and a device listed twice, which the mesh would have twice."""
    if other := [device for device in devices if not hasattr(device, "platform")]:
        raise ValueError(
            f"make_mesh(devices={brief(other)}): devices are expected, as jax.devices() lists them."
        )
    device, times = next(iter(Counter(devices).most_common(1)), (None, 0))
    if times > 1:
        raise ValueError(
            f"make_mesh(devices={brief(devices)}): the same device is there {times} times, "
            f"{device}. Give each once."
        )


def check_processes(mesh: Mesh) -> None:
    """Refuse, in all processes, a mesh for all of them that lacks devices of some."""
    participants = {device.process_index for device in mesh.devices.flat}
    if out := [
        str(process) for process in range(jax.process_count()) if process not in participants
    ]:
        raise ValueError(
            f"{_describe_missing(mesh, *out)}: it would never take part, and be waited for. Let an "
            "axis take the devices that are left with -1 (data=-1; hfjax train: --mesh.data -1), "
            "or start fewer processes."
        )


def check_own_process(mesh: Mesh) -> None:
    """Refuse a mesh without a device of this process, which could compute nothing on it."""
    me, real = jax.process_index(), {*jax.devices()}  # those of `target_devices` are not
    own = any(device.process_index == me for device in mesh.devices.flat)
    if jax.process_count() > 1 and not own and not real.isdisjoint(mesh.devices.flat):
        raise ValueError(
            f"{_describe_missing(mesh, str(me))}, which is this one: it could compute nothing. "
            "Give make_mesh devices of all processes that use the mesh (devices=…), or use it in "
            "the others only."
        )


def _describe_missing(mesh: Mesh, *out: str) -> str:
    processes = f"process{'es' * (len(out) > 1)} {', '.join(out)}"
    shape = show_sizes(dict(mesh.shape))
    return f"mesh {shape} has no device of {processes} of {jax.process_count()}"


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
        raise ValueError(f"mesh {show_sizes(sizes)}: only one axis can be -1.")


def _is_size(size: Any) -> bool:
    """Whether it is the size of an axis: a positive integer, or -1 for what is left."""
    return is_int(size) or is_int(size, -1, -1)


def _infer(shape: dict[str, int], n_devices: int) -> dict[str, int]:
    known = math.prod(size for size in shape.values() if size != -1)
    if -1 not in shape.values():
        return shape
    if n_devices % known:
        raise ValueError(
            f"mesh {show_sizes(shape)}: {n_devices} devices do not split into groups of {known}. "
            "Change the given axes so that their product divides the number of devices."
        )
    return {axis: n_devices // known if size == -1 else size for axis, size in shape.items()}


def grid_2d(row: int, tensor: int) -> dict[str, Any]:
    """Return the axis sizes of a 2D grid: weights are sharded over both axes, not gathered.

    Args:
        row: How many devices shard the residual stream along its width.
        tensor: How many devices shard heads, the MLP and the vocabulary.

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
