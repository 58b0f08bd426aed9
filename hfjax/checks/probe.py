"""The programs of a model's components, read before a step runs them.

They are traced at global shapes by the functions that the step itself calls, so that the step finds
them traced (`reuse_programs`). The operations of modules read which attentions the model calls,
`upcasts.py` the dtypes of its matmuls.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hfjax.parallel.adapters.model_template import LAYERS, Layer, fill, raw_value
from hfjax.parallel.engine.example_keys import local_keys
from hfjax.parallel.engine.model_ops import Component
from hfjax.parallel.engine.step_context import StepContext, num_examples
from hfjax.parallel.layer_stack.embed_and_head import MethodCall
from hfjax.parallel.layer_stack.run_layers import LayerCall, exact_statics
from hfjax.parallel.spmd.interpreter import global_shapes
from hfjax.parallel.spmd.partition_context import trace_global
from hfjax.parallel.spmd.placements import AxisGroup
from hfjax.parallel.whole_model.model import ModelCall
from hfjax.parallel.whole_model.unshard_on_use import hide_mesh
from hfjax.utils.paths import Flat


def trace_components(
    context: StepContext, variables: Flat, batch: Any, mode: str, group: AxisGroup
) -> Iterator[Component]:
    """Yield the components of a model; of stacked layers the first stands for all.

    Args:
        context: The context of the step.
        variables: Those of the model, also those that hold random keys.
        batch: With the examples of this device, as the model reads it.
        mode: "train", "eval" or "predict".
        group: The devices that share a global batch.
    """
    global_batch, template = context.trace.global_batch, context.template
    values = (
        global_batch.variable_values(variables, template.variables),
        global_batch.as_sharded(batch),
    )
    variables, batch = global_shapes(global_batch.group, values)
    if context.is_layer_stack:
        yield from _stack_components(context, variables, batch, mode, group)
    else:
        yield _whole_component(context, variables, batch, mode, group)


def _whole_component(
    context: StepContext, variables: Flat, batch: Any, mode: str, group: AxisGroup
) -> Component:
    extra, parameters = context.trace.extra, compute_shapes(context)
    predicts, mode = mode == "predict", "train" if mode == "train" else "eval"
    call = ModelCall(context, mode, not predicts, predicts, extra)
    with hide_mesh():
        arrays = extra.split()[1] if extra else ()
        program, _ = trace_global(group, call, parameters, variables, batch, arrays)
    return Component(program, sorted(parameters))


def _stack_components(
    context: StepContext, variables: Flat, batch: Any, mode: str, group: AxisGroup
) -> Iterator[Component]:
    template, mode = context.template, "train" if mode == "train" else "eval"
    parameters, precision = compute_shapes(context), context.execution.precision
    outside = {path: x for path, x in parameters.items() if not path.startswith(LAYERS)}

    def trace_method(method: str, x: Any) -> tuple[Component, Any]:
        call = MethodCall(template, mode, method, getattr(precision, "enters", None))
        program, (y, _) = trace_global(group, call, outside, variables, x)
        return Component(program, sorted(outside)), y

    embed, x = trace_method("embed", jax.eval_shape(context.cast_inputs, batch))
    yield embed
    times = 1 if template.is_layer_list else template.num_layers
    for layer in template.layers(mode):
        component, x = _trace_layer(layer, parameters, variables, x, group, template.stacked)
        yield component._replace(times=times)
    yield trace_method("head", x)[0]


def _trace_layer(
    layer: Layer, parameters: Flat, variables: Flat, x: Any, group: AxisGroup, stacked: bool
) -> tuple[Component, Any]:
    """Return a layer as a component, and the shapes of its output."""
    if not isinstance(layer.graph, nnx.GraphDef):  # a function, as nnx.Sequential may hold
        program, y = trace_global(group, layer.graph, x)
        return Component(program, ()), y
    one = lambda x: jax.ShapeDtypeStruct(x.shape[1:] if stacked else x.shape, x.dtype)
    states = (
        fill(layer.parameters, lambda path: one(parameters[path])),
        fill(layer.variables, lambda path: one(variables[path])),
    )
    call = LayerCall(layer.graph, exact_statics(layer.graph))
    program, (y, _) = trace_global(group, call, *states, x)
    paths = fill(layer.parameters, lambda path: path)
    return Component(program, jax.tree.leaves(paths)), y


def compute_shapes(context: StepContext) -> Flat:
    """Return the parameters of a model, as shapes, in the dtypes in which a step computes."""
    precision_at = context.execution.precision.at
    params = {path: raw_value(x) for path, x in context.template.parameters.items()}
    dtypes = {path: precision_at(path).of(x.dtype).compute for path, x in params.items()}
    return {path: jax.ShapeDtypeStruct(x.shape, dtypes[path]) for path, x in params.items()}


def probe_local(
    context: StepContext,
    variables: Flat,
    batch: Any,
    mode: str,
    probe: Callable,
    num_microbatches: int = 1,
) -> Any:
    """Return `probe(context, variables, batch, mode)`, traced on one device's shard.

    The batch is a microbatch; the variables that hold random keys are those of its examples.
    """
    findings: list[Any] = []

    def device(variables: Flat, batch: Any) -> tuple:
        batched = context.batched_variables(variables)
        first = lambda x: x[: x.shape[0] // num_microbatches]
        variables, batch = variables | jax.tree.map(first, batched), jax.tree.map(first, batch)
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
