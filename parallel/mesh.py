"""The mesh: always the same named axes, from the slowest link to the fastest; size 1 means off.

`MESH_AXES` says what an axis is for. Batches, placement, gathers, reductions, random keys and
checks derive what they do from it: to the engine a new axis is one line there. tests/extra_axes.py
trains on four such axes. What users see does not follow by itself: CONTRIBUTING.md.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec as P

STACK = "layers"  # the dimension that stacks equal layers: sliced by a scan, split by stages only
EXPERTS = "experts"  # the dimension that stacks the experts of a layer: tokens go to them
ANY = "*"  # any name of a dimension
KEEP_SHARDED = "keep_sharded"  # a module's mark on a parameter of which it takes the shards


@dataclass(frozen=True)
class Axis:
    """What a mesh axis does. An axis that does nothing must have size 1.

    Attributes:
        batch: It shards the batch dimension. Gradients are summed over it, and a parameter that it
            shards is gathered when it is read.
        sequence: It shards sequences: each device computes with positions of its own. Gradients are
            summed over it too.
        keeps_sharded: The logical name of a dimension, or `ANY`. Parameters that the axis shards
            along it are never gathered: the computation goes to the shards, as microbatches go to a
            stage's layers and tokens to experts. Other parameters are unaffected. Over a batch axis
            only those stay sharded that their module marks (`KEEP_SHARDED`), since it takes shards,
            within `own_rows`; all others are gathered when they are read, as over any batch axis.
        auto: XLA's partitioner derives the collectives over it. Those over all other axes
            are written in our source, and so are these on a grid (`meanings`).
    """

    batch: bool = False
    sequence: bool = False
    keeps_sharded: str | None = None
    auto: bool = False


# In the order of the links, from the slowest to the fastest: the axis that sends most comes last. A
# new batch axis goes before fsdp: the last batch axis in use, expert or fsdp, is assumed to be
# within a node (gradient_reduction="hierarchical"). ZERO1 and ZERO2 then shard over it too, but a
# model's or loss's own psum(..., ("data", "fsdp")) misses it. The partitioner's axes come
# after all others.
MESH_AXES: Mapping[str, Axis] = {
    "pipe": Axis(keeps_sharded=STACK),
    "data": Axis(batch=True),
    "fsdp": Axis(batch=True),
    "expert": Axis(batch=True, keeps_sharded=EXPERTS),
    "context": Axis(sequence=True),
    "row": Axis(keeps_sharded=ANY),
    "tensor": Axis(auto=True),
}


def _axes(predicate: Callable[[Axis], bool]) -> tuple[str, ...]:
    return tuple(name for name, axis in MESH_AXES.items() if predicate(axis))


def keeps_sharded(axis: str, dimension: str | None, takes_shards: bool = True) -> bool:
    """Return whether an axis keeps a dimension of this name sharded where it is read."""
    meaning = MESH_AXES[axis]
    if meaning.auto or meaning.keeps_sharded == ANY:
        return True
    return keeps_sharded_by_name(axis, dimension, takes_shards)


def keeps_sharded_by_name(axis: str, dimension: str | None, takes_shards: bool = True) -> bool:
    """Return whether an axis keeps a dimension sharded because of this name.

    `takes_shards` says whether the module of the parameter takes shards of it.
    """
    meaning = MESH_AXES[axis]
    return (
        dimension is not None
        and meaning.keeps_sharded == dimension
        and (takes_shards or not meaning.batch)
    )


AXES = tuple(MESH_AXES)
PIPE_AXIS = "pipe"  # over the stages of a pipeline
ROW_AXIS, COLUMN_AXIS = "row", "tensor"  # of a tensor-parallel grid
BATCH_AXES = _axes(lambda axis: axis.batch)
SEQUENCE_AXES = _axes(lambda axis: axis.sequence)
EXPERT_AXES = _axes(lambda axis: axis.keeps_sharded == EXPERTS)
TENSOR_AXES = _axes(lambda axis: axis.auto)
DATA_AXES = (*BATCH_AXES, *SEQUENCE_AXES)  # each device computes with its own part of a batch


def platform_of(mesh: Mesh) -> str:
    """Return the platform of its devices: cpu, gpu, tpu."""
    return mesh.devices.flat[0].platform


def describe_mesh(mesh: Mesh) -> str:
    """Return the axes in use, e.g. `data=2 x tensor=4` (`one device` if none is).

    >>> import hfjax
    >>> describe_mesh(hfjax.make_mesh(data=2, tensor=4))
    'data=2 x tensor=4'
    """
    used = {axis: size for axis, size in mesh.shape.items() if size > 1}
    return show_sizes(used) if used else "one device"


def in_use(mesh: Any, axes: Sequence[str]) -> tuple[str, ...]:
    """Return the axes of size above 1: over others nothing is sent.

    >>> import hfjax
    >>> in_use(hfjax.make_mesh(data=2, tensor=4), BATCH_AXES)
    ('data',)
    """
    return tuple(axis for axis in axes if mesh.shape[axis] > 1)


def size_of(axes: Sequence[str], mesh: Mesh | Mapping[str, int]) -> int:
    """Return the number of shards into which these axes split a dimension.

    >>> import hfjax
    >>> size_of(TENSOR_AXES, hfjax.make_mesh(data=2, tensor=4))
    4
    """
    shape = mesh.shape if isinstance(mesh, Mesh) else mesh
    return math.prod(shape[axis] for axis in axes)


def meanings(mesh: Mesh) -> Mapping[str, Axis]:
    """Return what each axis of a mesh does: if row is larger than 1, tensor is a grid's axis.

    >>> from hfjax import make_mesh
    >>> meanings(make_mesh(row=2, tensor=4))["tensor"] == MESH_AXES["row"]
    True
    """
    return (
        MESH_AXES if mesh.shape[ROW_AXIS] == 1 else {**MESH_AXES, COLUMN_AXIS: MESH_AXES[ROW_AXIS]}
    )


def grid_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of the device grid, if there is one: along them arrays stay sharded.

    >>> from hfjax import make_mesh
    >>> grid_axes(make_mesh(row=2, tensor=4)), grid_axes(make_mesh(data=2, tensor=4))
    (('row', 'tensor'), ())
    """
    return in_use(
        mesh, [axis for axis, meaning in meanings(mesh).items() if meaning.keeps_sharded == ANY]
    )


def auto_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes in use whose collectives XLA's partitioner derives: on a grid none.

    >>> from hfjax import make_mesh
    >>> auto_axes(make_mesh(data=2, tensor=4)), auto_axes(make_mesh(row=2, tensor=4))
    (('tensor',), ())
    """
    return in_use(mesh, [axis for axis, meaning in meanings(mesh).items() if meaning.auto])


def manual_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes whose collectives our source writes: on a grid all."""
    return tuple(axis for axis, meaning in meanings(mesh).items() if not meaning.auto)


def active_batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes that shard the batch, as a model may name them in a collective.

    Empty where all have size 1: XLA's partitioner refuses a collective over single devices.
    """
    return batch_axes(mesh) if in_use(mesh, BATCH_AXES) else ()


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes that shard a batch: data and fsdp, and expert where it is in use.

    >>> import hfjax
    >>> batch_axes(hfjax.make_mesh(data=8))
    ('data', 'fsdp')
    """
    return tuple(axis for axis in BATCH_AXES if axis not in unused_axes(mesh))


def unused_axes(mesh: Mesh) -> set[str]:
    """Return the axes of size 1 that a rule `*` leaves out: those that most meshes do not use.

    >>> import hfjax
    >>> sorted(unused_axes(hfjax.make_mesh(data=4, context=2)))
    ['expert']
    """
    rare = [
        name
        for name, axis in MESH_AXES.items()
        if axis.sequence or (axis.batch and axis.keeps_sharded)
    ]
    return set(rare) - set(in_use(mesh, rare))


def names_of(spec: P) -> list[tuple[str, ...]]:
    """Return the names of the axes over which a spec splits each dimension.

    >>> names_of(P("x", None, ("y", "z")))
    [('x',), (), ('y', 'z')]
    """
    return [
        (x,) if isinstance(x, str) else x if isinstance(x, tuple) else () for x in spec.partitions
    ]


def show_sizes(shape: dict[str, int]) -> str:
    """Return the sizes of axes as text."""
    sizes = {axis: size for axis, size in shape.items() if size != 1} or shape
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items())


def on_one_device(function: Callable[[], Any]) -> Callable[[], Any]:
    """Return the function with data axes bound to size 1, so that models may sum over them."""
    for axis in DATA_AXES:
        function = jax.vmap(function, out_axes=None, axis_name=axis, axis_size=1)
    return function
