"""Causal attention functions to pass to a model, and rotary positions.

[B]atch, [S]equence, [H]eads, head [D]im. Keys and values may have fewer heads, [G]: each serves
H / G consecutive query heads (grouped-query attention, Ainslie et al., 2023).
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from hfjax.models.rope import EitherRope, Rope
from hfjax.pallas_kernels import current_platform
from hfjax.pallas_kernels.capabilities import is_causal_attention
from hfjax.utils.keywords import is_int, is_real

BLOCKS = 4  # of queries: a later block attends to more keys, so 3/8 of the work is skipped
MISSING = (
    "This program for GPUs holds XLA's attention in place of cuDNN's: it keeps the scores of all "
    "pairs of tokens for the backward pass. Install cuDNN (pip install --no-deps "
    "nvidia-cudnn-cu13, or -cu12; no GPU is needed), or choose XLA's yourself: "
    'attention=functools.partial(hfjax.models.attention.dot_product, implementation="xla").'
)


@is_causal_attention
def causal_attention(
    q_BSHD: jax.Array,
    k_BSGD: jax.Array,
    v_BSGD: jax.Array,
    documents_BS: jax.Array | None = None,
) -> jax.Array:
    """Return causal attention by the fastest implementation for the devices of the current mesh.

    That is cuDNN's on a GPU, blocks of queries on a CPU. With each token's document number, tokens
    attend only within their document.
    """
    attend = _gpu_attention if current_platform.platform() in ("gpu", "cuda") else block_attention
    return attend(q_BSHD, k_BSGD, v_BSGD, documents_BS)


@cache
def windowed(window: int) -> Callable:
    """Return causal attention in which a query sees itself and the `window - 1` positions before.

    Args:
        window: The number of positions that a query sees, at least 1.

    Example:
        >>> from hfjax.models.attention import windowed
        >>> from hfjax.models.llama import LlamaConfig
        >>> LlamaConfig.tiny(attention=windowed(16)).attention.window
        16
    """
    if window < 1:
        raise ValueError(f"windowed({window}): at least 1 (a query sees itself).")

    def attend(
        q_BSHD: jax.Array,
        k_BSGD: jax.Array,
        v_BSGD: jax.Array,
        documents_BS: jax.Array | None = None,
    ) -> jax.Array:
        run = _gpu_attention if current_platform.platform() in ("gpu", "cuda") else block_attention
        return run(q_BSHD, k_BSGD, v_BSGD, documents_BS, window=window)

    return is_causal_attention(attend, window)


@cache
def capped(cap: float, window: int | None = None) -> Callable:
    """Return causal attention with a soft cap on scores: cap * tanh(score / cap).

    It is plain JAX everywhere: no kernel replaces it.

    Args:
        cap: The bound of the scores.
        window: The number of positions that a query sees, itself included. None: all before it.

    Example:
        >>> from hfjax.models.attention import capped
        >>> capped(50.0, window=4096).window
        4096
    """
    if not is_real(cap, sys.float_info.min, sys.float_info.max):
        raise ValueError(f"capped({cap!r}): a finite number above 0 is expected.")
    if not (window is None or is_int(window, 1)):
        raise ValueError(f"capped(window={window!r}): at least 1 (a query sees itself), or None.")

    attend = partial(block_attention, window=window, cap=cap)
    attend.cap, attend.window = cap, window  # type: ignore[attr-defined]
    return attend


def _gpu_attention(q_BSHD: jax.Array, *others: Any, **mask: Any) -> jax.Array:
    """Return cuDNN's attention in half precision; XLA's otherwise, or without cuDNN."""
    if q_BSHD.dtype not in (jnp.bfloat16, jnp.float16):
        return dot_product(q_BSHD, *others, implementation="xla", **mask)
    try:
        return dot_product(q_BSHD, *others, implementation="cudnn", **mask)
    except RuntimeError as error:
        if "cuDNN" not in str(error):
            raise
        warnings.warn(f"{error} {MISSING}", UserWarning, stacklevel=2)
    return dot_product(q_BSHD, *others, implementation="xla", **mask)


def dot_product(
    q_BSHD: jax.Array,
    k_BSGD: jax.Array,
    v_BSGD: jax.Array,
    documents_BS: jax.Array | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    window: int | None = None,
) -> jax.Array:
    """Return `jax.nn.dot_product_attention`, causal, optionally with a sliding window."""
    mask = None
    if documents_BS is not None:
        mask = (documents_BS[:, :, None] == documents_BS[:, None, :])[:, None]
    attend = partial(jax.nn.dot_product_attention, implementation=implementation)
    local = None if window is None else (window - 1, 0)
    return attend(q_BSHD, k_BSGD, v_BSGD, mask=mask, is_causal=True, local_window_size=local)


def block_attention(
    q_BSHD: jax.Array,
    k_BSGD: jax.Array,
    v_BSGD: jax.Array,
    documents_BS: jax.Array | None = None,
    window: int | None = None,
    cap: float | None = None,
) -> jax.Array:
    """Return causal attention per block of queries, skipping keys that none of them sees.

    `cap` is a soft cap on the scores.
    """
    length, repeats = q_BSHD.shape[1], q_BSHD.shape[2] // k_BSGD.shape[2]
    k_BSHD, v_BSHD = (jnp.repeat(x, repeats, axis=2) for x in (k_BSGD, v_BSGD))
    blocks = BLOCKS if length % BLOCKS == 0 else 1
    size = length // blocks
    outs = []
    for end in range(size, length + 1, size):
        first = 0 if window is None else max(0, end - size - window + 1)
        mask = _same_document(documents_BS, size, first, end)
        queries, span = q_BSHD[:, end - size : end], slice(first, end)
        outs.append(_attend_block(queries, k_BSHD[:, span], v_BSHD[:, span], mask, window, cap))
    return jnp.concatenate(outs, axis=1) if blocks > 1 else outs[0]


def _same_document(documents_BS: jax.Array | None, size: int, first: int, end: int) -> Any:
    """Return whether each of the last `size` queries shares a document with a key: [B, 1, Q, K]."""
    if documents_BS is None:
        return True
    queries, keys = documents_BS[:, end - size : end], documents_BS[:, first:end]
    return (queries[:, :, None] == keys[:, None, :])[:, None]


def _attend_block(
    q_BQHD: jax.Array,
    k_BKHD: jax.Array,
    v_BKHD: jax.Array,
    mask: Any,
    window: int | None,
    cap: float | None,
) -> jax.Array:
    """Return attention of the last Q positions: query i may see the keys up to K - Q + i."""
    queries, keys = q_BQHD.shape[1], k_BKHD.shape[1]
    wide = jnp.promote_types(q_BQHD.dtype, jnp.float32)
    scale = jnp.asarray(q_BQHD.shape[-1] ** -0.5, q_BQHD.dtype)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q_BQHD * scale, k_BKHD, preferred_element_type=wide)
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    q_pos, k_pos = jnp.arange(queries)[:, None] + keys - queries, jnp.arange(keys)[None]
    visible = k_pos <= q_pos if window is None else (k_pos <= q_pos) & (k_pos > q_pos - window)
    scores = jnp.where(visible[None, None] & mask, scores, jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BKHD.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v_BKHD)


def rotate(
    x_BSHD: jax.Array,
    rotary: Rope | EitherRope,
    positions_S: jax.Array | None = None,
    factors: Sequence[float] | None = None,
) -> jax.Array:
    """Return x with dimensions i and i + D/2 rotated by position * frequency i radians.

    Positions count from 0 unless they are given. `factors` additionally scales x, one factor per
    entry of its last dimension but one.

    Rotary positions (Su et al., 2021), halves paired as in the weights of Hugging Face's Llama.
    Any number of dimensions may lie between S and D. Computed in float32 or wider.
    """
    length, half = x_BSHD.shape[1], x_BSHD.shape[-1] // 2
    wide = jnp.promote_types(x_BSHD.dtype, jnp.float32)
    frequencies = rotary.frequencies(half, wide)
    positions = jnp.arange(length, dtype=wide) if positions_S is None else positions_S.astype(wide)
    angles = jnp.outer(positions, frequencies)
    angles = angles.reshape(1, length, *(1,) * (x_BSHD.ndim - 3), half)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if not (isinstance(rotary.attention_scaling, float) and rotary.attention_scaling == 1):
        cos, sin = cos * rotary.attention_scaling, sin * rotary.attention_scaling
    if factors is not None:
        by_head = jnp.asarray(factors, wide).reshape(*(1,) * (x_BSHD.ndim - 2), -1, 1)
        cos, sin = cos * by_head, sin * by_head
    x, y = jnp.split(x_BSHD.astype(wide), 2, axis=-1)
    return jnp.concatenate([x * cos - y * sin, y * cos + x * sin], axis=-1).astype(x_BSHD.dtype)
