"""The ops of a model where devices share sequences: attention across the devices.

Model and loss see full sequences. Their operations run on the positions of a device
(parallel/spmd); their attention is kept as a call by name, with a rule that runs it across the
devices. Before it runs, `read_model` finds which attentions the model calls, hence the option that
sends least: `SequenceProbe`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import jax
from jax.extend import source_info_util
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

from hfjax.pallas_kernels.attention.mask import Mask
from hfjax.parallel.engine import model_ops
from hfjax.parallel.engine.comm_plan import shard_map_over
from hfjax.parallel.extensions.context_parallel.attention_calls import (
    AttentionRule,
    find_attention_calls,
    is_attention,
)
from hfjax.parallel.extensions.context_parallel.comm_kinds import (
    ContextChoice,
    choose_comm_kind,
)
from hfjax.parallel.extensions.context_parallel.ring_attention import Ring
from hfjax.parallel.extensions.context_parallel.ring_block import (
    AttentionBlock,
    MaskedBlock,
    RingBlock,
    ZigzagBlock,
)
from hfjax.parallel.extensions.context_parallel.sequence_layout import SequenceLayout
from hfjax.parallel.extensions.context_parallel.ulysses import HeadAllToAll
from hfjax.parallel.extensions.kernel_dispatch.ops import KernelOps
from hfjax.parallel.extensions.kernel_dispatch.per_shard import ShardedFunction
from hfjax.parallel.mesh import SEQUENCE_AXES, TENSOR_AXES, in_use, size_of
from hfjax.parallel.settings import ContextParallel
from hfjax.parallel.spmd.interpreter import run_partitioned
from hfjax.parallel.spmd.nested import InnerAxes
from hfjax.parallel.spmd.partition_context import CommEvent, PartitionContext, forget_programs
from hfjax.parallel.spmd.placements import AxisGroup, ShardedValue, Split, is_distributed
from hfjax.parallel.spmd.rule_calls import RuleCall, keep_as_call
from hfjax.utils.tables import human

source_info_util.register_exclusion(__file__)  # report the user's line for an attention

HEADS = P(None, None, TENSOR_AXES)  # of [B, S, H, D]
POSITIONS = Split(1)


@dataclass(frozen=True)
class SequenceProbe:
    """What a probe of a model finds along its sequences.

    Attributes:
        choice: How the devices communicate.
        length: Positions of full sequences.
        dims: The sequence dimension of each array of a batch, or None.
    """

    choice: ContextChoice
    length: int
    dims: Any


@final
@dataclass(frozen=True, eq=False)
class ContextParallelOps(KernelOps):
    """Shards sequences, and attends across the devices that share a sequence.

    Attributes:
        settings: The user's settings.
        ring_refusal: Why keys and values cannot go around a ring, if they cannot.
        probes: What the probe of the model found; empty before it.
        unknown_lengths: The lengths of which modules asked for runs before it.
    """

    settings: ContextParallel
    ring_refusal: str | None = None
    probes: list[SequenceProbe] = field(default_factory=list)
    unknown_lengths: list[int] = field(default_factory=list)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes whose devices share a sequence."""
        return in_use(self.mesh, SEQUENCE_AXES)

    @property
    def devices(self) -> int:
        """How many devices share a sequence."""
        return size_of(self.axes, self.mesh)

    def reads_model(self) -> bool:
        """Return that how devices attend depends on the attentions that the model calls."""
        return True

    def read_model(self, batch: Any, batch_group: AxisGroup, trace: Callable) -> None:
        """Choose how the devices attend, given the attentions that the model calls."""
        dims = sequence_dims(batch, self.settings.sequence)
        length = sequence_length(batch, dims)
        group = AxisGroup((*batch_group.axes, *self.axes), batch_group.size * self.devices)
        self.probes.clear()
        self.unknown_lengths.clear()
        calls = list(find_attention_calls(trace(batch, group), length, batch_group.size, self.mesh))
        choice = choose_comm_kind(self.settings, self.devices, calls, self.ring_refusal)
        choice.seq_layout.check_length(length, "a batch")
        self.probes.append(SequenceProbe(choice, length, dims))
        if any(self.run_length(length) != length for length in self.unknown_lengths):
            forget_programs()  # a layer was traced with another answer

    def context_choice(self) -> ContextChoice | None:
        """Return how the devices communicate; None before the model is read."""
        return self.probes[0].choice if self.probes else None

    @property
    def probe_result(self) -> SequenceProbe:
        """What the probe of the model found."""
        return self.probes[0]

    @property
    def seq_layout(self) -> SequenceLayout:
        """How positions are sharded."""
        return self.probe_result.choice.seq_layout

    # -- positions ------------------------------------------------------------------------------

    def inner_groups(self) -> tuple[AxisGroup, ...]:
        """Return the group that shards positions, once the probe has found their layout."""
        if not self.probes:
            return ()
        return (AxisGroup(self.axes, self.devices, "positions", self.seq_layout.block_ids),)

    def run_length(self, length: int) -> int:
        """Return how many consecutive positions of a sequence one device has."""
        if not self.probes:
            self.unknown_lengths.append(length)
            return length
        return self.seq_layout.run_length(length) if length == self.probe_result.length else length

    def local_sequence_batch(self, prepare: Callable, batch: Any) -> Any:
        """Return this device's positions of a batch of full sequences."""
        inner_axes = InnerAxes(self.inner_groups(), run_partitioned)
        take_local = lambda dim, x: x if dim is None else inner_axes.slice_local(x, Split(dim))
        return jax.tree.map(
            take_local, self.probe_result.dims, prepare(batch), is_leaf=lambda x: x is None
        )

    def check_positions(self, comms: Sequence[CommEvent], sent_bytes: int) -> None:
        """Refuse to gather more along sequences than the step sends otherwise."""
        gathers = [comm for comm in comms if comm.action == "gather"]
        choice, limit = self.probe_result.choice, self.settings.gather
        if limit is None:
            limit = max(MIN_GATHER_LIMIT, sent_bytes, choice.option.total_bytes(choice.calls))
        size = sum(comm.bytes * comm.times for comm in gathers)
        if size <= limit:
            return
        lines: dict[tuple[str, str], int] = {}
        for comm in gathers:
            key = comm.line, comm.operation
            lines[key] = lines.get(key, 0) + comm.bytes * comm.times
        gathers_custom = any(
            call.is_custom and choice.option.ulysses < self.devices for call in choice.calls
        )
        largest = sorted(lines.items(), key=lambda item: -item[1])
        details = "; ".join(f"{line}: {name}: {human(n)}" for (line, name), n in largest[:5])
        raise ValueError(
            f"positions of a sequence meet outside of attention: {self.devices} devices share "
            f"sequences, and gather {human(size)} in a microbatch, more than the limit of "
            f"{human(limit)} ({details}). "
            f"{CUSTOM_ATTENTION_HINT if gathers_custom else GATHER_HINT} Or raise the limit: "
            "hfjax.ContextParallel(gather=…), in bytes."
        )

    # -- attention ------------------------------------------------------------------------------

    def attention(self, attend: Callable) -> Callable:
        """Return attention of local queries to full sequences; a user's own keeps its function."""
        return lambda *args, **kwargs: self._named_attention(
            attend, attention_operands(attend, args, kwargs)
        )

    def _named_attention(self, attend: Callable, operands: tuple[jax.Array, ...]) -> jax.Array:
        """Return the attention's output; the program on full sequences keeps the call by name."""
        program, out_shapes = jax.make_jaxpr(attend, return_shape=True)(*operands)

        def attend_full_sequences(consts: Sequence[Any], *operands: Any) -> Any:
            leaves = jaxpr_as_fun(program.replace(consts=consts))(*operands)
            return jax.tree.unflatten(jax.tree.structure(out_shapes), leaves)

        rule = AttentionRule(self.run_attention, attend)
        return keep_as_call(rule, attend_full_sequences)(program.consts, *operands)

    def run_attention(
        self, attend: Callable, call: RuleCall, ctx: PartitionContext, body: Any, arguments: Any
    ) -> Any:
        """Attend across devices, or run a user's own attention by its equations."""
        consts, *operands = arguments
        is_custom = not getattr(attend, "is_causal_attention", False)
        is_split = any(isinstance(v, ShardedValue) for v in operands)
        shapes = [jax.ShapeDtypeStruct(ctx.shape(v), "float32") for v in operands]
        results = [v.aval for v in body[0].outvars]
        is_attention_call = is_split and is_attention(shapes, results, self.probe_result.length)
        is_gathered = is_custom and self.seq_layout.ulysses < self.devices
        if not is_attention_call or is_gathered or any(map(is_distributed, consts)):
            return ctx.run(ctx, *body, jax.tree.leaves(arguments, is_leaf=is_distributed))
        if is_custom:
            consts = list(map(ctx.replicate, consts))
            attend = partial(self._attend_local_heads, partial(call.function, consts))
        return ShardedValue(
            self._attend(attend, *(ctx.shard(v, POSITIONS) for v in operands)), POSITIONS
        )

    def _attend_local_heads(self, attend: Callable, *operands: jax.Array) -> jax.Array:
        """Return the output of an attention of all heads for the local heads."""
        group, heads = AxisGroup(self.axes, self.devices, "heads"), Split(2, self._head_shards)
        inputs = [ShardedValue(x, heads) if x.ndim == 4 else x for x in operands]
        (out,) = jax.tree.leaves(run_partitioned(group, attend, *inputs), is_leaf=is_distributed)
        return group.redistribute(out, heads)

    def _attend(self, attend: Callable, *operands: jax.Array) -> jax.Array:
        """Return attention of q_BSHD, k_BSGD, v_BSGD, and documents_BS if there are any."""
        replaceable = getattr(attend, "is_causal_attention", False)
        attend_local = partial(self.kernels.attend, attend) if replaceable else attend
        seq_layout, (q, k, v, *documents) = self.seq_layout, operands
        exchange = HeadAllToAll(seq_layout, self.axes, self._map_shards)
        if documents:
            documents = [exchange.gather_documents(documents[0])]
        if seq_layout.ulysses > 1:
            k, v = (exchange.repeat_heads(x, self._head_shards) for x in (k, v))
            q, k, v = (exchange.to_heads(x) for x in (q, k, v))
        if seq_layout.ring_size == 1:
            out = attend_local(q, k, v, *(d[0] for d in documents))
        else:
            kernels = self.kernels.attention_impl(*operands[:3]) == "pallas"
            window = getattr(attend, "window", None)
            out = self._ring_attention(kernels, window, q, k, v, *documents)
        return exchange.to_positions(out) if seq_layout.ulysses > 1 else out

    def _ring_attention(self, kernels: bool, window: int | None, *operands: jax.Array) -> jax.Array:
        """Return attention whose keys and values are sent from group to group."""
        seq_layout, gathers = self.seq_layout, self.probe_result.choice.option.kind == "allgather"
        length = operands[0].shape[1] * seq_layout.ring_size  # of full sequences
        make_ring = partial(
            Ring, seq_layout, self.axes, gathers=gathers, hops=seq_layout.hops(length, window)
        )

        def make_block(documents: Sequence[jax.Array]) -> RingBlock:
            if seq_layout.order == "zigzag" and not documents and window is None:
                return ZigzagBlock(seq_layout, AttentionBlock(kernels))
            mask, document_ids = Mask(window=window), documents[0] if documents else None
            return MaskedBlock(seq_layout, AttentionBlock(kernels), mask, document_ids)

        def forward(q: jax.Array, k: jax.Array, v: jax.Array, *documents: jax.Array):
            return make_ring(make_block(documents)).forward(q, k, v)

        def backward(operands: tuple, residuals: tuple, do: jax.Array):
            q, k, v, *documents = operands
            gradients = make_ring(make_block(documents)).backward((q, k, v), residuals, do)
            return *gradients, *(None for _ in documents)

        specs = (HEADS, HEADS, HEADS, P())[: len(operands)]
        residual_specs = (HEADS, P(None, TENSOR_AXES))
        return ShardedFunction(self.mesh, forward, backward, specs, HEADS, residual_specs)(
            *operands
        )

    @property
    def _head_shards(self) -> int:
        """The number of devices over which heads are sharded."""
        return size_of(TENSOR_AXES, self.mesh)

    def _map_shards(self, function: Callable) -> Callable:
        axes = in_use(self.mesh, TENSOR_AXES)
        return shard_map_over(function, axes, HEADS, HEADS) if axes else function

    named_groups, lookup = model_ops.no_named_groups, model_ops.lookup_table


MIN_GATHER_LIMIT = 2**20  # gathers of less are allowed
GATHER_HINT = (
    "Let attention be asked for (self.kernels = hfjax.models.layers.local_ops; "
    "self.kernels.attention(attend)(q, k, v)), shift targets in a method prepare(batch) of the "
    "model, or keep positions apart; print(step.sequence_comms) shows what meets."
)
CUSTOM_ATTENTION_HINT = (
    "The attention of this model is a function of its own (hfjax.models.attention.capped is one): "
    "every device gathers its keys and values. Share each sequence between as many devices as "
    'divide its heads, by hfjax.ContextParallel(form="ulysses"), or between fewer. What meets '
    "beside it: keep positions apart, and shift targets in a method prepare(batch) of the model; "
    "print(step.sequence_comms) shows what meets."
)


def attention_operands(
    attend: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[jax.Array, ...]:
    """Return the operands of an attention over sequences that devices share, or raise."""
    positional, extra_kwargs = model_ops.bind_positional(attend, args, kwargs)
    operands = tuple(x for x in positional if x is not None)
    if extra_kwargs or not 3 <= len(operands) <= 4:
        raise ValueError(
            f"attention with {len(operands)} "
            f"arrays{', and ' if extra_kwargs else ''}{', '.join(extra_kwargs)}: where devices "
            "share sequences it takes (q, k, v), and one array [B, S] more, without names. Close "
            "over anything else."
        )
    return operands


def sequence_dims(batch: Any, dims: Mapping[str, int | None] | None = None) -> Any:
    """Return the sequence dimension of each array of a batch, None where there is none."""
    paths = jax.tree_util.tree_map_with_path(
        lambda keys, x: jax.tree_util.keystr(keys, simple=True, separator="/"), batch
    )
    dims = dims or {}
    if unknown := dims.keys() - set(jax.tree.leaves(paths)):
        raise ValueError(
            f"ContextParallel(sequence=…) names {', '.join(sorted(unknown))}, which no array of "
            f"the batch is. It has: {', '.join(jax.tree.leaves(paths))}."
        )

    def sequence_dim(path: str, x: Any) -> int | None:
        dim = dims.get(path, 1 if x.ndim > 1 else None)
        if dim is not None and not 1 <= dim < x.ndim:
            raise ValueError(
                f"ContextParallel(sequence={{{path!r}: {dim}}}) of an array {list(x.shape)}: a "
                f"dimension from 1 to {x.ndim - 1} (0 has the sequences), or None."
            )
        return dim

    return jax.tree.map(sequence_dim, paths, batch)


def sequence_length(batch: Any, dims: Any) -> int:
    """Return the sequence length of a batch."""
    lengths = {
        jax.tree_util.keystr(keys, simple=True, separator="/"): x.shape[dim]
        for (keys, x), dim in zip(
            jax.tree_util.tree_leaves_with_path(batch),
            jax.tree.leaves(dims, is_leaf=lambda x: x is None),
            strict=True,
        )
        if dim is not None
    }
    if len(set(lengths.values())) != 1:
        lengths_text = ", ".join(f"{path} {size}" for path, size in lengths.items()) or "none"
        raise ValueError(
            "the devices of context share sequences, so that all arrays of a batch have the same "
            f"number of positions; found {lengths_text} (dimension 1). Which dimension is the "
            'sequence can be said: hfjax.ContextParallel(sequence={"tokens": 1, "image": None}).'
        )
    return next(iter(lengths.values()))
