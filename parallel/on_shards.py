"""Functions that run on each tensor shard by themselves, within the data plane.

`on_tensor_shards` is for moves of one array over other axes, `OnShards` for a function with a
gradient of its own: no partitioner can split a kernel. What its forward pass keeps leaves the
shards and enters them again, each array placed by name: JAX itself would place it over the axes of
the shard_map around as well, and XLA refuses that.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec as P

from hfjax.parallel.in_parts.named_calls import is_recording, own_rows
from hfjax.parallel.mesh import partitioned
from hfjax.parallel.placement import Dims


@dataclass(frozen=True, eq=False)
class OnShards:
    """`forward(*operands) -> (result, kept)`, `backward(operands, kept, gradient) -> gradients`.

    The specs say how operands, the result and what is kept lie over the tensor axes.
    """

    mesh: Mesh
    forward: Callable
    backward: Callable
    operands: tuple
    result: Any
    kept: Any

    def __call__(self, *operands: Any) -> Any:
        """Return the result; in a program that is traced with all rows, on this device's own."""
        run = lambda *operands: _run(self, operands)
        return (own_rows(run) if is_recording() else run)(*operands)

    def map(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """Return the function, run on each shard."""
        axes = partitioned(self.mesh)
        return mapped(function, axes, in_specs, out_specs) if axes else function


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


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(shards: OnShards, operands: tuple) -> Any:
    return _forward(shards, operands)[0]


def _forward(shards: OnShards, operands: tuple) -> tuple[Any, tuple]:
    run = shards.map(shards.forward, shards.operands, (shards.result, shards.kept))
    result, kept = run(*operands)
    return result, (operands, kept)


def _backward(shards: OnShards, saved: tuple, gradient: Any) -> tuple:
    in_specs = (shards.operands, shards.kept, shards.result)
    return (shards.map(shards.backward, in_specs, shards.operands)(*saved, gradient),)


_run.defvjp(_forward, _backward)
