"""The data plane of a step whose loop over layers is written out, forward and backward.

It fetches layers from the host one ahead of the one that runs (`by_layer`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from hfjax.mean import as_mean
from hfjax.parallel.arrangement import arrange
from hfjax.parallel.blueprint import LAYERS, Layer
from hfjax.parallel.by_item import ByItem
from hfjax.parallel.by_layer import ByLayer
from hfjax.parallel.fetch import give
from hfjax.parallel.gradients import DataPlane, cast_inputs, rows_of, variables_of
from hfjax.parallel.kept import kept_by_slots
from hfjax.parallel.memory import is_on_host, to_device
from hfjax.parallel.reduction import Flat, Placed
from hfjax.parallel.staged import Staged


@dataclass(frozen=True)
class LayerwisePlane(DataPlane):
    """A data plane that runs a model in three parts layer by layer."""

    def _microbatch(
        self, parameters: Flat, random: Flat, local_rows: int, step: Any, traced: tuple[set, set]
    ) -> Callable:
        """Return (statistics, batch, number) -> (gradients, Mean, statistics) of one microbatch."""
        unread, _ = traced
        keys = self._keys(random, local_rows, step)

        def run(statistics, batch, number):
            rows = rows_of(batch)
            of = lambda m, i: {**variables_of(statistics, i), **keys(i, number, rows)}
            staged = self._staged(parameters, of, batch, "train", unread)
            sums = {path: x for path, x in staged.slots.items() if path.startswith(LAYERS)}
            run = self._pass(staged, lambda sums: staged.parameters, self._collect)
            sums, ends, mean = run.run(sums, lambda mean: mean)
            gradients = sums | self._given(ends, staged)
            return self._pin({path: gradients[path] for path in self._trained}), mean, statistics

        return run

    def _evaluated(self, stored: Flat, held: Flat, batch: Any) -> Any:
        staged = self._staged(stored, lambda m, i: variables_of(held, i), batch, "eval", set())
        return self._pass(staged, lambda own: staged.parameters, self._collect).evaluate({})

    def _collect(self, sums: Flat, i: Any, stored: Flat, gradients: Flat, told: Any) -> Flat:
        """Return the gradients of all layers, with those of layer i."""
        if self.blueprint.listed:
            return sums | gradients
        put = lambda x, g: lax.dynamic_update_index_in_dim(x, g, i, 0)
        return {path: put(x, gradients[path]) for path, x in sums.items()}

    @property
    def _layers(self) -> int:
        if self.blueprint.listed:
            return len(self.blueprint.layers("train"))
        return next(p.shape[0] for path, p in self.placed.items() if path.startswith(LAYERS))

    def _gathered_once(self, p: Placed) -> bool:
        """Return whether a split parameter is gathered for the whole step: if that is asked for."""
        return bool(p.split("parameter")) and not self.execution.reshard_after_forward

    def _staged(
        self, parameters: Flat, variables: Callable, batch: Any, mode: str, unread: set[str]
    ) -> Staged:
        """Return the model in three parts; what is outside of the layers is on the device."""
        inputs = cast_inputs(batch, self._precision.compute)
        of_layers = lambda path: path.startswith(LAYERS)
        training = mode == "train"
        moves = {p: self._movement(x, unread, training) for p, x in self.placed.items()}
        return Staged(
            blueprint=self.blueprint,
            arrangement=arrange([self._layers], [(0, 0)]),
            parameters={p: x if of_layers(p) else to_device(x) for p, x in parameters.items()},
            movements=moves,
            slots=self._slots(),
            variables=variables,
            inputs=lambda m: inputs,
            mean=lambda outputs, m: as_mean(self.loss(outputs, batch), rows_of(batch)),
            mode=mode,
            policy=self._policy(),
            tells=None,
            keeps_last=False,
            unwritten="layers run in a loop that is written out, which writes to no variable",
            keeping=self._keeping,
        )

    @property
    def _keeping(self) -> Callable:
        """Return what makes a layer keep no weights: in a loop written out none does."""
        if not self.blueprint.listed:
            return lambda function: function
        return lambda function: kept_by_slots(function, lambda tensors: {}, barrier=True)

    def _given(self, ends: Flat, staged: Staged) -> Flat:
        """Return the gradients of the ends where they accumulate."""
        wide = lambda p: jnp.promote_types(p.dtype, jnp.float32)
        trained = {path: g for path, g in ends.items() if not self.placed[path].frozen}
        return self._pin(
            {p: give(staged.movements[p], g, wide(self.placed[p])) for p, g in trained.items()}
        )

    def _pass(self, staged: Staged, stored: Callable, after: Callable) -> "ByLayer | ByItem":
        """Return the pass through the layers, whose parameters are `stored(own)`."""
        kind = self._through_list if self.blueprint.listed else self._through_stack
        of_layers = lambda own: {p: x for p, x in stored(own).items() if p.startswith(LAYERS)}
        return kind(staged, of_layers, after)

    def _through_stack(self, staged: Staged, stored: Callable, after: Callable) -> ByLayer:
        model = staged.model()
        first = lambda x: lax.index_in_dim(x, 0, 0, keepdims=False)
        row = lambda x, i: lax.dynamic_index_in_dim(x, i, 0, False)

        def rows(own: Any, i: Any, on_host: bool) -> Flat:
            mine = {p: x for p, x in stored(own).items() if is_on_host(x) == on_host}
            return {path: row(x, i) for path, x in mine.items()}

        return ByLayer(
            model=replace(model, slots={path: first(staged.slots[path]) for path in model.slots}),
            layers=self._layers,
            near=lambda own, i: rows(own, i, on_host=False),
            far=lambda own, i: to_device(rows(own, i, on_host=True)),
            after=after,
            unroll=self.execution.unroll or 1,
        )

    def _through_list(self, staged: Staged, stored: Callable, after: Callable) -> ByItem:
        layers = self.blueprint.layers(staged.mode)

        def function(layer: Layer) -> Callable:
            return lambda stored, slots, x: staged.run(layer, stored, slots, x)

        return ByItem(
            model=staged.model(),
            layers=[function(layer) for layer in layers],
            stored=lambda own, i: {path: stored(own)[path] for path in layers[i].paths},
            slots=[{p: staged.slots[p] for p in x.paths if p in staged.slots} for x in layers],
            after=after,
        )
