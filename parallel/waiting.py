"""What waits in a pipeline, from the tick that makes it on, and how much memory that takes."""

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

    def _executor(self, staged: Staged) -> Pipeline:
        pipeline = super()._executor(staged)
        program, shapes = jax.make_jaxpr(pipeline._start, return_shape=True)()
        form = jax.tree.structure(shapes)
        self.told.update(form.unflatten(program.out_avals))  # these know their memory
        return pipeline


def waiting(
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
