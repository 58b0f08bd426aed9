"""Refuses optax.contrib.muon where it would take vectors for matrices, or miss matrices.

It calls an array with two dimensions a matrix. With stacked layers that is a stack of biases; their
matrices have three dimensions, or more where heads are kept apart.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from hfjax.parallel.mesh import STACK
from hfjax.parallel.param_specs import Array
from hfjax.utils.paths import flatten, nest


def check_matrices(
    optimizer: Any, parameters: Mapping[str, Any], arrays: Mapping[str, Array]
) -> None:
    """Refuse an optimizer that orthogonalizes the wrong arrays of a model."""
    state = jax.eval_shape(optimizer.init, nest(parameters))
    muon_paths = [path for muon in _find_nodes(state, _is_muon) for path in _moment_paths(muon)]
    vectors = [p for p in muon_paths if _is_stacked(arrays[p]) and len(arrays[p].shape) == 2]
    missed = [
        p for muon in _find_nodes(state, _is_full_muon) for p in _missed_matrices(muon, arrays)
    ]
    problems = {
        "makes {} orthogonal, a stack of vectors": vectors,
        "updates {}, which holds matrices, by Adam": missed,
    }
    describe = lambda path: f"{path} {list(arrays[path].shape)}"
    messages = [text.format(describe(min(paths))) for text, paths in problems.items() if paths]
    if messages:
        raise ValueError(
            f"optax.contrib.muon {' and '.join(messages)}: without more it takes each array of two "
            "dimensions for a matrix, and no other. Use hfjax.optimizers.muon(…), which reads what "
            "is a matrix from the names of dimensions. Or say it: optax.contrib.muon(…, "
            "muon_weight_dimension_numbers=f), f(params) being a tree of "
            "optax.contrib.MuonDimensionNumbers(reduction_axis, output_axis), and None for what "
            "Adam updates; or let another optimizer update some paths (hfjax.optimizers.by_path)."
        )


def _missed_matrices(muon: Any, arrays: Mapping[str, Array]) -> list[str]:
    """Return the matrices that muon leaves to its Adam because they do not have two dimensions.

    If Adam has an array of two dimensions, the user has said which are matrices.
    """
    muon_paths = [path for node in _find_nodes(muon, _is_muon) for path in _moment_paths(node)]
    adam_paths = [path for node in _find_nodes(muon, _is_adam) for path in _moment_paths(node)]
    ranks = lambda paths: {len(arrays[path].shape) for path in paths}
    is_by_rank = ranks(muon_paths) <= {2} and 2 not in ranks(adam_paths)
    return [path for path in adam_paths if is_by_rank and _has_matrices(arrays[path])]


def _find_nodes(state: Any, is_match: Callable[[Any], bool]) -> list[Any]:
    """Return the matching nodes of an optimizer state."""
    return [x for x in jax.tree.leaves(state, is_leaf=is_match) if is_match(x)]


def _is_muon(state: object) -> bool:
    return isinstance(state, optax.contrib.MuonState)


def _is_adam(state: object) -> bool:
    return isinstance(state, optax.ScaleByAdamState)


def _is_full_muon(state: object) -> bool:
    """Whether it is a state of optax.contrib.muon: of what it orthogonalizes, and of its Adam.

    A partition of the user's own may have the same names, and a full muon as its part.
    """
    inner_states = getattr(state, "inner_states", {})
    inner = (
        getattr(inner_states.get("muon"), "inner_state", None)
        if isinstance(inner_states, dict)
        else None
    )
    return isinstance(inner, tuple) and any(map(_is_muon, inner))


def _moment_paths(state: Any) -> list[str]:
    """Return the paths of the parameters whose moments are in a node of an optimizer state."""
    return [path for path, moment in flatten(state.mu).items() if _is_array(moment)]


def _is_array(x: object) -> bool:
    return hasattr(x, "shape")


def _is_stacked(array: Array) -> bool:
    return array.axes[:1] == (STACK,)


def _has_matrices(array: Array) -> bool:
    """Whether an array of three dimensions or more is a stack of matrices, or one with parts.

    Without dimension names it is what its author makes of it (a convolution).
    """
    has_names = _is_stacked(array) or any(array.axes)
    return has_names and len(array.shape) > 2
