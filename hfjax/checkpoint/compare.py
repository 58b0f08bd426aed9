"""Compare what is saved with what is wanted, path by path, before anything is read.

`arrays_to_save` checks a state before it is saved.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from hfjax.checkpoint.arrays import KEY, Described, arrays_of
from hfjax.sharding.check_state import check_is_state
from hfjax.sharding.layout import Layout, State
from hfjax.sharding.reorder_layers import canonical
from hfjax.utils.keywords import NEAREST, nearest_of
from hfjax.utils.tables import few, named


def check_same(saved: Described, wanted: Described, dtype: DTypeLike, where: str) -> None:
    """Refuse to read arrays that are not the ones that are wanted; every difference has a path.

    Floating-point arrays of another dtype are read where `dtype` says what is wanted.
    """
    cast = _dtype_name(dtype, wanted)
    if lines := differences(saved, wanted, cast, "saved"):
        told = "\n".join(f"  {line}" for line in lines)
        advice = _advice(saved, wanted, cast)
        raise ValueError(f"{where} does not hold what this layout wants:\n{told}\n{advice}")


def differences(found: Described, wanted: Described, cast: str | None, there: str) -> list[str]:
    """Return what is missing, too much, or of another shape or dtype; the first ones of many."""
    lines = [
        *_missing(found, wanted, there),
        *_unlike(found, wanted, cast, there),
        *_extra(found, wanted, there),
    ]
    return few(lines)


def _dtype_name(dtype: DTypeLike, wanted: Described) -> str | None:
    """Return the name of the dtype that is asked for; refuse one that the layout has not."""
    if dtype is None:
        return None
    try:
        name = str(jnp.dtype(dtype))
    except TypeError:
        name = str(dtype)
    floating = sorted({d for d, _ in wanted.values() if _floating(d)})
    if name not in floating:
        raise ValueError(
            f"dtype={name!r}: the arrays of this layout are {', '.join(floating)}. dtype says that "
            "arrays saved otherwise may be cast to what the layout has; to have them in another "
            "dtype, make the layout of a model whose parameters have it."
        )
    return name


def _missing(found: Described, wanted: Described, there: str) -> Iterator[str]:
    for path in wanted:
        if path not in found:
            near = _nearest(path, found, wanted)
            yield f"{named(path)}{_show(wanted[path])} is not {there}{near}"


def _extra(found: Described, wanted: Described, there: str) -> Iterator[str]:
    for path in found:
        if path not in wanted:
            near = _nearest(path, wanted, found)
            yield f"{named(path)}{_show(found[path])} is {there}, not wanted{near}"


def _unlike(found: Described, wanted: Described, cast: str | None, there: str) -> Iterator[str]:
    for path, (dtype, shape) in wanted.items():
        if path not in found or found[path] == [dtype, shape]:
            continue
        if found[path][1] != shape or not (dtype == cast and _floating(found[path][0])):
            yield f"{named(path)} is{_show(found[path])} {there}, wanted as{_show(wanted[path])}"


def _advice(saved: Described, wanted: Described, cast: str | None) -> str:
    """Return what to do, by what differs."""
    wrong = [p for p in {**saved, **wanted} if saved.get(p) != wanted.get(p)]
    if cast is None and all(_castable(saved.get(p), wanted.get(p)) for p in wrong):
        dtypes = sorted({wanted[p][0] for p in wrong})
        return f'To cast them on purpose, restore with dtype="{dtypes[0]}".'
    if all(p.startswith("optimizer/") for p in wrong):
        return (
            "Only the optimizer's state differs. Give the layout the optimizer it was saved with, "
            "or restore with parameters_only=True: the parameters, and a fresh optimizer."
        )
    return "Make the layout of the model that was saved: hfjax.recorded(directory) has its config."


def _show(described: list) -> str:
    dtype, shape = described
    return f" {dtype}[{','.join(map(str, shape))}]" if dtype else ""


def _nearest(path: str, known: Described, others: Described) -> str:
    """Return the path that may have been meant: of the same part, and without a partner."""
    part = path.split("/")[0]
    single = [p for p in known if p.startswith(part) and p not in others]
    return named(nearest_of(path, single, NEAREST))


def _castable(found: list | None, wanted: list | None) -> bool:
    """Return whether two arrays differ only in a floating dtype."""
    if found is None or wanted is None or found[1] != wanted[1]:
        return False
    return _floating(found[0]) and _floating(wanted[0])


def _floating(dtype: str) -> bool:
    return not dtype.startswith(KEY) and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)


def step_of(state: Any) -> int:
    """Return the number of steps that a state has taken; refuse what is none, or is gone."""
    check_is_state(state)
    if any(getattr(x, "is_deleted", bool)() for x in jax.tree.leaves(state)):
        raise ValueError(
            "this state was given to a later step, which took its memory (donation). Save the "
            "state that the step returned, before the next step: state, metrics = step(state, "
            "batch); checkpoints.save(state)."
        )
    if (step := int(state.step)) < 0:
        raise ValueError(
            f"step {step} of this state: the number of steps taken is at least 0. Give the state "
            "the one that it has taken: dataclasses.replace(state, step=jnp.int32(…))."
        )
    return step


def arrays_to_save(layout: Layout, state: State) -> dict[str, Any]:
    """Return {path: array} of a state, its layers in the model's order."""
    return arrays_of(canonical(layout, state))
