"""Whether an optimizer works element by element: on a part, in packed rows, beside empty places.

It is tried out on small arrays, as they are and in that form. What it does to one array may not
depend on the others, nor on how they are stored.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from hfjax.base.paths import Flat, flatten, nest
from hfjax.checks.combinations import error_of
from hfjax.checks.features import NOT_ELEMENT_BY_ELEMENT
from hfjax.optimizers.transforms import WithoutRows, unwrapped
from hfjax.parallel.engine.blueprint import LAYERS
from hfjax.parallel.execution import Execution
from hfjax.parallel.mesh import EXPERTS
from hfjax.parallel.packing import PackedLayers
from hfjax.plan.layout import Layout
from hfjax.plan.optimizer_state import converted, reformed
from hfjax.plan.storage import Stacked
from hfjax.update.optimizer_parts import COUNT, NUMBER, OptimizerParts

# Sizes of parameters and gradients to try: decay shows where parameters are large beside updates,
# clipping where gradients are large beside parameters.
PARAMETERS = (1e3, 1e-3)
GRADIENTS = (1e-3, 1.0, 1e3)  # step by step
ROUNDING = 1e-5  # of updates: what they may differ by


class _Form(NamedTuple):
    """Another form of arrays by path: into it, and back to those that it has."""

    into: Callable[[Flat], Flat]
    back: Callable[[Flat], Flat]


@dataclass(frozen=True)
class _Trial:
    """A few steps of an optimizer, on small arrays of the paths and dimensions of parameters."""

    optimizer: Any
    parameters: Flat
    gradients: list[Flat]

    def run(self, form: _Form | None = None, state: Any = None) -> tuple[list[Flat], Any]:
        """Return what the optimizer adds in each step, by path, and its state afterwards."""
        into, back = form or (dict, dict)
        own, added = nest(into(self.parameters)), []
        state = self.optimizer.init(own) if state is None else state
        for gradients in self.gradients:
            updates, state = self.optimizer.update(nest(into(gradients)), state, own)
            added.append(back(flatten(cast(dict, updates))))
        return added, state

    @cached_property
    def whole(self) -> tuple[list[Flat], Any]:
        """The run of arrays as they are."""
        return self.run()

    def differs(self, form: _Form) -> tuple[str | None, Any]:
        """Return a parameter that is moved otherwise in a form, and the state that is left."""
        added, state = self.run(form)
        for found, wanted in zip(added, self.whole[0], strict=True):
            for path, update in form.back(form.into(wanted)).items():
                if not _apart(found[path], update) <= ROUNDING:  # NaN is apart, too
                    return path, state
        return None, state


def _trials(optimizer: Any, like: Mapping[str, Any]) -> Iterator[_Trial]:
    """Yield a trial for each size of parameters; its arrays are float32, or wider."""
    rng = np.random.default_rng(0)

    def draw(size: float, x: Any, slope: int = 0) -> jax.Array:
        """Return an array whose rows are of sizes 1, 1 + slope … of `size`."""
        shape = _small(x).shape
        rows = 1 + slope * np.indices(shape)[0] if shape else 1
        drawn = size * rows * rng.normal(size=shape)
        return jnp.asarray(drawn, jnp.promote_types(x.dtype, jnp.float32))

    for size in PARAMETERS:
        parameters = {path: draw(size, x) for path, x in like.items()}
        steps = [{path: draw(g, x, slope=9) for path, x in like.items()} for g in GRADIENTS]
        yield _Trial(optimizer, parameters, steps)


def _small(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct([min(n, 2) for n in x.shape], x.dtype)


def _apart(x: jax.Array, wanted: jax.Array) -> float:
    found, right = np.asarray(x, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(found - right) / max(np.linalg.norm(right), 1e-30))


def _otherwise(optimizer: Any, like: Mapping[str, Any], form: _Form) -> str | None:
    """Return a parameter that the optimizer moves otherwise in this form than as it is."""
    paths = (trial.differs(form)[0] for trial in _trials(optimizer, like))
    return next(filter(None, paths), None)


# -- on a part of the parameters ----------------------------------------------------------


def check_element_by_element(
    layout: Layout,
    feature: str = "asynchronous schedule",
    as_written: str = "an asynchronous schedule",
    split: bool = False,
) -> None:
    """Refuse an optimizer whose update of a part is not that part of its update of all.

    It may keep arrays like the parameters, and numbers that do not depend on gradients. `feature`
    updates part after part, `as_written` as the user wrote it. `split`: parts are pieces of a
    layer's arrays as well, as they lie on devices.
    """
    if any(p.still for p in layout.placed.values()):
        how = "layout.freeze(…, first=…), which tells one layer from another,"
        raise error_of((NOT_ELEMENT_BY_ELEMENT, feature), how, as_written)
    forms = dict(_PARTS)
    if layout.blueprint.listed:
        del forms["a layer"]
    elif not split:
        del forms["a piece of a layer"]
    try:
        _check_parts(OptimizerParts(layout), forms)
    except _DependsError as error:
        raise error_of(
            (NOT_ELEMENT_BY_ELEMENT, feature), f"an optimizer that {error},", as_written
        ) from error


def _part(of_layers: bool, cut: Callable[[jax.Array], jax.Array]) -> _Form:
    """Return the form in which only layers (or only what is outside of them) have elements."""
    mine = lambda path: path.startswith(LAYERS) == of_layers
    nothing = lambda x: x[:0] if x.ndim else jnp.zeros_like(x)
    into = lambda flat: {path: cut(x) if mine(path) else nothing(x) for path, x in flat.items()}
    return _Form(into, lambda flat: {path: x for path, x in flat.items() if mine(path)})


_PARTS = {
    "a layer": _part(True, lambda x: x[:1]),
    "a piece of a layer": _part(True, lambda x: x[(slice(1),) * x.ndim]),
    "the ends": _part(False, lambda x: x),
}


class _DependsError(Exception):
    """What an update of a part depends on that is no part of it."""


def _check_parts(parts: OptimizerParts, forms: Mapping[str, _Form]) -> None:
    for name, (_, leaf) in parts.leaves.items():
        number = leaf.shape == () and jnp.issubdtype(leaf.dtype, jnp.number)
        if parts.roles[name] in (COUNT, NUMBER) and not number:
            what = f"{leaf.dtype}{list(leaf.shape)}"
            raise _DependsError(f"keeps {name} {what}, neither like a parameter nor a number")
    for trial in _trials(parts.layout.optimizer, parts.layout.placed):
        try:
            for what, form in forms.items():
                _check_part(parts, trial, what, form)
        except (TypeError, KeyError, IndexError, AttributeError) as error:
            raise _DependsError("cannot be given a part of the parameters") from error
        _check_counts(parts, trial)


def _check_part(parts: OptimizerParts, trial: _Trial, what: str, form: _Form) -> None:
    path, state = trial.differs(form)
    if path is not None:
        raise _DependsError(f"updates {path} otherwise if it is given {what} alone")
    found = parts.of(state, COUNT, NUMBER)
    for name, number in parts.of(trial.whole[1], COUNT, NUMBER).items():
        if number != found[name]:
            raise _DependsError(f"keeps {name}, a number that depends on the gradients")


def _check_counts(parts: OptimizerParts, trial: _Trial) -> None:
    """Refuse a number beside moments that is neither constant nor counts their updates.

    A count goes on counting wherever it starts: the ends have another one than the layers.
    """
    state, first = trial.optimizer.init(nest(trial.parameters)), trial.gradients[:1]
    before, counted = parts.of(state, COUNT), parts.of(trial.whole[1], COUNT)
    once = parts.of(replace(trial, gradients=first).run()[1], COUNT)
    late = {name: x + 1000 * (counted[name] != x) for name, x in before.items()}
    then = parts.of(trial.run(state=parts.join(state, late))[1], COUNT)
    for name, x in before.items():
        by, by_one = counted[name] - x, once[name] - x
        counts = by_one in (0, 1) and by == len(GRADIENTS) * by_one
        if not counts or then[name] - late[name] != by:
            raise _DependsError(f"keeps {name}, which is neither constant nor a count of updates")


# -- in packed rows, beside empty places --------------------------------------------------


def check_packed_rows(layout: Layout) -> None:
    """Refuse an optimizer that would do something else with packed rows than with parameters."""
    if (packed := layout.storage.packed) is None:
        return
    like = {
        path: jax.ShapeDtypeStruct(v.shape, v.dtype)
        for path, v in layout.blueprint.parameters.items()
    }
    layers = [{path: _small(x) for path, x in layer.items()} for layer in packed.layers]
    small = PackedLayers(packed.arrangement, layers, 8)
    form = _Form(partial(converted, None, small), partial(converted, small, None))
    try:
        jax.eval_shape(partial(_packed_state, layout.optimizer, packed), like)
        path = _otherwise(layout.optimizer, like, form)
    except (ValueError, TypeError, KeyError) as error:
        raise _refused(f"its state cannot be packed ({error})") from error
    if path is not None:
        raise _refused(f"it moves {path} otherwise than by itself")


def _packed_state(optimizer: Any, packed: PackedLayers, flat: Flat) -> Any:
    """Return the optimizer's state for these parameters, packed."""
    pack = partial(converted, None, packed)
    rows = pack(flat)
    like = jax.eval_shape(optimizer.init, nest(rows))
    shapes = [{path: x.shape for path, x in form.items()} for form in (flat, rows)]
    return reformed(optimizer.init(nest(flat)), shapes[0], like, shapes[1], pack)


def _refused(why: str) -> ValueError:
    how = f"an optimizer that does not work element by element ({why})"
    return error_of(("list of layers", NOT_ELEMENT_BY_ELEMENT), "a pipeline of unlike layers", how)


def check_padding(layout: Layout) -> None:
    """Refuse an optimizer for which the empty places of stacked layers make a difference."""
    storage = layout.storage
    if not isinstance(storage, Stacked) or (storage.arrangement.rows >= 0).all():
        return
    stacked = {path for path, p in layout.placed.items() if p.stacked}
    pad = lambda x: jnp.concatenate([x, jnp.zeros_like(x[:1])])
    each = lambda f, flat: {path: f(x) if path in stacked else x for path, x in flat.items()}
    form = _Form(partial(each, pad), partial(each, lambda x: x[:-1]))
    if path := _otherwise(unwrapped(layout.optimizer, WithoutRows), layout.placed, form):
        how = f"an optimizer that moves {path} otherwise beside empty places,"
        few, rows = storage.arrangement.layers, storage.arrangement.rows.size
        stages = f"a schedule ({few} layers are padded to {rows} rows)"
        raise error_of((NOT_ELEMENT_BY_ELEMENT, "schedule"), how, stages)


def warn_of_mixed_experts(layout: Layout) -> None:
    """Warn of an optimizer for which the experts of one array are not each by themselves."""
    at = {
        path: p.axes.index(EXPERTS)
        for path, p in layout.placed.items()
        if EXPERTS in p.axes and not p.frozen
    }

    def apart(flat: Flat) -> Flat:
        pieces = {f"{p}/{i}": x.take(i, at[p]) for p, x in flat.items() if p in at for i in (0, 1)}
        return {path: x for path, x in flat.items() if path not in at} | pieces

    def together(flat: Flat) -> Flat:
        join = lambda path: jnp.stack([flat[f"{path}/{i}"] for i in (0, 1)], at[path])
        rest = {p: x for p, x in flat.items() if p.rpartition("/")[0] not in at}
        return rest | {path: join(path) for path in at}

    if not at or any(layout.placed[path].shape[dim] < 2 for path, dim in at.items()):
        return
    try:
        path = _otherwise(layout.optimizer, layout.placed, _Form(apart, together))
    except (ValueError, TypeError, KeyError):  # it goes by names, or by numbers of dimensions
        return
    if path is not None:
        warnings.warn(
            f"the optimizer treats the experts of {path} as one array (as LAMB, LARS, Adafactor "
            "and Muon do): how far one expert moves depends on the others. Use an optimizer that "
            "works element by element for them (hfjax.by_path).",
            UserWarning,
            stacklevel=5,
        )


# -- what a step asks ----------------------------------------------------------------------


def check_optimizer(layout: Layout, execution: Execution) -> None:
    """Refuse an optimizer for which this step would not be as one device is; warn of experts."""
    check_packed_rows(layout)
    check_padding(layout)
    warn_of_mixed_experts(layout)
    if execution.optimizer_in_backward:
        split = any(p.split_dims("moment") or p.stays for p in layout.placed.values())
        as_written = "optimizer_in_backward=True"
        check_element_by_element(layout, "optimizer_in_backward", as_written, split)
    elif execution.schedule is not None and execution.schedule.asynchronous:
        check_element_by_element(layout)


def takes_layers_alone(layout: Layout) -> bool:
    """Return whether the optimizer updates each layer as if it were alone."""
    try:
        check_element_by_element(layout)
    except ValueError:
        return False
    return True
