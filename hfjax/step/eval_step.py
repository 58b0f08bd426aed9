"""Forward only: the loss of a batch (`eval_step`), or the outputs of the model (`predict_step`)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfjax.checks.check_step import check_given, check_place, check_runs
from hfjax.checks.deadlock import checked
from hfjax.checks.jax_errors import calling
from hfjax.checks.probe_model import look
from hfjax.parallel.adapters.forward_signature import asked_by
from hfjax.parallel.engine.gradient_engine import Plane
from hfjax.parallel.execution import Execution
from hfjax.parallel.precision.by_path import by_path
from hfjax.parallel.precision.dtypes import Precision
from hfjax.parallel.schedules.named import Schedule
from hfjax.parallel.spmd.partition_context import Join
from hfjax.sharding.check_state import check_alive, check_form, check_layout, is_traced
from hfjax.sharding.layout import Layout, State
from hfjax.sharding.reorder_layers import rearrange
from hfjax.sharding.stage_assignment import forward_table_of, on_stages
from hfjax.sharding.xla_options import options_of
from hfjax.step import build
from hfjax.step.batches import check_batch, missing_rows, on_devices
from hfjax.utils.keywords import check_keywords
from hfjax.utils.mean import Mean, metrics_of
from hfjax.utils.paths import Flat, Tree, flatten

Metrics = dict[str, jax.Array]
FIELDS = ("precision", "schedule", "compiler_options", "kernels", "context")  # of `Execution`


def eval_step(layout: Layout, loss: Callable, **execution: Any) -> Callable:
    """Return (state, batch) -> metrics, jitted: no dropout, no gradient, nothing donated.

    A pipeline runs forward only.

    Args:
        layout: Where everything lives, as `hfjax.layout` returns it.
        loss: Function of (outputs, batch), as `train_step` takes it.
        execution: Fields of `hfjax.Execution` as keywords: precision, compiler_options, kernels,
            context; schedule (that of the training step: a state whose layers are stored otherwise
            is rearranged in each call).

    Returns:
        A function whose metrics are loss, weight, and those of the loss by name.

    Example:
        >>> import hfjax, numpy as np, optax
        >>> from flax import nnx
        >>> model = lambda rngs: nnx.Linear(8, 4, rngs=rngs)
        >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP)
        >>> evaluate = hfjax.eval_step(layout, lambda outputs, batch: (outputs**2).mean())
        >>> metrics = evaluate(hfjax.init(layout), np.zeros((16, 8), np.float32))
        >>> float(metrics["loss"]), float(metrics["weight"])  # a plain mean weighs each row by 1
        (0.0, 16.0)
    """
    check_keywords("eval_step", execution, ("layout", "loss", *FIELDS))
    check_given(layout, loss)
    layout, schedule, run = _staged(layout, **execution)

    def evaluate(params: Tree, variables: Flat, batch: Any) -> Metrics:
        made_of = build.ingredients(layout, loss, run, forward_table_of(layout, schedule, batch))
        with calling(layout, batch):
            plane = _seeing(made_of, variables, batch, "eval")
            mean = plane.evaluate(flatten(params), flatten(variables), batch)
        metrics = {"loss": mean.total / mean.weight} | metrics_of(mean)
        return layout.blueprint.after_step(flatten(variables), metrics)[1]

    return _step(layout, evaluate, options_of(layout, run))


def predict_step(layout: Layout, forward: Callable | None = None, **execution: Any) -> Callable:
    """Return (state, batch) -> outputs of the model, jitted: nothing is random or donated.

    They are what `model(batch)` returns on one device in evaluation mode: any pytree of arrays.
    What has a row for each row of the batch is split over the devices as it is; what has none is
    whole on each. (In a pipeline outputs begin with the rows.) Devices that share rows each get
    them whole. A number of rows that does not divide by the devices is filled up, and the filling
    dropped from the outputs, whose rows then lie where XLA puts them (`x.shape[0]` counts them); it
    is refused where rows meet in the model, and with several processes.

    Args:
        layout: Where everything lives, as `hfjax.layout` returns it.
        forward: Function of (model, batch) that returns the outputs. None: that of the layout.
        execution: Fields of `hfjax.Execution` as keywords: precision, compiler_options, kernels,
            context; schedule (that of the training step: a state whose layers are stored otherwise
            is rearranged in each call).

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
    asked_by(forward)  # refuses
    layout = layout if forward is None else replace(layout, forward=forward)
    layout, schedule, run = _staged(layout, **execution)

    joins: list[Join] = []  # what joins rows, once it is traced

    def predict(params: Tree, variables: Flat, batch: Any) -> Any:
        table = forward_table_of(layout, schedule, batch)
        made_of = build.ingredients(layout, _no_loss, run, table)
        with calling(layout, batch):
            plane = _seeing(made_of, variables, batch, "predict")
            outputs = plane.predict(flatten(params), flatten(variables), batch)
        joins[:] = plane.context.traced.rows.joins
        return outputs

    return _filling(layout, _step(layout, predict, options_of(layout, run)), joins)


def _seeing(made_of: build.Ingredients, variables: Flat, batch: Any, mode: str) -> Plane:
    """Return the plane that runs a forward pass, once a look at the model has told."""
    plane = build.data_plane(made_of)
    seen = look(plane, made_of.layout.blueprint, flatten(variables), batch, mode)
    return build.data_plane(made_of, seen) if seen else plane


def _filling(layout: Layout, step: Callable, joins: Sequence[Join]) -> Callable:
    """Return a step that takes any number of rows: it repeats the last, and drops what is more."""

    def filled(state: State, batch: Any) -> Any:
        if not (more := missing_rows(layout, batch)):
            return step(state, batch)
        rows = jax.tree.leaves(batch)[0].shape[0]
        outputs = step(state, jax.tree.map(lambda x: _with_more(x, more), batch))
        of_rows = all(x.shape[:1] == (rows + more,) for x in jax.tree.leaves(outputs))
        if joins or not of_rows:
            where = f" ({joins[0].line})" if joins else ""
            raise ValueError(
                f"a batch of {rows} rows does not divide by the devices that hold rows, and rows "
                f"meet in the model{where}: those that are filled in would take part. Give "
                f"{rows + more} rows, or a mesh by which {rows} rows divide."
            )
        return jax.tree.map(lambda x: x[:rows], outputs)

    return filled


def _with_more(x: jax.Array | np.ndarray, more: int) -> jax.Array | np.ndarray:
    """Return an array with its last row so many times more."""
    arrays: Any = jnp if isinstance(x, jax.Array) else np
    return arrays.concatenate([x, arrays.repeat(x[-1:], more, axis=0)])


def _no_loss(outputs: Any, batch: Any) -> Mean:
    """Return no loss."""
    return Mean(jnp.zeros(()), jnp.ones(()))


def _staged(
    layout: Layout, schedule: Schedule | None = None, **execution: Any
) -> tuple[Layout, Schedule | None, Execution]:
    """Return the layout on the stages of a schedule, that, and how a forward pass runs, if so."""
    layout = on_stages(layout, schedule)
    forward = None if schedule is None else Schedule("forward", branches=schedule.branches)
    precision = by_path(execution.pop("precision", Precision()))
    run = Execution(schedule=forward, precision=precision, **execution)
    check_runs(layout, run)
    return layout, schedule, run


def _step(layout: Layout, run: Callable, options: dict[str, Any] | None) -> Callable:
    """Return (state, batch) -> what `run(params, variables, batch)` returns, jitted."""

    def fitting(params: Tree, variables: Flat, batch: Any) -> Any:
        check_form(layout, State(None, params, None, variables), optimizer=False)
        return run(params, variables, batch)

    jitted = checked(jax.jit(fitting, compiler_options=options), layout.mesh)
    within = jax.jit(fitting)  # in a program of the user's, whose options count

    def step(state: State, batch: Any) -> Any:
        if is_traced((state, batch)):
            check_batch(layout, batch, 1)
            return within(state.params, state.variables, batch)
        check_alive(state)
        batch = on_devices(layout, batch)
        state = rearrange(layout, state)
        try:
            return jitted(state.params, state.variables, batch)
        except (TypeError, ValueError):
            check_form(layout, state, optimizer=False)
            check_place(layout, state)
            raise

    return step
