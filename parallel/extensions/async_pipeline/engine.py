"""The engine of a step in which stages update their layers themselves."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from hfjax.parallel.adapters.model_template import LAYERS
from hfjax.parallel.engine.gradient_engine import TrainState, check_trace
from hfjax.parallel.engine.reduce_gradients import mean_gradients
from hfjax.parallel.engine.step_context import num_examples
from hfjax.parallel.extensions.async_pipeline.weight_stashing import VersionedParams
from hfjax.parallel.jaxprs.split_backward import SplitBackward
from hfjax.parallel.jaxprs.stage_fns import StageFns
from hfjax.parallel.mesh import PIPE_AXIS, in_use
from hfjax.parallel.pipeline.engine import PipelineEngine
from hfjax.parallel.pipeline.executor import Pipeline
from hfjax.parallel.schedules.table import Versions
from hfjax.utils.mean import Mean
from hfjax.utils.paths import Flat, Index


@dataclass(frozen=True)
class AsyncPipelineEngine:
    """A pipeline engine whose stages keep versions of their layers."""

    engine: PipelineEngine
    versions: Versions

    def train(
        self, train_state: TrainState, batch: Any, step: jax.Array, apply: Callable
    ) -> tuple[TrainState, jax.Array, Flat, Mean]:
        """Return new inputs; mean squared norm of layers' gradients; other gradients; Mean.

        `apply(gradients, (state, counts), parameters) -> (parameters, (state, counts))`, with the
        optimizer state, gets the gradients of a mean; those of embed and head are of the total of
        all microbatches.
        """
        context = self.engine.context
        stages = in_use(context.mesh, (PIPE_AXIS,))

        def device(
            train_state: TrainState, batch, step: jax.Array
        ) -> tuple[TrainState, jax.Array, Flat, Mean]:
            context.trace.begin(context.param_specs)

            def run(should_redistribute: bool, weighted: bool) -> tuple:
                context.trace.weighted = weighted
                return self._stage(train_state, batch, step, apply, should_redistribute)

            layers, (optimizer_state, counts), *outs = self.engine.match_one_device(run)
            squares, outer_gradients, (means, _) = outs
            outer_gradients = context.reduction(
                context.reduce_outside(outer_gradients), context.param_specs
            )
            max_over_stages = lambda x: (
                lax.pmax(x, stages) if stages else x
            )  # all stages count alike
            new = TrainState(layers, {}, optimizer_state, jax.tree.map(max_over_stages, counts))
            check_trace(context, means)
            squares = lax.psum(squares, stages) if stages else squares
            return (
                new,
                squares,
                outer_gradients,
                context.sum(jax.tree.map(lambda x: x.sum(0), means)),
            )

        stage_specs = TrainState(P(*stages), P(), P(*stages), P())
        input_specs = stage_specs._replace(parameters=context.specs("parameter"))
        in_specs = (input_specs, context.batch_spec, P())
        out_specs = (stage_specs, P(), P(), P())
        new, squares, *rest = context.shard_map(device, in_specs, out_specs)(
            train_state, batch, step
        )
        updates = int((self.versions.columns["U_version"][:, 0] >= 0).sum())
        return new, squares / updates, *rest

    def _stage(
        self,
        train_state: TrainState,
        batch: Any,
        step: jax.Array,
        apply: Callable,
        should_redistribute: bool,
    ) -> tuple:
        """Return a stage's results after the last tick; it may redistribute its batch."""
        context, ticks = self.engine.context, self.engine.ticks
        keys, statistics = context.keys(
            train_state.variables, num_examples(batch), step, should_redistribute
        )
        batch = context.local_sequence_batch(
            self.engine.redistribute_batch(batch) if should_redistribute else batch
        )
        model = add_weight_carry(
            self.engine.train_stage_fns(train_state.parameters, statistics, batch, keys, 0)
        )
        columns = ticks.columns | self.versions.columns
        columns["B_first"] = _first_of_group(columns["B_microbatch"], columns["U_version"])
        weights = VersionedParams(
            versions=self.versions,
            units=model.unit_order.shape[2],
            layers={p: a for p, a in train_state.parameters.items() if p.startswith(LAYERS)},
            optimizer=(train_state.optimizer_state, train_state.counts),
            reduce=self._reduce,
            apply=apply,
        )
        ticks = replace(ticks, columns=columns)
        engine = self.engine
        pipeline_args = engine.choose_offload, weights, engine.in_order, engine.branches
        stage = Pipeline(ticks, model, engine.unroll, *pipeline_args)
        state = stage.run_ticks()
        outputs = (state[name] for name in ("optimizer", "squares", "outside", "aux"))
        return weights.final_params(stage, state), *outputs

    def _reduce(self, gradients: Flat, weight: jax.Array) -> Flat:
        """Return the gradients of the mean over the examples of all devices of a stage.

        A microbatch of weight zero has no mean, and zero gradients.
        """
        context = self.engine.context
        summed = context.reduction(gradients, context.param_specs)
        weight = lax.psum(weight, context.data_axes) if context.data_axes else weight
        scale = jnp.where(weight == 0, 0, 1 / weight)
        return mean_gradients(summed, scale, {p: x.dtype for p, x in context.param_specs.items()})


def add_weight_carry(model: StageFns) -> StageFns:
    """Return the model with a scalar beside x whose gradient is the weight of the microbatch.

    It is zero in the forward pass. Its gradient comes with every dy, so that each stage can turn
    its totals into means; only the head knows the weight.
    """

    def first(outside: Flat, m: Index) -> tuple[Any, jax.Array]:
        return model.embed(outside, m), jnp.zeros(())

    def with_weight(passes: Callable) -> Callable:
        return lambda known, slots, carried, split: _carry_loss_weight(
            passes(known, slots, carried[0], split)
        )

    def last(outside: Flat, carried: tuple, m: Index) -> tuple[jax.Array, tuple[Mean, None]]:
        x, weight_carry = carried
        loss_sum, (mean, _) = model.head(outside, x, m)
        weight = lax.stop_gradient(mean.weight) * model.divisor(m)  # dy is of total / divisor
        return loss_sum + (weight_carry * weight).astype(loss_sum.dtype), (mean, None)

    keep = model.last_passes and with_weight(model.last_passes)
    passes = with_weight(model.layer_passes)
    return replace(model, embed=first, layer_passes=passes, head=last, last_passes=keep)


def _carry_loss_weight(passes: SplitBackward) -> SplitBackward:
    """Return the passes of layers that pass on a scalar beside x."""

    def forward(known: tuple, carried: tuple) -> tuple:
        y, *residuals = passes.forward(known, carried[0])
        return (y, carried[1]), *residuals

    def backward(known: tuple, stash: list, w_residuals: list, dy: tuple) -> tuple[tuple, Flat]:
        dx, gradients = passes.backward(known, stash, w_residuals, dy[0])
        return (dx, dy[1]), gradients

    return replace(passes, forward=forward, backward=backward)


def _first_of_group(backward: np.ndarray, updates: np.ndarray) -> np.ndarray:
    """Return 1 where a backward is the first since the last update of its stage.

    >>> backward, updates = np.array([[0, 1, -1, 2, 3]]).T, np.array([[-1, 0, -1, -1, 1]]).T
    >>> _first_of_group(backward, updates).T
    array([[1, 0, 0, 1, 0]], dtype=int32)
    """
    count = np.cumsum(backward >= 0, axis=0)
    done = np.maximum.accumulate(np.where(updates >= 0, count, 0), axis=0)
    before = np.concatenate([np.zeros_like(done[:1]), done[:-1]])
    return ((backward >= 0) & (count == before + 1)).astype(np.int32)
