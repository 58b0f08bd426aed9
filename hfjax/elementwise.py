"""Whether an optimizer works element by element: packed rows hold many parameters in one array."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hfjax.moments import converted, reformed
from hfjax.parallel.packing import PackedLayers
from hfjax.parallel.reduction import Flat
from hfjax.paths import flatten, nest
from hfjax.plan import Layout

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
