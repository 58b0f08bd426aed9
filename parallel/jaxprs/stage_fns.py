"""A layer-stack model as the engine that runs it sees it: functions and values of one device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfjax.utils.paths import Flat, Index


@dataclass(frozen=True)
class StageFns:
    """The functions that stages run, each for one microbatch `m`."""

    embed: Callable  # (outer_params, m) -> x, the input of the first layer
    # (known, slots, x, split) -> SplitBackward; known: (values of a unit, number, m).
    layer_passes: Callable
    # (outer_params, x, m) -> (loss_sum, (Mean, outputs or None)): differentiated, and reported.
    head: Callable
    stage_params: Flat  # parameters of this stage's units, [chunks * units, ...]
    outer_params: Flat  # parameters of embed and head
    slots: Mapping[str, Any]  # shapes and dtypes of one unit's gradients
    unit_order: np.ndarray  # [stages, chunks, units]: number of the unit, -1 where there is none
    # The passes of the last microbatch, if that recomputes less.
    last_passes: Callable | None = None
    # m -> the divisor of its loss sum before its backward pass; gradients are added as the sum's.
    divisor: Callable = lambda m: 1.0
    seed: Any = 1.0  # the cotangent of the loss of a microbatch

    def embed_pass(self, m: Index) -> tuple[Any, Callable]:
        """Return the input of the first layer; its gradient -> that of the outer parameters."""
        x, pullback = jax.vjp(lambda outer_params: self.embed(outer_params, m), self.outer_params)
        return x, lambda dx: pullback(to_cotangents(dx))[0]

    def head_pass(self, y: Any, m: Index, record_aux: Callable) -> tuple[Any, Flat, Any, Any]:
        """Return gradients of y and of outer parameters, and what `record_aux(aux)` returns."""
        head = lambda outer_params, y: self.head(outer_params, y, m)
        loss_sum, pullback, aux = jax.vjp(head, self.outer_params, y, has_aux=True)
        metrics, divisor = record_aux(aux)
        gradients, dy = pullback(loss_cotangent(loss_sum, self.seed, divisor))
        return to_arrays(dy, y), gradients, metrics, divisor


def to_cotangents(dy: Any) -> Any:
    """Return gradients as a pullback takes them: those of integers and masks are float0."""
    inexact = lambda a: jnp.issubdtype(a.dtype, jnp.inexact)
    return jax.tree.map(lambda a: a if inexact(a) else np.zeros(a.shape, jax.dtypes.float0), dy)


def to_arrays(gradients: Any, like: Any) -> Any:
    """Return gradients as arrays like these: zeros where a pullback gave none."""
    is_missing = lambda g: g.dtype == jax.dtypes.float0
    zeros = lambda g, a: jnp.zeros(a.shape, a.dtype) if is_missing(g) else g
    return jax.tree.map(zeros, gradients, like)


def loss_cotangent(loss_sum: jax.Array, seed: Any, divisor: Any) -> jax.Array:
    """Return the cotangent of a loss sum: that of sum / divisor, times the seed."""
    return jnp.asarray(seed, loss_sum.dtype) / jnp.asarray(divisor, loss_sum.dtype)
