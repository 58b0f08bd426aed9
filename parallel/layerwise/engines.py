"""Gradient engines whose loop over layers is written out, forward and backward.

`LayerwiseEngine` prefetches layers from the host, one ahead of the layer that runs.
`LayerUpdateEngine` also updates each layer within the backward pass and then drops its gradient:
the gradients are reduced over all devices, divided by the weight of the loss (the head computes it
first) and applied. Parameters and optimizer state are stacks that the loop carries and updates in
place. Layers of a stack keep their first dimension, of length 1, so that specs and masks fit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from hfjax.parallel.adapters.model_template import LAYERS, Layer
from hfjax.parallel.engine.example_keys import layer_variables
from hfjax.parallel.engine.gradient_engine import LoopEngine, PassOutput, TrainState, check_trace
from hfjax.parallel.engine.layer_remat import offload_residuals
from hfjax.parallel.engine.local_outputs import local_outputs
from hfjax.parallel.engine.step_context import StepContext, num_examples
from hfjax.parallel.layer_order import arrange
from hfjax.parallel.layer_stack.bound_model import IN_A_LOOP, BoundModel
from hfjax.parallel.layerwise.layer_update import (
    Carry,
    LayerUpdate,
    ListedUpdate,
    StackedUpdate,
    average_gradients,
)
from hfjax.parallel.layerwise.passes import ListedPasses, StackedPasses
from hfjax.parallel.offload.host_memory import is_on_host, to_device
from hfjax.utils.mean import Mean
from hfjax.utils.paths import Flat, Index


@dataclass(frozen=True)
class LayerwiseEngine(LoopEngine):
    """An engine that runs a layer-stack model layer by layer."""

    def microbatch(self, parameters: Flat, keys: Callable) -> Callable:
        """Return (statistics, batch, number) -> `PassOutput`, of one microbatch."""
        context = self.context

        def run(statistics: Flat, batch, number: Index) -> PassOutput:
            batch_size = num_examples(batch)
            get_variables = lambda m, i: {
                **layer_variables(statistics, i),
                **keys(i, number, batch_size),
            }
            bound_model = self.bind_model(parameters, get_variables, batch, "train")
            sums = {path: x for path, x in bound_model.slots.items() if path.startswith(LAYERS)}
            layer_passes = self.passes(
                bound_model, lambda sums: bound_model.parameters, self._collect
            )
            aux_and_divisor = lambda aux: (aux, context.divisor(aux[0].weight))
            sums, outside, (mean, outputs) = layer_passes.run(sums, aux_and_divisor)
            grads = sums | context.reduce_outside(outside)
            gradients = context.pin({path: grads[path] for path in context.trainable})
            divisor = context.divisor(mean.weight)
            outputs = local_outputs(context.trace.global_batch, outputs, batch_size)
            return PassOutput(gradients, self.mean_of_one(mean), statistics, divisor, outputs)

        return run

    def eval_local(self, parameters: Flat, variables: Flat, batch: Any) -> Mean:
        """Return the loss of this device's examples."""
        return self._forward(parameters, variables, batch)[0]

    def predict_local(self, parameters: Flat, variables: Flat, batch: Any) -> Any:
        """Return the outputs of the model for this device's examples."""
        engine = replace(self, returns=("outputs",))
        return engine._forward(parameters, variables, batch)[1]

    def _forward(self, parameters: Flat, variables: Flat, batch: Any) -> tuple[Mean, Any]:
        get_variables = lambda m, i: layer_variables(variables, i)
        bound_model = self.bind_model(parameters, get_variables, batch, "eval")
        return self.passes(bound_model, lambda own: bound_model.parameters, self._collect).evaluate(
            {}
        )

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return self.context.template.num_layers

    def bind_model(
        self, parameters: Flat, variables: Callable, batch: Any, mode: str
    ) -> BoundModel:
        """Return the layer-stack model; parameters outside the layers are on the device."""
        context, of_layers = self.context, lambda path: path.startswith(LAYERS)
        inputs = context.cast_inputs(batch)
        return BoundModel(
            template=context.template,
            arrangement=arrange([self.layers], [(0, 0)]),
            parameters={p: x if of_layers(p) else to_device(x) for p, x in parameters.items()},
            comm_plans=context.comm_plans(mode == "train"),
            slots=context.slots(),
            variables=variables,
            inputs=lambda m: inputs,
            mean=lambda outputs, m: context.mean(outputs, batch),
            share=context.share,
            global_batch=context.trace.global_batch,
            mode=mode,
            policy=context.policy(),
            returns=self.returns,
            keeps_last=False,
            no_write_reason=IN_A_LOOP,
            wrap_layer=self._wrap_layer,
            seed=context.trace.seed,
        )

    def passes(
        self, bound_model: BoundModel, params_from_carry: Callable, after_backward: Callable
    ) -> StackedPasses | ListedPasses:
        """Return the pass through the layers, whose parameters are `params_from_carry(carry)`."""
        make_passes = (
            self._listed_passes if self.context.template.is_layer_list else self._stacked_passes
        )
        layer_params = lambda carry: {
            p: x for p, x in params_from_carry(carry).items() if p.startswith(LAYERS)
        }
        return make_passes(bound_model, layer_params, after_backward)

    def _stacked_passes(
        self, bound_model: BoundModel, params_from_carry: Callable, after_backward: Callable
    ) -> StackedPasses:
        model = bound_model.model()
        first = lambda x: lax.index_in_dim(x, 0, 0, keepdims=False)
        layer_of = lambda x, i: lax.dynamic_index_in_dim(x, i, 0, False)

        def layer_params(carry: Any, i: Index, on_host: bool) -> Flat:
            mine = {p: x for p, x in params_from_carry(carry).items() if is_on_host(x) == on_host}
            return {path: layer_of(x, i) for path, x in mine.items()}

        return StackedPasses(
            model=replace(
                model, slots={path: first(bound_model.slots[path]) for path in model.slots}
            ),
            layers=self.layers,
            device_params=lambda carry, i: layer_params(carry, i, on_host=False),
            host_params=lambda carry, i: to_device(layer_params(carry, i, on_host=True)),
            after_backward=after_backward,
            unroll=self.context.execution.unroll or 1,
        )

    def _listed_passes(
        self, bound_model: BoundModel, params_from_carry: Callable, after_backward: Callable
    ) -> ListedPasses:
        layers = self.context.template.layers(bound_model.mode)

        def function(layer: Layer) -> Callable:
            return lambda params, slots, x: bound_model.run(layer, params, slots, x)

        return ListedPasses(
            model=bound_model.model(),
            layers=[function(layer) for layer in layers],
            params=lambda carry, i: {
                path: params_from_carry(carry)[path] for path in layers[i].paths
            },
            slots=[
                {p: bound_model.slots[p] for p in x.paths if p in bound_model.slots} for x in layers
            ],
            after_backward=after_backward,
        )

    @property
    def _wrap_layer(self) -> Callable:
        """Return a wrapper so that layers save no weights: in the loop over a stack none does."""
        if not self.context.template.is_layer_list:
            return lambda function: function
        return lambda function: offload_residuals(function, lambda tensors: {}, barrier=True)

    def _collect(
        self, sums: Flat, i: Index, params: Flat, gradients: Flat, loss_mean: Mean
    ) -> Flat:
        """Return the gradients of all layers, with those of layer i."""
        if self.context.template.is_layer_list:
            return sums | gradients
        put = lambda x, g: lax.dynamic_update_index_in_dim(x, g, i, 0)
        return {path: put(x, gradients[path]) for path, x in sums.items()}


@dataclass(frozen=True)
class LayerUpdateEngine:
    """A layerwise engine whose layers are updated during the backward pass.

    Nothing accumulates: each parameter's gradient is placed as its optimizer state.
    """

    engine: LayerwiseEngine

    @classmethod
    def of(cls, context: StepContext) -> "LayerUpdateEngine":
        """Return the engine: gradients are placed as optimizer state."""
        param_specs = {
            path: replace(p, gradient=p.optimizer_state) for path, p in context.param_specs.items()
        }
        return cls(LayerwiseEngine(replace(context, param_specs=param_specs)))

    def train(
        self,
        train_state: TrainState,
        batch: Any,
        step: jax.Array,
        apply: Callable,
        owner_paths: Mapping[str, str],
    ) -> tuple[TrainState, Flat, jax.Array, Flat, Mean]:
        """Return the layers' new state; squares; finite; gradients outside the layers; Mean.

        `apply(gradients, optimizer state, counts, parameters) -> (parameters, optimizer state)`
        takes slices of the layers' stacks. All gradients, and squares, are those of the mean.
        `owner_paths`: name of an optimizer array -> path of its parameter.
        """
        context = self.engine.context

        def device(train_state: TrainState, batch, step: jax.Array) -> tuple:
            context.trace.begin(context.param_specs, weighted=True)
            bound_model = self._bind_model(train_state, batch, step)
            update = self._update(train_state, apply, owner_paths)
            params_of = lambda carry: self._current_params(carry, bound_model)
            layer_passes = self.engine.passes(bound_model, params_of, update)
            carry, outside, mean = layer_passes.run(
                self._carry(train_state), self._loss_and_divisor
            )
            check_trace(context, mean)
            gradients = context.pin(context.reduce_outside(outside))
            gradients = update.reduction(gradients, context.param_specs)
            gradients = average_gradients(gradients, context.num_local_losses)
            new = TrainState(carry.parameters, {}, carry.optimizer_state, {})
            return new, carry.squares, carry.finite, gradients, mean

        specs, optimizer_specs = context.specs("parameter"), context.specs("optimizer_state")
        state_specs = {name: optimizer_specs[path] for name, path in owner_paths.items()}
        layer_specs = {path: specs[path] for path in self._layer_paths}
        outside = {
            path: optimizer_specs[path] for path in context.trainable if path not in layer_specs
        }
        input_specs = TrainState(specs, P(), state_specs, P())
        in_specs = (input_specs, context.batch_spec, P())
        out_specs = (TrainState(layer_specs, P(), state_specs, P()), P(), P(), outside, P())
        return context.shard_map(device, in_specs, out_specs)(train_state, batch, step)

    def _loss_and_divisor(self, aux: tuple[Mean, None]) -> tuple[Mean, jax.Array]:
        """Return the Mean of all devices, and the divisor, given what the head reports."""
        mean, _ = aux
        return self.engine.context.reduce_loss(mean), self.engine.context.divisor(mean.weight)

    @property
    def _layer_paths(self) -> list[str]:
        """The layers' parameters that have a gradient."""
        return [path for path in self.engine.context.trainable if path.startswith(LAYERS)]

    def _bind_model(self, train_state: TrainState, batch: Any, step: jax.Array) -> BoundModel:
        """Return the layer-stack model, on the examples of this device."""
        context, batch_size = self.engine.context, num_examples(batch)
        keys, statistics = context.keys(train_state.variables, batch_size, step)
        batch = context.local_sequence_batch(batch)
        parameters = context.gather_once(train_state.parameters)
        variables = lambda m, i: {**layer_variables(statistics, i), **keys(i, m, batch_size)}
        return self.engine.bind_model(parameters, variables, batch, "train")

    def _update(
        self, train_state: TrainState, apply: Callable, owner_paths: Mapping[str, str]
    ) -> LayerUpdate:
        context = self.engine.context
        kind = ListedUpdate if context.template.is_layer_list else StackedUpdate
        return kind(
            param_specs={path: context.param_specs[path] for path in self._layer_paths},
            reduction=context.reduction,
            apply=lambda gradients, optimizer_state, old: apply(
                gradients, optimizer_state, train_state.counts, old
            ),
            owner_paths=owner_paths,
            num_local_losses=context.num_local_losses,
            on_nonfinite=context.execution.on_nonfinite,
        )

    def _carry(self, train_state: TrainState) -> Carry:
        """Return what is to be updated, before it is."""
        param_specs = self.engine.context.param_specs
        zeros = jnp.zeros(1 if self.engine.context.template.is_layer_list else self.engine.layers)
        wide = lambda path: zeros.astype(jnp.promote_types(param_specs[path].dtype, jnp.float32))
        return Carry(
            {path: train_state.parameters[path] for path in self._layer_paths},
            train_state.optimizer_state,
            {path: wide(path) for path in self._layer_paths},
            jnp.array(True),
        )

    def _current_params(self, carry: Carry, bound_model: BoundModel) -> Flat:
        """Return the layers' parameters as they are stored, or gathered for the step."""
        gathered = self.engine.context.gathered_for_step
        return bound_model.parameters | {
            p: x for p, x in carry.parameters.items() if p not in gathered
        }
