"""The data plane of a step that updates each layer in the backward pass, and then forgets its
gradient.

As soon as a layer's gradients are there they are reduced over all devices, divided by the weight
of the loss (the head has told it before) and applied; parameters and moments are stacks that the
loop carries and updates in place. Rows of a stack keep their first dimension, of length 1, so that
specs and masks fit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from hfjax.mean import Mean
from hfjax.parallel.asynchronous import Held
from hfjax.parallel.blueprint import LAYERS
from hfjax.parallel.gradients import rows_of, variables_of
from hfjax.parallel.layerwise import LayerwisePlane
from hfjax.parallel.reduction import Flat
from hfjax.parallel.staged import Staged
from hfjax.parallel.update_layer import ItemUpdate, LayerUpdate, Own


@dataclass(frozen=True)
class LayerUpdatePlane(LayerwisePlane):
    """A data plane whose layers are updated during the backward pass."""

    def __post_init__(self):
        """Nothing accumulates: every gradient goes to its moments' place at once."""
        super().__post_init__()
        placed = {path: replace(p, gradient=p.moment) for path, p in self.placed.items()}
        object.__setattr__(self, "placed", placed)

    def train(
        self, held: Held, batch: Any, step: jax.Array, apply: Callable, belongs: Mapping[str, str]
    ) -> tuple[Held, Flat, jax.Array, Flat, Mean]:
        """Return the layers' new parameters and moments; squares; finite; ends' gradients; Mean.

        `apply(gradients, moments, counts, parameters) -> (parameters, moments)` is given rows of
        the layers' stacks and gradients of the mean; the ends' gradients are those of the total.
        `belongs` says of each of the moments to which parameter it belongs.
        """

        def device(held, batch, step):
            unread = set(self.placed)
            staged = self._of_step(held, batch, step, unread)
            update = self._update(held, apply, belongs)
            stored = lambda own: self._stored(own, staged)
            own, ends, mean = self._pass(staged, stored, update).run(self._own(held), self._sum)
            self._tell_unread(unread)
            gradients = update.reduction(self._given(ends, staged), self.placed)
            new = Held(own.parameters, {}, own.moments, {})
            return new, own.squares, own.finite, gradients, mean

        specs, moments = self._specs("parameter"), self._specs("moment")
        of_moments = {name: moments[path] for name, path in belongs.items()}
        trained = {path: specs[path] for path in self._of_layers}
        ends = {path: moments[path] for path in self._trained if path not in trained}
        in_specs = (Held(specs, P(), of_moments, P()), P(self._batch_axes), P())
        out_specs = (Held(trained, P(), of_moments, P()), P(), P(), ends, P())
        return self._shard_map(device, in_specs, out_specs)(held, batch, step)

    @property
    def _of_layers(self) -> list[str]:
        """The layers' parameters that have a gradient."""
        return [path for path in self._trained if path.startswith(LAYERS)]

    @property
    def guards(self) -> bool:
        """Whether a layer keeps its parameters if its gradient is not finite."""
        return self.execution.nonfinite != "apply"

    def _of_step(self, held: Held, batch: Any, step: Any, unread: set[str]) -> Staged:
        """Return the model in three parts, on the rows of this device."""
        random, statistics = self._sort(held.variables)
        rows = rows_of(batch)
        keys = self._keys(random, rows, step)
        parameters = self._gather_once(held.parameters)
        variables = lambda m, i: {**variables_of(statistics, i), **keys(i, m, rows)}
        return self._staged(parameters, variables, batch, "train", unread)

    def _update(self, held: Held, apply: Callable, belongs: Mapping[str, str]) -> LayerUpdate:
        kind = ItemUpdate if self.blueprint.listed else LayerUpdate
        return kind(
            placed={path: self.placed[path] for path in self._of_layers},
            reduction=self._reduction,
            apply=lambda gradients, moments, old: apply(gradients, moments, held.counts, old),
            belongs=belongs,
            guards=self.guards,
        )

    def _own(self, held: Held) -> Own:
        """Return what is to be updated, as it is before."""
        zeros = jnp.zeros(1 if self.blueprint.listed else self._layers, jnp.float32)
        wide = lambda path: zeros.astype(jnp.promote_types(self.placed[path].dtype, zeros.dtype))
        return Own(
            {path: held.parameters[path] for path in self._of_layers},
            held.moments,
            {path: wide(path) for path in self._of_layers},
            jnp.array(True),
        )

    def _stored(self, own: Own, staged: Staged) -> Flat:
        """Return the layers' parameters as they are stored, or as they stay gathered."""
        gathered = lambda path: self._gathered_once(self.placed[path])
        mine = {path: x for path, x in own.parameters.items() if not gathered(path)}
        return {**staged.parameters, **mine}
