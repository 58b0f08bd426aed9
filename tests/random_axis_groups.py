"""Programs drawn from a seed for each side: sizes that it divides, and what is dealt."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.compare_programs import POSITIONS, WIDTHS, Dealt, by_two_sides, by_vmap
from tests.random_programs import Program, Sizes, generated


@dataclasses.dataclass(frozen=True)
class Drawn:
    """What is dealt to devices, and what makes them.

    Attributes:
        dealt: Positions or widths.
        devices: As in `compare`.
    """

    dealt: Dealt
    devices: Callable = by_vmap

    def sizes(self, seed: int, n: int) -> Sizes:
        """Return the sizes of a batch: often two are alike."""
        rng = np.random.default_rng([seed, 2])
        split = n * (1 + self.dealt.folds) * int(rng.choice([1, 1, 2]))
        rows, other = int(rng.choice([2, 4, 8])), int(rng.choice([2, 3, 4, 5, split]))
        return (rows, other, split) if self.dealt.name == "widths" else (rows, split, other)

    def program(self, seed: int, n: int, make: Callable[..., Program] = generated) -> Program:
        """Return the program of a seed; along widths some of the weights are dealt too."""
        program = make(seed, self.sizes(seed, n))
        return with_parts_of_weights(program, n) if self.dealt.name == "widths" else program


def with_parts_of_weights(program: Program, n: int) -> Program:
    """Return the program that takes weights of every other step, if n divides them, as a batch."""
    second = lambda name: int(name[1:]) // 100 % 2 == 1
    fits = lambda w: w.ndim and w.shape[-1] % n == 0
    own = {k: w for k, w in program.weights.items() if second(k) and fits(w)}
    rest = {k: w for k, w in program.weights.items() if k not in own}

    def function(weights: Any, batch: Any) -> Any:
        return program.function(weights | {k: batch[k] for k in own}, batch)

    batch = program.batch | own
    return dataclasses.replace(program, function=function, weights=rest, batch=batch)


ALONG_POSITIONS = Dealt(POSITIONS, False, "positions")
ZIGZAG = Dealt(POSITIONS, True, "positions")
SIDES = {
    "positions": Drawn(ALONG_POSITIONS),
    "zigzag": Drawn(ZIGZAG),
    "widths": Drawn(Dealt(WIDTHS, False, "widths", others=-1)),
    "rows and positions": Drawn(ALONG_POSITIONS, by_two_sides),
    "rows and zigzag": Drawn(ZIGZAG, by_two_sides),
}
