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
from jax import lax
from jax.sharding import PartitionSpec as P

from hfjax.mean import Mean, as_mean
from hfjax.parallel.arrangement import arrange
from hfjax.parallel.asynchronous import Held
from hfjax.parallel.blueprint import LAYERS, Layer
from hfjax.parallel.by_item import ByItem
from hfjax.parallel.by_layer import ByLayer
from hfjax.parallel.fetch import give
from hfjax.parallel.gradients import DataPlane, cast_inputs, rows_of, variables_of
from hfjax.parallel.reduction import Flat, Placed, Reduction
from hfjax.parallel.staged import Staged
from hfjax.parallel.update_layer import ItemUpdate, LayerUpdate, Own


@dataclass(frozen=True)
class LayerUpdatePlane(DataPlane):
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
            staged = self._staged(held, batch, step, unread)
            update = self._update(held, apply, belongs)
            run = (self._by_item if self.blueprint.listed else self._by_layer)(staged, update)
            own, ends, mean = run.run(self._own(held), self._sum)
            self._check_all_read(unread)
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
    def _layers(self) -> int:
        if self.blueprint.listed:
            return len(self.blueprint.layers("train"))
        return next(p.shape[0] for path, p in self.placed.items() if path.startswith(LAYERS))

    @property
    def guards(self) -> bool:
        """Whether a layer keeps its parameters if its gradient is not finite."""
        return self.execution.nonfinite != "apply"

    def _gathered_once(self, p: Placed) -> bool:
        """Return whether a split parameter is gathered for the whole step: if that is asked for."""
        return bool(p.split("parameter")) and not self.execution.reshard_after_forward

    def _staged(self, held: Held, batch: Any, step: Any, unread: set[str]) -> Staged:
        """Return the model in three parts."""
        random, statistics = self._sort(self._varying(held.variables))
        rows = rows_of(batch)
        keys = self._keys(random, rows, step)
        parameters = self._gather_once(self._varying(held.parameters))
        inputs = cast_inputs(batch, self._precision.compute)
        return Staged(
            blueprint=self.blueprint,
            arrangement=arrange([self._layers], [(0, 0)]),
            parameters=parameters,
            movements={path: self._movement(p, unread) for path, p in self.placed.items()},
            slots=self._slots(),
            variables=lambda m, i: {**variables_of(statistics, i), **keys(i, m, rows)},
            inputs=lambda m: inputs,
            mean=lambda outputs, m: as_mean(self.loss(outputs, batch), rows),
            mode="train",
            policy=self._run.remat.policy(0, gathers=self._saves_gathers, keep=False),
            tells=None,
            keeps_last=False,
            mark=self._varying,
            unwritten="layers are updated in a backward pass by itself, which writes nothing else",
        )

    @property
    def _saves_gathers(self) -> bool:
        """Whether gathered parameters would be saved unasked: not where a loop is written out."""
        return self.blueprint.listed and self._gathers_layers()

    def _given(self, ends: Flat, staged: Staged) -> Flat:
        """Return the gradients of the ends where they accumulate."""
        wide = lambda p: jnp.promote_types(p.dtype, jnp.float32)
        trained = {path: g for path, g in ends.items() if not self.placed[path].frozen}
        return self._pin(
            {p: give(staged.movements[p], g, wide(self.placed[p])) for p, g in trained.items()}
        )

    # -- layer by layer -----------------------------------------------------------------------

    def _update(self, held: Held, apply: Callable, belongs: Mapping[str, str]) -> LayerUpdate:
        kind = ItemUpdate if self.blueprint.listed else LayerUpdate
        return kind(
            placed={path: self.placed[path] for path in self._of_layers},
            reduction=Reduction(self._precision, self._hierarchical),
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

    def _by_layer(self, staged: Staged, update: LayerUpdate) -> ByLayer:
        """Return the pass through a stack of layers."""
        model = staged.model()
        row = lambda x: lax.index_in_dim(x, 0, 0, keepdims=False)

        def values(own: Own, i: Any) -> Flat:
            pick = lambda x: lax.dynamic_index_in_dim(x, i, 0, False)
            return jax.tree.map(pick, self._values(own, staged))

        return ByLayer(
            model=replace(model, slots={path: row(staged.slots[path]) for path in model.slots}),
            layers=self._layers,
            values=values,
            update=update,
            mark=self._varying,
            unroll=self.execution.unroll or 1,
        )

    def _by_item(self, staged: Staged, update: LayerUpdate) -> ByItem:
        """Return the pass through a list of layers."""
        layers = self.blueprint.layers("train")

        def function(layer: Layer) -> Callable:
            def run(own: Own, slots: Flat, x: Any) -> Any:
                held = self._values(own, staged)
                return staged.run(layer, {path: held[path] for path in layer.paths}, slots, x)

            return run

        slots = [{p: staged.slots[p] for p in x.paths if p in staged.slots} for x in layers]
        return ByItem(
            model=staged.model(),
            layers=[function(layer) for layer in layers],
            slots=slots,
            update=update,
            mark=self._varying,
        )

    def _values(self, own: Own, staged: Staged) -> Flat:
        """Return the layers' parameters as they are stored, or as they stay gathered."""
        gathered = lambda path: self._gathered_once(self.placed[path])
        mine = {path: x for path, x in own.parameters.items() if not gathered(path)}
        all_of_them = {p: x for p, x in staged.parameters.items() if p.startswith(LAYERS)}
        return all_of_them | self._varying(mine)
