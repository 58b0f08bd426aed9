"""Gradient engines: loss and gradients of one step.

Inside, each device has its own examples and its own shards. Microbatches run in a scan. Gathers and
scatters of parameters and gradients are in `comm_plan.py`, sums of gradients in
`reduce_gradients.py`. That file also says where and when gradients are reduced: what accumulates
sharded is scattered in every microbatch, the rest is summed after the scan (with one microbatch,
large ones in the backward pass).

Engines differ in how one microbatch runs. `AutodiffEngine` lets JAX differentiate the model;
`parallel/pipeline` runs it by a table, `parallel/layerwise` layer by layer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec as P

from hfjax.parallel.engine.step_context import StepContext, num_examples
from hfjax.parallel.engine.unshard import ShardedParam
from hfjax.parallel.jaxprs.stage_fns import loss_cotangent
from hfjax.parallel.spmd.microbatches import redistribute_examples
from hfjax.parallel.spmd.placements import ShardedValue, Split, is_distributed, placement_of
from hfjax.utils.mean import Mean
from hfjax.utils.paths import Flat, Index


class TrainState(NamedTuple):
    """The inputs of a step: arrays by name, or their specs."""

    parameters: Any
    variables: Any
    optimizer_state: Any  # of the layers
    counts: Any  # numbers of the optimizer that belong to no parameter


class PassOutput(NamedTuple):
    """The result of a microbatch's forward and backward passes."""

    gradients: Flat  # of total / divisor
    loss_mean: Mean  # if losses are requested: with a first dimension for microbatches
    statistics: Flat  # variables after it
    gradient_divisor: Any = 1.0  # the same on all devices
    outputs: Any = None  # of this device's examples, if they are requested


@dataclass(frozen=True)
class GradientEngine(ABC):
    """What runs on each device between stored parameters and reduced gradients.

    `returns` are results of `gradients` that are requested: "losses" (of each microbatch) and
    "outputs" (of the model, for the whole batch).
    """

    context: StepContext
    returns: Collection[str] = field(default=(), kw_only=True)

    @abstractmethod
    def microbatch(self, parameters: Flat, keys: Callable) -> Callable:
        """Return (statistics, batch, number) -> `PassOutput`, of one microbatch.

        `keys(layer or None, number, batch size)` are the variables that hold random keys.
        """

    @abstractmethod
    def eval_local(self, parameters: Flat, variables: Flat, batch: Any) -> Any:
        """Return the loss of this device's examples."""

    @abstractmethod
    def predict_local(self, parameters: Flat, variables: Flat, batch: Any) -> Any:
        """Return the outputs of the model: a tree of arrays, `ShardedValue`, `PartialValue`."""

    @abstractmethod
    def loss_over_devices(self, mean: Mean) -> Mean:
        """Return the loss of all devices, given that of `microbatch` or `eval_local`."""

    @property
    @abstractmethod
    def num_microbatches(self) -> int:
        """The number of microbatches of a step, which are to be those of one device."""

    def gradients(
        self,
        parameters: Flat,
        variables: Flat,
        batch: Any,
        step: jax.Array,
        seed: Any = None,
        extra: Any = None,
        extra_specs: Any = None,
    ) -> tuple:
        """Return gradients of the total, placed as optimizer state; Mean; new variables; outputs.

        `seed`, the cotangent of the loss of a microbatch, scales them; `extra` is a tree of arrays
        that `forward` and the loss ask for by name, with its `ExtraSpecs`. The Mean has a first
        dimension for microbatches if `returns` has "losses"; without "outputs" these are None.
        """
        context = self.context

        def device(parameters: Flat, variables: Flat, batch, step: jax.Array, seed, extra) -> tuple:
            def run(should_redistribute: bool, weighted: bool) -> PassOutput:
                context.trace.begin(
                    context.param_specs,
                    1.0 if seed is None else seed,
                    weighted,
                    extra_specs and extra_specs.bind(extra, context),
                )
                keys, statistics = context.keys(
                    variables, num_examples(batch), step, should_redistribute
                )
                microbatch = self.microbatch(context.gather_once(parameters), keys)
                return self._accumulate(microbatch, statistics, batch, should_redistribute)

            out = self.match_one_device(run, weighted=seed is not None)
            gradients, mean, statistics, divisor, outputs = out
            check_trace(context, mean)
            gradients = context.reduction(gradients, context.param_specs)
            gradients = _scale_gradients(divisor, gradients)
            changed = {p: x for p, x in statistics.items() if p in context.trace.written}
            mean, batched = self.loss_over_devices(mean), context.batched_variables(changed)
            return gradients, mean, context.average(changed), batched, outputs

        optimizer_specs = context.specs("optimizer_state")
        gradient_specs = {path: optimizer_specs[path] for path in context.trainable}
        out_specs = (gradient_specs, P(), P(), context.batch_spec, context.batch_spec)
        in_specs = (
            *context.in_specs(variables),
            P(),
            P(),
            extra_specs.manual_specs(context.mesh) if extra_specs else P(),
        )
        gradients, mean, changed, batched, outputs = context.shard_map(device, in_specs, out_specs)(
            parameters, variables, batch, step, seed, extra
        )
        return gradients, mean, changed | batched, outputs

    def evaluate(self, parameters: Flat, variables: Flat, batch: Any) -> Any:
        """Return the loss; nothing is random, nothing changes."""
        context = self.context

        def device(parameters: Flat, variables: Flat, batch):
            context.trace.begin(())
            loss = self.eval_local(parameters, variables, context.local_sequence_batch(batch))
            context.check_gathers()
            return self.loss_over_devices(loss)

        run = context.shard_map(device, context.in_specs(variables), P())
        return run(parameters, variables, batch)

    def predict(self, parameters: Flat, variables: Flat, batch: Any) -> Any:
        """Return the outputs of the model, sharded along batch dimensions; nothing is random."""
        context, output_info = self.context, []

        def device(parameters: Flat, variables: Flat, batch) -> list[jax.Array]:
            context.trace.begin(())
            outputs = self.predict_local(parameters, variables, context.local_sequence_batch(batch))
            outputs = context.trace.global_batch.replicate_inner(outputs)
            values, treedef = jax.tree.flatten(outputs, is_leaf=is_distributed)
            in_one_block = lambda x: isinstance(x, ShardedValue) and x.split.blocks == 1
            values = [x if in_one_block(x) else context.batch_group.replicate(x) for x in values]
            output_info[:] = treedef, list(map(placement_of, values))
            context.check_gathers()
            return [x.x if isinstance(x, ShardedValue) else x for x in values]

        in_specs, args = context.in_specs(variables), (parameters, variables, batch)
        # On shapes first: which outputs have a batch dimension, and where.
        jax.eval_shape(context.shard_map(device, in_specs, P()), *args)
        spec_of = lambda placement: (
            P(*[None] * placement.dim, context.batch_axes) if isinstance(placement, Split) else P()
        )
        specs = list(map(spec_of, output_info[1]))
        arrays = context.shard_map(device, in_specs, specs)(*args)
        constrain = lambda x, spec: lax.with_sharding_constraint(
            x, NamedSharding(context.mesh, spec)
        )
        return output_info[0].unflatten(map(constrain, arrays, specs))

    def match_one_device(self, run: Callable, weighted: bool = False) -> tuple:
        """Return `run(should_redistribute, weighted)`; it redistributes if that matters.

        It does if examples of a microbatch interact, are counted, or get random numbers, if a
        variable goes from one microbatch to the next, or if a derivative rule is not linear: the
        trace tells. Then the weight of each microbatch matters too.
        """
        if self.num_microbatches == 1 or self.context.batch_group.size == 1:
            return run(False, True)
        jaxpr, out_shapes = jax.make_jaxpr(lambda: run(False, weighted), return_shape=True)()
        trace, template = self.context.trace, self.context.template
        carries_state = any(not template.is_batched(path) for path in trace.written)
        if carries_state or any(event.action != "alone" for event in trace.global_batch.comms):
            return run(True, True)
        outs = jaxpr_as_fun(jaxpr)()
        return jax.tree.unflatten(jax.tree.structure(out_shapes), outs)

    def redistribute_batch(self, batch: Any) -> Any:
        """Return this device's examples as shards of the microbatches of one device."""
        return jax.tree.map(
            partial(redistribute_examples, self.context.batch_group, self.num_microbatches), batch
        )

    def _accumulate(
        self, microbatch: Callable, statistics: Flat, batch: Any, should_redistribute: bool
    ) -> PassOutput:
        """Return gradients, Mean and statistics after all microbatches of this device."""
        context, count = self.context, self.context.execution.gradient_accumulation_steps
        redistribute = partial(redistribute_examples, context.batch_group, self.num_microbatches)
        if should_redistribute:
            batch = self.redistribute_batch(batch)
            statistics = statistics | {
                p: redistribute(x) for p, x in context.batched_variables(statistics).items()
            }
        batch = context.local_sequence_batch(batch)
        out = self._scan_microbatches(microbatch, statistics, batch, count)
        if should_redistribute:
            restored = {
                p: redistribute(x, inverse=True)
                for p, x in context.batched_variables(out.statistics).items()
            }
            outputs = jax.tree.map(partial(redistribute, inverse=True), out.outputs)
            out = out._replace(statistics=out.statistics | restored, outputs=outputs)
        return out

    def _scan_microbatches(
        self, microbatch: Callable, statistics: Flat, batch: Any, count: int
    ) -> PassOutput:
        """Return the same of a batch that is redistributed and sliced."""
        context = self.context
        if count == 1:
            return microbatch(statistics, batch, 0)

        def body(carry: tuple, xs: tuple) -> tuple[tuple, tuple]:
            sums, statistics = carry
            batched, batch, number = xs
            out = microbatch(statistics | batched, batch, number)
            gradients, mean, new_stats, divisor, outputs = out
            gradients = _scale_gradients(divisor, gradients)
            new_stats, batched = (
                {path: new_stats[path] for path in of} for of in (statistics, batched)
            )
            return (jax.tree.map(jnp.add, sums, gradients), new_stats), (mean, (batched, outputs))

        split = lambda tree: jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), tree)
        batched = context.batched_variables(statistics)
        carried = {path: x for path, x in statistics.items() if path not in batched}
        xs = (split(batched), split(batch), lax.iota("int32", count))
        (gradients, carried), (means, rest) = lax.scan(body, (context.slots(), carried), xs)
        merge = lambda tree: jax.tree.map(lambda x: lax.collapse(x, 0, 2), tree)
        batched, outputs = merge(rest)
        if "losses" in self.returns:
            return PassOutput(gradients, merge(means), carried | batched, outputs=outputs)
        mean = jax.tree.map(lambda x: x.sum(0), means)
        return PassOutput(gradients, mean, carried | batched, outputs=outputs)


def _scale_gradients(divisor: Any, gradients: Flat) -> Flat:
    """Return the gradients of a total from those of total / divisor."""
    if isinstance(divisor, float):
        return gradients
    return {path: g * divisor.astype(g.dtype) for path, g in gradients.items()}


def check_trace(context: StepContext, mean: Mean) -> None:
    """Warn of, or refuse, what only the trace of a training step shows; every engine calls it."""
    context.warn_of_unread()
    context.check_remat()
    context.check_gathers()
    context.trace.ops.check_router_metrics(mean.metrics)


class Forward(Protocol):
    """Runs a model forward on the examples of a microbatch, before JAX differentiates it."""

    def run(
        self,
        params: dict[str, ShardedParam],
        variables: Flat,
        batch: Any,
        mode: str,
        returns: Collection[str] = ("loss",),
    ) -> tuple[Any, Any, Flat]:
        """Return the loss, the outputs (each None unless requested), the variables after it.

        The loss is distributed values, and so are outputs; in training they are `local_outputs`.
        """
        ...


class LoopEngine(GradientEngine):
    """An engine that runs one microbatch after the other, each on all devices."""

    def loss_over_devices(self, mean: Mean) -> Mean:
        """Return the mean over the global batch."""
        return self.context.reduce_loss(mean)

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches of a step."""
        return self.context.execution.gradient_accumulation_steps

    def mean_of_one(self, mean: Mean) -> Mean:
        """Return the Mean of a microbatch as `PassOutput` has it."""
        if "losses" not in self.returns:
            return mean
        return jax.tree.map(lambda x: jnp.expand_dims(x, 0), mean)


@dataclass(frozen=True)
class AutodiffEngine(LoopEngine):
    """An engine whose gradients JAX derives, of a layer-stack model or a whole model."""

    model: Forward

    def microbatch(self, parameters: Flat, keys: Callable) -> Callable:
        """Return (statistics, batch, number) -> `PassOutput`, of one microbatch."""
        context = self.context

        def forward(statistics: Flat, batch, number: Index, slots: Flat) -> tuple:
            variables = {**statistics, **keys(None, number, num_examples(batch))}
            params = context.sharded_params(parameters, slots)
            returns = ("loss", *self.returns)
            mean, outputs, changed = self.model.run(params, variables, batch, "train", returns)
            written = (path for path, old in statistics.items() if changed[path] is not old)
            context.trace.written.update(written)
            local_mean = context.share(mean)
            new_stats = {path: changed[path] for path in statistics}
            return local_mean.total, (local_mean, new_stats, outputs)

        def run(statistics: Flat, batch, number: Index) -> PassOutput:
            of_slots = partial(forward, statistics, batch, number)
            total, pullback, aux = jax.vjp(of_slots, context.slots(), has_aux=True)
            mean, new_stats, outputs = aux
            divisor = context.divisor(mean.weight)
            (gradients,) = pullback(loss_cotangent(total, context.trace.seed, divisor))
            loss_mean = self.mean_of_one(mean)
            return PassOutput(context.pin(gradients), loss_mean, new_stats, divisor, outputs)

        return run

    def eval_local(self, parameters: Flat, variables: Flat, batch: Any) -> Mean:
        """Return this device's share of the loss."""
        params = self.context.sharded_params(parameters, None)
        return self.context.share(self.model.run(params, variables, batch, "eval")[0])

    def predict_local(self, parameters: Flat, variables: Flat, batch: Any) -> Any:
        """Return the outputs of the model: a tree of arrays, `ShardedValue`, `PartialValue`."""
        params = self.context.sharded_params(parameters, None)
        return self.model.run(params, variables, batch, "eval", ("outputs",))[1]
