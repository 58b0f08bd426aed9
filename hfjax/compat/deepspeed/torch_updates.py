"""Updates that differ from optax's: Adagrad as in torch, Lamb and Adam as in DeepSpeed."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import tree_utils


def adagrad(rate: Callable, start: float, eps: float) -> optax.GradientTransformation:
    """Return Adagrad with `eps` outside the root, as in torch.

    >>> import numpy as np
    >>> made = adagrad(lambda count: 0.5, 0.0, 1e-10)
    >>> x = np.array([3.0, -0.1], np.float32)
    >>> made.update(x, made.init(x))[0].tolist()
    [-0.5, 0.5]
    """

    def init(params: Any) -> optax.ScaleByRssState:
        return optax.ScaleByRssState(tree_utils.tree_full_like(params, start))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        squares = jax.tree.map(lambda s, g: s + g * g, state.sum_of_squares, updates)
        scaled = jax.tree.map(lambda s, g: g / (jnp.sqrt(s) + eps), squares, updates)
        return scaled, optax.ScaleByRssState(squares)

    first = optax.GradientTransformation(init, update)
    return optax.chain(first, optax.scale_by_learning_rate(rate))


def lamb(rate: Callable, settings: dict[str, Any]) -> optax.GradientTransformation:
    """Return Lamb with bounded trust ratios; the rate is bias-corrected, the moments are not.

    Args:
        rate: The learning rate, by the number of updates.
        settings: The parameters of FusedLamb.
    """
    b1, b2 = settings["betas"]
    inside, eps = settings["eps_inside_sqrt"], settings["eps"]
    low, high, decay = (settings[name] for name in ("min_coeff", "max_coeff", "weight_decay"))
    root = lambda v: jnp.sqrt(v + eps) if inside else jnp.sqrt(v) + eps

    def bound_update(update: jax.Array, param: jax.Array) -> jax.Array:
        of_param, of_update = jnp.linalg.norm(param), jnp.linalg.norm(update)
        is_nonzero = (of_param > 0) & (of_update > 0)
        ratio = jnp.clip(of_param / jnp.where(is_nonzero, of_update, 1.0), low, high)
        return update * jnp.where(is_nonzero, ratio, 1.0)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        new = _update_moments(updates, state, b1, b2)
        step = -rate(state.count)
        if settings["bias_correction"]:
            step = step * jnp.sqrt(1 - b2**new.count) / (1 - b1**new.count)
        directions = jax.tree.map(lambda m, v, p: m / root(v) + decay * p, new.mu, new.nu, params)
        return jax.tree.map(lambda u, p: step * bound_update(u, p), directions, params), new

    return optax.GradientTransformation(_init_moments, update)


def uncorrected_adam(
    rate: Callable, settings: dict[str, Any], *, decoupled: bool
) -> optax.GradientTransformation:
    """Return Adam, or AdamW if `decoupled`, without bias correction of the moments.

    Args:
        rate: The learning rate, by the number of updates.
        settings: The parameters of FusedAdam.
        decoupled: Whether the decay is added to the update, not to the gradient.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        new = _update_moments(updates, state, *settings["betas"])
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + settings["eps"]), new.mu, new.nu), new

    adam = optax.GradientTransformation(_init_moments, update)
    decay = optax.add_decayed_weights(settings["weight_decay"])
    transforms = [adam, decay] if decoupled else [decay, adam]
    return optax.chain(*transforms, optax.scale_by_learning_rate(rate))


def _init_moments(params: Any) -> optax.ScaleByAdamState:
    zeros = tree_utils.tree_zeros_like(params)
    return optax.ScaleByAdamState(jnp.zeros([], jnp.int32), zeros, zeros)


def _update_moments(updates: Any, state: Any, b1: float, b2: float) -> optax.ScaleByAdamState:
    """Return the Adam state with moments updated by one more gradient."""
    mu = tree_utils.tree_update_moment(updates, state.mu, b1, 1)
    nu = tree_utils.tree_update_moment_per_elem_norm(updates, state.nu, b2, 2)
    return optax.ScaleByAdamState(state.count + 1, mu, nu)
