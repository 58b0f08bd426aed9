"""A model in three parts as what runs it sees it: functions and values of one device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfjax.utils.mean import Mean
from hfjax.utils.paths import Flat, Index


@dataclass(frozen=True)
class ModelParts:
    """What the stages run, each function for one microbatch `m`."""

    first: Callable  # (outside, m) -> x, what enters the first layer
    passes: Callable  # (known, slots, x, split) -> Dissected; known: (values of a unit, number, m)
    last: Callable  # (outside, x, m) -> (total, aux): what is differentiated, and what is told
    values: Flat  # parameters of this stage's units, [chunks * units, ...]
    outside: Flat  # parameters of first and last
    slots: Mapping[str, Any]  # shapes and dtypes of one unit's gradients
    order: np.ndarray  # [stages, chunks, units]: number of the unit, -1 where there is none
    keep: Callable | None = None  # the passes of the last microbatch, if that recomputes less
    # m -> by what its total is divided before its backward pass; gradients are added as its own.
    divisor: Callable = lambda m: 1.0
    seed: Any = 1.0  # the cotangent of the loss of a microbatch

    def embed_pass(self, m: Index) -> tuple[Any, Callable]:
        """Return what enters the first layer; its gradient -> that of what lies outside."""
        x, pullback = jax.vjp(lambda outside: self.first(outside, m), self.outside)
        return x, lambda dx: pullback(cotangents(dx))[0]

    def head_pass(self, y: Any, m: Index, tell: Callable) -> tuple[Any, Flat, Any, Any]:
        """Return the gradients of y and of what lies outside; `tell(aux)`: (told, divisor)."""
        last = lambda outside, y: self.last(outside, y, m)
        total, pullback, aux = jax.vjp(last, self.outside, y, has_aux=True)
        told, divisor = tell(aux)
        gradients, dy = pullback(cotangent(total, self.seed, divisor))
        return arrays_of(dy, y), gradients, told, divisor


def cotangents(dy: Any) -> Any:
    """Return gradients as a pullback takes them: those of whole numbers and masks are none."""
    inexact = lambda a: jnp.issubdtype(a.dtype, jnp.inexact)
    return jax.tree.map(lambda a: a if inexact(a) else np.zeros(a.shape, jax.dtypes.float0), dy)


def arrays_of(gradients: Any, like: Any) -> Any:
    """Return gradients as arrays like these: zeros where a pullback gave none."""
    none = lambda g: g.dtype == jax.dtypes.float0
    zeros = lambda g, a: jnp.zeros(a.shape, a.dtype) if none(g) else g
    return jax.tree.map(zeros, gradients, like)


def cotangent(total: jax.Array, seed: Any, divisor: Any) -> jax.Array:
    """Return the cotangent of a total: that of total / divisor, times the seed."""
    return jnp.asarray(seed, total.dtype) / jnp.asarray(divisor, total.dtype)


@partial(jax.tree_util.register_dataclass, data_fields=["means", "outputs"], meta_fields=[])
@dataclass(frozen=True)
class Extras:
    """What a pass tells where it is asked to: the mean of each microbatch, [M], and the outputs.

    Microbatch m of a step is the m-th microbatch of every device that holds rows. Outputs are in
    the order of the rows, or None if only the losses are asked for.
    """

    means: Any  # a Mean
    outputs: Any


def mean_of(told: Mean | Extras) -> Mean:
    """Return the Mean of what a pass tells: a Mean, or `Extras`."""
    return told.means if isinstance(told, Extras) else told
