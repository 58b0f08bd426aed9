"""Tells of a step that was not finite, by number and name, without waiting for the device."""

import warnings
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hfjax.sharding.layout import Layout, State
from hfjax.utils.mean import ENTROPY, EXHAUSTED, OVERFLOW, SCALE
from hfjax.utils.paths import flatten

SPAN, OFTEN = 1000, 0.05  # steps, and the part of them that may overflow unsaid
LAG = 2  # steps; the same in every process, so that all stop at the same call


class Seen(NamedTuple):
    """What a step left to look at: arrays that may not be computed yet."""

    step: Any
    loss: Any
    finite: Any
    squares: Mapping[str, Any]  # of the gradients, by path; by layer if each is updated by itself
    entropy: Any  # of routers, by layer; none of a model without
    overflow: Any = False  # of float16: the loss scale has judged this step, and skipped it
    exhausted: Any = False  # it did so at the least scale
    scale: Any = 1.0


class Watch:
    """The steps that nobody has looked at yet."""

    def __init__(self, layout: Layout, policy: str, patience: int) -> None:
        self.layout, self.policy, self.patience = layout, policy, patience
        self.skipped = 0  # steps in all
        self._in_a_row = 0
        self._unseen: deque[Seen] = deque()
        self._overflows: deque[int] = deque()  # steps whose gradient overflowed, of the last ones
        self._told = -SPAN  # the step at which many of them were told

    def add(self, metrics: Mapping[str, Any], squares: Mapping[str, Any]) -> None:
        """Take note of a step."""
        step, loss, finite = (metrics[name] for name in ("step", "loss", "finite"))
        of_scale = (metrics.get(name, False) for name in (OVERFLOW, EXHAUSTED, SCALE))
        self._unseen.append(Seen(step, loss, finite, squares, metrics.get(ENTROPY, ()), *of_scale))

    def check(self, state: State, lag: int = LAG) -> None:
        """Raise FloatingPointError for a step, at least `lag` steps ago, that was not finite.

        Under the policy "skip" warn instead, unless it was one too many in a row.
        """
        while len(self._unseen) > lag:
            seen = self._unseen.popleft()
            if seen.finite:
                self._in_a_row = 0
                continue
            if seen.overflow:
                self._judge(state, seen)
                continue
            self.skipped, self._in_a_row = self.skipped + 1, self._in_a_row + 1
            told = self._explain(state, seen)
            if self.policy == "skip" and self._in_a_row < self.patience:
                warnings.warn(f"{told} It was skipped.", RuntimeWarning, stacklevel=3)
                continue
            self._unseen.clear()
            many = f"{self._in_a_row} in a row (patience={self.patience}): "
            raise FloatingPointError((many if self.policy == "skip" else "") + told)

    def _judge(self, state: State, seen: Seen) -> None:
        """Tell of overflows that are more than the loss scale is made for; raise if it is spent."""
        self.skipped += 1
        step, before = int(seen.step) + 1, self._overflows
        before.append(step)
        while before[0] <= step - SPAN:
            before.popleft()
        broken = self._parameters_that_are_not_finite(state)
        if seen.exhausted or broken:
            self._unseen.clear()
            told = self._explain(state, seen)
            if not broken:
                many = f"{self.skipped} steps were skipped, {len(before)} of the last {SPAN}."
                told = f"The loss scale is the least, {float(seen.scale):g}, and {told} {many}"
            raise FloatingPointError(told)
        two = len(before) > 1 and before[-2] == step - 1
        often = len(before) > OFTEN * SPAN and step - self._told >= SPAN
        if often:
            self._told = step
        if two or often:
            what = "two steps in a row" if two else f"{len(before)} of the last {SPAN} steps"
            warnings.warn(
                f"step {step}: the gradient of {what} overflowed float16, and they were skipped; "
                f"the loss scale was {float(seen.scale):g}. {self._gradients_of(seen)}",
                RuntimeWarning,
                stacklevel=4,
            )

    def _explain(self, state: State, seen: Seen) -> str:
        # Counted from 1, as state.step, checkpoints and the lines of a run count.
        told = f"loss or gradient of step {int(seen.step) + 1} is not finite. "
        if bad := self._parameters_that_are_not_finite(state):
            p = self.layout.placed[bad[0]]
            return (
                f"{told}{len(bad)} parameters are not finite either, the first is {p.path} "
                f"{p.shape}: {p.parameter}. Restore an earlier checkpoint."
            )
        return f"{told}{self._kept(seen)} parameters are finite: {self._gradients_of(seen)}"

    def _kept(self, seen: Seen) -> str:
        """Return what that step changed."""
        if self.policy == "apply":
            return "All"
        by_layer = any(np.ndim(x) for x in seen.squares.values())
        if not by_layer or not np.isfinite(float(seen.loss)):
            return "That step changed no parameter; all"
        return (
            "With optimizer_in_backward the layers behind the first gradient that is not finite "
            "took that step, counting from the last one; nothing else did. All"
        )

    def _parameters_that_are_not_finite(self, state: State) -> list[str]:
        finite = jax.jit(lambda tree: {path: jnp.isfinite(x).all() for path, x in tree.items()})
        return [path for path, ok in finite(flatten(state.params)).items() if not ok]

    def _gradients_of(self, seen: Seen) -> str:
        """Return what the gradients of the step tell about its cause."""
        loss = float(seen.loss)
        entropy = np.asarray(seen.entropy)
        if not np.isfinite(entropy).all():
            layer = np.flatnonzero(~np.isfinite(entropy))[0]
            return (
                f"the first router whose logits are not is that of mixture {layer} of "
                f"{len(entropy)}, counted from 0. Look at what enters it (the loss was {loss})."
            )
        bad = [path for path, x in seen.squares.items() if not np.isfinite(x).all()]
        if not np.isfinite(loss) or not bad:
            return f"look at the batch and the loss (it was {loss})."
        layer, first = self._first(bad, seen)
        p, of = self.layout.placed[first], f" of layer {layer}" if layer >= 0 else ""
        return (
            f"the loss was {loss:g}, the gradients of {len(bad)} of {len(seen.squares)} parameters "
            f"are not finite, the first is that of {p.path} {p.shape}{of}. Look at what it is used "
            "in."
        )

    def _first(self, bad: list[str], seen: Seen) -> tuple[int, str]:
        """Return the layer whose gradient was the first that is not finite, and its path."""
        layers = {path: self._layer_of(path, seen) for path in bad}
        path = max(bad, key=lambda path: layers[path])
        return layers[path], path

    def _layer_of(self, path: str, seen: Seen) -> int:
        """Return the last layer in which a gradient is not finite; -1 if it is not told."""
        layers = np.asarray(seen.squares[path])
        if not layers.ndim:
            return -1
        in_stack = self.layout.placed[path].stacked
        return np.flatnonzero(~np.isfinite(layers))[-1] if in_stack else int(path.split("/")[1])
