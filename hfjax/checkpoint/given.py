"""A state that is given to be saved: checked before anything is written."""

from collections.abc import Mapping
from typing import Any

import jax

from hfjax.checkpoint.arrays import arrays_of, describe
from hfjax.checkpoint.compare import differences
from hfjax.paths import flatten
from hfjax.plan import Layout, State
from hfjax.rearrange import canonical


def step_of(state: Any) -> int:
    """Return the number of steps that a state has taken; refuse what is none, or is gone."""
    if not isinstance(state, State):
        raise ValueError(f"save(state): a hfjax.State is expected, found {type(state).__name__}.")
    if any(getattr(x, "is_deleted", bool)() for x in jax.tree.leaves(state)):
        raise ValueError(
            "this state was given to a later step, which took its memory (donation). Save the "
            "state that the step returned, before the next step: state, metrics = step(state, "
            "batch); checkpoints.save(state)."
        )
    return int(state.step)


def arrays_to_save(layout: Layout, state: State) -> dict[str, Any]:
    """Return {path: array} of a state, its layers in the model's order."""
    if not layout.blueprint.listed:
        names = dict.fromkeys(flatten(state.params)), dict.fromkeys(layout.arrays)
        _check(*({f"params/{path}": ["", []] for path in some} for some in names))
    arrays = arrays_of(canonical(layout, state))
    _check(describe(arrays), describe(arrays_of(layout.as_the_model.abstract_state())))
    return arrays


def _check(found: Mapping[str, list], wanted: Mapping[str, list]) -> None:
    if lines := differences(dict(found), dict(wanted), None, "in this state"):
        told = "\n".join(f"  {line}" for line in lines)
        raise ValueError(
            f"this state is not one of the layout that saves it:\n{told}\nSave it with the layout "
            "under which it was trained."
        )
