"""Data planes whose loop over layers is written out, forward and backward.

`LayerwisePlane` fetches layers from the host, one ahead of the layer that runs. `LayerUpdatePlane`
also updates each layer within the backward pass and then drops its gradient: the gradients are
reduced over all devices, divided by the weight of the loss (the head computes it first) and
applied. Parameters and moments are stacks that the loop carries and updates in place. Rows of a
stack keep their first dimension, of length 1, so that specs and masks fit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from hfjax.base.mean import Mean, as_mean
from hfjax.base.paths import Flat, Index
from hfjax.parallel.arrangement import arrange
from hfjax.parallel.engine.blueprint import LAYERS, Layer
from hfjax.parallel.engine.fetch import reduce_gradient
from hfjax.parallel.engine.gradients import (
    DataPlane,
    StepInputs,
    cast_inputs,
    rows_of,
    variables_of,
)
from hfjax.parallel.engine.layers import offload_residuals
from hfjax.parallel.engine.parts import PlacedModel
from hfjax.parallel.layerwise.passes import ListedPasses, StackedPasses
from hfjax.parallel.layerwise.update import Carry, ListedUpdate, StackedUpdate
from hfjax.parallel.memory import is_on_host, to_device
from hfjax.parallel.placement import Placed


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
            sums, outside, mean = run.run(sums, lambda mean: mean)
            gradients = sums | self._given(outside, staged)
            return self._pin({path: gradients[path] for path in self._trained}), mean, statistics

        return run

    def _evaluated(self, stored: Flat, held: Flat, batch: Any) -> Any:
        staged = self._staged(stored, lambda m, i: variables_of(held, i), batch, "eval", set())
        return self._pass(staged, lambda own: staged.parameters, self._collect).evaluate({})

    def _collect(self, sums: Flat, i: Index, stored: Flat, gradients: Flat, told: Any) -> Flat:
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
    ) -> PlacedModel:
        """Return the model in three parts; what is outside of the layers is on the device."""
        inputs = cast_inputs(batch, self._precision.compute)
        of_layers = lambda path: path.startswith(LAYERS)
        training = mode == "train"
        moves = {p: self._movement(x, unread, training) for p, x in self.placed.items()}
        return PlacedModel(
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
            wanted=None,
            keeps_last=False,
            unwritten="layers run in a loop that is written out, which writes to no variable",
            keeping=self._keeping,
        )

    @property
    def _keeping(self) -> Callable:
        """Return what makes a layer keep no weights: in a loop written out none does."""
        if not self.blueprint.listed:
            return lambda function: function
        return lambda function: offload_residuals(function, lambda tensors: {}, barrier=True)

    def _given(self, outside: Flat, staged: PlacedModel) -> Flat:
        """Return the gradients outside the layers where they accumulate."""
        wide = lambda p: jnp.promote_types(p.dtype, jnp.float32)
        trained = {path: g for path, g in outside.items() if not self.placed[path].frozen}
        return self._pin(
            {
                p: reduce_gradient(staged.movements[p], g, wide(self.placed[p]))
                for p, g in trained.items()
            }
        )

    def _pass(
        self, staged: PlacedModel, stored: Callable, after: Callable
    ) -> "StackedPasses | ListedPasses":
        """Return the pass through the layers, whose parameters are `stored(own)`."""
        kind = self._through_list if self.blueprint.listed else self._through_stack
        of_layers = lambda own: {p: x for p, x in stored(own).items() if p.startswith(LAYERS)}
        return kind(staged, of_layers, after)

    def _through_stack(
        self, staged: PlacedModel, stored: Callable, after: Callable
    ) -> StackedPasses:
        model = staged.model()
        first = lambda x: lax.index_in_dim(x, 0, 0, keepdims=False)
        row = lambda x, i: lax.dynamic_index_in_dim(x, i, 0, False)

        def rows(own: Any, i: Index, on_host: bool) -> Flat:
            mine = {p: x for p, x in stored(own).items() if is_on_host(x) == on_host}
            return {path: row(x, i) for path, x in mine.items()}

        return StackedPasses(
            model=replace(model, slots={path: first(staged.slots[path]) for path in model.slots}),
            layers=self._layers,
            near=lambda own, i: rows(own, i, on_host=False),
            far=lambda own, i: to_device(rows(own, i, on_host=True)),
            after=after,
            unroll=self.execution.unroll or 1,
        )

    def _through_list(self, staged: PlacedModel, stored: Callable, after: Callable) -> ListedPasses:
        layers = self.blueprint.layers(staged.mode)

        def function(layer: Layer) -> Callable:
            return lambda stored, slots, x: staged.run(layer, stored, slots, x)

        return ListedPasses(
            model=staged.model(),
            layers=[function(layer) for layer in layers],
            stored=lambda own, i: {path: stored(own)[path] for path in layers[i].paths},
            slots=[{p: staged.slots[p] for p in x.paths if p in staged.slots} for x in layers],
            after=after,
        )


@dataclass(frozen=True)
class LayerUpdatePlane(LayerwisePlane):
    """A data plane whose layers are updated during the backward pass."""

    def __post_init__(self):
        """Nothing accumulates: every gradient goes to its moments' place at once."""
        super().__post_init__()
        placed = {path: replace(p, gradient=p.moment) for path, p in self.placed.items()}
        object.__setattr__(self, "placed", placed)

    def train(
        self,
        held: StepInputs,
        batch: Any,
        step: jax.Array,
        apply: Callable,
        belongs: Mapping[str, str],
    ) -> tuple[StepInputs, Flat, jax.Array, Flat, Mean]:
        """Return the layers' new state; squares; finite; gradients outside the layers; Mean.

        `apply(gradients, moments, counts, parameters) -> (parameters, moments)` is given rows of
        the layers' stacks and gradients of the mean; the outside' gradients are those of the total.
        `belongs` says of each of the moments to which parameter it belongs.
        """

        def device(held, batch, step):
            unread = set(self.placed)
            staged = self._of_step(held, batch, step, unread)
            update = self._update(held, apply, belongs)
            stored = lambda own: self._stored(own, staged)
            own, outside, mean = self._pass(staged, stored, update).run(self._own(held), self._sum)
            self._tell_unread(unread)
            gradients = update.reduction(self._given(outside, staged), self.placed)
            new = StepInputs(own.parameters, {}, own.moments, {})
            return new, own.squares, own.finite, gradients, mean

        specs, moments = self._specs("parameter"), self._specs("moment")
        of_moments = {name: moments[path] for name, path in belongs.items()}
        trained = {path: specs[path] for path in self._of_layers}
        outside = {path: moments[path] for path in self._trained if path not in trained}
        in_specs = (StepInputs(specs, P(), of_moments, P()), P(self._batch_axes), P())
        out_specs = (StepInputs(trained, P(), of_moments, P()), P(), P(), outside, P())
        return self._shard_map(device, in_specs, out_specs)(held, batch, step)

    @property
    def _of_layers(self) -> list[str]:
        """The layers' parameters that have a gradient."""
        return [path for path in self._trained if path.startswith(LAYERS)]

    @property
    def guards(self) -> bool:
        """Whether a layer keeps its parameters if its gradient is not finite."""
        return self.execution.nonfinite != "apply"

    def _of_step(self, held: StepInputs, batch: Any, step: Any, unread: set[str]) -> PlacedModel:
        """Return the model in three parts, on the rows of this device."""
        random, statistics = self._sort(held.variables)
        rows = rows_of(batch)
        keys = self._keys(random, rows, step)
        parameters = self._gather_once(held.parameters)
        variables = lambda m, i: {**variables_of(statistics, i), **keys(i, m, rows)}
        return self._staged(parameters, variables, batch, "train", unread)

    def _update(
        self, held: StepInputs, apply: Callable, belongs: Mapping[str, str]
    ) -> StackedUpdate:
        kind = ListedUpdate if self.blueprint.listed else StackedUpdate
        return kind(
            placed={path: self.placed[path] for path in self._of_layers},
            reduction=self._reduction,
            apply=lambda gradients, moments, old: apply(gradients, moments, held.counts, old),
            belongs=belongs,
            guards=self.guards,
        )

    def _own(self, held: StepInputs) -> Carry:
        """Return what is to be updated, as it is before."""
        zeros = jnp.zeros(1 if self.blueprint.listed else self._layers, jnp.float32)
        wide = lambda path: zeros.astype(jnp.promote_types(self.placed[path].dtype, zeros.dtype))
        return Carry(
            {path: held.parameters[path] for path in self._of_layers},
            held.moments,
            {path: wide(path) for path in self._of_layers},
            jnp.array(True),
        )

    def _stored(self, own: Carry, staged: PlacedModel) -> Flat:
        """Return the layers' parameters as they are stored, or as they stay gathered."""
        gathered = lambda path: self._gathered_once(self.placed[path])
        mine = {path: x for path, x in own.parameters.items() if not gathered(path)}
        return {**staged.parameters, **mine}
