"""AdamW, as optax has it; a training step that recognises it may run it in one pass."""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from hfjax.base.paths import Flat, flatten, nest
from hfjax.optimizers.transforms import Master, Without, unwrapped


@dataclass(frozen=True, eq=False)
class Fields:
    """What an AdamW was made of."""

    learning_rate: Any
    b1: float
    b2: float
    eps: float
    weight_decay: float
    mask: Any

    def decays(self, params: Flat) -> dict[str, bool]:
        """Return whether a parameter decays, by path."""
        tree = nest(params)
        mask = True if self.mask is None else self.mask
        return flatten(jax.tree.broadcast(mask(tree) if callable(mask) else mask, tree))

    def rate(self, count: Any) -> Any:
        """Return the learning rate after so many updates; no schedule counts any."""
        return self.learning_rate if count is None else self.learning_rate(count)

    def corrections(self, count: Any) -> tuple[Any, Any]:
        """Return 1 - b1^t and 1 - b2^t of update `count`."""
        return 1 - self.b1**count, 1 - self.b2**count


class AdamW(optax.GradientTransformationExtraArgs):
    """An AdamW that knows what it was made of."""

    fields: Fields | None  # None: nothing else computes what it does


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: Any = None,
    mu_dtype: DTypeLike | None = None,
) -> AdamW:
    """Return optax.adamw: the same numbers, the same state, wherever an optimizer is expected.

    A training step can update each shard in one pass over device memory if this is its optimizer,
    or `hfjax.master` of it, and `mu_dtype` is None: see `kernels` of `hfjax.Execution`.

    Args:
        learning_rate: A number, or a schedule: a function of the number of updates done.
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        eps: What is added to the root of the second moment.
        weight_decay: Strength of the decay, times the learning rate.
        mask: Which parameters decay: a tree of booleans, or a function of the parameters that
            returns one (`hfjax.matching`). None: all.
        mu_dtype: The dtype of the first moment. None: that of the parameter.

    Example:
        >>> import hfjax, jax.numpy as jnp, optax
        >>> params, gradients = {"w": jnp.ones(2)}, {"w": jnp.array([0.5, -0.5])}
        >>> ours, theirs = hfjax.adamw(3e-4), optax.adamw(3e-4)
        >>> a, _ = ours.update(gradients, ours.init(params), params)
        >>> b, _ = theirs.update(gradients, theirs.init(params), params)
        >>> bool((a["w"] == b["w"]).all())
        True
    """
    fields = Fields(learning_rate, b1, b2, eps, weight_decay, mask)
    for name in ("b1", "b2", "eps", "weight_decay"):
        if not isinstance(given := getattr(fields, name), Real):
            raise ValueError(
                f"adamw: {name}={given!r}: a plain number is expected, the same in every step. "
                "Use optax.adamw for one that changes."
            )
    whole = optax.adamw(learning_rate, b1, b2, eps, 0.0, mu_dtype, weight_decay, mask)
    made = AdamW(*whole)
    made.fields = fields if mu_dtype is None else None  # optax rounds such moments otherwise
    return made


def recognised(optimizer: Any) -> Fields | None:
    """Return what an optimizer was made of, if it is an AdamW of ours and nothing else.

    It may have master weights, and leave frozen parameters alone.
    """
    inner = unwrapped(optimizer, Without, Master)
    return inner.fields if isinstance(inner, AdamW) else None


class AdamWState(NamedTuple):
    """What a recognised optimizer keeps of its parameters, by path, and its counts."""

    mean: Flat
    variance: Flat
    updates: Any  # how many there were
    scheduled: Any  # the count of a learning rate's schedule
    master: Flat | None


def opened(optimizer: Any, state: Any) -> tuple[AdamWState, Callable[[AdamWState], Any]]:
    """Return what the state of a recognised optimizer holds, and what puts it back in its form."""
    if isinstance(optimizer, Without):
        masked = state.inner_states["trained"]
        kept, close = opened(optimizer.inner, masked.inner_state)
        back = lambda kept: {"trained": masked._replace(inner_state=close(kept))}
        return kept, lambda kept: state._replace(inner_states=state.inner_states | back(kept))
    if isinstance(optimizer, Master):
        kept, close = opened(optimizer.inner, state.optimizer)
        own = flatten(state.master)
        put = lambda kept: type(state)(close(kept), nest(own | kept.master))
        return kept._replace(master=_arrays(own)), put
    return _opened(state)


def _opened(state: Any) -> tuple[AdamWState, Callable[[AdamWState], Any]]:
    adam, decay, rate = state
    mean, variance = flatten(adam.mu), flatten(adam.nu)
    counts = isinstance(rate, optax.ScaleByScheduleState)

    def close(kept: AdamWState) -> Any:
        trees = {"mu": nest(mean | kept.mean), "nu": nest(variance | kept.variance)}
        last = rate._replace(count=kept.scheduled) if counts else rate
        return (adam._replace(count=kept.updates, **trees), decay, last)

    scheduled = rate.count if counts else None
    return AdamWState(_arrays(mean), _arrays(variance), adam.count, scheduled, None), close


def _arrays(flat: Flat) -> Flat:
    """Return what is kept of trained parameters: of a frozen one there is nothing."""
    return {path: x for path, x in flat.items() if hasattr(x, "dtype")}


def later(kept: AdamWState, counts: Any) -> tuple[Any, Any]:
    """Return both counts after an update, if it counts."""
    more = lambda count: jnp.where(counts, optax.safe_increment(count), count)
    return more(kept.updates), None if kept.scheduled is None else more(kept.scheduled)
