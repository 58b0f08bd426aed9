"""What modules are handed where devices share rows: attention across the devices.

Model and loss see whole rows. What they do is run on the positions that a device has
(parallel/in_parts); an attention that they ask for is kept by name, and goes across the devices in
a form of its own. Before a step is traced, a look at the model finds which attentions it asks for
(hfjax/checks/probe_model.py), hence the form that sends least: `FoundAlongRows`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import jax
from jax.extend import source_info_util
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

from hfjax.pallas_kernels.attention.mask import Mask
from hfjax.parallel.engine import model_ops
from hfjax.parallel.engine.comm_plan import mapped
from hfjax.parallel.extensions.context_parallel.comm_kinds import ContextChoice
from hfjax.parallel.extensions.context_parallel.ring_attention import Travel
from hfjax.parallel.extensions.context_parallel.ring_block import (
    AnyMask,
    AttendedBlock,
    Balanced,
    Visit,
)
from hfjax.parallel.extensions.context_parallel.sequence_layout import Deal
from hfjax.parallel.extensions.context_parallel.ulysses import Exchange
from hfjax.parallel.extensions.kernel_dispatch.ops import TakesKernels
from hfjax.parallel.extensions.kernel_dispatch.per_shard import OnShards
from hfjax.parallel.mesh import SEQUENCE_AXES, TENSOR_AXES, in_use, size_of
from hfjax.parallel.settings import Context
from hfjax.parallel.spmd.interpreter import in_parts
from hfjax.parallel.spmd.nested import InnerSides
from hfjax.parallel.spmd.partition_context import Join, Scope
from hfjax.parallel.spmd.placements import Cut, Part, Side, is_value
from hfjax.parallel.spmd.rule_calls import NamedCall, named
from hfjax.utils.tables import human

source_info_util.register_exclusion(__file__)  # the line of an attention is the user's

HEADS = P(None, None, TENSOR_AXES)  # of [B, S, H, D]
POSITIONS = Cut(1)


@dataclass(frozen=True)
class FoundAlongRows:
    """What a look at a model finds along its rows.

    Attributes:
        choice: The form in which devices work together.
        length: Positions of whole rows.
        dims: The dimension of each array of a batch that is the sequence, or None.
    """

    choice: ContextChoice
    length: int
    dims: Any


@final
@dataclass(frozen=True)
class OnSharedRows(TakesKernels):
    """Deals positions, and attends across the devices that share a row.

    Attributes:
        settings: What the user asked for.
        no_ring: Why keys and values cannot go around a ring, if they cannot.
        seen: What a look at the model found; None before it.
    """

    settings: Context
    no_ring: str | None = None
    seen: FoundAlongRows | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes whose devices share a row."""
        return in_use(self.mesh, SEQUENCE_AXES)

    @property
    def devices(self) -> int:
        """How many devices share a row."""
        return size_of(self.axes, self.mesh)

    @property
    def found(self) -> FoundAlongRows:
        """What a look at the model found."""
        assert self.seen is not None
        return self.seen

    @property
    def deal(self) -> Deal:
        """How positions are dealt."""
        return self.found.choice.deal

    # -- positions ------------------------------------------------------------------------------

    def inner_sides(self) -> tuple[Side, ...]:
        """Return the devices that have other positions, once a look has told who has which."""
        if self.seen is None:
            return ()
        return (Side(self.axes, self.devices, "positions", self.deal.pieces),)

    def run_length(self, length: int) -> int:
        """Return how many positions of a row follow each other on one device."""
        return self.deal.run(length) if length == self.found.length else length

    def dealt(self, prepared: Callable, batch: Any) -> Any:
        """Return the part of a batch of whole rows that this device computes with."""
        inner = InnerSides(self.inner_sides(), in_parts)
        cut = lambda dim, x: x if dim is None else inner.mine(x, Cut(dim))
        return jax.tree.map(cut, self.found.dims, prepared(batch), is_leaf=lambda x: x is None)

    def check_positions(self, joins: Sequence[Join], sent: int) -> None:
        """Refuse to gather more along rows than the step sends besides."""
        gathers = [join for join in joins if join.how == "gather"]
        choice, limit = self.found.choice, self.settings.gather
        if limit is None:
            limit = max(LEAST, sent, choice.option.total(choice.calls))
        size = sum(join.bytes * join.times for join in gathers)
        if size <= limit:
            return
        lines: dict[tuple[str, str], int] = {}
        for join in gathers:
            key = join.line, join.operation
            lines[key] = lines.get(key, 0) + join.bytes * join.times
        spread = any(call.own and choice.option.ulysses < self.devices for call in choice.calls)
        first = sorted(lines.items(), key=lambda item: -item[1])
        shown = "; ".join(f"{line}: {name}: {human(n)}" for (line, name), n in first[:5])
        raise ValueError(
            f"positions of a row meet outside of attention: {self.devices} devices share rows, and "
            f"gather {human(size)} in a microbatch, more than the limit of {human(limit)} "
            f"({shown}). {OWN if spread else INSTEAD} Or raise the limit: "
            "hfjax.Context(gather=…), in bytes."
        )

    # -- attention ------------------------------------------------------------------------------

    def attention(self, attend: Callable) -> Callable:
        """Return attention of the queries here to whole rows; one of the user's own stays it."""
        return lambda *given, **more: self._named(attend, operands_of(attend, given, more))

    def _named(self, attend: Callable, operands: tuple[jax.Array, ...]) -> jax.Array:
        """Return what is attended to; the call is kept by name in the program of whole rows."""
        program, form = jax.make_jaxpr(attend, return_shape=True)(*operands)

        def whole(held: Sequence[Any], *operands: Any) -> Any:
            leaves = jaxpr_as_fun(program.replace(consts=held))(*operands)
            return jax.tree.unflatten(jax.tree.structure(form), leaves)

        return named(partial(self._rule, attend), whole)(program.consts, *operands)

    def _rule(
        self, attend: Callable, call: NamedCall, scope: Scope, body: Any, arguments: Any
    ) -> Any:
        """Attend across devices, or run an attention of the user's own by its equations."""
        held, *operands = arguments
        own = not getattr(attend, "is_causal_attention", False)
        split = any(isinstance(v, Part) for v in operands)
        shapes = [jax.ShapeDtypeStruct(scope.shape(v), "float32") for v in operands]
        results = [v.aval for v in body[0].outvars]
        known = split and is_attention(shapes, results, self.found.length)
        spread = own and self.deal.ulysses < self.devices
        if not known or spread or any(map(is_value, held)):
            return scope.run(scope, *body, jax.tree.leaves(arguments, is_leaf=is_value))
        if own:
            held = list(map(scope.whole, held))
            attend = partial(self._of_own_heads, partial(call.function, held))
        return Part(self._attend(attend, *(scope.part(v, POSITIONS) for v in operands)), POSITIONS)

    def _of_own_heads(self, attend: Callable, *operands: jax.Array) -> jax.Array:
        """Return what an attention of all heads makes of those that are here."""
        side, heads = Side(self.axes, self.devices, "heads"), Cut(2, self._shards)
        given = [Part(x, heads) if x.ndim == 4 else x for x in operands]
        (found,) = jax.tree.leaves(in_parts(side, attend, *given), is_leaf=is_value)
        return side.as_kind(found, heads)

    def _attend(self, attend: Callable, *operands: jax.Array) -> jax.Array:
        """The operands: q_BSHD, k_BSGD, v_BSGD, and documents_BS if there are any."""
        replaceable = getattr(attend, "is_causal_attention", False)
        here = partial(self.kernels.attend, attend) if replaceable else attend
        deal, (q, k, v, *documents) = self.deal, operands
        exchange = Exchange(deal, self.axes, self._on_shards)
        if documents:
            documents = [exchange.documents(documents[0])]
        if deal.ulysses > 1:
            k, v = (exchange.repeated(x, self._shards) for x in (k, v))
            q, k, v = (exchange.to_heads(x) for x in (q, k, v))
        if deal.ring == 1:
            attended = here(q, k, v, *(d[0] for d in documents))
        else:
            kernels = self.kernels.of_attention(*operands[:3]) == "pallas"
            window = getattr(attend, "window", None)
            attended = self._across(kernels, window, q, k, v, *documents)
        return exchange.to_positions(attended) if deal.ulysses > 1 else attended

    def _across(self, kernels: bool, window: int | None, *operands: jax.Array) -> jax.Array:
        """Return attention whose keys and values travel from group to group."""
        deal, gathers = self.deal, self.found.choice.option.form == "allgather"
        length = operands[0].shape[1] * deal.ring  # of whole rows
        travel = partial(Travel, deal, self.axes, gathers=gathers, hops=deal.hops(length, window))

        def visit(documents: Sequence[jax.Array]) -> Visit:
            if deal.order == "zigzag" and not documents and window is None:
                return Balanced(deal, AttendedBlock(kernels))
            mask, inside = Mask(window=window), documents[0] if documents else None
            return AnyMask(deal, AttendedBlock(kernels), mask, inside)

        def forward(q: jax.Array, k: jax.Array, v: jax.Array, *documents: jax.Array):
            return travel(visit(documents)).forward(q, k, v)

        def backward(operands: tuple, kept: tuple, do: jax.Array):
            q, k, v, *documents = operands
            gradients = travel(visit(documents)).backward((q, k, v), kept, do)
            return *gradients, *(None for _ in documents)

        specs = (HEADS, HEADS, HEADS, P())[: len(operands)]
        kept = (HEADS, P(None, TENSOR_AXES))
        return OnShards(self.mesh, forward, backward, specs, HEADS, kept)(*operands)

    @property
    def _shards(self) -> int:
        """Over how many devices heads are split."""
        return size_of(TENSOR_AXES, self.mesh)

    def _on_shards(self, function: Callable) -> Callable:
        axes = in_use(self.mesh, TENSOR_AXES)
        return mapped(function, axes, HEADS, HEADS) if axes else function

    named_sides, lookup = model_ops.no_names, model_ops.rows_of_table


LEAST = 2**20  # less is sent without a word
INSTEAD = (
    "Let attention be asked for (self.kernels = hfjax.models.layers.plain; "
    "self.kernels.attention(attend)(q, k, v)), shift targets in a method prepare(batch) of the "
    "model, or keep positions apart; print(step.positions) shows what meets."
)
OWN = (
    "The attention of this model is a function of its own (hfjax.models.attention.capped is one): "
    "every device gathers its keys and values. Share each row between as many devices as divide "
    'its heads, by hfjax.Context(form="ulysses"), or between fewer. What meets beside it: keep '
    "positions apart, and shift targets in a method prepare(batch) of the model; "
    "print(step.positions) shows what meets."
)


def operands_of(
    attend: Callable, given: Sequence[Any], named: Mapping[str, Any]
) -> tuple[jax.Array, ...]:
    """Return the operands of an attention over rows that devices share, or raise."""
    positional, rest = model_ops.by_position(attend, given, named)
    operands = tuple(x for x in positional if x is not None)
    if rest or not 3 <= len(operands) <= 4:
        raise ValueError(
            f"attention with {len(operands)} arrays{', and ' if rest else ''}"
            f"{', '.join(rest)}: where devices share rows it takes (q, k, v), and one array "
            "[B, S] more, without names. Close over anything else."
        )
    return operands


def is_attention(operands: Sequence[Any], results: Sequence[Any], length: int) -> bool:
    """Return whether shapes are those of attention of whole rows: of q, k, v [B, S, H, D]."""
    of_heads = all(len(x.shape) == 4 for x in (*operands[:3], *results))
    whole_rows = all(len(x.shape) > 1 and x.shape[1] == length for x in (*operands, *results))
    one = of_heads and whole_rows and len(results) == 1
    return one and results[0].shape[2] == operands[0].shape[2]


def dims_of(batch: Any, given: Mapping[str, int | None] | None = None) -> Any:
    """Return the dimension of each array of a batch that is the sequence, None where none is."""
    paths = jax.tree_util.tree_map_with_path(
        lambda keys, x: jax.tree_util.keystr(keys, simple=True, separator="/"), batch
    )
    given = given or {}
    if unknown := given.keys() - set(jax.tree.leaves(paths)):
        raise ValueError(
            f"Context(sequence=…) names {', '.join(sorted(unknown))}, which no array of the batch "
            f"is. It has: {', '.join(jax.tree.leaves(paths))}."
        )

    def of(path: str, x: Any) -> int | None:
        dim = given.get(path, 1 if x.ndim > 1 else None)
        if dim is not None and not 1 <= dim < x.ndim:
            raise ValueError(
                f"Context(sequence={{{path!r}: {dim}}}) of an array {list(x.shape)}: a dimension "
                f"from 1 to {x.ndim - 1} (0 has the rows), or None."
            )
        return dim

    return jax.tree.map(of, paths, batch)
