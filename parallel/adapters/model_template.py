"""A model without its arrays: how to split one into named arrays and merge it again."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax import lax

from hfjax.parallel.adapters.batch_norm import (
    batch_norm_notes,
    convert_batch_norms,
    count_linen_norms,
    linen_per_device,
    synchronise_linen,
)
from hfjax.parallel.adapters.constructed import (
    UNTRACEABLE,
    EagerInit,
    HoldsLayersError,
    eager_init,
    layers_in_functions,
)
from hfjax.parallel.adapters.forward_signature import add_keys, key_templates, requested_names
from hfjax.parallel.adapters.pytrees import TreeTemplate, split_tree
from hfjax.parallel.jaxprs.bind import call_on_one_device
from hfjax.parallel.jaxprs.model_mesh import ModelMesh, use_model_mesh
from hfjax.parallel.mesh import EXPERT_AXES, EXPERTS, KEEP_SHARDED, STACK
from hfjax.parallel.spmd.axes import axis_size_or_one, logical_axes
from hfjax.parallel.spmd.partition_context import is_recording
from hfjax.parallel.spmd.rule_calls import keep_as_call
from hfjax.utils.paths import Flat, Index, check_paths, join_path, natural_sort_key

LAYERS = "layers/"


FlatVariables = Sequence[tuple[tuple, Any]]  # keys inside a layer, variable


@dataclass(frozen=True)
class Layer:
    """One layer without its arrays: the variables hold the path of each in the model."""

    number: int
    graph: Any  # a graph definition, or the function that the layer is
    parameters: FlatVariables = ()
    variables: FlatVariables = ()

    @property
    def paths(self) -> list[str]:
        """The paths of the parameters."""
        return [raw_value(variable).path for _, variable in self.parameters]


def fill(variables: FlatVariables, array_of: Callable[[str], Any]) -> nnx.State:
    """Return variables of a layer that hold the arrays of their paths."""
    return nnx.from_flat_state(
        [(keys, _with_value(v, array_of(raw_value(v).path))) for keys, v in variables]
    )


@dataclass(frozen=True, eq=False)
class ModelTemplate:
    """The static part of a model, and one template variable for each of its arrays."""

    create: Callable[[Any], Flat]  # seed -> {path: array}, parameters and other variables alike
    parameters: Mapping[str, Any]  # path -> template; of an nnx model an nnx.Param with its names
    variables: Mapping[str, Any]  # path -> template of what is not a parameter
    graphs: Mapping[str, Any]  # "train", "eval", "model" (as made) -> GraphDef or TreeTemplate
    keys: Mapping[str, tuple]  # path -> keys of an array in the graph
    is_layer_stack: bool = False
    stacked: bool = False  # the layers are one module of stacked arrays
    sync_batch_norm: bool = True  # BatchNorm is over the global batch
    notes: tuple[str, ...] = ()  # what was done to the model, and what of it is not trained
    prepare: Callable | None = None  # the model's own: batch -> batch, of full sequences
    unhooked_parameters: Mapping[str, Any] = field(
        default_factory=dict
    )  # `parameters` of nnx without hooks
    # What built the model, where its constructor cannot be traced.
    eager_init: EagerInit | None = None
    mesh_axes: Mapping[str, str | None] = field(default_factory=dict)  # the model's names -> ours
    model_init: Any = None  # what made it: may have `is_frozen(path)` and `base` (hfjax.adapters)
    adapt: Callable[[Flat], Flat] | None = None  # all parameters -> the model's (with_adapters)

    def prepare_batch(self, batch: Any) -> Any:
        """Return a batch of full sequences as the model wants it, before they are sliced."""
        return batch if self.prepare is None else self.prepare(batch)

    def after_step(self, variables: Flat, metrics: Flat) -> tuple[Flat, Flat]:
        """Return the variables that the model's own `after_step` changes, and the metrics."""
        if isinstance(self.graphs["train"], TreeTemplate):
            return {}, metrics
        hook = getattr(self.abstract("train"), "after_step", None)
        return ({}, metrics) if hook is None else hook(variables, metrics)

    def merge(self, parameters: Flat, variables: Flat, mode: str) -> Any:
        """Return the model that holds these arrays."""
        parameters = parameters if self.adapt is None else self.adapt(parameters)
        graph = self.graphs[mode]
        if isinstance(graph, TreeTemplate):
            return graph.fill({**variables, **parameters})
        states = [
            nnx.from_flat_state({self.keys[p]: _with_value(like[p], v) for p, v in values.items()})
            for like, values in (
                (self.unhooked_parameters if mode == "model" else self.parameters, parameters),
                (self.variables, {p: v for p, v in variables.items() if p in self.keys}),
            )
        ]
        return nnx.merge(graph, *states)

    def with_adapters(
        self, names: Mapping[str, tuple], forward: Callable | None
    ) -> tuple[Mapping[str, tuple], "ModelTemplate"]:
        """Return names of dimensions, and the template, with adapters beside the model's arrays.

        That is where the model itself has no place for them (hfjax.adapters).
        """
        add = getattr(self.model_init, "add_adapters", lambda names, template, _: (names, template))
        return add(names, self, forward)

    def is_frozen(self, path: str) -> bool:
        """Return whether the model says that a parameter does not train."""
        return getattr(self.model_init, "is_frozen", lambda path: False)(path)

    @property
    def base_weights(self) -> Any:
        """The files of the frozen parameters, if the model has them (hfjax.adapters)."""
        return getattr(self.model_init, "base_weights", None)

    def is_adapter(self, path: str) -> bool:
        """Return whether a parameter is an adapter's (hfjax.adapters)."""
        return getattr(self.model_init, "is_adapter", lambda path: False)(path)

    def merge_adapters(self, layout: Any, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the parameters of the model without adapters, with these merged into them.

        Args:
            layout: The layout of the parameters.
            params: The parameters by path, in the model's order.
        """
        merge = getattr(self.model_init, "merge", None)
        return params if merge is None else merge(layout, params)

    @property
    def is_layer_list(self) -> bool:
        """Whether the model is a layer stack whose layers are a list."""
        return self.is_layer_stack and not self.stacked

    def layers(self, mode: str) -> list[Layer]:
        """Return the layers of a list, or the one layer that stands for all stacked ones."""
        templates = {**self.parameters, **self.variables}
        split_layers: list[Layer] = []

        def take_apart(parameters: Flat, variables: Flat) -> None:
            paths = {id(x): path for path, x in (parameters | variables).items()}
            placeholder_of = lambda x: _with_value(
                templates[paths[id(x)]], Placeholder(paths[id(x)])
            )
            layers = self.merge(parameters, variables, mode).layers
            items = items_of(layers) if self.is_layer_list else [layers]
            split_layers[:] = [
                _split_layer(number, x, placeholder_of) for number, x in enumerate(items)
            ]

        jax.eval_shape(take_apart, *self._shapes)
        return split_layers

    @property
    def num_layers(self) -> int:
        """How many layers a layer-stack model has."""
        if self.is_layer_list:
            return len(self.layers("train"))
        entries = {**self.parameters, **self.variables}.items()
        return next(v.shape[0] for path, v in entries if path.startswith(LAYERS))

    def with_ops(self, ops: Any) -> "ModelTemplate":
        """Return the template whose modules choose kernels by `ops`.

        They are those whose `kernels` is `hfjax.models.layers.local_ops` (marked
        `chooses_kernels`).
        """
        return replace(self, graphs={mode: self._graph_with_ops(mode, ops) for mode in self.graphs})

    def _graph_with_ops(self, mode: str, ops: Any) -> Any:
        graph = self.graphs[mode]

        def hand_over(parameters: Flat, variables: Flat) -> None:
            nonlocal graph
            model = self.merge(parameters, variables, mode)
            inject(model, "kernels", "chooses_kernels", ops)
            graph = nnx.split(model, nnx.Param, ...)[0]

        if not isinstance(graph, TreeTemplate):
            jax.eval_shape(hand_over, *self._shapes)
        return graph

    def abstract(self, mode: str) -> Any:
        """Return the model on shapes and dtypes."""
        return self.merge(*self._shapes, mode)

    @property
    def _shapes(self) -> tuple[Flat, Flat]:
        shapes = lambda templates: {path: raw_value(v) for path, v in templates.items()}
        return shapes(self.parameters), shapes(self.variables)

    def model_variables(self, model: Any) -> Flat:
        """Return the arrays of a model that are not parameters."""
        if not self.variables or not isinstance(model, nnx.Module):
            return {}
        return _raw_values(nnx.state(model, nnx.Not(nnx.Param)))

    @contextmanager
    def call_context(self, model_mesh: ModelMesh | None = None) -> Iterator[None]:
        """Call the model and the loss meanwhile."""
        intercept = synchronise_linen if self.sync_batch_norm else linen_per_device
        mesh = model_mesh or ModelMesh.of(self.mesh_axes)
        with linen.intercept_methods(intercept), use_model_mesh(mesh):
            yield

    def is_batched(self, path: str) -> bool:
        """Return whether a variable has a batch dimension."""
        return logical_axes(self.variables[path])[:1] == ("batch",)

    def takes_shards(self, path: str) -> bool:
        """Return whether the module of a parameter takes shards of it: it marks it so."""
        template = self.parameters[path]
        return isinstance(template, nnx.Variable) and bool(
            template.get_metadata(KEEP_SHARDED, False)
        )

    def axes(self, path: str, overrides: Mapping[str, tuple]) -> tuple[str | None, ...]:
        """Return the logical name of each dimension of a parameter."""
        template = self.parameters[path]
        if path in overrides:
            return tuple(overrides[path])
        axes = logical_axes(template)
        stack = (STACK,) if self.stacked and path.startswith(LAYERS) else ()
        unnamed = (None,) * (len(template.shape) - len(stack))
        return (*stack, *(axes or unnamed))


def is_list(layers: object) -> bool:
    """Return whether the layers are a list of modules (else: one module of stacked arrays)."""
    return isinstance(layers, nnx.List | nnx.Sequential | list | tuple)


def items_of(layers: Any) -> Iterable[Any]:
    """Return the modules and functions of a list of layers."""
    return layers.layers if isinstance(layers, nnx.Sequential) else layers


def has_layer_stack(model: object) -> bool:
    """Return whether a model has `layers`, and methods `embed` and `head`."""
    methods = [getattr(type(model), name, None) for name in ("embed", "head")]
    return hasattr(model, "layers") and all(map(inspect.isfunction, methods))


def raw_value(template: Any) -> Any:
    """Return what a variable holds; an array that is in no variable itself."""
    return template.get_raw_value() if isinstance(template, nnx.Variable) else template


def _with_value(template: Any, value: Any) -> Any:
    return template.replace(value) if isinstance(template, nnx.Variable) else value


def _split_layer(number: int, layer: Any, placeholder_of: Callable[[Any], Any]) -> Layer:
    if not isinstance(layer, nnx.Module):  # a function, as nnx.Sequential may hold
        return Layer(number, layer)
    graph, *states = nnx.split(layer, nnx.Param, ...)
    flat_states = [
        [(keys, placeholder_of(raw_value(x))) for keys, x in nnx.to_flat_state(state)]
        for state in states
    ]
    return Layer(number, graph, *flat_states)


def make_rngs(seed: Index) -> nnx.Rngs:
    """Return a stream for parameters and one for dropout, whose rate then changes no weight."""
    key = jax.random.key(seed)
    return nnx.Rngs(key, dropout=jax.random.fold_in(key, 1))


def _flatten_state(state: nnx.State) -> dict[str, Any]:
    return {join_path(keys): leaf for keys, leaf in nnx.to_flat_state(state)}


def _raw_values(state: nnx.State) -> Flat:
    return {path: raw_value(leaf) for path, leaf in _flatten_state(state).items()}


def make_template(
    model_init: Callable,
    place: Callable,
    forward: Callable | None = None,
    sync_batch_norm: bool = True,
    mesh_axes: Mapping[str, str | None] | None = None,
) -> ModelTemplate:
    """Return the template of what `model_init(rngs)` makes; allocates nothing.

    Modules whose `place` is `hfjax.models.layers.no_constraint` (marked `places_activations`) get
    the function that constrains activations by name. A training step keeps the mode in which each
    module was built; an evaluation calls the model's `eval()`.
    """
    requested = requested_names(forward)
    model_mesh = ModelMesh.of(mesh_axes or {})

    def make(seed: Index) -> Any:
        with use_model_mesh(model_mesh):
            return _init_model(model_init, seed)

    eager: EagerInit | None = None
    fields: dict[str, Any] = {}

    def split_model() -> Any:
        model = make(0)
        if not isinstance(model, nnx.Module):
            return None
        initial = nnx.split(model, nnx.Param, ...)[0]
        inject(model, "place", "places_activations", place)
        number_modules(model)
        if (hidden := layers_in_functions(model)) and eager is None:
            raise HoldsLayersError(f"{', '.join(hidden)} keep layers in functions")
        frozen = [f"not trained, since functions keep them: layers of {', '.join(hidden)}"]
        notes = batch_norm_notes(convert_batch_norms(model, sync_batch_norm), sync_batch_norm)
        fields["notes"] = (*notes, *(frozen if hidden else ()))
        _set_train_mode(model)
        graph, *states = nnx.split(model, nnx.Param, ...)
        model.eval()
        evaluating = nnx.split(model, nnx.Param, ...)[0]
        fields["graphs"] = {"model": initial, "train": graph, "eval": evaluating}
        fields["is_layer_stack"] = is_stack = has_layer_stack(model)
        fields["stacked"] = is_stack and not is_list(getattr(model, "layers", None))
        fields["prepare"] = getattr(type(model), "prepare", None)
        return states

    with nnx.use_eager_sharding(False):  # names of axes are ours to read, on our own mesh
        try:
            states = jax.eval_shape(call_on_one_device(split_model))
        except UNTRACEABLE as cause:
            make = eager = eager_init(model_init, make, cause)
            states = jax.eval_shape(call_on_one_device(split_model))
    if states is None:
        tree = ModelTemplate(
            **split_tree(make),
            sync_batch_norm=sync_batch_norm,
            eager_init=eager,
            mesh_axes=mesh_axes or {},
        )
        norms = count_linen_norms(
            [path for path in tree.parameters if path.startswith("batch_stats/")]
        )
        notes = batch_norm_notes(norms, sync_batch_norm)
        notes = (*notes, *tree.notes)
        return _add_random_keys(replace(tree, notes=notes, model_init=model_init), requested)
    key_paths = [keys for state in states for keys, _ in nnx.to_flat_state(state)]
    check_paths(list(map(join_path, key_paths)))
    parameters, variables = map(_flatten_state, states)

    def create(seed: Index) -> Flat:
        with nnx.use_eager_sharding(False):
            return call_on_one_device(lambda: _raw_values(nnx.split(make(seed), ...)[1]))()

    template = ModelTemplate(
        sync_batch_norm=sync_batch_norm,
        # Traced once, however many programs begin with it; a built model has other arrays in each.
        create=create if eager else jax.jit(create, inline=True),
        eager_init=eager,
        mesh_axes=mesh_axes or {},
        model_init=model_init,
        parameters={path: _with_hooks(v) for path, v in parameters.items()},
        unhooked_parameters=parameters,
        variables=variables,
        keys={join_path(keys): keys for keys in key_paths},
        **fields,
    )
    return _add_random_keys(template, requested)


def _add_random_keys(template: ModelTemplate, requested: Sequence[str]) -> ModelTemplate:
    """Return the template whose state also holds the random keys that `forward` asks for."""
    forward_keys = key_templates(requested)
    create = add_keys(template.create, forward_keys)
    notes = (*template.notes, *(template.eager_init.notes if template.eager_init else ()))
    return replace(
        template, create=create, variables={**template.variables, **forward_keys}, notes=notes
    )


def _init_model(model_init: Callable, seed: Index) -> Any:
    """Return what `model_init` makes; arrays in attributes of its modules are data."""
    model = model_init(make_rngs(seed))
    if isinstance(model, nnx.Module):
        for _, node in nnx.iter_graph(model):
            if isinstance(node, nnx.Pytree):
                arrays = {k: v for k, v in vars(node).items() if isinstance(v, jax.Array)}
                for name, value in arrays.items():
                    setattr(node, name, nnx.data(value))
    return model


def _set_train_mode(model: nnx.Module) -> None:
    """Switch modules to training that were built without a mode."""
    for _, module in nnx.iter_modules(model):
        for name in ("deterministic", "use_running_average"):
            if getattr(module, name, False) is None:
                setattr(module, name, False)


@dataclass(frozen=True)
class GatherExperts:
    """A hook of a parameter of which a mixture takes each device's shard.

    The mixture reads it without hooks (`get_raw_value`); what else reads it gets it all-gathered.
    """

    dim: int  # along which it is sharded, counted from the end
    size: int  # the full one

    def __call__(self, variable: Any, value: Any) -> Any:
        """Return the variable's full value."""
        shard = variable.get_raw_value()
        one_expert = shard.ndim < -self.dim  # as its own module reads it
        if one_expert or shard.shape[self.dim] == self.size:
            return value
        if not (_expert_axes() or is_recording()):  # on shapes
            return value
        if value is not shard:  # a part of the shard
            raise ValueError(
                "a parameter of a mixture of experts is indexed outside of the mixture, and this "
                f"device has {shard.shape[self.dim]} of {self.size} experts. Read it whole, then "
                "index it: parameter[...][index]."
            )
        gather = partial(_gather_experts, value.ndim + self.dim)
        times = self.size // shard.shape[self.dim]
        repeat = lambda x: jnp.concatenate([x] * times, self.dim)
        rule = lambda call, ctx, body, args: [call.reapply(ctx.replicate(args[0]))]
        return (
            keep_as_call(rule, gather, repeat, ELSEWHERE)(value)
            if is_recording()
            else gather(value)
        )


ELSEWHERE = (
    "parameters of experts that are read outside of their mixture, of which each device has some. "
    "Differentiate outside of the model: let the loss have what follows from them."
)


def _expert_axes() -> tuple[str, ...]:
    return tuple(axis for axis in EXPERT_AXES if axis_size_or_one(axis) > 1)


def _gather_experts(dim: int, shard: jax.Array) -> jax.Array:
    return lax.all_gather(shard, _expert_axes(), axis=dim, tiled=True)


def _with_hooks(variable: nnx.Variable) -> nnx.Variable:
    """Return the variable with hooks: reading a placeholder is refused, shards are gathered."""
    own = variable.get_metadata("on_get_value", ())
    own = own if isinstance(own, tuple) else (own,)
    names, hooks = logical_axes(variable), [refuse_placeholder]
    if variable.get_metadata(KEEP_SHARDED, False) and EXPERTS in names:
        dim = names.index(EXPERTS) - len(names)
        hooks.append(GatherExperts(dim, variable.shape[dim]))
    variable = variable.copy()
    variable.set_metadata(on_get_value=(*hooks, *own))
    return variable


# -- what a layout injects into modules that mark an attribute -----------------------------------


def inject(model: nnx.Module, name: str, mark: str, value: Any) -> None:
    """Set the attribute `name` of all modules whose own one is marked to `value`."""
    for _, module in nnx.iter_modules(model):
        if getattr(getattr(module, name, None), mark, False):
            setattr(module, name, value)


def number_modules(model: nnx.Module) -> None:
    """Number the modules that take a number, in the order of paths: one for all layers of a stack.

    They are those whose `number` is `hfjax.models.layers.no_number` (marked `takes_number`).
    """
    takes = lambda module: getattr(getattr(module, "number", None), "takes_number", False)
    modules = {
        f"{join_path(keys)}/": module for keys, module in nnx.iter_modules(model) if takes(module)
    }
    for i, path in enumerate(sorted(modules, key=natural_sort_key)):
        setattr(modules[path], "number", i)  # noqa: B010  modules of any kind


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
    for _prefix in ("", "r"):
        setattr(Placeholder, f"__{_prefix}{_name}__", Placeholder._refuse)


def refuse_placeholder(variable: nnx.Variable, value: Any) -> Any:
    """Return what a variable holds, unless that is a placeholder: a hook of every parameter."""
    return value._refuse() if isinstance(value, Placeholder) else value
