"""Layers that run on chunks of the batch, one after the other (`tensor_overlap_chunks`).

The collectives of a layer over tensor wait for its matmuls, and its matmuls for them. Those of
two chunks do not wait for each other: while the all-reduces of one are in flight, the matmuls of
the other run (Domino, Wang et al., 2024). Between the layers the chunks stay apart, so that the end
of a layer hides its collectives as well. The layer's parameters are gathered once.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from hfjax.parallel.spmd.global_batch import GlobalBatch, variable_split
from hfjax.parallel.spmd.nested import Nested
from hfjax.parallel.spmd.placements import (
    BATCH_SPLIT,
    ShardedValue,
    Split,
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
        """Return the chunks concatenated."""
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
    count, microbatch = len(x.chunks), _chunks_as_devices(global_batch, len(x.chunks))
    who = f"tensor_overlap_chunks={count}, after {name}"

    def run_chunk(view: GlobalBatch, number: int, chunk: Any) -> tuple[Any, Any]:
        y, written = run(view, chunk, _chunk_variables(variables, number, count))
        _check_batch_dim(y, x.chunk_size, who, "a part has")
        return y, written

    chunks = [_chunk_of_microbatch(global_batch, chunk, count) for chunk in x.chunks]
    _check_independent(microbatch, name, lambda view: run_chunk(view, 0, chunks[0]), count)
    outputs: list[Any] = []
    written: Any = None
    for number, chunk in enumerate(chunks):
        if outputs and x.in_order:
            chunk, outputs[-1] = lax.optimization_barrier((chunk, outputs[-1]))
        y, written = run_chunk(microbatch, number, chunk)
        _check_unwritten(written, count)
        outputs.append(y)
    return replace(
        x, chunks=tuple(_chunk_of_device(global_batch, y, count) for y in outputs)
    ), written


def _chunks_as_devices(global_batch: GlobalBatch, count: int) -> GlobalBatch:
    """Return how a layer that runs on a chunk sees the global batch: in full.

    Each device stands for `count` that have a chunk each. They do not communicate.
    """
    group, inner = global_batch.group, global_batch.inner
    if inner is not None:
        groups = tuple(replace(g, blocks=g.blocks * count) for g in inner.groups)
        inner = replace(inner, groups=groups)
    comms = {} if group.size == 1 else global_batch.component_comms
    group = replace(group, size=group.size * count)
    return replace(global_batch, group=group, inner=inner, component_comms=comms)


def _chunk_of_microbatch(global_batch: GlobalBatch, chunk: Any, count: int) -> Any:
    """Return a chunk as values of the microbatch that `_chunks_as_devices` shards."""
    values = jax.tree.map(ShardedValue, chunk) if global_batch.group.size == 1 else chunk
    return _map_blocks(lambda blocks: blocks * count, values)


def _chunk_of_device(global_batch: GlobalBatch, values: Any, count: int) -> Any:
    """Return the chunk that these values of the microbatch are: the inverse."""
    if global_batch.group.size == 1:
        values = jax.tree.map(lambda v: v.x, values, is_leaf=is_distributed)
    return _map_blocks(lambda blocks: blocks // count, values)


def _map_blocks(function: Callable[[int], int], tree: Any) -> Any:
    """Return values with new blocks of the examples that an inner group shards, if one does."""

    def convert(value: Any) -> Any:
        if not isinstance(value, Nested):
            return value
        split = value.placement
        if isinstance(split, Split) and split.dim == BATCH_SPLIT.dim:
            split = Split(split.dim, function(split.blocks))
        return replace(value, x=convert(value.x), placement=split)

    return jax.tree.map(convert, tree, is_leaf=lambda v: isinstance(v, Nested))


def _check_independent(view: GlobalBatch, name: str, run: Callable, count: int) -> None:
    """Refuse operations across examples, or that number them: a chunk has not all of them."""
    group = replace(view.group, axes=("part",))
    alone = replace(view, group=group, component_comms={}, inner_component_comms={})
    jax.make_jaxpr(lambda: run(alone), axis_env=[("part", group.size)])()
    crossing = [event for event in alone.component_comms[name] if event.action != "draw"]
    if crossing:
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
