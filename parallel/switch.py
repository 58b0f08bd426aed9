"""Unlike stages as one: every pass is a switch over the virtual stage, its values packed.

Only the passes of the stage's own layers run, the compiler gets those of all stages. What moves
between devices moves outside of the switch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
from jax import lax

from hfjax.parallel.dissect import Dissected
from hfjax.parallel.packing import Packing


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

    def _forward(self, known: Any, x: Any) -> Any:
        values, g, m = known

        def run(i, rows, m, x):
            y, stash, late = self.parts[i].forward(self._known(i, rows, m), x)
            return y, self._stash.pack(i, stash), self._late.pack(i, late)

        return self._choose(g, run, self.whole(values, None), m, x)

    def _backward(self, known: Any, stash: Any, late: Any, dy: Any) -> Any:
        values, g, m = known
        rows, scatter = self._fetch(values)

        def run(i, rows, m, stash, dy):
            given = self._known(i, rows, m), self._stash.unpack(i, stash), []
            dx, gradients = self.parts[i].backward(*given, dy)
            return dx, self._gradients(i, rows, gradients)

        dx, gradients = self._choose(g, run, rows, m, stash, dy)
        return dx, scatter(gradients)

    def _input_backward(self, known: Any, stash: Any, late: Any, dy: Any) -> Any:
        values, g, m = known

        def run(i, rows, m, stash, late, dy):
            waiting = self._stash.unpack(i, stash), self._late.unpack(i, late)
            dx, cross = self.parts[i].input_backward(self._known(i, rows, m), *waiting, dy)
            return dx, self._cross.pack(i, cross)

        return self._choose(g, run, self.whole(values, None), m, stash, late, dy)

    def _weight_backward(self, known: Any, late: Any, cross: Any) -> Any:
        values, g, m = known
        rows, scatter = self._fetch(values)

        def run(i, rows, m, late, cross):
            waiting = self._late.unpack(i, late), self._cross.unpack(i, cross)
            gradients = self.parts[i].weight_backward(self._known(i, rows, m), *waiting)
            return self._gradients(i, rows, gradients)

        return scatter(self._choose(g, run, rows, m, late, cross))

    def _choose(self, g: Any, run: Callable, *operands: Any) -> Any:
        return lax.switch(g, [partial(run, i) for i in range(len(self.parts))], *operands)

    def _known(self, i: int, rows: Any, m: Any) -> Any:
        return self.parameters.unpack(i, rows), m

    def _fetch(self, values: Any) -> tuple[Any, Callable]:
        """Return the whole rows, and what takes their gradients to where these accumulate."""
        rows, pullback = jax.vjp(lambda slots: self.whole(values, slots), self.slots)
        return rows, lambda gradients: pullback(gradients)[0]

    def _gradients(self, i: int, rows: Any, gradients: Any) -> Any:
        return self.parameters.pack(i, gradients, {name: row.dtype for name, row in rows.items()})
