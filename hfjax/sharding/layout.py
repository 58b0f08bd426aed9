"""How everything is sharded: path, shape, PartitionSpec, bytes per device. Allocates nothing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P

from hfjax.optimizers.transforms import (
    FrozenLayers,
    bind_axes,
    check_master,
    check_update_arguments,
    freeze_layers,
    freeze_params,
    stored_dtype,
    unwrap,
)
from hfjax.parallel.activation_sharding import Placer
from hfjax.parallel.adapters.model_template import LAYERS, ModelTemplate, make_template
from hfjax.parallel.jaxprs.model_mesh import without_mesh
from hfjax.parallel.layer_order import Arrangement
from hfjax.parallel.make_mesh import as_mesh, check_own_process
from hfjax.parallel.mesh import STACK, describe_mesh
from hfjax.parallel.offload.host_memory import (
    check_has_host_memory,
    host_sharding,
)
from hfjax.parallel.packing import PACKED
from hfjax.parallel.param_specs import Array, ParamSpecs, batch_spec, check_spec, column_specs
from hfjax.parallel.strategy import Strategy
from hfjax.sharding.axis_names import find_names
from hfjax.sharding.check_layout import (
    check_arguments,
    check_axes_of_model,
    check_dtypes,
    check_frozen,
    check_has_examples,
    check_has_parameters,
    check_marks,
    check_patterns,
    check_per_example_variables,
    check_splits,
    first_layers,
    idle_axes,
)
from hfjax.sharding.check_matrices import check_matrices
from hfjax.sharding.host_memory import HostMemory, find_optimizer_arrays
from hfjax.sharding.optimizer_state import find_parameter
from hfjax.sharding.report import (
    bytes_of_array,
    count_frozen_layers,
    layout_notes,
    layout_table,
    stage_table,
    state_bytes,
    unmatched,
)
from hfjax.sharding.state import State, initial_state
from hfjax.sharding.storage import COLUMNS, Source, Storage, make_storage, place_array
from hfjax.utils.keywords import strict_keywords
from hfjax.utils.paths import Flat, flatten, match_patterns, nest, suggest
from hfjax.utils.tables import human


@dataclass(frozen=True, eq=False)
class Layout:
    """How parameters, gradients, optimizer state and variables are sharded; prints as a table.

    `hfjax.layout` makes one; edit it with `with_specs` and `freeze`.

    Attributes:
        mesh: The devices.
        strategy: The table of sharding rules.
        optimizer: The optax transformation; after `freeze` it does not change frozen parameters.
        template: The model without its arrays.
        arrays: Path -> shape and logical axes of each parameter of the model.
        param_specs: Path -> shardings of a stored parameter, its gradient and optimizer state.
        storage: How a state stores the layers.
        forward: As passed to `hfjax.layout`.

    Example:
        >>> import hfjax, jax.numpy as jnp, optax
        >>> model = lambda rngs: {"w": jnp.zeros((64, 8)), "b": jnp.zeros(8)}
        >>> zero1 = hfjax.ZERO1.edit(replicate_below=0)
        >>> print(hfjax.layout(model, optax.sgd(0.1, 0.9), hfjax.make_mesh(data=8), zero1))
        ZERO1 on data=8
          parameter  shape  spec  gradient  optimizer_state  bytes/device
          b          8      P()   same      P("data")        32 B
          w          64x8   P()   same      P("data")        2.0 KiB
        per device: parameters 2.0 KiB, gradients 2.0 KiB, optimizer_state 260 B
    """

    mesh: Mesh
    strategy: Strategy
    optimizer: optax.GradientTransformation
    template: ModelTemplate
    arrays: Mapping[str, Array]
    param_specs: Mapping[str, ParamSpecs]
    storage: Storage
    forward: Callable | None = None

    @property
    def specs(self) -> dict[str, P]:
        """Path -> PartitionSpec of each parameter; edit it and pass it to `with_specs`."""
        return {path: p.parameter for path, p in self.param_specs.items()}

    @property
    def axes(self) -> dict[str, tuple[str | None, ...]]:
        """Path -> the names of a parameter's dimensions, where it has any: as `axes=` takes it.

        Example:
            >>> import hfjax, jax.numpy as jnp, optax
            >>> model, mesh = lambda _: {"w": jnp.ones((64, 8))}, hfjax.make_mesh(tensor=8)
            >>> names = {"w": ("mlp", None)}
            >>> hfjax.layout(model, optax.sgd(0.1), mesh, hfjax.TENSOR, axes=names).axes
            {'w': ('mlp', None)}
        """
        return {path: array.axes for path, array in self.arrays.items() if any(array.axes)}

    def with_specs(self, specs: Mapping[str, P]) -> "Layout":
        """Return the layout with these parameters sharded so; gradients, optimizer state follow.

        Args:
            specs: {path: PartitionSpec}, of as many parameters as you like; others keep theirs. The
                sizes of the axes that shard a dimension have to divide it; data and fsdp come
                before tensor.

        Raises:
            ValueError: A path is unknown, or the parameter cannot be sharded so.

        Example:
            >>> import hfjax, jax.numpy as jnp, optax
            >>> from jax.sharding import PartitionSpec as P
            >>> model = lambda rngs: {"w": jnp.zeros((64, 8))}
            >>> layout = hfjax.layout(model, optax.adam(1e-3), hfjax.make_mesh(fsdp=8), hfjax.DDP)
            >>> layout = layout.with_specs({"w": P("fsdp")})
            >>> layout.specs["w"] == P("fsdp")
            True
        """
        param_specs = dict(self.param_specs)
        for path, spec in specs.items():
            if path in self.template.parameters and path not in param_specs:
                packed = ", ".join(path for path in param_specs if path.startswith(LAYERS))
                raise ValueError(
                    f"{path} is in a list of layers, which stages hold packed into rows: edit "
                    f"{packed}, or stack the layers (hfjax.models.layers.stack_layers)."
                )
            if path not in param_specs:
                raise ValueError(f"no parameter {path!r}. {suggest(path, param_specs)}")
            if not isinstance(spec, P):
                raise ValueError(f"{path}: a PartitionSpec is expected, found {spec!r}.")
            array = self._array(path)
            check_spec(array, spec, self.mesh)
            columns = zip(COLUMNS, column_specs(array, self.strategy, self.mesh, spec), strict=True)
            param_specs[path] = replace(param_specs[path], **dict(columns))
        return replace(self, param_specs=param_specs)

    def freeze(self, *patterns: str, first: int | None = None) -> "Layout":
        """Return the layout in which the parameters of these paths are frozen.

        They have neither gradient nor optimizer state. What was frozen before stays so. A stack of
        layers that is frozen in part (`first`) has both as a whole: the updates of frozen layers
        are zero, also those of weight decay, their optimizer state does not change, and their
        gradients count in the norm that `max_grad_norm` uses.

        Args:
            patterns: Paths, at least one; `*` matches anything, also `/`: `"layers/*"`.
            first: Freeze only this many of the first layers, in the model's order, whatever the
                schedule: `freeze("layers/*", first=4)`. None: all.

        Raises:
            ValueError: A pattern matches no parameter, or nothing is left to train.

        Example:
            >>> import hfjax, optax
            >>> from flax import nnx
            >>> model = lambda rngs: nnx.Linear(8, 4, rngs=rngs)
            >>> layout = hfjax.layout(model, optax.adam(1e-3), hfjax.make_mesh(data=8), hfjax.DDP)
            >>> list(layout.gradient_bytes), list(layout.freeze("bias").gradient_bytes)
            (['bias', 'kernel'], ['kernel'])
            >>> from hfjax.models.gpt import GPT, GPTConfig
            >>> model = lambda rngs: GPT(GPTConfig.tiny(), rngs=rngs)
            >>> layout = hfjax.layout(model, optax.adam(1e-3), hfjax.make_mesh(data=8), hfjax.DDP)
            >>> layout = layout.freeze("tokens", "positions").freeze("layers/*", first=2)
        """
        check_patterns(patterns)
        paths, frozen_layers = set(match_patterns(patterns, self.arrays)), 0
        if first is not None:
            paths, frozen_layers = first_layers(paths, first, self.template), first
        stacked = {path for path in paths if frozen_layers and self.param_specs[path].stacked}
        frozen = (paths - stacked) | {path for path, p in self.param_specs.items() if p.frozen}
        check_frozen(frozen, self.template, self.storage.arrangement)

        def freeze_param(path: str, p: ParamSpecs) -> ParamSpecs:
            if path in frozen:
                return replace(p, frozen=True, frozen_layers=0)
            return replace(p, frozen_layers=max(p.frozen_layers, (path in stacked) * frozen_layers))

        param_specs = {path: freeze_param(path, p) for path, p in self.param_specs.items()}
        new_layout = replace(self, param_specs=param_specs)._freeze_optimizer()
        new_layout.host_memory.check()
        return new_layout

    def _freeze_optimizer(self) -> "Layout":
        """Return the layout whose optimizer skips what is frozen, wherever it is stored."""
        frozen = {path for path, p in self.param_specs.items() if p.frozen}
        optimizer = unwrap(self.optimizer, FrozenLayers)
        optimizer = freeze_params(optimizer, frozen) if frozen else optimizer
        if frozen_layers := count_frozen_layers(self.param_specs):
            layers = np.asarray(self.order)
            in_first = lambda n: (0 <= layers) & (layers < n)
            frozen_rows = {path: in_first(n) for path, n in frozen_layers.items()}
            optimizer = freeze_layers(optimizer, frozen_rows)
        return replace(self, optimizer=optimizer)

    @cached_property
    def model_layout(self) -> "Layout":
        """The layout that stores layers in the model's order."""
        return arrange_layers(self, None)

    def _array(self, path: str) -> Array:
        """Return the array stored at a path."""
        return self.arrays.get(path) or Array(path, self.param_specs[path].shape, (STACK, None))

    @cached_property
    def host_memory(self) -> HostMemory:
        """What of the state is in host memory."""
        arrays = find_optimizer_arrays(self.state_shapes.optimizer, self.parameter_of)
        return HostMemory(self.strategy, arrays)

    def working_dtype(self, path: str) -> Any:
        """Return the dtype in which a parameter is updated: its own, or that of master weights."""
        dtype = self.param_specs[path].dtype
        has_master = stored_dtype(self.optimizer, None) is not None
        return jnp.promote_types(dtype, jnp.float32) if has_master else dtype

    @cached_property
    def working_dtypes(self) -> dict[str, Any]:
        """The dtype in which each parameter is updated."""
        return {path: self.working_dtype(path) for path in self.param_specs}

    @cached_property
    def order(self) -> np.ndarray | None:
        """The layer number of each stored entry, -1 where there is none.

        A packed row has several: [rows, most layers].
        """
        return self.storage.order

    def shardings(self, mesh: Mesh | AbstractMesh | None = None) -> Any:
        """Return the sharding of every array of the state, as a tree like the state.

        Use it to move a state (`jax.device_put(state, layout.shardings())`) or as `out_shardings`.

        Args:
            mesh: A mesh of your own, as for `state_specs`. None: that of the layout.

        Example:
            >>> import hfjax, jax, jax.numpy as jnp, optax
            >>> model = lambda rngs: {"w": jnp.zeros((64, 8))}
            >>> fsdp = hfjax.FSDP.edit(replicate_below=0)
            >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(fsdp=8), fsdp)
            >>> layout.shardings().params["w"].spec == jax.P("fsdp")
            True
            >>> mesh = jax.make_mesh((8,), ("fsdp",))  # for a jax.jit of your own
            >>> state = jax.device_put(hfjax.init(layout), layout.shardings(mesh))
            >>> jax.typeof(state.params["w"])
            ShapedArray(float32[64@fsdp,8])
        """
        specs, is_spec = self.state_specs(mesh), lambda x: isinstance(x, P)
        if mesh is not None:
            return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)
        host = self.host_memory
        shard = lambda spec, on_host: (host_sharding if on_host else NamedSharding)(self.mesh, spec)
        by_name = lambda keys, spec: shard(spec, jax.tree_util.keystr(keys) in host.optimizer)
        return replace(
            jax.tree.map(lambda spec: shard(spec, False), specs, is_leaf=is_spec),
            params=jax.tree.map(lambda s: shard(s, host.parameters), specs.params, is_leaf=is_spec),
            optimizer=jax.tree_util.tree_map_with_path(by_name, specs.optimizer, is_leaf=is_spec),
        )

    def state_specs(self, mesh: Mesh | AbstractMesh | None = None) -> State:
        """Return the PartitionSpec of every array of the state, as a tree like the state.

        Use it in `in_specs` and `out_specs` of a `jax.shard_map` of your own, or under
        `jax.set_mesh` as `in_shardings` of a `jax.jit`.

        Args:
            mesh: A mesh of your own, of Auto or Explicit axes: specs have its names
                (`mesh_axes`) and leave out axes of size 1. None: the mesh of the layout.

        Raises:
            ValueError: This mesh lacks an axis that splits an array, or has it in another size; or
                only hfjax's steps compute with such a state: something of it is in host memory, or
                layers are not in the model's order.

        Example:
            >>> import hfjax, jax, jax.numpy as jnp, optax
            >>> model = lambda rngs: {"w": jnp.zeros((64, 8))}
            >>> fsdp = hfjax.FSDP.edit(replicate_below=0)
            >>> layout = hfjax.layout(model, optax.adam(0.1), hfjax.make_mesh(fsdp=8), fsdp)
            >>> specs = layout.state_specs()
            >>> specs.params["w"] == specs.optimizer[0].mu["w"] == jax.P("fsdp")
            True
        """
        shapes = self.state_shapes
        specs = State(
            P(),
            nest(self.specs),
            jax.tree_util.tree_map_with_path(self._optimizer_spec, shapes.optimizer),
            nest({path: self._variable_spec(path) for path in flatten(shapes.variables)}),
            None if shapes.order is None else P(),
        )
        if mesh is None:
            return specs
        return self._own_mesh(mesh).restrict_state(specs, self.storage, self.host_memory)

    def _own_mesh(self, mesh: Mesh | AbstractMesh) -> Any:
        from hfjax.sharding.own_mesh import OwnMesh

        return OwnMesh(mesh, self.mesh, self.template.mesh_axes)

    def batch_specs(self, batch: Any, mesh: Mesh | AbstractMesh | None = None) -> Any:
        """Return the PartitionSpec of every array of a batch, as a tree like the batch.

        They are those of a step: examples are split over data, fsdp and expert, over no other axis.

        Args:
            batch: Pytree of arrays, or of their shapes, with the examples first.
            mesh: A mesh of your own, as for `state_specs`. None: that of the layout.

        Raises:
            ValueError: As `state_specs`; or a part of the batch has no dimension of examples.

        Example:
            >>> import hfjax, jax, jax.numpy as jnp, numpy as np, optax
            >>> model, mesh = lambda rngs: {"w": jnp.zeros((64, 8))}, jax.make_mesh((8,), ("x",))
            >>> layout = hfjax.layout(model, optax.sgd(1), mesh, hfjax.DDP, mesh_axes={"x": "data"})
            >>> layout.batch_specs({"x": np.ones((16, 64))}, mesh)["x"] == jax.P("x")
            True
        """
        check_has_examples(batch)
        specs = jax.tree.map(lambda _: batch_spec(self.mesh), batch)
        return specs if mesh is None else self._own_mesh(mesh).restrict(specs)

    def abstract_state(self) -> Any:
        """Return the state as shapes, dtypes and shardings: enough to compile a step.

        Example:
            >>> import hfjax, jax.numpy as jnp, optax
            >>> model = lambda rngs: {"w": jnp.zeros((64, 8))}
            >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(fsdp=8), hfjax.FSDP)
            >>> state = layout.abstract_state()
            >>> state.params["w"].shape, state.step.dtype.name
            ((64, 8), 'int32')
        """
        shape = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        return jax.tree.map(shape, self.state_shapes, self.shardings())

    @without_mesh
    def create(self, seed: Any) -> State:
        """Return the initial state; under jit with `shardings()` it is created sharded.

        `hfjax.init` does that: call this one only inside a program of your own.

        Args:
            seed: An integer, or a traced one, from which `model_init` gets its random numbers.

        Example:
            >>> import hfjax, jax, jax.numpy as jnp, optax
            >>> model = lambda rngs: {"w": jnp.ones((64, 8))}
            >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(fsdp=8), hfjax.FSDP)
            >>> state = jax.jit(layout.create, out_shardings=layout.shardings())(0)
            >>> float(state.params["w"].sum())
            512.0
        """
        return self._first_state(self.template.create(seed), seed)

    def _first_state(self, arrays: Flat, seed: Any) -> State:
        params = self.storage.create(arrays, seed)
        return initial_state(self, arrays, {path: params[path] for path in self.param_specs})

    @cached_property
    def state_shapes(self) -> State:
        arrays = {**self.template.parameters, **self.template.variables}
        shapes = {path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in arrays.items()}
        return jax.eval_shape(self._first_state, shapes, 0)

    def _variable_spec(self, path: str) -> P:
        return batch_spec(self.mesh) if self.template.is_batched(path) else P()

    def _optimizer_spec(self, keys: tuple, leaf: Any) -> P:
        owner = self.parameter_of(keys, leaf)
        return P() if owner is None else owner.optimizer_state

    def parameter_of(self, keys: tuple, leaf: Any) -> ParamSpecs | None:
        """Return the parameter whose path and shape an array of the optimizer state has."""
        shapes = {path: p.shape for path, p in self.param_specs.items()}
        match = find_parameter(keys, leaf.shape, shapes)
        return None if match is None else self.param_specs[match[1]]

    def bytes_per_device(self) -> dict[str, int]:
        """Return bytes per device of parameters, gradients (accumulated) and optimizer state.

        What is in host memory counts separately, as "host parameters" and "host optimizer_state".

        Example:
            >>> import hfjax, jax.numpy as jnp, optax
            >>> model, mesh = lambda rngs: {"w": jnp.zeros((64, 8))}, hfjax.make_mesh(data=8)
            >>> zero1, momentum = hfjax.ZERO1.edit(replicate_below=0), optax.sgd(0.1, momentum=0.9)
            >>> hfjax.layout(model, momentum, mesh, zero1).bytes_per_device()
            {'parameters': 2048, 'gradients': 2048, 'optimizer_state': 256}
        """
        return state_bytes(self)

    @property
    def gradient_bytes(self) -> dict[str, int]:
        """Bytes per device of the gradient of each parameter that has one, as it accumulates."""
        wide = lambda p: jnp.promote_types(p.dtype, jnp.float32)
        size = lambda p: bytes_of_array(p.shape, wide(p), p.gradient, self.mesh)
        return {path: size(p) for path, p in self.param_specs.items() if not p.frozen}

    def unused_axes(self) -> list[str]:
        """Return mesh axes larger than 1 that shard neither the batch nor any parameter.

        A step refuses such a layout: the devices along them would repeat each other's work.

        Example:
            >>> import hfjax, jax.numpy as jnp, optax
            >>> model, mesh = lambda _: {"w": jnp.ones((8, 8))}, hfjax.make_mesh(data=4, tensor=2)
            >>> hfjax.layout(model, optax.sgd(0.1), mesh, hfjax.DDP).unused_axes()
            ['tensor']
        """
        return idle_axes(self.param_specs.values(), self.strategy, self.mesh)

    def __str__(self) -> str:
        lines = [f"{self.strategy.name} on {describe_mesh(self.mesh)}"]
        lines += layout_table(self.param_specs.values(), self.host_memory)
        packed = self.storage.packed
        lines += () if packed is None else stage_table(packed)
        totals = (f"{name} {human(size)}" for name, size in self.bytes_per_device().items())
        notes = (f"note: {text}" for text in layout_notes(self))
        return "\n".join([*lines, f"per device: {', '.join(totals)}", *notes])

    __repr__ = __str__


@without_mesh
@strict_keywords
def layout(  # noqa: PLR0913  options of one call
    model_init: Callable,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    strategy: Strategy,
    *,
    forward: Callable | None = None,
    axes: Mapping[str, tuple[str | None, ...]] | Literal["auto"] | None = None,
    example: Any = None,
    sync_batch_norm: bool = True,
    mesh_axes: Mapping[str, str | None] | None = None,
) -> Layout:
    """Return how everything of `model_init(rngs)` is sharded under a strategy; allocates nothing.

    Args:
        model_init: Function of `nnx.Rngs` that returns an nnx module or a bare pytree of arrays.
        optimizer: Any optax transformation whose update needs gradients and parameters only.
        mesh: A mesh from `hfjax.make_mesh`, or one of your own (`jax.make_mesh`, Auto or Explicit)
            with hfjax's names of axes; those that it lacks get size 1. `layout.mesh` has each
            device at your coordinates, axes transposed to hfjax's order (slowest link first).
        strategy: Which mesh axes shard which logical axis, for instance `hfjax.FSDP`.
        forward: Function of (model, batch) that returns what is passed to the loss. It may ask for
            `key`, `example_keys` and `train` by name. None: `model(batch)`, or a bare pytree
            itself.
        axes: {path or pattern: names of dimensions} for parameters whose module names none; `*`
            matches anything, also `/`. A path itself counts first, then the first pattern that
            matches. "auto": names are read from what the model computes on `example`, where a
            matmul's outputs stay apart until another matmul sums over them; `print(layout)` says
            what is left, and why.
        example: A batch, or its shapes: for axes="auto", and costs of a pipeline's unlike layers.
        sync_batch_norm: Whether BatchNorm takes its statistics over the examples of all devices.
        mesh_axes: {name: mesh axis} of a mesh of your own, and of a model that places its arrays
            (`out_sharding=`, `reshard`): `{"x": "data", "y": "tensor", "z": None}`. None: it splits
            nothing. Equal names need no entry.

    Raises:
        ValueError: A parameter cannot be sharded as the strategy says, or has no floating dtype; a
            part of the strategy would shard nothing on this mesh; `axes` or `mesh_axes` do not fit.

    Example:
        >>> import hfjax, optax
        >>> from hfjax.models.gpt import GPT, GPTConfig
        >>> model = lambda rngs: GPT(GPTConfig.tiny(), rngs=rngs)
        >>> mesh = hfjax.make_mesh(fsdp=4, tensor=2)
        >>> layout = hfjax.layout(model, optax.adamw(3e-4), mesh, hfjax.FSDP | hfjax.TENSOR)
        >>> list(layout.specs["layers/mlp/up/kernel"])  # layers, embed, mlp
        [None, 'fsdp', 'tensor']

        A model without names:

        >>> import jax, jax.numpy as jnp
        >>> model = lambda rngs: {"up": jnp.ones((8, 64)), "down": jnp.ones((64, 8))}
        >>> forward = lambda w, x: jax.nn.relu(x @ w["up"]) @ w["down"]
        >>> options = {"forward": forward, "axes": "auto", "example": jnp.ones((16, 8))}
        >>> hfjax.layout(model, optax.sgd(0.1), mesh, hfjax.TENSOR, **options).axes
        {'down': ('mlp', None), 'up': (None, 'mlp')}
    """
    check_arguments(model_init, optimizer, mesh, strategy)
    mesh = as_mesh(mesh, mesh_axes)
    check_splits(strategy, mesh)
    check_own_process(mesh)
    placer = Placer(mesh, strategy)
    template = make_template(model_init, placer, forward, sync_batch_norm, mesh_axes)
    check_has_parameters(template)
    check_per_example_variables(template, mesh)
    check_axes_of_model(template, mesh)
    check_marks(template)
    check_dtypes(template)
    names, template = find_names(axes, template, forward, example, mesh, strategy)
    arrays = {
        path: Array(path, tuple(p.shape), template.axes(path, names), template.takes_shards(path))
        for path, p in template.parameters.items()
    }
    optimizer = bind_axes(optimizer, arrays, PACKED)
    param_specs = {
        path: place_array(array, template.parameters[path].dtype, strategy, mesh)
        for path, array in arrays.items()
    }
    source = Source(mesh, strategy, template, arrays, example)
    storage = make_storage(source, None)
    new_layout = Layout(mesh, strategy, optimizer, template, arrays, param_specs, storage, forward)
    new_layout = arrange_layers(new_layout, source.even_arrangement(param_specs))
    tuple(unmatched(source, new_layout.storage.packed is not None))  # called for its checks
    check_master(optimizer, nest(template.parameters))
    check_update_arguments(optimizer, nest(template.parameters))
    check_matrices(optimizer, template.parameters, arrays)
    new_layout.host_memory.check()
    if new_layout.host_memory:
        check_has_host_memory(mesh)
    frozen = [path for path in arrays if template.is_frozen(path)]
    return new_layout.freeze(*frozen) if frozen else new_layout


def arrange_layers(layout: Layout, arrangement: Arrangement | None) -> Layout:
    """Return the layout that stores layers so; None: in the model's order."""
    check_frozen(
        {path for path, p in layout.param_specs.items() if p.frozen}, layout.template, arrangement
    )
    storage = make_storage(layout.storage.source, arrangement)
    param_specs = {
        path: replace(p, dtype=stored_dtype(layout.optimizer, p.dtype))
        for path, p in storage.stored_specs(layout.param_specs).items()
    }
    new_layout = replace(layout, storage=storage, param_specs=param_specs)
    return new_layout._freeze_optimizer() if count_frozen_layers(param_specs) else new_layout
