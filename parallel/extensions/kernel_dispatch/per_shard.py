"""A function with a gradient of its own that runs on each tensor shard separately.

No partitioner can shard a kernel. The residuals of its forward pass leave the shard_map and enter
it again, each with a spec: JAX itself would shard them over the axes of the surrounding shard_map
as well, and XLA refuses that.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from hfjax.parallel.engine.comm_plan import shard_map_over
from hfjax.parallel.mesh import auto_axes
from hfjax.parallel.spmd.rule_calls import local_map


@dataclass(frozen=True, eq=False)
class ShardedFunction:
    """A function and its gradient, each run on tensor shards.

    `forward(*operands)` returns (result, residuals), `backward(operands, residuals, gradient)` the
    gradients. The specs say how operands, result and residuals are sharded over the tensor axes.
    """

    mesh: Mesh
    forward: Callable
    backward: Callable
    operand_specs: tuple
    result_spec: Any
    residual_specs: Any

    def __call__(self, *operands: jax.Array) -> jax.Array:
        """Return the result; in a program traced on the global batch, for local examples."""
        run = lambda *operands: _run(self, operands)
        return local_map(run)(*operands)

    def map(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """Return the function, run on each shard."""
        axes = auto_axes(self.mesh)
        return shard_map_over(function, axes, in_specs, out_specs) if axes else function


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(shards: ShardedFunction, operands: tuple) -> jax.Array:
    return _forward(shards, operands)[0]


def _forward(shards: ShardedFunction, operands: tuple) -> tuple[Any, tuple]:
    run = shards.map(
        shards.forward, shards.operand_specs, (shards.result_spec, shards.residual_specs)
    )
    result, residuals = run(*operands)
    return result, (operands, residuals)


def _backward(shards: ShardedFunction, operands_and_residuals: tuple, gradient: jax.Array) -> tuple:
    in_specs = (shards.operand_specs, shards.residual_specs, shards.result_spec)
    return (
        shards.map(shards.backward, in_specs, shards.operand_specs)(
            *operands_and_residuals, gradient
        ),
    )


_run.defvjp(_forward, _backward)
