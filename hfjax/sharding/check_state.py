"""What every function that takes a state refuses: no state, a donated one, or another layout's.

Shapes are compared where a program is traced: once for each form of a state, so that a step that
runs again checks none.
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
    """Refuse what is no state, and one that was donated to a step: a step takes all of it."""
    check_is_state(state)
    check_not_donated(state.step)


def check_not_donated(tree: Tree) -> None:
    """Refuse arrays that were donated to a step."""
    is_deleted = lambda x: not isinstance(x, Tracer) and getattr(x, "is_deleted", bool)()
    if any(map(is_deleted, jax.tree.leaves(tree))):
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


def check_layout_and_state(function_name: str, layout: object, state: object) -> None:
    """Refuse what is no layout or no state, and a state that was donated to a step."""
    if not isinstance(layout, Layout) or not isinstance(state, State):
        type_names = f"{type(layout).__name__} and {type(state).__name__}"
        raise ValueError(
            f"{function_name}(layout, state) takes a layout, then a state; found {type_names}."
        )
    check_not_donated(state)


def check_stored_shapes(layout: Layout, state: State) -> None:
    """Refuse a state of another model or optimizer; layers may be stored for any schedule."""
    order = state.order
    old = None if order is None else Arrangement(np.array(order, np.int32, ndmin=3))
    check_same_shapes(stored_shapes(layout, old), state)


def check_state_shapes(layout: Layout, state: State, optimizer: bool = True) -> None:
    """Refuse a state of another model or optimizer; layers must be stored as by the layout.

    A program calls it while it is traced.
    """
    check_same_shapes(_state_shapes(layout, optimizer), state, optimizer)


def check_same_shapes(expected: State, state: State, optimizer: bool = True) -> None:
    """Refuse a state that does not have these shapes."""
    if mismatches := find_mismatches(expected, state, PARTS if optimizer else PARTS[:2]):
        path, actual, expected_shape = mismatches[0]
        suffix = f" (and {len(mismatches) - 1} more differ)" if len(mismatches) > 1 else ""
        raise ValueError(
            f"this state is not of this layout: {path} is {actual}, the layout has "
            f"{expected_shape}{suffix}. A state belongs to a model and an optimizer: make it with "
            "hfjax.init(layout) or hfjax.restore(directory, layout), or give the layout that it "
            "was made with."
        )


def find_mismatches(
    expected: State, state: State, columns: tuple[str, ...]
) -> list[tuple[str, str, str]]:
    """Return the path, the actual and the expected shape of all arrays that differ."""
    mismatches = []
    for column in columns:
        expected_shapes, actual_shapes = (_shapes(getattr(x, column)) for x in (expected, state))
        for path in {**expected_shapes, **actual_shapes}:
            if expected_shapes.get(path) != actual_shapes.get(path):
                shape_pair = (
                    actual_shapes.get(path, "nothing"),
                    expected_shapes.get(path, "nothing"),
                )
                mismatches.append((column + path, *shape_pair))
    return mismatches


def _shapes(tree: Tree) -> dict[str, str]:
    """Return path -> shape and dtype."""
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(keys): _describe(x) for keys, x in pairs}


def _describe(x: Any) -> str:
    """Return shape and dtype in readable form; for what is no array, its type."""
    if not hasattr(x, "dtype"):
        return f"no array, but {type(x).__name__}"
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def _state_shapes(layout: Layout, optimizer: bool = True) -> State:
    """Return the shapes of a state of the layout."""
    params, variables = layout.param_specs, layout.template.variables
    optimizer_state = layout.state_shapes.optimizer if optimizer else None
    return State(
        None, nest(_shape_structs(params)), optimizer_state, nest(_shape_structs(variables))
    )


def stored_shapes(layout: Layout, old: Arrangement | None) -> State:
    """Return the shapes of a state with layers arranged so; None: in the model's order.

    For an arrangement that is not of the model's layers: the shapes of the layout itself.
    """
    if old is None:
        return _state_shapes(layout if layout.storage.arrangement is None else layout.model_layout)
    order = layout.order
    is_same_order = order is not None and old.stored_order.tolist() == order.reshape(-1).tolist()
    if is_same_order or not _is_permutation(layout, old):
        return _state_shapes(layout)
    params = _stored_params(layout, old)
    optimizer_state = jax.eval_shape(layout.optimizer.init, nest(params))
    with_stored_dtype = lambda x: jax.ShapeDtypeStruct(
        x.shape, stored_dtype(layout.optimizer, x.dtype)
    )
    params = nest({path: with_stored_dtype(x) for path, x in params.items()})
    return State(None, params, optimizer_state, nest(_shape_structs(layout.template.variables)))


def _is_permutation(layout: Layout, old: Arrangement) -> bool:
    """Return whether an arrangement has each layer of the model once."""
    template = layout.template
    if not template.is_layer_stack:
        return False
    layers = sorted(old.stored_order[old.stored_order >= 0].tolist())
    return layers == list(range(template.num_layers))


def _stored_params(layout: Layout, old: Arrangement) -> Flat:
    """Return the parameters of the model, in its dtypes, with layers arranged so."""
    template = layout.template
    shapes = _shape_structs(template.parameters)
    if template.is_layer_list:
        ends = {path: x for path, x in shapes.items() if not path.startswith(LAYERS)}
        return ends | dict(packed_layers(template, layout.mesh, old).shapes)
    stacked_paths = {path for path, p in layout.param_specs.items() if p.stacked}
    resize = lambda x: jax.ShapeDtypeStruct((old.stored_order.size, *x.shape[1:]), x.dtype)
    return {path: resize(x) if path in stacked_paths else x for path, x in shapes.items()}


def _shape_structs(arrays: Mapping[str, Any]) -> Flat:
    return {path: jax.ShapeDtypeStruct(tuple(x.shape), x.dtype) for path, x in arrays.items()}
