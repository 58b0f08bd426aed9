"""Random keys on devices: one per example of the global batch, or one per device.

A variable that holds a key and says `per_example=True` becomes one key per example of the global
batch, so that no mesh changes a mask. Any other key, those of `nnx.Rngs` among them, becomes one
per device and microbatch: as random, but masks differ between meshes.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from hfjax.parallel.adapters.model_template import LAYERS
from hfjax.parallel.mesh import active_batch_axes, size_of
from hfjax.parallel.spmd.global_batch import per_example
from hfjax.utils.paths import Flat, Index, is_random_key


def local_keys(
    templates: Mapping[str, Any],
    mesh: Mesh,
    variables: Flat,
    local_batch_size: int,
    step: Index,
    global_keys: bool = False,
    redistributed: bool = False,
) -> tuple[Callable, Flat]:
    """Return a function that gives this device's key variables, and the other variables.

    Args:
        templates: Path -> template of a variable.
        mesh: The mesh.
        variables: Their values in the state.
        local_batch_size: How many examples of the batch this device has.
        step: The number of the step.
        global_keys: Keys are those of the global microbatch, as on one device; else those of this
            device.
        redistributed: Microbatches have the same examples as on one device.

    Returns:
        Function of (layer or None, number of a microbatch, its size), and the statistics.
    """
    random = {p: v for p, v in variables.items() if is_random(templates[p])}
    axes = active_batch_axes(mesh)

    def keys(layer: Index | None, number: Index, batch_size: int) -> Flat:
        device = lax.axis_index(axes) if axes else 0
        global_first = number * batch_size * size_of(axes, mesh)
        first = (
            global_first + device * batch_size
            if redistributed
            else device * local_batch_size + number * batch_size
        )
        key_index = global_first if global_keys else first
        layer_keys = layer_variables(random, layer).items()
        key_args = step, first, batch_size, key_index
        return {p: derive_keys(templates[p], key, *key_args) for p, key in layer_keys}

    return keys, {p: v for p, v in variables.items() if p not in random}


def layer_variables(variables: Flat, layer: Index | None) -> Flat:
    """Return the variables of one of the stacked layers (None: all as they are)."""
    if layer is None:
        return variables
    pick = lambda x: lax.dynamic_index_in_dim(x, layer, 0, False)
    return {path: pick(x) for path, x in variables.items() if path.startswith(LAYERS)}


def is_random(variable: object) -> bool:
    """Return whether a variable is the state of a random generator: any typed key is."""
    return isinstance(variable, nnx.RngState) or is_random_key(variable) or per_example(variable)


def derive_keys(
    variable: Any,
    key: jax.Array,
    step: Index,
    first_example: Index,
    batch_size: int,
    key_index: Index | None = None,
) -> jax.Array:
    """Return a variable's value for the examples from `first_example` (counted globally) on.

    A key that is not per example is that of the example `key_index` (None: the first).
    """
    if not (per_example(variable) or isinstance(variable, nnx.RngKey) or is_random_key(variable)):
        return key
    if not per_example(variable):
        return fold_number(
            fold_number(key, step), first_example if key_index is None else key_index
        )
    ids = first_example + lax.iota("int32", batch_size)
    return jax.vmap(fold_number, (None, 0), key.ndim)(fold_number(key, step), ids)


def fold_number(key: jax.Array, number: Index) -> jax.Array:
    """Return the key, or each of the stacked keys, with a number folded in."""
    fold = jax.random.fold_in
    for _ in range(key.ndim):
        fold = jax.vmap(fold, (0, None))
    return fold(key, number)
