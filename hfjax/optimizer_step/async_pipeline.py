"""A step whose stages update their layers by themselves, as PipeDream and PipeDream-2BW do."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import optax

from hfjax.optimizer_step.optimizer_parts import COUNT, ENDS, NUMBER
from hfjax.optimizer_step.update import GradResult, UpdatableState, Update
from hfjax.parallel.engine.reduce_gradients import mean_gradients
from hfjax.parallel.execution import PipelineSchedule
from hfjax.parallel.extensions.async_pipeline.engine import AsyncPipelineEngine
from hfjax.parallel.mesh import PIPE_AXIS
from hfjax.parallel.pipeline.engine import PipelineEngine
from hfjax.sharding.layout import Layout, State
from hfjax.utils.paths import Flat


@dataclass(frozen=True, eq=False)
class AsynchronousUpdate(Update):
    """One call of the step: M microbatches through the pipeline, which fills and drains.

    Every stage updates its layers after each microbatch (pipedream), or after each group of them
    (2bw), with the gradient of the mean loss over that microbatch or group, averaged over the
    batch axes. Parameters outside the layers (embedding, head) are updated once, at the end of the
    call, with the gradient of the mean loss over all M microbatches: a parameter that both ends
    read, as tied embeddings are, has no other version that both could use.

    A count that an optimizer keeps beside moments counts updates of these moments: for embedding
    and head it is the number of calls. Any other number (the count of a learning-rate schedule)
    goes with the layers: it advances once per update, and embedding and head use its value before
    the call.

    The metric grad_norm is that of the gradient of embedding and head and of the layers' gradients,
    these squared and averaged over the updates.
    """

    stage_engine: AsyncPipelineEngine  # of `engine`

    @classmethod
    def build(
        cls, layout: Layout, engine: PipelineEngine, schedule: PipelineSchedule
    ) -> "AsynchronousUpdate":
        """Return the update of a pipeline whose stages keep versions of their layers."""
        versions = schedule.versions(layout.mesh.shape[PIPE_AXIS])
        assert versions is not None
        return cls(layout, engine, AsyncPipelineEngine(engine, versions))

    def __call__(self, state: State, batch: Any) -> GradResult:
        """Return the result of a call of the step, whose layers are already updated."""
        new, squares, ends, mean = self.stage_engine.train(
            self.parts.train_state(state), batch, state.step, self._apply
        )
        gradients = mean_gradients(ends, 1 / mean.weight, self.layout.working_dtypes)
        norm = jnp.sqrt(squares + optax.tree.norm(gradients, squared=True))

        def apply_updates(old_state: UpdatableState) -> UpdatableState:
            ends, end_leaves = self._update_ends(
                gradients, old_state.parameters, old_state.optimizer, state.step
            )
            optimizer = self.parts.join(
                old_state.optimizer, end_leaves, new.optimizer_state, new.counts
            )
            return UpdatableState(old_state.parameters | ends | new.parameters, optimizer, {})

        update = lambda old_state, finite: self.update_if_finite(finite, apply_updates, old_state)
        return GradResult(mean, norm, {}, {}, update)

    def _apply(self, gradients: Flat, state_and_counts: tuple[Flat, Flat], parameters: Flat) -> Any:
        """Update layers, inside the engine."""
        optimizer_state, counts = state_and_counts
        parameters, new = self.parts.apply(gradients, optimizer_state | counts, parameters)
        pick = lambda old: {name: new[name] for name in old}
        return parameters, (pick(optimizer_state), pick(counts))

    def _update_ends(
        self, gradients: Flat, params: Flat, optimizer: Any, step: Any
    ) -> tuple[Flat, Flat]:
        """Return embedding and head and their optimizer state, updated."""
        end_leaves = self.parts.select(optimizer, ENDS)
        counts = {n: step.astype(x.dtype) for n, x in self.parts.select(optimizer, COUNT).items()}
        leaves = end_leaves | counts | self.parts.select(optimizer, NUMBER)
        ends, new = self.parts.apply(gradients, leaves, {path: params[path] for path in gradients})
        return ends, {name: new[name] for name in end_leaves}
