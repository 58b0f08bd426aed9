"""Compare saved with expected arrays, path by path, before anything is read.

`arrays_to_save` checks a state before it is saved.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from hfjax.checkpoint.arrays import KEY, PARAMS, ArraySpecs, state_arrays
from hfjax.sharding.check_state import check_is_state
from hfjax.sharding.layout import Layout, State
from hfjax.sharding.reorder_layers import to_model_order
from hfjax.utils.keywords import NEAREST, name_hint
from hfjax.utils.tables import first_lines, quote


def check_same(saved: ArraySpecs, expected: ArraySpecs, dtype: DTypeLike, label: str) -> None:
    """Refuse saved arrays that differ from the expected ones; every difference has a path.

    Floating-point arrays of another dtype are accepted where the expected one is `dtype`.
    """
    cast = _check_dtype(dtype, expected)
    if lines := differences(saved, expected, cast, "saved"):
        listing = "\n".join(f"  {line}" for line in lines)
        advice = _advice(saved, expected, cast)
        raise ValueError(f"{label} does not hold what this layout wants:\n{listing}\n{advice}")


def differences(
    actual: ArraySpecs, expected: ArraySpecs, cast: str | None, actual_label: str
) -> list[str]:
    """Return what is missing, extra, or of another shape or dtype; the first ones of many."""
    lines = [
        *_missing_lines(actual, expected, actual_label),
        *_mismatch_lines(actual, expected, cast, actual_label),
        *_extra_lines(actual, expected, actual_label),
    ]
    return first_lines(lines)


def _check_dtype(dtype: DTypeLike, expected: ArraySpecs) -> str | None:
    """Return the name of the requested dtype; refuse one that the layout does not have."""
    if dtype is None:
        return None
    try:
        name = str(jnp.dtype(dtype))
    except TypeError:
        name = str(dtype)
    floating = sorted({d for d, _ in expected.values() if _is_floating(d)})
    if name not in floating:
        raise ValueError(
            f"dtype={name!r}: the arrays of this layout are {', '.join(floating)}. dtype says that "
            "arrays saved otherwise may be cast to what the layout has; to have them in another "
            "dtype, make the layout of a model whose parameters have it."
        )
    return name


def _missing_lines(actual: ArraySpecs, expected: ArraySpecs, actual_label: str) -> Iterator[str]:
    for path in expected:
        if path not in actual:
            near = _nearest(path, actual, expected)
            yield f"{quote(path)}{_show(expected[path])} is not {actual_label}{near}"


def _extra_lines(actual: ArraySpecs, expected: ArraySpecs, actual_label: str) -> Iterator[str]:
    for path in actual:
        if path not in expected:
            near = _nearest(path, expected, actual)
            yield f"{quote(path)}{_show(actual[path])} is {actual_label}, not wanted{near}"


def _mismatch_lines(
    actual: ArraySpecs, expected: ArraySpecs, cast: str | None, actual_label: str
) -> Iterator[str]:
    for path, (dtype, shape) in expected.items():
        if path not in actual or actual[path] == [dtype, shape]:
            continue
        if actual[path][1] != shape or not (dtype == cast and _is_floating(actual[path][0])):
            yield (
                f"{quote(path)} is{_show(actual[path])} {actual_label}, wanted as"
                f"{_show(expected[path])}"
            )


def _advice(saved: ArraySpecs, expected: ArraySpecs, cast: str | None) -> str:
    """Return advice that depends on what differs."""
    wrong = [p for p in {**saved, **expected} if saved.get(p) != expected.get(p)]
    if cast is None and all(_is_castable(saved.get(p), expected.get(p)) for p in wrong):
        dtypes = sorted({expected[p][0] for p in wrong})
        return f'To cast them on purpose, restore with dtype="{dtypes[0]}".'
    if all(p.startswith("optimizer/") for p in wrong):
        return (
            "Only the optimizer's state differs. Give the layout the optimizer it was saved with, "
            "or restore with parameters_only=True: the parameters, and a fresh optimizer."
        )
    return (
        "Make the layout of the model that was saved: hfjax.checkpoint_metadata(directory) has "
        "its config."
    )


def _show(spec: list) -> str:
    dtype, shape = spec
    return f" {dtype}[{','.join(map(str, shape))}]" if dtype else ""


def _nearest(path: str, known: ArraySpecs, others: ArraySpecs) -> str:
    """Return a hint at a similar path under the same root that has no counterpart."""
    root = path.split("/")[0]
    unpaired = [p for p in known if p.startswith(root) and p not in others]
    return quote(name_hint(path, unpaired, NEAREST))


def _is_castable(actual_spec: list | None, expected_spec: list | None) -> bool:
    """Return whether two arrays differ only in a floating dtype."""
    if actual_spec is None or expected_spec is None or actual_spec[1] != expected_spec[1]:
        return False
    return _is_floating(actual_spec[0]) and _is_floating(expected_spec[0])


def _is_floating(dtype: str) -> bool:
    return not dtype.startswith(KEY) and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)


def steps_taken(state: Any) -> int:
    """Return the number of steps that a state has taken; refuse a non-state or a donated one."""
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
    """Return {path: array} of a state, its layers in the model's order.

    Frozen parameters that are in a model's files (`base_record`) are left out.
    """
    arrays = state_arrays(to_model_order(layout, state))
    return arrays if base_record(layout) is None else without_base(layout, arrays)


def base_record(layout: Layout) -> dict[str, Any] | None:
    """Return what is recorded of the files of frozen parameters; None if there are none."""
    weights = layout.template.base_weights
    return None if weights is None else weights.record()


def without_base(layout: Layout, arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays that are not frozen parameters, by path."""
    is_base = lambda path: layout.template.is_frozen(path.removeprefix(PARAMS))
    return {p: x for p, x in arrays.items() if not (p.startswith(PARAMS) and is_base(p))}
