"""Layers that run on chunks of the batch, one after the other (`tensor_overlap_chunks`).

The collectives of a layer over tensor wait for its matmuls, and its matmuls for them. Those of
two chunks do not wait for each other: while the all-reduces of one are in flight, the matmuls of
the other run (Domino, Wang et al., 2024). Between the layers the chunks stay apart, so that the end
of a layer hides its collectives as well. The layer's parameters are gathered once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from hfjax.parallel.spmd.global_batch import GlobalBatch, variable_split
from hfjax.parallel.spmd.partition_context import CommEvent
from hfjax.parallel.spmd.placements import (
    BATCH_SPLIT,
    AxisGroup,
    ShardedValue,
    is_distributed,
    placement_of,
)
from hfjax.utils.paths import join_path


@partial(
    jax.tree_util.register_dataclass, data_fields=["chunks"], meta_fields=["chunk_size", "in_order"]
)
@dataclass(frozen=True)
class BatchChunks:
    """Activations between layers, in chunks of the batch."""

    chunks: tuple[Any, ...]
    chunk_size: int  # of each chunk
    in_order: bool  # a chunk begins after the chunk before it has ended

    @classmethod
    def of(
        cls, x: Any, batch_size: int, count: int, embed_first_chunk: Callable, in_order: bool
    ) -> "BatchChunks":
        """Return the output of `embed` for a device's batch, in chunks.

        An array that does not begin with the batch dimension, or does not divide, is refused.
        `embed_first_chunk(count)` is the output of `embed` for the first chunk.
        """
        _check_batch_dim(x, batch_size, f"tensor_overlap_chunks={count}")
        if batch_size % count:
            fits = [n for n in range(2, batch_size + 1) if batch_size % n == 0]
            raise ValueError(
                f"tensor_overlap_chunks={count}: a device has {batch_size} examples in a "
                "microbatch, which do not divide: "
                f"{f'{fits} would do' if fits else 'leave it out'}. Or take a larger batch."
            )
        _check_ambiguous(embed_first_chunk, x, batch_size, count)
        chunk_of = lambda i: jax.tree.map(lambda x: slice_chunk(x, i, count), x)
        return cls(tuple(map(chunk_of, range(count))), batch_size // count, in_order)

    def concat(self) -> Any:
        """Return the chunks concatenated; refuse other outputs of the last layer."""
        who = f"tensor_overlap_chunks={len(self.chunks)}, after the last layer"
        _check_batch_dim(self.chunks[0], self.chunk_size, who, "a part has")
        return jax.tree.map(lambda *x: jnp.concatenate(x), *self.chunks)


def _check_batch_dim(x: Any, batch_size: int, who: str, has: str = "a device has") -> None:
    """Refuse arrays whose first dimension does not have the batch size."""
    leaves = jax.tree.leaves(x, is_leaf=is_distributed)
    on_devices = any(map(is_distributed, leaves))  # each has some examples
    off_batch_dim = lambda v: on_devices and placement_of(v) != BATCH_SPLIT
    leaves = [(v.x if is_distributed(v) else v, off_batch_dim(v)) for v in leaves]
    if wrong := [leaf for leaf, off in leaves if off or jnp.shape(leaf)[:1] != (batch_size,)]:
        raise ValueError(
            f"{who}: what goes from layer to layer is not split by examples: {_shapes(wrong)} "
            f"where {has} {batch_size} examples in a microbatch. {BATCH_FIRST}"
        )


def _check_ambiguous(embed: Callable, x: Any, batch_size: int, count: int) -> None:
    """Refuse an array whose first dimension has the batch size but is another dimension.

    The size alone does not tell where an array has it twice, or a multiple of it (batch and heads
    in one). `embed` of the first chunk does: there a batch dimension is smaller.
    """
    repeats = lambda leaf: any(n and n % batch_size == 0 for n in jnp.shape(leaf)[1:])
    if not any(map(repeats, jax.tree.leaves(x))):
        return

    who = f"tensor_overlap_chunks={count}, of {batch_size} examples in a microbatch"
    try:
        outs = jax.eval_shape(partial(embed, count))
    except Exception as error:
        raise ValueError(
            f"{who}: arrays of {_shapes(jax.tree.leaves(x))} have this size, or a multiple, twice, "
            f"and embed of {batch_size // count} examples fails ({type(error).__name__}: {error}), "
            "so hfjax cannot tell which dimension has the examples. Take another number of "
            "examples, or leave tensor_overlap_chunks out."
        ) from error
    _check_batch_dim(
        outs, batch_size // count, f"{who}, and of {batch_size // count} to tell which they are"
    )


def _shapes(leaves: list) -> str:
    return ", ".join(str(list(jnp.shape(leaf))) for leaf in leaves)


BATCH_FIRST = (
    "Let each array begin with the examples of the batch, or leave tensor_overlap_chunks out."
)


def slice_chunk(x: jax.Array, number: int, count: int) -> jax.Array:
    """Return one of `count` chunks along an array's batch dimension."""
    size = x.shape[0] // count
    return lax.slice_in_dim(x, number * size, (number + 1) * size)


def run_chunks(
    run: Callable, global_batch: GlobalBatch, name: str, x: Any, variables: nnx.State | None
) -> tuple[Any, Any]:
    """Return run(global_batch, x, variables), the pair (output, written), chunk by chunk.

    Args:
        run: The layer, on the batch as the first argument says.
        global_batch: How a layer sees the global batch.
        name: That of the layer.
        x: Its input, unsplit or as `BatchChunks`.
        variables: A state; what has a batch dimension is split like the batch.
    """
    if not isinstance(x, BatchChunks):
        return run(global_batch, x, variables)
    outputs: list[Any] = []
    written: Any = None
    for number, chunk in enumerate(x.chunks):
        if outputs and x.in_order:
            chunk, outputs[-1] = lax.optimization_barrier((chunk, outputs[-1]))
        y, written = run(global_batch, chunk, _chunk_variables(variables, number, len(x.chunks)))
        _check_unwritten(written, len(x.chunks))
        outputs.append(y)
    if global_batch.group.size == 1:
        global_batch = _chunks_as_devices(global_batch, len(x.chunks))
        chunk = jax.tree.map(ShardedValue, x.chunks[0])
        trace = lambda: run(global_batch, chunk, _chunk_variables(variables, 0, len(x.chunks)))
        jax.make_jaxpr(trace, axis_env=[("part", len(x.chunks))])()
    _check_independent(global_batch.component_comms.get(name, ()), len(x.chunks))
    return replace(x, chunks=tuple(outputs)), written


def _chunks_as_devices(global_batch: GlobalBatch, count: int) -> GlobalBatch:
    group, inner = AxisGroup(("part",), count), global_batch.inner
    if inner is not None:
        inner = replace(inner, groups=tuple(replace(s, blocks=count) for s in inner.groups))
    return GlobalBatch(group, global_batch.run_partitioned, inner)


def _check_independent(comms: Sequence[CommEvent], count: int) -> None:
    """Refuse operations across examples, or that number them: a chunk has not all of them."""
    if crossing := [event for event in comms if event.action != "draw"]:
        raise ValueError(
            f"tensor_overlap_chunks={count}: {crossing[0].line}: {crossing[0].operation}: "
            "a layer mixes examples of the batch, or counts them, and sees a chunk of them at a "
            "time. Leave tensor_overlap_chunks out."
        )


def _chunk_variables(variables: nnx.State | None, number: int, count: int) -> nnx.State | None:
    """Return what a chunk reads: its own examples, and random keys of its own."""

    if variables is None:
        return None
    chunk_of = lambda v: v.replace(chunk_value(v, v.get_raw_value(), number, count))
    return nnx.from_flat_state([(keys, chunk_of(v)) for keys, v in nnx.to_flat_state(variables)])


def chunk_value(variable: Any, value: jax.Array, number: int, count: int) -> jax.Array:
    """Return a variable's value for a chunk, given that for the batch."""
    if isinstance(variable, nnx.Variable) and variable_split(variable.replace(value)):
        return slice_chunk(value, number, count)
    if number and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.fold_in(value, number)
    return value


def _check_unwritten(written: nnx.State | None, count: int) -> None:
    """Refuse to write what follows from some of the examples, but for random number counts."""
    flat = [] if written is None else nnx.to_flat_state(written)
    if names := [join_path(keys) for keys, v in flat if not isinstance(v, nnx.RngState)]:
        raise ValueError(
            f"tensor_overlap_chunks={count}: a layer writes to {', '.join(names)}: "
            f"{SOME_EXAMPLES}. {NO_CHUNK_STATISTICS}"
        )


SOME_EXAMPLES = "a layer sees only a part of the examples at a time"
NO_CHUNK_STATISTICS = "Leave tensor_overlap_chunks out, or normalise without running statistics."
