"""The one reduction after the last microbatch: what is not scattered yet is scattered or summed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from hfjax.parallel.mesh import BATCH_AXES
from hfjax.parallel.placement import auto_part, entries_of, manual_part, size_of
from hfjax.parallel.strategy import Axes

Flat = dict[str, Any]  # path -> array, for instance {"layers/mlp/up/kernel": …}


@dataclass(frozen=True)
class Placed:
    """One parameter and where it, its accumulated gradient and its moments lie."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    parameter: P
    gradient: P
    moment: P


def reduce_gradients(
    gradients: Flat, placed: Mapping[str, Placed], mesh: Mesh, dtype: Any, hierarchical: bool
) -> Flat:
    """Return the gradients summed over the batch axes, each placed as its moments."""
    groups: dict[Axes, Flat] = {}
    for path, gradient in gradients.items():
        shard, axes = _scatter(placed[path], gradient.astype(dtype), hierarchical)
        groups.setdefault(axes, {})[path] = shard
    summed: Flat = {}
    for axes, group in groups.items():
        if hierarchical and set(axes) == set(BATCH_AXES):
            summed |= {p: _sum_by_node(g, placed[p].gradient, mesh) for p, g in group.items()}
        else:
            summed |= lax.psum(group, axes) if axes else group
    return {path: summed[path].astype(gradient.dtype) for path, gradient in gradients.items()}


def _scatter(p: Placed, gradient: jax.Array, hierarchical: bool) -> tuple[jax.Array, Axes]:
    """Scatter what the moments are split by and the gradient is not; return the axes to sum."""
    done = {axis for axes in entries_of(manual_part(p.gradient), len(p.shape)) for axis in axes}
    for dim, axes in enumerate(entries_of(manual_part(p.moment), len(p.shape))):
        axes = tuple(axis for axis in axes if axis not in done)
        for level in [(axis,) for axis in axes] if hierarchical else [axes] if axes else []:
            gradient = lax.psum_scatter(gradient, level, scatter_dimension=dim, tiled=True)
        done |= set(axes)
    return gradient, tuple(axis for axis in BATCH_AXES if axis not in done)


def _sum_by_node(gradient: jax.Array, spec: P, mesh: Mesh) -> jax.Array:
    """Scatter over fsdp (inside the node), add over data (across nodes), gather over fsdp."""
    size = size_of(("fsdp",), mesh)
    taken = entries_of(auto_part(spec), gradient.ndim)
    for dim, length in enumerate(gradient.shape):
        if not taken[dim] and length % size == 0:
            shard = lax.psum_scatter(gradient, "fsdp", scatter_dimension=dim, tiled=True)
            shard = lax.psum(shard, "data")
            return lax.all_gather(shard, "fsdp", axis=dim, tiled=True, to="invarying")
    return lax.psum(gradient, BATCH_AXES)
