"""Rows that several devices share: dealing their positions, and attention across the devices.

A model asks for both through its `kernels`: `kernels.attention(attend)` and
`kernels.positions(length)`. What it asks for is found by tracing it once, before positions are
dealt (`sequence.py`); the form that sends least follows from that.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from hfjax.pallas_kernels.attention.mask import Mask
from hfjax.parallel.context.choice import Call, Choice, Context, choose
from hfjax.parallel.context.deal import Deal
from hfjax.parallel.context.exchange import Exchange
from hfjax.parallel.context.travel import Travel
from hfjax.parallel.context.visits import AnyMask, Balanced, Block, Visit
from hfjax.parallel.engine.on_shards import OnShards, mapped
from hfjax.parallel.mesh import SEQUENCE_AXES, TENSOR_AXES, in_use, size_of

HEADS = P(None, None, TENSOR_AXES)  # of [B, S, H, D]


@dataclass
class SharedRows:
    """How a step deals positions: settings, and what its trace found.

    Attributes:
        settings: What the user asked for.
        mesh: The mesh.
        no_ring: Why keys and values cannot go around a ring, if they cannot.
        calls: The attentions that the model asks for, once it was looked at.
        choice: The form that is taken.
    """

    settings: Context
    mesh: Mesh
    no_ring: str | None = None
    calls: list[Call] = field(default_factory=list)
    choice: Choice | None = None
    outputs: list[int | None] = field(default_factory=list)  # which dimension is the sequence
    looking: int | None = None  # the length of rows while the model is looked at

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes whose devices share a row."""
        return in_use(self.mesh, SEQUENCE_AXES)

    @property
    def devices(self) -> int:
        """How many devices share a row."""
        return size_of(self.axes, self.mesh)

    @property
    def deal(self) -> Deal:
        """How positions are dealt."""
        assert self.choice is not None
        return self.choice.deal

    def choose(self, length: int) -> None:
        """Take the form that sends least; refuse rows that it cannot deal."""
        self.choice = choose(self.settings, self.devices, self.calls, self.no_ring)
        self.deal.check(length, "a batch")

    @contextmanager
    def looked_at(self, length: int) -> Iterator[None]:
        """Note what a model asks for that is traced within, in place of doing it.

        Args:
            length: Of the rows that will come.
        """
        self.calls, self.looking = [], length
        try:
            yield
        finally:
            self.looking = None

    def positions(self, length: int) -> jax.Array:
        """Return the numbers, in the whole row, of the positions here."""
        if self.looking is not None:
            return jnp.zeros(length, jnp.int32)
        every = lax.iota("int32", length * self.devices)
        return self.deal.mine(every, lax.axis_index(self.axes), dim=0)

    def dealt(self, batch: Any, dims: Any) -> Any:
        """Return the part of a batch of whole rows that this device computes with."""
        device = lax.axis_index(self.axes)
        cut = lambda x, dim: x if dim is None else self.deal.mine(x, device, dim)
        return jax.tree.map(cut, batch, dims, is_leaf=lambda x: x is None)

    def undealt(self, outputs: Any) -> Any:
        """Return outputs with whole rows, in the order of positions."""
        leaves, form = jax.tree.flatten(outputs)

        def whole(x: jax.Array, dim: int | None) -> jax.Array:
            if dim is None:
                return x
            every = lax.all_gather(x, self.axes, axis=dim, tiled=True)
            return every.take(self.deal.undone(every.shape[dim]), axis=dim)

        return form.unflatten(map(whole, leaves, self.outputs))

    # -- attention ------------------------------------------------------------------------------

    def attend(self, plain: Callable, local: Callable, form: Callable, *operands: Any) -> jax.Array:
        """Return attention of the queries here to whole rows.

        Args:
            plain: The attention that the model hands over.
            local: The attention to run on whole rows: `plain`, or a kernel in its place.
            form: () -> the form of each block: pallas, reference or xla.
            operands: q_BSHD, k_BSGD, v_BSGD, and documents_BS if there are any.
        """
        if self.looking is not None:
            return self._look(plain, operands)
        deal, (q, k, v, *documents) = self.deal, operands
        exchange = Exchange(deal, self.axes, self._on_shards)
        if documents:
            documents = [exchange.documents(documents[0])]
        if deal.ulysses > 1:
            k, v = (exchange.repeated(x, self._shards) for x in (k, v))
            q, k, v = (exchange.to_heads(x) for x in (q, k, v))
        if deal.ring == 1:
            attended = local(q, k, v, *(d[0] for d in documents))
        else:
            attended = self._across(form() == "pallas", window_of(plain), q, k, v, *documents)
        return exchange.to_positions(attended) if deal.ulysses > 1 else attended

    def _across(self, kernels: bool, window: int | None, *operands: Any) -> jax.Array:
        """Return attention whose keys and values travel from group to group."""
        assert self.choice is not None
        deal, gathers = self.deal, self.choice.option.form == "allgather"
        length = operands[0].shape[1] * deal.ring  # of whole rows
        travel = partial(Travel, deal, self.axes, gathers=gathers, hops=deal.hops(length, window))

        def visit(documents: Sequence[jax.Array]) -> Visit:
            if deal.order == "zigzag" and not documents and window is None:
                return Balanced(deal, Block(kernels))
            mask, inside = Mask(window=window), documents[0] if documents else None
            return AnyMask(deal, Block(kernels), mask, inside)

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

    def _look(self, plain: Callable, operands: Sequence[Any]) -> jax.Array:
        """Note what is asked for; return something of the shape of what is attended to."""
        (q, k, *rest), shards = operands, self._shards
        self.calls.append(
            Call(
                rows=q.shape[0],
                positions=self.looking or 0,
                heads=q.shape[2] // shards,
                key_heads=k.shape[2] // shards,
                width=q.shape[3],
                itemsize=q.dtype.itemsize,
                documents=len(rest) > 1,
                window=window_of(plain),
                whole_rows_only=not getattr(plain, "is_causal_attention", False),
            )
        )
        found = jax.eval_shape(plain, *operands)
        return jnp.zeros(found.shape, found.dtype)


def window_of(attend: Callable) -> int | None:
    """Return how many positions hfjax's own attention sees, None for all before it."""
    return getattr(attend, "window", None)


def dims_of(batch: Any, given: Mapping[str, int | None] | None = None) -> Any:
    """Return the dimension of each array of a batch that is the sequence, None where none is."""
    paths = jax.tree_util.tree_map_with_path(
        lambda keys, x: jax.tree_util.keystr(keys, simple=True, separator="/"), batch
    )
    usual = lambda path, x: (given or {}).get(path, 1 if x.ndim > 1 else None)
    return jax.tree.map(usual, paths, batch)
