"""Functions that run on each tensor shard by themselves, within the data plane."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from hfjax.parallel.placement import Dims


def mapped(function: Callable, axes: Iterable[str], in_specs: Any, out_specs: Any) -> Callable:
    """Return the function, run by itself along axes that nothing around is manual over."""
    specs: dict[str, Any] = {"in_specs": in_specs, "out_specs": out_specs}
    return jax.shard_map(function, axis_names=set(axes), check_vma=False, **specs)


def on_tensor_shards(move: Callable, split: Dims, ndim: int) -> Callable:
    """Return `move` run on each tensor shard by itself.

    Left to the partitioner, a gather or scatter over data axes beside a tensor axis is preceded by
    a gather over the tensor axis, and sends the whole array.
    """
    if not split:
        return move
    at = {ndim + dim: axes for dim, axes in split}
    spec = P(*(at.get(dim) for dim in range(ndim)))
    names = {axis for axes in at.values() for axis in axes}
    specs: dict[str, Any] = {"in_specs": spec, "out_specs": spec}
    return jax.shard_map(move, axis_names=names, check_vma=False, **specs)
