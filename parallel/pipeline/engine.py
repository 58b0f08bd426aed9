"""The data plane of a pipeline: microbatches go through the stages of the axis `pipe`.

`remat="except_last"` is torchgpipe's: recompute in all microbatches but the last. `waiting` says
how much memory waits between ticks.
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

from hfjax.parallel.adapters.model_template import LAYERS, Blueprint
from hfjax.parallel.engine.example_keys import variables_of
from hfjax.parallel.engine.gradient_engine import Pass, Plane
from hfjax.parallel.engine.step_context import rows_of
from hfjax.parallel.jaxprs.program import bytes_of, piece
from hfjax.parallel.jaxprs.stage_fns import Extras, ModelParts, mean_of
from hfjax.parallel.layer_order import Arrangement
from hfjax.parallel.layer_stack.sharded_model import PlacedModel
from hfjax.parallel.mesh import PIPE_AXIS, in_use, partitioned
from hfjax.parallel.pipeline.executor import Pipeline
from hfjax.parallel.pipeline.idle_slots import (
    after_gathers,
    check_permutes,
    own_axes,
    permuted_axes,
)
from hfjax.parallel.pipeline.overlapped_grad_reduce import LastTick, last_apart
from hfjax.parallel.remat import Remat
from hfjax.parallel.schedules.compile import Ticks
from hfjax.parallel.schedules.table import Table
from hfjax.parallel.strategy import Axes
from hfjax.utils.paths import Flat, Index, Tree


class Staged(Protocol):
    """What makes the functions that stages run: `PlacedModel`, or one of unlike layers."""

    def model(self) -> ModelParts:
        """Return what the executor runs."""
        ...


@dataclass(frozen=True)
class PipelinePlane(Plane):
    """A plane that runs by a table; a microbatch of the step is split again."""

    arrangement: Arrangement  # of the layers on stages
    ticks: Ticks
    unlike: Callable[[PlacedModel], Staged] | None = None  # runs a list of layers, if it is one
    wanted: str | None = None  # "losses" or "outputs": gives `Extras` in place of a Mean
    watch: Callable[[Pipeline], None] | None = None  # shown the executor, within a trace

    def microbatch(self, parameters: Flat, keys: Callable) -> Callable:
        """Return (statistics, batch, number) -> `Pass`, of one microbatch of the step."""
        context = self.context

        def run(statistics: Flat, batch, number: Index) -> Pass:
            model = self.training(parameters, statistics, batch, keys, number)
            gradients, outside, told = self._run(model, rows_of(batch))
            found = gradients | context.reduce_outside(outside)
            gradients = context.pin({path: found[path] for path in context.trained})
            return Pass(gradients, told, statistics)

        return run

    def evaluated(self, parameters: Flat, variables: Flat, batch: Any) -> Any:
        """Return the loss of this device's rows."""
        of = lambda m, layer: variables_of(variables, layer)
        model = self._placed(parameters, batch, of, "eval").model()
        return self._run(model, rows_of(batch))[2]

    def predicted(self, parameters: Flat, variables: Flat, batch: Any) -> Any:
        """Return the outputs of this device's rows, from the last stage."""
        told = replace(self, wanted="outputs").evaluated(parameters, variables, batch)
        return self.context.traced.rows.values(self._from_last_stage(told.outputs))

    @property
    def pieces(self) -> int:
        """In how many microbatches a step splits its rows.

        A haiscale pipe tells the loss of each, so each device keeps its own.
        """
        count = self.context.execution.accumulate * self.ticks.table.microbatches
        return count if self.wanted is None else 1

    def loss_over_devices(self, mean: Any) -> Any:
        """Return a Mean over all rows, or Extras with the means and outputs of all stages."""
        if not isinstance(mean, Extras):
            return self.context.sum(mean)
        outputs = self.context.traced.rows.whole_rows(self._from_last_stage(mean.outputs))
        return Extras(self.context.sum(mean.means), outputs)

    @property
    def loss_specs(self) -> Any:
        """Every device has the means, and the outputs of its own rows."""
        return P() if self.wanted is None else Extras(P(), P(self.context.rows))

    # -- the model on a stage -------------------------------------------------------------------

    def training(
        self, parameters: Flat, statistics: Flat, batch: Any, keys: Callable, number: Index
    ) -> ModelParts:
        """Return the model in three parts for a microbatch of the step, with its random keys."""
        count = self.ticks.table.microbatches
        rows = rows_of(batch) // count

        def variables(m: Index, layer: Index | None) -> Flat:
            return {**variables_of(statistics, layer), **keys(layer, number * count + m, rows)}

        context, placed = self.context, partial(self._placed, parameters, batch, variables, "train")
        if not context.traced.weighed:
            return placed().model()
        weights = known_weights(placed(context.share).model(), count)
        if weights is None:
            weights = jnp.full(count, rows * context.side.size, "float32")
        divisors = context.divisor(weights)
        return replace(placed().model(), divisor=lambda m: divisors[m])

    def _placed(
        self,
        parameters: Flat,
        batch: Any,
        variables: Callable,
        mode: str,
        share: Callable | None = None,
    ) -> Staged:
        """Return the model in three parts for one pass over the microbatches of `batch`."""
        context, count = self.context, self.ticks.table.microbatches
        split = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
        at = lambda m: jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, m, 0, False), split)
        placed = PlacedModel(
            blueprint=context.blueprint,
            arrangement=self.arrangement,
            parameters=parameters,
            movements=context.movements(mode == "train"),
            slots=jax.eval_shape(context.slots),
            variables=variables,
            inputs=lambda m: context.inputs(at(m)),
            mean=lambda outputs, m: context.mean(outputs, at(m)),
            share=share or context.traced.rows.shares,
            rows=context.traced.rows,
            mode=mode,
            policy=context.policy(views=context.options.tells_names),
            wanted=self.wanted,
            keeps_last=context.options.remat.what == "except_last",
            seed=context.traced.seed,
        )
        return placed if self.unlike is None else self.unlike(placed)

    def _run(self, model: ModelParts, rows: int) -> tuple[Any, Any, Any]:
        """Return the gradients of the layers, those of the rest, and the mean (or `Extras`)."""
        offloading = self.offloading
        ticks, last = self.ticks, None
        if self.summed_in_last_tick and ticks.table.trains:
            self.context.traced.summed.update(self.summed_in_last_tick)
            ticks, last = last_apart(ticks), LastTick(ticks.table, self._sum_layer)
        asked = {"in_order": self.in_order, "branches": self.branches}
        pipeline = Pipeline(ticks, model, self.unroll, offloading, last=last, **asked)
        if self.watch is not None:
            self.watch(pipeline)
        layers, outside, told = pipeline.run()
        if self.wanted is None:
            return layers, outside, jax.tree.map(lambda x: x.sum(0), told)
        by_row = lambda x: x.reshape(-1, *x.shape[2:])
        begin = self.ticks.table.microbatches, rows // self.ticks.table.microbatches
        outputs = self.context.traced.rows.first(told.outputs, begin)
        return layers, outside, Extras(told.means, jax.tree.map(by_row, outputs))

    @property
    def offloading(self) -> Callable | None:
        """What chooses the tensors of a layer that go to the host; None: nothing goes."""
        options = self.context.options
        if options.keeps_all:
            return None
        return lambda tensors, layers: options.choose(tensors, "layers", layers)

    def in_order(self) -> bool:
        """Return whether layers that have been traced have collectives of their own, on a CPU."""
        own = own_axes(self.context.mesh)
        return self.context.platform == "cpu" and bool(own or self.context.traced.rows.joins)

    def branches(self, program: Callable) -> Callable | None:
        """Return how idle slots skip their layers: as `lax.cond` does; None: they do not.

        `program()` traces a layer. What it gathers stays outside of the branch, where XLA starts it
        early; not in a table in which idle slots are many, since all of them would gather.
        """
        table, schedule = self.ticks.table, self.context.execution.schedule
        wanted = "auto" if schedule is None else schedule.branches
        if wanted is False:
            return None
        permuted = permuted_axes(program().jaxpr)
        if table.branches or wanted is True:
            check_permutes(
                permuted, f"schedule {table.name}" + ", branches=True" * (wanted is True)
            )
            return lax.cond if table.branches else after_gathers
        return None if permuted or self._own_collectives or self._waits_on_host else after_gathers

    @property
    def _own_collectives(self) -> bool:
        """Whether layers that have been traced send anything but their parameters."""
        mesh, told = self.context.mesh, self.context.traced.rows.told
        joined = any(told[part] for part in told if part.startswith(("layers", "between")))
        return bool(joined or own_axes(mesh) or partitioned(mesh))

    @property
    def _waits_on_host(self) -> bool:
        """Whether XLA would copy what lies on the host for each branch: not on a CPU."""
        return self.offloading is not None and self.context.platform != "cpu"

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
    def summed_in_last_tick(self) -> dict[str, Axes]:
        """Path -> axes over which the gradient of a layer is summed in the last tick.

        Nothing may be added later, and no stage may skip it; small ones go together afterwards.
        """
        context, run = self.context, self.context.execution
        if run.accumulate > 1 or run.reduction == "hierarchical" or self.ticks.table.branches:
            return {}
        large = [p for p in map(context.placed.get, context.trained) if p and not p.small]
        axes = {p.path: context.summed_over(p) for p in large if p.path.startswith(LAYERS)}
        return {path: over for path, over in axes.items() if over}

    def _sum_layer(self, gradients: Flat) -> Flat:
        """Return the gradients of a layer, the large ones summed over devices."""

        def add(path: str, gradient: jax.Array, axes: Axes) -> jax.Array:
            sent = self.context.movement(self.context.placed[path]).reduce_dtype
            return lax.psum(gradient.astype(sent), axes).astype(gradient.dtype)

        large = self.summed_in_last_tick
        return gradients | {p: add(p, gradients[p], axes) for p, axes in large.items()}

    # -- between stages -------------------------------------------------------------------------

    def _from_last_stage(self, outputs: Any) -> Any:
        """Return on every stage what is zero on all but the last.

        In float32 on a CPU: its compiler aborts on a sum in bfloat16.
        """
        if not in_use(self.context.mesh, (PIPE_AXIS,)):
            return outputs

        def send(x: jax.Array) -> jax.Array:
            narrow = self.context.platform == "cpu" and x.dtype == jnp.bfloat16
            return lax.psum(x.astype(jnp.float32) if narrow else x, PIPE_AXIS).astype(x.dtype)

        return jax.tree.map(send, outputs)


def known_weights(model: ModelParts, count: int) -> jax.Array | None:
    """Return the weight of each microbatch, [M]; None where it follows from what layers compute.

    Every stage knows the batch, so each computes them before the first tick.
    """
    m = jnp.int32(0)
    x = jax.eval_shape(model.first, model.outside, m)
    program = piece(lambda x, m: mean_of(model.last(model.outside, x, m)[1]).weight, x, m)
    part = program.part(program.outputs)
    *of_x, number = program.inputs
    if part.reads.intersection(of_x):
        return None
    weight = lambda m: part(*[None] * len(of_x), m)[0]
    if number not in part.reads:
        return jnp.broadcast_to(weight(m), (count,))
    return jax.vmap(weight)(lax.iota("int32", count))


def no_permutes(table: Table, listed: bool, remat: Remat, blueprint: Blueprint) -> str | None:
    """Return why no layer can permute in a pipeline: it has branches, and one in them waits."""
    branches = {
        "layers of two kinds have a branch for each": _has_kinds(blueprint),
        f"schedule {table.name} has branches": table.branches,
        "a pipeline of a list of layers has a branch for each": listed,
        'remat="except_last" has branches': remat.what == "except_last",
    }
    why = next((why for why, so in branches.items() if so), None)
    return why and f"{why}, and a permute in one waits for ever"


# what waits -> the rings (and queues) that it lies in
WAITING = {
    "activations": ("stash", "late", "cross", "kept"),
    "messages": ("x", "dy", "sent", "made"),
}


def waiting(
    plane: PipelinePlane,
    parameters: Flat,
    variables: Flat,
    batch: Any,
    step: jax.Array | jax.ShapeDtypeStruct,
) -> Mapping[str, tuple[int, int]]:
    """Return what waits on a stage: {"activations": (bytes on the device, on the host), …}."""
    told: dict[str, Any] = {}

    def note(pipeline: Pipeline) -> None:
        program, shapes = jax.make_jaxpr(pipeline.start, return_shape=True)()
        told.update(jax.tree.structure(shapes).unflatten(program.out_avals))  # with their memory

    jax.eval_shape(replace(plane, watch=note).gradients, parameters, variables, batch, step)
    return {what: _bytes([told.get(n) for n in names]) for what, names in WAITING.items()}


def _bytes(tree: Tree) -> tuple[int, int]:
    leaves = jax.tree.leaves(tree)
    on_host = [getattr(x, "memory_space", None) == jax.memory.Space.Host for x in leaves]
    host = [x for x, there in zip(leaves, on_host, strict=True) if there]
    return bytes_of(leaves) - bytes_of(host), bytes_of(host)


def _has_kinds(blueprint: Blueprint) -> bool:
    """Return whether layers take a branch by a variable: one marked `chooses_branch=True`."""
    marked = lambda v: isinstance(v, nnx.Variable) and v.get_metadata("chooses_branch", False)
    return any(map(marked, blueprint.variables.values()))
