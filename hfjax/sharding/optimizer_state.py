"""An optimizer's state by path: its trees of parameters found, converted and put back."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from hfjax.parallel.packing import PACKED
from hfjax.utils.paths import Flat, Tree, parameter_of

Shapes = Mapping[str, tuple[int, ...]]  # of parameters, by path


def reformed(tree: Tree, old: Shapes, like: Any, new: Shapes, convert: Callable) -> Any:
    """Return an optimizer's state in the form of `like`.

    Its moments of parameters that are stored as `old` are converted to `new`, all of a tree of
    them together; the rest is the same in both forms.
    """
    trees: dict[str, Flat] = {}
    rest: Flat = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if (at := parameter_of(keys, leaf.shape, old)) is None:
            rest[jax.tree_util.keystr(keys)] = leaf
        else:
            trees.setdefault(jax.tree_util.keystr(keys[: at[0]]), {})[at[1]] = leaf
    found = {prefix: convert(flat) for prefix, flat in trees.items()}

    def take(keys: tuple, wanted: Any) -> Any:
        at = parameter_of(keys, wanted.shape, new)
        of = rest if at is None else found.get(jax.tree_util.keystr(keys[: at[0]]), {})
        leaf = of.get(jax.tree_util.keystr(keys) if at is None else at[1])
        if leaf is None or leaf.shape != wanted.shape:
            name = jax.tree_util.keystr(keys)
            raise ValueError(f"{name} {wanted.shape} of the optimizer's state is not by parameter.")
        return leaf

    return jax.tree_util.tree_map_with_path(take, like)


def converted(old: Any, new: Any, flat: Flat) -> Flat:
    """Return a tree of arrays by path, its layers restored by `old` and stored by `new`.

    These are `PackedLayers`, or move arrays as such would; None: as the model has them.
    """
    packed = new if old is None else old
    own = lambda path: path.startswith(PACKED) or path in packed.places
    layers = {path: x for path, x in flat.items() if packed is not None and own(path)}
    if not layers:  # what moves embed and head only
        return flat
    rest = {path: x for path, x in flat.items() if path not in layers}
    layers = layers if old is None else old.restore(layers)
    return rest | (layers if new is None else new.store(layers))
