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

from hfjax.base.paths import Flat, nest
from hfjax.checks.combinations import error_of
from hfjax.checks.features import NOT_ELEMENT_BY_ELEMENT
from hfjax.checks.optimizer_program import NONE, Entries, OptimizerProgram, Terms
from hfjax.optimizers.transforms import WithoutRows, unwrapped
from hfjax.parallel.engine.blueprint import LAYERS
from hfjax.parallel.execution import Execution
from hfjax.parallel.mesh import EXPERTS
from hfjax.parallel.packing import PackedLayers
from hfjax.plan.layout import Layout
from hfjax.plan.optimizer_state import converted, reformed
from hfjax.plan.storage import Stacked
from hfjax.update.optimizer_parts import COUNT, NUMBER, OptimizerParts

UNFIT = (TypeError, ValueError, KeyError, IndexError, AttributeError)  # of one that goes by shapes


@dataclass(frozen=True)
class _Form:
    """Another form of a model's parameters.

    Attributes:
        of: Path -> whose entries an array has where arrays are as they are.
        shapes: Path in the form -> shape and dtype.
        of_form: Path in the form -> whose entries it has.
        places: Path -> where it is in the form; of those to compare.
        dims: Path -> dimensions along which the form has other entries.
        more: Whether the form has more entries, which are 0.
    """

    of: Mapping[str, Entries]
    shapes: Flat
    of_form: Mapping[str, Entries]
    places: Mapping[str, Sequence[str]]
    dims: Mapping[str, Sequence[int]]
    more: bool = False


class _DependsError(Exception):
    """What an update of a part depends on that is no part of it."""


def _compared(optimizer: Any, like: Flat, form: _Form) -> tuple[str | None, OptimizerProgram]:
    """Return a parameter that the optimizer moves otherwise in a form, and its program."""
    terms: Terms = {}
    whole = OptimizerProgram(optimizer, like, form.of, terms)
    other = OptimizerProgram(optimizer, form.shapes, form.of_form, terms)
    terms_of = lambda program, path: [v.term for v in program.of_path(path)]
    joined: dict[Any, bool] = {}

    def same(path: str) -> bool:
        own = terms_of(whole, path)
        if not whole.own_only(path) or any(terms_of(other, p) != own for p in form.places[path]):
            return False
        for dim in form.dims.get(path, ()):
            if like[path].shape[dim] > 1:
                key = (*own, like[path].shape, dim)
                if key not in joined:
                    joined[key] = whole.joins(path, dim)
                if joined[key]:
                    return False
        return True

    path = next((path for path in form.places if not same(path)), None)
    kept = other.numbers
    otherwise = any(kept.get(name, term) != term for name, term in whole.numbers.items())
    if path is None and (otherwise or (form.more and whole.zeros_matter())):
        path = next(iter(form.places), None)
    return path, whole


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


def _part(layout: Layout, of_layers: bool, cut: Callable, dims: Callable) -> _Form:
    """Return the form in which only layers (or only what is outside of them) have entries."""
    mine = [path for path in layout.placed if path.startswith(LAYERS) == of_layers]
    shape = lambda path, x: cut(x.shape) if path in mine else (*(0,)[: len(x.shape)], *x.shape[1:])
    more = lambda path: (path, f"{path} beyond") if of_layers else (path,)
    of = {path: frozenset(more(path)) for path in layout.placed}
    return _Form(
        of,
        {path: jax.ShapeDtypeStruct(shape(path, x), x.dtype) for path, x in layout.placed.items()},
        {path: frozenset((path,)) if path in mine else NONE for path in layout.placed},
        {path: (path,) for path in mine},
        {path: dims(layout.placed[path].shape) for path in mine},
    )


def _forms(layout: Layout) -> dict[str, _Form]:
    every = lambda shape: range(len(shape))
    return {
        "a layer": _part(layout, True, lambda shape: (1, *shape[1:]), lambda shape: (0,)),
        "a piece of a layer": _part(layout, True, lambda shape: (1,) * len(shape), every),
        "the ends": _part(layout, False, lambda shape: shape, lambda shape: ()),
    }


def _check_parts(parts: OptimizerParts, forms: Mapping[str, _Form]) -> None:
    for name, (_, leaf) in parts.leaves.items():
        number = leaf.shape == () and jnp.issubdtype(leaf.dtype, jnp.number)
        if parts.roles[name] in (COUNT, NUMBER) and not number:
            what = f"{leaf.dtype}{list(leaf.shape)}"
            raise _DependsError(f"keeps {name} {what}, neither like a parameter nor a number")
    for what, form in forms.items():
        try:
            path, program = _compared(parts.layout.optimizer, dict(parts.layout.placed), form)
        except UNFIT as error:
            raise _DependsError("cannot be given a part of the parameters") from error
        _check_numbers(parts, program)
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
        path, _ = _compared(layout.optimizer, like, _packed_form(packed, like))
    except UNFIT as error:
        raise _refused(f"its state cannot be packed ({error})") from error
    if path is not None:
        raise _refused(f"it moves {path} otherwise than by itself")


def _packed_form(packed: PackedLayers, like: Flat) -> _Form:
    own = {path: frozenset((path,)) for path in like}
    places = {path: (place.array,) for path, place in packed.places.items()}
    rest = {path: x for path, x in like.items() if path not in places}
    held = {row: NONE.union(*(own[p] for p in places if row in places[p])) for row in packed.shapes}
    dims = {path: range(len(like[path].shape)) for path in places}
    of_form = held | {path: own[path] for path in rest}
    return _Form(own, rest | packed.shapes, of_form, places, dims, more=True)


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
    like = dict(layout.placed)
    stacked = {path for path, p in layout.placed.items() if p.stacked}
    longer = lambda x: jax.ShapeDtypeStruct((x.shape[0] + 1, *x.shape[1:]), x.dtype)
    of = {path: frozenset((path,)) for path in like}
    form = _Form(
        of,
        {path: longer(x) if path in stacked else x for path, x in like.items()},
        of,
        {path: (path,) for path in like},
        dict.fromkeys(stacked, (0,)),
        more=True,
    )
    path, _ = _compared(unwrapped(layout.optimizer, WithoutRows), like, form)
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
        path, _ = _compared(layout.optimizer, dict(layout.placed), _experts_apart(layout, at))
    except UNFIT:  # it goes by names, or by numbers of dimensions
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
    of = {path: frozenset(pieces.get(path, [path])) for path in layout.placed}
    placed = [(path, p, x) for path, x in layout.placed.items() for p in pieces.get(path, [path])]
    shapes = {p: one(path, x) if path in at else x for path, p, x in placed}
    dims = {path: (dim,) for path, dim in at.items()}
    return _Form(of, shapes, {p: frozenset((p,)) for p in shapes}, pieces, dims)


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
