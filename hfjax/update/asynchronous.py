"""A step whose stages update their layers by themselves, as PipeDream and PipeDream-2BW do."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hfjax.base.paths import Flat, flatten
from hfjax.optimizers.transforms import stored_dtype
from hfjax.parallel.asynchronous.plane import AsynchronousPlane
from hfjax.parallel.engine.gradients import StepInputs
from hfjax.parallel.execution import Execution
from hfjax.parallel.mesh import describe_mesh
from hfjax.parallel.pipeline.plane import PipelinePlane
from hfjax.parallel.schedules.versions import Versions
from hfjax.plan.layout import Layout, State
from hfjax.update.parts import COUNT, ENDS, LAYERS, NUMBER, OptimizerParts
from hfjax.update.separable import check_leafwise
from hfjax.update.update import Found, Held, Update, unless_nonfinite


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
    def of(cls, layout: Layout, plane: PipelinePlane, versions: Versions) -> "AsynchronousUpdate":
        """Return the pass of a plane whose stages keep these versions of their layers."""
        _check(layout, plane.context.execution)
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
        gradients = {path: self._mean(path, g, mean.weight) for path, g in ends.items()}
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

    def _mean(self, path: str, gradient: jax.Array, weight: jax.Array) -> jax.Array:
        scaled = gradient * (1 / weight).astype(gradient.dtype)
        return scaled.astype(self.layout.placed[path].dtype)


def _check(layout: Layout, execution: Execution) -> None:
    """Refuse what stages cannot do if each updates its layers by itself."""
    name = execution.schedule.name if execution.schedule else ""
    waits = 'Use a schedule that waits, for instance hfjax.Schedule("1f1b", …), or'
    refused = {
        f"clip={execution.clip}: no stage knows the norm of the whole gradient. {waits} clip "
        "element by element: optax.chain(optax.clip(…), …).": execution.clip is not None,
        f"frozen {next((p.path for p in layout.placed.values() if p.frozen), '')}: stages keep "
        f"versions of all their parameters. {waits} freeze nothing.": any(
            p.frozen for p in layout.placed.values()
        ),
        f"accumulate={execution.accumulate}: it accumulates by itself, by microbatch or by group. "
        f"{waits} raise microbatches.": execution.accumulate > 1,
        f"strategy {layout.strategy.name} keeps a part of the state on the host, and stages update "
        f"their layers where they lie. {waits} leave the column `memory` out.": bool(layout.hosted),
        "hfjax.master: stages keep versions of the parameters, not of their master weights. "
        f"{waits} the optimizer without it.": stored_dtype(layout.optimizer, None) is not None,
        f"reduction={execution.reduction!r}: gradients are reduced at every update, in one level. "
        f'{waits} reduction="flat".': execution.reduction != "flat",
    }
    for why, wrong in refused.items():
        if wrong:
            raise ValueError(f"schedule {name}, {why}")
    for p in layout.placed.values():
        if split := [c for c in ("parameter", "gradient", "moment") if p.split(c)]:
            raise ValueError(
                f"schedule {name}: under {layout.strategy.name} on {describe_mesh(layout.mesh)} "
                f"the {split[0]} of {p.path} {p.shape} is split: {getattr(p, split[0])}. Stages "
                f"keep versions of whole layers. {waits} hfjax.PIPE | hfjax.DDP."
            )
    check_leafwise(layout)
