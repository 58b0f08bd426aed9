"""Reports steps that were not finite, by number and name, without waiting for the device."""

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

SPAN, OVERFLOW_FRACTION = 1000, 0.05  # steps; the fraction that may overflow without a warning
LAG = 2  # steps; the same in every process, so that all stop at the same call


class StepStats(NamedTuple):
    """What a step left to check: arrays that may not be computed yet."""

    step: Any
    loss: Any
    finite: Any
    squares: Mapping[str, Any]  # of the gradients, by path; by layer if each is updated alone
    entropy: Any  # of routers, by layer; empty for a model without any
    overflow: Any = False  # of float16: the loss scale has judged this step, and skipped it
    exhausted: Any = False  # it did so at the minimum scale
    scale: Any = 1.0


class NonfiniteMonitor:
    """The steps that have not been checked yet."""

    def __init__(self, layout: Layout, policy: str, max_skipped: int) -> None:
        self.layout, self.policy, self.max_skipped = layout, policy, max_skipped
        self.skipped = 0  # steps in total
        self._consecutive = 0
        self._pending: deque[StepStats] = deque()
        self._overflows: deque[int] = deque()  # recent steps whose gradient overflowed
        self._last_warning = -SPAN  # the step of the last warning about them

    def add(self, metrics: Mapping[str, Any], squares: Mapping[str, Any]) -> None:
        """Record a step."""
        step, loss, finite = (metrics[name] for name in ("step", "loss", "finite"))
        scale_metrics = (metrics.get(name, False) for name in (OVERFLOW, EXHAUSTED, SCALE))
        self._pending.append(
            StepStats(step, loss, finite, squares, metrics.get(ENTROPY, ()), *scale_metrics)
        )

    def check(self, state: State, lag: int = LAG) -> None:
        """Raise FloatingPointError for a step, at least `lag` steps ago, that was not finite.

        Under the policy "skip" warn instead, unless it was one too many in a row.
        """
        while len(self._pending) > lag:
            record = self._pending.popleft()
            if record.finite:
                self._consecutive = 0
                continue
            if record.overflow:
                self._check_overflow(state, record)
                continue
            self.skipped, self._consecutive = self.skipped + 1, self._consecutive + 1
            message = self._message(state, record)
            if self.policy == "skip" and self._consecutive < self.max_skipped:
                warnings.warn(f"{message} It was skipped.", RuntimeWarning, stacklevel=3)
                continue
            self._pending.clear()
            count = f"{self._consecutive} in a row (max_skipped={self.max_skipped}): "
            raise FloatingPointError((count if self.policy == "skip" else "") + message)

    def _check_overflow(self, state: State, stats: StepStats) -> None:
        """Warn of more overflows than a loss scale is made for; raise if it is exhausted."""
        self.skipped += 1
        step, overflows = int(stats.step) + 1, self._overflows
        overflows.append(step)
        while overflows[0] <= step - SPAN:
            overflows.popleft()
        bad_params = self._nonfinite_params(state)
        if stats.exhausted or bad_params:
            self._pending.clear()
            message = self._message(state, stats)
            if not bad_params:
                count = f"{self.skipped} steps were skipped, {len(overflows)} of the last {SPAN}."
                message = (
                    f"The loss scale is the least, {float(stats.scale):g}, and {message} {count}"
                )
            raise FloatingPointError(message)
        is_repeated = len(overflows) > 1 and overflows[-2] == step - 1
        is_frequent = (
            len(overflows) > OVERFLOW_FRACTION * SPAN and step - self._last_warning >= SPAN
        )
        if is_frequent:
            self._last_warning = step
        if is_repeated or is_frequent:
            span = (
                "two steps in a row"
                if is_repeated
                else f"{len(overflows)} of the last {SPAN} steps"
            )
            warnings.warn(
                f"step {step}: the gradient of {span} overflowed float16, and they were skipped; "
                f"the loss scale was {float(stats.scale):g}. {self._gradient_message(stats)}",
                RuntimeWarning,
                stacklevel=4,
            )

    def _message(self, state: State, stats: StepStats) -> str:
        # Counted from 1, as state.step, checkpoints and the lines of a run count.
        message = f"loss or gradient of step {int(stats.step) + 1} is not finite. "
        if bad := self._nonfinite_params(state):
            p = self.layout.param_specs[bad[0]]
            return (
                f"{message}{len(bad)} parameters are not finite either, the first is {p.path} "
                f"{p.shape}: {p.parameter}. Restore an earlier checkpoint."
            )
        changed, gradients = self._changed_params_message(stats), self._gradient_message(stats)
        return f"{message}{changed} parameters are finite: {gradients}"

    def _changed_params_message(self, stats: StepStats) -> str:
        """Return what that step changed."""
        if self.policy == "apply":
            return "All"
        by_layer = any(np.ndim(x) for x in stats.squares.values())
        if not by_layer or not np.isfinite(float(stats.loss)):
            return "That step changed no parameter; all"
        return (
            "With optimizer_in_backward the layers behind the first gradient that is not finite "
            "took that step, counting from the last one; nothing else did. All"
        )

    def _nonfinite_params(self, state: State) -> list[str]:
        finite = jax.jit(lambda tree: {path: jnp.isfinite(x).all() for path, x in tree.items()})
        return [path for path, ok in finite(flatten(state.params)).items() if not ok]

    def _gradient_message(self, stats: StepStats) -> str:
        """Return what the gradients of the step say about its cause."""
        loss = float(stats.loss)
        entropy = np.asarray(stats.entropy)
        if not np.isfinite(entropy).all():
            layer = np.flatnonzero(~np.isfinite(entropy))[0]
            return (
                f"the first router whose logits are not is that of mixture {layer} of "
                f"{len(entropy)}, counted from 0. Look at what enters it (the loss was {loss})."
            )
        bad = [path for path, x in stats.squares.items() if not np.isfinite(x).all()]
        if not np.isfinite(loss) or not bad:
            return f"look at the batch and the loss (it was {loss})."
        layer, first = self._first_nonfinite(bad, stats)
        p, layer_text = self.layout.param_specs[first], f" of layer {layer}" if layer >= 0 else ""
        return (
            f"the loss was {loss:g}, the gradients of {len(bad)} of {len(stats.squares)} "
            f"parameters are not finite, the first is that of {p.path} {p.shape}{layer_text}. Look "
            "at what it is used in."
        )

    def _first_nonfinite(self, bad: list[str], stats: StepStats) -> tuple[int, str]:
        """Return the layer whose gradient was the first not to be finite, and its path."""
        layers = {path: self._last_layer(path, stats) for path in bad}
        path = max(bad, key=lambda path: layers[path])
        return layers[path], path

    def _last_layer(self, path: str, stats: StepStats) -> int:
        """Return the last layer in which a gradient is not finite; -1 if unknown."""
        layers = np.asarray(stats.squares[path])
        if not layers.ndim:
            return -1
        is_stacked = self.layout.param_specs[path].stacked
        return np.flatnonzero(~np.isfinite(layers))[-1] if is_stacked else int(path.split("/")[1])
