"""What a language model is trained on. [B]atch, [S]equence, [V]ocabulary."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.base.mean import Mean
from hfjax.pallas_kernels.handing import Projection, takes_projection


@takes_projection
def next_token_loss(outputs: jax.Array | Projection, batch: Mapping[str, jax.Array]) -> Mean:
    """Return the cross entropy of each next token; `batch["mask"]` ([B, S]) may weigh them.

    The outputs are logits [B, S, V], or what stands for them where they are never made. A negative
    token is no target: it counts nothing. One beyond the vocabulary makes the loss NaN.
    """
    targets = batch["tokens"][:, 1:]
    made = isinstance(outputs, Projection)
    losses = outputs.losses(targets) if made else _of_logits(outputs, targets)
    mask = batch.get("mask", jnp.ones_like(losses)).astype(losses.dtype) * (targets >= 0)
    return Mean((losses * mask).sum(), mask.sum())


def _of_logits(logits_BSV: jax.Array, targets_BS: jax.Array) -> jax.Array:
    logits = logits_BSV.astype(jnp.promote_types(logits_BSV.dtype, jnp.float32))
    columns = lax.broadcasted_iota(targets_BS.dtype, (1, 1, logits.shape[-1]), 2)
    picked = jnp.where(columns == targets_BS[..., None], logits, 0).sum(-1)
    losses = jax.nn.logsumexp(logits, axis=-1) - picked
    return jnp.where(targets_BS < logits.shape[-1], losses, jnp.nan)
