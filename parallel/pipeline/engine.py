"""The data plane of a pipeline: microbatches go through the stages of the axis `pipe`.

`remat="except_last"` is torchgpipe's: recompute in all microbatches but the last. `waiting_bytes`
says how much memory waits between ticks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from hfjax.parallel.adapters.model_template import LAYERS, ModelTemplate
from hfjax.parallel.engine.example_keys import layer_variables
from hfjax.parallel.engine.gradient_engine import GradientEngine, PassOutput
from hfjax.parallel.engine.step_context import num_examples
from hfjax.parallel.jaxprs.program import bytes_of, trace_flat
from hfjax.parallel.jaxprs.stage_fns import PipelineOutput, StageFns, mean_of
from hfjax.parallel.layer_order import Arrangement
from hfjax.parallel.layer_stack.sharded_model import ShardedModel
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
from hfjax.utils.paths import Flat, Index, Tree


class StageModel(Protocol):
    """What makes the functions that stages run: `ShardedModel`, or one of unlike layers."""

    def model(self) -> StageFns:
        """Return what the executor runs."""
        ...


@dataclass(frozen=True)
class PipelineEngine(GradientEngine):
    """A plane that runs by a table; a microbatch of the step is split again."""

    arrangement: Arrangement  # of the layers on stages
    ticks: Ticks
    # Runs a list of layers, if it is one.
    wrap_model: Callable[[ShardedModel], StageModel] | None = None
    returns: str | None = None  # "losses" or "outputs": gives `PipelineOutput` in place of a Mean
    on_build: Callable[[Pipeline], None] | None = None  # shown the executor, within a trace

    def microbatch(self, parameters: Flat, keys: Callable) -> Callable:
        """Return (statistics, batch, number) -> `PassOutput`, of one microbatch of the step."""
        context = self.context

        def run(statistics: Flat, batch, number: Index) -> PassOutput:
            model = self.train_stage_fns(parameters, statistics, batch, keys, number)
            gradients, outer_gradients, loss = self._run(model, num_examples(batch))
            all_gradients = gradients | context.reduce_outside(outer_gradients)
            gradients = context.pin({path: all_gradients[path] for path in context.trainable})
            return PassOutput(gradients, loss, statistics)

        return run

    def eval_local(self, parameters: Flat, variables: Flat, batch: Any) -> Any:
        """Return the loss of this device's rows."""
        variables_at = lambda m, layer: layer_variables(variables, layer)
        model = self._stage_model(parameters, batch, variables_at, "eval").model()
        return self._run(model, num_examples(batch))[2]

    def predict_local(self, parameters: Flat, variables: Flat, batch: Any) -> Any:
        """Return the outputs of this device's rows, from the last stage."""
        output = replace(self, returns="outputs").eval_local(parameters, variables, batch)
        return self.context.trace.global_batch.as_sharded(
            self._broadcast_from_last_stage(output.outputs)
        )

    @property
    def num_microbatches(self) -> int:
        """In how many microbatches a step splits its rows.

        A haiscale pipe tells the loss of each, so each device keeps its own.
        """
        count = self.context.execution.accumulate * self.ticks.table.microbatches
        return count if self.returns is None else 1

    def loss_over_devices(self, mean: Any) -> Any:
        """Return a Mean over all rows, or Extras with the means and outputs of all stages."""
        if not isinstance(mean, PipelineOutput):
            return self.context.sum(mean)
        outputs = self.context.trace.global_batch.replicate_inner(
            self._broadcast_from_last_stage(mean.outputs)
        )
        return PipelineOutput(self.context.sum(mean.means), outputs)

    @property
    def loss_specs(self) -> Any:
        """Every device has the means, and the outputs of its own rows."""
        return P() if self.returns is None else PipelineOutput(P(), P(self.context.batch_axes))

    # -- the model on a stage -------------------------------------------------------------------

    def train_stage_fns(
        self, parameters: Flat, statistics: Flat, batch: Any, keys: Callable, number: Index
    ) -> StageFns:
        """Return the model in three parts for a microbatch of the step, with its random keys."""
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
        """Return the model in three parts for one pass over the microbatches of `batch`."""
        context, count = self.context, self.ticks.table.microbatches
        microbatches = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
        microbatch_at = lambda m: jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, m, 0, False), microbatches
        )
        model = ShardedModel(
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

    def _run(self, model: StageFns, batch_size: int) -> tuple[Any, Any, Any]:
        """Return the gradients of layers, those of the rest, and the mean (or `PipelineOutput`)."""
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
        layer_gradients, outer_gradients, output = pipeline.run()
        if self.returns is None:
            return layer_gradients, outer_gradients, jax.tree.map(lambda x: x.sum(0), output)
        merge_batch = lambda x: x.reshape(-1, *x.shape[2:])
        shape = self.ticks.table.microbatches, batch_size // self.ticks.table.microbatches
        outputs = self.context.trace.global_batch.local_outputs(output.outputs, shape)
        return (
            layer_gradients,
            outer_gradients,
            PipelineOutput(output.means, jax.tree.map(merge_batch, outputs)),
        )

    @property
    def choose_offload(self) -> Callable | None:
        """What chooses the tensors of a layer that go to the host; None: nothing goes."""
        options = self.context.options
        if options.has_no_offload:
            return None
        return lambda tensors, layers: options.choose_offload(tensors, "layers", layers)

    def in_order(self) -> bool:
        """Return whether layers that have been traced have collectives of their own, on a CPU."""
        own = layer_comm_axes(self.context.mesh)
        return self.context.platform == "cpu" and bool(own or self.context.trace.global_batch.comms)

    def branches(self, program: Callable) -> Callable | None:
        """Return how idle slots skip their layers: as `lax.cond` does; None: they do not.

        `program()` traces a layer. What it gathers stays outside of the branch, where XLA starts it
        early; not in a table in which idle slots are many, since all of them would gather.
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
        """Whether layers that have been traced send anything but their parameters."""
        mesh, comms = self.context.mesh, self.context.trace.global_batch.component_comms
        has_comms = any(
            comms[section] for section in comms if section.startswith(("layers", "between"))
        )
        return bool(has_comms or layer_comm_axes(mesh) or auto_axes(mesh))

    @property
    def _waits_on_host(self) -> bool:
        """Whether XLA would copy what lies on the host for each branch: not on a CPU."""
        return self.choose_offload is not None and self.context.platform != "cpu"

    @property
    def unroll(self) -> int | bool:
        """How many layers of a stage follow each other without a loop.

        On a CPU all, if nothing is recomputed: with one stage XLA would merge what is recomputed
        with what it was computed from, and apart they are a copy of the stage's parameters more.
        """
        context = self.context
        if context.execution.unroll is not None:
            return context.execution.unroll
        return (context.platform == "cpu" and context.options.remat.what == "none") or 1

    # -- over devices ---------------------------------------------------------------------------

    @cached_property
    def last_tick_axes(self) -> dict[str, Axes]:
        """Path -> axes over which the gradient of a layer is summed in the last tick.

        Nothing may be added later, and no stage may skip it; small ones go together afterwards.
        """
        context, execution = self.context, self.context.execution
        if (
            execution.accumulate > 1
            or execution.reduction == "hierarchical"
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
        """Return on every stage what is zero on all but the last.

        In float32 on a CPU: its compiler aborts on a sum in bfloat16.
        """
        if not in_use(self.context.mesh, (PIPE_AXIS,)):
            return outputs

        def send(x: jax.Array) -> jax.Array:
            is_narrow = self.context.platform == "cpu" and x.dtype == jnp.bfloat16
            return lax.psum(x.astype(jnp.float32) if is_narrow else x, PIPE_AXIS).astype(x.dtype)

        return jax.tree.map(send, outputs)


def microbatch_weights(model: StageFns, count: int) -> jax.Array | None:
    """Return the weight of each microbatch, [M]; None where it follows from what layers compute.

    Every stage knows the batch, so each computes them before the first tick.
    """
    m = jnp.int32(0)
    x = jax.eval_shape(model.embed, model.outer_params, m)
    program = trace_flat(lambda x, m: mean_of(model.head(model.outer_params, x, m)[1]).weight, x, m)
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
    """Return why no layer can permute in a pipeline: it has branches, and one in them waits."""
    branches = {
        "layers of two kinds have a branch for each": _has_layer_kinds(template),
        f"schedule {table.name} has branches": table.branches,
        "a pipeline of a list of layers has a branch for each": is_list,
        'remat="except_last" has branches': remat.what == "except_last",
    }
    why = next((why for why, applies in branches.items() if applies), None)
    return why and f"{why}, and a permute in one waits for ever"


# what waits -> the rings (and queues) that it lies in
WAITING_BUFFERS = {
    "activations": ("stash", "late", "cross", "kept"),
    "messages": ("x", "dy", "sent", "made"),
}


def waiting_bytes(
    engine: PipelineEngine,
    parameters: Flat,
    variables: Flat,
    batch: Any,
    step: jax.Array | jax.ShapeDtypeStruct,
) -> Mapping[str, tuple[int, int]]:
    """Return what waits on a stage: {"activations": (bytes on the device, on the host), …}."""
    state_shapes: dict[str, Any] = {}

    def record_state(pipeline: Pipeline) -> None:
        program, shapes = jax.make_jaxpr(pipeline.init_state, return_shape=True)()
        state_shapes.update(
            jax.tree.structure(shapes).unflatten(program.out_avals)
        )  # with their memory

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
    """Return whether layers take a branch by a variable: one marked `layer_kind=True`."""
    is_marked = lambda v: isinstance(v, nnx.Variable) and v.get_metadata("layer_kind", False)
    return any(map(is_marked, template.variables.values()))
