"""Random keys on devices: one for each row of the global batch, or one for each device.

A variable that holds a key and says `per_row=True` becomes one key per row of the global batch, so
that no mesh changes a mask. Any other key, those of `nnx.Rngs` among them, becomes one per device
and microbatch: as random, but other masks on another mesh.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from hfjax.parallel.adapters.model_template import LAYERS
from hfjax.parallel.mesh import row_axes, size_of
from hfjax.parallel.spmd.global_batch import per_row
from hfjax.utils.paths import Flat, Index, is_key


def keys_here(
    templates: Mapping[str, Any],
    mesh: Mesh,
    variables: Flat,
    local_rows: int,
    step: Index,
    whole: bool = False,
    dealt: bool = False,
) -> tuple[Callable, Flat]:
    """Return what gives the variables that hold keys on this device, and the other variables.

    Args:
        templates: Path -> template of a variable.
        mesh: The mesh.
        variables: What they hold in the state.
        local_rows: How many rows of the batch this device has.
        step: The number of the step.
        whole: Keys are those of all rows of a microbatch, as one device has them; else those of
            this device.
        dealt: Microbatches have the rows that they have on one device.

    Returns:
        Function of (layer or None, number of a microbatch, its rows), and the statistics.
    """
    random = {p: v for p, v in variables.items() if is_random(templates[p])}
    axes = row_axes(mesh)

    def keys(layer: Index | None, number: Index, rows: int) -> Flat:
        device = lax.axis_index(axes) if axes else 0
        of_all = number * rows * size_of(axes, mesh)
        first = of_all + device * rows if dealt else device * local_rows + number * rows
        drawn = of_all if whole else first
        of_layer = variables_of(random, layer).items()
        given = step, first, rows, drawn
        return {p: keys_for(templates[p], key, *given) for p, key in of_layer}

    return keys, {p: v for p, v in variables.items() if p not in random}


def variables_of(variables: Flat, layer: Index | None) -> Flat:
    """Return the variables of one of the stacked layers (None: all as they are)."""
    if layer is None:
        return variables
    pick = lambda x: lax.dynamic_index_in_dim(x, layer, 0, False)
    return {path: pick(x) for path, x in variables.items() if path.startswith(LAYERS)}


def is_random(variable: object) -> bool:
    """Return whether a variable is the state of a random generator: any typed key is."""
    return isinstance(variable, nnx.RngState) or is_key(variable) or per_row(variable)


def keys_for(
    variable: Any,
    key: jax.Array,
    step: Index,
    first_row: Index,
    rows: int,
    drawn: Index | None = None,
) -> jax.Array:
    """Return what a variable holds while the rows from `first_row` (counted globally) run.

    A key that is not one for each row is that of the row `drawn` (None: the first).
    """
    if not (per_row(variable) or isinstance(variable, nnx.RngKey) or is_key(variable)):
        return key
    if not per_row(variable):
        return _fold(_fold(key, step), first_row if drawn is None else drawn)
    ids = first_row + lax.iota("int32", rows)
    return jax.vmap(_fold, (None, 0), key.ndim)(_fold(key, step), ids)


def _fold(key: jax.Array, number: Index) -> jax.Array:
    """Return the key, or each of the stacked keys, with a number folded in."""
    fold = jax.random.fold_in
    for _ in range(key.ndim):
        fold = jax.vmap(fold, (0, None))
    return fold(key, number)
