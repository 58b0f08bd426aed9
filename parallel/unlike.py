"""A list of unlike layers as a pipeline sees it: one unit for each virtual stage.

Every stage stores its own parameters, padded to the largest stage (`packing`), and activations of
different shapes go from stage to stage in buffers as long as the largest needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from hfjax.mean import Mean
from hfjax.parallel.blueprint import Layer
from hfjax.parallel.dissect import Dissected, dissect
from hfjax.parallel.fetch import at_hand
from hfjax.parallel.model import Model
from hfjax.parallel.packing import PACKED, PackedLayers, Packing
from hfjax.parallel.reduction import Flat
from hfjax.parallel.staged import Staged
from hfjax.parallel.switch import Switch


@dataclass(frozen=True)
class Unlike(Staged):
    """One pass over the microbatches of a step, on this device, of a model with unlike layers."""

    packed: PackedLayers

    def model(self) -> Model:
        """Return what the executor runs: a unit is all the layers of a virtual stage."""
        order = self.arrangement.virtual[:, :, None]
        return replace(super().model(), order=order)

    @cached_property
    def _parts(self) -> Sequence[Sequence[Layer]]:
        return [[self._layers[n] for n in numbers] for numbers in self.arrangement.parts]

    @cached_property
    def _between(self) -> Packing:
        """What leaves embed and each virtual stage."""
        m = jnp.int32(0)
        shapes = [jax.eval_shape(super()._first, self._ends, m)]
        for g in range(len(self._parts)):
            parameters, x = self._zeros(self._compute(g)), self._zeros(shapes[-1])
            shapes.append(jax.eval_shape(partial(self._run, g), (parameters, m), {}, x))
        return Packing(shapes)

    def _first(self, ends: Flat, m: Any) -> Any:
        return self._between.pack(0, super()._first(ends, m))

    def _last(self, ends: Flat, x: Any, m: Any) -> tuple[jax.Array, Mean]:
        return super()._last(ends, self._between.unpack(len(self._parts), x), m)

    def _passes(self, known: Any, slots: Flat, x: Any, split: bool) -> Dissected:
        parts = [self._part(g, known[2], x, split) for g in range(len(self._parts))]
        return Switch(parts, self.packed.packing, self._whole, slots).dissected()

    def _part(self, g: int, m: Any, x: Any, split: bool) -> Dissected:
        """Return the passes of one virtual stage, from packed x to packed y."""

        def run(known, slots, x):
            y = self._run(g, known, slots, self._between.unpack(g, x))
            return self._between.pack(g + 1, y)

        parameters = self._zeros(self._compute(g))
        return dissect(run, (parameters, m), parameters, x, split)

    def _run(self, g: int, known: Any, slots: Flat, x: Any) -> Any:
        """Return what the layers of a virtual stage make of x."""
        parameters, m = known
        parameter = lambda path: at_hand(path, parameters[path], slots.get(path))
        held = self.variables(m, None) if any(part.variables for part in self._parts[g]) else {}
        for layer in self._parts[g]:
            x = self._apply(layer, parameter, held, x)
        return x

    def _whole(self, values: Flat, slots: Flat | None) -> Flat:
        """Return the rows of a virtual stage, by dtype as stored, in that of the arithmetic."""
        slot = lambda path: None if slots is None else slots[path]
        return {
            path.removeprefix(PACKED): self._stored(path, value, slot(path)).fetch()
            for path, value in values.items()
        }

    def _compute(self, g: int) -> Flat:
        """Return shapes and dtypes of the parameters of a virtual stage, as they are fetched."""
        compute = lambda a: self.movements[PACKED + jnp.dtype(a.dtype).name].compute
        return {
            path: jax.ShapeDtypeStruct(a.shape, compute(a))
            for path, a in self.packed.packing.trees[g].items()
        }

    def _zeros(self, tree: Any) -> Any:
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)
