"""Map a state to arrays by path, as a step stores them, and back."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from hfjax.sharding.layout import State
from hfjax.utils.paths import is_random_key

ArraySpecs = dict[str, list]  # path -> [dtype, shape]
KEY = "key<"  # prefix of the dtype of a random key
PARAMS = "params/"  # how paths of parameters begin


def state_arrays(state: State) -> dict[str, Any]:
    """Return {path: array} of a state, without the order of its layers."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(replace(state, order=None))
    arrays = {_path(keys): leaf for keys, leaf in leaves}
    assert len(arrays) == len(leaves), "two arrays of a state have the same path"
    return arrays


def with_arrays(like: State, arrays: Mapping[str, Any]) -> State:
    """Return the state with its arrays replaced by these, given by path."""
    take = lambda keys, leaf: arrays.get(_path(keys), leaf)
    return jax.tree_util.tree_map_with_path(take, like)


def describe(arrays: Mapping[str, Any]) -> ArraySpecs:
    """Return {path: [dtype, shape]}, in types that JSON preserves."""
    return {path: [str(x.dtype), list(x.shape)] for path, x in arrays.items()}


def model_arrays(specs: ArraySpecs) -> ArraySpecs:
    """Return the specs of the model's parameters and other variables, without random keys."""
    return {
        path: spec
        for path, spec in specs.items()
        if path.startswith((PARAMS, "variables/")) and not spec[0].startswith(KEY)
    }


def to_raw(array: Any) -> Any:
    """Return an array, or its shape, in a form that can be written: a random key as its data."""
    if not is_random_key(array):
        return array
    if isinstance(array, jax.Array):
        return jax.random.key_data(array)
    data = jax.eval_shape(lambda key: jax.random.key_data(key), array)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=array.sharding)


def from_raw(array: Any, like: Any) -> Any:
    """Return an array that was read as it was before `to_raw`."""
    return jax.random.wrap_key_data(array, impl=_key_impl(like)) if is_random_key(like) else array


def _path(keys: tuple) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def _key_impl(leaf: Any) -> Any:
    """Return the PRNG implementation of a random key, known by its dtype only."""
    impls: list = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), leaf)
    return impls[0]
