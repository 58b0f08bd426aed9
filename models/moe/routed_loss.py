"""The loss of a model with mixtures: the loss of its outputs plus the routers' losses."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfjax.models.layers import local_ops
from hfjax.models.loss import next_token_loss as of_tokens, token_losses
from hfjax.models.moe.losses import balance
from hfjax.models.moe.metrics import DROPPED, LOAD, RoutedOutputs, RouterMetrics
from hfjax.models.moe.router import Router
from hfjax.pallas_kernels.capabilities import Projection, takes_projection
from hfjax.utils.mean import ENTROPY, Mean


def uses_router_metrics(loss: Callable) -> Callable:
    """Return a loss, marked as one that takes `RoutedOutputs`."""
    loss.uses_router_metrics = True  # type: ignore[attr-defined]
    return loss


@uses_router_metrics
@takes_projection
def next_token_loss(
    outputs: RoutedOutputs | jax.Array | Projection, batch: Mapping[str, jax.Array]
) -> Mean:
    """Return the cross entropy of next tokens, plus the routers' losses of each token.

    The Mean has metrics of every layer: `expert_load` (the share of choices of each expert),
    `dropped` (the share without a slot), `router_entropy`; and `token_loss`.
    """
    if not isinstance(outputs, RoutedOutputs):
        return of_tokens(outputs, batch)
    losses, weights = token_losses(outputs.outputs, batch)
    return with_routing(losses, weights, outputs)


def with_routing(losses: jax.Array, weights: jax.Array | np.ndarray, routed: RoutedOutputs) -> Mean:
    """Return the mean loss of tokens plus the routers' losses, with router metrics.

    Args:
        losses: The loss of each token, [B, S].
        weights: The weight of each token.
        routed: The outputs of the model.
    """
    router_metrics = routed.router_metrics
    if router_metrics.scores.shape[-1]:
        raise ValueError(
            'a router balances over the batch (Router(balance_over="batch"), as "mixtral" and '
            '"qwen3" do), and nothing has added that loss. Where the model has all that was told: '
            "told = hfjax.models.moe.over_batch(told, router, self.kernels), with self.kernels = "
            'hfjax.models.layers.local_ops; or take balance_over="group".'
        )
    loss_sum, weight = (losses * weights).sum(), weights.sum()
    router_loss = (router_metrics.loss.reshape(losses.shape) * weights).sum()
    metrics = {"token_loss": Mean(loss_sum, weight)} | _layer_metrics(router_metrics)
    return Mean(loss_sum + router_loss, weight, metrics)


def _layer_metrics(router_metrics: RouterMetrics) -> dict[str, Mean]:
    """Return the metrics of every layer, in the order of paths, whatever the call order."""
    order = jnp.argsort(router_metrics.number, axis=1, stable=True)

    def in_order(x: jax.Array) -> jax.Array:
        numbers = order.reshape(*order.shape, *[1] * (x.ndim - 2))
        return jnp.take_along_axis(x, numbers, 1).sum(0)

    load, dropped, entropy = map(
        in_order, (router_metrics.load, router_metrics.dropped, router_metrics.entropy)
    )
    nonzero = lambda weight: weight + 1e-30  # if no token is used anywhere, shares are 0
    num_choices, num_used = nonzero(load.sum(-1)), nonzero(in_order(router_metrics.tokens))
    return {
        LOAD: Mean(load, num_choices[:, None]),
        DROPPED: Mean(dropped, num_choices),
        ENTROPY: Mean(entropy, num_used),
    }


def over_batch(
    router_metrics: RouterMetrics,
    router: Router,
    kernels: Any = local_ops,
    counts: Sequence[int] | None = None,
    training: bool = True,
) -> RouterMetrics:
    """Return the metrics with the balance loss over all examples of the microbatch added.

    That is the sum of one loss per layer, or one loss pooled over layers, as the router says. A
    model calls it once, after its last mixture.

    Args:
        router_metrics: The metrics of all mixtures of the model.
        router: The router of all of them.
        kernels: The model's `self.kernels`: it reduces over the examples of all devices.
        counts: The number of experts of each layer, where they differ.
        training: Whether to add the loss.
    """
    if not router_metrics.scores.shape[-1]:
        return router_metrics
    batch_loss = jnp.zeros(())
    if training:
        loads, scores = (x.sum(0)[:, None] for x in (router_metrics.load, router_metrics.scores))
        if router.pools_layers:
            loads, scores = loads.sum(0, keepdims=True), scores.sum(0, keepdims=True)
            counts = counts and [max(counts)]
        losses = balance(loads, scores, kernels.sum_over_batch)
        num_experts = counts or [router_metrics.experts] * len(
            losses
        )  # layers with fewer are padded
        batch_loss = (
            router.balance_loss * (jnp.asarray(num_experts) / router_metrics.experts * losses).sum()
        )
    return replace(
        router_metrics, loss=router_metrics.loss + batch_loss, scores=router_metrics.scores[..., :0]
    )
