"""A pipeline object: `forward_backward` computes gradients, any optax optimizer applies them.

After haiscale's GPipe, PipeDream and Interleaved1F1B:

pipe = PipeDream(partition(layers, stages=4), microbatches=8)
state = optimizer.init(pipe.parameters)
losses, _ = pipe.forward_backward(x, criterion=squares, labels=(y,))
updates, state = optimizer.update(pipe.gradients, state, pipe.parameters)
pipe.parameters = optax.apply_updates(pipe.parameters, updates)
"""

import warnings
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from hfjax.checks.check_step import check_execution, is_traced
from hfjax.checks.deadlock import check_deadlock
from hfjax.compat.haiscale.checks import (
    REMAT,
    check_batch,
    check_like,
    check_mesh,
    check_options,
    check_partition,
    explain_shape_errors,
)
from hfjax.compat.haiscale.partition import (
    Partition,
    model_init,
    replace_params,
    stack_layers,
    to_shapes,
)
from hfjax.parallel.adapters.model_template import LAYERS
from hfjax.parallel.execution import Execution
from hfjax.parallel.make_mesh import make_mesh
from hfjax.parallel.mesh import batch_axes, describe_mesh
from hfjax.parallel.remat import Remat
from hfjax.parallel.schedules.named import Schedule
from hfjax.parallel.strategy import DDP, PIPE, Strategy
from hfjax.sharding.layout import State, layout
from hfjax.sharding.reorder_layers import copy_to, rearrange, to_model_order
from hfjax.sharding.stage_assignment import assign_stages, evaluation_table
from hfjax.sharding.xla_options import options_for
from hfjax.step.batches import check_batch as check_rows, full_array, shard_batch
from hfjax.step.build import engine_for, step_spec
from hfjax.utils.mean import Mean, as_mean
from hfjax.utils.paths import flatten, join_path, nest

MANY = 8  # more programs of one pipe trigger a warning
NEW_CRITERIA = (
    f"this pipe has compiled for {MANY} criteria already. A function that is made anew for every "
    "call is compiled anew: define the criterion once, outside of the loop, and give it what "
    "changes as labels."
)
Parameters = dict[str, Any]  # {"layers": {…}}, each array sharded over its stages


class _JittedProgram(NamedTuple):
    """A jitted program, and one to nest in the user's jit, whose compiler options apply."""

    standalone: Any
    nested: Any

    def __call__(self, *arguments: Any) -> Any:
        return (self.nested if is_traced(arguments) else self.standalone)(*arguments)

    def lower(self, *arguments: Any) -> Any:
        """Return the lowered standalone program."""
        return self.standalone.lower(*arguments)


class Pipe:
    """Layers on the stages of a mesh, and a microbatch schedule: see the subclasses."""

    schedule: ClassVar[str]
    chunked: ClassVar[bool] = False  # several parts of the model per stage

    def __init__(
        self,
        parts: Partition,
        microbatches: int | None = None,
        *,
        mesh: Mesh | None = None,
        strategy: Strategy | None = None,
        remat: str = "never",
        **options: Any,
    ) -> None:
        """Place the layers of a partition on the stages of a mesh.

        Args:
            parts: The layers of each stage, as `hfjax.compat.partition` returns them.
            microbatches: The number of microbatches per batch; required.
            mesh: A mesh whose pipe axis has as many stages as the partition. None: the remaining
                devices shard the batch (data).
            strategy: The sharding strategy; it must shard layers over pipe. None: `hfjax.PIPE`;
                `hfjax.DDP` if one stage has all layers.
            remat: The microbatches whose layers are recomputed in the backward pass: "never",
                "except_last" or "always".
            options: Fields of `Execution`: precision, reduction, reshard_after_forward, unroll,
                compiler_options.
        """
        check_partition(type(self), self.chunked, parts)
        microbatches = check_options(microbatches, remat, options)
        mesh = make_mesh(pipe=parts.stages, data=-1) if mesh is None else check_mesh(mesh, parts)
        schedule = Schedule(self.schedule, microbatches, parts.chunks, balance=parts.counts)
        model_layers = (
            stack_layers(parts.layers) if isinstance(parts.layers, tuple) else parts.layers
        )
        strategy = strategy or (PIPE if parts.stages > 1 else DDP)
        base_layout = layout(model_init(model_layers), optax.identity(), mesh, strategy)
        self._schedule = schedule
        self._execution = Execution(schedule=schedule, remat=Remat(REMAT[remat]), **options)
        self.mesh, self.microbatches, self.layout = (
            mesh,
            microbatches,
            assign_stages(base_layout, schedule),
        )
        check_execution(self.layout, self._execution, training=True)
        self._shardings = self.layout.shardings()
        on_all = lambda x: copy_to(x, self._sharding(P()))
        self._variables = jax.tree.map(on_all, _nest_arrays(model_layers, nnx.Not(nnx.Param)))
        self._shapes = _nest_arrays(to_shapes(model_layers), nnx.Param)
        self.load(_nest_arrays(model_layers, nnx.Param))
        self.parts = replace(parts, layers=_layers_to_shapes(parts.layers))
        self.metrics: dict[str, jax.Array] = {}  # of the last forward_backward, over all examples
        self._gradients: Parameters | None = None
        self._calls = 0
        self._programs: dict[Any, Callable] = {}

    # -- parameters and gradients -------------------------------------------------------------

    @property
    def parameters(self) -> Parameters:
        """The parameters, each on its stage, for an optax optimizer to update.

        The first dimension of an array is the layer, in the order in which stages store them
        (`to_model_order` has the model's order). Layers that differ are packed, one entry a part:
        their optimizer must be elementwise (adam, sgd …; not LAMB, nor a mask by path).
        """
        return self._parameters

    @parameters.setter
    def parameters(self, new: Any) -> None:
        check_like("parameters", new, self._parameters)
        self._parameters = jax.tree.map(_to_sharding, new, self._shardings.params)

    @property
    def gradients(self) -> Parameters:
        """The gradients of the mean over all examples, with the structure of the parameters."""
        if self._gradients is None:
            raise ValueError("there are no gradients yet: call forward_backward first.")
        return self._gradients

    def canonical(self, tree: Parameters | None = None) -> Parameters:
        """Return the parameters, or gradients, in the model's order, for saving.

        Args:
            tree: A tree with the structure of `parameters`, e.g. `gradients`. None: the parameters.

        Example:
            >>> import hfjax
            >>> from flax import nnx
            >>> layers = [nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(4)]
            >>> stages = hfjax.compat.partition(layers, stages=4)
            >>> pipe = hfjax.compat.PipeDream(stages, microbatches=4)
            >>> pipe.canonical()["layers"]["kernel"].shape
            (4, 4, 4)
        """
        params = self._parameters if tree is None else tree
        check_like("canonical", params, self._parameters)
        return to_model_order(self.layout, self._make_state(params, self.layout.order)).params

    def load(self, parameters: Parameters) -> None:
        """Set the parameters from the model's order, as `to_model_order` returns them.

        Args:
            parameters: {"layers": {…}}, with the paths, shapes and dtypes of the layers.

        Example:
            >>> import hfjax, jax
            >>> from flax import nnx
            >>> layers = [nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(4)]
            >>> stages = hfjax.compat.partition(layers, stages=4)
            >>> pipe = hfjax.compat.PipeDream(stages, microbatches=4)
            >>> pipe.load(jax.tree.map(lambda x: 0 * x, pipe.canonical()))
            >>> float(pipe.layers()[0].kernel[...].sum())
            0.0
        """
        check_like("load", parameters, self._shapes)
        state = self._make_state(jax.tree.map(np.array, parameters), None)  # copies
        params = rearrange(self.layout, state).params
        self._parameters = jax.device_put(params, self._shardings.params)

    def layers(self) -> Any:
        """Return the layers in their original form, with the current parameters.

        They are unsharded, in host memory. `load` has an example.
        """
        values = flatten(full_array(self.canonical())["layers"])
        layers = self.parts.layers
        if not isinstance(layers, tuple):
            return replace_params(layers, values)
        if self.layout.template.stacked:
            params_of_layer = lambda i: {path: array[i] for path, array in values.items()}
        else:
            params_of_layer = lambda i: {
                p.partition("/")[2]: x for p, x in values.items() if _layer_index(p) == i
            }
        return [replace_params(layer, params_of_layer(i)) for i, layer in enumerate(layers)]

    def _make_state(self, parameters: Parameters, order: Any) -> State:
        return State(np.int32(0), parameters, optax.EmptyState(), self._variables, order)

    # -- running ------------------------------------------------------------------------------

    def forward_backward(
        self,
        x: Any,
        *,
        criterion: Callable,
        labels: tuple = (),
        return_outputs: bool = False,
        accumulate: bool = False,
    ) -> tuple[jax.Array, Any]:
        """Run the schedule; return (loss of each microbatch, outputs or None).

        `gradients` then has the gradients of the mean over all examples. Microbatch m combines the
        m-th one of every data-parallel device; the loss of one with zero weight is NaN, and it adds
        nothing to the gradients.

        Args:
            x: The input of the first layer, with a leading batch dimension.
            criterion: Function of (outputs, *labels) that returns the mean over its examples, or
                `hfjax.Mean`. Define it once: a new function is compiled anew.
            labels: A tuple of the criterion's arguments after the outputs, with a batch dimension.
            return_outputs: Whether to also return the output of the last layer.
            accumulate: Whether to add to the existing gradients.

        Example:
            >>> import hfjax, numpy as np, optax
            >>> from flax import nnx
            >>> layers = [nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(4)]
            >>> stages = hfjax.compat.partition(layers, stages=4)
            >>> pipe = hfjax.compat.PipeDream(stages, microbatches=4)
            >>> squares = lambda outputs, y: ((outputs - y) ** 2).mean()
            >>> x = y = np.ones((8, 4), np.float32)
            >>> losses, _ = pipe.forward_backward(x, criterion=squares, labels=(y,))
            >>> optimizer = optax.sgd(0.1)
            >>> state = optimizer.init(pipe.parameters)
            >>> updates, state = optimizer.update(pipe.gradients, state, pipe.parameters)
            >>> pipe.parameters = optax.apply_updates(pipe.parameters, updates)
            >>> losses.shape
            (4,)
        """
        batch = self._batch(x, labels, criterion, self.microbatches)
        returns = "outputs" if return_outputs else "losses"
        run = self._program(criterion, returns, self._build_train)
        step = np.int32(self._calls)
        gradients, losses, outputs, self.metrics = run(
            self._parameters, self._variables, batch, step
        )
        add = accumulate and self._gradients is not None
        self._gradients = jax.tree.map(jnp.add, self._gradients, gradients) if add else gradients
        self._calls += 1
        return losses, outputs

    def lower(
        self, x: Any, *, criterion: Callable, labels: tuple = (), return_outputs: bool = False
    ) -> jax.stages.Lowered:
        """Return the lowered program of forward_backward for arrays or shapes, without running it.

        Args:
            x: The input of the first layer, or its shapes.
            criterion: As `forward_backward` takes it.
            labels: As `forward_backward` takes it, or their shapes.
            return_outputs: Whether the program also returns the output of the last layer.

        Example:
            >>> import hfjax, jax
            >>> from flax import nnx
            >>> layers = [nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(4)]
            >>> stages = hfjax.compat.partition(layers, stages=4)
            >>> pipe = hfjax.compat.PipeDream(stages, microbatches=4)
            >>> x = jax.ShapeDtypeStruct((8, 4), "float32")
            >>> lowered = pipe.lower(x, criterion=lambda outputs: (outputs**2).mean())
            >>> hfjax.collectives(lowered).count("permute", "pipe") > 0
            True
        """
        batch = check_batch(x, labels, criterion)
        check_rows(self.layout, batch, self.microbatches)
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._batch_sharding)
        batch = jax.tree.map(shape, batch)
        returns = "outputs" if return_outputs else "losses"
        run = self._program(criterion, returns, self._build_train)
        return run.lower(self._parameters, self._variables, batch, np.int32(0))

    def forward(self, x: Any) -> Any:
        """Return the outputs, forward only: deterministic, no residuals are saved.

        Args:
            x: The input of the first layer, with a leading batch dimension.

        Example:
            >>> import hfjax, numpy as np
            >>> from flax import nnx
            >>> layers = [nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(4)]
            >>> stages = hfjax.compat.partition(layers, stages=4)
            >>> pipe = hfjax.compat.PipeDream(stages, microbatches=4)
            >>> pipe.forward(np.ones((8, 4), np.float32)).shape
            (8, 4)
        """
        batch = self._batch(x, (), _no_loss, 1)
        run = self._program(_no_loss, "outputs", self._build_eval)
        return run(self._parameters, self._variables, batch)

    __call__ = forward

    def evaluate(self, x: Any, *, criterion: Callable, labels: tuple = ()) -> dict[str, jax.Array]:
        """Return the loss (and metrics of the criterion) as means over all examples, forward only.

        Args:
            x: The input of the first layer, with a leading batch dimension.
            criterion: As `forward_backward` takes it.
            labels: As `forward_backward` takes it.

        Example:
            >>> import hfjax, numpy as np
            >>> from flax import nnx
            >>> layers = [nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(4)]
            >>> stages = hfjax.compat.partition(layers, stages=4)
            >>> pipe = hfjax.compat.PipeDream(stages, microbatches=4)
            >>> x = np.zeros((8, 4), np.float32)
            >>> float(pipe.evaluate(x, criterion=lambda outputs: (outputs**2).mean())["loss"])
            0.0
        """
        batch = self._batch(x, labels, criterion, 1)
        run = self._program(criterion, None, self._build_eval)
        return run(self._parameters, self._variables, batch)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.microbatches} microbatches, {describe_mesh(self.mesh)}, "
            f"{len(self.parts.costs)} layers: {list(self.parts.counts)})"
        )

    # -- programs -----------------------------------------------------------------------------

    def _program(self, criterion: Callable, returns: str | None, build: Callable) -> Any:
        """Return the jitted function for a criterion; it compiles once per shape."""
        name = criterion if isinstance(criterion, Hashable) else id(criterion)
        key = (build.__name__, name, returns)
        if key not in self._programs:
            if len(self._programs) == MANY:
                warnings.warn(NEW_CRITERIA, stacklevel=3)
            self._programs[key] = build(criterion, returns)
        return self._programs[key]

    def _build_train(self, criterion: Callable, returns: str) -> Callable:
        table = self._schedule.table(self.parts.stages)
        engine = engine_for(step_spec(self.layout, _make_loss(criterion), self._execution, table))
        engine = replace(engine, returns=returns)

        def run(
            parameters: Parameters, variables: Parameters, batch, step: jax.Array
        ) -> tuple[Parameters, jax.Array, Any, dict[str, jax.Array]]:
            flat = (flatten(parameters), flatten(variables))
            with explain_shape_errors(batch):
                gradients, output, _ = engine.gradients(*flat, batch, step)
            mean = jax.tree.map(lambda x: x.sum(0), output.means)
            scale = lambda path, g: (g / mean.weight).astype(self.layout.param_specs[path].dtype)
            scaled = nest({path: scale(path, g) for path, g in gradients.items()})
            return scaled, output.means.total / output.means.weight, output.outputs, _metrics(mean)

        grad_shardings = {
            path: self._sharding(p.optimizer_state) for path, p in self.layout.param_specs.items()
        }
        return self._jit(
            run,
            (nest(grad_shardings), self._sharding(P()), self._batch_sharding, self._sharding(P())),
        )

    def _build_eval(self, criterion: Callable, returns: str | None) -> Callable:
        execution = self._execution
        eval_execution = Execution(
            precision=execution.precision, compiler_options=execution.compiler_options
        )

        def run(parameters: Parameters, variables: Parameters, batch):
            loss = _make_loss(criterion)
            table = evaluation_table(self.layout, self._schedule, batch)
            engine = engine_for(step_spec(self.layout, loss, eval_execution, table))
            engine = replace(engine, returns=returns)
            with explain_shape_errors(batch):
                output = engine.evaluate(flatten(parameters), flatten(variables), batch)
            return _metrics(output) if returns is None else output.outputs

        return self._jit(run, self._sharding(P()) if returns is None else self._batch_sharding)

    def _jit(self, run: Callable, out_shardings: Any) -> Callable:
        options = options_for(self.layout, self._execution)
        nested = jax.jit(run, out_shardings=out_shardings)
        standalone = jax.jit(run, out_shardings=out_shardings, compiler_options=options)
        return _JittedProgram(check_deadlock(standalone, self.mesh), nested)

    def _sharding(self, spec: P) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    @property
    def _batch_sharding(self) -> NamedSharding:
        return self._sharding(P(batch_axes(self.mesh)))

    # -- batches ------------------------------------------------------------------------------

    def _batch(self, x: Any, labels: tuple, criterion: Callable, microbatches: int) -> Any:
        """Return x and labels as a sharded batch, after checking that they match."""
        batch = check_batch(x, labels, criterion)
        return shard_batch(self.layout, batch, microbatches)


class GPipe(Pipe):
    """All forwards, then all backwards (Huang et al. 2019).

    Example:
        >>> import hfjax
        >>> from flax import nnx
        >>> layers = [nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(4)]
        >>> stages = hfjax.compat.partition(layers, stages=4)
        >>> hfjax.compat.GPipe(stages, microbatches=8, remat="always")
        GPipe(8 microbatches, pipe=4 x data=2, 4 layers: [1, 1, 1, 1])
    """

    schedule = "gpipe"


class PipeDream(Pipe):
    """One forward, one backward, and a flush at the end of each batch (1F1B), as haiscale's.

    The PipeDream whose stages update without a flush is the schedule "pipedream" of `train_step`.

    Example:
        >>> import hfjax
        >>> from flax import nnx
        >>> layers = [nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(4)]
        >>> hfjax.compat.PipeDream(hfjax.compat.partition(layers, stages=4), microbatches=8)
        PipeDream(8 microbatches, pipe=4 x data=2, 4 layers: [1, 1, 1, 1])
    """

    schedule = "1f1b"


class Interleaved1F1B(Pipe):
    """1F1B with several parts of the model on each stage (Narayanan et al. 2021).

    Example:
        >>> import hfjax
        >>> from flax import nnx
        >>> layers = [nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(8)]
        >>> stages = hfjax.compat.partition(layers, stages=4, chunks=2)
        >>> hfjax.compat.Interleaved1F1B(stages, microbatches=8)
        Interleaved1F1B(8 microbatches, pipe=4 x data=2, 8 layers: [1, 1, 1, 1, 1, 1, 1, 1])
    """

    schedule = "interleaved"
    chunked = True


def _to_sharding(x: Any, sharding: NamedSharding) -> jax.Array:
    """Return an array with a sharding: itself if it already has it, otherwise a copy."""
    is_placed = isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim)
    return x if is_placed else copy_to(x, sharding)


def _nest_arrays(layers: Any, which: Any) -> Parameters:
    """Return the arrays of the layers under their paths in the model."""
    flat = nnx.to_flat_state(nnx.state(layers, which))
    paths = {LAYERS + join_path(keys): v.get_raw_value() for keys, v in flat}
    return nest(paths)


def _layers_to_shapes(layers: Any) -> Any:
    return tuple(map(to_shapes, layers)) if isinstance(layers, tuple) else to_shapes(layers)


def _layer_index(path: str) -> int:
    return int(path.partition("/")[0])


def _make_loss(criterion: Callable) -> Callable:
    """Return the criterion as a loss of (outputs, batch), as the engine calls it."""

    def loss(outputs, batch):
        batch_size = jax.tree.leaves(batch)[0].shape[0]
        return as_mean(
            criterion(outputs, *batch["labels"]), batch_size, "what the criterion returns"
        )

    return loss


def _no_loss(outputs: Any) -> Mean:
    return Mean(jnp.zeros(()), jnp.ones(()))


def _metrics(mean: Mean) -> dict[str, jax.Array]:
    metrics = {name: m.total / m.weight for name, m in mean.metrics.items()}
    return {"loss": mean.total / mean.weight, **metrics}
