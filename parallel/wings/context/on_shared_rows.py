"""What modules are handed where devices share rows: positions, and attention across the devices.

Before a step is traced, a check looks at the model (hfjax/checks/look_along_rows.py). What it finds
is a value, `FoundAlongRows`: which attentions the model asks for, hence the form that sends least;
which dimension of each array is the sequence.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from hfjax.pallas_kernels.attention.mask import Mask
from hfjax.parallel.engine import local
from hfjax.parallel.engine.legs import mapped
from hfjax.parallel.mesh import SAMPLE_AXES, SEQUENCE_AXES, TENSOR_AXES, in_use, size_of
from hfjax.parallel.settings import Context
from hfjax.parallel.wings.context.deal import Deal
from hfjax.parallel.wings.context.forms import ContextChoice
from hfjax.parallel.wings.context.ring_attention import Travel
from hfjax.parallel.wings.context.ulysses import Exchange
from hfjax.parallel.wings.context.visits import AnyMask, AttendedBlock, Balanced, Visit
from hfjax.parallel.wings.kernels.in_step import Kernels
from hfjax.parallel.wings.kernels.kernel_on_shards import OnShards

HEADS = P(None, None, TENSOR_AXES)  # of [B, S, H, D]


@dataclass(frozen=True)
class FoundAlongRows:
    """What a look at a model finds along its rows.

    Attributes:
        choice: The form in which devices work together.
        length: Positions of whole rows.
        dims: The dimension of each array of a batch that is the sequence, or None.
        outputs: Shapes of the model's outputs in the look, of rows of `trial` positions.
        trial: A length of rows.
        apart: Whether it divides no other dimension.
    """

    choice: ContextChoice
    length: int
    dims: Any
    outputs: tuple[tuple[int, ...], ...]
    trial: int
    apart: bool

    def along(self, looked_at: tuple[int, ...], here: tuple[int, ...]) -> int | None:
        """Return which dimension of an output is the sequence, if one is; -1: it is part of one."""
        found = [dim for dim, size in enumerate(looked_at) if size and size % self.trial == 0]
        if not self.apart:  # these were whole rows, of which a device has a part
            found = [dim for dim in found if dim and looked_at[dim] != here[dim]]
        plain = len(found) == 1 and found[0] > 0 and looked_at[found[0]] == self.trial
        return None if not found else found[0] if plain else -1


@final
@dataclass(frozen=True)
class OnSharedRows(local.InStep):
    """Deals positions, and attends across the devices that share a row.

    Attributes:
        kernels: Forms of attention and of products on this device.
        settings: What the user asked for.
        no_ring: Why keys and values cannot go around a ring, if they cannot.
        seen: What a look at the model found; None before it.
    """

    kernels: Kernels
    settings: Context
    no_ring: str | None = None
    seen: FoundAlongRows | None = None

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.kernels.mesh

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

    def positions(self, length: int, names: local.Names = ()) -> jax.Array | None:
        """Return the numbers, in the whole row, of the positions here; None: these are no rows."""
        if length * self.devices != self.found.length:
            return None
        every = lax.iota("int32", length * self.devices)
        return self.deal.mine(every, lax.axis_index(self.axes), dim=0)

    def row_length(self, length: int, names: local.Names = ()) -> int:
        """Return how many positions a whole row has of which there are so many here."""
        return length * self.devices

    def run_length(self, length: int) -> int:
        """Return how many positions follow each other, of those here."""
        shared = length * self.devices == self.found.length
        return self.deal.run(length * self.devices) if shared else length

    def sum_over_row(self, x: jax.Array) -> jax.Array:
        """Return sums of positions, added over the devices that share rows."""
        return lax.psum(x, self.axes)

    def sum_over_batch(self, x: jax.Array) -> jax.Array:
        """Return sums of rows and positions, added over all devices that have others."""
        return lax.psum(x, in_use(self.mesh, SAMPLE_AXES))

    def dealt(self, prepared: Callable, batch: Any) -> Any:
        """Return the part of a batch of whole rows that this device computes with."""
        batch, device = prepared(batch), lax.axis_index(self.axes)
        cut = lambda x, dim: x if dim is None else self.deal.mine(x, device, dim)
        return jax.tree.map(cut, batch, self.found.dims, is_leaf=lambda x: x is None)

    def undealt(self, outputs: Any) -> Any:
        """Return outputs with whole rows, in the order of positions."""
        leaves, form = jax.tree.flatten(outputs)

        def whole(x: jax.Array, looked_at: tuple[int, ...]) -> jax.Array:
            if (dim := self.found.along(looked_at, x.shape)) is None:
                return x
            if dim < 0:
                raise ValueError(
                    f"an output {list(x.shape)} has positions and something else in one dimension, "
                    "or twice: where devices share rows, return [B, S, …]."
                )
            every = lax.all_gather(x, self.axes, axis=dim, tiled=True)
            return every.take(self.deal.undone(every.shape[dim]), axis=dim)

        return form.unflatten(map(whole, leaves, self.found.outputs))

    # -- attention ------------------------------------------------------------------------------

    def attention(self, attend: Callable) -> Callable:
        """Return attention of the queries here to whole rows; one of the user's own stays it."""
        return lambda *given, **named: self._attend(attend, *operands_of(given, named))

    def _attend(self, attend: Callable, *operands: Any) -> jax.Array:
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

    def _across(self, kernels: bool, window: int | None, *operands: Any) -> jax.Array:
        """Return attention whose keys and values travel from group to group."""
        deal, gathers = self.deal, self.found.choice.option.form == "allgather"
        length = operands[0].shape[1] * deal.ring  # of whole rows
        travel = partial(Travel, deal, self.axes, gathers=gathers, hops=deal.hops(length, window))

        def visit(documents: Sequence[jax.Array]) -> Visit:
            if deal.order == "zigzag" and not documents and window is None:
                return Balanced(deal, AttendedBlock(kernels))
            mask, inside = Mask(window=window), documents[0] if documents else None
            return AnyMask(deal, AttendedBlock(kernels), mask, inside)

        def forward(q, k, v, *documents):
            return travel(visit(documents)).forward(q, k, v)

        def backward(operands, kept, do):
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

    # -- as on whole rows -----------------------------------------------------------------------

    def matmul(self, place: Any, between: tuple, multiply: Callable) -> Callable:
        """Return the product of a linear map; it may go around the ring of the tensor axis."""
        return self.kernels.matmul(place, between, multiply)

    def outputs(
        self, x_BSD: jax.Array, kernel_VD: Any, vocab: int, logits: Callable | None = None
    ) -> Any:
        """Return what the loss is given: logits, or a projection that they are never made of."""
        made = partial(local.made_logits, self, x_BSD, kernel_VD, vocab, logits)
        return self.kernels.outputs(x_BSD, kernel_VD, vocab, logits, made)

    def sender(self, move: local.Move) -> local.Sender | None:
        """Return what moves an array in place of XLA, or None."""
        return self.kernels.sender(move)

    counted_once = of_stream = local.as_it_is
    mean, lookup, columns = local.mean_here, local.rows_of_table, local.all_columns
    mixed = local.mix_now


def operands_of(given: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the operands of an attention over rows that devices share, or raise."""
    operands = tuple(x for x in given if x is not None)
    if named or not 3 <= len(operands) <= 4:
        raise ValueError(
            f"attention with {len(operands)} arrays{', and ' if named else ''}"
            f"{', '.join(named)}: where devices share rows it takes (q, k, v), and one array "
            "[B, S] more, without names. Close over anything else."
        )
    return operands


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
