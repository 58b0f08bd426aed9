"""The layers of a state in another order: as another schedule stores them, or as the model does."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from hfjax.parallel.layer_order import Arrangement
from hfjax.parallel.offload.host_memory import is_host_sharding, one_by_one, to_device
from hfjax.parallel.packing import Mover, PackedLayers, packed_layers
from hfjax.sharding.check_state import check_form, check_like, check_takes, stored_form
from hfjax.sharding.layout import Layout, State
from hfjax.sharding.optimizer_state import converted, reformed
from hfjax.utils.paths import Flat, flatten, nest


def canonical(layout: Layout, state: State) -> State:
    """Return the state with its layers in the model's order: what to save, and to look at.

    Any layout of the same model can restore it, whatever its mesh, strategy or schedule. A state
    whose layers lie so already comes back as it is.

    Args:
        layout: A layout of the model to which the state belongs.
        state: The state, its layers stored for any schedule; it is not donated.

    Example:
        >>> import hfjax, optax
        >>> from flax import nnx
        >>> from hfjax.models.layers import stacked
        >>> class Model(nnx.Module):
        ...     def __init__(self, rngs):
        ...         layer = lambda rngs: nnx.Linear(8, 8, rngs=rngs)
        ...         self.layers = stacked(4, layer, rngs)
        ...     embed = head = lambda self, x: x
        >>> mesh, schedule = hfjax.make_mesh(pipe=2, data=4), hfjax.Schedule("interleaved", 8)
        >>> layout = hfjax.layout(Model, optax.sgd(0.1), mesh, hfjax.PIPE)
        >>> state = hfjax.init(layout, schedule=schedule)  # two chunks on each stage
        >>> state.order.tolist(), hfjax.canonical(layout, state).order.tolist()
        ([0, 2, 1, 3], [0, 1, 2, 3])
    """
    check_takes("canonical", layout, state)
    state = rearrange(layout.as_the_model, state)
    check_form(layout.as_the_model, state)
    return state


def rearrange(layout: Layout, state: State) -> State:
    """Return the state with its layers where the layout has them; itself if they are there."""
    if _same(layout, state.order):
        return state
    old = None if state.order is None else Arrangement(np.array(state.order, np.int32, ndmin=3))
    if layout.blueprint.listed:
        return _repacked(layout, old, state)
    if layout not in _PROGRAMS:
        _PROGRAMS[layout] = _rearranger(layout)
    come = None if old is None else tuple(old.rows.tolist())
    return _PROGRAMS[layout](come, state)


# By layout, and gone with it: the program that brings layers into its order, and the array of a
# state that was last found to be its order, whose value is not asked again.
_PROGRAMS: weakref.WeakKeyDictionary[Layout, Callable] = weakref.WeakKeyDictionary()
_SEEN: weakref.WeakKeyDictionary[Layout, weakref.ref] = weakref.WeakKeyDictionary()


def _same(layout: Layout, found: object) -> bool:
    """Return whether layers that are stored in an order lie as the layout has them.

    To look at an array is to wait for the device: what was found to be so is known again.
    """
    if found is not None and layout in _SEEN and _SEEN[layout]() is found:
        return True
    same = _equal(layout.order, found, layout.blueprint.listed)
    if same and isinstance(found, jax.Array):
        _SEEN[layout] = weakref.ref(found)
    return same


def _equal(wanted: np.ndarray | None, found: Any, listed: bool) -> bool:
    if wanted is None or found is None:
        plain = wanted is None or np.array_equal(wanted, np.arange(len(wanted)))
        return wanted is found or (plain and not listed)
    return wanted is found or np.array_equal(wanted, found)


def stored(layout: Layout, params: Flat) -> Flat:
    """Return parameters by path, given in the model's order, as the layout stores them."""
    on = {path: NamedSharding(layout.mesh, p.parameter) for path, p in layout.placed.items()}
    return layout.storage.stored(params, on)


def copy_to(x: jax.Array, sharding: Sharding) -> jax.Array:
    """Return a copy of an array on its shards: none of their memory is that of the array.

    Where the whole array goes to several devices, `jax.device_put` lets the one that has it keep
    its memory, even with may_alias=False: who donates the result would delete the array.
    """
    on_device = sharding.with_memory_kind("device") if is_host_sharding(sharding) else sharding
    return jax.device_put(jnp.copy(jax.device_put(x, on_device)), sharding)


def parameters_of(layout: Layout, state: State) -> Flat:
    """Return the parameters of a state by path, in the model's order; its optimizer may be any."""
    plain, params = layout.as_the_model, flatten(state.params)
    if _equal(plain.order, state.order, plain.blueprint.listed):
        return params
    old = Arrangement(np.array(state.order, np.int32, ndmin=3))
    params = {p: to_device(x) if isinstance(x, jax.Array) else x for p, x in params.items()}
    if not plain.blueprint.listed:
        rows = {path for path, p in plain.placed.items() if p.stacked}
        return {path: old.restore(x, 0) if path in rows else x for path, x in params.items()}
    on = {path: NamedSharding(plain.mesh, p.parameter) for path, p in plain.placed.items()}
    was = packed_layers(plain.blueprint, plain.mesh, old)
    devices = set(plain.mesh.devices.flat)
    here = lambda x: isinstance(x, jax.Array) and x.sharding.device_set == devices
    params = {path: x if here(x) else np.asarray(x) for path, x in params.items()}
    return converted(Mover(was, plain.mesh, on), None, params)


def _repacked(layout: Layout, old: Arrangement | None, state: State) -> State:
    """Return the state of a model whose layers are a list in the form that the layout has."""
    check_like(stored_form(layout, old), state)
    was = None if old is None else packed_layers(layout.blueprint, layout.mesh, old)

    def convert(column: str, flat: Flat) -> Flat:
        def mover(packed: PackedLayers | None, to: Layout) -> Mover | None:
            spec = lambda p: NamedSharding(layout.mesh, getattr(p, column))
            shardings = {path: spec(p) for path, p in to.placed.items()}
            return packed and Mover(packed, layout.mesh, shardings)

        return converted(
            mover(was, layout.as_the_model), mover(layout.storage.packed, layout), flat
        )

    params, kept = flatten(to_device(state.params)), to_device(state.optimizer)
    before = {path: x.shape for path, x in params.items()}
    after = {path: p.shape for path, p in layout.placed.items()}
    like = layout.abstract_state().optimizer
    moments = reformed(kept, before, like, after, partial(convert, "moment"))
    params = nest(convert("parameter", params))
    new = replace(state, params=params, optimizer=moments, order=layout.order)
    given = set(map(id, jax.tree.leaves(state)))  # may be donated: what did not move is copied
    own = lambda x, on: copy_to(x, on) if id(x) in given else jax.device_put(x, on)
    return jax.tree.map(own, new, layout.shardings())


def _rearranger(layout: Layout) -> Callable:
    """Return the compiled function of (order, state): of stacked layers that come in an order.

    It does not hold the layout, which is there whenever it is traced.
    """
    dims, new, of = _layer_dims(layout), layout.storage.arrangement, weakref.ref(layout)

    def run(come: tuple[int, ...] | None, state: State) -> State:
        old = None if come is None else Arrangement(np.array(come, np.int32, ndmin=3))
        layout = of()
        assert layout is not None
        check_like(stored_form(layout, old), state)  # of another form it is traced anew
        move = partial(_move, new, old)
        params = one_by_one(move, state.params, dims.params)
        moments = one_by_one(move, state.optimizer, dims.optimizer)
        return replace(state, params=params, optimizer=moments, order=layout.order)

    return jax.jit(run, static_argnums=0, out_shardings=layout.shardings())


def _move(new: Arrangement | None, old: Arrangement | None, array: jax.Array, dim: int) -> Any:
    """Return an array whose dimension `dim` (-1: none) has a row for each layer, rearranged."""
    if dim < 0:
        return array
    layers = array if old is None else old.restore(array, dim)
    return layers if new is None else new.store(layers, dim)


def _layer_dims(layout: Layout) -> State:
    """Return which dimension of each array of the state has a row for each layer; -1: none.

    It is the one that grows with the number of layers.
    """

    def shapes(more: int) -> State:
        params = {}
        for path, p in layout.placed.items():
            rows, *rest = p.shape or (0,)
            shape = (rows + more, *rest) if p.stacked else p.shape
            params[path] = jax.ShapeDtypeStruct(shape, p.dtype)
        nested = nest(params)
        return State(None, nested, jax.eval_shape(layout.optimizer.init, nested), None)

    def grown(a: Any, b: Any) -> int:
        return next((i for i, n in enumerate(a.shape) if n != b.shape[i]), -1)

    return jax.tree.map(grown, shapes(0), shapes(1))
