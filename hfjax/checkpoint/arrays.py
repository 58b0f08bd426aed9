"""The arrays of a state by path, and back: what a step holds, whoever reads it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from hfjax.sharding.layout import State
from hfjax.utils.paths import is_key

Described = dict[str, list]  # path -> [dtype, shape]
KEY = "key<"  # begins the dtype of a random key


def arrays_of(state: State) -> dict[str, Any]:
    """Return {path: array} of a state; the order of its layers is not one of them."""
    found, _ = jax.tree_util.tree_flatten_with_path(replace(state, order=None))
    arrays = {_path(keys): leaf for keys, leaf in found}
    assert len(arrays) == len(found), "two arrays of a state have the same path"
    return arrays


def with_arrays(like: State, arrays: Mapping[str, Any]) -> State:
    """Return the state with these arrays, given by path, in the place of its own."""
    take = lambda keys, leaf: arrays.get(_path(keys), leaf)
    return jax.tree_util.tree_map_with_path(take, like)


def describe(arrays: Mapping[str, Any]) -> Described:
    """Return {path: [dtype, shape]}, as JSON gives it back."""
    return {path: [str(x.dtype), list(x.shape)] for path, x in arrays.items()}


def of_the_model(described: Described) -> Described:
    """Return what belongs to the model: parameters, other variables, no random keys."""
    return {
        path: found
        for path, found in described.items()
        if path.startswith(("params/", "variables/")) and not found[0].startswith(KEY)
    }


def raw(array: Any) -> Any:
    """Return an array, or its shape, that can be written: of a random key, its data."""
    if not is_key(array):
        return array
    if isinstance(array, jax.Array):
        return jax.random.key_data(array)
    data = jax.eval_shape(lambda key: jax.random.key_data(key), array)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=array.sharding)


def unraw(array: Any, like: Any) -> Any:
    """Return an array that was read as what it was before it was written."""
    return jax.random.wrap_key_data(array, impl=_impl(like)) if is_key(like) else array


def _path(keys: tuple) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def _impl(leaf: Any) -> Any:
    """Return the generator of a random key that is known by its dtype only."""
    found: list = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), leaf)
    return found[0]
