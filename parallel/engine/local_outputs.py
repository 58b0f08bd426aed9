"""The outputs of a model in a training step: arrays with the examples of each device.

`step.gradients(…, returns=("outputs",))` returns them, and a pipeline predicts them. A microbatch
returns those of its examples, so each output has to begin with these.
"""

from typing import Any

import jax

from hfjax.parallel.spmd.global_batch import GlobalBatch
from hfjax.parallel.spmd.placements import (
    BATCH_SPLIT,
    ShardedValue,
    is_distributed,
    local_array,
    placement_of,
)


def local_outputs(global_batch: GlobalBatch, outputs: Any, num_examples: int) -> Any:
    """Return a device's examples of the outputs of a microbatch, which are values.

    Outputs that are not sharded along their examples become so.
    """
    group, outputs = global_batch.group, global_batch.replicate_inner(outputs)

    def to_sharded(value: Any) -> Any:
        is_batched = global_batch.shape_dtype(value)[0][:1] == (num_examples * group.size,)
        return ShardedValue(group.redistribute(value, BATCH_SPLIT)) if is_batched else value

    if group.size > 1:
        outputs = jax.tree.map(to_sharded, outputs, is_leaf=is_distributed)
    return local_examples(global_batch, outputs, num_examples)


def local_examples(global_batch: GlobalBatch, outputs: Any, *leading_shape: int) -> Any:
    """Return a device's examples of outputs; devices may still hold parts of each.

    Args:
        global_batch: Of the step.
        outputs: Values, each with the dimensions of `leading_shape` first.
        leading_shape: In a pipeline the number of microbatches; the examples of each.
    """
    num_dims = len(leading_shape)

    def local(keys: Any, value: Any) -> jax.Array:
        x = local_array(value)
        is_replicated = global_batch.group.size > 1 and placement_of(value) != BATCH_SPLIT
        if x.shape[:num_dims] != leading_shape or is_replicated:
            name = f"output{jax.tree_util.keystr(keys)} of a microbatch"
            shape = list(global_batch.shape_dtype(value)[0][num_dims - 1 :])
            raise ValueError(
                f"{name}, {shape}, does not begin with its examples, as each does in a pipeline "
                "and in step.gradients. Return what belongs to examples; a number for all "
                "examples is a metric of the loss."
            )
        return x

    return jax.tree_util.tree_map_with_path(local, outputs, is_leaf=is_distributed)


def full_examples(global_batch: GlobalBatch, outputs: Any) -> Any:
    """Return outputs of a device's examples, of which devices may hold parts, in full."""
    values = global_batch.replicate_inner(global_batch.as_sharded(outputs))
    return jax.tree.map(local_array, values, is_leaf=is_distributed)
