"""The loss as a total and a weight: the only form in which a mean over devices is a true mean."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LOSS = "the loss"
ENTROPY = "router_entropy"  # a metric of models with experts, by layer


@partial(
    jax.tree_util.register_dataclass, data_fields=["total", "weight", "metrics"], meta_fields=[]
)
@dataclass(frozen=True)
class Mean:
    """A weighted mean as its two sums; `metrics` may carry further means or scalars by name.

    The loss of a step is sum(total) / sum(weight) over all examples, devices and microbatches.

    Attributes:
        total: Scalar, the weighted sum over the examples that the loss received.
        weight: Scalar, the sum of the weights; it gets no gradient.
        metrics: {name: Mean, or the mean over these examples}, without metrics of their own; their
            totals may be arrays, and so may their weights. The names loss, grad_norm, weight,
            finite and step are reserved, and those of a loss scale.

    Example:
        >>> import hfjax, jax.numpy as jnp
        >>> mask = jnp.array([1.0, 1.0, 0.0])
        >>> losses = jnp.array([2.0, 4.0, 9.0])
        >>> mean = hfjax.Mean((losses * mask).sum(), mask.sum(), metrics={"all": losses.mean()})
        >>> float(mean.total / mean.weight)
        3.0
    """

    total: Any
    weight: Any
    metrics: Mapping[str, Any] = field(default_factory=dict)


def as_mean(value: Any, count: float, name: str = LOSS) -> Mean:
    """Return the result of a loss as a `Mean`; a scalar is the mean over this device's examples."""
    if isinstance(value, Mean):
        total = _as_array(value.total, name) if name != LOSS else _as_scalar(value.total, name)
        weight = _as_array(value.weight, "its weight")
        weight = (
            _as_scalar(weight, "its weight") if name == LOSS else _check_weight(weight, total, name)
        )
        if not isinstance(value.metrics, Mapping):
            kind = type(value.metrics).__name__
            raise ValueError(
                f"metrics={{…}} of {name}: a dictionary by name is expected, not {kind}."
            )
        metrics = {name: _as_metric(name, v, count) for name, v in value.metrics.items()}
        return Mean(total, jax.lax.stop_gradient(weight), metrics)
    if isinstance(value, tuple | list | dict):
        raise ValueError(
            f"{name} is a {type(value).__name__}, which could mean (loss, aux) or (total, weight). "
            "Return a scalar (the mean over the rows), or hfjax.Mean(total, weight, "
            "metrics={…}) for a weighted loss or for further metrics."
        )
    mean = _as_scalar(value, name)
    mean = mean.astype("float32") if mean.dtype == jnp.float16 else mean  # its sum overflows
    return Mean(mean * count, np.asarray(count, mean.dtype))  # so that nobody sums it over devices


def mean_metrics(mean: Mean) -> dict[str, jax.Array]:
    """Return the metrics that a mean carries, and its weight."""
    return {name: m.total / m.weight for name, m in mean.metrics.items()} | {"weight": mean.weight}


def check_loss_signature(loss_fn: object, name: str = LOSS) -> None:
    """Refuse anything but a function loss(outputs, batch)."""
    kind = None
    if not callable(loss_fn) or isinstance(loss_fn, type | BuiltinFunctionType):
        kind = repr(loss_fn)
    else:
        try:
            extra = inspect.signature(loss_fn).parameters.keys() & {"extra"}
            inspect.signature(loss_fn).bind(None, None, **dict.fromkeys(extra))
        except TypeError:
            kind = f"a function of {inspect.signature(loss_fn)}"
        except ValueError:  # some C functions have no signature
            return
    if kind is not None:
        raise ValueError(
            f"{name} is {kind}: a function of (outputs, batch) is expected, which returns the mean "
            "over the rows, or hfjax.Mean(total, weight)."
        )


SCALE_METRICS = ("loss_scale", "skipped_steps", "loss_scale_overflow", "loss_scale_exhausted")
SCALE, SKIPPED, OVERFLOW, EXHAUSTED = SCALE_METRICS
RESERVED = ("loss", "grad_norm", "weight", "finite", "step", *SCALE_METRICS)  # a step reports these


def _as_metric(name: str, value: Any, count: float) -> Mean:
    if name in RESERVED:
        raise ValueError(f"metric {name!r}: the step tells this itself. Choose another name.")
    mean = as_mean(value, count, f"metric {name!r}")
    if mean.metrics:
        raise ValueError(f"metric {name!r} carries metrics of its own: put all in the loss's Mean.")
    return mean


def _as_scalar(value: Any, name: str) -> jax.Array:
    """Return a scalar; refuse anything else."""
    array = _as_array(value, name)
    if array.shape != ():
        raise ValueError(
            f"{name} has shape {array.shape} and dtype {array.dtype}: a scalar is expected. "
            "Take the mean over the rows, or return hfjax.Mean(sum of the losses, their number)."
        )
    return array


def _check_weight(weight: jax.Array, total: jax.Array, name: str) -> jax.Array:
    """Return the weight of a metric; refuse one that does not fit its total."""
    fits = weight.ndim in (0, total.ndim) and all(
        n in (1, m) for n, m in zip(weight.shape, total.shape if weight.ndim else (), strict=True)
    )
    if not fits:
        raise ValueError(
            f"{name}: a weight of shape {weight.shape} beside a total of shape {total.shape}: a "
            "number is expected, or as many dimensions, each of that size or 1."
        )
    return weight


def _as_array(value: Any, name: str) -> jax.Array:
    """Return an array of numbers; refuse anything else."""
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} is of type {type(value).__name__}: a scalar is expected. Return the mean over "
            "the rows, or hfjax.Mean(sum of the losses, their number)."
        ) from None
    is_loss = name == LOSS
    if not jnp.issubdtype(array.dtype, jnp.floating if is_loss else jnp.number):
        kind = "real floating-point number" if is_loss else "number"
        raise ValueError(f"{name} is {array.dtype}: a {kind} is expected.")
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))
