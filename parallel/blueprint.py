"""A model without its arrays: how to take one apart into named arrays and put it together again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import nnx

from hfjax.parallel.fetch import Elsewhere, fetch_on_read, whole
from hfjax.parallel.layers import has_three_parts, is_list, items_of
from hfjax.parallel.placement import STACK
from hfjax.parallel.reduction import Flat

LAYERS = "layers/"


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
        return [variable.get_raw_value().path for _, variable in self.parameters]


def fill(variables: Flattened, array_of: Callable[[str], Any]) -> nnx.State:
    """Return variables of a layer that hold the arrays of their paths."""
    held = [(keys, v.replace(array_of(v.get_raw_value().path))) for keys, v in variables]
    return nnx.from_flat_state(held)


@dataclass(frozen=True)
class Blueprint:
    """The static part of a model, and one template variable for each of its arrays."""

    create: Callable[[Any], Flat]  # seed -> {path: array}, parameters and other variables alike
    parameters: Mapping[str, Any]  # path -> template; of an nnx model an nnx.Param with its names
    variables: Mapping[str, Any]  # path -> template of what is not a parameter
    graphs: Mapping[str, Any]  # "train" and "eval" -> graph definition, or a tree definition
    three_parts: bool = False
    stacked: bool = False  # the layers are one module of stacked arrays

    def merge(self, parameters: Flat, variables: Flat, mode: str) -> Any:
        """Return the model that holds these arrays (or `Stored` values)."""
        if not isinstance(self.graphs[mode], nnx.GraphDef):
            leaves = [whole(parameters[path]) for path in self.parameters]  # in the tree's order
            return jax.tree.unflatten(self.graphs[mode], leaves)
        states = [
            nnx.from_flat_state({_keys(p): like[p].replace(v) for p, v in values.items()})
            for like, values in ((self.parameters, parameters), (self.variables, variables))
        ]
        return nnx.merge(self.graphs[mode], *states)

    @property
    def listed(self) -> bool:
        """Whether the model is in three parts and its layers are a list."""
        return self.three_parts and not self.stacked

    def layers(self, mode: str) -> list[Layer]:
        """Return the layers of a list, or the one layer that all stacked ones are."""
        away = lambda flat: {path: Elsewhere(path) for path in flat}
        layers = self.merge(away(self.parameters), away(self.variables), mode).layers
        return [_layer(layer) for layer in (items_of(layers) if self.listed else [layers])]

    def equipped(self, kernels: Any) -> "Blueprint":
        """Return the blueprint whose modules choose kernels by `kernels`.

        They are those whose `kernels` is that of `hfjax.models.parts.plain` (marked
        `chooses_kernels`).
        """
        return replace(self, graphs={mode: self._equipped(mode, kernels) for mode in self.graphs})

    def _equipped(self, mode: str, kernels: Any) -> Any:
        graph = self.graphs[mode]
        if not isinstance(graph, nnx.GraphDef):
            return graph
        model = self.abstract(mode)
        hand(model, "kernels", "chooses_kernels", kernels)
        return nnx.split(model, nnx.Param, ...)[0]

    def abstract(self, mode: str) -> Any:
        """Return the model on shapes and dtypes."""
        shapes = lambda templates: {path: v.get_raw_value() for path, v in templates.items()}
        return self.merge(shapes(self.parameters), shapes(self.variables), mode)

    def variables_of(self, model: Any) -> Flat:
        """Return the arrays of a model that are not parameters."""
        return _raw(nnx.state(model, nnx.Not(nnx.Param))) if self.variables else {}

    def axes(self, path: str, given: Mapping[str, tuple]) -> tuple[str | None, ...]:
        """Return the logical name of each dimension of a parameter."""
        template = self.parameters[path]
        if path in given:
            return tuple(given[path])
        axes = template.get_metadata("axes", None) if isinstance(template, nnx.Variable) else None
        stack = (STACK,) if self.stacked and path.startswith(LAYERS) else ()
        unnamed = (None,) * (len(template.shape) - len(stack))
        return (*stack, *(unnamed if axes is None else axes))


def _layer(layer: Any) -> Layer:
    if not isinstance(layer, nnx.Module):  # a function, as nnx.Sequential may hold
        return Layer(layer)
    graph, parameters, variables = nnx.split(layer, nnx.Param, ...)
    return Layer(graph, nnx.to_flat_state(parameters), nnx.to_flat_state(variables))


def rngs_of(seed: Any) -> nnx.Rngs:
    """Return one stream for parameters and one for dropout, so that a rate changes no weight."""
    key = jax.random.key(seed)
    return nnx.Rngs(key, dropout=jax.random.fold_in(key, 1))


def _keys(path: str) -> tuple[str | int, ...]:
    return tuple(int(k) if k.isdigit() else k for k in path.split("/"))


def _flat(state: nnx.State) -> dict[str, nnx.Variable]:
    return {"/".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}


def _raw(state: nnx.State) -> Flat:
    return {path: variable.get_raw_value() for path, variable in _flat(state).items()}


def blueprint(model_init: Callable, place: Callable) -> Blueprint:
    """Return the blueprint of what `model_init(rngs)` makes; allocates nothing.

    Modules whose `place` is that of `hfjax.models.parts.anywhere` (marked `places_activations`)
    are handed the function that places activations by name.
    """
    model = nnx.eval_shape(lambda: model_init(rngs_of(0)))
    if not isinstance(model, nnx.Module):
        return _of_tree(model_init, model)
    hand(model, "place", "places_activations", place)
    graphs = {}
    for mode, switch in (("eval", model.eval), ("train", model.train)):
        switch()
        graphs[mode], parameters, variables = nnx.split(model, nnx.Param, ...)
    parts = has_three_parts(model)

    def create(seed):
        return _raw(nnx.split(model_init(rngs_of(seed)), ...)[1])

    return Blueprint(
        create=create,
        parameters={path: _hooked(v) for path, v in _flat(parameters).items()},
        variables=_flat(variables),
        graphs=graphs,
        three_parts=parts,
        stacked=parts and not is_list(getattr(model, "layers", None)),
    )


def hand(model: nnx.Module, name: str, mark: str, given: Any) -> None:
    """Put `given` in the attribute `name` of all modules whose own one there is marked."""
    for _, module in nnx.iter_modules(model):
        if getattr(getattr(module, name, None), mark, False):
            setattr(module, name, given)


def _hooked(variable: nnx.Variable) -> nnx.Variable:
    """Return the variable with the hook that moves it when it is read."""
    own = variable.get_metadata("on_get_value", ())
    own = own if isinstance(own, tuple) else (own,)
    variable = variable.copy()
    variable.set_metadata(on_get_value=(fetch_on_read, *own))
    return variable


def _of_tree(model_init: Callable, tree: Any) -> Blueprint:
    """A bare pytree of arrays is a model too: its loss is given the tree."""
    named, definition = jax.tree_util.tree_flatten_with_path(tree)
    if not named:
        raise ValueError(
            f"model_init returned {type(tree).__name__}: an nnx.Module or a pytree of arrays is "
            "expected. A Linen module: flax.nnx.bridge.ToNNX(module, rngs=rngs).lazy_init(batch)."
        )
    paths = [jax.tree_util.keystr(keys, simple=True, separator="/") for keys, _ in named]

    def create(seed):
        return dict(zip(paths, jax.tree.leaves(model_init(rngs_of(seed))), strict=True))

    leaves = {path: leaf for path, (_, leaf) in zip(paths, named, strict=True)}
    return Blueprint(create, leaves, {}, {"train": definition, "eval": definition})
