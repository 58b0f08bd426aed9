"""A step whose stages update their layers by themselves, as PipeDream and PipeDream-2BW do."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import optax

from hfjax.optimizer_step.optimizer_parts import COUNT, ENDS, LAYERS, NUMBER, OptimizerParts
from hfjax.optimizer_step.update import Found, Held, Update, unless_nonfinite
from hfjax.parallel.engine.gradient_engine import StepInputs
from hfjax.parallel.engine.reduce_gradients import mean_gradients
from hfjax.parallel.execution import PipelineSchedule
from hfjax.parallel.extensions.async_pipeline.engine import AsynchronousPlane
from hfjax.parallel.mesh import PIPE_AXIS
from hfjax.parallel.pipeline.engine import PipelinePlane
from hfjax.sharding.layout import Layout, State
from hfjax.utils.paths import Flat, flatten


@dataclass(frozen=True, eq=False)
class AsynchronousUpdate(Update):
    """One call of the step: M microbatches through the pipeline, which fills and drains.

    Every stage updates its layers after each microbatch (pipedream), or after each group of them
    (2bw), with the gradient of the mean loss over that microbatch or group, averaged over the
    batch axes. What lies outside the layers (embedding, head) is updated once, at the end of the
    call, with the gradient of the mean loss over all M microbatches: a parameter that both ends
    read, as tied embeddings are, has no other version that both could use.

    A count that an optimizer keeps beside moments counts updates of these moments: for the ends it
    is the number of calls. Any other number (the count of a learning rate's schedule) goes with the
    layers: it advances once per update, and the ends use what it was before the call.

    The metric grad_norm is that of the ends' gradient and of the layers' gradients, these squared
    and averaged over the updates.
    """

    stages: AsynchronousPlane  # of `plane`

    @classmethod
    def of(
        cls, layout: Layout, plane: PipelinePlane, schedule: PipelineSchedule
    ) -> "AsynchronousUpdate":
        """Return the pass of a plane whose stages keep versions of their layers."""
        versions = schedule.versions(layout.mesh.shape[PIPE_AXIS])
        assert versions is not None
        return cls(layout, plane, AsynchronousPlane(plane, versions))

    @cached_property
    def parts(self) -> OptimizerParts:
        """Which part of the optimizer's state belongs to what."""
        return OptimizerParts(self.layout)

    def __call__(self, state: State, batch: Any) -> Found:
        """Return what a call of the step finds, its layers being updated already."""
        kept = (self.parts.of(state.optimizer, *roles) for roles in ((LAYERS,), (COUNT, NUMBER)))
        held = StepInputs(flatten(state.params), flatten(state.variables), *kept)
        new, squares, ends, mean = self.stages.train(held, batch, state.step, self._apply)
        gradients = mean_gradients(ends, 1 / mean.weight, self.layout.working_dtypes)
        norm = jnp.sqrt(squares + optax.tree.norm(gradients, squared=True))

        def changed(held: Held) -> Held:
            ends, kept = self._ends(gradients, held.parameters, held.optimizer, state.step)
            optimizer = self.parts.join(held.optimizer, kept, new.moments, new.counts)
            return Held(held.parameters | ends | new.parameters, optimizer, {})

        execution, placed = self.plane.context.execution, self.layout.placed
        update = lambda held, finite: unless_nonfinite(execution, placed, finite, changed, held)
        return Found(mean, norm, {}, {}, update)

    def _apply(self, gradients: Flat, kept: tuple[Flat, Flat], parameters: Flat) -> Any:
        """Update layers, inside the data plane."""
        moments, counts = kept
        parameters, new = self.parts.apply(gradients, moments | counts, parameters)
        pick = lambda old: {name: new[name] for name in old}
        return parameters, (pick(moments), pick(counts))

    def _ends(self, gradients: Flat, params: Flat, optimizer: Any, step: Any) -> tuple[Flat, Flat]:
        """Return the ends and what the optimizer keeps of them, after their update."""
        mine = self.parts.of(optimizer, ENDS)
        counts = {n: step.astype(x.dtype) for n, x in self.parts.of(optimizer, COUNT).items()}
        kept = mine | counts | self.parts.of(optimizer, NUMBER)
        ends, new = self.parts.apply(gradients, kept, {path: params[path] for path in gradients})
        return ends, {name: new[name] for name in mine}
