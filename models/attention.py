"""Causal attention, handed to a model as a function. [B]atch, [S]equence, [H]eads, head [D]im."""

from typing import Literal

import jax
import jax.numpy as jnp

BLOCKS = 4  # of queries: a later block attends to more keys, so 3/8 of the work is skipped


def causal_attention(q_BSHD: jax.Array, k_BSHD: jax.Array, v_BSHD: jax.Array) -> jax.Array:
    """Return causal attention by what is fastest here: cuDNN on a GPU, query blocks on a CPU."""
    if jax.default_backend() == "gpu":
        half = q_BSHD.dtype in (jnp.bfloat16, jnp.float16)
        return dot_product(q_BSHD, k_BSHD, v_BSHD, "cudnn" if half else "xla")
    return blocked(q_BSHD, k_BSHD, v_BSHD)


def dot_product(
    q_BSHD: jax.Array,
    k_BSHD: jax.Array,
    v_BSHD: jax.Array,
    implementation: Literal["xla", "cudnn"] | None = None,
) -> jax.Array:
    """Return `jax.nn.dot_product_attention`, causal."""
    attend = jax.nn.dot_product_attention
    return attend(q_BSHD, k_BSHD, v_BSHD, is_causal=True, implementation=implementation)


def blocked(q_BSHD: jax.Array, k_BSHD: jax.Array, v_BSHD: jax.Array) -> jax.Array:
    """Return causal attention computed per block of queries, without the keys after the block."""
    length = q_BSHD.shape[1]
    blocks = BLOCKS if length % BLOCKS == 0 else 1
    size = length // blocks
    parts = [
        _block(q_BSHD[:, i * size : (i + 1) * size], k_BSHD[:, :end], v_BSHD[:, :end])
        for i in range(blocks)
        for end in [(i + 1) * size]
    ]
    return jnp.concatenate(parts, axis=1) if blocks > 1 else parts[0]


def _block(q_BQHD: jax.Array, k_BKHD: jax.Array, v_BKHD: jax.Array) -> jax.Array:
    """The queries are the last ones: query i may see the keys up to K - Q + i."""
    queries, keys = q_BQHD.shape[1], k_BKHD.shape[1]
    wide = jnp.promote_types(q_BQHD.dtype, jnp.float32)
    scale = jnp.asarray(q_BQHD.shape[-1] ** -0.5, q_BQHD.dtype)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q_BQHD * scale, k_BKHD, preferred_element_type=wide)
    visible = jnp.arange(keys)[None] <= jnp.arange(queries)[:, None] + keys - queries
    scores = jnp.where(visible[None, None], scores, jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BKHD.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v_BKHD)
