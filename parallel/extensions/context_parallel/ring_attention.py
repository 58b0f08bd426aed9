"""Attention with keys and values sent around a ring (`ring`), or all-gathered (`allgather`).

Both are written with their backward pass: nothing differentiates through the merging of blocks.
The backward pass recomputes attention weights from the final log-sum-exp, so that each block needs
nothing of the others (FlashAttention 2; Liu et al., Ring Attention, 2023; Llama 3 gathers).

What each device sends, N devices, with one device's keys and values of `kv` bytes, and of `wide`
bytes in float32 (or wider):
- ring: (N - 1) kv forward; (N - 1) (kv + wide) backward. The gradient of a block is sent with it
  and accumulates each device's part; that of the own block is not sent. Under a window a block is
  sent only as far as queries see it.
- allgather: (N - 1) kv forward; (N - 1) (kv + wide) backward: all-gathered again, gradients
  reduce-scattered.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.pallas_kernels.attention import block as flash_block
from hfjax.pallas_kernels.attention.reference import State
from hfjax.parallel.extensions.context_parallel.ring_block import RingBlock
from hfjax.parallel.extensions.context_parallel.sequence_layout import SequenceLayout
from hfjax.utils.paths import Index

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Ring:
    """Attention on one of the devices that share a sequence: its queries are not sent."""

    seq_layout: SequenceLayout
    axes: Axes  # of the mesh: their devices share a sequence
    ring_block: RingBlock
    gathers: bool  # all-gathers keys and values, instead of a ring
    hops: int  # how many groups before this one have keys that it may see

    def forward(
        self, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Return the output of the local queries, and the residuals."""
        me, kv = self.me, jnp.stack([k, v])
        next_block, moving = self._sources(kv)
        state = self.ring_block.forward(q, kv, None, me, None)

        def join(state: State, kv: jax.Array, source: jax.Array) -> State:
            return self.ring_block.forward(q, kv, state, me, source)

        final_state = self._scan_sources(next_block, moving, join, state)
        out, lse = flash_block.finish(final_state)
        out = out.astype(q.dtype)
        return out, (out, lse)

    def backward(
        self,
        operands: tuple[jax.Array, jax.Array, jax.Array],
        residuals: tuple[jax.Array, jax.Array],
        do: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the gradients of queries, keys and values."""
        q, k, v = operands
        final, kv, me = flash_block.final(*residuals, do), jnp.stack([k, v]), self.me
        block_vjp = lambda kv, source: self.ring_block.backward(q, kv, final, me, source)
        own = block_vjp(kv, None)
        reduce_gradients = self._gather_backward if self.gathers else self._ring_backward
        dq, dkv = reduce_gradients(kv, block_vjp, *own) if self.hops else own
        return dq.astype(q.dtype), dkv[0].astype(k.dtype), dkv[1].astype(v.dtype)

    # -- groups ---------------------------------------------------------------------------------

    @property
    def me(self) -> jax.Array:
        """The index of this device's group."""
        return lax.axis_index(self.axes) // self.seq_layout.ulysses

    def _source(self, hop: Index) -> jax.Array:
        """Return the group whose keys are on this device after some hops."""
        return (self.me - hop) % self.seq_layout.ring_size

    def send(self, x: jax.Array, hops: int = 1) -> jax.Array:
        """Return the value of the group `hops` before this one."""
        step, count = self.seq_layout.ulysses * hops, self.seq_layout.devices
        pairs = [(i, (i + step) % count) for i in range(count)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axes, pairs), x)

    @property
    def groups(self) -> list[list[int]] | None:
        """The groups of devices that gather from each other: those with the same heads."""
        if self.seq_layout.ulysses == 1:
            return None
        group_ids = range(self.seq_layout.ring_size)
        return [
            [m + self.seq_layout.ulysses * g for g in group_ids]
            for m in range(self.seq_layout.ulysses)
        ]

    def gather(self, x: jax.Array) -> jax.Array:
        """Return the values of all groups, [ring, …]."""
        return lax.all_gather(x, self.axes, axis_index_groups=self.groups)

    # -- forward --------------------------------------------------------------------------------

    def _sources(self, kv: jax.Array) -> tuple[Callable, Any]:
        """Return (moving, hop) -> (keys and values, next moving), and the first moving."""
        if not self.hops:
            return (lambda moving, hop: (moving, moving)), kv
        if self.gathers:
            all_kv = self.gather(kv)
            return (lambda moving, hop: (moving[self._source(hop)], moving)), all_kv
        return (lambda moving, hop: (moving, self.send(moving))), self.send(kv)

    def _scan_sources(self, next_block: Callable, moving: Any, join: Callable, state: Any) -> Any:
        """Return the state after the keys of all other groups; the last hop sends nothing on."""
        last = self.hops

        def step(carry: tuple, hop: jax.Array) -> tuple[tuple, None]:
            state, moving = carry
            kv, moving = next_block(moving, hop)
            return (join(state, kv, self._source(hop)), moving), None

        if last > 1:
            (state, moving), _ = lax.scan(step, (state, moving), jnp.arange(1, last))
        if last < 1:
            return state
        kv = moving[self._source(last)] if self.gathers else moving
        return join(state, kv, self._source(last))

    # -- backward -------------------------------------------------------------------------------

    def _ring_backward(
        self, kv: jax.Array, block_vjp: Callable, dq: jax.Array, own: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return dq, dkv; a block's gradient follows it one hop later, while the next is made."""
        last = self.hops
        kv = self.send(kv)
        if last == 1:
            more, dkv = block_vjp(kv, self._source(1))
            return dq + more, own + self.send(dkv, -last)
        next_kv = self.send(kv)
        more, dkv = block_vjp(kv, self._source(1))

        def step(carry: tuple, hop: jax.Array) -> tuple[tuple, None]:
            dq, kv, dkv = carry
            next_kv, arrived = self.send(kv), self.send(dkv)
            more, local_dkv = block_vjp(kv, self._source(hop))
            return (dq + more, next_kv, arrived + local_dkv), None

        carry = (dq + more, next_kv, dkv)
        if last > 2:
            carry, _ = lax.scan(step, carry, jnp.arange(2, last))
        dq, kv, dkv = carry
        arrived = self.send(dkv)
        more, local_dkv = block_vjp(kv, self._source(last))
        return dq + more, own + self.send(arrived + local_dkv, -last)

    def _gather_backward(
        self, kv: jax.Array, block_vjp: Callable, dq: jax.Array, own: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        all_kv = self.gather(kv)
        sums = jnp.zeros(all_kv.shape, own.dtype).at[self.me].set(own)

        def step(carry: tuple, hop: jax.Array) -> tuple[tuple, None]:
            dq, sums = carry
            source = self._source(hop)
            more, dkv = block_vjp(all_kv[source], source)
            return (dq + more, sums.at[source].set(dkv)), None

        (dq, sums), _ = lax.scan(step, (dq, sums), jnp.arange(1, self.hops + 1))
        own_dkv = lax.psum_scatter(sums, self.axes, axis_index_groups=self.groups)
        return dq, own_dkv
