"""A model without its arrays: how to take one apart into named arrays and put it together again."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax import lax

from hfjax.parallel.adapters.batch_norm import (
    convert,
    linen_norms,
    linen_on_own_rows,
    notes_of,
    synchronise_linen,
)
from hfjax.parallel.adapters.constructed import (
    UNTRACEABLE,
    Built,
    HoldsLayersError,
    built_by,
    in_functions,
)
from hfjax.parallel.adapters.forward_signature import asked_by, keys_asked, with_keys
from hfjax.parallel.adapters.pytrees import Tree, tree_apart
from hfjax.parallel.mesh import EXPERT_AXES, EXPERTS, STACK, STAYS, on_one_device
from hfjax.parallel.spmd.global_batch import axes_of, devices_along
from hfjax.parallel.spmd.partition_context import is_recording
from hfjax.parallel.spmd.rule_calls import named
from hfjax.utils.paths import Flat, Index, check_paths, natural, path_of

LAYERS = "layers/"


Flattened = Sequence[tuple[tuple, Any]]  # keys inside a layer, variable


@dataclass(frozen=True)
class Layer:
    """One layer without its arrays: the variables hold where each lies in the model."""

    number: int
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
    built: Built | None = None  # what built the model, where its constructor cannot be traced

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
            items = items_of(layers) if self.listed else [layers]
            found[:] = [_layer(number, x, away) for number, x in enumerate(items)]

        jax.eval_shape(take_apart, *self._shapes)
        return found

    @property
    def number_of_layers(self) -> int:
        """How many layers a model in three parts has."""
        if self.listed:
            return len(self.layers("train"))
        held = {**self.parameters, **self.variables}.items()
        return next(v.shape[0] for path, v in held if path.startswith(LAYERS))

    def equipped(self, kernels: Any) -> "Blueprint":
        """Return the blueprint whose modules choose kernels by `kernels`.

        They are those whose `kernels` is that of `hfjax.models.layers.plain` (marked
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
        intercept = synchronise_linen if self.sync_batch_norm else linen_on_own_rows
        return linen.intercept_methods(intercept)

    def of_rows(self, path: str) -> bool:
        """Return whether a variable has a row for each row of the batch."""
        return axes_of(self.variables[path])[:1] == ("batch",)

    def takes_pieces(self, path: str) -> bool:
        """Return whether the module of a parameter takes pieces of it: it marks it so."""
        template = self.parameters[path]
        return isinstance(template, nnx.Variable) and bool(template.get_metadata(STAYS, False))

    def axes(self, path: str, given: Mapping[str, tuple]) -> tuple[str | None, ...]:
        """Return the logical name of each dimension of a parameter."""
        template = self.parameters[path]
        if path in given:
            return tuple(given[path])
        axes = axes_of(template)
        stack = (STACK,) if self.stacked and path.startswith(LAYERS) else ()
        unnamed = (None,) * (len(template.shape) - len(stack))
        return (*stack, *(axes or unnamed))


def is_list(layers: object) -> bool:
    """Return whether the layers are a list of modules (else: one module of stacked arrays)."""
    return isinstance(layers, nnx.List | nnx.Sequential | list | tuple)


def items_of(layers: Any) -> Iterable[Any]:
    """Return the modules and functions of a list of layers."""
    return layers.layers if isinstance(layers, nnx.Sequential) else layers


def has_three_parts(model: object) -> bool:
    """Return whether a model has `layers`, and methods `embed` and `head`."""
    methods = [getattr(type(model), name, None) for name in ("embed", "head")]
    return hasattr(model, "layers") and all(map(inspect.isfunction, methods))


def raw(template: Any) -> Any:
    """Return what a variable holds; an array that is in no variable itself."""
    return template.get_raw_value() if isinstance(template, nnx.Variable) else template


def _held(template: Any, value: Any) -> Any:
    return template.replace(value) if isinstance(template, nnx.Variable) else value


def _layer(number: int, layer: Any, away: Callable[[Any], Any]) -> Layer:
    if not isinstance(layer, nnx.Module):  # a function, as nnx.Sequential may hold
        return Layer(number, layer)
    graph, *states = nnx.split(layer, nnx.Param, ...)
    held = [[(keys, away(raw(x))) for keys, x in nnx.to_flat_state(state)] for state in states]
    return Layer(number, graph, *held)


def rngs_of(seed: Index) -> nnx.Rngs:
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

    Modules whose `place` is that of `hfjax.models.layers.anywhere` (marked `places_activations`)
    are handed the function that places activations by name. A training step keeps the mode in
    which the model was built, part by part; an evaluation calls its `eval()`.
    """
    asks = asked_by(forward)
    make = lambda seed: _made(model_init, seed)
    built: Built | None = None
    found: dict[str, Any] = {}

    def take_apart() -> Any:
        model = make(0)
        if not isinstance(model, nnx.Module):
            return None
        as_made = nnx.split(model, nnx.Param, ...)[0]
        hand(model, "place", "places_activations", place)
        number(model)
        if (hidden := in_functions(model)) and built is None:
            raise HoldsLayersError(f"{', '.join(hidden)} keep layers in functions")
        frozen = [f"not trained, since functions keep them: layers of {', '.join(hidden)}"]
        notes = notes_of(convert(model, sync_batch_norm), sync_batch_norm)
        found["notes"] = (*notes, *(frozen if hidden else ()))
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
        try:
            states = jax.eval_shape(on_one_device(take_apart))
        except UNTRACEABLE as why:
            make = built = built_by(model_init, make, why)
            states = jax.eval_shape(on_one_device(take_apart))
    if states is None:
        tree = Blueprint(**tree_apart(make), sync_batch_norm=sync_batch_norm, built=built)
        norms = linen_norms([path for path in tree.parameters if path.startswith("batch_stats/")])
        notes = notes_of(norms, sync_batch_norm)
        return _asking(replace(tree, notes=(*notes, *tree.notes)), asks)
    where = [keys for state in states for keys, _ in nnx.to_flat_state(state)]
    check_paths(list(map(path_of, where)))
    parameters, variables = map(_flat, states)

    def create(seed: Index) -> Flat:
        with nnx.use_eager_sharding(False):
            return on_one_device(lambda: _raw(nnx.split(make(seed), ...)[1]))()

    made = Blueprint(
        sync_batch_norm=sync_batch_norm,
        # Traced once, however many programs begin with it; what is built has other arrays in each.
        create=create if built else jax.jit(create, inline=True),
        built=built,
        parameters={path: _hooked(v) for path, v in parameters.items()},
        as_made=parameters,
        variables=variables,
        keys={path_of(keys): keys for keys in where},
        **found,
    )
    return _asking(made, asks)


def _asking(made: Blueprint, asks: Sequence[str]) -> Blueprint:
    """Return the blueprint whose state also holds the random keys that `forward` asks for."""
    wanted = keys_asked(asks)
    create = with_keys(made.create, wanted)
    notes = (*made.notes, *(made.built.notes if made.built else ()))
    return replace(made, create=create, variables={**made.variables, **wanted}, notes=notes)


def _made(model_init: Callable, seed: Index) -> Any:
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


@dataclass(frozen=True)
class WholeElsewhere:
    """A hook of a parameter of which a mixture takes the pieces on each device.

    The mixture reads it without hooks (`get_raw_value`); what else reads it is given all pieces.
    """

    dim: int  # along which it is in pieces, counted from the end
    size: int  # that of the whole

    def __call__(self, variable: Any, value: Any) -> Any:
        """Return what the variable holds, whole."""
        pieces = variable.get_raw_value()
        one_expert = pieces.ndim < -self.dim  # as its own module reads it
        if one_expert or pieces.shape[self.dim] == self.size:
            return value
        if not (_axes_of_experts() or is_recording()):  # on shapes
            return value
        if value is not pieces:  # a part of what is here
            raise ValueError(
                "a parameter of a mixture of experts is indexed outside of the mixture, and this "
                f"device has {pieces.shape[self.dim]} of {self.size} experts. Read it whole, then "
                "index it: parameter[...][index]."
            )
        join = partial(_joined, value.ndim + self.dim)
        times = self.size // pieces.shape[self.dim]
        alike = lambda x: jnp.concatenate([x] * times, self.dim)
        rule = lambda call, scope, body, given: [call.again(scope.whole(given[0]))]
        return named(rule, join, alike, ELSEWHERE)(value) if is_recording() else join(value)


ELSEWHERE = (
    "parameters of experts that are read outside of their mixture, of which each device has some. "
    "Differentiate outside of the model: let the loss have what follows from them."
)


def _axes_of_experts() -> tuple[str, ...]:
    return tuple(axis for axis in EXPERT_AXES if devices_along(axis) > 1)


def _joined(dim: int, pieces: jax.Array) -> jax.Array:
    return lax.all_gather(pieces, _axes_of_experts(), axis=dim, tiled=True)


def _hooked(variable: nnx.Variable) -> nnx.Variable:
    """Return the variable with hooks: reading it where it is not is refused, pieces are joined."""
    own = variable.get_metadata("on_get_value", ())
    own = own if isinstance(own, tuple) else (own,)
    names, hooks = axes_of(variable), [refuse_elsewhere]
    if variable.get_metadata(STAYS, False) and EXPERTS in names:
        dim = names.index(EXPERTS) - len(names)
        hooks.append(WholeElsewhere(dim, variable.shape[dim]))
    variable = variable.copy()
    variable.set_metadata(on_get_value=(*hooks, *own))
    return variable


# -- what modules are handed: those that mark an attribute of theirs get it ----------------------


def hand(model: nnx.Module, name: str, mark: str, given: Any) -> None:
    """Put `given` in the attribute `name` of all modules whose own one there is marked."""
    for _, module in nnx.iter_modules(model):
        if getattr(getattr(module, name, None), mark, False):
            setattr(module, name, given)


def number(model: nnx.Module) -> None:
    """Give modules that take a number theirs, in the order of paths: one for all layers of a stack.

    They are those whose `number` is `hfjax.models.layers.unnumbered` (marked `takes_number`).
    """
    takes = lambda module: getattr(getattr(module, "number", None), "takes_number", False)
    found = {
        f"{path_of(keys)}/": module for keys, module in nnx.iter_modules(model) if takes(module)
    }
    for i, path in enumerate(sorted(found, key=natural)):
        setattr(found[path], "number", i)  # noqa: B010  modules of any kind


class Placeholder:
    """Stands for an array of a layer where that layer does not run; using it is refused."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __getitem__(self, index: Index) -> "Placeholder":
        return self if index is ... else self._refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__jax_array__":
            raise AttributeError(name)
        return self._refuse()

    def _refuse(self, *_: object) -> NoReturn:
        raise ValueError(
            f"{self.path} is used outside of its layer. A model in three parts (embed, layers, "
            "head) is run layer by layer, and what embed and head share with a layer lies outside "
            "of `layers`. Without stages there is a way around: hfjax.layout(…, forward=lambda "
            "model, batch: model(batch)) runs the model as it is written."
        )

    def __repr__(self) -> str:
        return f"<{self.path}, which is in a layer that does not run here>"


_OPERATORS = "add sub mul truediv floordiv mod pow matmul neg abs len iter lt le gt ge float array"
for _name in _OPERATORS.split():
    for _side in ("", "r"):
        setattr(Placeholder, f"__{_side}{_name}__", Placeholder._refuse)


def refuse_elsewhere(variable: nnx.Variable, value: Any) -> Any:
    """Return what a variable holds, unless that is elsewhere: a hook of every parameter."""
    return value._refuse() if isinstance(value, Placeholder) else value
