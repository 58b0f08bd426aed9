"""Refuses muon where it would take stacks of vectors for matrices, and matrices for something else.

optax.contrib.muon calls an array with two dimensions a matrix. Of stacked layers that is a stack of
biases; their matrices have three dimensions, or more where heads are kept apart.
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
    """Refuse an optimizer that makes the wrong arrays of a model orthogonal."""
    state = jax.eval_shape(optimizer.init, nest(parameters))
    made_so = [path for muon in _found(state, _is_muon) for path in _paths(muon)]
    vectors = [p for p in made_so if _is_stacked(arrays[p]) and len(arrays[p].shape) == 2]
    missed = [p for muon in _found(state, _is_whole_muon) for p in _missed(muon, arrays)]
    found = {
        "makes {} orthogonal, a stack of vectors": vectors,
        "updates {}, which holds matrices, by Adam": missed,
    }
    shown = lambda path: f"{path} {list(arrays[path].shape)}"
    wrong = [what.format(shown(min(paths))) for what, paths in found.items() if paths]
    if wrong:
        raise ValueError(
            f"optax.contrib.muon {' and '.join(wrong)}: without more it takes each array of two "
            "dimensions for a matrix, and no other. Say which dimensions are a matrix: muon(…, "
            "muon_weight_dimension_numbers=f), f(params) being a tree of "
            "optax.contrib.MuonDimensionNumbers(reduction_axis, output_axis), and None for what "
            "Adam updates. Or use another optimizer, for all paths (optax.adamw) or for some "
            "(hfjax.by_path)."
        )


def _missed(muon: Any, arrays: Mapping[str, Array]) -> list[str]:
    """Return the matrices that muon leaves to its Adam because they have not two dimensions.

    If Adam has an array of two dimensions, the user has said which are matrices.
    """
    made_so = [path for part in _found(muon, _is_muon) for path in _paths(part)]
    left = [path for part in _found(muon, _is_adam) for path in _paths(part)]
    flat = lambda path: len(arrays[path].shape) == 2
    by_size = all(map(flat, made_so)) and not any(map(flat, left))
    return [path for path in left if by_size and _has_matrices(arrays[path])]


def _found(state: Any, is_one: Callable[[Any], bool]) -> list[Any]:
    """Return the parts of a state that are of a kind."""
    return [x for x in jax.tree.leaves(state, is_leaf=is_one) if is_one(x)]


def _is_muon(state: object) -> bool:
    return isinstance(state, optax.contrib.MuonState)


def _is_adam(state: object) -> bool:
    return isinstance(state, optax.ScaleByAdamState)


def _is_whole_muon(state: object) -> bool:
    """Whether it is the state of optax.contrib.muon: of what it makes orthogonal, and of its Adam.

    A partition of the user's own may have the same names, and a whole muon as its part.
    """
    parts = getattr(state, "inner_states", {})
    inner = getattr(parts.get("muon"), "inner_state", None) if isinstance(parts, dict) else None
    return isinstance(inner, tuple) and any(map(_is_muon, inner))


def _paths(state: Any) -> list[str]:
    """Return the paths of the parameters that a part of a state has moments of."""
    return [path for path, moment in flatten(state.mu).items() if _is_array(moment)]


def _is_array(x: object) -> bool:
    return hasattr(x, "shape")


def _is_stacked(array: Array) -> bool:
    return array.axes[:1] == (STACK,)


def _has_matrices(array: Array) -> bool:
    """Whether an array of three dimensions or more is a stack of matrices, or one with parts.

    Without names of dimensions it is what its author makes of it (a convolution).
    """
    named = _is_stacked(array) or any(array.axes)
    return named and len(array.shape) > 2
