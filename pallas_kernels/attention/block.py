"""One block of attention with explicit state: a ring passes the state on, a model with one block
finishes it (FlashAttention, Dao et al., 2022; -3, Shah et al., 2024).

`flash_block` processes one block of keys and `finish` turns a state into the attention and its lse;
`flash_block_backward` returns one block's gradients from the final lse.
`attention` and `attend` are one block, finished, with a gradient. All need a Hopper GPU and
half-precision operands; `reference…` of the same signature runs anywhere, in any precision.

A mask is static (`Mask`: causal, window); the positions of queries and keys may be traced
(`Positions`), since the block that arrives depends on the device. Queries that see nothing give
zeros, an lse of -inf and no gradient. Lengths that are no multiples of the tiles are padded in a
copy.

[B]atch, [S] queries, [T] keys, [H] query heads, [G] key heads: each serves H / G consecutive query
heads; head [D]im, 64 or 128.

The lower bound, with P visible (query, key) pairs and n bytes per number:
- forward: 4 B H P D flops; reads n B D (S H + 2 T G), writes n B S H D + 4 B H S bytes; a state
  in place of them is 8 B S H (D + 2), read and written. Causal with S = T: P = S (S + 1) / 2.
- backward: 14 B H P D flops (10 where sums are kept in device memory); reads n B D (2 S H + 2 T G)
  twice and 2 n B S H D for delta, writes its results dq, dk and dv.
Key tiles that no query of a tile sees are neither read nor multiplied.
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

    It is not differentiable: `attend` is, and `flash_block_backward` is one block's gradient.
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
    """Return the same as `flash_block`, in plain JAX: any float or head dimension, differentiable.

    JAX's own backward pass saves a state per block of keys: that of `reference_attend` does not.
    """
    del tuning
    return flash_reference.block(q_BSHD, k_BTGD, v_BTGD, state, mask, positions)


def finish(state: State) -> tuple[jax.Array, jax.Array]:
    """Return (attention [B, S, H, D], lse [B, H, S]): 0 and -inf if nothing is seen."""
    some = state.l > 0
    l = jnp.where(some, state.l, 1.0)
    lse = jnp.where(some, state.m + jnp.log(l), -jnp.inf)
    return state.o / l.swapaxes(1, 2)[..., None], lse


def final(
    out_BSHD: jax.Array, lse_BHS: jax.Array, do_BSHD: jax.Array, dlse_BHS: jax.Array | None = None
) -> Final:
    """Return the input of `flash_block_backward` for the queries, from result and gradient."""
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
    """Return one block of keys' partial sum of dq, and its dk and dv, in float32.

    Results are bit-reproducible: no sum depends on the GPU's execution order.
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
    """Return the same as `flash_block_backward`, in plain JAX, in float32 or wider."""
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

    With each token's document number, tokens attend only within their document.
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
    """Return the same as `attention`, in plain JAX."""
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
    """Return the same as `attend`, in plain JAX; lse in float32 or wider. No scores are saved."""
    return _attend(
        AttentionImpl(mask, tuning, positions.starts, False), q_BSHD, k_BTGD, v_BTGD, positions
    )


def _check(q: jax.Array, k: jax.Array, v: jax.Array, positions: Positions, tuning: Tuning) -> None:
    if reason := refuses(q, k, v, positions, tuning):
        raise ValueError(reason)


@dataclass(frozen=True)
class AttentionImpl:
    """Attention by kernels or in plain JAX: forward pass and explicit backward pass."""

    mask: Mask
    tuning: Tuning
    starts: tuple[int, int] | None
    kernels: bool

    def with_static_starts(self, positions: Positions) -> Positions:
        """Return positions whose starts are ints again, where they were at the call."""
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
    return impl.forward((q, k, v), impl.with_static_starts(positions))


def _attend_forward(
    impl: AttentionImpl, q: jax.Array, k: jax.Array, v: jax.Array, positions: Positions
):
    out, lse = impl.forward((q, k, v), impl.with_static_starts(positions))
    return (out, lse), (q, k, v, positions, out, lse)


def _attend_backward(impl: AttentionImpl, residuals: tuple, cotangents: tuple):
    q, k, v, positions, out, lse = residuals
    do, dlse = cotangents
    return (
        *impl.backward((q, k, v), final(out, lse, do, dlse), impl.with_static_starts(positions)),
        None,
    )


_attend.defvjp(_attend_forward, _attend_backward)
