"""A layer-stack model as a pass over a batch sees it: before, in, and after its layers.

`BoundModel` makes the `StageFns` of one device, which pipeline stages and the loop over layers
run.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from hfjax.parallel.adapters.model_template import LAYERS, Layer, ModelTemplate, fill, raw_value
from hfjax.parallel.engine.comm_plan import CommPlan
from hfjax.parallel.engine.example_keys import is_random
from hfjax.parallel.engine.unshard import ShardedParam
from hfjax.parallel.jaxprs.split_backward import SplitBackward, trace_passes
from hfjax.parallel.jaxprs.stage_fns import StageFns
from hfjax.parallel.layer_order import Arrangement
from hfjax.parallel.layer_stack.embed_and_head import EmbedAndHead
from hfjax.parallel.layer_stack.run_layers import layer_function
from hfjax.parallel.spmd.global_batch import GlobalBatch, Placements
from hfjax.utils.paths import Flat, Index

IN_A_PIPELINE = (
    "in a pipeline nothing is written, since microbatches are in different layers at the same time"
)
IN_A_LOOP = (
    "with optimizer_in_backward, or parameters on the host, layers run in hfjax's own loop "
    "over layers (parallel/layerwise), which writes to no variable"
)
NO_STATISTICS = (
    "In place of BatchNorm normalise without running statistics (GroupNorm, LayerNorm, RMSNorm), "
    'or by frozen ones (of hfjax\'s models of images: norm="group", norm="frozen"). Hand auxiliary '
    "losses on beside the activations: a layer may take and return a pytree."
)


@dataclass(frozen=True)
class BoundModel:
    """One pass over the microbatches of a step, on this device."""

    template: ModelTemplate
    arrangement: Arrangement
    parameters: Flat  # as stored: of the layers, this stage's
    comm_plans: Mapping[str, CommPlan]
    slots: Mapping[str, Any]  # shape and dtype of the gradient of each parameter that has one
    variables: Callable  # (m, number of a layer or None) -> variables for this microbatch
    inputs: Callable  # m -> the model's inputs
    mean: Callable  # (outputs, m) -> Mean of distributed values
    share: Callable  # such a Mean -> this device's share
    global_batch: GlobalBatch
    mode: str
    policy: Callable | None
    returns: Collection[str]  # "outputs": the head reports them beside the Mean
    keeps_last: bool  # in the last microbatch nothing is recomputed
    no_write_reason: str = field(
        default=IN_A_PIPELINE, kw_only=True
    )  # why no variable is written to
    # Wraps a layer's function to save something else for its backward pass.
    wrap_layer: Callable = field(default=lambda function: function, kw_only=True)
    seed: Any = field(default=1.0, kw_only=True)  # the cotangent of the loss of a microbatch

    def model(self) -> StageFns:
        """Return what the executor runs."""
        layers = [path for path in self.parameters if path.startswith(LAYERS)]
        layer_shape = lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype)
        return StageFns(
            embed=self.first,
            head=self.last,
            layer_passes=self.passes,
            stage_params={path: self.parameters[path] for path in layers},
            outer_params=self.unsharded_outer_params,
            slots={path: layer_shape(self.slots[path]) for path in layers if path in self.slots},
            unit_order=self.arrangement.order,
            last_passes=replace(self, policy=None).passes if self.keeps_last else None,
            seed=self.seed,
        )

    @cached_property
    def unsharded_outer_params(self) -> Flat:
        """Parameters outside the layers, unsharded once for all microbatches."""
        outer = {p: v for p, v in self.parameters.items() if not p.startswith(LAYERS)}
        return {
            path: self.sharded_param(path, value, None).unshard() for path, value in outer.items()
        }

    def sharded_param(self, path: str, value: jax.Array, slot: jax.Array | None) -> ShardedParam:
        """Return a device's shard of a parameter, with the slot of its gradient."""
        return ShardedParam(value, slot, self.comm_plans[path])

    def first(self, outside: Flat, m: Index) -> Any:
        """Return what enters the first layer."""
        return self.global_batch.redistribute(
            self._embed(outside, m), self._placements, "before layers"
        )

    def _embed(self, outside: Flat, m: Index) -> Any:
        return self._run_end("embed", outside, self.global_batch.as_sharded(self.inputs(m)), m)

    def _run_end(self, name: str, outside: Flat, x: Any, m: Index) -> Any:
        """Return the output of embed or head on x."""
        before = self.variables(m, None)
        y, after = EmbedAndHead(self.template, self.mode, self.global_batch).run(
            name, outside, before, x
        )
        self._check_unwritten(name, [p for p, x in after.items() if x is not before[p]])
        return y

    @cached_property
    def _placements(self) -> Placements | None:
        """The placements of stacked layers' outputs; None: those of a list have their own."""
        if self.template.is_layer_list or self.global_batch.is_unsharded:
            return None
        layers = {path: x for path, x in self.parameters.items() if path.startswith(LAYERS)}
        zero = jnp.int32(0)

        def layer(x: Any) -> Any:
            one = {path: lax.index_in_dim(x, 0, 0, False) for path, x in layers.items()}
            return self._unit((one, zero, zero), {}, x, skip_placement=True)

        return self.global_batch.carry_placements(
            layer, jax.eval_shape(self._embed, self.unsharded_outer_params, zero)
        )

    def last(self, outside: Flat, x: Any, m: Index) -> tuple[jax.Array, Any]:
        """Return the total of the loss, which is differentiated; its Mean, and outputs or None."""
        outputs = self._run_end("head", outside, x, m)
        local_mean = self.share(self.mean(outputs, m))
        return local_mean.total, (local_mean, outputs if "outputs" in self.returns else None)

    @cached_property
    def layers(self) -> list[Layer]:
        """The layers of a list, or the one layer that stands for all stacked ones."""
        return self.template.layers(self.mode)

    def passes(self, known: tuple, slots: Flat, x: Any, split: bool) -> SplitBackward:
        """Return the passes of a unit: of one layer."""
        return trace_passes(self._unit, known, slots, x, split)

    def _unit(self, known: tuple, slots: Flat, x: Any, skip_placement: bool = False) -> Any:
        values, number, m = known
        layer = self.layers[0]
        layer_variables = self.variables(m, number) if layer.variables else {}
        param_of = lambda path: self.sharded_param(path, values[path], slots.get(path))
        y = self.apply(layer, param_of, layer_variables, x)
        if skip_placement:
            return y
        return self.global_batch.redistribute(
            y, self._placements, "between layers", self.template.num_layers
        )

    def run(self, layer: Layer, values: Flat, slots: Flat, x: Any) -> Any:
        """Return the output of a layer of a list on `x`, given stored parameters."""
        param_of = lambda path: self.sharded_param(path, values[path], slots.get(path))
        layer_variables = self.variables(0, None) if layer.variables else {}
        return self.apply(layer, param_of, layer_variables, x)

    def apply(self, layer: Layer, parameter: Callable, variables: Flat, x: Any) -> Any:
        """Return the output of a layer on `x`."""
        if not isinstance(layer.graph, nnx.GraphDef):
            return self.global_batch.run(f"{LAYERS}{layer.number}", layer.graph, x)
        listed = self.template.is_layer_list
        name = f"{LAYERS}{layer.number}" if listed else "layers"
        times = 1 if listed else self.template.num_layers
        run = layer_function(layer.graph, self.policy, self.global_batch, name=name, times=times)
        function = self.wrap_layer(run)
        state = fill(layer.variables, variables.__getitem__)
        y, written = function(fill(layer.parameters, parameter), state, x)
        path = {keys: raw_value(variable).path for keys, variable in layer.variables}
        self._check_unwritten("a layer", [path[keys] for keys, _ in nnx.to_flat_state(written)])
        return y

    def _check_unwritten(self, who: str, written: list[str]) -> None:
        """Refuse to lose what is written; random generators get new keys in each microbatch."""
        names = [path for path in written if not is_random(self.template.variables[path])]
        if names:
            raise ValueError(
                f"{who} writes to {', '.join(names)}: {self.no_write_reason}. {NO_STATISTICS}"
            )
