"""Running a model's layers: the layer is the unit of gathering and of rematerialisation.

A model without layers that we know of is gathered by whole_model/unshard_on_use.py.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from hfjax.parallel.adapters.model_template import Placeholder, is_list, items_of
from hfjax.parallel.engine.layer_remat import LayerOptions
from hfjax.parallel.engine.unshard import Stored, fetched
from hfjax.parallel.jaxprs.split_backward import check_same
from hfjax.parallel.layer_stack.batch_split import by_parts
from hfjax.parallel.layer_stack.ordered_layers import (
    InTurn,
    apart,
    goes_in_turn,
    run_in_turn,
    unroll,
)
from hfjax.parallel.spmd.global_batch import OnRows


def run_layers(layers: Any, stored: Mapping[str, Stored], x: Any, run: LayerOptions) -> Any:
    """Return what layers make of x, values or a `RowParts`; they keep what they write.

    `stored` are their parameters, by path; in the layers each is `Placeholder`.
    """
    return (_run_list if is_list(layers) else _run_stack)(layers, stored, x, run)


def _split(layer: nnx.Module, stored: Mapping[str, Stored]) -> tuple[Any, Any, Any]:
    """Return a layer's graph, its parameters, which are stored ones, and its variables."""
    graph, parameters, variables = nnx.split(layer, nnx.Param, ...)
    is_away = lambda x: isinstance(x, Placeholder)
    parameters = jax.tree.map(lambda x: stored[x.path], parameters, is_leaf=is_away)
    return graph, parameters, variables


def layer_function(
    graph: nnx.GraphDef,
    policy: Callable | None,
    rows: OnRows,
    barrier: bool = True,
    row: int | None = None,
    name: str = "layers",
    times: int = 1,
) -> Callable:
    """Return (parameters, variables, x) -> (x, variables) for one layer, rematerialised.

    The layer's parameters are fetched together, once, however often it reads them; given those of
    several layers it takes its row. Within a loop nothing merges what is recomputed with what it
    was computed from: a barrier against that would only keep the next layer's gathers from
    starting early. What `rows` is told is told of the part `name`, which
    stands for so many layers.
    """

    layer = on_rows(graph, rows, name, times)

    def apply(parameters: nnx.State, variables: nnx.State, x) -> tuple[Any, nnx.State]:
        if row is not None:
            parameters, variables = jax.tree.map(lambda a: a[row], (parameters, variables))
        return layer(fetched(parameters), variables, x)

    return apply if policy is None else jax.checkpoint(apply, policy=policy, prevent_cse=barrier)


def on_rows(graph: nnx.GraphDef, rows: OnRows, name: str, times: int = 1) -> Callable:
    """Return (whole parameters, variables, x) -> (x, variables) for one layer."""

    def call(parameters: nnx.State, variables: nnx.State, x) -> tuple[Any, nnx.State]:
        before = _raw(variables)  # merged variables are those of the state: written in place
        layer = nnx.merge(graph, parameters, variables)
        x = layer(x)
        return x, _written(layer, before)

    def apply(here: nnx.State, variables: nnx.State, x) -> tuple[Any, nnx.State]:
        def run(rows: OnRows, x, variables: nnx.State) -> tuple[Any, nnx.State]:
            given = rows.of_parameters(here), rows.of_state(variables), x
            x, written = rows.run(name, call, *given, times=times)
            return x, rows.state_here(written, f"variables of {name}", times)

        return by_parts(run, rows, name, x, variables)

    return apply


def _written(layer: nnx.Module, before: dict) -> nnx.State:
    """Return the variables that the layer has written to."""
    now = nnx.state(layer, nnx.Not(nnx.Param))
    values = _raw(now)
    flat = nnx.to_flat_state(now)
    return nnx.from_flat_state([(keys, v) for keys, v in flat if values[keys] is not before[keys]])


def _raw(state: nnx.State) -> dict:
    raw = lambda x: x.get_raw_value() if isinstance(x, nnx.Variable) else x
    return {keys: raw(variable) for keys, variable in nnx.to_flat_state(state)}


def _run_stack(layers: nnx.Module, stored: Mapping[str, Stored], x: Any, run: LayerOptions) -> Any:
    """Return x after all layers: a scan over units of them, and those that are left over."""
    graph, *arrays = _split(layers, stored)
    count, size = jax.tree.leaves(arrays)[0].shape[0], run.remat.unit
    turns, rows = unroll(run, count), run.traced.rows
    barrier = turns is True or turns != 1
    units, rest = divmod(count, size)
    unit = _unit(graph, size, count, run, barrier)
    apply = run.offloading(unit, "layers", units, barrier)
    many = tuple(_rows(arrays, 0, units, size))
    one = jax.tree.map(lambda a: a[0], many)
    kinds = rows.kinds(lambda x: unit(*one, x)[0], x)

    def kept(
        layer: Callable, parameters: nnx.State, variables: nnx.State, x
    ) -> tuple[Any, nnx.State]:
        y, written = layer(parameters, variables, x)
        y = rows.as_kinds(y, kinds, "between layers", count)
        check_same(x, y)
        return y, written

    x = rows.as_kinds(x, kinds, "before layers")
    if goes_in_turn(run, count):
        layer = partial(kept, on_rows(graph, rows, "layers", count))
        x, written = _stack_in_turn(layer, many, x, run)
    else:
        turn = lambda x, unit: kept(apply, unit[0], unit[1], x)
        x, written = lax.scan(turn, x, many, unroll=turns)
    if size > 1:
        written = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), written)
    if rest:
        last = run.offloading(_unit(graph, rest, count, run, True), "last layers", 1, True)
        few = jax.tree.map(lambda a: a[0], _rows(arrays, units * size, 1, rest))
        x, more = last(*few, x)
        more = jax.tree.map(lambda a: a.reshape(rest, *a.shape[rest > 1 :]), more)
        written = jax.tree.map(lambda *parts: jnp.concatenate(parts), written, more)
    nnx.update(layers, written)
    return x


def _stack_in_turn(
    layer: Callable, stacks: tuple[nnx.State, ...], x: Any, run: LayerOptions
) -> tuple[Any, Any]:
    """Return x after stacked layers without a loop, and what they wrote, stacked."""
    parameters, variables = stacks
    one, count = InTurn(layer, parameters, run), jax.tree.leaves(stacks)[0].shape[0]
    slots = apart(one.slots(parameters)) or [[]] * count
    parameters, variables = zip(
        *(jax.tree.map(lambda a, i=i: a[i], (parameters, variables)) for i in range(count)),
        strict=True,
    )
    x, written = run_in_turn([one] * count, parameters, slots, variables, x)
    return x, jax.tree.map(lambda *rows: jnp.stack(rows), *written)


def _rows(arrays: list[nnx.State], first: int, units: int, size: int) -> list[nnx.State]:
    """Return [units, size, ...] of stacked layers, from the first on; [units, ...] if size is 1."""

    def split(a: jax.Array) -> jax.Array:
        part = a if units * size == len(a) else a[first : first + units * size]
        return part if size == 1 else part.reshape(units, size, *a.shape[1:])

    return jax.tree.map(split, arrays)


def _unit(graph: nnx.GraphDef, size: int, count: int, run: LayerOptions, barrier: bool) -> Callable:
    """Return (parameters, variables, x) -> (x, variables) for some of `count` stacked layers."""
    rows = run.traced.rows
    one = lambda i, row: layer_function(graph, run.policy(i), rows, barrier, row, times=count)
    if size == 1:
        return _together(one(0, None), run, barrier)
    functions = [one(number, number) for number in range(size)]

    def apply(parameters: nnx.State, variables: nnx.State, x) -> tuple[Any, nnx.State]:
        written = []
        for function in functions:
            x, new = function(parameters, variables, x)
            written.append(new)
        return x, jax.tree.map(lambda *layers: jnp.stack(layers), *written)

    return _together(apply, run, barrier)


def _together(apply: Callable, run: LayerOptions, barrier: bool) -> Callable:
    """Return the function of a group of layers, of which only what enters it is kept."""
    if run.remat.group == 1:
        return apply
    nothing = jax.checkpoint_policies.nothing_saveable
    return jax.checkpoint(apply, policy=nothing, prevent_cse=barrier)


def _run_list(layers: Any, stored: Mapping[str, Stored], x: Any, run: LayerOptions) -> Any:
    modules = list(items_of(layers))
    if modules and goes_in_turn(run):
        return _list_in_turn(modules, stored, x, run)
    group = run.remat.group
    for first in range(0, len(modules), group):
        part = modules[first : first + group]
        apply = _together(_chain(part, first, run), run, barrier=True)
        apply = run.offloading(apply, f"layers/{first}", 1, barrier=True)
        split = [_split(m, stored) for m in part if isinstance(m, nnx.Module)]
        parameters, variables = [s[1] for s in split], [s[2] for s in split]
        x, written = apply(parameters, variables, x)
        for module, new in zip(
            (m for m in part if isinstance(m, nnx.Module)), written, strict=True
        ):
            nnx.update(module, new)
    return x


def _list_in_turn(modules: list, stored: Mapping[str, Stored], x: Any, run: LayerOptions) -> Any:
    """Return x after listed layers, each gathered beside the one before it."""
    rows, turns = run.traced.rows, []
    parts = [_split(m, stored) if isinstance(m, nnx.Module) else (m, [], None) for m in modules]
    for number, (graph, parameters, _) in enumerate(parts):
        name = f"layers/{number}"
        if isinstance(graph, nnx.GraphDef):
            layer = on_rows(graph, rows, name)
        else:  # a function, as nnx.Sequential may hold
            layer = partial(_call_function, graph, name, rows)
        turns.append(InTurn(layer, parameters, run))
    _, parameters, variables = zip(*parts, strict=True)
    slots = [one.slots(its) for one, its in zip(turns, parameters, strict=True)]
    x, written = run_in_turn(turns, parameters, slots, variables, x)
    for module, new in zip(modules, written, strict=True):
        if isinstance(module, nnx.Module):
            nnx.update(module, new)
    return x


def _chain(part: list, first: int, run: LayerOptions) -> Callable:
    """Return (parameters, variables, x) -> (x, variables) of modules and functions in a row."""
    graphs = [nnx.graphdef(m) if isinstance(m, nnx.Module) else m for m in part]
    rows = run.traced.rows

    def apply(
        parameters: Sequence[nnx.State], variables: Sequence[nnx.State], x
    ) -> tuple[Any, list[nnx.State]]:
        held, written = iter(zip(parameters, variables, strict=True)), []
        for number, graph in enumerate(graphs):
            name = f"layers/{first + number}"
            if not isinstance(graph, nnx.GraphDef):  # a function, as nnx.Sequential may hold
                x, _ = _call_function(graph, name, rows, None, None, x)
                continue
            policy = run.policy((first + number) % run.remat.every)
            function = layer_function(graph, policy, rows, name=name)
            x, new = function(*next(held), x)
            written.append(new)
        return x, written

    return apply


def _call_function(
    function: Callable, name: str, rows: OnRows, _: Any, __: Any, x: Any
) -> tuple[Any, None]:
    return by_parts(partial(_function, function, name), rows, name, x, None)


def _function(function: Callable, name: str, rows: OnRows, x: Any, _: Any) -> tuple[Any, None]:
    return rows.run(name, function, x), None
