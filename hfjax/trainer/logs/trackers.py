"""Trackers: what a run hands its metrics to.

| tracker | of |
|---|---|
| metrics_file.MetricsFile | every run: its own record, without which it stops |
| TensorBoard | --log.tensorboard |
| WeightsAndBiases | --log.wandb PROJECT |
| a class of the user's | --log.tracker file.py:Class |
"""

import inspect
import logging
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hfjax.trainer.config import LogConfig
from hfjax.trainer.config_io import load_object
from hfjax.trainer.logs.metrics_file import DROPPED, FILES, MetricsFile
from hfjax.utils.command_errors import import_optional
from hfjax.utils.write_files import check_no_link

logger = logging.getLogger(__name__)

TENSORBOARD, WANDB = "tensorboard", "wandb"  # folders
WRITTEN = (*FILES, DROPPED, TENSORBOARD, WANDB)
GOES_ON = "the run goes on, and metrics.jsonl has all metrics."
METHODS = ("start", "log", "finish")


class Tracker(Protocol):
    """Receives the metrics of a run, in process 0: `--log.tracker file.py:Class` names one.

    The class is called without arguments. If a method raises, a warning says so once, and the run
    goes on.

    Example:
        >>> class Losses:
        ...     def start(self, directory, config, step):
        ...         self.losses = []
        ...     def log(self, step, metrics):
        ...         self.losses.append(metrics.get("loss"))  # a validation has none
        ...     def finish(self):
        ...         pass
    """

    def start(self, directory: Path, config: Mapping[str, Any], step: int) -> None:
        """Begin.

        Args:
            directory: The directory of the run.
            config: Its configuration, as in config.yaml.
            step: The step that it begins with: above 0 if it resumes. A run that was killed may
                have logged later steps, which are done again.
        """
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics.

        Args:
            step: The step, counted from 0; of a validation the number of steps done before it.
            metrics: Name -> value, as in metrics.jsonl. A step has a loss, a validation has a
                valid_loss. Values may be infinite or NaN.
        """
        ...

    def finish(self) -> None:
        """End: the run is complete, was stopped, or failed."""
        ...


class Trackers:
    """The trackers of a run; use it in a `with` statement.

    Attributes:
        file: The tracker of metrics.jsonl.
    """

    def __init__(self, log: LogConfig) -> None:
        self.file = MetricsFile()
        self._makers: dict[str, Callable[[], Tracker]] = {}  # by flag
        if log.tensorboard:
            import_optional("tensorboardX", "--log.tensorboard", "logs")
            self._makers["--log.tensorboard"] = TensorBoard
        if log.wandb is not None:
            import_optional("wandb", "--log.wandb", "logs")
            self._makers["--log.wandb"] = partial(WeightsAndBiases, log.wandb)
        if log.tracker is not None:
            self._makers[f"--log.tracker {log.tracker}"] = _load_tracker(log.tracker)
        self._started = dict[str, Tracker]()
        self._failures = Counter[str]()

    def start(self, directory: Path, config: Mapping[str, Any], step: int) -> None:
        """Start all trackers; those that fail get no metrics."""
        self.file.start(directory, config, step)
        for folder in (TENSORBOARD, WANDB):
            check_no_link(directory / folder)
        for name, make in self._makers.items():
            try:
                tracker = make()
                tracker.start(directory, config, step)
                self._started[name] = tracker
            except Exception as error:  # whatever the tracker does
                _warn(name, "start", error, "It gets no metrics")

    def log(self, step: int, **metrics: float) -> None:
        """Hand the metrics of a step or a validation to all."""
        self.file.log(step, metrics)
        for name, tracker in self._started.items():
            try:
                tracker.log(step, metrics)
            except Exception as error:
                self._failures[name] += 1
                if self._failures[name] == 1:
                    _warn(name, f"log, of step {step}", error, "It is called again for later steps")

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def finish(self) -> None:
        """End all; say how often one has failed."""
        self.file.finish()
        for name, tracker in self._started.items():
            try:
                tracker.finish()
            except Exception as error:
                _warn(name, "finish", error, "It may have lost metrics", "metrics.jsonl has all.")
            if (count := self._failures[name]) > 1:
                logger.warning("warning: %s raised in %d calls of log", name, count)


def _warn(name: str, method: str, error: Exception, result: str, more: str = GOES_ON) -> None:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    logger.warning("warning: %s raised in %s (%s). %s; %s", name, method, text, result, more)


def _load_tracker(name: str) -> Any:
    """Return a tracker's class, after checking that it can be used as one."""
    cls = load_object(name, "--log.tracker", "class", inspect.isclass)
    missing = [method for method in METHODS if not callable(getattr(cls, method, None))]
    if missing:
        raise ValueError(
            f"--log.tracker {name}: the class has no {' and no '.join(missing)}. A tracker has "
            f"{', '.join(METHODS)}: see hfjax.trainer.Tracker."
        )
    try:
        inspect.signature(cls).bind()
    except TypeError as wrong:
        raise ValueError(
            f"--log.tracker {name}: the class is called without arguments, and {wrong}."
        ) from None
    return cls


# -- other tools --------------------------------------------------------------------------

SPEED = ("memory", "mfu", "tflops", "waiting_for_data")
EXPERTS = ("load_max_over_mean", "dropped", "entropy")


def group_name(name: str) -> str:
    """Return the name of a metric in TensorBoard and Weights & Biases, by group.

    >>> [group_name(name) for name in ("loss", "valid_loss", "mfu", "tokens_per_second")]
    ['train/loss', 'eval/loss', 'perf/mfu', 'perf/tokens_per_second']
    """
    if name.startswith("valid_"):
        return f"eval/{name.removeprefix('valid_')}"
    if name in SPEED or name.endswith("_per_second"):
        return f"perf/{name}"
    return f"moe/{name}" if name.startswith(EXPERTS) else f"train/{name}"


class TensorBoard:
    """Writes TensorBoard's files, in the directory of the run."""

    def start(self, directory: Path, config: Mapping[str, Any], step: int) -> None:
        """Open a file of events; what it had of later steps is hidden (TensorBoard's purge)."""
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(directory / TENSORBOARD), purge_step=step or None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write scalars, by group."""
        for name, value in metrics.items():
            self._writer.add_scalar(group_name(name), value, step)

    def finish(self) -> None:
        """Close the file."""
        self._writer.close()


class WeightsAndBiases:
    """Logs to a project of Weights & Biases; a run that resumes goes on in the same place."""

    def __init__(self, project: str) -> None:
        self._project = project

    def start(self, directory: Path, config: Mapping[str, Any], step: int) -> None:
        """Begin a run there, or go on with it."""
        import wandb  # pyright: ignore[reportMissingImports]

        run = {"project": self._project, "config": dict(config), "name": directory.name}
        path = str(directory.absolute()).encode()
        identity = f"{directory.name}-{zlib.crc32(path):08x}"  # the same when the run resumes
        self._run = wandb.init(dir=str(directory), id=identity, resume="allow", **run)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics, by group."""
        self._run.log({group_name(name): x for name, x in metrics.items()}, step=step)

    def finish(self) -> None:
        """End the run there."""
        self._run.finish()
