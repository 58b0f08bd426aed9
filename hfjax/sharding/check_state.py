"""What every function that takes a state refuses: what is none, is gone, or is of another layout.

Shapes are compared where a program is traced: once for each form of a state, so that a step that
runs again looks at none.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from hfjax.optimizers.transforms import stored_dtype
from hfjax.parallel.adapters.model_template import LAYERS
from hfjax.parallel.layer_order import Arrangement
from hfjax.parallel.packing import packed_layers
from hfjax.sharding.layout import Layout, State
from hfjax.utils.paths import Flat, Tree, nest

PARTS = ("params", "variables", "optimizer")


def check_layout(layout: object) -> None:
    """Refuse what is no layout."""
    if not isinstance(layout, Layout):
        raise ValueError(f"a layout of hfjax.layout is expected, found {type(layout).__name__}.")


def is_traced(tree: Tree) -> bool:
    """Return whether a step is called within a program that is being traced."""
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(tree))


def check_alive(state: Any) -> None:
    """Refuse what is no state, and one whose memory a step has taken: a step takes all of it."""
    check_is_state(state)
    check_not_taken(state.step)


def check_not_taken(tree: Tree) -> None:
    """Refuse arrays whose memory a step has taken."""
    gone = lambda x: not isinstance(x, Tracer) and getattr(x, "is_deleted", bool)()
    if any(map(gone, jax.tree.leaves(tree))):
        raise ValueError(
            "this state was given to an earlier step, which took its memory (donation). Go on "
            "with the state that the step returned: state, metrics = step(state, batch). To keep "
            "a state, copy it before the step: jax.tree.map(jnp.copy, state)."
        )


def check_is_state(state: object) -> None:
    """Refuse what is no state."""
    if not isinstance(state, State):
        raise ValueError(
            f"a hfjax.State is expected, found {type(state).__name__}. hfjax.init(layout) makes "
            "one, hfjax.restore(directory, layout).state is one."
        )


def check_takes(what: str, layout: object, state: object) -> None:
    """Refuse what is no layout or no state, and a state whose memory a step has taken."""
    if not isinstance(layout, Layout) or not isinstance(state, State):
        found = f"{type(layout).__name__} and {type(state).__name__}"
        raise ValueError(f"{what}(layout, state) takes a layout, then a state; found {found}.")
    check_not_taken(state)


def check_stored(layout: Layout, state: State) -> None:
    """Refuse a state of another model or optimizer, its layers stored for any schedule."""
    order = state.order
    old = None if order is None else Arrangement(np.array(order, np.int32, ndmin=3))
    check_like(stored_form(layout, old), state)


def check_form(layout: Layout, state: State, optimizer: bool = True) -> None:
    """Refuse a state of another model or optimizer; its layers are stored as the layout has them.

    A program calls it while it is traced.
    """
    check_like(_form(layout, optimizer), state, optimizer)


def check_like(wanted: State, state: State, optimizer: bool = True) -> None:
    """Refuse a state that has not these shapes."""
    if differ := apart(wanted, state, PARTS if optimizer else PARTS[:2]):
        path, found, known = differ[0]
        more = f" (and {len(differ) - 1} more differ)" if len(differ) > 1 else ""
        raise ValueError(
            f"this state is not of this layout: {path} is {found}, the layout has {known}{more}. A "
            "state belongs to a model and an optimizer: make it with hfjax.init(layout) or "
            "hfjax.restore(directory, layout), or give the layout that it was made with."
        )


def apart(wanted: State, state: State, parts: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """Return the path, what the state has there and what is wanted, of all arrays that differ."""
    found = []
    for part in parts:
        ours, theirs = (_shapes(getattr(x, part)) for x in (wanted, state))
        for path in {**ours, **theirs}:
            if ours.get(path) != theirs.get(path):
                both = theirs.get(path, "nothing"), ours.get(path, "nothing")
                found.append((part + path, *both))
    return found


def _shapes(tree: Tree) -> dict[str, str]:
    """Return path -> shape and dtype."""
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(keys): _shape(x) for keys, x in pairs}


def _shape(x: Any) -> str:
    """Return shape and dtype as people read them; of what is no array, what it is."""
    if not hasattr(x, "dtype"):
        return f"no array, but {type(x).__name__}"
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def _form(layout: Layout, optimizer: bool = True) -> State:
    """Return the shapes of a state of the layout."""
    params, variables = layout.placed, layout.blueprint.variables
    kept = layout.state_shapes.optimizer if optimizer else None
    return State(None, nest(_like(params)), kept, nest(_like(variables)))


def stored_form(layout: Layout, old: Arrangement | None) -> State:
    """Return the shapes of a state whose layers are arranged so; None: as the model has them.

    Of an arrangement that is not of the model's layers: the shapes of the layout itself.
    """
    if old is None:
        return _form(layout if layout.storage.arrangement is None else layout.as_the_model)
    known = layout.order
    same = known is not None and old.rows.tolist() == known.reshape(-1).tolist()
    if same or not _arranges(layout, old):
        return _form(layout)
    params = _rows(layout, old)
    kept = jax.eval_shape(layout.optimizer.init, nest(params))
    narrow = lambda x: jax.ShapeDtypeStruct(x.shape, stored_dtype(layout.optimizer, x.dtype))
    params = nest({path: narrow(x) for path, x in params.items()})
    return State(None, params, kept, nest(_like(layout.blueprint.variables)))


def _arranges(layout: Layout, old: Arrangement) -> bool:
    """Return whether an arrangement has each layer of the model once."""
    plan = layout.blueprint
    if not plan.three_parts:
        return False
    layers = sorted(old.rows[old.rows >= 0].tolist())
    return layers == list(range(plan.number_of_layers))


def _rows(layout: Layout, old: Arrangement) -> Flat:
    """Return the parameters of the model, in its dtypes, whose layers are arranged so."""
    plan = layout.blueprint
    like = _like(plan.parameters)
    if plan.listed:
        ends = {path: x for path, x in like.items() if not path.startswith(LAYERS)}
        return ends | dict(packed_layers(plan, layout.mesh, old).shapes)
    stacked = {path for path, p in layout.placed.items() if p.stacked}
    grown = lambda x: jax.ShapeDtypeStruct((old.rows.size, *x.shape[1:]), x.dtype)
    return {path: grown(x) if path in stacked else x for path, x in like.items()}


def _like(arrays: Mapping[str, Any]) -> Flat:
    return {path: jax.ShapeDtypeStruct(tuple(x.shape), x.dtype) for path, x in arrays.items()}
