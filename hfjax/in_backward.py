"""A step that updates each layer during its backward pass, so that few gradients are ever alive."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from hfjax.leafwise import Asker, check_leafwise
from hfjax.parallel.asynchronous import Held
from hfjax.parallel.execution import Execution
from hfjax.parallel.layer_updates import LayerUpdatePlane
from hfjax.parallel.mesh import describe_mesh
from hfjax.parallel.reduction import Flat
from hfjax.parallel.remat import Remat
from hfjax.paths import flatten
from hfjax.plan import Layout, State
from hfjax.planes import Passed
from hfjax.stagewise import COUNT, ENDS, LAYERS, NUMBER, Parts

_ASKER = Asker(
    "With optimizer_in_backward each layer is updated by itself, before all gradients are known",
    "optimizer_in_backward=False",
)


@dataclass(frozen=True)
class InBackward:
    """One call of the step: layers are updated from last to first, then embedding and head.

    The result is that of the ordinary step. Only a step that is not finite differs: layers above
    the first gradient that is not finite have taken the step already, that layer and all below it
    (embedding and head too, and counts of the optimizer) stay as they are. A loss that is not
    finite is seen before any layer is updated.
    """

    plane: LayerUpdatePlane
    parts: Parts

    @classmethod
    def of(cls, layout: Layout, plane: LayerUpdatePlane) -> "InBackward":
        """Return the pass of a plane that updates its layers."""
        return cls(plane, Parts(layout))

    def __call__(self, state: State, batch: Any) -> Passed:
        """Return what a call of the step finds, its layers being updated already."""
        params = flatten(state.params)
        kept = (self.parts.of(state.optimizer, *roles) for roles in ((LAYERS,), (COUNT, NUMBER)))
        held = Held(params, flatten(state.variables), *kept)
        new, squares, finite, ends, mean = self.plane.train(
            held, batch, state.step, self._apply, self._belongs
        )
        squares |= {path: (g * g).sum() for path, g in ends.items()}
        norm = jnp.sqrt(sum(x.sum() for x in squares.values())) / mean.weight
        gradients = {path: self._mean(path, g, mean.weight) for path, g in ends.items()}

        def update(params: Flat, optimizer: Any) -> tuple[Flat, Any]:
            ends, kept = self._ends(gradients, params, optimizer, finite & jnp.isfinite(norm))
            return params | ends | new.parameters, self.parts.join(optimizer, kept, new.moments)

        return Passed(mean, norm, update, {}, squares, settled=True)

    @cached_property
    def _belongs(self) -> Mapping[str, str]:
        """Name of what the optimizer keeps of layers -> the path of the parameter."""
        names = [name for name, role in self.parts.roles.items() if role == LAYERS]
        found = {name: self.parts.layout.parameter_of(*self.parts.leaves[name]) for name in names}
        return {name: p.path for name, p in found.items() if p is not None}

    def _apply(self, gradients: Flat, moments: Flat, counts: Flat, parameters: Flat) -> Any:
        """Update a layer, inside the data plane."""
        parameters, new = self.parts.apply(gradients, moments | counts, parameters)
        return parameters, {name: new[name] for name in moments}

    def _ends(self, gradients: Flat, params: Flat, optimizer: Any, finite: Any) -> tuple:
        """Return the ends and what the optimizer keeps of them, and counts, after their update."""
        kept = self.parts.of(optimizer, ENDS, COUNT, NUMBER)
        before = self._place({path: params[path] for path in gradients}), kept
        after = self.parts.apply(self._place(gradients), kept, before[0])
        if self.plane.guards:
            after = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
        return self._place(after[0]), after[1]

    def _place(self, arrays: Flat) -> Flat:
        """Return arrays of the ends' parameters, each where its moments lie."""
        layout = self.parts.layout
        on = lambda path: NamedSharding(layout.mesh, layout.placed[path].moment)
        return {path: lax.with_sharding_constraint(x, on(path)) for path, x in arrays.items()}

    def _mean(self, path: str, gradient: jax.Array, weight: jax.Array) -> jax.Array:
        scaled = gradient * (1 / weight).astype(gradient.dtype)
        return scaled.astype(self.parts.layout.placed[path].dtype)


def check_in_backward(layout: Layout, execution: Execution) -> None:
    """Refuse what cannot be updated layer by layer, before all gradients are known."""
    instead = "or leave optimizer_in_backward out"
    refused = {
        f"clip={execution.clip} needs the norm of the whole gradient. Clip element by element "
        f"(optax.chain(optax.clip(…), …)), {instead}.": execution.clip is not None,
        f"accumulate={execution.accumulate} keeps the gradients of all layers until the last "
        f"microbatch. Use accumulate=1 (remat saves memory too), {instead}.": (
            execution.accumulate > 1
        ),
        f"{execution.remat} is of several layers at a time, and here each is run by itself. Use "
        f'remat="full", "dots" or names, {instead}.': _remat(execution).unit > 1,
        f"{execution.offload} goes with layers whose backward pass is derived. Leave it out, "
        f"{instead}.": execution.offload is not None,
        "a schedule runs backward passes of several microbatches, on stages. Leave the schedule "
        f"out, {instead}.": execution.schedule is not None,
        "the model is not in three parts: methods embed(batch) and head(x), and `layers`, no "
        f"forward= in the layout (docs/own_model.md). Write it so, {instead}.": (
            not layout.blueprint.three_parts or layout.forward is not None
        ),
    }
    for why, wrong in refused.items():
        if wrong:
            raise ValueError(f"optimizer_in_backward on {describe_mesh(layout.mesh)}: {why}")
    check_leafwise(layout, _ASKER, split=any(p.split("moment") for p in layout.placed.values()))


def _remat(execution: Execution) -> Remat:
    assert isinstance(execution.remat, Remat)
    return execution.remat
