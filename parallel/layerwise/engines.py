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

from hfjax.parallel.adapters.model_template import LAYERS, Layer
from hfjax.parallel.engine.example_keys import variables_of
from hfjax.parallel.engine.gradient_engine import LoopPlane, Pass, StepInputs, check_traced
from hfjax.parallel.engine.layer_remat import offload_residuals
from hfjax.parallel.engine.step_context import StepContext, rows_of
from hfjax.parallel.layer_order import arrange
from hfjax.parallel.layer_stack.sharded_model import IN_A_LOOP, PlacedModel
from hfjax.parallel.layerwise.layer_update import (
    Carry,
    LayerUpdate,
    ListedUpdate,
    StackedUpdate,
    averaged,
)
from hfjax.parallel.layerwise.passes import ListedPasses, StackedPasses
from hfjax.parallel.offload.host_memory import is_on_host, to_device
from hfjax.utils.mean import Mean
from hfjax.utils.paths import Flat, Index


@dataclass(frozen=True)
class LayerwisePlane(LoopPlane):
    """A plane that runs a model in three parts layer by layer."""

    def microbatch(self, parameters: Flat, keys: Callable) -> Callable:
        """Return (statistics, batch, number) -> `Pass`, of one microbatch."""
        context = self.context

        def run(statistics: Flat, batch, number: Index) -> Pass:
            rows = rows_of(batch)
            of = lambda m, i: {**variables_of(statistics, i), **keys(i, number, rows)}
            placed = self.placed(parameters, of, batch, "train")
            sums = {path: x for path, x in placed.slots.items() if path.startswith(LAYERS)}
            through = self.passes(placed, lambda sums: placed.parameters, self._collect)
            told = lambda mean: (mean, context.divisor(mean.weight))
            sums, outside, mean = through.run(sums, told)
            found = sums | context.reduce_outside(outside)
            gradients = context.pin({path: found[path] for path in context.trained})
            return Pass(gradients, mean, statistics, context.divisor(mean.weight))

        return run

    def evaluated(self, parameters: Flat, variables: Flat, batch: Any) -> Mean:
        """Return the loss of this device's rows."""
        return self._forward(parameters, variables, batch, None)

    def predicted(self, parameters: Flat, variables: Flat, batch: Any) -> Any:
        """Return the outputs of the model for this device's rows."""
        return self._forward(parameters, variables, batch, "outputs").outputs

    def _forward(self, parameters: Flat, variables: Flat, batch: Any, wanted: str | None) -> Any:
        of = lambda m, i: variables_of(variables, i)
        placed = replace(self.placed(parameters, of, batch, "eval"), wanted=wanted)
        return self.passes(placed, lambda own: placed.parameters, self._collect).evaluate({})

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return self.context.blueprint.number_of_layers

    def placed(self, parameters: Flat, variables: Callable, batch: Any, mode: str) -> PlacedModel:
        """Return the model in three parts; what is outside of the layers is on the device."""
        context, of_layers = self.context, lambda path: path.startswith(LAYERS)
        inputs = context.inputs(batch)
        return PlacedModel(
            blueprint=context.blueprint,
            arrangement=arrange([self.layers], [(0, 0)]),
            parameters={p: x if of_layers(p) else to_device(x) for p, x in parameters.items()},
            movements=context.movements(mode == "train"),
            slots=context.slots(),
            variables=variables,
            inputs=lambda m: inputs,
            mean=lambda outputs, m: context.mean(outputs, batch),
            share=context.share,
            rows=context.traced.rows,
            mode=mode,
            policy=context.policy(),
            wanted=None,
            keeps_last=False,
            unwritten=IN_A_LOOP,
            keeping=self._keeping,
            seed=context.traced.seed,
        )

    def passes(
        self, placed: PlacedModel, stored: Callable, after: Callable
    ) -> StackedPasses | ListedPasses:
        """Return the pass through the layers, whose parameters are `stored(carry)`."""
        through = self._through_list if self.context.blueprint.listed else self._through_stack
        of_layers = lambda carry: {p: x for p, x in stored(carry).items() if p.startswith(LAYERS)}
        return through(placed, of_layers, after)

    def _through_stack(
        self, placed: PlacedModel, stored: Callable, after: Callable
    ) -> StackedPasses:
        model = placed.model()
        first = lambda x: lax.index_in_dim(x, 0, 0, keepdims=False)
        row = lambda x, i: lax.dynamic_index_in_dim(x, i, 0, False)

        def rows(carry: Any, i: Index, on_host: bool) -> Flat:
            mine = {p: x for p, x in stored(carry).items() if is_on_host(x) == on_host}
            return {path: row(x, i) for path, x in mine.items()}

        return StackedPasses(
            model=replace(model, slots={path: first(placed.slots[path]) for path in model.slots}),
            layers=self.layers,
            near=lambda carry, i: rows(carry, i, on_host=False),
            far=lambda carry, i: to_device(rows(carry, i, on_host=True)),
            after=after,
            unroll=self.context.execution.unroll or 1,
        )

    def _through_list(self, placed: PlacedModel, stored: Callable, after: Callable) -> ListedPasses:
        layers = self.context.blueprint.layers(placed.mode)

        def function(layer: Layer) -> Callable:
            return lambda stored, slots, x: placed.run(layer, stored, slots, x)

        return ListedPasses(
            model=placed.model(),
            layers=[function(layer) for layer in layers],
            stored=lambda carry, i: {path: stored(carry)[path] for path in layers[i].paths},
            slots=[{p: placed.slots[p] for p in x.paths if p in placed.slots} for x in layers],
            after=after,
        )

    @property
    def _keeping(self) -> Callable:
        """Return what makes a layer keep no weights: in a loop written out none does."""
        if not self.context.blueprint.listed:
            return lambda function: function
        return lambda function: offload_residuals(function, lambda tensors: {}, barrier=True)

    def _collect(self, sums: Flat, i: Index, stored: Flat, gradients: Flat, told: Mean) -> Flat:
        """Return the gradients of all layers, with those of layer i."""
        if self.context.blueprint.listed:
            return sums | gradients
        put = lambda x, g: lax.dynamic_update_index_in_dim(x, g, i, 0)
        return {path: put(x, gradients[path]) for path, x in sums.items()}


@dataclass(frozen=True)
class LayerUpdatePlane:
    """A layer by layer plane whose layers are updated during the backward pass.

    Nothing accumulates: the gradient of each parameter lies where its moments do.
    """

    plane: LayerwisePlane

    @classmethod
    def of(cls, context: StepContext) -> "LayerUpdatePlane":
        """Return the plane: gradients go straight to where their moments are."""
        placed = {path: replace(p, gradient=p.moment) for path, p in context.placed.items()}
        return cls(LayerwisePlane(replace(context, placed=placed)))

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
        the layers' stacks. All gradients, and squares, are those of the mean. `belongs` says of
        each of the moments to which parameter it belongs.
        """
        context = self.plane.context

        def device(held: StepInputs, batch, step: jax.Array) -> tuple:
            context.traced.begin(context.placed)
            context.traced.weighed = True
            placed = self._of_step(held, batch, step)
            update = self._update(held, apply, belongs)
            stored = lambda carry: self._stored(carry, placed)
            through = self.plane.passes(placed, stored, update)
            carry, outside, mean = through.run(self._carry(held), self._told)
            check_traced(context, mean)
            gradients = context.pin(context.reduce_outside(outside))
            gradients = update.reduction(gradients, context.placed)
            gradients = averaged(gradients, context.own_losses)
            new = StepInputs(carry.parameters, {}, carry.moments, {})
            return new, carry.squares, carry.finite, gradients, mean

        specs, moments = context.specs("parameter"), context.specs("moment")
        of_moments = {name: moments[path] for name, path in belongs.items()}
        trained = {path: specs[path] for path in self._of_layers}
        outside = {path: moments[path] for path in context.trained if path not in trained}
        given = StepInputs(specs, P(), of_moments, P())
        in_specs = (given, context.batch_spec, P())
        out_specs = (StepInputs(trained, P(), of_moments, P()), P(), P(), outside, P())
        return context.shard_map(device, in_specs, out_specs)(held, batch, step)

    def _told(self, mean: Mean) -> tuple[Mean, jax.Array]:
        """Return the Mean of all devices, and the divisor."""
        return self.plane.context.over_devices(mean), self.plane.context.divisor(mean.weight)

    @property
    def _of_layers(self) -> list[str]:
        """The layers' parameters that have a gradient."""
        return [path for path in self.plane.context.trained if path.startswith(LAYERS)]

    def _of_step(self, held: StepInputs, batch: Any, step: jax.Array) -> PlacedModel:
        """Return the model in three parts, on the rows of this device."""
        context, rows = self.plane.context, rows_of(batch)
        keys, statistics = context.keys(held.variables, rows, step)
        batch = context.dealt(batch)
        parameters = context.gather_once(held.parameters)
        variables = lambda m, i: {**variables_of(statistics, i), **keys(i, m, rows)}
        return self.plane.placed(parameters, variables, batch, "train")

    def _update(self, held: StepInputs, apply: Callable, belongs: Mapping[str, str]) -> LayerUpdate:
        context = self.plane.context
        kind = ListedUpdate if context.blueprint.listed else StackedUpdate
        return kind(
            placed={path: context.placed[path] for path in self._of_layers},
            reduction=context.reduction,
            apply=lambda gradients, moments, old: apply(gradients, moments, held.counts, old),
            belongs=belongs,
            own_losses=context.own_losses,
            nonfinite=context.execution.nonfinite,
        )

    def _carry(self, held: StepInputs) -> Carry:
        """Return what is to be updated, as it is before."""
        placed = self.plane.context.placed
        zeros = jnp.zeros(1 if self.plane.context.blueprint.listed else self.plane.layers)
        wide = lambda path: zeros.astype(jnp.promote_types(placed[path].dtype, jnp.float32))
        return Carry(
            {path: held.parameters[path] for path in self._of_layers},
            held.moments,
            {path: wide(path) for path in self._of_layers},
            jnp.array(True),
        )

    def _stored(self, carry: Carry, placed: PlacedModel) -> Flat:
        """Return the layers' parameters as they are stored, or as they stay gathered."""
        gathered = self.plane.context.gathered_for_step
        return placed.parameters | {p: x for p, x in carry.parameters.items() if p not in gathered}
