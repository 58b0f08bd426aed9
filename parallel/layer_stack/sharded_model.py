"""A model in three parts as a pass over a batch sees it: before, in, and after its layers.

`PlacedModel` makes the `ModelParts` of one device, which pipeline stages and the loop over layers
run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from hfjax.parallel.adapters.model_template import LAYERS, Blueprint, Layer, fill, raw
from hfjax.parallel.engine.comm_plan import Movement
from hfjax.parallel.engine.example_keys import is_random
from hfjax.parallel.engine.unshard import Stored
from hfjax.parallel.jaxprs.split_backward import Dissected, dissect
from hfjax.parallel.jaxprs.stage_fns import Extras, ModelParts
from hfjax.parallel.layer_order import Arrangement
from hfjax.parallel.layer_stack.embed_and_head import Ends
from hfjax.parallel.layer_stack.run_layers import layer_function
from hfjax.parallel.spmd.global_batch import Kinds, OnRows
from hfjax.utils.mean import Mean
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
class PlacedModel:
    """One pass over the microbatches of a step, on this device."""

    blueprint: Blueprint
    arrangement: Arrangement
    parameters: Flat  # as stored: of the layers, this stage's rows
    movements: Mapping[str, Movement]
    slots: Mapping[str, Any]  # shape and dtype of the gradient of each parameter that has one
    variables: Callable  # (m, number of a layer or None) -> variables for this microbatch
    inputs: Callable  # m -> what the model is given
    mean: Callable  # (outputs, m) -> Mean of values
    share: Callable  # Mean of values -> this device's share
    rows: OnRows
    mode: str
    policy: Callable | None
    wanted: str | None  # "losses" or "outputs": see Extras
    keeps_last: bool  # in the last microbatch nothing is recomputed
    unwritten: str = field(default=IN_A_PIPELINE, kw_only=True)  # why no variable is written to
    # Makes of a layer's function one that keeps something else for its backward pass.
    keeping: Callable = field(default=lambda function: function, kw_only=True)
    seed: Any = field(default=1.0, kw_only=True)  # the cotangent of the loss of a microbatch

    def model(self) -> ModelParts:
        """Return what the executor runs."""
        layers = [path for path in self.parameters if path.startswith(LAYERS)]
        row = lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype)
        return ModelParts(
            first=self.first,
            last=self.last,
            passes=self.passes,
            values={path: self.parameters[path] for path in layers},
            outside=self.outside,
            slots={path: row(self.slots[path]) for path in layers if path in self.slots},
            order=self.arrangement.order,
            keep=replace(self, policy=None).passes if self.keeps_last else None,
            seed=self.seed,
        )

    @cached_property
    def outside(self) -> Flat:
        """What lies outside the layers, fetched once for all microbatches."""
        outside = {p: v for p, v in self.parameters.items() if not p.startswith(LAYERS)}
        return {path: self.stored(path, value, None).fetch() for path, value in outside.items()}

    def stored(self, path: str, value: jax.Array, slot: jax.Array | None) -> Stored:
        """Return what a device stores of a parameter, with the slot of its gradient."""
        return Stored(value, slot, self.movements[path])

    def first(self, outside: Flat, m: Index) -> Any:
        """Return what enters the first layer."""
        return self.rows.as_kinds(self._embedded(outside, m), self._kinds, "before layers")

    def _embedded(self, outside: Flat, m: Index) -> Any:
        return self._end("embed", outside, self.rows.values(self.inputs(m)), m)

    def _end(self, name: str, outside: Flat, x: Any, m: Index) -> Any:
        """Return what embed or head makes of x."""
        before = self.variables(m, None)
        y, after = Ends(self.blueprint, self.mode, self.rows).run(name, outside, before, x)
        self._check_unwritten(name, [p for p, x in after.items() if x is not before[p]])
        return y

    @cached_property
    def _kinds(self) -> Kinds | None:
        """The kinds of what stacked layers hand on; None: layers of a list hand on what they do."""
        if self.blueprint.listed or self.rows.alone:
            return None
        layers = {path: x for path, x in self.parameters.items() if path.startswith(LAYERS)}
        zero = jnp.int32(0)

        def layer(x: Any) -> Any:
            one = {path: lax.index_in_dim(x, 0, 0, False) for path, x in layers.items()}
            return self._unit((one, zero, zero), {}, x, as_it_is=True)

        return self.rows.kinds(layer, jax.eval_shape(self._embedded, self.outside, zero))

    def last(self, outside: Flat, x: Any, m: Index) -> tuple[jax.Array, Any]:
        """Return the total of the loss, which is differentiated, and what is told."""
        outputs = self._end("head", outside, x, m)
        mean = self.mean(outputs, m)
        mine = self.share(mean)
        return mine.total, self._told(mine, outputs)

    def _told(self, mean: Mean, outputs: Any) -> "Mean | Extras":
        if self.wanted is None:
            return mean
        return Extras(mean, outputs if self.wanted == "outputs" else None)

    @cached_property
    def layers(self) -> list[Layer]:
        """The layers of a list, or the one layer that all stacked ones are."""
        return self.blueprint.layers(self.mode)

    def passes(self, known: tuple, slots: Flat, x: Any, split: bool) -> Dissected:
        """Return the passes of a unit: of one layer."""
        return dissect(self._unit, known, slots, x, split)

    def _unit(self, known: tuple, slots: Flat, x: Any, as_it_is: bool = False) -> Any:
        values, number, m = known
        layer = self.layers[0]
        held = self.variables(m, number) if layer.variables else {}
        stored = lambda path: self.stored(path, values[path], slots.get(path))
        y = self.apply(layer, stored, held, x)
        if as_it_is:
            return y
        return self.rows.as_kinds(y, self._kinds, "between layers", self.blueprint.number_of_layers)

    def run(self, layer: Layer, values: Flat, slots: Flat, x: Any) -> Any:
        """Return what a layer of a list makes of `x`, its parameters being stored ones."""
        stored = lambda path: self.stored(path, values[path], slots.get(path))
        held = self.variables(0, None) if layer.variables else {}
        return self.apply(layer, stored, held, x)

    def apply(self, layer: Layer, parameter: Callable, variables: Flat, x: Any) -> Any:
        """Return what a layer makes of `x`."""
        if not isinstance(layer.graph, nnx.GraphDef):
            return self.rows.run(f"{LAYERS}{layer.number}", layer.graph, x)
        listed = self.blueprint.listed
        name = f"{LAYERS}{layer.number}" if listed else "layers"
        times = 1 if listed else self.blueprint.number_of_layers
        run = layer_function(layer.graph, self.policy, self.rows, name=name, times=times)
        function = self.keeping(run)
        held = fill(layer.variables, variables.__getitem__)
        y, written = function(fill(layer.parameters, parameter), held, x)
        path = {keys: raw(variable).path for keys, variable in layer.variables}
        self._check_unwritten("a layer", [path[keys] for keys, _ in nnx.to_flat_state(written)])
        return y

    def _check_unwritten(self, part: str, written: list[str]) -> None:
        """Refuse to lose what is written; random generators have other keys in each microbatch."""
        names = [path for path in written if not is_random(self.blueprint.variables[path])]
        if names:
            raise ValueError(
                f"{part} writes to {', '.join(names)}: {self.unwritten}. {NO_STATISTICS}"
            )
