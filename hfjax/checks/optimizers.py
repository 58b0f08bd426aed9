"""Whether an optimizer works entry by entry: on a part, in packed rows, beside empty places.

It is decided by the optimizer's own program, for arrays as they are and in that form: an update
is made of the same terms in both, and entries meet along no dimension in which the forms differ.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from hfjax.checks.combinations import error_of
from hfjax.checks.features import NOT_ELEMENT_BY_ELEMENT
from hfjax.checks.optimizer_program import NONE, Entries, OptimizerProgram, Terms
from hfjax.optimizer_step.optimizer_parts import COUNT, NUMBER, OptimizerParts
from hfjax.optimizers.transforms import WithoutRows, unwrapped
from hfjax.parallel.adapters.model_template import LAYERS
from hfjax.parallel.execution import Execution
from hfjax.parallel.mesh import EXPERTS
from hfjax.parallel.packing import PackedLayers
from hfjax.sharding.layout import Layout
from hfjax.sharding.optimizer_state import converted, reformed
from hfjax.sharding.storage import Stacked
from hfjax.utils.paths import Flat, nest


@dataclass(frozen=True)
class _Form:
    """Another form of a model's parameters.

    Attributes:
        shapes: Path in the form -> shape and dtype.
        of: Path in the form -> whose entries it has.
        places: Path -> where it is in the form; of those to compare.
        dims: Path -> dimensions along which the form has other entries.
        more: Whether the form has more entries, which are 0; its state begins in that form.
        mixed: Whether entries lie otherwise: numbers that are kept may follow from totals only.
    """

    shapes: Flat
    of: Mapping[str, Entries]
    places: Mapping[str, Sequence[str]]
    dims: Mapping[str, Sequence[int]]
    more: bool = False
    mixed: bool = False


class _DependsError(Exception):
    """What an update of a part depends on that is no part of it."""


class _Compared:
    """An optimizer's program for parameters as they are, with which it is compared in forms."""

    def __init__(
        self, optimizer: Any, like: Flat, of: Mapping[str, Entries], more: Entries = NONE
    ) -> None:
        self._optimizer, self._like, self._terms = optimizer, like, Terms()
        try:
            self.whole = OptimizerProgram(optimizer, like, of, self._terms, more)
        except Exception as error:
            raise ValueError(
                "the optimizer cannot be traced with gradients, its state and parameters alone: "
                f"{type(error).__name__}: {error}"
            ) from error

    def otherwise(self, form: _Form) -> str | None:
        """Return a parameter that the optimizer moves otherwise in a form."""
        whole, joined = self.whole, dict[Any, bool]()
        other = OptimizerProgram(self._optimizer, form.shapes, form.of, self._terms)

        def same(path: str) -> bool:
            own, shape = _terms(whole.of_path(path, form.more)), self._like[path].shape
            if not whole.own_only(path) or any(
                _terms(other.of_path(p, form.more)) != own for p in form.places[path]
            ):
                return False
            dims = form.dims.get(path, ())
            if form.more and any(shape[d] == 1 for d in dims) and not whole.entrywise(path):
                return False
            for dim in dims:
                if (key := (*own, shape, dim)) not in joined and shape[dim] > 1:
                    joined[key] = whole.joins(path, dim)
            return not any(joined.get((*own, shape, dim)) for dim in dims)

        path = next((path for path in form.places if not same(path)), None)
        kept = {name: _terms(values) for name, values in other.numbers(form.more).items()}
        numbers = any(
            kept.get(name, _terms(values)) != _terms(values) or (form.mixed and values[0].of)
            for name, values in whole.numbers(form.more).items()
        )
        if path is None and (numbers or (form.more and whole.zeros_matter())):
            path = next(iter(form.places), None)
        return path


def _terms(values: Sequence[Any]) -> list[int]:
    return [v.term for v in values]


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
    forms = _forms(layout)
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


def _beyond(path: str) -> Entries:
    """Return a part of a parameter's entries, and the others."""
    return frozenset((path, f"{path} beyond"))


def _part(layout: Layout, of_layers: bool, cut: Callable | None, dims: Callable) -> _Form:
    """Return the form in which only layers (or only what is outside of them) have entries."""
    mine = [path for path in layout.placed if path.startswith(LAYERS) == of_layers]
    part = cut or (lambda shape: shape)
    shape = lambda path, x: part(x.shape) if path in mine else (*(0,)[: len(x.shape)], *x.shape[1:])
    own = lambda path: frozenset((path,)) if cut else _beyond(path)
    return _Form(
        {path: jax.ShapeDtypeStruct(shape(path, x), x.dtype) for path, x in layout.placed.items()},
        {path: own(path) if path in mine else NONE for path in layout.placed},
        {path: (path,) for path in mine},
        {path: dims(layout.placed[path].shape) for path in mine},
    )


def _forms(layout: Layout) -> dict[str, _Form]:
    every = lambda shape: range(len(shape))
    return {
        "a layer": _part(layout, True, lambda shape: (1, *shape[1:]), lambda shape: (0,)),
        "a piece of a layer": _part(layout, True, lambda shape: (1,) * len(shape), every),
        "the ends": _part(layout, False, None, lambda shape: ()),
    }


def _check_parts(parts: OptimizerParts, forms: Mapping[str, _Form]) -> None:
    for name, (_, leaf) in parts.leaves.items():
        number = leaf.shape == () and jnp.issubdtype(leaf.dtype, jnp.number)
        if parts.roles[name] in (COUNT, NUMBER) and not number:
            what = f"{leaf.dtype}{list(leaf.shape)}"
            raise _DependsError(f"keeps {name} {what}, neither like a parameter nor a number")
    placed = parts.layout.placed
    compared = _Compared(parts.layout.optimizer, dict(placed), {p: _beyond(p) for p in placed})
    _check_numbers(parts, compared.whole)
    for what, form in forms.items():
        try:
            path = compared.otherwise(form)
        except Exception as error:
            raise _DependsError("cannot be given a part of the parameters") from error
        if path is not None:
            raise _DependsError(f"updates {path} otherwise if it is given {what} alone")


def _check_numbers(parts: OptimizerParts, program: OptimizerProgram) -> None:
    """Refuse a number that depends on gradients, and one beside moments that counts nothing.

    A count goes on counting wherever it starts: the ends have another one than the layers.
    """
    for name, (_, leaf) in parts.leaves.items():
        if parts.roles[name] not in (COUNT, NUMBER):
            continue
        if program.state[name].depends:
            raise _DependsError(f"keeps {name}, a number that depends on the gradients")
        if parts.roles[name] == COUNT and not program.counts(name, leaf):
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
    try:
        jax.eval_shape(partial(_packed_state, layout.optimizer, packed), like)
        own = {path: frozenset((path,)) for path in like}
        more = NONE.union(*(own[path] for path in packed.places))
        path = _Compared(layout.optimizer, like, own, more).otherwise(_packed_form(packed, like))
    except Exception as error:
        raise _refused(f"its state cannot be packed ({error})") from error
    if path is not None:
        raise _refused(f"it moves {path} otherwise than by itself")


def _packed_form(packed: PackedLayers, like: Flat) -> _Form:
    own = {path: frozenset((path,)) for path in like}
    places = {path: (place.array,) for path, place in packed.places.items()}
    rest = {path: x for path, x in like.items() if path not in places}
    held = {row: NONE.union(*(own[p] for p in places if row in places[p])) for row in packed.shapes}
    dims = {path: range(len(like[path].shape)) for path in places}
    of = held | {path: own[path] for path in rest}
    return _Form(rest | packed.shapes, of, places, dims, more=True, mixed=True)


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
    like, stored = dict(layout.as_the_model.placed), dict(layout.placed)
    stacked = [path for path, p in layout.placed.items() if p.stacked]
    of = {path: frozenset((path,)) for path in like}
    more, dims = NONE.union(*(of[path] for path in stacked)), dict.fromkeys(stacked, (0,))
    form = _Form(stored, of, {path: (path,) for path in like}, dims, more=True, mixed=True)
    path = _Compared(unwrapped(layout.optimizer, WithoutRows), like, of, more).otherwise(form)
    if path is not None:
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
    if not at or any(layout.placed[path].shape[dim] < 2 for path, dim in at.items()):
        return
    try:
        apart = _experts_apart(layout, at)
        of = {path: frozenset(apart.places.get(path, (path,))) for path in layout.placed}
        path = _Compared(layout.optimizer, dict(layout.placed), of).otherwise(apart)
    except Exception:  # it goes by names, or by numbers of dimensions
        return
    if path is not None:
        warnings.warn(
            f"the optimizer treats the experts of {path} as one array (as LAMB, LARS, Adafactor "
            "and Muon do): how far one expert moves depends on the others. Use an optimizer that "
            "works element by element for them (hfjax.by_path).",
            UserWarning,
            stacklevel=5,
        )


def _experts_apart(layout: Layout, at: Mapping[str, int]) -> _Form:
    """Return the form in which two experts stand for all, each an array of its own."""
    pieces = {path: [f"{path}/{i}" for i in (0, 1)] for path in at}
    one = lambda path, x: jax.ShapeDtypeStruct(
        x.shape[: at[path]] + x.shape[at[path] + 1 :], x.dtype
    )
    placed = [(path, p, x) for path, x in layout.placed.items() for p in pieces.get(path, [path])]
    shapes = {p: one(path, x) if path in at else x for path, p, x in placed}
    dims = {path: (dim,) for path, dim in at.items()}
    return _Form(shapes, {p: frozenset((p,)) for p in shapes}, pieces, dims, mixed=True)


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
