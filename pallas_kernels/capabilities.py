"""Marks by which models, losses and steps agree where a kernel may replace plain JAX.

[B]atch, [S]equence, [D] embed, [V]ocabulary.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar, cast

import jax

Function = TypeVar("Function", bound=Callable)
# Part of JAX's tracing cache key: functions are traced anew with another attention.
_STAND_IN = jax.make_user_context(None)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["x", "kernel"],
    meta_fields=["losses_of"],
)
@dataclass(frozen=True)
class Projection:
    """Passed to a loss in place of logits: their factors, and the function that computes losses."""

    x: jax.Array  # [B, S, D]
    kernel: jax.Array  # [V, D]
    losses_of: Callable

    def losses(self, targets_BS: jax.Array) -> jax.Array:
        """Return the cross entropy of each target."""
        return self.losses_of(self.x, self.kernel, targets_BS)


def takes_projection(loss: Function) -> Function:
    """Mark a loss(outputs, batch) that takes a `Projection` as well as logits."""
    return _mark(loss, "takes_projection")


def is_causal_attention(attend: Function, window: int | None = None) -> Function:
    """Mark attend(q, k, v, documents) as plain causal attention, which a kernel may replace.

    With a window, a query sees itself and the `window - 1` positions before it.
    """

    @wraps(attend)
    def run(*operands: Any, **named: Any) -> Any:
        stand_in = _STAND_IN.value
        if stand_in is None:
            return attend(*operands, **named)
        return stand_in(*inspect.signature(attend).bind(*operands, **named).args, window=window)

    return cast(Function, _mark(_mark(run, "is_causal_attention"), "window", window))


def replace_attention(stand_in: Callable | None) -> AbstractContextManager:
    """Return a context in which all marked causal attention is traced as `stand_in`.

    It is called with q, k, v, documents if there are any, and `window=`. None: no replacement.
    """
    return _STAND_IN(stand_in)


def _mark(function: Function, mark: str, value: Any = True) -> Function:
    setattr(function, mark, value)
    return function
