"""A three-part model as a pipeline sees it: what is before, in, and after its layers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hfjax.mean import Mean
from hfjax.parallel.arrangement import Arrangement
from hfjax.parallel.blueprint import LAYERS, Blueprint
from hfjax.parallel.fetch import Movement, Stored
from hfjax.parallel.layers import layer_function
from hfjax.parallel.pipeline import Model
from hfjax.parallel.reduction import Flat


@partial(jax.tree_util.register_dataclass, data_fields=["means", "outputs"], meta_fields=[])
@dataclass(frozen=True)
class Told:
    """What a pipeline tells on request: the mean of each microbatch, [M], and the outputs.

    Microbatch m of a step is the m-th microbatch of every device that holds rows. Outputs are in
    the order of the rows, or None if only the losses are asked for.
    """

    means: Any  # a Mean
    outputs: Any


@dataclass(frozen=True)
class Staged:
    """One pass over the microbatches of a step, on this device."""

    blueprint: Blueprint
    arrangement: Arrangement
    parameters: Flat  # as stored: of the layers, this stage's rows
    movements: Mapping[str, Movement]
    slots: Mapping[str, Any]  # shape and dtype of the gradient of each parameter
    variables: Callable  # (m, number of a layer or None) -> variables for this microbatch
    inputs: Callable  # m -> what the model is given
    mean: Callable  # (outputs, m) -> Mean
    mode: str
    policy: Callable | None
    tells: str | None  # "losses" or "outputs": see Told
    keeps_last: bool  # in the last microbatch nothing is recomputed

    def model(self) -> Model:
        """Return what the executor runs."""
        layers = [path for path in self.parameters if path.startswith(LAYERS)]
        row = lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype)
        return Model(
            first=self._first,
            unit=self._unit,
            last=self._last,
            values={path: self.parameters[path] for path in layers},
            ends=self._ends,
            slots={path: row(self.slots[path]) for path in layers},
            order=self.arrangement.order,
            keep=replace(self, policy=None)._unit if self.keeps_last else None,
        )

    @cached_property
    def _ends(self) -> Flat:
        """What lies outside the layers, fetched once for all microbatches."""
        ends = {p: v for p, v in self.parameters.items() if not p.startswith(LAYERS)}
        return {path: self._stored(path, value, None).fetch() for path, value in ends.items()}

    def _stored(self, path: str, value: Any, slot: Any) -> Stored:
        return Stored(value, slot, self.movements[path])

    def _merge(self, ends: Flat, variables: Flat) -> Any:
        layers = {
            path: self._stored(path, value, None)
            for path, value in self.parameters.items()
            if path.startswith(LAYERS)
        }
        return self.blueprint.merge(ends | layers, variables, self.mode)

    def _first(self, ends: Flat, m: Any) -> Any:
        model, before = self._holding(ends, m)
        x = model.embed(self.inputs(m))
        self._check_unwritten(model, before, "embed")
        return x

    def _last(self, ends: Flat, x: Any, m: Any) -> tuple[jax.Array, Any]:
        model, before = self._holding(ends, m)
        outputs = model.head(x)
        self._check_unwritten(model, before, "head")
        mean = self.mean(outputs, m)
        return mean.total, self._told(mean, outputs)

    def _told(self, mean: Mean, outputs: Any) -> "Mean | Told":
        if self.tells is None:
            return mean
        return Told(mean, outputs if self.tells == "outputs" else None)

    def _holding(self, ends: Flat, m: Any) -> tuple[Any, Flat]:
        variables = self.variables(m, None)
        return self._merge(ends, variables), variables

    @cached_property
    def _layers(self) -> tuple[Callable, Any, Any]:
        """The function of one layer, and the variables it wants: parameters and others."""
        layers = self._merge(self._ends, self.variables(jnp.int32(0), None)).layers
        graph, parameters, variables = nnx.split(layers, nnx.Param, ...)
        function = layer_function(graph, self.policy)
        return function, nnx.to_flat_state(parameters), nnx.to_flat_state(variables)

    def _unit(self, known: Any, slots: Flat, x: Any) -> Any:
        values, number, m = known
        function, parameters, variables = self._layers
        held = self.variables(m, number) if variables else {}
        fill = lambda flat, of: nnx.from_flat_state(
            [(keys, variable.replace(of(_path(keys)))) for keys, variable in flat]
        )
        stored = lambda path: self._stored(path, values[path], slots[path])
        y, written = function(fill(parameters, stored), fill(variables, held.__getitem__), x)
        if names := ["/".join(map(str, keys)) for keys, _ in nnx.to_flat_state(written)]:
            raise _written("a layer", names)
        return y

    def _check_unwritten(self, model: Any, before: Flat, part: str) -> None:
        after = self.blueprint.variables_of(model)
        if names := [path for path, value in after.items() if value is not before[path]]:
            raise _written(part, names)


def _path(keys: tuple) -> str:
    return LAYERS + "/".join(map(str, keys))


def _written(part: str, names: list[str]) -> ValueError:
    return ValueError(
        f"{part} writes to {', '.join(names)}: in a pipeline nothing is written, since "
        "microbatches are in different layers at the same time. Normalise without running "
        "statistics (LayerNorm, GroupNorm, RMSNorm), and hand auxiliary losses on beside the "
        "activations: a layer may take and return a pytree."
    )
