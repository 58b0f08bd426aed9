"""Whether an optimizer can run by parts, or element by element: tried out on small arrays.

`check_leafwise` compares a whole update with one part by part. `check_elementwise` is for packed
rows, which hold many parameters in one array.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hfjax.base.paths import Flat, flatten, nest
from hfjax.parallel.engine.blueprint import LAYERS as OF_LAYERS
from hfjax.parallel.heterogeneous.packing import PackedLayers
from hfjax.plan.layout import Layout
from hfjax.plan.optimizer_state import converted, reformed
from hfjax.update.parts import COUNT, ENDS, LAYERS, NUMBER, OptimizerParts

SIZES = (1e-3, 1.0, 1e3)  # of the gradients, step by step: enough for what clips to be seen


class Reason(NamedTuple):
    """What runs an optimizer by parts: what it does, and what there is instead."""

    updates: str
    instead: str


ASYNCHRONOUS = Reason(
    "Under an asynchronous schedule each stage updates its layers by itself",
    'a schedule that waits, for instance hfjax.Schedule("1f1b", …)',
)


def check_leafwise(layout: Layout, reason: Reason = ASYNCHRONOUS, split: bool = False) -> None:
    """Refuse an optimizer whose update of a part is not that part of its update of all.

    It may keep arrays like the parameters, and numbers that do not depend on gradients. `split`:
    parts are pieces of a layer's arrays as well, as they lie on devices.
    """
    layers = _PIECES if layout.blueprint.listed else _PARTS | _PIECES if split else _PARTS
    try:
        _check(OptimizerParts(layout), layers | _ENDS)
    except _DependsError as error:
        raise ValueError(
            f"this optimizer {error}. {reason.updates}: use an optimizer that works element by "
            f"element (optax.sgd, adam, adamw, lion …), or {reason.instead}."
        ) from error


class _DependsError(Exception):
    """What an update of a part depends on that is no part of it."""


def _check(parts: OptimizerParts, shares: Mapping[str, Callable]) -> None:
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

    parts: OptimizerParts
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


def _trial(parts: OptimizerParts) -> _Trial:
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


# Sizes of parameters and gradients to try: decay shows where parameters are large beside updates,
# clipping where gradients are large beside parameters.
PARAMETERS = (1e3, 1e-3)
GRADIENTS = (1.0, 1e3, 1e-3)


def check_elementwise(layout: Layout) -> None:
    """Refuse an optimizer that would do something else with packed rows than with parameters.

    It is tried out on small arrays by the same paths: a few steps, on them and on their rows.
    """
    if (packed := layout.packed) is None:
        return
    plan = {
        p: jax.ShapeDtypeStruct(v.shape, v.dtype) for p, v in layout.blueprint.parameters.items()
    }
    try:
        init = layout.optimizer.init
        pack = lambda flat: _packed_state(layout.optimizer, packed, flat, init(nest(flat)))
        jax.eval_shape(pack, plan)
        apart = _try_out(layout, packed, plan)
    except (ValueError, TypeError, KeyError) as error:
        raise _refused(f"its state cannot be packed ({error})") from error
    if otherwise := [path for path, by in apart.items() if not by <= 1]:
        raise _refused(f"it moves {otherwise[0]} otherwise than by itself")


def check_padding(layout: Layout) -> None:
    """Refuse an optimizer for which the empty places of stacked layers make a difference."""
    if layout.arrangement is None or layout.packed or (layout.arrangement.rows >= 0).all():
        return
    stacked = {path for path, p in layout.placed.items() if p.stacked}
    rng, shapes = np.random.default_rng(0), layout.blueprint.parameters
    small = {path: tuple(min(n, 2) for n in x.shape) for path, x in shapes.items()}
    draw = lambda: {
        path: jnp.asarray(rng.normal(size=shape), shapes[path].dtype)
        for path, shape in small.items()
    }
    pad = lambda flat: {
        path: jnp.concatenate([x, jnp.zeros_like(x[:1])]) if path in stacked else x
        for path, x in flat.items()
    }
    own, gradients = draw(), draw()
    moved = _first_updates(layout.optimizer, own, gradients)
    padded = _first_updates(layout.optimizer, pad(own), pad(gradients))
    for path, update in moved.items():
        if _distance(padded[path][: len(update)] if path in stacked else padded[path], update) > 10:
            raise ValueError(
                f"the optimizer moves {path} otherwise if empty places are stored beside its "
                f"layers: {layout.arrangement.layers} layers are padded to "
                f"{layout.arrangement.rows.size} rows here, and it takes means over all of them "
                "(adafactor, block RMS). Choose stages and chunks that divide the layers, or an "
                "optimizer that works element by element (sgd, adam, adamw, lion, …)."
            )


def _first_updates(optimizer: Any, own: Flat, gradients: Flat) -> Flat:
    """Return what the optimizer adds in three steps with the same gradients."""
    state, total = optimizer.init(nest(own)), None
    for size in GRADIENTS:
        scaled = {path: size * g for path, g in gradients.items()}
        updates, state = optimizer.update(nest(scaled), state, nest(own))
        flat = flatten(cast(dict, updates))
        total = flat if total is None else {path: total[path] + u for path, u in flat.items()}
    assert total is not None
    return total


def _refused(why: str) -> ValueError:
    return ValueError(
        f"the optimizer does not work element by element: {why}. In a pipeline of unlike layers "
        "all parameters of a stage lie in one row. Use one that does (sgd, adam, adamw, lion, "
        "rmsprop …; clipping by global norm is right too); LAMB, LARS, Adafactor, Muon and masks "
        "that tell one layer's parameters from another's do not. Or make the layers equal and "
        "stack them, or use no pipeline."
    )


def _packed_state(optimizer: Any, packed: PackedLayers, flat: Flat, state: Any) -> Any:
    """Return the optimizer's state for these parameters, packed."""
    rows = converted(None, packed, flat)
    like = jax.eval_shape(optimizer.init, nest(rows))
    shapes = [{path: x.shape for path, x in form.items()} for form in (flat, rows)]
    return reformed(state, shapes[0], like, shapes[1], partial(converted, None, packed))


def _try_out(layout: Layout, packed: PackedLayers, plan: Flat) -> dict[str, float]:
    """Return how far the updates of rows and of parameters are apart, 1 being rounding."""
    shape = lambda x: jax.ShapeDtypeStruct([min(n, 2) for n in x.shape], x.dtype)
    small = {path: shape(x) for path, x in plan.items()}
    layers = [{path: small[path] for path in layer} for layer in packed.layers]
    follow = _Both(layout.optimizer, PackedLayers(packed.arrangement, layers, 8))
    rng = np.random.default_rng(0)
    draw = lambda scale: {
        path: jnp.asarray(rng.normal(size=x.shape, scale=scale), x.dtype)
        for path, x in small.items()
    }
    tries = [follow.apart(draw(size), [draw(g) for g in GRADIENTS]) for size in PARAMETERS]
    return {path: float(np.max([apart[path] for apart in tries])) for path in small}


@dataclass(frozen=True)
class _Both:
    """An optimizer that is given the same numbers twice: as parameters, and packed in rows."""

    optimizer: optax.GradientTransformation
    packed: PackedLayers

    def apart(self, own: Flat, steps: list[Flat]) -> dict[str, float]:
        """Return the greatest relative difference of the updates of each parameter."""
        state, apart = self.optimizer.init(nest(own)), dict.fromkeys(own, 0.0)
        rows = _packed_state(self.optimizer, self.packed, own, state)
        for gradients in steps:
            state, rows, wanted, found = self._update(own, state, rows, gradients)
            new = {path: _distance(found[path], wanted[path]) for path in own}
            apart = {path: float(np.maximum(apart[path], new[path])) for path in own}  # keeps NaN
        return apart

    @cached_property
    def _update(self) -> Callable:
        pack = partial(converted, None, self.packed)

        def update(own: Flat, state: Any, rows: Any, gradients: Flat) -> tuple:
            updates, state = self.optimizer.update(nest(gradients), state, nest(own))
            given = nest(pack(gradients)), rows, nest(pack(own))
            of_rows, rows = self.optimizer.update(*given)
            found = converted(self.packed, None, flatten(cast(dict, of_rows)))
            return state, rows, flatten(cast(dict, updates)), found

        return jax.jit(update)


def _distance(x: jax.Array, wanted: jax.Array) -> float:
    """Return the relative difference, in what rounding explains."""
    rounding = max(1e-5, 2 * float(jnp.finfo(x.dtype).eps))
    found, right = np.asarray(x, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(found - right) / rounding / max(np.linalg.norm(right), 1e-30))
