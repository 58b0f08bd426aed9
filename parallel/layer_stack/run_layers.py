"""Run a model's layers: the layer is the unit of gathering and of rematerialisation.

A whole model is gathered by whole_model/unshard_on_use.py.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from hfjax.parallel.adapters.model_template import Placeholder, is_list, items_of, raw_value
from hfjax.parallel.engine.layer_remat import LayerOptions
from hfjax.parallel.engine.unshard import ShardedParam, unshard
from hfjax.parallel.jaxprs.split_backward import check_same_shapes
from hfjax.parallel.layer_stack.batch_split import run_chunks
from hfjax.parallel.layer_stack.unrolled_layers import (
    UnrolledLayer,
    is_unrolled,
    run_unrolled,
    unroll,
    unstack,
)
from hfjax.parallel.spmd.global_batch import GlobalBatch
from hfjax.parallel.spmd.partition_context import PureFunction


def run_layers(
    layers: Any, sharded_params: Mapping[str, ShardedParam], x: Any, options: LayerOptions
) -> Any:
    """Return the layers' output on x, values or `BatchChunks`; layers keep what they write.

    `sharded_params` are their parameters, by path; in the layers each is `Placeholder`.
    """
    return (_run_list if is_list(layers) else _run_stack)(layers, sharded_params, x, options)


def _split_layer(
    layer: nnx.Module, sharded_params: Mapping[str, ShardedParam]
) -> tuple[Any, Any, Any]:
    """Return a layer's graph, its parameters as `ShardedParam`s, and its variables."""
    graph, parameters, variables = nnx.split(layer, nnx.Param, ...)
    is_away = lambda x: isinstance(x, Placeholder)
    parameters = jax.tree.map(lambda x: sharded_params[x.path], parameters, is_leaf=is_away)
    return graph, parameters, variables


def layer_function(
    graph: nnx.GraphDef,
    policy: Callable | None,
    global_batch: GlobalBatch,
    barrier: bool = True,
    index: int | None = None,
    name: str = "layers",
    times: int = 1,
) -> Callable:
    """Return (parameters, variables, x) -> (x, variables) for one layer, rematerialised.

    The layer's parameters are unsharded together, once, however often it reads them; given those of
    several layers it takes entry `index`. Within a loop nothing merges what is recomputed with the
    original: a barrier against that would only keep the next layer's gathers from starting early.
    `global_batch` records communication under `name`, which stands for `times` layers.
    """

    layer = layer_on_batch(graph, global_batch, name, times)

    def apply(parameters: nnx.State, variables: nnx.State, x) -> tuple[Any, nnx.State]:
        if index is not None:
            parameters, variables = jax.tree.map(lambda a: a[index], (parameters, variables))
        return layer(unshard(parameters), variables, x)

    return apply if policy is None else jax.checkpoint(apply, policy=policy, prevent_cse=barrier)


def layer_on_batch(
    graph: nnx.GraphDef, global_batch: GlobalBatch, name: str, times: int = 1
) -> Callable:
    """Return (full parameters, variables, x) -> (x, variables) for one layer."""

    call = LayerCall(graph, exact_statics(graph))

    def apply(params: nnx.State, variables: nnx.State, x) -> tuple[Any, nnx.State]:
        def run(global_batch: GlobalBatch, x, variables: nnx.State) -> tuple[Any, nnx.State]:
            args = global_batch.parameter_values(params), global_batch.state_values(variables), x
            x, written = global_batch.run(name, call, *args, times=times)
            return x, global_batch.local_state(written, f"variables of {name}", times)

        return run_chunks(run, global_batch, name, x, variables)

    return apply


@dataclass(frozen=True)
class LayerCall(PureFunction):
    """Calls a layer: (parameters, variables, x) -> (x, variables that it has written to)."""

    graph: nnx.GraphDef
    statics: Hashable  # `exact_statics` of the graph

    def __call__(self, parameters: nnx.State, variables: nnx.State, x) -> tuple[Any, nnx.State]:
        before = _raw_values(variables)  # merged variables are those of the state: written in place
        layer = nnx.merge(self.graph, parameters, variables)
        x = layer(x)
        return x, _written_variables(layer, before)


def exact_statics(graph: nnx.GraphDef) -> Hashable:
    """Return what a layer keeps beside arrays, as a key that compares types and identities.

    Python's own `==` holds for 1, 1.0 and True, and for whatever defines it so.
    """
    metadata = [getattr(node, "metadata", None) for node in graph.nodes]
    of_variables = [x for x in metadata if isinstance(x, Mapping)]
    attributes = [getattr(attribute, "value", None) for _, attribute in graph.attributes]
    return tuple(map(_exact, (*attributes, *of_variables)))


def _exact(value: Any) -> Hashable:
    if type(value) in (tuple, list):
        return type(value), *map(_exact, value)
    if isinstance(value, Mapping):
        return Mapping, *((key, _exact(x)) for key, x in value.items())
    is_plain = type(value) in (bool, int, float, complex, str, bytes, type(None))
    return (type(value), repr(value)) if is_plain else id(value)


def _written_variables(layer: nnx.Module, before: dict) -> nnx.State:
    """Return the variables that the layer has written to."""
    now = nnx.state(layer, nnx.Not(nnx.Param))
    values = _raw_values(now)
    flat = nnx.to_flat_state(now)
    return nnx.from_flat_state([(keys, v) for keys, v in flat if values[keys] is not before[keys]])


def _raw_values(state: nnx.State) -> dict:
    return {keys: raw_value(variable) for keys, variable in nnx.to_flat_state(state)}


def _run_stack(
    layers: nnx.Module, sharded_params: Mapping[str, ShardedParam], x: Any, options: LayerOptions
) -> Any:
    """Return x after all layers: a scan over units of them, then the remaining ones."""
    graph, *arrays = _split_layer(layers, sharded_params)
    count, size = jax.tree.leaves(arrays)[0].shape[0], options.remat.unit
    unroll_factor, global_batch = unroll(options, count), options.trace.global_batch
    barrier = unroll_factor is True or unroll_factor != 1
    units, rest = divmod(count, size)
    unit = _unit_function(graph, size, count, options, barrier)
    apply = options.wrap_offload(unit, "layers", units, barrier)
    many = tuple(_slice_units(arrays, 0, units, size))
    one = jax.tree.map(lambda a: a[0], many)
    placements = global_batch.carry_placements(lambda x: unit(*one, x)[0], x)

    def run_layer(
        layer: Callable, parameters: nnx.State, variables: nnx.State, x
    ) -> tuple[Any, nnx.State]:
        y, written = layer(parameters, variables, x)
        y = global_batch.redistribute(y, placements, "between layers", count)
        check_same_shapes(x, y)
        return y, written

    x = global_batch.redistribute(x, placements, "before layers")
    if is_unrolled(options, count):
        layer = partial(run_layer, layer_on_batch(graph, global_batch, "layers", count))
        x, written = _run_stack_unrolled(layer, many, x, options)
    else:
        body = lambda x, unit: run_layer(apply, unit[0], unit[1], x)
        x, written = lax.scan(body, x, many, unroll=unroll_factor)
    if size > 1:
        written = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), written)
    if rest:
        last = options.wrap_offload(
            _unit_function(graph, rest, count, options, True), "last layers", 1, True
        )
        few = jax.tree.map(lambda a: a[0], _slice_units(arrays, units * size, 1, rest))
        x, more = last(*few, x)
        more = jax.tree.map(lambda a: a.reshape(rest, *a.shape[rest > 1 :]), more)
        written = jax.tree.map(lambda *chunks: jnp.concatenate(chunks), written, more)
    nnx.update(layers, written)
    return x


def _run_stack_unrolled(
    layer: Callable, stacks: tuple[nnx.State, ...], x: Any, options: LayerOptions
) -> tuple[Any, Any]:
    """Return x after stacked layers without a loop, and what they wrote, stacked."""
    parameters, variables = stacks
    one, count = UnrolledLayer(layer, parameters, options), jax.tree.leaves(stacks)[0].shape[0]
    slots = unstack(one.slots(parameters)) or [[]] * count
    parameters, variables = zip(
        *(jax.tree.map(lambda a, i=i: a[i], (parameters, variables)) for i in range(count)),
        strict=True,
    )
    x, written = run_unrolled([one] * count, parameters, slots, variables, x)
    return x, jax.tree.map(lambda *per_layer: jnp.stack(per_layer), *written)


def _slice_units(arrays: list[nnx.State], first: int, units: int, size: int) -> list[nnx.State]:
    """Return [units, size, ...] of stacked layers, from `first` on; [units, ...] if size is 1."""

    def split(a: jax.Array) -> jax.Array:
        block = a if units * size == len(a) else a[first : first + units * size]
        return block if size == 1 else block.reshape(units, size, *a.shape[1:])

    return jax.tree.map(split, arrays)


def _unit_function(
    graph: nnx.GraphDef, size: int, count: int, options: LayerOptions, barrier: bool
) -> Callable:
    """Return (parameters, variables, x) -> (x, variables) for some of `count` stacked layers."""
    global_batch = options.trace.global_batch
    one = lambda i, index: layer_function(
        graph, options.policy(i), global_batch, barrier, index, times=count
    )
    if size == 1:
        return _remat_group(one(0, None), options, barrier)
    functions = [one(number, number) for number in range(size)]

    def apply(parameters: nnx.State, variables: nnx.State, x) -> tuple[Any, nnx.State]:
        written = []
        for function in functions:
            x, new = function(parameters, variables, x)
            written.append(new)
        return x, jax.tree.map(lambda *layers: jnp.stack(layers), *written)

    return _remat_group(apply, options, barrier)


def _remat_group(apply: Callable, options: LayerOptions, barrier: bool) -> Callable:
    """Return the function of a group of layers, of which only the input is saved."""
    if options.remat.group == 1:
        return apply
    nothing = jax.checkpoint_policies.nothing_saveable
    return jax.checkpoint(apply, policy=nothing, prevent_cse=barrier)


def _run_list(
    layers: Any, sharded_params: Mapping[str, ShardedParam], x: Any, options: LayerOptions
) -> Any:
    modules = list(items_of(layers))
    if modules and is_unrolled(options):
        return _run_list_unrolled(modules, sharded_params, x, options)
    group = options.remat.group
    for first in range(0, len(modules), group):
        members = modules[first : first + group]
        apply = _remat_group(_chain(members, first, options), options, barrier=True)
        apply = options.wrap_offload(apply, f"layers/{first}", 1, barrier=True)
        split = [_split_layer(m, sharded_params) for m in members if isinstance(m, nnx.Module)]
        parameters, variables = [s[1] for s in split], [s[2] for s in split]
        x, written = apply(parameters, variables, x)
        for module, new in zip(
            (m for m in members if isinstance(m, nnx.Module)), written, strict=True
        ):
            nnx.update(module, new)
    return x


def _run_list_unrolled(
    modules: list, sharded_params: Mapping[str, ShardedParam], x: Any, options: LayerOptions
) -> Any:
    """Return x after listed layers, each gathered while the one before it runs."""
    global_batch, layers = options.trace.global_batch, []
    split_modules = [
        _split_layer(m, sharded_params) if isinstance(m, nnx.Module) else (m, [], None)
        for m in modules
    ]
    for number, (graph, parameters, _) in enumerate(split_modules):
        name = f"layers/{number}"
        if isinstance(graph, nnx.GraphDef):
            layer = layer_on_batch(graph, global_batch, name)
        else:  # a function, as nnx.Sequential may hold
            layer = partial(_call_function, graph, name, global_batch)
        layers.append(UnrolledLayer(layer, parameters, options))
    _, parameters, variables = zip(*split_modules, strict=True)
    slots = [one.slots(its) for one, its in zip(layers, parameters, strict=True)]
    x, written = run_unrolled(layers, parameters, slots, variables, x)
    for module, new in zip(modules, written, strict=True):
        if isinstance(module, nnx.Module):
            nnx.update(module, new)
    return x


def _chain(members: list, first: int, options: LayerOptions) -> Callable:
    """Return (parameters, variables, x) -> (x, variables) of modules and functions in sequence."""
    graphs = [nnx.graphdef(m) if isinstance(m, nnx.Module) else m for m in members]
    global_batch = options.trace.global_batch

    def apply(
        parameters: Sequence[nnx.State], variables: Sequence[nnx.State], x
    ) -> tuple[Any, list[nnx.State]]:
        states, written = iter(zip(parameters, variables, strict=True)), []
        for number, graph in enumerate(graphs):
            name = f"layers/{first + number}"
            if not isinstance(graph, nnx.GraphDef):  # a function, as nnx.Sequential may hold
                x, _ = _call_function(graph, name, global_batch, None, None, x)
                continue
            policy = options.policy((first + number) % options.remat.every)
            function = layer_function(graph, policy, global_batch, name=name)
            x, new = function(*next(states), x)
            written.append(new)
        return x, written

    return apply


def _call_function(
    function: Callable, name: str, global_batch: GlobalBatch, _: Any, __: Any, x: Any
) -> tuple[Any, None]:
    return run_chunks(partial(_apply_function, function, name), global_batch, name, x, None)


def _apply_function(
    function: Callable, name: str, global_batch: GlobalBatch, x: Any, _: Any
) -> tuple[Any, None]:
    return global_batch.run(name, function, x), None
