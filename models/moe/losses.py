"""Auxiliary losses of routers. [N] tokens, [E]xperts.

Each has a value per token, to add to the token losses: then the mean over tokens, whatever their
devices and microbatches, is the mean over groups or sequences.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp


def balance(choices: jax.Array, scores: jax.Array, sum_over: Callable | None = None) -> jax.Array:
    """Return E times the sum over experts of (share of choices) times (mean score): [...].

    It is 1 if experts are chosen evenly (Switch, GShard, DeepSpeed; DeepSeek-V3's sequence loss).

    Args:
        choices: [..., N, E]: how often each token chose each expert.
        scores: [..., N, E]: each token's score of each expert, summing to 1.
        sum_over: Function that all-reduces sums over devices that have other tokens.

    >>> tokens = jnp.array([[1.0, 0.0], [0.0, 1.0]])
    >>> balance(tokens, tokens).item(), balance(tokens[:1], tokens[:1]).item()
    (1.0, 2.0)
    """
    sums = choices.sum(-2), scores.sum(-2)
    choice_sums, score_sums = sums if sum_over is None else map(sum_over, sums)
    share = lambda x: x / jnp.maximum(x.sum(-1, keepdims=True), 1e-20)
    return choice_sums.shape[-1] * (
        jax.lax.stop_gradient(share(choice_sums)) * share(score_sums)
    ).sum(-1)


def z_losses(logits: jax.Array) -> jax.Array:
    """Return the square of log(sum(exp(logits))) of each token (ST-MoE)."""
    return jax.nn.logsumexp(logits, axis=-1) ** 2


def per_token(group_losses: jax.Array, tokens: tuple[int, ...]) -> jax.Array:
    """Return, for each token, the loss of its group."""
    return jnp.repeat(group_losses.reshape(-1), math.prod(tokens) // group_losses.size).reshape(
        tokens
    )
