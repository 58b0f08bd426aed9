"""One block of attention with its state in and out: a ring goes on with the state, a model that has
one block finishes it (FlashAttention, Dao et al., 2022; -3, Shah et al., 2024).

`flash_block` visits one block of keys and `finish` turns a state into the attention and its lse;
`flash_block_backward` gives one block's gradients from the final lse.
`attention` and `attend` are one block, finished, with a gradient. All need a Hopper GPU and
half-precision operands; `reference…` of the same signature runs anywhere, in any precision.

A mask is static (`Mask`: causal, window); where queries and keys stand may be traced (`Positions`),
since the block that arrives depends on the device. Queries that see nothing give zeros, an lse
of -inf and no gradient. Lengths that are no multiples of the tiles are padded in a copy.

[B]atch, [S] queries, [T] keys, [H] heads of queries, [G] heads of keys: each serves H / G heads
of queries that follow one another; head [D]im, 64 or 128.

The floor, with P pairs of a query and a key that see each other, n bytes a number:
- forward: 4 B H P D flops; reads n B D (S H + 2 T G), writes n B S H D + 4 B H S bytes; a state
  in place of them is 8 B S H (D + 2), read and written. Causal with S = T: P = S (S + 1) / 2.
- backward: 14 B H P D flops (10 where sums are kept in device memory); reads n B D (2 S H + 2 T G)
  twice and 2 n B S H D for delta, writes what it returns: dq, dk and dv.
Tiles of keys that no query of the tile sees are neither read nor multiplied.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from hfjax.pallas_kernels.attention import launch, reference as flash_reference
from hfjax.pallas_kernels.attention.launch import FROM_ZERO, TUNING, Tuning, refuses
from hfjax.pallas_kernels.attention.mask import Mask, Positions
from hfjax.pallas_kernels.attention.reference import Final, State

__all__ = [
    "Final",
    "Mask",
    "Positions",
    "State",
    "Tuning",
    "attend",
    "attention",
    "final",
    "finish",
    "flash_block",
    "flash_block_backward",
    "reference",
    "reference_attend",
    "reference_attention",
    "reference_backward",
    "refuses",
]

CAUSAL = Mask()


def flash_block(
    q_BSHD: jax.Array,
    k_BTGD: jax.Array,
    v_BTGD: jax.Array,
    state: State | None = None,
    mask: Mask = CAUSAL,
    positions: Positions = FROM_ZERO,
    tuning: Tuning = TUNING,
) -> State:
    """Return the state of the queries after one more block of keys; blocks may come in any order.

    It has no gradient of its own: `attend` has, and `flash_block_backward` is one block's.
    """
    _check(q_BSHD, k_BTGD, v_BTGD, positions, tuning)
    if state is not None and state.o.shape != q_BSHD.shape:
        raise ValueError(
            f"state.o {list(state.o.shape)} is not of q_BSHD {list(q_BSHD.shape)}: "
            "a state goes on with the queries that it began with."
        )
    return launch.block((q_BSHD, k_BTGD, v_BTGD), state, mask, positions, tuning)


def reference(
    q_BSHD: jax.Array,
    k_BTGD: jax.Array,
    v_BTGD: jax.Array,
    state: State | None = None,
    mask: Mask = CAUSAL,
    positions: Positions = FROM_ZERO,
    tuning: Tuning = TUNING,
) -> State:
    """Return what `flash_block` does, in plain JAX: any float, any head dimension; differentiable.

    The backward pass of JAX's own keeps a state per block of keys: `reference_attend` does not.
    """
    del tuning
    return flash_reference.block(q_BSHD, k_BTGD, v_BTGD, state, mask, positions)


def finish(state: State) -> tuple[jax.Array, jax.Array]:
    """Return (what is attended to, [B, S, H, D]; lse, [B, H, S]): 0 and -inf if nothing is seen."""
    some = state.l > 0
    l = jnp.where(some, state.l, 1.0)
    lse = jnp.where(some, state.m + jnp.log(l), -jnp.inf)
    return state.o / l.swapaxes(1, 2)[..., None], lse


def final(
    out_BSHD: jax.Array, lse_BHS: jax.Array, do_BSHD: jax.Array, dlse_BHS: jax.Array | None = None
) -> Final:
    """Return what `flash_block_backward` needs of the queries, from the result and its gradient."""
    wide = jnp.promote_types(lse_BHS.dtype, jnp.float32)
    delta = (out_BSHD.astype(wide) * do_BSHD.astype(wide)).sum(-1).swapaxes(1, 2)
    return Final(do_BSHD, lse_BHS, delta if dlse_BHS is None else delta - dlse_BHS)


def flash_block_backward(
    q_BSHD: jax.Array,
    k_BTGD: jax.Array,
    v_BTGD: jax.Array,
    final: Final,
    mask: Mask = CAUSAL,
    positions: Positions = FROM_ZERO,
    tuning: Tuning = TUNING,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return what one block of keys adds to dq, and its dk and dv, in float32: ready to be summed.

    The same bits every time: no sum depends on the order in which the GPU works.
    """
    _check(q_BSHD, k_BTGD, v_BTGD, positions, tuning)
    operands = (q_BSHD, k_BTGD, v_BTGD)
    return launch.block_backward(operands, final, mask, positions, tuning, jnp.float32)


def reference_backward(
    q_BSHD: jax.Array,
    k_BTGD: jax.Array,
    v_BTGD: jax.Array,
    final: Final,
    mask: Mask = CAUSAL,
    positions: Positions = FROM_ZERO,
    tuning: Tuning = TUNING,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return what `flash_block_backward` does, in plain JAX, in float32 or wider."""
    del tuning
    return flash_reference.block_backward(q_BSHD, k_BTGD, v_BTGD, final, mask, positions)


def attention(
    q_BSHD: jax.Array,
    k_BTGD: jax.Array,
    v_BTGD: jax.Array,
    mask: Mask = CAUSAL,
    documents_BS: jax.Array | None = None,
    tuning: Tuning = TUNING,
) -> jax.Array:
    """Return attention, causal unless the mask says otherwise, in the dtype of the queries.

    With the number of each token's document, it stays inside documents.
    """
    positions = Positions(0, 0, documents_BS, documents_BS)
    return attend(q_BSHD, k_BTGD, v_BTGD, mask, positions, tuning)[0]


def reference_attention(
    q_BSHD: jax.Array,
    k_BTGD: jax.Array,
    v_BTGD: jax.Array,
    mask: Mask = CAUSAL,
    documents_BS: jax.Array | None = None,
    tuning: Tuning = TUNING,
) -> jax.Array:
    """Return what `attention` does, in plain JAX."""
    positions = Positions(0, 0, documents_BS, documents_BS)
    return reference_attend(q_BSHD, k_BTGD, v_BTGD, mask, positions, tuning)[0]


def attend(
    q_BSHD: jax.Array,
    k_BTGD: jax.Array,
    v_BTGD: jax.Array,
    mask: Mask = CAUSAL,
    positions: Positions = FROM_ZERO,
    tuning: Tuning = TUNING,
) -> tuple[jax.Array, jax.Array]:
    """Return (attention in the dtype of the queries, lse in float32); both have gradients."""
    _check(q_BSHD, k_BTGD, v_BTGD, positions, tuning)
    return _attend(
        AttentionImpl(mask, tuning, positions.starts, True), q_BSHD, k_BTGD, v_BTGD, positions
    )


def reference_attend(
    q_BSHD: jax.Array,
    k_BTGD: jax.Array,
    v_BTGD: jax.Array,
    mask: Mask = CAUSAL,
    positions: Positions = FROM_ZERO,
    tuning: Tuning = TUNING,
) -> tuple[jax.Array, jax.Array]:
    """Return what `attend` does, in plain JAX; lse in float32 or wider. No score is kept."""
    return _attend(
        AttentionImpl(mask, tuning, positions.starts, False), q_BSHD, k_BTGD, v_BTGD, positions
    )


def _check(q: jax.Array, k: jax.Array, v: jax.Array, positions: Positions, tuning: Tuning) -> None:
    if reason := refuses(q, k, v, positions, tuning):
        raise ValueError(reason)


@dataclass(frozen=True)
class AttentionImpl:
    """Attention by kernels or in plain JAX: its forward pass, and its backward pass by hand."""

    mask: Mask
    tuning: Tuning
    starts: tuple[int, int] | None
    kernels: bool

    def resolve_starts(self, positions: Positions) -> Positions:
        """Return places whose starts are numbers, where they were when it was called."""
        if self.starts is None:
            return positions
        return positions._replace(query_start=self.starts[0], key_start=self.starts[1])

    def forward(self, operands: tuple, positions: Positions) -> tuple[jax.Array, jax.Array]:
        """Return (attention, lse)."""
        if self.kernels:
            return launch.forward(operands, self.mask, positions, self.tuning)
        q, k, v = operands
        out, lse = finish(flash_reference.block(q, k, v, None, self.mask, positions))
        return out.astype(q.dtype), lse

    def backward(self, operands: tuple, final: Final, positions: Positions) -> tuple:
        """Return the gradients of the operands."""
        dtype = operands[0].dtype
        if self.kernels:
            options = (self.mask, positions, self.tuning, dtype)
            return launch.block_backward(operands, final, *options)
        q, k, v = operands
        grads = flash_reference.block_backward(q, k, v, final, self.mask, positions)
        return tuple(x.astype(dtype) for x in grads)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    impl: AttentionImpl, q: jax.Array, k: jax.Array, v: jax.Array, positions: Positions
) -> tuple[jax.Array, jax.Array]:
    return impl.forward((q, k, v), impl.resolve_starts(positions))


def _attend_forward(
    impl: AttentionImpl, q: jax.Array, k: jax.Array, v: jax.Array, positions: Positions
):
    out, lse = impl.forward((q, k, v), impl.resolve_starts(positions))
    return (out, lse), (q, k, v, positions, out, lse)


def _attend_backward(impl: AttentionImpl, residuals: tuple, cotangents: tuple):
    q, k, v, positions, out, lse = residuals
    do, dlse = cotangents
    return (
        *impl.backward((q, k, v), final(out, lse, do, dlse), impl.resolve_starts(positions)),
        None,
    )


_attend.defvjp(_attend_forward, _attend_backward)
