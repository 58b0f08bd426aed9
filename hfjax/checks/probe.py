"""Running a model for a look at it: only the first of its stacked layers.

What is traced so is not run: `probe_model.py` looks which attentions it asks for.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import ClosedJaxpr

from hfjax.parallel.adapters.model_template import is_list, items_of, raw
from hfjax.parallel.engine.example_keys import keys_here
from hfjax.parallel.engine.step_context import StepContext, rows_of
from hfjax.parallel.layer_stack.embed_and_head import entering
from hfjax.parallel.spmd.interpreter import whole_shapes
from hfjax.parallel.spmd.partition_context import traced_whole
from hfjax.parallel.spmd.placements import Side
from hfjax.parallel.whole_model.model import called
from hfjax.utils.paths import Flat


def outputs_of_a_look(
    context: StepContext,
    mode: str,
    parameters: Flat,
    variables: Flat,
    batch: Any,
    times: Callable[[int], AbstractContextManager] = nullcontext,
) -> Any:
    """Return what the model makes of a batch, of stacked layers only the first being run.

    Args:
        context: What is known of the step.
        mode: "train" or "eval".
        parameters: All of them.
        variables: Also those that hold random keys.
        batch: As the model reads it.
        times: What is around a layer that stands for so many.
    """
    model = context.blueprint.merge(parameters, variables, mode)
    enters = getattr(context.execution.precision, "enters", None)
    inputs = context.inputs(batch)
    if not context.in_parts:
        return called(context.forward, model, variables, inputs, mode)
    merge = lambda parameters: context.blueprint.merge(parameters, variables, mode)
    embed = lambda parameters: merge(parameters).embed(inputs)
    x = entering(model.embed(inputs), embed, parameters, enters)
    if is_list(model.layers):
        for layer in items_of(model.layers):
            x = layer(x)
        return model.head(x)
    graph, *arrays = nnx.split(model.layers, nnx.Param, ...)
    with times(jax.tree.leaves(arrays)[0].shape[0]):
        x = nnx.merge(graph, *jax.tree.map(lambda a: a[0], arrays))(x)
    return model.head(x)


def traced_look(
    context: StepContext,
    variables: Flat,
    batch: Any,
    mode: str,
    side: Side,
    times: Callable[[int], AbstractContextManager] = nullcontext,
) -> ClosedJaxpr:
    """Return the program of a look at a model that sees the whole rows of the devices of a side.

    The arguments are those of `outputs_of_a_look`; `mode` may be "predict", which is "eval" here.
    """
    rows, mode = context.traced.rows, "train" if mode == "train" else "eval"
    held = rows.of_variables(variables, context.blueprint.variables)
    shapes = whole_shapes(rows.side, (held, rows.values(batch)))
    look = partial(outputs_of_a_look, context, mode, times=times)
    return traced_whole(side, look, computed_shapes(context), *shapes)[0]


def computed_shapes(context: StepContext) -> Flat:
    """Return the parameters of a model, as shapes, in the dtypes in which a step computes."""
    at = context.execution.precision.at
    held = {path: raw(x) for path, x in context.blueprint.parameters.items()}
    compute = {path: at(path).of(x.dtype).compute for path, x in held.items()}
    return {path: jax.ShapeDtypeStruct(x.shape, compute[path]) for path, x in held.items()}


def looked(context: StepContext, variables: Flat, batch: Any, mode: str, look: Callable) -> Any:
    """Return `look(context, variables, batch, mode)`, traced on what one device has.

    The variables that hold random keys are those of the rows there.
    """
    found: list[Any] = []

    def device(variables: Flat, batch: Any) -> tuple:
        if mode == "train":
            known, rows = context.blueprint.variables, rows_of(batch)
            keys, statistics = keys_here(known, context.mesh, variables, rows, jnp.int32(0))
            variables = {**statistics, **keys(None, 0, rows)}
        found.append(look(context, variables, batch, mode))
        return ()

    in_specs = (context.variable_specs(variables), context.batch_spec)
    jax.eval_shape(context.shard_map(device, in_specs, ()), variables, batch)
    return found[0]
