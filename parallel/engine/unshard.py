"""Unshard a parameter: copy, cast, all-gather; backward, reduce its gradient (reduce_gradients.py).

Inside the engine a parameter is `ShardedParam`: this device's shard, and the slot that its gradient
goes to. The model gets the full parameter in the compute dtype. Each gather and scatter is a
`DimCollective`, by XLA or a kernel, as chosen when the step is built.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from hfjax.parallel.engine.comm_plan import CommPlan, gather
from hfjax.parallel.engine.reduce_gradients import reduce_gradient
from hfjax.parallel.offload.host_memory import to_device
from hfjax.utils.paths import Tree


@partial(jax.tree_util.register_dataclass, data_fields=["value", "slot"], meta_fields=["comm_plan"])
@dataclass
class ShardedParam:
    """A device's shard of one parameter; `slot` takes its gradient (None: no gradient)."""

    value: jax.Array
    slot: jax.Array | None
    comm_plan: CommPlan

    @property
    def full_shape(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the unsharded parameter."""
        return jax.ShapeDtypeStruct(self.comm_plan.shape, self.comm_plan.compute_dtype)

    def unshard(self) -> jax.Array:
        """Return the full parameter in the compute dtype."""
        plan = self.comm_plan
        plan.on_read(plan.path)
        if self.slot is None:
            return _gather(plan, self.value)
        return _unshard(plan, self.value, self.slot)


def unsharded(path: str, value: jax.Array, slot: jax.Array | None = None) -> ShardedParam:
    """Return a full parameter as a `ShardedParam`: unsharding it sends nothing."""
    dtype, ignore = value.dtype, lambda path: None
    plan = CommPlan(path, value.shape, (), (), (), (), dtype, dtype, dtype, ignore)
    return ShardedParam(value, slot, plan)


def is_sharded_param(x: object) -> bool:
    """Return whether this is a `ShardedParam`."""
    return isinstance(x, ShardedParam)


def unshard(tree: Tree) -> Any:
    """Return a tree with full parameters in place of sharded ones."""
    return jax.tree.map(
        lambda x: x.unshard() if is_sharded_param(x) else x, tree, is_leaf=is_sharded_param
    )


def _gather(plan: CommPlan, value: jax.Array) -> jax.Array:
    full = gather(to_device(value), plan.gathers, plan.gather_dtype, plan.tensor_dims)
    return full.astype(plan.compute_dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unshard(plan: CommPlan, value: jax.Array, slot: jax.Array) -> jax.Array:
    return _gather(plan, value)


def _forward(plan: CommPlan, value: jax.Array, slot: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _gather(plan, value), jnp.zeros((0,), slot.dtype)


def _backward(plan: CommPlan, like: jax.Array, cotangent: jax.Array) -> tuple[None, jax.Array]:
    return None, reduce_gradient(plan, cotangent, like.dtype)


_unshard.defvjp(_forward, _backward)
