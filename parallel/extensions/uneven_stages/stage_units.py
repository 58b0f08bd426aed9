"""Pipelines of layers that differ: one unit for each virtual stage.

Every stage stores its own parameters, padded to the largest stage (`packing`), and activations of
different shapes travel in buffers as long as the largest needs. All devices run one program: every
pass is a switch over the virtual stage, on packed values. A device runs only the passes of its own
layers, but compiles those of all. Transfers between devices stay outside of the switch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.parallel.adapters.model_template import Layer
from hfjax.parallel.engine.unshard import at_hand
from hfjax.parallel.jaxprs.split_backward import Dissected, dissect, zeros_like
from hfjax.parallel.jaxprs.stage_fns import ModelParts
from hfjax.parallel.layer_stack.sharded_model import PlacedModel
from hfjax.parallel.packing import PACKED, PackedLayers, Packing
from hfjax.utils.paths import Flat, Index


@dataclass(frozen=True, eq=False)
class Switch:
    """The passes of virtual stages, each dissected by itself; x and y have one form for all."""

    parts: Sequence[Dissected]  # known: (parameters by path, microbatch)
    parameters: Packing  # of each virtual stage, by path
    whole: Callable  # (stored row, slots) -> its buffers whole, in the dtype of arithmetic
    slots: Any  # what takes the gradients of a stored row

    def dissected(self) -> Dissected:
        """Return the passes of whichever virtual stage `known` names: (stored row, number, m)."""
        return Dissected(
            forward=self._forward,
            backward=self._backward,
            input_backward=self._input_backward,
            weight_backward=self._weight_backward,
            stash=self._stash.like,
            late=self._late.like,
            cross=self._cross.like,
        )

    @cached_property
    def _stash(self) -> Packing:
        return Packing([part.stash for part in self.parts])

    @cached_property
    def _late(self) -> Packing:
        return Packing([part.late for part in self.parts])

    @cached_property
    def _cross(self) -> Packing:
        return Packing([part.cross for part in self.parts])

    def _forward(self, known: tuple, x: Any) -> tuple:
        values, g, m = known

        def run(i: int, rows: Flat, m: Index, x: Flat) -> tuple:
            y, stash, late = self.parts[i].forward(self._known(i, rows, m), x)
            return y, self._stash.pack(i, stash), self._late.pack(i, late)

        return self._choose(g, run, self.whole(values, None), m, x)

    def _backward(self, known: tuple, stash: Flat, late: list, dy: Flat) -> tuple[Flat, Flat]:
        values, g, m = known
        rows, scatter = self._fetch(values)

        def run(i: int, rows: Flat, m: Index, stash: Flat, dy: Flat) -> tuple[Flat, Flat]:
            given = self._known(i, rows, m), self._stash.unpack(i, stash), []
            dx, gradients = self.parts[i].backward(*given, dy)
            return dx, self._gradients(i, rows, gradients)

        dx, gradients = self._choose(g, run, rows, m, stash, dy)
        return dx, scatter(gradients)

    def _input_backward(self, known: tuple, stash: Flat, late: Flat, dy: Flat) -> tuple[Flat, Flat]:
        values, g, m = known

        def run(
            i: int, rows: Flat, m: Index, stash: Flat, late: Flat, dy: Flat
        ) -> tuple[Flat, Flat]:
            waiting = self._stash.unpack(i, stash), self._late.unpack(i, late)
            dx, cross = self.parts[i].input_backward(self._known(i, rows, m), *waiting, dy)
            return dx, self._cross.pack(i, cross)

        return self._choose(g, run, self.whole(values, None), m, stash, late, dy)

    def _weight_backward(self, known: tuple, late: Flat, cross: Flat) -> Flat:
        values, g, m = known
        rows, scatter = self._fetch(values)

        def run(i: int, rows: Flat, m: Index, late: Flat, cross: Flat) -> Flat:
            waiting = self._late.unpack(i, late), self._cross.unpack(i, cross)
            gradients = self.parts[i].weight_backward(self._known(i, rows, m), *waiting)
            return self._gradients(i, rows, gradients)

        return scatter(self._choose(g, run, rows, m, late, cross))

    def _choose(self, g: Index, run: Callable, *operands: Any) -> Any:
        return lax.switch(g, [partial(run, i) for i in range(len(self.parts))], *operands)

    def _known(self, i: int, rows: Flat, m: Index) -> tuple[Any, Index]:
        return self.parameters.unpack(i, rows), m

    def _fetch(self, values: Flat) -> tuple[Any, Callable]:
        """Return the whole rows, and what takes their gradients to where these accumulate."""
        rows, pullback = jax.vjp(lambda slots: self.whole(values, slots), self.slots)
        return rows, lambda gradients: pullback(gradients)[0]

    def _gradients(self, i: int, rows: Flat, gradients: Any) -> Flat:
        return self.parameters.pack(i, gradients, {name: row.dtype for name, row in rows.items()})


@dataclass(frozen=True)
class HeterogeneousModel:
    """One pass over the microbatches of a step, on this device, of a model with unlike layers.

    It runs the parts of `placed`, a unit being all the layers of a virtual stage, and packs what
    goes in and out of them.
    """

    placed: PlacedModel
    packed: PackedLayers

    def model(self) -> ModelParts:
        """Return what the executor runs."""
        placed = self.placed
        keeping = replace(self, placed=replace(placed, policy=None))
        return replace(
            placed.model(),
            first=self._first,
            last=self._last,
            passes=self._passes,
            order=placed.arrangement.virtual[:, :, None],
            keep=keeping._passes if placed.keeps_last else None,
        )

    @cached_property
    def _parts(self) -> Sequence[Sequence[Layer]]:
        numbers = self.placed.arrangement.parts
        return [[self.placed.layers[n] for n in part] for part in numbers]

    @cached_property
    def _between(self) -> Packing:
        """What leaves embed and each virtual stage."""
        m = jnp.int32(0)
        shapes = [jax.eval_shape(self.placed.first, self.placed.outside, m)]
        for g in range(len(self._parts)):
            parameters, x = zeros_like(self._compute(g)), zeros_like(shapes[-1])
            shapes.append(jax.eval_shape(partial(self._run, g), (parameters, m), {}, x))
        return Packing(shapes)

    def _first(self, outside: Flat, m: Index) -> Flat:
        return self._between.pack(0, self.placed.first(outside, m))

    def _last(self, outside: Flat, x: Flat, m: Index) -> tuple[jax.Array, Any]:
        return self.placed.last(outside, self._between.unpack(len(self._parts), x), m)

    def _passes(self, known: tuple, slots: Flat, x: Flat, split: bool) -> Dissected:
        parts = [self._part(g, known[2], x, split) for g in range(len(self._parts))]
        return Switch(parts, self.packed.packing, self._whole, slots).dissected()

    def _part(self, g: int, m: Index, x: Flat, split: bool) -> Dissected:
        """Return the passes of one virtual stage, from packed x to packed y."""

        def run(known: tuple, slots: Flat, x: Flat) -> Flat:
            y = self._run(g, known, slots, self._between.unpack(g, x))
            return self._between.pack(g + 1, y)

        parameters = zeros_like(self._compute(g))
        return dissect(run, (parameters, m), parameters, x, split)

    def _run(self, g: int, known: tuple, slots: Flat, x: Any) -> Any:
        """Return what the layers of a virtual stage make of x."""
        parameters, m = known
        placed, part = self.placed, self._parts[g]
        parameter = lambda path: at_hand(path, parameters[path], slots.get(path))
        held = placed.variables(m, None) if any(layer.variables for layer in part) else {}
        for layer in part:
            x = placed.apply(layer, parameter, held, x)
        return x

    def _whole(self, values: Flat, slots: Flat | None) -> Flat:
        """Return the rows of a virtual stage, by dtype as stored, in that of the arithmetic."""
        slot = lambda path: None if slots is None else slots[path]
        return {
            path.removeprefix(PACKED): self.placed.stored(path, value, slot(path)).fetch()
            for path, value in values.items()
        }

    def _compute(self, g: int) -> Flat:
        """Return shapes and dtypes of the parameters of a virtual stage, as they are fetched."""
        compute = lambda a: self.placed.movements[PACKED + jnp.dtype(a.dtype).name].compute_dtype
        return {
            path: jax.ShapeDtypeStruct(a.shape, compute(a))
            for path, a in self.packed.packing.trees[g].items()
        }
