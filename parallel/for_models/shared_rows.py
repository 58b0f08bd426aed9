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
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from hfjax.pallas_kernels.attention.mask import Mask
from hfjax.parallel.context.choice import Call, Choice, Context, choose
from hfjax.parallel.context.deal import Deal
from hfjax.parallel.context.exchange import Exchange
from hfjax.parallel.context.travel import Travel
from hfjax.parallel.context.visits import AnyMask, Balanced, Block, Visit
from hfjax.parallel.for_models.on_shards import OnShards, mapped
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
    length: int = 0  # of whole rows, as they are traced
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
        self.length = length

    @contextmanager
    def looked_at(self, length: int, traced: int, note: bool = True) -> Iterator[None]:
        """Note what a model asks for that is traced within, in place of doing it.

        Args:
            length: Of the rows that will come.
            traced: Of the rows that are traced in their place.
            note: Whether to take note of it.
        """
        known, self.calls, self.looking, self.length = self.calls, [], length, traced
        try:
            yield
        finally:
            self.calls, self.looking = self.calls if note else known, None

    def positions(self, length: int) -> jax.Array | None:
        """Return the numbers, in the whole row, of the positions here; None: these are no rows."""
        if self.looking is not None:
            if length != self.length and length * self.devices == self.looking:
                raise ValueError(
                    f"{length} positions that are no part of the shared rows are as many as a "
                    f"device has of these ({self.looking} over {self.devices}): which is meant "
                    "cannot be told. Take another number of devices, or of positions."
                )
            return jnp.zeros(length, jnp.int32) if length == self.length else None
        if length * self.devices != self.length:
            return None
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
            if dim < 0:
                raise ValueError(
                    f"an output {list(x.shape)} has positions and something else in one dimension, "
                    "or twice: where devices share rows, return [B, S, …]."
                )
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
        (q, k, v, *rest), shards = operands, self._shards
        if q.shape[1] != self.length or k.shape[1] != self.length:
            raise ValueError(
                f"attention of {q.shape[1]} queries to {k.shape[1]} keys: those are not the "
                f"{self.length} positions of the rows that devices share. Call the attention "
                "itself there, not by way of kernels.attention."
            )
        own = not getattr(plain, "is_causal_attention", False)
        if own and q.shape[2] > 1 and not heads_alike(plain, operands):
            raise ValueError(
                "the model's own attention does not treat heads alike (what it makes of some heads "
                "depends on the others, or on how many there are), and Ulysses gives each device "
                "some of them. Put what differs by head into the queries, or use another axis."
            )
        self.calls.append(
            Call(
                rows=q.shape[0],
                positions=self.looking or 0,
                heads=q.shape[2] // shards,
                key_heads=k.shape[2] // shards,
                width=q.shape[3],
                itemsize=q.dtype.itemsize,
                documents=len(rest) > 0,
                window=window_of(plain),
                whole_rows_only=own,
                value_width=None if v.shape[3] == q.shape[3] else v.shape[3],
            )
        )
        found = jax.eval_shape(plain, *operands)
        return jnp.zeros(found.shape, found.dtype)


def heads_alike(attend: Callable, operands: Sequence[Any]) -> bool:
    """Return whether an attention makes of the last heads what it makes of them among all.

    Tried out on random numbers. Where it cannot be (it needs what is traced), it is believed.
    """
    draw, (q, k, *_) = np.random.default_rng(0), operands
    groups = k.shape[2]
    if q.shape[2] % (2 * groups) and groups % 2:
        return True

    def made(x: Any) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.zeros(x.shape, x.dtype)
        return jnp.asarray(draw.normal(size=x.shape), jnp.float32)

    def half(x: jax.Array) -> jax.Array:
        return x[:, :, x.shape[2] // 2 :] if x.ndim == 4 else x

    try:
        with jax.ensure_compile_time_eval():
            whole = [made(x) for x in operands]
            some = [half(x) if i == 0 or groups % 2 == 0 else x for i, x in enumerate(whole)]
            one, two = half(attend(*whole)), attend(*some)
            return one.shape == two.shape and bool(jnp.allclose(one, two, atol=1e-3))
    except Exception:  # it closes over what is traced
        return True


def window_of(attend: Callable) -> int | None:
    """Return how many positions hfjax's own attention sees, None for all before it."""
    return getattr(attend, "window", None)


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
