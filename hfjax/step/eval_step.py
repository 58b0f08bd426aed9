"""Forward only: the loss of a batch (`eval_step`), or the outputs of the model (`predict_step`)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from hfjax.checks.check_step import check_execution, check_state_shardings, check_step_arguments
from hfjax.checks.deadlock import check_deadlock
from hfjax.checks.jax_errors import explain_errors
from hfjax.parallel.adapters.forward_signature import requested_names
from hfjax.parallel.execution import Execution
from hfjax.parallel.jaxprs.model_mesh import without_mesh
from hfjax.parallel.precision.dtypes import AUTO
from hfjax.parallel.schedules.named import Schedule
from hfjax.parallel.spmd.partition_context import CommEvent
from hfjax.sharding.check_state import check_alive, check_layout, check_state_shapes, is_traced
from hfjax.sharding.layout import Layout, State
from hfjax.sharding.reorder_layers import rearrange
from hfjax.sharding.stage_assignment import assign_stages, evaluation_table
from hfjax.sharding.xla_options import options_for
from hfjax.step import build
from hfjax.step.batches import check_batch, missing_examples, place_batch
from hfjax.step.extra_arrays import IN_EVALUATION, check_extra
from hfjax.step.step_spec import precision_for
from hfjax.utils.keywords import check_keywords
from hfjax.utils.mean import Mean, mean_metrics
from hfjax.utils.paths import Flat, Tree, flatten

Metrics = dict[str, jax.Array]
FIELDS = ("precision", "schedule", "compiler_options", "kernels", "context")  # of `Execution`


def eval_step(layout: Layout, loss: Callable, **execution: Any) -> Callable:
    """Return (state, batch) -> metrics, jitted: no dropout, no gradient, nothing donated.

    A pipeline runs forward only.

    Args:
        layout: The layout of the state, as `hfjax.layout` returns it.
        loss: Function of (outputs, batch), as `train_step` takes it.
        execution: Fields of `hfjax.Execution` as keywords: precision (auto, as in `train_step`),
            compiler_options, kernels, context; schedule (that of the training step: a state whose
            layers are stored in another order is reordered in each call).

    Returns:
        A function whose metrics are loss, weight, and those of the loss by name.

    Example:
        >>> import hfjax, numpy as np, optax
        >>> from flax import nnx
        >>> model = lambda rngs: nnx.Linear(8, 4, rngs=rngs)
        >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP)
        >>> evaluate = hfjax.eval_step(layout, lambda outputs, batch: (outputs**2).mean())
        >>> metrics = evaluate(hfjax.init(layout), np.zeros((16, 8), np.float32))
        >>> float(metrics["loss"]), float(metrics["weight"])  # a mean weighs an example by 1
        (0.0, 16.0)
    """
    check_keywords("eval_step", execution, ("layout", "loss", *FIELDS))
    check_step_arguments(layout, loss)
    check_extra(None, {"the loss": loss, "forward": layout.forward}, IN_EVALUATION)
    layout, schedule, eval_execution = _prepare_forward(layout, **execution)

    def evaluate(params: Tree, variables: Flat, batch: Any) -> Metrics:
        spec = build.step_spec(
            layout, loss, eval_execution, evaluation_table(layout, schedule, batch)
        )
        with explain_errors(layout, batch):
            engine = build.probe_engine(spec, flatten(variables), batch, "eval")
            mean = engine.evaluate(flatten(params), flatten(variables), batch)
        metrics = {"loss": mean.total / mean.weight} | mean_metrics(mean)
        return layout.template.after_step(flatten(variables), metrics)[1]

    return _jit_step(layout, evaluate, options_for(layout, eval_execution))


def predict_step(layout: Layout, forward: Callable | None = None, **execution: Any) -> Callable:
    """Return (state, batch) -> outputs of the model, jitted: nothing is random or donated.

    They are what `model(batch)` returns on one device in evaluation mode: any pytree of arrays.
    Outputs with a batch dimension stay sharded over the devices; others are replicated. (In a
    pipeline the first dimension of outputs is the batch.) Devices that share examples each get
    them in full. A batch size that does not divide by the devices is padded, and the padding
    dropped from the outputs, which are then sharded as XLA chooses (`x.shape[0]` counts their
    examples); it is refused where the model has cross-example operations, and with several
    processes.

    Args:
        layout: The layout of the state, as `hfjax.layout` returns it.
        forward: Function of (model, batch) that returns the outputs. None: that of the layout.
        execution: Fields of `hfjax.Execution` as keywords: precision (auto, as in `train_step`),
            compiler_options, kernels, context; schedule (that of the training step: a state whose
            layers are stored in another order is reordered in each call).

    Example:
        >>> import hfjax, numpy as np, optax
        >>> from flax import nnx
        >>> model = lambda rngs: nnx.Linear(8, 4, rngs=rngs)
        >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP)
        >>> predict = hfjax.predict_step(layout)
        >>> outputs = predict(hfjax.init(layout), np.ones((16, 8), np.float32))
        >>> outputs.shape, outputs.addressable_shards[0].data.shape
        ((16, 4), (2, 4))
        >>> named = hfjax.predict_step(layout, lambda model, x: {"y": model(x), "x": x})
        >>> sorted(named(hfjax.init(layout), np.ones((16, 8), np.float32)))
        ['x', 'y']
    """
    check_keywords("predict_step", execution, ("layout", "forward", *FIELDS))
    check_layout(layout)
    requested_names(forward)  # called for its checks
    layout = layout if forward is None else replace(layout, forward=forward)
    check_extra(None, {"forward": layout.forward}, IN_EVALUATION)
    layout, schedule, eval_execution = _prepare_forward(layout, **execution)

    comms: list[CommEvent] = []  # cross-example operations, once it is traced

    def predict(params: Tree, variables: Flat, batch: Any) -> Any:
        table = evaluation_table(layout, schedule, batch)
        spec = build.step_spec(layout, _no_loss, eval_execution, table)
        with explain_errors(layout, batch):
            engine = build.probe_engine(spec, flatten(variables), batch, "predict")
            outputs = engine.predict(flatten(params), flatten(variables), batch)
        comms[:] = engine.context.trace.global_batch.comms
        return outputs

    return _pad_batches(
        layout, _jit_step(layout, predict, options_for(layout, eval_execution)), comms
    )


def _pad_batches(layout: Layout, step: Callable, comms: Sequence[CommEvent]) -> Callable:
    """Return a step that takes any batch size: it repeats the last example, and drops the rest."""

    @without_mesh
    def padded_step(state: State, batch: Any) -> Any:
        if not (padding := missing_examples(layout, batch)):
            return step(state, batch)
        num_examples = jax.tree.leaves(batch)[0].shape[0]
        outputs = step(state, jax.tree.map(lambda x: _repeat_last(x, padding), batch))
        begins = lambda x: _begins_with_examples(x, num_examples + padding)
        all_per_example = all(map(begins, jax.tree.leaves(outputs)))
        if comms or not all_per_example:
            location = f" ({comms[0].line})" if comms else ""
            raise ValueError(
                f"a batch of {num_examples} examples does not divide by the devices that split the "
                f"batch, and examples meet in the model{location}: padded ones would take part. "
                f"Give {num_examples + padding} examples, or a mesh by which {num_examples} divide."
            )
        return jax.tree.map(lambda x: x[:num_examples], outputs)

    return padded_step


def _begins_with_examples(x: jax.Array, num_examples: int) -> bool:
    """Return whether an output's first dimension has the examples, and so is sharded."""
    is_sharded = isinstance(x, Tracer) or x.sharding.shard_shape(x.shape) != x.shape
    return x.shape[:1] == (num_examples,) and is_sharded


def _repeat_last(x: jax.Array | np.ndarray, count: int) -> jax.Array | np.ndarray:
    """Return an array with its last example repeated `count` more times."""
    numpy: Any = jnp if isinstance(x, jax.Array) else np
    return numpy.concatenate([x, numpy.repeat(x[-1:], count, axis=0)])


def _no_loss(outputs: Any, batch: Any) -> Mean:
    """Return no loss."""
    return Mean(jnp.zeros(()), jnp.ones(()))


def _prepare_forward(
    layout: Layout, schedule: Schedule | None = None, **execution: Any
) -> tuple[Layout, Schedule | None, Execution]:
    """Return the layout on a schedule's stages, the schedule, and the forward pass's execution."""
    layout = assign_stages(layout, schedule)
    forward = None if schedule is None else Schedule("forward", branches=schedule.branches)
    precision = precision_for(layout, execution.pop("precision", AUTO))
    eval_execution = Execution(schedule=forward, precision=precision, **execution)
    check_execution(layout, eval_execution)
    return layout, schedule, eval_execution


def _jit_step(layout: Layout, forward: Callable, options: dict[str, Any] | None) -> Callable:
    """Return (state, batch) -> what `forward(params, variables, batch)` returns, jitted."""

    def checked_forward(params: Tree, variables: Flat, batch: Any) -> Any:
        check_state_shapes(layout, State(None, params, None, variables), optimizer=False)
        return forward(params, variables, batch)

    jitted = check_deadlock(jax.jit(checked_forward, compiler_options=options), layout.mesh)
    nested = jax.jit(checked_forward)  # within a user's program, whose options apply

    @without_mesh
    def step(state: State, batch: Any) -> Any:
        if is_traced((state, batch)):
            check_batch(layout, batch, 1)
            return nested(state.params, state.variables, batch)
        check_alive(state)
        batch = place_batch(layout, batch)
        state = rearrange(layout, state)
        try:
            return jitted(state.params, state.variables, batch)
        except (TypeError, ValueError):
            check_state_shapes(layout, state, optimizer=False)
            check_state_shardings(layout, state)
            raise

    return step
