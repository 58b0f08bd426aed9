"""Probes a model by tracing it: only the first of its stacked layers.

The trace is not run: `probe_model.py` reads which attentions the model calls.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import ClosedJaxpr

from hfjax.parallel.adapters.model_template import is_list, items_of, raw_value
from hfjax.parallel.engine.example_keys import local_keys
from hfjax.parallel.engine.step_context import StepContext, num_examples
from hfjax.parallel.layer_stack.embed_and_head import cast_entry
from hfjax.parallel.spmd.interpreter import global_shapes
from hfjax.parallel.spmd.partition_context import trace_global
from hfjax.parallel.spmd.placements import AxisGroup
from hfjax.parallel.whole_model.model import call_model
from hfjax.utils.paths import Flat


def probe_outputs(
    context: StepContext,
    mode: str,
    parameters: Flat,
    variables: Flat,
    batch: Any,
    repeat: Callable[[int], AbstractContextManager] = nullcontext,
) -> Any:
    """Return the outputs of a model for a batch; of stacked layers only the first runs.

    Args:
        context: The context of the step.
        mode: "train" or "eval".
        parameters: All of them.
        variables: Also those that hold random keys.
        batch: As the model reads it.
        repeat: Context manager around a layer that stands for so many.
    """
    model = context.template.merge(parameters, variables, mode)
    input_dtypes = getattr(context.execution.precision, "enters", None)
    inputs = context.cast_inputs(batch)
    if not context.is_layer_stack:
        extra = context.trace.extra
        return call_model(context.forward, model, variables, inputs, mode, extra)
    merge = lambda parameters: context.template.merge(parameters, variables, mode)
    embed = lambda parameters: merge(parameters).embed(inputs)
    x = cast_entry(model.embed(inputs), embed, parameters, input_dtypes)
    if is_list(model.layers):
        for layer in items_of(model.layers):
            x = layer(x)
        return model.head(x)
    graph, *arrays = nnx.split(model.layers, nnx.Param, ...)
    with repeat(jax.tree.leaves(arrays)[0].shape[0]):
        x = nnx.merge(graph, *jax.tree.map(lambda a: a[0], arrays))(x)
    return model.head(x)


def probe_jaxpr(
    context: StepContext,
    variables: Flat,
    batch: Any,
    mode: str,
    group: AxisGroup,
    repeat: Callable[[int], AbstractContextManager] = nullcontext,
) -> ClosedJaxpr:
    """Return the program of a probe of the model on whole examples, those of an axis group.

    The arguments are those of `probe_outputs`; `mode` may be "predict", which is "eval" here.
    """
    global_batch, mode = context.trace.global_batch, "train" if mode == "train" else "eval"
    variable_shapes = global_batch.variable_values(variables, context.template.variables)
    shapes = global_shapes(global_batch.group, (variable_shapes, global_batch.as_sharded(batch)))
    probe = partial(probe_outputs, context, mode, repeat=repeat)
    return trace_global(group, probe, compute_shapes(context), *shapes)[0]


def compute_shapes(context: StepContext) -> Flat:
    """Return the parameters of a model, as shapes, in the dtypes in which a step computes."""
    precision_at = context.execution.precision.at
    params = {path: raw_value(x) for path, x in context.template.parameters.items()}
    dtypes = {path: precision_at(path).of(x.dtype).compute for path, x in params.items()}
    return {path: jax.ShapeDtypeStruct(x.shape, dtypes[path]) for path, x in params.items()}


def probe_local(
    context: StepContext, variables: Flat, batch: Any, mode: str, probe: Callable
) -> Any:
    """Return `probe(context, variables, batch, mode)`, traced on one device's shard.

    The variables that hold random keys are those of its examples.
    """
    findings: list[Any] = []

    def device(variables: Flat, batch: Any) -> tuple:
        if mode == "train":
            templates, batch_size = context.template.variables, num_examples(batch)
            keys_of, statistics = local_keys(
                templates, context.mesh, variables, batch_size, jnp.int32(0)
            )
            variables = {**statistics, **keys_of(None, 0, batch_size)}
        findings.append(probe(context, variables, batch, mode))
        return ()

    in_specs = (context.variable_specs(variables), context.batch_spec)
    jax.eval_shape(context.shard_map(device, in_specs, ()), variables, batch)
    return findings[0]
