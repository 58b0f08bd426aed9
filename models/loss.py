"""What a language model is trained on. [B]atch, [S]equence, [V]ocabulary."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.mean import Mean


def next_token_loss(logits_BSV: jax.Array, batch: Mapping[str, jax.Array]) -> Mean:
    """Return the cross entropy of each next token; `batch["mask"]` ([B, S]) may weigh them."""
    targets = batch["tokens"][:, 1:]
    logits = logits_BSV.astype(jnp.promote_types(logits_BSV.dtype, jnp.float32))
    columns = lax.broadcasted_iota(targets.dtype, (1, 1, logits.shape[-1]), 2)
    picked = jnp.where(columns == targets[..., None], logits, 0).sum(-1)
    losses = jax.nn.logsumexp(logits, axis=-1) - picked
    mask = batch.get("mask", jnp.ones_like(losses)).astype(losses.dtype)
    return Mean((losses * mask).sum(), mask.sum())
