"""Tells of a step that was not finite, by number and name, without waiting for the device."""

from collections import deque
from typing import Any

import jax
import jax.numpy as jnp

from hfjax.plan import Layout, State, flatten

LAG = 2  # steps; the same in every process, so that all stop at the same call


class Watch:
    """The steps that nobody has looked at yet."""

    def __init__(self, layout: Layout, skips: bool):
        self.layout, self.skips = layout, skips
        self._unseen: deque[tuple[Any, Any]] = deque()  # (finite, number) of each step

    def add(self, finite: Any, number: Any) -> None:
        """Take note of a step, by arrays that may not be computed yet."""
        self._unseen.append((finite, number))

    def check(self, state: State, lag: int = LAG) -> None:
        """Raise FloatingPointError for a step, at least `lag` steps ago, that was not finite."""
        while len(self._unseen) > lag:
            finite, number = self._unseen.popleft()
            if not finite:
                self._unseen.clear()
                raise FloatingPointError(self._explain(state, int(number)))

    def _explain(self, state: State, number: int) -> str:
        told = f"loss or gradient of step {number} is not finite. "
        finite = jax.jit(lambda tree: {path: jnp.isfinite(x).all() for path, x in tree.items()})
        bad = [path for path, ok in finite(flatten(state.params)).items() if not ok]
        if bad:
            p = self.layout.placed[bad[0]]
            return (
                f"{told}{len(bad)} parameters are not finite either, the first is {p.path} "
                f"{p.shape}: {p.parameter}. Restore an earlier checkpoint."
            )
        kept = "That step changed no parameter; all " if self.skips else "All parameters "
        return f"{told}{kept}are finite: look at the batch and the loss."
