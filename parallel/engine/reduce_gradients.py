"""How gradients are reduced over the devices: in the backward pass, and after the last microbatch.

`reduce_gradient` is the backward pass of every unshard: it reduce-scatters what accumulates sharded
(ZERO2, FSDP), in each microbatch; with one microbatch it also all-reduces large unsharded ones.
`Reduction` does the rest, once, after the last microbatch: it reduce-scatters over axes that shard
only optimizer state (ZERO1), and sums over the remaining batch, stage and sequence axes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
from jax import lax
from jax.typing import DTypeLike

from hfjax.parallel.engine.comm_plan import (
    ChooseKernel,
    CommPlan,
    collectives,
    map_tensor_shards,
    scatter,
    use_xla,
)
from hfjax.parallel.mesh import BATCH_AXES, TENSOR_AXES, in_use, size_of
from hfjax.parallel.param_specs import Dims, ParamSpecs, entries_of, keep_axes
from hfjax.parallel.precision.dtypes import Precision
from hfjax.parallel.strategy import Axes
from hfjax.utils.paths import Flat


def one_scatter_per_axis(dims: Dims) -> Dims:
    """Return a scatter over several axes as one per axis: the axis within a node first."""
    return tuple((dim, (axis,)) for dim, axes in dims for axis in axes)


def reduce_gradient(plan: CommPlan, gradient: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return the gradient of a full parameter in the shape and dtype in which it accumulates.

    It is scattered, or summed over `psum_axes`, or neither; it is sent and added in `reduce_dtype`,
    if at all.
    """
    sent, axes = plan.scatters or plan.psum_axes, plan.psum_axes
    gradient = gradient.astype(plan.reduce_dtype if sent else dtype)
    gradient = scatter(gradient, plan.scatters, plan.tensor_dims)
    return (lax.psum(gradient, axes) if axes else gradient).astype(dtype)


def mean_gradients(gradients: Flat, scale: jax.Array, dtypes: Mapping[str, DTypeLike]) -> Flat:
    """Return the gradients of a mean from those of a total: times a scale, in these dtypes."""
    return {p: (g * scale.astype(g.dtype)).astype(dtypes[p]) for p, g in gradients.items()}


@dataclass(frozen=True)
class Reduction:
    """The gradient reduction after the last microbatch."""

    precision: Precision
    hierarchical: bool
    choose_kernel: ChooseKernel  # of scatters, as `collectives` takes it
    axes: Axes  # along which each device has a gradient of its own
    summed_axes: Mapping[str, Axes]  # path -> axes over which its gradient is summed already

    def __call__(self, gradients: Flat, param_specs: Mapping[str, ParamSpecs]) -> Flat:
        """Return the gradients summed over all devices, placed as optimizer state."""
        groups: dict[Axes, Flat] = {}
        for path, gradient in gradients.items():
            dtype = self.precision.at(path).of(param_specs[path].dtype).reduce
            shard, axes = self._scatter(param_specs[path], gradient.astype(dtype))
            groups.setdefault(axes, {})[path] = shard
        summed: Flat = {}
        for axes, group in groups.items():
            mesh = param_specs[next(iter(group))].mesh
            batch_axes = in_use(mesh, BATCH_AXES)
            if self.hierarchical and len(batch_axes) > 1 and set(batch_axes) <= set(axes):
                rest = tuple(axis for axis in axes if axis not in BATCH_AXES)
                group = lax.psum(group, rest) if rest else group
                summed |= {path: _sum_by_node(param_specs[path], g) for path, g in group.items()}
            else:
                summed |= lax.psum(group, axes) if axes else group
        return {path: summed[path].astype(gradient.dtype) for path, gradient in gradients.items()}

    def _scatter(self, spec: ParamSpecs, gradient: jax.Array) -> tuple[jax.Array, Axes]:
        """Scatter over axes that shard optimizer state only; return the axes left to sum."""
        todo = spec.optimizer_only_dims("gradient")
        todo = one_scatter_per_axis(todo) if self.hierarchical else todo
        choose_kernel = use_xla if spec.tensor_dims else self.choose_kernel
        scatters = collectives(
            "reduce_scatter", todo, gradient, gradient.dtype, spec.mesh, choose_kernel
        )
        gradient = scatter(gradient, scatters, spec.tensor_dims)
        done = spec.split_axes("gradient", "optimizer_state").union(
            spec.sharded_compute, self.summed_axes.get(spec.path, ())
        )
        return gradient, tuple(axis for axis in self.axes if axis not in done)


def _sum_by_node(spec: ParamSpecs, gradient: jax.Array) -> jax.Array:
    """Scatter over the innermost axis (in a node), add over the others, gather over it."""
    *across, inside = in_use(spec.mesh, BATCH_AXES)
    size = size_of((inside,), spec.mesh)
    entries = entries_of(
        keep_axes(spec.parameter, (*TENSOR_AXES, *spec.sharded_compute)), len(spec.shape)
    )
    free = [d for d, n in enumerate(spec.shape) if not entries[d] and n % size == 0]
    if not free:
        return lax.psum(gradient, BATCH_AXES)

    def add(gradient: jax.Array) -> jax.Array:
        shard = lax.psum_scatter(gradient, inside, scatter_dimension=free[0], tiled=True)
        shard = lax.psum(shard, tuple(across))
        return lax.all_gather(shard, inside, axis=free[0], tiled=True, to="invarying")

    return map_tensor_shards(add, spec.tensor_dims, len(spec.shape))(gradient)
