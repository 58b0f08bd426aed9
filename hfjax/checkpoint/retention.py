"""Which steps are kept: the latest, periodic ones, the best."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hfjax.utils.keywords import is_int

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class RetentionPolicy:
    """The steps to keep; a step is deleted when none of these rules keeps it.

    Attributes:
        latest: Number of the latest steps to keep. None: all.
        every: Keep the first step at or after each multiple of it. None: no such step.
        best: Name of a metric: keep the `bests` steps where it is lowest. None: no such step.
        bests: Number of the best steps to keep.
        highest: Whether the best steps are those where it is highest.

    Example:
        >>> import hfjax
        >>> keep = hfjax.RetentionPolicy(latest=2, every=100)
        >>> keep.kept({90: {}, 100: {}, 180: {}, 210: {}, 220: {}, 230: {}})
        [100, 210, 220, 230]
    """

    latest: int | None = 3
    every: int | None = None
    best: str | None = None
    bests: int = 1
    highest: bool = False

    def __post_init__(self) -> None:
        for name in ("latest", "every", "bests"):
            value = getattr(self, name)
            missing = value is None and name != "bests"
            if not missing and not is_int(value):
                raise ValueError(
                    f"RetentionPolicy({name}={value!r}): a positive whole number is expected."
                )

        if not (self.best is None or (isinstance(self.best, str) and self.best)):
            raise ValueError(
                f"RetentionPolicy(best={self.best!r}): the name of a metric, or None: no best."
            )
        if not isinstance(self.highest, bool):
            raise ValueError(f"RetentionPolicy(highest={self.highest!r}): true or false.")

    def kept(self, metrics: Mapping[int, Metrics]) -> list[int]:
        """Return those of the saved steps that are kept, in ascending order.

        Args:
            metrics: {step: its metrics} of all saved steps. A step without the metric that `best`
                names is not among the best.

        Example:
            >>> import hfjax
            >>> metrics = {1: {"loss": 2.0}, 2: {"loss": 1.0}, 3: {}}
            >>> hfjax.RetentionPolicy(latest=1, best="loss").kept(metrics)
            [2, 3]
        """
        steps = sorted(metrics)
        latest = steps if self.latest is None else steps[-self.latest :]
        return sorted({*latest, *self._spaced(steps), *self._best(metrics)})

    def check(self, metrics: Metrics) -> None:
        """Refuse metrics that lack the one that `best` names.

        Args:
            metrics: {name: number} of a step that is about to be saved.

        Example:
            >>> import hfjax
            >>> hfjax.RetentionPolicy(best="loss").check({"loss": 1.0})
        """
        if self.best is not None and self.best not in metrics:
            raise ValueError(
                f"RetentionPolicy(best={self.best!r}) judges steps by a metric that was not given, "
                f"found {sorted(metrics) or 'none'}. Give save(…, metrics={{{self.best!r}: …}})."
            )

    def _spaced(self, steps: list[int]) -> list[int]:
        if self.every is None:
            return []
        numbers = [step // self.every for step in steps]
        before = [0, *numbers]
        return [step for step, n, last in zip(steps, numbers, before, strict=False) if n > last]

    def _best(self, metrics: Mapping[int, Metrics]) -> list[int]:
        if self.best is None:
            return []
        sign = -1 if self.highest else 1
        scores = {step: sign * m.get(self.best, math.nan) for step, m in metrics.items()}
        ranked = sorted((value, step) for step, value in scores.items() if not math.isnan(value))
        return [step for _, step in ranked[: self.bests]]


class KeepPolicy:
    """Orbax's preservation policy by a `RetentionPolicy`."""

    def __init__(self, keep: RetentionPolicy, metrics: Mapping[int, Metrics]) -> None:
        self._keep, self._metrics = keep, metrics

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Return for each step whether it is kept; what hfjax has not written always is."""
        steps = [info.step for info in checkpoints]
        own_steps = {step: self._metrics[step] for step in steps if step in self._metrics}
        steps_to_keep = self._keep.kept(own_steps)
        return [step in steps_to_keep or step not in own_steps for step in steps]
