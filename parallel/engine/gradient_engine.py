"""The data plane: loss and gradients of one step.

Inside, each device holds its own rows and its own shards. Microbatches run in a scan. Gathers and
scatters of parameters and gradients are in `comm_plan.py`, sums of gradients in
`reduce_gradients.py`. That file also says where and when gradients are reduced: what accumulates
split is scattered in every microbatch, the rest is summed after the scan (with one microbatch,
large ones at once).

How one microbatch runs is what planes differ in. `AutodiffPlane` lets JAX differentiate the whole
model; `parallel/pipeline` runs it by a table, `parallel/layerwise` layer by layer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec as P

from hfjax.parallel.engine.step_context import StepContext, rows_of
from hfjax.parallel.engine.unshard import Stored
from hfjax.parallel.jaxprs.stage_fns import cotangent, mean_of
from hfjax.parallel.spmd.microbatches import deal_rows
from hfjax.parallel.spmd.placements import Cut, Part, is_value, kind_of
from hfjax.utils.mean import Mean
from hfjax.utils.paths import Flat, Index


class StepInputs(NamedTuple):
    """What a step is given: arrays by name, or where they are."""

    parameters: Any
    variables: Any
    moments: Any  # what the optimizer keeps of the layers
    counts: Any  # numbers of the optimizer that belong to no parameter


class Pass(NamedTuple):
    """What the forward and backward passes of a microbatch give."""

    gradients: Flat  # of total / divisor
    told: Any  # a Mean, or `Extras`
    statistics: Flat  # variables after it
    divisor: Any = 1.0  # the same on all devices


@dataclass(frozen=True)
class Plane(ABC):
    """What runs on each device between the parameters at rest and the reduced gradients."""

    context: StepContext

    @abstractmethod
    def microbatch(self, parameters: Flat, keys: Callable) -> Callable:
        """Return (statistics, batch, number) -> `Pass`, of one microbatch.

        `keys(layer or None, number, rows)` are the variables that hold random keys.
        """

    @abstractmethod
    def evaluated(self, parameters: Flat, variables: Flat, batch: Any) -> Any:
        """Return the loss of this device's rows."""

    @abstractmethod
    def predicted(self, parameters: Flat, variables: Flat, batch: Any) -> Any:
        """Return the outputs of the model: a tree of arrays, `Part` and `Sum`."""

    @abstractmethod
    def loss_over_devices(self, mean: Any) -> Any:
        """Return the loss that `microbatch` and `evaluated` tell, of all devices."""

    @property
    @abstractmethod
    def loss_specs(self) -> Any:
        """Where that lies."""

    @property
    @abstractmethod
    def pieces(self) -> int:
        """In how many microbatches, which are to be those of one device, a step splits its rows."""

    def gradients(
        self, parameters: Flat, variables: Flat, batch: Any, step: jax.Array, seed: Any = None
    ) -> tuple:
        """Return (gradients of the total, placed as the moments; Mean; variables written to).

        With a seed, the cotangent of the loss of a microbatch, they are so many times larger.
        A pipeline whose plane has `wanted` returns `Extras` (jaxprs/stage_fns.py), no Mean.
        """
        context = self.context

        def device(parameters: Flat, variables: Flat, batch, step: jax.Array, seed) -> tuple:
            def run(dealt: bool, weighed: bool) -> Pass:
                context.traced.begin(context.placed, 1.0 if seed is None else seed)
                context.traced.weighed = weighed
                keys, statistics = context.keys(variables, rows_of(batch), step, dealt)
                microbatch = self.microbatch(context.gather_once(parameters), keys)
                return self._accumulate(microbatch, statistics, batch, dealt)

            found = self.of_one_device(run, weighed=seed is not None)
            gradients, mean, statistics, divisor = found
            check_traced(context, mean_of(mean))
            gradients = context.reduction(gradients, context.placed)
            gradients = _times(divisor, gradients)
            changed = {p: x for p, x in statistics.items() if p in context.traced.written}
            mean = self.loss_over_devices(mean)
            return gradients, mean, context.average(changed), context.of_rows(changed)

        moments = context.specs("moment")
        gradient_specs = {path: moments[path] for path in context.trained}
        out_specs = (gradient_specs, self.loss_specs, P(), P(context.rows))
        in_specs = (*context.in_specs(variables), P(), P())
        run = context.shard_map(device, in_specs, out_specs)
        gradients, mean, changed, of_rows = run(parameters, variables, batch, step, seed)
        return gradients, mean, changed | of_rows

    def evaluate(self, parameters: Flat, variables: Flat, batch: Any) -> Any:
        """Return the loss as a Mean (a pipeline: or Extras); nothing is random, nothing changes."""
        context = self.context

        def device(parameters: Flat, variables: Flat, batch):
            context.traced.begin(())
            found = self.evaluated(parameters, variables, context.dealt(batch))
            context.check_gathers()
            return self.loss_over_devices(found)

        run = context.shard_map(device, context.in_specs(variables), self.loss_specs)
        return run(parameters, variables, batch)

    def predict(self, parameters: Flat, variables: Flat, batch: Any) -> Any:
        """Return the outputs of the model, split where they have rows; nothing is random."""
        context, known = self.context, []

        def device(parameters: Flat, variables: Flat, batch) -> list[jax.Array]:
            context.traced.begin(())
            outputs = self.predicted(parameters, variables, context.dealt(batch))
            outputs = context.traced.rows.whole_rows(outputs)
            values, form = jax.tree.flatten(outputs, is_leaf=is_value)
            in_one_block = lambda x: isinstance(x, Part) and x.cut.outer == 1
            values = [x if in_one_block(x) else context.side.whole_of(x) for x in values]
            known[:] = form, list(map(kind_of, values))
            context.check_gathers()
            return [x.x if isinstance(x, Part) else x for x in values]

        in_specs, given = context.in_specs(variables), (parameters, variables, batch)
        # On shapes first: which outputs have rows, and where.
        jax.eval_shape(context.shard_map(device, in_specs, P()), *given)
        place = lambda kind: P(*[None] * kind.dim, context.rows) if isinstance(kind, Cut) else P()
        specs = list(map(place, known[1]))
        found = context.shard_map(device, in_specs, specs)(*given)
        whole = lambda x, spec: lax.with_sharding_constraint(x, NamedSharding(context.mesh, spec))
        return known[0].unflatten(map(whole, found, specs))

    def of_one_device(self, run: Callable, weighed: bool = False) -> tuple:
        """Return `run(dealt, weighed)`: rows are dealt as microbatches of one device if it matters.

        It does where rows of a microbatch meet, or count, or are drawn for, where a variable goes
        from one microbatch to the next, or where the rule of a derivative is not linear: the trace
        tells. Then the weight of each microbatch matters too.
        """
        if self.pieces == 1 or self.context.side.size == 1:
            return run(False, True)
        traced, result = jax.make_jaxpr(lambda: run(False, weighed), return_shape=True)()
        told, known = self.context.traced, self.context.blueprint
        goes_on = any(not known.of_rows(path) for path in told.written)
        if goes_on or any(join.how != "alone" for join in told.rows.joins):
            return run(True, True)
        found = jaxpr_as_fun(traced)()
        return jax.tree.unflatten(jax.tree.structure(result), found)

    def dealt(self, batch: Any) -> Any:
        """Return this device's rows as parts of the microbatches of one device."""
        return jax.tree.map(partial(deal_rows, self.context.side, self.pieces), batch)

    def _accumulate(self, microbatch: Callable, statistics: Flat, batch: Any, dealt: bool) -> Pass:
        """Return gradients, Mean and statistics after all microbatches of this device."""
        context, count = self.context, self.context.execution.accumulate
        deal = partial(deal_rows, context.side, self.pieces)
        if dealt:
            batch = self.dealt(batch)
            statistics = statistics | {p: deal(x) for p, x in context.of_rows(statistics).items()}
        batch = context.dealt(batch)
        found = self._one_by_one(microbatch, statistics, batch, count)
        if dealt:
            back = {p: deal(x, back=True) for p, x in context.of_rows(found.statistics).items()}
            found = found._replace(statistics=found.statistics | back)
        return found

    def _one_by_one(self, microbatch: Callable, statistics: Flat, batch: Any, count: int) -> Pass:
        """Return the same of batches that are dealt."""
        context = self.context
        if count == 1:
            return microbatch(statistics, batch, 0)

        def body(carry: tuple, xs: tuple) -> tuple[tuple, tuple]:
            sums, statistics = carry
            of_rows, batch, number = xs
            gradients, mean, held, divisor = microbatch(statistics | of_rows, batch, number)
            gradients = _times(divisor, gradients)
            held, of_rows = ({path: held[path] for path in of} for of in (statistics, of_rows))
            return (jax.tree.map(jnp.add, sums, gradients), held), (mean, of_rows)

        split = lambda tree: jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), tree)
        of_rows = context.of_rows(statistics)
        held = {path: x for path, x in statistics.items() if path not in of_rows}
        xs = (split(of_rows), split(batch), lax.iota("int32", count))
        (gradients, held), (means, of_rows) = lax.scan(body, (context.slots(), held), xs)
        of_rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), of_rows)
        return Pass(gradients, jax.tree.map(lambda x: x.sum(0), means), held | of_rows)


def _times(divisor: Any, gradients: Flat) -> Flat:
    """Return the gradients of a total from those of total / divisor."""
    if isinstance(divisor, float):
        return gradients
    return {path: g * divisor.astype(g.dtype) for path, g in gradients.items()}


def check_traced(context: StepContext, mean: Mean) -> None:
    """Tell, or refuse, what only the trace of a training step shows: every plane calls it."""
    context.warn_of_unread()
    context.check_kept()
    context.check_gathers()
    context.traced.kernels.check_told(mean.metrics)


class Forward(Protocol):
    """What runs a model forward on the rows of a microbatch, before JAX differentiates it."""

    def run(
        self, stored: dict[str, Stored], variables: Flat, batch: Any, mode: str, wants: str = "loss"
    ) -> tuple[Any, Flat]:
        """Return the loss, or the outputs, as values, and the variables after it."""
        ...


class LoopPlane(Plane):
    """A plane that runs one microbatch after the other, each on all devices."""

    def loss_over_devices(self, mean: Mean) -> Mean:
        """Return the mean over the rows of all devices."""
        return self.context.over_devices(mean)

    @property
    def loss_specs(self) -> P:
        """Every device has the mean."""
        return P()

    @property
    def pieces(self) -> int:
        """In how many microbatches a step splits its rows."""
        return self.context.execution.accumulate


@dataclass(frozen=True)
class AutodiffPlane(LoopPlane):
    """A plane whose gradients JAX derives, of a model in three parts or called as it is."""

    model: Forward

    def microbatch(self, parameters: Flat, keys: Callable) -> Callable:
        """Return (statistics, batch, number) -> `Pass`, of one microbatch."""
        context = self.context

        def forward(statistics: Flat, batch, number: Index, slots: Flat) -> tuple:
            variables = {**statistics, **keys(None, number, rows_of(batch))}
            stored = context.stored(parameters, slots)
            mean, changed = self.model.run(stored, variables, batch, "train")
            new = (path for path, old in statistics.items() if changed[path] is not old)
            context.traced.written.update(new)
            mine = context.share(mean)
            return mine.total, (mine, {path: changed[path] for path in statistics})

        def run(statistics: Flat, batch, number: Index) -> Pass:
            of_slots = partial(forward, statistics, batch, number)
            total, pullback, (mean, held) = jax.vjp(of_slots, context.slots(), has_aux=True)
            divisor = context.divisor(mean.weight)
            (gradients,) = pullback(cotangent(total, context.traced.seed, divisor))
            return Pass(context.pin(gradients), mean, held, divisor)

        return run

    def evaluated(self, parameters: Flat, variables: Flat, batch: Any) -> Mean:
        """Return this device's share of the loss."""
        stored = self.context.stored(parameters, None)
        return self.context.share(self.model.run(stored, variables, batch, "eval")[0])

    def predicted(self, parameters: Flat, variables: Flat, batch: Any) -> Any:
        """Return the outputs of the model: a tree of arrays, `Part` and `Sum`."""
        stored = self.context.stored(parameters, None)
        return self.model.run(stored, variables, batch, "eval", "outputs")[0]
