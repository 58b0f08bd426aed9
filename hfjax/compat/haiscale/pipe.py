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
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from hfjax.compat.haiscale.checks import (
    REMAT,
    check_like,
    check_mesh,
    check_options,
    check_partition,
    checked_batch,
)
from hfjax.compat.haiscale.partition import Chain, Partition, model_init, stack_layers
from hfjax.parallel.engine.step_context import num_examples
from hfjax.parallel.jaxprs.model_mesh import without_mesh
from hfjax.parallel.make_mesh import make_mesh
from hfjax.parallel.mesh import describe_mesh
from hfjax.parallel.schedules.named import Schedule
from hfjax.parallel.strategy import DDP, PIPE, Strategy
from hfjax.sharding.layout import State, layout
from hfjax.sharding.reorder_layers import copy_to, rearrange, to_model_order
from hfjax.sharding.xla_options import options_for
from hfjax.step.batches import batch_sharding
from hfjax.step.eval_step import eval_step, predict_step
from hfjax.step.merge_model import to_model
from hfjax.step.train_step import train_step
from hfjax.utils.mean import Mean, as_mean
from hfjax.utils.paths import join_path, nest

MANY = 8  # more criteria of one pipe trigger a warning
NEW_CRITERIA = (
    f"this pipe has compiled for {MANY} criteria already. A function that is made anew for every "
    "call is compiled anew: define the criterion once, outside of the loop, and give it what "
    "changes as labels."
)
Parameters = dict[str, Any]  # {"layers": {…}}, each array sharded over its stages


class Pipe:
    """Layers on the stages of a mesh, and a microbatch schedule: see the subclasses."""

    schedule: ClassVar[str]
    chunked: ClassVar[bool] = False  # several parts of the model per stage

    @without_mesh
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
        defaults = {"schedule": schedule, "remat": REMAT[remat], "precision": "stored"}
        self._options = {**defaults, **options}
        in_eval = ("schedule", "precision", "compiler_options")
        self._eval_options = {name: x for name, x in self._options.items() if name in in_eval}
        self._is_list = isinstance(parts.layers, tuple)
        model = Chain(stack_layers(parts.layers) if self._is_list else parts.layers)
        strategy = strategy or (PIPE if parts.stages > 1 else DDP)
        base_layout = layout(model_init(model), optax.identity(), mesh, strategy)
        self.layout = train_step(base_layout, _no_loss, **self._options).layout
        variables = _nest_arrays(model, nnx.Not(nnx.Param))
        variables = jax.tree.map(copy_to, variables, self.layout.shardings().variables)
        self._state = State(np.int32(0), {}, optax.EmptyState(), variables)
        self.load(_nest_arrays(model, nnx.Param))
        self.mesh, self.microbatches, self.parts = mesh, microbatches, replace(parts, layers=None)
        self.metrics: dict[str, jax.Array] = {}  # of the last forward_backward, over all examples
        self._gradients: Parameters | None = None
        self._predict = predict_step(self.layout, **self._eval_options)
        self._steps: dict[Any, Any] = {}

    # -- parameters and gradients -------------------------------------------------------------

    @property
    def parameters(self) -> Parameters:
        """The parameters, each on its stage, for an optax optimizer to update.

        The first dimension of an array is the layer, in the order in which stages store them
        (`to_model_order` has the model's order). Layers that differ are packed, one entry a part:
        their optimizer must be elementwise (adam, sgd …; not LAMB, nor a mask by path).
        """
        return self._state.params

    @parameters.setter
    def parameters(self, new: Any) -> None:
        check_like("parameters", new, self.parameters)
        params = jax.tree.map(_to_sharding, new, self.layout.shardings().params)
        self._state = replace(self._state, params=params)

    @property
    def gradients(self) -> Parameters:
        """The gradients of the mean over all examples, with the structure of the parameters."""
        if self._gradients is None:
            raise ValueError("there are no gradients yet: call forward_backward first.")
        return self._gradients

    @without_mesh
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
        params = self.parameters if tree is None else tree
        check_like("canonical", params, self.parameters)
        return to_model_order(self.layout, replace(self._state, params=params)).params

    @without_mesh
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
        shapes = self.layout.model_layout.abstract_state().params
        check_like("load", parameters, shapes)
        copies = jax.tree.map(np.array, parameters)
        params = rearrange(self.layout, replace(self._state, params=copies, order=None)).params
        params = jax.device_put(params, self.layout.shardings().params)
        self._state = replace(self._state, params=params, order=self.layout.order)

    @without_mesh
    def layers(self) -> Any:
        """Return the layers in their original form, with the current parameters.

        They are unsharded, on one device. `load` has an example.
        """
        layers = to_model(self.layout, self._state).layers
        if not self._is_list:
            return layers
        if isinstance(layers, nnx.List):
            return list(layers)
        graph, arrays = nnx.split(layers)
        layer = lambda i: nnx.merge(graph, jax.tree.map(lambda x: x[i], arrays))
        return [layer(i) for i in range(len(self.parts.costs))]

    # -- running ------------------------------------------------------------------------------

    @without_mesh
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
        m-th one of every data-parallel device (where examples interact, it has those that it has on
        one device); the loss of one with zero weight is NaN, and it adds nothing to the gradients.

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
        with checked_batch(x, labels, criterion) as batch:
            step = self._step(train_step, criterion, self._options)
            returns = _returns(return_outputs)
            gradients, metrics = step.gradients(self._state, batch, returns=returns)
        self._state = replace(self._state, step=self._state.step + 1)
        self.metrics = {name: metrics[name] for name in ("loss", *gradients.mean.metrics)}
        cast = lambda gradient, parameter: gradient.astype(parameter.dtype)
        new = jax.tree.map(cast, gradients.tree(), self.parameters)
        add = accumulate and self._gradients is not None
        self._gradients = jax.tree.map(jnp.add, self._gradients, new) if add else new
        return metrics["losses"], metrics.get("outputs")

    @without_mesh
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
        sharding = batch_sharding(self.mesh)
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        with checked_batch(x, labels, criterion) as batch:
            step = self._step(train_step, criterion, self._options)
            run = partial(step.gradients, returns=_returns(return_outputs))
            jitted = jax.jit(run, compiler_options=options_for(self.layout, step.execution))
            return jitted.lower(replace(self._state, order=None), jax.tree.map(shape, batch))

    @without_mesh
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
        with checked_batch(x, (), lambda outputs: outputs) as batch:
            return self._predict(self._state, batch)

    __call__ = forward

    @without_mesh
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
        with checked_batch(x, labels, criterion) as batch:
            metrics = self._step(eval_step, criterion, self._eval_options)(self._state, batch)
        return {name: x for name, x in metrics.items() if name != "weight"}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.microbatches} microbatches, {describe_mesh(self.mesh)}, "
            f"{len(self.parts.costs)} layers: {list(self.parts.counts)})"
        )

    def _step(self, make_step: Callable, criterion: Callable, options: dict[str, Any]) -> Any:
        """Return the step of a criterion; it compiles once per shape."""
        key = make_step, criterion if isinstance(criterion, Hashable) else id(criterion)
        if key not in self._steps:
            if len(self._steps) == MANY:
                warnings.warn(NEW_CRITERIA, stacklevel=3)
            self._steps[key] = make_step(self.layout, _make_loss(criterion), **options)
        return self._steps[key]


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


def _nest_arrays(model: nnx.Module, which: Any) -> Parameters:
    """Return the arrays of a model under their paths."""
    flat = nnx.to_flat_state(nnx.state(model, which))
    return nest({join_path(keys): v.get_raw_value() for keys, v in flat})


def _returns(outputs: bool) -> tuple[str, ...]:
    return ("losses", "outputs") if outputs else ("losses",)


def _make_loss(criterion: Callable) -> Callable:
    """Return the criterion as a loss of (outputs, batch)."""

    def loss(outputs, batch):
        value = criterion(outputs, *batch["labels"])
        return as_mean(value, num_examples(batch), "what the criterion returns")

    return loss


def _no_loss(outputs: Any, batch: Any) -> Mean:
    return Mean(jnp.zeros(()), jnp.ones(()))
