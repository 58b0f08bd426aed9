"""The loss of a model with mixtures: that of its outputs, and what its routers add."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from hfjax.base.mean import Mean
from hfjax.models.loss import next_token_loss as of_tokens, token_losses
from hfjax.models.moe.told import DROPPED, ENTROPY, LOAD, Routed, Told
from hfjax.pallas_kernels.handing import Projection, takes_projection


def takes_routing(loss: Callable) -> Callable:
    """Return a loss, marked as one that takes `Routed` outputs."""
    loss.takes_routing = True  # type: ignore[attr-defined]
    return loss


@takes_routing
@takes_projection
def next_token_loss(
    outputs: Routed | jax.Array | Projection, batch: Mapping[str, jax.Array]
) -> Mean:
    """Return the cross entropy of each next token, plus what routers add to each token.

    Metrics of every layer are in the Mean: `expert_load` (the share of choices that fell on each
    expert), `dropped` (the share without a place), `router_entropy`; and `token_loss`.
    """
    if not isinstance(outputs, Routed):
        return of_tokens(outputs, batch)
    losses, weights = token_losses(outputs.outputs, batch)
    return with_routing(losses, weights, outputs)


def with_routing(losses: jax.Array, weights: jax.Array, routed: Routed) -> Mean:
    """Return the mean loss of tokens plus what routers add, with their metrics.

    Args:
        losses: Of each token, [B, S].
        weights: What each token weighs.
        routed: What the model returned.
    """
    told = routed.told
    total, weight = (losses * weights).sum(), weights.sum()
    added = (told.loss.reshape(losses.shape) * weights).sum()
    metrics = {"token_loss": Mean(total, weight)} | _metrics(told)
    return Mean(total + added, weight, metrics)


def _metrics(told: Told) -> dict[str, Mean]:
    load = told.load.sum(0)
    of_layer, tokens = load.sum(-1), told.loss.size
    chosen = of_layer.mean()
    even = jnp.where(of_layer > 0, chosen / of_layer, 0)  # layers may differ in `top_k`
    return {
        LOAD: Mean(load * even[:, None], chosen),
        DROPPED: Mean(told.dropped.sum(0) * even, chosen),
        ENTROPY: Mean(told.entropy.sum(0), jnp.asarray(tokens, load.dtype)),
    }
