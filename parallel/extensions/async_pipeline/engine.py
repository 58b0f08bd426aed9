"""The data plane of a step in which stages update their layers themselves."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from hfjax.parallel.adapters.model_template import LAYERS
from hfjax.parallel.engine.gradient_engine import StepInputs, check_traced
from hfjax.parallel.engine.reduce_gradients import mean_gradients
from hfjax.parallel.engine.step_context import rows_of
from hfjax.parallel.extensions.async_pipeline.weight_stashing import VersionedWeights
from hfjax.parallel.jaxprs.split_backward import Dissected
from hfjax.parallel.jaxprs.stage_fns import ModelParts
from hfjax.parallel.mesh import PIPE_AXIS, in_use
from hfjax.parallel.pipeline.engine import PipelinePlane
from hfjax.parallel.pipeline.executor import Pipeline
from hfjax.parallel.schedules.versions import Versions
from hfjax.utils.mean import Mean
from hfjax.utils.paths import Flat, Index


@dataclass(frozen=True)
class AsynchronousPlane:
    """A pipeline's plane, whose stages keep versions of their layers."""

    plane: PipelinePlane
    versions: Versions

    def train(
        self, held: StepInputs, batch: Any, step: jax.Array, apply: Callable
    ) -> tuple[StepInputs, jax.Array, Flat, Mean]:
        """Return what changed; mean squared norm of layers' gradients; other gradients; Mean.

        `apply(gradients, (moments, counts), parameters) -> (parameters, (moments, counts))` is
        given the gradients of a mean; those of embed and head are of the total of all microbatches.
        """
        context = self.plane.context
        stages = in_use(context.mesh, (PIPE_AXIS,))

        def device(
            held: StepInputs, batch, step: jax.Array
        ) -> tuple[StepInputs, jax.Array, Flat, Mean]:
            context.traced.begin(context.placed)

            def run(dealt: bool, weighed: bool) -> tuple:
                context.traced.weighed = weighed
                return self._stage(held, batch, step, apply, dealt)

            layers, (moments, counts), *rest = self.plane.of_one_device(run)
            squares, outside, means = rest
            outside = context.reduction(context.reduce_outside(outside), context.placed)
            agreed = lambda x: lax.pmax(x, stages) if stages else x  # all stages count alike
            new = StepInputs(layers, {}, moments, jax.tree.map(agreed, counts))
            check_traced(context, means)
            squares = lax.psum(squares, stages) if stages else squares
            return new, squares, outside, context.sum(jax.tree.map(lambda x: x.sum(0), means))

        at_home = StepInputs(P(*stages), P(), P(*stages), P())
        given = at_home._replace(parameters=context.specs("parameter"))
        in_specs = (given, context.batch_spec, P())
        out_specs = (at_home, P(), P(), P())
        new, squares, *rest = context.shard_map(device, in_specs, out_specs)(held, batch, step)
        updates = int((self.versions.columns["U_version"][:, 0] >= 0).sum())
        return new, squares / updates, *rest

    def _stage(
        self, held: StepInputs, batch: Any, step: jax.Array, apply: Callable, dealt: bool
    ) -> tuple:
        """Return what one stage has after the last tick; `dealt`: of one device's microbatches."""
        context, ticks = self.plane.context, self.plane.ticks
        keys, statistics = context.keys(held.variables, rows_of(batch), step, dealt)
        batch = context.dealt(self.plane.dealt(batch) if dealt else batch)
        model = weighed(self.plane.training(held.parameters, statistics, batch, keys, 0))
        columns = ticks.columns | self.versions.columns
        columns["B_first"] = _first_of_group(columns["B_microbatch"], columns["U_version"])
        weights = VersionedWeights(
            versions=self.versions,
            units=model.order.shape[2],
            layers={p: a for p, a in held.parameters.items() if p.startswith(LAYERS)},
            optimizer=(held.moments, held.counts),
            reduce=self._reduce,
            apply=apply,
        )
        ticks = replace(ticks, columns=columns)
        plane = self.plane
        given = plane.offloading, weights, plane.in_order, plane.branches
        stage = Pipeline(ticks, model, plane.unroll, *given)
        state = stage.run_ticks()
        told = (state[name] for name in ("optimizer", "squares", "outside", "aux"))
        return weights.final(stage, state), *told

    def _reduce(self, gradients: Flat, weight: jax.Array) -> Flat:
        """Return the gradients of the mean over the rows of all devices of a stage.

        A microbatch without weight has no mean, and no gradient.
        """
        context = self.plane.context
        summed = context.reduction(gradients, context.placed)
        weight = lax.psum(weight, context.samples) if context.samples else weight
        scale = jnp.where(weight == 0, 0, 1 / weight)
        return mean_gradients(summed, scale, {p: x.dtype for p, x in context.placed.items()})


def weighed(model: ModelParts) -> ModelParts:
    """Return the model with a number beside x whose gradient is the weight of the microbatch.

    It is zero on its way forward. Its gradient comes with every dy, so that each stage can make a
    mean of what it has the total of; what the weight is, only the head knows.
    """

    def first(outside: Flat, m: Index) -> tuple[Any, jax.Array]:
        return model.first(outside, m), jnp.zeros(())

    def with_weight(passes: Callable) -> Callable:
        return lambda known, slots, carried, split: _beside(passes(known, slots, carried[0], split))

    def last(outside: Flat, carried: tuple, m: Index) -> tuple[jax.Array, Mean]:
        x, beside = carried
        total, mean = model.last(outside, x, m)
        weight = lax.stop_gradient(mean.weight) * model.divisor(m)  # dy is of total / divisor
        return total + (beside * weight).astype(total.dtype), mean

    keep = model.keep and with_weight(model.keep)
    passes = with_weight(model.passes)
    return replace(model, first=first, passes=passes, last=last, keep=keep)


def _beside(own: Dissected) -> Dissected:
    """Return the passes of layers that hand on a number beside x."""

    def forward(known: tuple, carried: tuple) -> tuple:
        y, *kept = own.forward(known, carried[0])
        return (y, carried[1]), *kept

    def backward(known: tuple, stash: list, late: list, dy: tuple) -> tuple[tuple, Flat]:
        dx, gradients = own.backward(known, stash, late, dy[0])
        return (dx, dy[1]), gradients

    return replace(own, forward=forward, backward=backward)


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
