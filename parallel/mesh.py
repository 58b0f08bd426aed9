"""The mesh: always the same named axes, outermost to innermost; size 1 means off."""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

# Outermost to innermost: the chattiest axis lies on the fastest links.
AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")
PIPE_AXIS = "pipe"  # layers are split over it
BATCH_AXES = ("data", "fsdp")  # the rows of a batch are split over these
MANUAL_AXES = ("pipe", "data", "fsdp", "expert", "context")  # collectives written in our source
TENSOR_AXES = ("tensor",)  # collectives derived by the partitioner


def make_mesh(*, devices: Sequence[Any] | None = None, **sizes: int) -> Mesh:
    """Return a mesh with every axis of `AXES`: pipe, data, fsdp, expert, context, tensor.

    It is of the first devices; where some are left over, a warning says so.

    Args:
        devices: The devices to take, in order. None: `jax.devices()`.
        sizes: The size of each axis by name, for instance `data=2, tensor=4`. Axes that are not
            named have size 1, which is off. One may be -1: it takes the devices that are left.

    Raises:
        ValueError: An axis is unknown, or the sizes do not fit the number of devices.

    Example:
        >>> import hfjax
        >>> mesh = hfjax.make_mesh(data=2, fsdp=-1, tensor=2)
        >>> mesh.shape["fsdp"]
        2
    """
    devices = jax.devices() if devices is None else list(devices)
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
    if needed < len(devices):
        _warn_of_idle(shape, needed, len(devices))
    grid = np.array(devices[:needed]).reshape(tuple(shape.values()))
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


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
        whole = isinstance(size, int | np.integer) and not isinstance(size, bool)
        if not whole or (size < 1 and size != -1):
            raise ValueError(
                f"mesh axis {axis}={size!r}: a size is a positive integer, "
                "or -1 to take the devices that are left."
            )
    if sum(size == -1 for size in sizes.values()) > 1:
        raise ValueError(f"mesh {_show(sizes)}: only one axis can be -1.")


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
