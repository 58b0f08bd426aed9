"""Rows that several devices share: dealing their positions, and attention across the devices.

A model asks for both through its `kernels`: `kernels.attention(attend)` and
`kernels.positions(length)`. What it asks for is found by tracing it once, before positions are
dealt (`sequence.py`); the form that sends least follows from that.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh, PartitionSpec as P

from hfjax.pallas_kernels.attention.mask import Mask
from hfjax.parallel.autodiff.program import piece
from hfjax.parallel.context.choice import Call, Choice, choose
from hfjax.parallel.context.deal import Deal
from hfjax.parallel.context.exchange import Exchange, repeats
from hfjax.parallel.context.travel import Travel
from hfjax.parallel.context.visits import AnyMask, Balanced, Block, Visit
from hfjax.parallel.for_models.on_shards import OnShards, mapped
from hfjax.parallel.mesh import SEQUENCE_AXES, TENSOR_AXES, in_use, size_of
from hfjax.parallel.settings import Context

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
    closed: list[tuple[int, ...]] = field(default_factory=list)  # what attentions close over
    outputs: list[tuple[int, ...]] = field(default_factory=list)  # shapes in the look
    trial: int = 0  # the length of rows in the look
    apart: bool = True  # whether it divides no other dimension
    length: int = 0  # of whole rows, as they are traced
    looking: int | None = None  # the length of rows while the model is looked at
    noting: bool = True  # whether what it asks for is noted, and tried

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
        self.noting, self.closed = note, [] if note else self.closed
        try:
            yield
        finally:
            self.calls, self.looking = self.calls if note else known, None

    @contextmanager
    def counted(self, times: int) -> Iterator[None]:
        """Note what a layer asks for that is traced within, for so many like it."""
        before = len(self.calls)
        yield
        self.calls[before:] = [replace(call, times=times) for call in self.calls[before:]]

    def shown(self, size: int) -> int:
        """Return a size of the rows to come, of one of those that are traced in their place."""
        real, traced = self.looking, self.length
        return size // traced * real if real and size % traced == 0 else size

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

        def whole(x: jax.Array, looked_at: tuple[int, ...]) -> jax.Array:
            if (dim := self._along(looked_at, x.shape)) is None:
                return x
            if dim < 0:
                raise ValueError(
                    f"an output {list(x.shape)} has positions and something else in one dimension, "
                    "or twice: where devices share rows, return [B, S, …]."
                )
            every = lax.all_gather(x, self.axes, axis=dim, tiled=True)
            return every.take(self.deal.undone(every.shape[dim]), axis=dim)

        return form.unflatten(map(whole, leaves, self.outputs))

    def _along(self, looked_at: tuple[int, ...], here: tuple[int, ...]) -> int | None:
        """Return which dimension of an output is the sequence, if one is; -1: it is part of one."""
        found = [dim for dim, size in enumerate(looked_at) if size and size % self.trial == 0]
        if not self.apart:  # these were whole rows, of which a device has a part
            found = [dim for dim in found if dim and looked_at[dim] != here[dim]]
        plain = len(found) == 1 and found[0] > 0 and looked_at[found[0]] == self.trial
        return None if not found else found[0] if plain else -1

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
                f"attention of {self.shown(q.shape[1])} queries to {self.shown(k.shape[1])} keys: "
                f"those are not the {self.looking} positions of the rows that devices share. Call "
                "the attention itself there, not by way of kernels.attention."
            )
        own = not getattr(plain, "is_causal_attention", False)
        if own and self.noting and self.settings.check:
            self._try(plain, operands)
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

    def _try(self, attend: Callable, operands: Sequence[Any]) -> None:
        """Note what an attention of the model's own closes over; else try its heads."""
        held = piece(attend, *map(jax.typeof, operands)).constants.values()
        closed = [x.shape for x in held if isinstance(x, Tracer) and self._has_positions(x.shape)]
        self.closed += closed
        if not closed and operands[0].shape[2] % (self.devices * self._shards) == 0:
            self._try_heads(attend, operands)

    def _has_positions(self, shape: tuple[int, ...]) -> bool:
        return self.apart and any(size and size % self.length == 0 for size in shape)

    def _try_heads(self, attend: Callable, operands: Sequence[Any]) -> None:
        """Refuse an attention of the model's own that does not treat heads alike."""
        try:
            alike = heads_alike(attend, operands, self.devices, self._shards)
        except Exception as error:  # a kernel for other devices, an array of this very length
            warnings.warn(
                "hfjax could not try whether the model's own attention treats heads alike "
                f"({type(error).__name__}: {str(error)[:200]}). If it does not, it is wrong here: "
                "Ulysses gives each device some of the heads.",
                UserWarning,
                stacklevel=2,
            )
            return
        if not alike:
            raise unlike_heads(
                "Ulysses", "another axis, or hfjax.Context(check=False) if you know better"
            )


@dataclass(frozen=True)
class _HeadsTrial:
    """A trial of an attention of the model's own on random numbers: all heads, and those of each.

    Ulysses gives each device of a row a part of the heads. What the attention makes of a part has
    to be what it makes of it among all heads. `shards` is over how many devices heads are split
    besides.
    """

    attend: Callable
    devices: int
    shards: int
    draw: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    held: dict[int, Any] = field(default_factory=dict)  # in place of what is traced

    def alike(self, operands: Sequence[Any]) -> bool:
        """Return whether each device makes of its heads what one device makes of them."""
        (rows, length, heads, _), tried = operands[0].shape, 2**26
        size = min(length, POSITIONS_TRIED, max(16, math.isqrt(tried // (rows * heads))))
        given = [self._drawn((rows, size, *x.shape[2:]), x.dtype) for x in operands]
        close = 1e-3 if operands[0].dtype.itemsize >= 4 else 5e-2
        parts = [[self._part(x, i) for x in given] for i in range(self.devices)]
        all_heads, some = self._compiled(given), self._compiled(parts[0])
        whole = all_heads(given)
        return all(
            np.allclose(some(part), self._part(whole, i), rtol=0, atol=close, equal_nan=True)
            for i, part in enumerate(parts)
        )

    def _part(self, x: np.ndarray, device: int) -> np.ndarray:
        """Return the heads that a device gets, as `Exchange` deals them."""
        if x.ndim != 4:
            return x
        x = np.repeat(x, repeats(x.shape[2] // self.shards, self.devices), axis=2)
        parts = x.reshape(*x.shape[:2], self.shards, self.devices, -1, x.shape[3])
        return parts[:, :, :, device].reshape(*x.shape[:2], -1, x.shape[3])

    def _compiled(self, like: Sequence[np.ndarray]) -> Callable:
        """Return the attention of operands like these, as a function of numbers."""
        program = piece(self.attend, *map(jax.typeof, like))

        @jax.jit
        def compiled(held: list, given: list) -> jax.Array:
            constants = dict(zip(program.constants, held, strict=True))
            return replace(program, constants=constants)(*given)[0]

        def attend(given: Sequence[np.ndarray]) -> np.ndarray:
            with jax.ensure_compile_time_eval():
                held = list(map(self._stand_in, program.constants.values()))
                return np.asarray(compiled(held, given))

        return attend

    def _stand_in(self, x: Any) -> Any:
        """Return numbers for an array that the attention closes over and that is traced."""
        if not isinstance(x, Tracer):
            return x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), x.shape) if x.shape else jax.random.key(0)
        if id(x) not in self.held:
            self.held[id(x)] = self._drawn(x.shape, x.dtype)
        return self.held[id(x)]

    def _drawn(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        if jnp.issubdtype(dtype, jnp.floating):
            return self.draw.normal(size=shape).astype(dtype)
        whole = self.draw.integers(0, 2 if jnp.issubdtype(dtype, jnp.bool_) else 4, shape)
        return (np.sort(whole, axis=-1) if shape else whole).astype(dtype)


POSITIONS_TRIED = 512


def unlike_heads(who: str, instead: str) -> ValueError:
    """Return the refusal of an attention that does not treat heads alike."""
    return ValueError(
        "the model's own attention does not treat heads alike (what it makes of some heads depends "
        f"on the others, or on how many there are), and {who} gives each device some of them. Put "
        f"what differs by head into the queries, or use {instead}."
    )


def heads_alike(attend: Callable, operands: Sequence[Any], devices: int, shards: int = 1) -> bool:
    """Return whether an attention treats heads alike: each device is given some of them.

    Args:
        attend: The attention.
        operands: Of all heads, or their shapes and dtypes.
        devices: Over how many devices of a row heads are split.
        shards: Over how many they are split besides.
    """
    return _HeadsTrial(attend, devices, shards).alike(operands)


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
