"""The loss of language models. [B]atch, [S]equence, [V]ocabulary."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.models.layers import position_in_document
from hfjax.pallas_kernels.capabilities import Projection, takes_projection
from hfjax.utils.head import widen_tokens
from hfjax.utils.mean import Mean


def next_tokens(batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the inputs and targets of a model, all [B, S], from tokens [B, S + 1].

    These are `tokens`, `targets` and what else the batch has: `mask`, and `documents` with each
    token's position in its document (`positions`). A batch with targets is returned unchanged.

    Args:
        batch: Tokens [B, S + 1]; optionally documents [B, S + 1] and a mask of the targets, [B, S].

    Example:
        >>> import jax.numpy as jnp
        >>> from hfjax.models.loss import next_tokens
        >>> made = next_tokens({"tokens": jnp.array([[5, 6, 7]])})
        >>> made["tokens"].tolist(), made["targets"].tolist()
        ([[5, 6]], [[6, 7]])
    """
    if "targets" in batch:
        return dict(batch)
    tokens = widen_tokens(batch["tokens"])
    _check_tokens(tokens)
    inputs = {**batch, "tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    if "documents" in batch:
        _check_documents(batch["documents"], tokens)
        inputs["documents"] = documents = batch["documents"][:, :-1]
        inputs["positions"] = position_in_document(documents)
    return inputs


def _check_tokens(tokens: jax.Array) -> None:
    """Refuse tokens without a next one to predict; floats are refused by the embedding."""
    if jnp.issubdtype(tokens.dtype, jnp.bool_) or jnp.issubdtype(tokens.dtype, jnp.complexfloating):
        raise ValueError(f"tokens of dtype {tokens.dtype}: whole numbers are expected, int32.")
    if tokens.ndim != 2 or tokens.shape[1] < 2:
        raise ValueError(
            f"tokens of shape {list(tokens.shape)}: [rows, positions] are expected, of two or "
            "more positions, since each token predicts the next."
        )


def _check_documents(documents: jax.Array, tokens: jax.Array) -> None:
    """Refuse arrays that are not one document number per token."""
    if documents.shape != tokens.shape or not jnp.issubdtype(documents.dtype, jnp.integer):
        raise ValueError(
            f"documents {documents.dtype}{list(documents.shape)} beside tokens "
            f"{list(tokens.shape)}: the whole number of its document is expected for each token."
        )


@takes_projection
def next_token_loss(outputs: jax.Array | Projection, batch: Mapping[str, jax.Array]) -> Mean:
    """Return the cross entropy of next tokens, weighted by `batch["mask"]` ([B, S]) if present.

    The outputs are logits [B, S, V], or a `Projection` where logits are never computed. A negative
    target is ignored. One beyond the vocabulary makes the loss NaN.
    """
    losses, mask = token_losses(outputs, batch)
    return Mean((losses * mask).sum(), mask.sum())


def token_losses(
    outputs: jax.Array | Projection, batch: Mapping[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Return the cross entropy and the weight of each next token, both [B, S]."""
    targets = widen_tokens(batch["targets"] if "targets" in batch else batch["tokens"][:, 1:])
    is_projection = isinstance(outputs, Projection)
    losses = outputs.losses(targets) if is_projection else _logit_losses(outputs, targets)
    mask = batch.get("mask", jnp.ones_like(losses))
    fits = mask.shape in (targets.shape, (len(targets), 1))  # or one weight per sequence
    if not fits or jnp.issubdtype(mask.dtype, jnp.complexfloating):
        raise ValueError(
            f"mask {mask.dtype}{list(mask.shape)} beside targets {list(targets.shape)}: what each "
            "of them weighs is expected, true and false or a number."
        )
    return losses, mask.astype(losses.dtype) * (targets >= 0)


def _logit_losses(logits_BSV: jax.Array, targets_BS: jax.Array) -> jax.Array:
    logits = logits_BSV.astype(jnp.promote_types(logits_BSV.dtype, jnp.float32))
    columns = lax.broadcasted_iota(targets_BS.dtype, (1, 1, logits.shape[-1]), 2)
    picked = jnp.where(columns == targets_BS[..., None], logits, 0).sum(-1)
    losses = jax.nn.logsumexp(logits, axis=-1) - picked
    return jnp.where(targets_BS < logits.shape[-1], losses, jnp.nan)
