"""Refuses muon where it would take stacks of vectors for matrices, and matrices for something else.

optax.contrib.muon calls an array with two dimensions a matrix. Of stacked layers that is a stack of
biases; their matrices have three dimensions, or more where heads are kept apart.
"""

from collections.abc import Mapping
from typing import Any

import jax
import optax

from hfjax.base.paths import flatten, nest
from hfjax.parallel.mesh import STACK
from hfjax.parallel.placement import Array


def check_matrices(
    optimizer: Any, parameters: Mapping[str, Any], arrays: Mapping[str, Array]
) -> None:
    """Refuse an optimizer that makes the wrong arrays of a model orthogonal."""
    made_so = _orthogonal(jax.eval_shape(optimizer.init, nest(parameters)))
    if made_so is None:
        return
    shown = lambda path: f"{path} {list(arrays[path].shape)}"
    by_size = all(len(arrays[path].shape) == 2 for path in made_so)
    vectors = [p for p in made_so if _is_stacked(arrays[p]) and len(arrays[p].shape) == 2]
    missed = [p for p in arrays if by_size and p not in made_so and _has_matrices(arrays[p])]
    found = {
        "makes {} orthogonal, a stack of vectors": vectors,
        "updates {}, which holds matrices, by Adam": missed,
    }
    wrong = [what.format(shown(min(paths))) for what, paths in found.items() if paths]
    if wrong:
        raise ValueError(
            f"optax.contrib.muon {' and '.join(wrong)}: without more it takes each array of two "
            "dimensions for a matrix, and no other. Say which dimensions are a matrix: muon(…, "
            "muon_weight_dimension_numbers=f), f(params) being a tree of "
            "optax.contrib.MuonDimensionNumbers(reduction_axis, output_axis), and None for what "
            "Adam updates. Or use another optimizer, for instance optax.adamw."
        )


def _orthogonal(state: Any) -> set[str] | None:
    """Return the paths of what muon makes orthogonal; None: there is no muon."""
    is_muon = lambda x: isinstance(x, optax.contrib.MuonState)
    found = [x for x in jax.tree.leaves(state, is_leaf=is_muon) if is_muon(x)]
    paths = {path for x in found for path, moment in flatten(x.mu).items() if _is_array(moment)}
    return paths if found else None


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape")


def _is_stacked(array: Array) -> bool:
    return array.axes[:1] == (STACK,)


def _has_matrices(array: Array) -> bool:
    """Whether an array of three dimensions or more is a stack of matrices, or one with parts.

    Without names of dimensions it is what its author makes of it (a convolution).
    """
    named = _is_stacked(array) or any(array.axes)
    return named and len(array.shape) > 2
