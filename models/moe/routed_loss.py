"""The loss of a model with mixtures: that of its outputs, and what its routers add."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfjax.models.layers import plain
from hfjax.models.loss import next_token_loss as of_tokens, token_losses
from hfjax.models.moe.losses import balance
from hfjax.models.moe.metrics import DROPPED, LOAD, Routed, Told
from hfjax.models.moe.router import Router
from hfjax.pallas_kernels.capabilities import Projection, takes_projection
from hfjax.utils.mean import ENTROPY, Mean


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


def with_routing(losses: jax.Array, weights: jax.Array | np.ndarray, routed: Routed) -> Mean:
    """Return the mean loss of tokens plus what routers add, with their metrics.

    Args:
        losses: Of each token, [B, S].
        weights: What each token weighs.
        routed: What the model returned.
    """
    told = routed.told
    if told.scores.shape[-1]:
        raise ValueError(
            'a router balances over the batch (Router(balance_over="batch"), as "mixtral" and '
            '"qwen3" do), and nothing has added that loss. Where the model has all that was told: '
            "told = hfjax.models.moe.over_batch(told, router, self.kernels), with self.kernels = "
            'hfjax.models.layers.plain; or take balance_over="group".'
        )
    total, weight = (losses * weights).sum(), weights.sum()
    added = (told.loss.reshape(losses.shape) * weights).sum()
    metrics = {"token_loss": Mean(total, weight)} | _metrics(told)
    return Mean(total + added, weight, metrics)


def _metrics(told: Told) -> dict[str, Mean]:
    """Return the metrics of every layer, in the order of paths, whichever was called first."""
    order = jnp.argsort(told.number, axis=1, stable=True)

    def in_order(x: jax.Array) -> jax.Array:
        numbers = order.reshape(*order.shape, *[1] * (x.ndim - 2))
        return jnp.take_along_axis(x, numbers, 1).sum(0)

    load, dropped, entropy = map(in_order, (told.load, told.dropped, told.entropy))
    some = lambda weight: weight + 1e-30  # where no token is used anywhere: shares of 0
    chosen, used = some(load.sum(-1)), some(in_order(told.tokens))
    return {
        LOAD: Mean(load, chosen[:, None]),
        DROPPED: Mean(dropped, chosen),
        ENTROPY: Mean(entropy, used),
    }


def over_batch(
    told: Told,
    router: Router,
    kernels: Any = plain,
    counts: Sequence[int] | None = None,
    training: bool = True,
) -> Told:
    """Return what was told, with the loss of balance over all rows of the microbatch added.

    That is one loss for each layer, added up, or one of all layers, if the router asks for it. A
    model calls it once, after its last mixture.

    Args:
        told: By all mixtures of the model.
        router: That of all of them.
        kernels: The model's `self.kernels`: it knows the rows of other devices.
        counts: The number of experts of each layer, where they differ.
        training: Whether a loss is to be added.
    """
    if not told.scores.shape[-1]:
        return told
    added = jnp.zeros(())
    if training:
        chosen, scored = (x.sum(0)[:, None] for x in (told.load, told.scores))
        if router.pools_layers:
            chosen, scored = chosen.sum(0, keepdims=True), scored.sum(0, keepdims=True)
            counts = counts and [max(counts)]
        losses = balance(chosen, scored, kernels.sum_over_batch)
        real = counts or [told.experts] * len(losses)  # where fewer, they are padded
        added = router.balance_loss * (jnp.asarray(real) / told.experts * losses).sum()
    return replace(told, loss=told.loss + added, scores=told.scores[..., :0])
