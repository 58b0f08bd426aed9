"""What the rings of a pipeline take: where values wait from the tick that makes them on."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import jax

from hfjax.parallel.pipeline import Pipeline
from hfjax.parallel.program import bytes_of
from hfjax.parallel.reduction import Flat
from hfjax.parallel.staged import Staged
from hfjax.parallel.stages import PipelinePlane

# what waits -> the rings (and queues) that it lies in
WAITING = {
    "activations": ("stash", "late", "cross", "kept"),
    "messages": ("x", "dy", "sent", "dx"),
}


@dataclass(frozen=True)
class _Telling(PipelinePlane):
    """A plane that notes what its executor begins with."""

    told: dict[str, Any] = field(default_factory=dict)

    def _pipeline(self, staged: Staged) -> tuple[Any, Any, Any]:
        pipeline = Pipeline(self.ticks, staged.model(), self._varying, self._unroll)
        self.told.update(jax.eval_shape(pipeline._start))
        return super()._pipeline(staged)


def rings(
    plane: PipelinePlane, parameters: Flat, variables: Flat, batch: Any, step: Any
) -> Mapping[str, tuple[int, int]]:
    """Return what waits on a stage: {"activations": (bytes on the device, on the host), …}."""
    telling = _Telling(**{f.name: getattr(plane, f.name) for f in fields(PipelinePlane)})
    jax.eval_shape(telling.gradients, parameters, variables, batch, step)
    return {what: _bytes([telling.told.get(n) for n in names]) for what, names in WAITING.items()}


def _bytes(tree: Any) -> tuple[int, int]:
    leaves = jax.tree.leaves(tree)
    on_host = [getattr(x, "memory_space", None) == jax.memory.Space.Host for x in leaves]
    host = [x for x, there in zip(leaves, on_host, strict=True) if there]
    return bytes_of(leaves) - bytes_of(host), bytes_of(host)
