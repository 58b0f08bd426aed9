"""Reorders the layers of a state: as another schedule stores them, or in the model's order."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P, Sharding

from hfjax.parallel.jaxprs.model_mesh import without_mesh
from hfjax.parallel.layer_order import Arrangement
from hfjax.parallel.offload.host_memory import is_host_sharding, map_one_by_one, to_device
from hfjax.parallel.packing import Mover, PackedLayers, packed_layers
from hfjax.sharding.check_state import (
    check_layout_and_state,
    check_same_shapes,
    check_state_shapes,
    stored_shapes,
)
from hfjax.sharding.layout import Layout, State
from hfjax.sharding.optimizer_state import convert_layers, convert_state
from hfjax.utils.paths import Flat, flatten, nest


@without_mesh
def to_model_order(layout: Layout, state: State) -> State:
    """Return the state with its layers in the model's order: to save and to inspect.

    Any layout of the same model can restore it, whatever its mesh, strategy or schedule. A state
    whose layers are in that order is returned unchanged.

    Args:
        layout: A layout of the model to which the state belongs.
        state: The state, its layers stored for any schedule; it is not donated.

    Example:
        >>> import hfjax, optax
        >>> from flax import nnx
        >>> from hfjax.models.layers import stack_layers
        >>> class Model(nnx.Module):
        ...     def __init__(self, rngs):
        ...         layer = lambda rngs: nnx.Linear(8, 8, rngs=rngs)
        ...         self.layers = stack_layers(4, layer, rngs)
        ...     embed = head = lambda self, x: x
        >>> mesh, schedule = hfjax.make_mesh(pipe=2, data=4), hfjax.Schedule("interleaved", 8)
        >>> layout = hfjax.layout(Model, optax.sgd(0.1), mesh, hfjax.PIPE)
        >>> state = hfjax.init(layout, schedule=schedule)  # two chunks on each stage
        >>> state.order.tolist(), hfjax.to_model_order(layout, state).order.tolist()
        ([0, 2, 1, 3], [0, 1, 2, 3])
    """
    check_layout_and_state("canonical", layout, state)
    state = rearrange(layout.model_layout, state)
    check_state_shapes(layout.model_layout, state)
    return state


def rearrange(layout: Layout, state: State) -> State:
    """Return the state with its layers in the layout's order; itself if they are."""
    if _is_in_order(layout, state.order):
        return state
    old = None if state.order is None else Arrangement(np.array(state.order, np.int32, ndmin=3))
    if layout.template.is_layer_list:
        return _repack(layout, old, state)
    if layout not in _PROGRAMS:
        _PROGRAMS[layout] = _make_rearrange(layout)
    old_order = None if old is None else tuple(old.stored_order.tolist())
    return _PROGRAMS[layout](old_order, state)


# By layout, and dropped with it: the program that brings layers into its order, and the array of a
# state that was last found to be its order, whose value is not read again.
_PROGRAMS: weakref.WeakKeyDictionary[Layout, Callable] = weakref.WeakKeyDictionary()
_KNOWN_ORDERS: weakref.WeakKeyDictionary[Layout, weakref.ref] = weakref.WeakKeyDictionary()


def _is_in_order(layout: Layout, order: object) -> bool:
    """Return whether layers stored in this order are in the layout's order.

    Reading an array waits for the device: an array that was found to be in order is remembered.
    """
    if order is not None and layout in _KNOWN_ORDERS and _KNOWN_ORDERS[layout]() is order:
        return True
    is_same = _is_same_order(layout.order, order, layout.template.is_layer_list)
    if is_same and isinstance(order, jax.Array):
        _KNOWN_ORDERS[layout] = weakref.ref(order)
    return is_same


def check_order(layout: Layout, state: State) -> None:
    """Refuse a state that stores its layers in another order, where it cannot be reordered."""
    if not _is_in_order(layout, state.order):
        raise ValueError(
            "step.gradients: this state stores its layers in another order than this step, and "
            "cannot be returned in its order. Create or restore it for this schedule "
            "(hfjax.init(layout, schedule=…)), or call the step once."
        )


def _is_same_order(target: np.ndarray | None, order: Any, is_layer_list: bool) -> bool:
    if target is None or order is None:
        is_plain = target is None or np.array_equal(target, np.arange(len(target)))
        return target is order or (is_plain and not is_layer_list)
    return target is order or np.array_equal(target, order)


def to_stored_order(layout: Layout, params: Flat) -> Flat:
    """Return parameters by path, given in the model's order, as the layout stores them."""
    shardings = {
        path: NamedSharding(layout.mesh, p.parameter) for path, p in layout.param_specs.items()
    }
    return layout.storage.to_stored_order(params, shardings)


def copy_to(x: jax.Array, sharding: Sharding) -> jax.Array:
    """Return a copy of an array on its shards that shares no memory with it.

    If the array is replicated over several devices, `jax.device_put` lets the one that has it keep
    its memory, even with may_alias=False: donating the result would delete the array.
    """
    on_device = sharding.with_memory_kind("device") if is_host_sharding(sharding) else sharding
    return jax.device_put(jnp.copy(jax.device_put(x, on_device)), sharding)


def params_in_model_order(layout: Layout, state: State) -> Flat:
    """Return the parameters of a state by path, in the model's order, whatever its optimizer."""
    model_layout, params = layout.model_layout, flatten(state.params)
    if _is_same_order(model_layout.order, state.order, model_layout.template.is_layer_list):
        return params
    old = Arrangement(np.array(state.order, np.int32, ndmin=3))
    params = {p: to_device(x) if isinstance(x, jax.Array) else x for p, x in params.items()}
    if not model_layout.template.is_layer_list:
        stacked_paths = {path for path, p in model_layout.param_specs.items() if p.stacked}
        return {
            path: old.restore(x, 0) if path in stacked_paths else x for path, x in params.items()
        }
    shardings = {
        path: NamedSharding(model_layout.mesh, p.parameter)
        for path, p in model_layout.param_specs.items()
    }
    old_packed = packed_layers(model_layout.template, model_layout.mesh, old)
    devices = set(model_layout.mesh.devices.flat)
    is_on_mesh = lambda x: isinstance(x, jax.Array) and x.sharding.device_set == devices
    params = {path: x if is_on_mesh(x) else np.asarray(x) for path, x in params.items()}
    return convert_layers(Mover(old_packed, model_layout.mesh, shardings), None, params)


def _repack(layout: Layout, old: Arrangement | None, state: State) -> State:
    """Return the state of a model with a list of layers in the layout's form."""
    check_same_shapes(stored_shapes(layout, old), state)
    old_packed = None if old is None else packed_layers(layout.template, layout.mesh, old)

    def convert(column: str, flat: Flat) -> Flat:
        def make_mover(packed: PackedLayers | None, target: Layout) -> Mover | None:
            sharding_of = lambda p: NamedSharding(layout.mesh, getattr(p, column))
            shardings = {path: sharding_of(p) for path, p in target.param_specs.items()}
            return packed and Mover(packed, layout.mesh, shardings)

        return convert_layers(
            make_mover(old_packed, layout.model_layout),
            make_mover(layout.storage.packed, layout),
            flat,
        )

    params, optimizer_state = flatten(to_device(state.params)), to_device(state.optimizer)
    old_shapes = {path: x.shape for path, x in params.items()}
    new_shapes = {path: p.shape for path, p in layout.param_specs.items()}
    like = layout.abstract_state().optimizer
    new_state = convert_state(
        optimizer_state, old_shapes, like, new_shapes, partial(convert, "optimizer_state")
    )
    params = nest(convert("parameter", params))
    new = replace(state, params=params, optimizer=new_state, order=layout.order)
    state_ids = set(map(id, jax.tree.leaves(state)))  # may be donated: what did not move is copied
    place = lambda x, sharding: (
        copy_to(x, sharding) if id(x) in state_ids else jax.device_put(x, sharding)
    )
    shardings = layout.shardings()
    scale = jax.tree.map(lambda _: NamedSharding(layout.mesh, P()), state.scale)
    return jax.tree.map(place, new, replace(shardings, scale=scale))


def _make_rearrange(layout: Layout) -> Callable:
    """Return the compiled function of (order, state), for stacked layers stored in that order.

    It holds no reference to the layout, which is alive whenever it is traced.
    """
    dims, new, layout_ref = _layer_dims(layout), layout.storage.arrangement, weakref.ref(layout)

    def rearrange_state(old_order: tuple[int, ...] | None, state: State) -> State:
        old = None if old_order is None else Arrangement(np.array(old_order, np.int32, ndmin=3))
        layout = layout_ref()
        assert layout is not None
        check_same_shapes(stored_shapes(layout, old), state)  # another form is traced anew
        reorder = partial(_reorder_array, new, old)
        params = map_one_by_one(reorder, state.params, dims.params)
        optimizer_state = map_one_by_one(reorder, state.optimizer, dims.optimizer)
        return replace(state, params=params, optimizer=optimizer_state, order=layout.order)

    return jax.jit(rearrange_state, static_argnums=0, out_shardings=layout.shardings())


def _reorder_array(
    new: Arrangement | None, old: Arrangement | None, array: jax.Array, dim: int
) -> Any:
    """Return an array whose dimension `dim` (-1: none) has an entry per layer, reordered."""
    if dim < 0:
        return array
    layers = array if old is None else old.restore(array, dim)
    return layers if new is None else new.store(layers, dim)


def _layer_dims(layout: Layout) -> State:
    """Return which dimension of each array of the state has an entry per layer; -1: none.

    It is the one that grows with the number of layers.
    """

    def state_shapes(extra_layers: int) -> State:
        params = {}
        for path, p in layout.param_specs.items():
            num_layers, *other_dims = p.shape or (0,)
            shape = (num_layers + extra_layers, *other_dims) if p.stacked else p.shape
            params[path] = jax.ShapeDtypeStruct(shape, p.dtype)
        nested = nest(params)
        return State(None, nested, jax.eval_shape(layout.optimizer.init, nested), None)

    def first_difference(a: Any, b: Any) -> int:
        return next((i for i, n in enumerate(a.shape) if n != b.shape[i]), -1)

    return jax.tree.map(first_difference, state_shapes(0), state_shapes(1))
