"""A model without its arrays: how to take one apart into named arrays and put it together again."""

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from hfjax.base.paths import Flat, path_of
from hfjax.parallel.engine.fetch import (
    Placeholder,
    WholeElsewhere,
    devices_along,
    refuse_elsewhere,
)
from hfjax.parallel.engine.handing import hand, number
from hfjax.parallel.engine.layers import has_three_parts, is_list, items_of
from hfjax.parallel.mesh import EXPERTS, SAMPLE_AXES, STACK, STAYS

LAYERS = "layers/"
# Names by which models and libraries call the logical axes of a parameter.
_NAMES_OF_AXES = ("axes", "out_sharding", "sharding_names", "sharding")
# What `forward` may ask for by name, beside the model and the batch.
KEY, ROW_KEYS, TRAIN = "key", "row_keys", "train"


Flattened = Sequence[tuple[tuple, Any]]  # keys inside a layer, variable


@dataclass(frozen=True)
class Layer:
    """One layer without its arrays: the variables hold where each lies in the model."""

    graph: Any  # a graph definition, or the function that the layer is
    parameters: Flattened = ()
    variables: Flattened = ()

    @property
    def paths(self) -> list[str]:
        """The paths of the parameters."""
        return [raw(variable).path for _, variable in self.parameters]


def fill(variables: Flattened, array_of: Callable[[str], Any]) -> nnx.State:
    """Return variables of a layer that hold the arrays of their paths."""
    held = [(keys, _held(v, array_of(raw(v).path))) for keys, v in variables]
    return nnx.from_flat_state(held)


@dataclass(frozen=True)
class Tree:
    """A bare pytree without its arrays."""

    definition: Any
    leaves: tuple[Any, ...]  # paths of arrays, and what is no array as it is
    is_path: tuple[bool, ...]

    def filled(self, arrays: Flat) -> Any:
        """Return the tree that holds these arrays."""
        pairs = zip(self.leaves, self.is_path, strict=True)
        return self.definition.unflatten([arrays[x] if path else x for x, path in pairs])


@dataclass(frozen=True)
class Blueprint:
    """The static part of a model, and one template variable for each of its arrays."""

    create: Callable[[Any], Flat]  # seed -> {path: array}, parameters and other variables alike
    parameters: Mapping[str, Any]  # path -> template; of an nnx model an nnx.Param with its names
    variables: Mapping[str, Any]  # path -> template of what is not a parameter
    graphs: Mapping[str, Any]  # "train", "eval", "model" (as made) -> graph definition, or a Tree
    keys: Mapping[str, tuple]  # path -> where an array lies in the graph
    three_parts: bool = False
    stacked: bool = False  # the layers are one module of stacked arrays
    sync_batch_norm: bool = True  # BatchNorm is over the rows of all devices
    notes: tuple[str, ...] = ()  # what was done to the model, and what of it is not trained
    prepare: Callable | None = None  # the model's own: batch -> batch, of whole rows
    as_made: Mapping[str, Any] = field(default_factory=dict)  # `parameters` of nnx without hooks

    def prepared(self, batch: Any) -> Any:
        """Return a batch of whole rows as the model wants it, before positions are dealt."""
        return batch if self.prepare is None else self.prepare(batch)

    def after_step(self, variables: Flat, metrics: Flat) -> tuple[Flat, Flat]:
        """Return the variables that the model's own `after_step` changes, and the metrics."""
        if isinstance(self.graphs["train"], Tree):
            return {}, metrics
        hook = getattr(self.abstract("train"), "after_step", None)
        return ({}, metrics) if hook is None else hook(variables, metrics)

    def merge(self, parameters: Flat, variables: Flat, mode: str) -> Any:
        """Return the model that holds these arrays."""
        graph = self.graphs[mode]
        if isinstance(graph, Tree):
            return graph.filled({**variables, **parameters})
        states = [
            nnx.from_flat_state({self.keys[p]: _held(like[p], v) for p, v in values.items()})
            for like, values in (
                (self.as_made if mode == "model" else self.parameters, parameters),
                (self.variables, {p: v for p, v in variables.items() if p in self.keys}),
            )
        ]
        return nnx.merge(graph, *states)

    @property
    def listed(self) -> bool:
        """Whether the model is in three parts and its layers are a list."""
        return self.three_parts and not self.stacked

    def layers(self, mode: str) -> list[Layer]:
        """Return the layers of a list, or the one layer that all stacked ones are."""
        templates = {**self.parameters, **self.variables}
        found: list[Layer] = []

        def take_apart(parameters: Flat, variables: Flat) -> None:
            paths = {id(x): path for path, x in (parameters | variables).items()}
            away = lambda x: _held(templates[paths[id(x)]], Placeholder(paths[id(x)]))
            layers = self.merge(parameters, variables, mode).layers
            found[:] = [_layer(x, away) for x in (items_of(layers) if self.listed else [layers])]

        jax.eval_shape(take_apart, *self._shapes)
        return found

    @property
    def number_of_layers(self) -> int:
        """How many layers a model in three parts has."""
        if self.listed:
            return len(self.layers("train"))
        return next(v.shape[0] for path, v in self.parameters.items() if path.startswith(LAYERS))

    def equipped(self, kernels: Any) -> "Blueprint":
        """Return the blueprint whose modules choose kernels by `kernels`.

        They are those whose `kernels` is that of `hfjax.models.parts.plain` (marked
        `chooses_kernels`).
        """
        return replace(self, graphs={mode: self._equipped(mode, kernels) for mode in self.graphs})

    def _equipped(self, mode: str, kernels: Any) -> Any:
        graph = self.graphs[mode]

        def hand_over(parameters: Flat, variables: Flat) -> None:
            nonlocal graph
            model = self.merge(parameters, variables, mode)
            hand(model, "kernels", "chooses_kernels", kernels)
            graph = nnx.split(model, nnx.Param, ...)[0]

        if not isinstance(graph, Tree):
            jax.eval_shape(hand_over, *self._shapes)
        return graph

    def abstract(self, mode: str) -> Any:
        """Return the model on shapes and dtypes."""
        return self.merge(*self._shapes, mode)

    @property
    def _shapes(self) -> tuple[Flat, Flat]:
        shapes = lambda templates: {path: raw(v) for path, v in templates.items()}
        return shapes(self.parameters), shapes(self.variables)

    def variables_of(self, model: Any) -> Flat:
        """Return the arrays of a model that are not parameters."""
        if not self.variables or not isinstance(model, nnx.Module):
            return {}
        return _raw(nnx.state(model, nnx.Not(nnx.Param)))

    def around(self) -> AbstractContextManager:
        """Return the context in which the model and the loss are called."""
        if not self.sync_batch_norm:
            return nullcontext()
        return linen.intercept_methods(_synchronise_linen)

    def of_rows(self, path: str) -> bool:
        """Return whether a variable has a row for each row of the batch."""
        return _axes_of(self.variables[path])[:1] == ("batch",)

    def takes_pieces(self, path: str) -> bool:
        """Return whether the module of a parameter takes pieces of it: it marks it so."""
        template = self.parameters[path]
        return isinstance(template, nnx.Variable) and bool(template.get_metadata(STAYS, False))

    def axes(self, path: str, given: Mapping[str, tuple]) -> tuple[str | None, ...]:
        """Return the logical name of each dimension of a parameter."""
        template = self.parameters[path]
        if path in given:
            return tuple(given[path])
        axes = _axes_of(template)
        stack = (STACK,) if self.stacked and path.startswith(LAYERS) else ()
        unnamed = (None,) * (len(template.shape) - len(stack))
        return (*stack, *(axes or unnamed))


def raw(template: Any) -> Any:
    """Return what a variable holds; an array that is in no variable itself."""
    return template.get_raw_value() if isinstance(template, nnx.Variable) else template


def _held(template: Any, value: Any) -> Any:
    return template.replace(value) if isinstance(template, nnx.Variable) else value


def _axes_of(template: Any) -> tuple[str | None, ...]:
    """Return the names of a variable's dimensions, () if it has none.

    `axes` are ours and have to fit. Those of flax may be of a mesh of the user's own: what is not
    one name for each dimension is no name.
    """
    if not isinstance(template, nnx.Variable):
        return ()
    for key in _NAMES_OF_AXES:
        names = template.get_metadata(key, None)
        if names is None:
            continue
        if key == "axes":
            return tuple(names)
        if isinstance(names, tuple | list) and len(names) == len(template.shape):
            return tuple(name if isinstance(name, str) else None for name in names)
    return ()


def _layer(layer: Any, away: Callable[[Any], Any]) -> Layer:
    if not isinstance(layer, nnx.Module):  # a function, as nnx.Sequential may hold
        return Layer(layer)
    graph, *states = nnx.split(layer, nnx.Param, ...)
    held = [[(keys, away(raw(x))) for keys, x in nnx.to_flat_state(state)] for state in states]
    return Layer(graph, *held)


def rngs_of(seed: Any) -> nnx.Rngs:
    """Return one stream for parameters and one for dropout, so that a rate changes no weight."""
    key = jax.random.key(seed)
    return nnx.Rngs(key, dropout=jax.random.fold_in(key, 1))


def _flat(state: nnx.State) -> dict[str, Any]:
    return {path_of(keys): leaf for keys, leaf in nnx.to_flat_state(state)}


def _raw(state: nnx.State) -> Flat:
    return {path: raw(leaf) for path, leaf in _flat(state).items()}


def blueprint(
    model_init: Callable,
    place: Callable,
    forward: Callable | None = None,
    sync_batch_norm: bool = True,
) -> Blueprint:
    """Return the blueprint of what `model_init(rngs)` makes; allocates nothing.

    Modules whose `place` is that of `hfjax.models.parts.anywhere` (marked `places_activations`)
    are handed the function that places activations by name. A training step keeps the mode in
    which the model was built, part by part; an evaluation calls its `eval()`.
    """
    asks = asked_by(forward)
    make = lambda seed: _made(model_init, seed)
    found: dict[str, Any] = {}

    def take_apart() -> Any:
        model = make(0)
        if not isinstance(model, nnx.Module):
            return None
        as_made = nnx.split(model, nnx.Param, ...)[0]
        hand(model, "place", "places_activations", place)
        number(model)
        found["notes"] = tuple(_synchronised(model) if sync_batch_norm else ())
        _settle(model)
        graph, *states = nnx.split(model, nnx.Param, ...)
        model.eval()
        evaluating = nnx.split(model, nnx.Param, ...)[0]
        found["graphs"] = {"model": as_made, "train": graph, "eval": evaluating}
        found["three_parts"] = parts = has_three_parts(model)
        found["stacked"] = parts and not is_list(getattr(model, "layers", None))
        found["prepare"] = getattr(type(model), "prepare", None)
        return states

    with nnx.use_eager_sharding(False):  # names of axes are ours to read, on our own mesh
        states = jax.eval_shape(_on_one_device(take_apart))
    if states is None:
        return _with_keys(replace(_of_tree(make), sync_batch_norm=sync_batch_norm), asks)
    where = [keys for state in states for keys, _ in nnx.to_flat_state(state)]
    _check_paths(list(map(path_of, where)))
    parameters, variables = map(_flat, states)

    @partial(jax.jit, inline=True)  # traced once, however many programs begin with it
    def create(seed):
        with nnx.use_eager_sharding(False):
            return _on_one_device(lambda: _raw(nnx.split(make(seed), ...)[1]))()

    made = Blueprint(
        sync_batch_norm=sync_batch_norm,
        create=create,
        parameters={path: _hooked(v) for path, v in parameters.items()},
        as_made=parameters,
        variables=variables,
        keys={path_of(keys): keys for keys in where},
        **found,
    )
    return _with_keys(made, asks)


def _on_one_device(function: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function in which the axes of rows have names: models may sum over them at once."""
    for axis in SAMPLE_AXES:
        function = jax.vmap(function, out_axes=None, axis_name=axis, axis_size=1)
    return function


def _made(model_init: Callable, seed: Any) -> Any:
    """Return what `model_init` makes; arrays in attributes of its modules are data."""
    model = model_init(rngs_of(seed))
    if isinstance(model, nnx.Module):
        for _, node in nnx.iter_graph(model):
            if isinstance(node, nnx.Pytree):
                arrays = {k: v for k, v in vars(node).items() if isinstance(v, jax.Array)}
                for name, value in arrays.items():
                    setattr(node, name, nnx.data(value))
    return model


def _settle(model: nnx.Module) -> None:
    """Switch to training what was built without saying in which mode."""
    for _, module in nnx.iter_modules(model):
        for name in ("deterministic", "use_running_average"):
            if getattr(module, name, False) is None:
                setattr(module, name, False)


def _synchronised(model: nnx.Module) -> list[str]:
    """Let BatchNorm normalise over the rows of all devices, as one device does."""
    count = 0
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.BatchNorm):
            if type(module) is nnx.BatchNorm:
                module.__class__ = SyncBatchNorm
            setattr(module, "axis_name", SAMPLE_AXES)  # noqa: B010  flax declares one name
            count += 1
    if not count:
        return []
    return [
        f"BatchNorm ({count}): normalises over the rows of all devices, as one device does "
        "(sync_batch_norm=False: as the model is written)"
    ]


def check_mask(module: Any, mask: Any) -> None:
    """Refuse a mask where flax would average the means of devices, however many rows each has."""
    if mask is not None and math.prod(map(devices_along, SAMPLE_AXES)) > 1:
        raise ValueError(
            f"{type(module).__name__} with mask=: flax averages the statistics of devices whatever "
            "number of rows of each counts, which is not what one device computes. Mask before "
            "and after, or let each device normalise by itself: hfjax.layout(…, "
            "sync_batch_norm=False)."
        )


class SyncBatchNorm(nnx.BatchNorm):
    """BatchNorm over the rows of all devices."""

    def __call__(self, x: Any, use_running_average: Any = None, *, mask: Any = None) -> Any:
        """Normalise, over the rows of all devices unless by running averages."""
        first = self.use_running_average if use_running_average is None else use_running_average
        check_mask(self, None if first else mask)
        return super().__call__(x, use_running_average, mask=mask)


def _synchronise_linen(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
    """Let Linen's BatchNorm normalise over the rows of all devices: an interceptor of methods."""
    module = context.module
    if isinstance(module, linen.BatchNorm) and context.method_name == "__call__":
        object.__setattr__(module, "axis_name", SAMPLE_AXES)  # of this call's own instance
        check_mask(module, kwargs.get("mask"))
    return call(*args, **kwargs)


def _hooked(variable: nnx.Variable) -> nnx.Variable:
    """Return the variable with hooks: reading it where it is not is refused, pieces are joined."""
    own = variable.get_metadata("on_get_value", ())
    own = own if isinstance(own, tuple) else (own,)
    names, hooks = _axes_of(variable), [refuse_elsewhere]
    if variable.get_metadata(STAYS, False) and EXPERTS in names:
        dim = names.index(EXPERTS) - len(names)
        hooks.append(WholeElsewhere(dim, variable.shape[dim]))
    variable = variable.copy()
    variable.set_metadata(on_get_value=(*hooks, *own))
    return variable


def _check_paths(paths: Sequence[str]) -> None:
    """Refuse two arrays of one path, or one that lies inside of another."""
    known = set(paths)
    parents = lambda path: ("/".join(path.split("/")[:i]) for i in range(1, path.count("/") + 1))
    twice = [path for path in known if paths.count(path) > 1] if len(known) < len(paths) else []
    inside = [path for path in paths if known.intersection(parents(path))]
    if wrong := sorted(twice) + inside:
        raise ValueError(
            f"two arrays have the path {wrong[0]!r}, or a part of it: a name has a / in it, which "
            "separates the names of a path. Rename it."
        )


# -- what forward asks for ----------------------------------------------------------------------


def asked_by(forward: Callable | None) -> tuple[str, ...]:
    """Return what `forward` asks for by name beside the model and the batch."""
    if forward is None:
        return ()
    if not callable(forward):
        raise ValueError(f"forward={forward!r}: a function of (model, batch) is expected.")
    try:
        parameters = inspect.signature(forward).parameters
    except (TypeError, ValueError):  # it has none to look at
        return ()
    bound = forward.keywords if isinstance(forward, functools.partial) else {}
    asked = [name for name in list(parameters)[2:] if name not in bound]
    names = tuple(name for name in (KEY, ROW_KEYS, TRAIN) if name in asked)
    try:
        inspect.signature(forward).bind_partial("model", "batch")
    except TypeError as error:
        raise ValueError(
            f"forward{inspect.signature(forward)}: it is called with (model, batch)."
        ) from error
    needed = [
        p.name
        for p in list(parameters.values())[2:]
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if unknown := [name for name in needed if name not in names]:
        raise ValueError(
            f"forward{inspect.signature(forward)}: {unknown[0]!r} is not known. It is given "
            "(model, batch) and may ask by name for `key` (a random key of the step, another one "
            "on each device), `row_keys` (one for each row, the same on every mesh) and `train` "
            "(whether this is a training step)."
        )
    return names


def _with_keys(made: Blueprint, asks: Sequence[str]) -> Blueprint:
    """Return the blueprint whose state also holds the random keys that `forward` asks for."""
    abstract = jax.eval_shape(lambda: jax.random.key(0))
    kinds = {
        KEY: nnx.RngKey(abstract, tag="forward"),
        ROW_KEYS: nnx.Variable(abstract, per_row=True),
    }
    wanted = {variable_of(name): kinds[name] for name in asks if name in kinds}
    if not wanted:
        return made

    def create(seed):
        key = jax.random.fold_in(jax.random.key(seed), 2)
        return made.create(seed) | {
            path: jax.random.fold_in(key, i) for i, path in enumerate(wanted)
        }

    return replace(made, create=create, variables={**made.variables, **wanted})


def variable_of(name: str) -> str:
    """Return the path in the state of a random key that `forward` asks for."""
    return f"forward.{name}"


# -- bare trees -----------------------------------------------------------------------------------


def _of_tree(make: Callable[[Any], Any]) -> Blueprint:
    """A bare pytree of arrays is a model too: its loss is given the tree.

    Arrays of whole numbers and keys are variables; what is no array stays as it is.
    """
    found: list[tuple[Any, Any]] = []
    form: Any = None

    def arrays(seed):
        nonlocal form
        tree = make(seed)
        if isinstance(tree, linen.Module):
            raise ValueError(
                f"model_init returned the Linen module {type(tree).__name__}, which holds no "
                "arrays. Return flax.nnx.bridge.ToNNX(module, rngs=rngs).lazy_init(inputs), or "
                "the parameters, module.init(rngs.params(), inputs), with forward=lambda params, "
                "batch: module.apply(params, …)."
            )
        found[:], form = jax.tree_util.tree_flatten_with_path(tree)
        return {i: leaf for i, (_, leaf) in enumerate(found) if _is_array(leaf)}

    shapes = jax.eval_shape(_on_one_device(lambda: arrays(0)))
    if not shapes:
        raise ValueError(
            f"model_init returned {_what(found, form)}: an nnx.Module or a pytree of arrays is "
            "expected."
        )
    paths = [jax.tree_util.keystr(keys, simple=True, separator="/") or "array" for keys, _ in found]
    _check_paths([paths[i] for i in shapes])
    rest = {i: leaf for i, (_, leaf) in enumerate(found) if i not in shapes}
    _check_numbers(found, rest, paths)
    is_path = tuple(i in shapes for i in range(len(found)))
    tree = Tree(form, tuple(rest.get(i, path) for i, path in enumerate(paths)), is_path)
    trained = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)

    def create(seed):
        made = _on_one_device(lambda: arrays(seed))()
        return {paths[i]: x if trained(x) else jnp.asarray(x) for i, x in made.items()}

    return Blueprint(
        create=create,
        parameters={paths[i]: x for i, x in shapes.items() if trained(x)},
        variables={paths[i]: x for i, x in shapes.items() if not trained(x)},
        graphs=dict.fromkeys(("model", "train", "eval"), tree),
        keys={paths[i]: () for i in shapes},
        notes=tuple(_numbers_left(rest, paths)),
    )


def _what(found: Sequence[tuple[Any, Any]], form: Any) -> str:
    kinds = sorted({type(leaf).__name__ for _, leaf in found})
    return f"no array, but {', '.join(kinds)}" if kinds else type(form.unflatten([])).__name__


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _check_numbers(found: Sequence, rest: Mapping[int, Any], paths: Sequence[str]) -> None:
    """Refuse a Python float where it may be meant as a parameter: in a plain container."""
    for i, leaf in rest.items():
        attribute = any(isinstance(key, jax.tree_util.GetAttrKey) for key in found[i][0])
        if isinstance(leaf, float | complex) and not attribute:
            raise ValueError(
                f"{paths[i]} is the Python number {leaf}: is it a parameter? Write "
                f"jnp.asarray({leaf}) to train it, or leave it out of what model_init returns."
            )


def _numbers_left(rest: Mapping[int, Any], paths: Sequence[str]) -> Iterator[str]:
    numbers = [paths[i] for i, leaf in rest.items() if isinstance(leaf, float | complex)]
    if numbers:
        yield f"Python numbers stay as they are and are not trained: {', '.join(numbers)}"
