"""Tells of a step that was not finite, by number and name, without waiting for the device."""

import warnings
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hfjax.base.mean import ENTROPY
from hfjax.base.paths import flatten
from hfjax.plan.layout import Layout, State

LAG = 2  # steps; the same in every process, so that all stop at the same call


class Seen(NamedTuple):
    """What a step left to look at: arrays that may not be computed yet."""

    step: Any
    loss: Any
    finite: Any
    squares: Mapping[str, Any]  # of the gradients, by path; by layer if each is updated by itself
    entropy: Any  # of routers, by layer; none of a model without


class Watch:
    """The steps that nobody has looked at yet."""

    def __init__(self, layout: Layout, policy: str, patience: int):
        self.layout, self.policy, self.patience = layout, policy, patience
        self.skipped = 0  # steps in all
        self._in_a_row = 0
        self._unseen: deque[Seen] = deque()

    def add(self, metrics: Mapping[str, Any], squares: Mapping[str, Any]) -> None:
        """Take note of a step."""
        step, loss, finite = (metrics[name] for name in ("step", "loss", "finite"))
        self._unseen.append(Seen(step, loss, finite, squares, metrics.get(ENTROPY, ())))

    def check(self, state: State, lag: int = LAG) -> None:
        """Raise FloatingPointError for a step, at least `lag` steps ago, that was not finite.

        Under the policy "skip" warn instead, unless it was one too many in a row.
        """
        while len(self._unseen) > lag:
            seen = self._unseen.popleft()
            if seen.finite:
                self._in_a_row = 0
                continue
            self.skipped, self._in_a_row = self.skipped + 1, self._in_a_row + 1
            told = self._explain(state, seen)
            if self.policy == "skip" and self._in_a_row < self.patience:
                warnings.warn(f"{told} It was skipped.", RuntimeWarning, stacklevel=3)
                continue
            self._unseen.clear()
            many = f"{self._in_a_row} in a row (patience={self.patience}): "
            raise FloatingPointError((many if self.policy == "skip" else "") + told)

    def _explain(self, state: State, seen: Seen) -> str:
        told = f"loss or gradient of step {int(seen.step)} is not finite. "
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
