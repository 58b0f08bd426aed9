"""The gradient engine of a pipeline: microbatches go through the stages of the mesh axis `pipe`.

`remat="except_last"` is torchgpipe's: recompute in all microbatches but the last. `waiting_bytes`
returns the memory that a stage keeps between ticks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from hfjax.parallel.adapters.model_template import LAYERS, ModelTemplate
from hfjax.parallel.engine.example_keys import layer_variables
from hfjax.parallel.engine.gradient_engine import GradientEngine, PassOutput
from hfjax.parallel.engine.local_outputs import full_examples, local_examples
from hfjax.parallel.engine.step_context import num_examples
from hfjax.parallel.jaxprs.program import trace_flat
from hfjax.parallel.jaxprs.saved_tensor import bytes_of
from hfjax.parallel.jaxprs.stage_fns import StageFns
from hfjax.parallel.layer_order import Arrangement
from hfjax.parallel.layer_stack.bound_model import BoundModel
from hfjax.parallel.mesh import PIPE_AXIS, auto_axes, in_use
from hfjax.parallel.pipeline.executor import Pipeline
from hfjax.parallel.pipeline.idle_slots import (
    check_permutes,
    cond_after_gathers,
    find_permute_axes,
    layer_comm_axes,
)
from hfjax.parallel.pipeline.overlapped_grad_reduce import LastTick, split_last_tick
from hfjax.parallel.remat import Remat
from hfjax.parallel.schedules.compile import Ticks
from hfjax.parallel.schedules.table import Table
from hfjax.parallel.strategy import Axes
from hfjax.utils.mean import Mean
from hfjax.utils.paths import Flat, Index, Tree


class StageModel(Protocol):
    """Makes the functions that stages run: `BoundModel`, or a model of layers that differ."""

    def model(self) -> StageFns:
        """Return the functions that the executor runs."""
        ...


@dataclass(frozen=True)
class PipelineEngine(GradientEngine):
    """A gradient engine that runs a table; it splits each microbatch of the step again."""

    arrangement: Arrangement  # the layers of each stage
    ticks: Ticks
    # Wraps the model if it is a list of layers.
    wrap_model: Callable[[BoundModel], StageModel] | None = None
    on_build: Callable[[Pipeline], None] | None = None  # called with the executor, within a trace

    def microbatch(self, parameters: Flat, keys: Callable) -> Callable:
        """Return (statistics, batch, number) -> `PassOutput`, for one microbatch of the step."""
        context = self.context

        def run(statistics: Flat, batch, number: Index) -> PassOutput:
            model = self.train_stage_fns(parameters, statistics, batch, keys, number)
            gradients, outer_gradients, mean, outputs = self._run(model, num_examples(batch))
            all_gradients = gradients | context.reduce_outside(outer_gradients)
            gradients = context.pin({path: all_gradients[path] for path in context.trainable})
            outputs = full_examples(context.trace.global_batch, outputs)
            return PassOutput(gradients, mean, statistics, outputs=outputs)

        return run

    def eval_local(self, parameters: Flat, variables: Flat, batch: Any) -> Any:
        """Return the loss of this device's examples."""
        return self._forward(parameters, variables, batch)[0]

    def predict_local(self, parameters: Flat, variables: Flat, batch: Any) -> Any:
        """Return the outputs of this device's examples, from the last stage."""
        engine = replace(self, returns=("outputs",))
        outputs = engine._forward(parameters, variables, batch)[1]
        return self.context.trace.global_batch.as_sharded(outputs)

    def _forward(self, parameters: Flat, variables: Flat, batch: Any) -> tuple[Mean, Any]:
        variables_at = lambda m, layer: layer_variables(variables, layer)
        model = self._stage_model(parameters, batch, variables_at, "eval").model()
        return self._run(model, num_examples(batch))[2:]

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches into which a step splits its batch."""
        return self.context.execution.gradient_accumulation_steps * self.ticks.table.microbatches

    def loss_over_devices(self, mean: Mean) -> Mean:
        """Return the mean over the global batch."""
        return self.context.sum(mean)

    # -- the model on a stage -------------------------------------------------------------------

    def train_stage_fns(
        self, parameters: Flat, statistics: Flat, batch: Any, keys: Callable, number: Index
    ) -> StageFns:
        """Return the stages' functions for a microbatch of the step, with its random keys."""
        count = self.ticks.table.microbatches
        batch_size = num_examples(batch) // count

        def variables(m: Index, layer: Index | None) -> Flat:
            return {
                **layer_variables(statistics, layer),
                **keys(layer, number * count + m, batch_size),
            }

        context, make_model = (
            self.context,
            partial(self._stage_model, parameters, batch, variables, "train"),
        )
        if not context.trace.weighted:
            return make_model().model()
        weights = microbatch_weights(make_model(context.share).model(), count)
        if weights is None:
            weights = jnp.full(count, batch_size * context.batch_group.size, "float32")
        divisors = context.divisor(weights)
        return replace(make_model().model(), divisor=lambda m: divisors[m])

    def _stage_model(
        self,
        parameters: Flat,
        batch: Any,
        variables: Callable,
        mode: str,
        share: Callable | None = None,
    ) -> StageModel:
        """Return the layer-stack model for one pass over the microbatches of `batch`."""
        context, count = self.context, self.ticks.table.microbatches
        microbatches = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
        microbatch_at = lambda m: jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, m, 0, False), microbatches
        )
        model = BoundModel(
            template=context.template,
            arrangement=self.arrangement,
            parameters=parameters,
            comm_plans=context.comm_plans(mode == "train"),
            slots=jax.eval_shape(context.slots),
            variables=variables,
            inputs=lambda m: context.cast_inputs(microbatch_at(m)),
            mean=lambda outputs, m: context.mean(outputs, microbatch_at(m)),
            share=share or context.trace.global_batch.as_partial,
            global_batch=context.trace.global_batch,
            mode=mode,
            policy=context.policy(views=context.options.offloads_by_name),
            returns=self.returns,
            keeps_last=context.options.remat.what == "except_last",
            seed=context.trace.seed,
        )
        return model if self.wrap_model is None else self.wrap_model(model)

    def _run(self, model: StageFns, batch_size: int) -> tuple[Any, Any, Mean, Any]:
        """Return gradients of the layers, all other gradients, the Mean, and outputs or None."""
        choose_offload = self.choose_offload
        ticks, last_tick = self.ticks, None
        if self.last_tick_axes and ticks.table.trains:
            self.context.trace.summed.update(self.last_tick_axes)
            ticks, last_tick = split_last_tick(ticks), LastTick(ticks.table, self._reduce_layer)
        options = {"in_order": self.in_order, "branches": self.branches}
        pipeline = Pipeline(
            ticks, model, self.unroll, choose_offload, last_tick=last_tick, **options
        )
        if self.on_build is not None:
            self.on_build(pipeline)
        layer_gradients, outer_gradients, (mean, outputs) = pipeline.run()
        if "losses" not in self.returns:
            mean = jax.tree.map(lambda x: x.sum(0), mean)
        count = self.ticks.table.microbatches
        global_batch = self.context.trace.global_batch
        outputs = local_examples(global_batch, outputs, count, batch_size // count)
        outputs = jax.tree.map(lambda x: lax.collapse(x, 0, 2), outputs)
        outputs = self._broadcast_from_last_stage(outputs)
        return layer_gradients, outer_gradients, mean, outputs

    @property
    def choose_offload(self) -> Callable | None:
        """The function that chooses which residuals of a layer to offload; None: no offload."""
        options = self.context.options
        if options.has_no_offload:
            return None
        return lambda tensors, layers: options.choose_offload(tensors, "layers", layers)

    def in_order(self) -> bool:
        """Return whether, on a CPU, layers traced so far have collectives of their own."""
        own = layer_comm_axes(self.context.mesh)
        return self.context.platform == "cpu" and bool(own or self.context.trace.global_batch.comms)

    def branches(self, program: Callable) -> Callable | None:
        """Return the `lax.cond` with which idle slots skip their layers; None: they do not.

        `program()` traces a layer. Its all-gathers stay outside of the branch, where XLA starts
        them early; not in a table with many idle slots, since all of them would gather.
        """
        table, schedule = self.ticks.table, self.context.execution.schedule
        setting = "auto" if schedule is None else schedule.branches
        if setting is False:
            return None
        permuted = find_permute_axes(program().jaxpr)
        if table.branches or setting is True:
            check_permutes(
                permuted, f"schedule {table.name}" + ", branches=True" * (setting is True)
            )
            return lax.cond if table.branches else cond_after_gathers
        return (
            None
            if permuted or self._has_own_collectives or self._waits_on_host
            else cond_after_gathers
        )

    @property
    def _has_own_collectives(self) -> bool:
        """Whether layers traced so far communicate anything but their parameters."""
        mesh, comms = self.context.mesh, self.context.trace.global_batch.component_comms
        has_comms = any(
            comms[section] for section in comms if section.startswith(("layers", "between"))
        )
        return bool(has_comms or layer_comm_axes(mesh) or auto_axes(mesh))

    @property
    def _waits_on_host(self) -> bool:
        """Whether XLA would copy residuals in host memory for each branch: not on a CPU."""
        return self.choose_offload is not None and self.context.platform != "cpu"

    @property
    def unroll(self) -> int | bool:
        """How many layers of a stage are unrolled.

        On a CPU all, if nothing is recomputed: with one stage XLA would merge recomputed values
        with the originals; kept apart, they cost one more copy of the stage's parameters.
        """
        context = self.context
        if context.execution.unroll is not None:
            return context.execution.unroll
        return (context.platform == "cpu" and context.options.remat.what == "none") or 1

    # -- over devices ---------------------------------------------------------------------------

    @cached_property
    def last_tick_axes(self) -> dict[str, Axes]:
        """Path -> axes over which the gradient of a layer is summed in the last tick.

        Nothing may be added later, and no stage may skip the tick. Small gradients are summed
        together afterwards.
        """
        context, execution = self.context, self.context.execution
        if (
            execution.gradient_accumulation_steps > 1
            or execution.gradient_reduction == "hierarchical"
            or self.ticks.table.branches
        ):
            return {}
        large = [p for p in map(context.param_specs.get, context.trainable) if p and not p.small]
        axes = {p.path: context.grad_sum_axes(p) for p in large if p.path.startswith(LAYERS)}
        return {path: summed for path, summed in axes.items() if summed}

    def _reduce_layer(self, gradients: Flat) -> Flat:
        """Return the gradients of a layer, the large ones summed over devices."""

        def add(path: str, gradient: jax.Array, axes: Axes) -> jax.Array:
            dtype = self.context.comm_plan(self.context.param_specs[path]).reduce_dtype
            return lax.psum(gradient.astype(dtype), axes).astype(gradient.dtype)

        large = self.last_tick_axes
        return gradients | {p: add(p, gradients[p], axes) for p, axes in large.items()}

    # -- between stages -------------------------------------------------------------------------

    def _broadcast_from_last_stage(self, outputs: Any) -> Any:
        """Return the last stage's outputs on every stage; they are zero on all others.

        The sum is in float32 on a CPU: its compiler aborts on a sum in bfloat16.
        """
        if not in_use(self.context.mesh, (PIPE_AXIS,)):
            return outputs

        def send(x: jax.Array) -> jax.Array:
            is_narrow = self.context.platform == "cpu" and x.dtype == jnp.bfloat16
            return lax.psum(x.astype(jnp.float32) if is_narrow else x, PIPE_AXIS).astype(x.dtype)

        return jax.tree.map(send, outputs)


def microbatch_weights(model: StageFns, count: int) -> jax.Array | None:
    """Return the weight of each microbatch, [M]; None if it depends on the layers' outputs.

    Every stage has the batch, so each computes the weights before the first tick.
    """
    m = jnp.int32(0)
    x = jax.eval_shape(model.embed, model.outer_params, m)
    program = trace_flat(lambda x, m: model.head(model.outer_params, x, m)[1][0].weight, x, m)
    weight_program = program.subprogram(program.outputs)
    *of_x, number = program.inputs
    if weight_program.read_vars.intersection(of_x):
        return None
    weight = lambda m: weight_program(*[None] * len(of_x), m)[0]
    if number not in weight_program.read_vars:
        return jnp.broadcast_to(weight(m), (count,))
    return jax.vmap(weight)(lax.iota("int32", count))


def permute_refusal(
    table: Table, is_list: bool, remat: Remat, template: ModelTemplate
) -> str | None:
    """Return why no layer can permute in a pipeline: it has branches, where a permute deadlocks."""
    branches = {
        "layers of two kinds have a branch for each": _has_layer_kinds(template),
        f"schedule {table.name} has branches": table.branches,
        "a pipeline of a list of layers has a branch for each": is_list,
        'remat="except_last" has branches': remat.what == "except_last",
    }
    why = next((why for why, applies in branches.items() if applies), None)
    return why and f"{why}, and a permute in one waits for ever"


# kind of memory -> the buffers (and queues) that it counts
WAITING_BUFFERS = {
    "activations": ("stash", "w_residuals", "b_to_w", "kept"),
    "messages": ("x", "dy", "sent", "made"),
}


def waiting_bytes(
    engine: PipelineEngine,
    parameters: Flat,
    variables: Flat,
    batch: Any,
    step: jax.Array | jax.ShapeDtypeStruct,
) -> Mapping[str, tuple[int, int]]:
    """Return what a stage keeps between ticks: {"activations": (device bytes, host bytes), …}."""
    state_shapes: dict[str, Any] = {}

    def record_state(pipeline: Pipeline) -> None:
        program, shapes = jax.make_jaxpr(pipeline.init_state, return_shape=True)()
        state_shapes.update(
            jax.tree.structure(shapes).unflatten(program.out_avals)
        )  # with their memory space

    jax.eval_shape(
        replace(engine, on_build=record_state).gradients, parameters, variables, batch, step
    )
    return {
        kind: _bytes_by_memory([state_shapes.get(n) for n in names])
        for kind, names in WAITING_BUFFERS.items()
    }


def _bytes_by_memory(tree: Tree) -> tuple[int, int]:
    leaves = jax.tree.leaves(tree)
    on_host = [getattr(x, "memory_space", None) == jax.memory.Space.Host for x in leaves]
    host = [x for x, is_host in zip(leaves, on_host, strict=True) if is_host]
    return bytes_of(leaves) - bytes_of(host), bytes_of(host)


def _has_layer_kinds(template: ModelTemplate) -> bool:
    """Return whether a variable marked `layer_kind=True` chooses the branch of a layer."""
    is_marked = lambda v: isinstance(v, nnx.Variable) and v.get_metadata("layer_kind", False)
    return any(map(is_marked, template.variables.values()))
