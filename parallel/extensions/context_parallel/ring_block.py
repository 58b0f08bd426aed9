"""What one device computes with the keys and values of one group of devices.

A `RingBlock` says which blocks to compute, and merges them into the state of the queries (o, m and
l, in float32 or wider). `ZigzagBlock` is for sequences in zigzag order under a plain causal mask:
of a block from another device exactly two equal, unmasked parts are computed, whichever device sent
it. So there are no branches and nothing masked is computed. `MaskedBlock` does everything else: it
compares chunk by chunk, and skips at run time what no query sees.

[B]atch, [S] local positions, [H]eads, [G]roups: heads of keys, head [D]im.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from hfjax.pallas_kernels.attention import block as flash_block
from hfjax.pallas_kernels.attention.mask import Mask, Positions
from hfjax.pallas_kernels.attention.reference import Final, State, initial_state
from hfjax.parallel.extensions.context_parallel.sequence_layout import SequenceLayout

CAUSAL, EVERYTHING = Mask(), Mask(causal=False)


@dataclass(frozen=True)
class AttentionBlock:
    """One block of attention, from state to state, and its gradients: by kernels or plain JAX."""

    kernels: bool

    def __call__(
        self, q: jax.Array, kv: jax.Array, state: State | None, mask: Mask, positions: Positions
    ) -> State:
        """Return the state of queries after these keys."""
        run = flash_block.flash_block if self.kernels else flash_block.reference
        return run(q, kv[0], kv[1], state, mask, positions)

    def backward(
        self, q: jax.Array, kv: jax.Array, final: Final, mask: Mask, positions: Positions
    ) -> tuple[jax.Array, jax.Array]:
        """Return what these keys add to dq, and the gradients of keys and values, stacked."""
        plain, kernel = flash_block.reference_backward, flash_block.flash_block_backward
        dq, dk, dv = (kernel if self.kernels else plain)(q, kv[0], kv[1], final, mask, positions)
        return dq, jnp.stack([dk, dv])


Source = jax.Array | None  # whose keys they are: the index of a device; None: this one


@dataclass(frozen=True)
class RingBlock(ABC):
    """Which blocks of attention to compute between local queries and keys of some device."""

    seq_layout: SequenceLayout
    block: AttentionBlock

    @abstractmethod
    def forward(
        self, q: jax.Array, kv: jax.Array, state: State | None, me: jax.Array, source: Source
    ) -> State:
        """Return the state of the queries of `me` after the keys of `source` (None: its own)."""

    @abstractmethod
    def backward(
        self, q: jax.Array, kv: jax.Array, final: Final, me: jax.Array, source: Source
    ) -> tuple[jax.Array, jax.Array]:
        """Return what the keys of `source` add to dq, and their own gradients."""


def _halves(x: jax.Array, dim: int) -> list[jax.Array]:
    return jnp.split(x, 2, axis=dim)


def _position_dim(x: jax.Array) -> int:
    """Return the dimension of positions: o, do and dq are [B, S, …], all else is [B, H, S]."""
    return 1 if x.ndim == 4 else 2


def _split_state(state: Any, count: int) -> list[Any]:
    """Return a State or Final in so many equal parts of its positions."""
    parts = [jnp.split(x, count, axis=_position_dim(x)) for x in state]
    return [type(state)(*part) for part in zip(*parts, strict=True)]


def _concat_parts(*parts: Any) -> Any:
    join = lambda *arrays: jnp.concatenate(arrays, axis=_position_dim(arrays[0]))
    return jax.tree.map(join, *parts)


def _select(pred: jax.Array, on_true: Any, on_false: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(pred, a, b), on_true, on_false)


@dataclass(frozen=True)
class ZigzagBlock(RingBlock):
    """Zigzag order under a plain causal mask: q0, q1 and k0, k1 are the two chunks of a device.

    The second chunk of queries comes after every first chunk of keys: (q1, k0) is always computed.
    With keys of an earlier device (q0, k0) is too, of a later one (q1, k1); none of it is masked.
    """

    def forward(
        self, q: jax.Array, kv: jax.Array, state: State | None, me: jax.Array, source: Source
    ) -> State:
        """Return the state of the queries after one more device's keys."""
        (q0, q1), (kv0, kv1) = _halves(q, 1), _halves(kv, 2)
        if source is None:
            states = [
                self.block(x, y, None, CAUSAL, Positions()) for x, y in ((q0, kv0), (q1, kv1))
            ]
            return _concat_parts(states[0], self.block(q1, kv0, states[1], EVERYTHING, Positions()))
        first, second = _split_state(state, 2)
        second = self.block(q1, kv0, second, EVERYTHING, Positions())
        is_earlier = source < me
        q, kv, before = _select(is_earlier, (q0, kv0, first), (q1, kv1, second))
        after = self.block(q, kv, before, EVERYTHING, Positions())
        return _concat_parts(_select(is_earlier, after, first), _select(is_earlier, second, after))

    def backward(
        self, q: jax.Array, kv: jax.Array, final: Final, me: jax.Array, source: Source
    ) -> tuple[jax.Array, jax.Array]:
        """Return what one device's keys add to dq, and their own gradients."""
        (q0, q1), (kv0, kv1) = _halves(q, 1), _halves(kv, 2)
        final0, final1 = _split_state(final, 2)
        dq1, dkv0 = self.block.backward(q1, kv0, final1, EVERYTHING, Positions())
        if source is None:
            dq0, more = self.block.backward(q0, kv0, final0, CAUSAL, Positions())
            dq2, dkv1 = self.block.backward(q1, kv1, final1, CAUSAL, Positions())
            return _concat_parts(dq0, dq1 + dq2), jnp.concatenate([dkv0 + more, dkv1], 2)
        is_earlier = source < me
        q, kv, last = _select(is_earlier, (q0, kv0, final0), (q1, kv1, final1))
        dq, dkv = self.block.backward(q, kv, last, EVERYTHING, Positions())
        zero = jnp.zeros((), dq.dtype)
        dq = _concat_parts(jnp.where(is_earlier, dq, zero), dq1 + jnp.where(is_earlier, zero, dq))
        zero = jnp.zeros((), dkv.dtype)
        first_dkv = dkv0 + jnp.where(is_earlier, dkv, zero)
        return dq, jnp.concatenate([first_dkv, jnp.where(is_earlier, zero, dkv)], 2)


@dataclass(frozen=True, eq=False)
class MaskedBlock(RingBlock):
    """Any order, window and documents: chunk by chunk, with the positions of both.

    `documents` are the document ids of each group's positions, [ring, B, S], if there are any.
    """

    mask: Mask
    documents: jax.Array | None

    def forward(
        self, q: jax.Array, kv: jax.Array, state: State | None, me: jax.Array, source: Source
    ) -> State:
        """Return the state of the queries after one more device's keys."""
        state = initial_state(q) if state is None else state
        chunk_states = _split_state(state, self._num_chunks)
        queries = jnp.split(q, self._num_chunks, axis=1)
        for i, (x, chunk_state) in enumerate(zip(queries, chunk_states, strict=True)):
            for j, y in enumerate(jnp.split(kv, self._num_chunks, axis=2)):
                positions = self._positions(x.shape[1], me, source, i, j)
                chunk_state = self.block(x, y, chunk_state, self.mask, positions)
            chunk_states[i] = chunk_state
        return _concat_parts(*chunk_states)

    def backward(
        self, q: jax.Array, kv: jax.Array, final: Final, me: jax.Array, source: Source
    ) -> tuple[jax.Array, jax.Array]:
        """Return what one device's keys add to dq, and their own gradients."""
        finals = _split_state(final, self._num_chunks)
        dq: list[Any] = [0] * self._num_chunks
        dkv: list[Any] = [0] * self._num_chunks
        for i, x in enumerate(jnp.split(q, self._num_chunks, axis=1)):
            for j, y in enumerate(jnp.split(kv, self._num_chunks, axis=2)):
                positions = self._positions(x.shape[1], me, source, i, j)
                more = self.block.backward(x, y, finals[i], self.mask, positions)
                dq[i], dkv[j] = dq[i] + more[0], dkv[j] + more[1]
        return jnp.concatenate(dq, axis=1), jnp.concatenate(dkv, axis=2)

    @property
    def _num_chunks(self) -> int:
        return self.seq_layout.chunks.shape[1]

    def _positions(self, size: int, me: jax.Array, source: Source, i: int, j: int) -> Positions:
        """Return the positions of chunk i of the queries and chunk j of the keys."""
        source = me if source is None else source
        starts = jnp.asarray(self.seq_layout.chunks * size, jnp.int32)
        documents = [self._documents(x, n) for x, n in ((me, i), (source, j))]
        return Positions(starts[me, i], starts[source, j], *documents)

    def _documents(self, device: jax.Array, chunk: int) -> jax.Array | None:
        if self.documents is None:
            return None
        return jnp.split(self.documents[device], self._num_chunks, axis=1)[chunk]
