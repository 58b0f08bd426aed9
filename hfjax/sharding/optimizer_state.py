"""Optimizer state by path: finds, converts and replaces its trees of parameters."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from hfjax.parallel.packing import PACKED
from hfjax.utils.paths import Flat, Tree, find_parameter

Shapes = Mapping[str, tuple[int, ...]]  # of parameters, by path


def convert_state(tree: Tree, old: Shapes, like: Any, new: Shapes, convert: Callable) -> Any:
    """Return an optimizer state in the form of `like`.

    Its trees of parameters that are stored as `old` are converted to `new`, each tree as a whole;
    the rest is the same in both forms.
    """
    trees: dict[str, Flat] = {}
    rest: Flat = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if (at := find_parameter(keys, leaf.shape, old)) is None:
            rest[jax.tree_util.keystr(keys)] = leaf
        else:
            trees.setdefault(jax.tree_util.keystr(keys[: at[0]]), {})[at[1]] = leaf
    new_trees = {prefix: convert(flat) for prefix, flat in trees.items()}

    def pick_leaf(keys: tuple, expected: Any) -> Any:
        owner = find_parameter(keys, expected.shape, new)
        leaves = (
            rest if owner is None else new_trees.get(jax.tree_util.keystr(keys[: owner[0]]), {})
        )
        leaf = leaves.get(jax.tree_util.keystr(keys) if owner is None else owner[1])
        if leaf is None or leaf.shape != expected.shape:
            name = jax.tree_util.keystr(keys)
            raise ValueError(
                f"{name} {expected.shape} of the optimizer's state is not by parameter."
            )
        return leaf

    return jax.tree_util.tree_map_with_path(pick_leaf, like)


def convert_layers(old: Any, new: Any, flat: Flat) -> Flat:
    """Return a tree of arrays by path, its layers restored by `old` and stored by `new`.

    These are `PackedLayers`, or move arrays as such would; None: the model's order.
    """
    packed = new if old is None else old
    is_layer = lambda path: path.startswith(PACKED) or path in packed.locations
    layers = {path: x for path, x in flat.items() if packed is not None and is_layer(path)}
    if not layers:  # embed and head only
        return flat
    rest = {path: x for path, x in flat.items() if path not in layers}
    layers = layers if old is None else old.restore(layers)
    return rest | (layers if new is None else new.store(layers))
