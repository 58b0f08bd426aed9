"""Whether an optimizer can run by parts: tried on small arrays, whole and part by part."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hfjax.parallel.blueprint import LAYERS as OF_LAYERS
from hfjax.parallel.reduction import Flat
from hfjax.paths import nest
from hfjax.plan import Layout
from hfjax.stagewise import COUNT, ENDS, LAYERS, NUMBER, Parts

SIZES = (1e-3, 1.0, 1e3)  # of the gradients, step by step: enough for what clips to be seen


class Asker(NamedTuple):
    """What runs an optimizer by parts: what it does, and what there is instead."""

    updates: str
    instead: str


ASYNCHRONOUS = Asker(
    "Under an asynchronous schedule each stage updates its layers by itself",
    'a schedule that waits, for instance hfjax.Schedule("1f1b", …)',
)


def check_leafwise(layout: Layout, asker: Asker = ASYNCHRONOUS, split: bool = False) -> None:
    """Refuse an optimizer whose update of a part is not that part of its update of all.

    It may keep arrays like the parameters, and numbers that do not depend on gradients. `split`:
    parts are pieces of a layer's arrays as well, as they lie on devices.
    """
    layers = _PIECES if layout.blueprint.listed else _PARTS | _PIECES if split else _PARTS
    try:
        _check(Parts(layout), layers | _ENDS)
    except _DependsError as error:
        raise ValueError(
            f"this optimizer {error}. {asker.updates}: use an optimizer that works element by "
            f"element (optax.sgd, adam, adamw, lion …), or {asker.instead}."
        ) from error


class _DependsError(Exception):
    """What an update of a part depends on that is no part of it."""


def _check(parts: Parts, shares: Mapping[str, Callable]) -> None:
    for name, (_, leaf) in parts.leaves.items():
        number = leaf.shape == () and jnp.issubdtype(leaf.dtype, jnp.number)
        if parts.roles[name] in (COUNT, NUMBER) and not number:
            what = f"{leaf.dtype}{list(leaf.shape)}"
            raise _DependsError(f"keeps {name} {what}, neither like a parameter nor a number")
    trial = _trial(parts)
    try:
        whole = trial.run(lambda role, x: x)
        for what, part in shares.items():
            _compare(what, trial.pick(part, whole), trial.run(part))
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise _DependsError("cannot be given a part of the parameters") from error
    _check_counts(trial, whole[1])


# What a part takes of an array: (whose it is, array) -> its share, or None.
_PARTS: dict[str, Callable[[str, Any], Any]] = {
    "a layer": lambda role, x: x if role in (COUNT, NUMBER) else x[:1] if role == LAYERS else None,
}
_ENDS: dict[str, Callable[[str, Any], Any]] = {
    "the ends": lambda role, x: None if role == LAYERS else x,
}
_PIECES: dict[str, Callable[[str, Any], Any]] = {
    "a piece of a layer": lambda role, x: None if role == ENDS else x[(slice(1),) * x.ndim],
}
Result = tuple[Flat, Flat]  # what is added to the parameters in all steps; the state afterwards


@dataclass(frozen=True)
class _Trial:
    """Small arrays of the names and numbers of dimensions that the parameters have."""

    parts: Parts
    parameters: Flat
    gradients: tuple[Flat, ...]
    state: Flat

    def run(self, part: Callable) -> Result:
        """Return what happens to a part if the optimizer is given nothing else."""
        parameters, kept = self.pick(part, (self.parameters, self.state))
        added = dict.fromkeys(parameters, 0.0)
        for gradients in self.gradients:
            mine, _ = self.pick(part, (gradients, {}))
            updates, kept = self.parts.update(mine, kept, parameters)
            added = {path: added[path] + u for path, u in updates.items()}
        return added, kept

    def pick(self, part: Callable, of: Result) -> Result:
        """Return a part of parameters (or what is like them) and state."""
        role = lambda path: LAYERS if path.startswith(OF_LAYERS) else ENDS
        shares = {path: part(role(path), x) for path, x in of[0].items()}
        kept = {name: part(self.parts.roles[name], x) for name, x in of[1].items()}
        there = lambda flat: {name: x for name, x in flat.items() if x is not None}
        return there(shares), there(kept)


def _trial(parts: Parts) -> _Trial:
    rng, placed = np.random.default_rng(0), parts.layout.placed
    small = {path: tuple(min(n, 2) for n in p.shape) for path, p in placed.items()}
    draw = lambda path: jnp.asarray(rng.normal(size=small[path]), placed[path].dtype)
    rows = lambda x: x * jnp.arange(1, 1 + 9 * len(x), 9).reshape(-1, *(1,) * (x.ndim - 1))
    uneven = lambda path: rows(draw(path)) if small[path] else draw(path)
    gradients = tuple({path: size * uneven(path) for path in small} for size in SIZES)
    parameters = {path: draw(path) for path in small}
    state = jax.tree.leaves(parts.layout.optimizer.init(nest(parameters)))
    return _Trial(parts, parameters, gradients, dict(zip(parts.leaves, state, strict=True)))


def _compare(what: str, wanted: Result, found: Result) -> None:
    for path, update in wanted[0].items():
        apart = float(jnp.abs(update - found[0][path]).max())
        if not apart <= 1e-3 * float(jnp.abs(update).max()):
            raise _DependsError(f"updates {path} otherwise if it is given {what} alone")
    for name, number in wanted[1].items():
        if not number.shape and not jnp.array_equal(number, found[1][name]):
            raise _DependsError(f"keeps {name}, a number that depends on the gradients")


def _check_counts(trial: _Trial, after: Flat) -> None:
    """Refuse a number beside moments that is neither constant nor counts their updates.

    A count goes on counting wherever it starts: the ends have another one than the layers.
    """
    roles = trial.parts.roles
    moved = {name: after[name] - x for name, x in trial.state.items() if roles[name] == COUNT}
    late = {name: x + 1000 if moved.get(name) else x for name, x in trial.state.items()}
    _, then = replace(trial, state=late).run(lambda role, x: x)
    for name, by in moved.items():
        if by not in (0, len(SIZES)) or then[name] - late[name] != by:
            raise _DependsError(f"keeps {name}, which is neither constant nor a count of updates")
