"""The loop of a run: steps, log lines, validations, checkpoints, until it ends or is stopped.

`restore_loader` continues from a checkpoint, after checking that the data is the same.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console

import hfjax
from hfjax.checkpoint import CheckpointManager, RetentionPolicy
from hfjax.checkpoint.directory import NAME as LOCK, list_steps
from hfjax.data.indexed_loader import IndexedLoader
from hfjax.distributed.consensus import check_same, run_on_first, speaks
from hfjax.distributed.stop import Stop
from hfjax.distributed.watchdog import Watchdog
from hfjax.optimizers.transforms import averaged
from hfjax.parallel.extensions.context_parallel.sequence_layout import describe_work
from hfjax.parallel.precision.dtypes import AUTO
from hfjax.trainer import config_io, profile, source_snapshot
from hfjax.trainer.build import RunComponents
from hfjax.trainer.config import TrainConfig
from hfjax.trainer.deepspeed_flags import FILE
from hfjax.trainer.hub_sources import data_lines, pin_sources
from hfjax.trainer.logs.console import Screen, SpeedMeter, show_waiting, step_line, validation_line
from hfjax.trainer.logs.metrics_file import FILES, METRICS
from hfjax.trainer.logs.trackers import WRITTEN as METRIC_FILES, Trackers
from hfjax.trainer.profile import Profile
from hfjax.trainer.sampling import Sampling
from hfjax.utils.atomic import replace_text
from hfjax.utils.hub import parse_dataset
from hfjax.utils.mean import EXHAUSTED, OVERFLOW
from hfjax.utils.read_files import ANYTHING, FOLDER, check_fields, integer, path_kind, read_text
from hfjax.utils.tables import quote
from hfjax.utils.write_files import check_no_links, check_ordinary_files
from hfjax.weights.model_folder import ModelFolder

CONFIG, CHECKPOINTS = "config.yaml", "checkpoints"
WRITTEN = (
    CONFIG,
    FILE,
    source_snapshot.COPY,
    *METRIC_FILES,
    *profile.WRITTEN,
)  # besides checkpoints
MISMATCH = "does not hold what this layout wants"  # of hfjax.checkpoint.compare


def restore_loader(loader: IndexedLoader, record: Any, step: Path) -> int:
    """Restore a loader's position from a step's record; return the steps skipped by then."""
    file = f"{step / 'meta' / 'metadata'}: data"
    try:
        if isinstance(record, dict):
            record = {"skipped": 0, **record}
        check_fields(record, {"data": ANYTHING, "skipped": integer(0, int(step.name))})
        file = f"{file}: data"
        check_fields(record["data"], {"rows": integer(0)})
    except ValueError as wrong:
        raise ValueError(
            f"{file}: {wrong}. hfjax train cannot go on from there: begin anew with its parameters "
            f"(--checkpoint.init-from {quote(step.parent.parent)} --run-dir ANOTHER)."
        ) from None
    loader.restore(record["data"])
    return record["skipped"]


def check_reachable(directory: Path) -> None:
    """Refuse a run that has metrics, but not the directory of its checkpoints.

    A run locks that directory before it writes metrics, and the lock file stays.
    """
    folder, metrics = directory / CHECKPOINTS, directory / METRICS
    if not os.path.lexists(metrics) or os.path.lexists(folder / LOCK):
        return
    if (kind := path_kind(folder)) == FOLDER:
        if list_steps(folder):
            return
        kind = f"a folder without {LOCK}"
    raise ValueError(
        f"{quote(metrics)} is of a run, and its checkpoints are out of reach: {quote(folder)} is "
        f"{kind}. If they are on a disk that is not mounted, mount it. To begin anew: --run-dir "
        f"ANOTHER, or mv {quote(metrics)} {quote(metrics)}.old"
    )


def find_checkpoints(folder: Path) -> Path:
    """Return the folder of checkpoints: that of a run, or one that `hfjax.save` wrote."""
    checkpoints = next((p for p in (folder / CHECKPOINTS, folder) if list_steps(p)), None)
    if checkpoints is None:
        problem = "it has no checkpoint" if folder.exists() else "there is no such folder"
        raise ValueError(
            f"--checkpoint.init-from {quote(folder)}: {problem}. Give the folder of a run of hfjax "
            "train, or one that hfjax.save wrote."
        )
    return checkpoints


def restore_or_explain(
    restore: Callable[[], hfjax.RestoredRun],
    config: TrainConfig,
    checkpoints: Path,
    is_resumed: bool = False,
) -> hfjax.RestoredRun:
    """Return what `restore` reads; explain a mismatch by the flags that cause it."""
    try:
        with show_waiting("reading the checkpoint"):
            return restore()
    except ValueError as mistake:
        if MISMATCH not in str(mistake):
            raise
        raise ValueError(_mismatch_message(str(mistake), config, checkpoints, is_resumed)) from None


def _mismatch_message(
    message: str, config: TrainConfig, checkpoints: Path, is_resumed: bool
) -> str:
    folder = quote(checkpoints.parent if checkpoints.name == CHECKPOINTS else checkpoints)
    parameters = f"--checkpoint.init-from {folder} " * ("parameters_only" in message)
    restart_hint = f", or begin anew: {parameters}--run-dir ANOTHER" * is_resumed
    differences = config_io.state_differences(
        config, hfjax.checkpoint_metadata(checkpoints)["config"]
    )
    if not differences:
        lines = message.rpartition("\n")[0]  # without the advice for Python
        return f"{lines}\nGive the data and the flags that {folder} was trained with{restart_hint}."
    current, previous = (", ".join(flags) for flags in zip(*differences, strict=True))
    return (
        f"{current}: {folder} was trained {previous}, and its checkpoint does not fit. Give the "
        f"same{restart_hint}."
    )


NOT_LOGGED = ("step", "finite", OVERFLOW, EXHAUSTED)  # metrics that are reported otherwise
LAG = 2  # metrics are read so many steps later, so that nothing waits for the device
COMPILING = 3600.0  # seconds that a phase that compiles may take, at least
WRITING = 600.0  # the same for a checkpoint
PROMPT = "\ndef "


class Result(NamedTuple):
    """How a run ended.

    Attributes:
        state: The last state.
        step: The number of steps that the state has taken.
        loss: The loss of the last step of this call; None if it did none.
        valid_loss: The loss of the last validation; None if there was none.
        reason: Why it stopped early, as in `Stop.reason`; None if it did not.

    Example:
        >>> from hfjax.trainer import Result
        >>> Result(state=None, step=300, loss=1.5, valid_loss=None, reason=None).loss
        1.5
    """

    state: hfjax.State
    step: int
    loss: float | None  # of the last step that this call did
    valid_loss: float | None
    reason: str | None  # why it stopped early


def train(config: TrainConfig, console: Console | None = None) -> Result:
    """Train, from the beginning or from the directory's latest checkpoint; return how it ended.

    It logs to `logging.getLogger("hfjax")`, handles signals as `Stop` does (only in the main
    thread), ends the process if it hangs (`config.watchdog_timeout`), and writes config.yaml,
    metrics and checkpoints to `config.directory`.

    Args:
        config: The settings of the run: see `hfjax train --help`.
        console: Where to show a progress bar, if it is a terminal. None: nowhere.

    Example:
        >>> from hfjax.trainer import TrainConfig, train
        >>> result = train(TrainConfig(steps=200))  # doctest: +SKIP
        >>> result.step, result.reason  # doctest: +SKIP
        (200, None)
    """
    with ExitStack() as stack:
        enter = stack.enter_context
        watchdog = enter(Watchdog(config.watchdog_timeout))
        run = Run(config, RunComponents(config), watchdog, console)
        with watchdog.allow(math.inf, "downloading"):  # the Hub's client has limits of its own
            run.find_sources()
        stop = enter(Stop())  # from now on a signal takes effect after the step
        with watchdog.allow(COMPILING, "preparing"):
            run.prepare(enter)
        return run.run_steps(stop)


@dataclass
class Run:
    """One call of `train`."""

    config: TrainConfig
    components: RunComponents
    watchdog: Watchdog
    console: Console | None = None
    notes: list[str] = field(default_factory=list)  # about the model and the data
    state: Any = None
    first_step: int = 0  # the step that this call begins with
    metrics: dict[str, Any] = field(default_factory=dict)  # of the last step that was read
    valid_loss: float | None = None
    validated_step: int = -1  # after which step
    saved_step: int = -1  # the step of the last checkpoint that was begun
    skipped_steps: int = 0  # not finite, so without an update
    source_folder: ModelFolder | None = None  # whose weights this call begins with
    has_trained_weights: bool = False  # it begins with trained weights
    compiled_phases: set[str] = field(default_factory=set)  # phases that have compiled

    # -- before the first step ------------------------------------------------------------

    def find_sources(self) -> None:
        """Find the model and the data, and download those of the Hub: a signal ends that."""
        config, directory = self.config, self.config.directory
        run_on_first(lambda: check_no_links(directory, WRITTEN))
        run_on_first(lambda: check_ordinary_files(directory, (CONFIG, FILE, *FILES)))
        run_on_first(lambda: check_reachable(directory))
        self.screen, self.trackers = Screen(self.console, config.steps), Trackers(config.log)
        check_same("configuration", config_io.to_plain(config))
        self.config, lines = pin_sources(config, directory / CHECKPOINTS)
        config, note = source_snapshot.resume_from_copy(self.config, directory / CHECKPOINTS)
        self.components = replace(self.components, config=config)
        self.notes = lines if note is None else [*lines, note]
        _ = self.components.pretrained
        if any(map(parse_dataset, (*config.data.train, config.data.valid or ""))):
            self.notes += data_lines(self.components.texts.folders)

    def prepare(self, enter: Any) -> None:
        """Create or restore the state, and open the outputs of the run."""
        config, directory = self.config, self.config.directory
        with show_waiting("preparing the model and the data"):
            check_same("data", self.components.data.identity)
            parts = self.components
            _ = (parts.step, parts.evaluate, parts.valid)  # report a mistake now
            check_same("precision", {"precision": parts.precision})
            summary = (str(parts), *parts.startup_notes())
        for text in (*self.notes, *summary):
            self.screen.say(text)
        changed = config_io.changed_fields(replace(config, precision=AUTO))  # the summary has it
        self.config = config = replace(config, precision=parts.precision)  # as the run keeps it
        for name, value in changed.items():
            self.screen.say(f"  {name}: {quote(value) if isinstance(value, Path) else value}")
        keep = config.checkpoint
        best = "valid_loss" if keep.keep_best else None
        if best and self.components.valid is None:
            raise ValueError("--checkpoint.keep-best needs a validation set: --data.valid DIR.")
        with show_waiting("opening the checkpoints"):
            self.checkpoints = enter(
                CheckpointManager(
                    directory / CHECKPOINTS,
                    self.components.layout,
                    keep=RetentionPolicy(
                        latest=keep.keep_latest, every=keep.keep_period, best=best
                    ),
                    config=config_io.to_plain(config_io.with_absolute_paths(config)),
                    timeout=int(max(config.watchdog_timeout, WRITING)),
                )
            )
        self._restore_or_init()
        with show_waiting("checking the validation"):
            self.components.check_validation(self.state, config.eval.max_batches)
        self.speed, self.profile = (
            SpeedMeter(self.components),
            enter(Profile(config.profile, directory)),
        )
        self.screen = enter(Screen(self.console, config.steps, self.first_step))
        if speaks():
            if self.first_step < config.steps or not (directory / CONFIG).exists():
                self._save_files(directory)  # a complete run keeps what it was trained with
            self.trackers.start(directory, config_io.to_plain(config), self.first_step)
            enter(self.trackers)
            for text in self.trackers.file.notes:
                self.screen.say(text)

    def _save_files(self, directory: Path) -> None:
        """Write the configuration, with copies of its DeepSpeed file and its model's files."""
        config = config_io.without_machine_fields(self.config)
        if config.deepspeed is not None:
            replace_text(directory / FILE, read_text(config.deepspeed))
            config = replace(config, deepspeed=directory / FILE)
        config_io.save(config, directory / CONFIG)
        if self.source_folder is not None:
            source_snapshot.write_copy(self.source_folder, directory)

    def _restore_or_init(self) -> None:
        latest = self.checkpoints.latest()
        if latest is not None and self.config.checkpoint.resume == "never":
            raise ValueError(
                f"--checkpoint.resume never: {quote(self.config.directory)} has checkpoints, the "
                f"latest of step {latest}. Give another --run-dir, or remove them."
            )
        if latest is None:
            self.state = self._new_state()
            return
        checkpoint = self._restore()
        self.state, self.first_step = checkpoint.state, int(checkpoint.step)
        step = self.config.directory / CHECKPOINTS / str(checkpoint.step)
        self.skipped_steps = restore_loader(self.components.data, checkpoint.data, step)
        self.screen.say(f"going on after step {self.first_step} of {quote(self.config.directory)}")
        old_config = hfjax.checkpoint_metadata(
            self.config.directory / CHECKPOINTS, step=self.first_step
        )["config"]
        for text in self._change_notes(old_config, checkpoint.data):
            self.screen.say(text)

    def _change_notes(self, old_config: Any, position: dict[str, Any]) -> Iterator[str]:
        """Yield messages about what changed since the checkpoint that this call resumes from."""
        if changes := config_io.setting_changes(self.config, old_config):
            yield f"settings that changed: {', '.join(changes)}"
        if start := config_io.changed_start(self.config, old_config):
            yield (
                f"--checkpoint.init-from {quote(start)} is not read: "
                f"{quote(self.config.directory)} has checkpoints. To begin with its "
                "parameters: --run-dir ANOTHER"
            )
        if "valid" in position and position["valid"] != self._valid_identity:
            yield (
                "the data to validate on is not what it was: do not compare losses of validations "
                f"after step {self.first_step} with those before"
            )

    @property
    def _valid_identity(self) -> Any:
        """The identity of the validation data; None if there is none."""
        return None if self.components.valid is None else self.components.valid.identity["data"]

    def _restore(self) -> hfjax.RestoredRun:
        directory = self.config.directory
        restore = partial(self.checkpoints.restore, on_damage="previous")
        return restore_or_explain(restore, self.config, directory / CHECKPOINTS, is_resumed=True)

    def _new_state(self) -> hfjax.State:
        source, layout = self.config.checkpoint.init_from, self.components.layout
        if source is None:
            return self._init_state()
        checkpoints = Path(run_on_first(lambda: str(find_checkpoints(Path(source)))))
        restore = partial(hfjax.restore, checkpoints, layout, parameters_only=True)
        checkpoint = restore_or_explain(restore, self.config, checkpoints)
        self.screen.say(f"starting with the parameters of {quote(source)}, step {checkpoint.step}")
        return checkpoint.state

    def _init_state(self) -> hfjax.State:
        """Return an initial state from the seed, or with the weights that the task has."""
        seed, schedule = self.config.seed, self.components.schedule
        source = self.config.model.pretrained or self.config.model.weights
        doing = f"reading {quote(source)}" if source else "compiling what makes the parameters"
        with show_waiting(doing):
            initial = self.components.task.init_from_weights(self.components.layout, seed, schedule)
            if initial is None:
                return hfjax.init(self.components.layout, seed, schedule)
        state, lines = initial
        for text in lines:
            self.screen.say(text)
        if self.components.pretrained is not None:
            self.source_folder = self.components.pretrained.folder
        self.has_trained_weights = True
        return state

    # -- steps ----------------------------------------------------------------------------

    def run_steps(self, stop: Stop) -> Result:
        """Run the remaining steps."""
        began, pending, done = time.monotonic(), deque[Any](), self.first_step
        limit = None if self.config.max_runtime is None else 60 * self.config.max_runtime
        if self._validates_first() and not stop.agreed():
            self.validate(self.first_step)
        for number in range(self.first_step, self.config.steps):
            if stop.agreed():
                break
            self.watchdog.beat(f"reading the batch of step {number}")
            with self.speed.waiting_for_batch():
                batch = next(self.components.data, None)
            if batch is None:
                self.screen.say(f"the data ends after {self.config.data.epochs} epochs")
                break
            self.profile.before_step(number)
            self.watchdog.beat(f"step {number}")
            pending.append(self._step(batch))
            self.speed.begin(pending[-1]["step"])
            while len(pending) > LAG:
                self._log_step(pending.popleft())
            done = number + 1
            if limit is not None and time.monotonic() - began > limit:
                stop.request()
            valid = self._is_due(done, self._valid_every) and done < self.config.steps
            if valid and not stop.agreed():  # a run that has to stop saves and ends
                self._log_all(pending)
                self.validate(done)
            if self._is_due(done, self._save_every) and done < self.config.steps:
                self._log_all(pending)  # raises at a step that was not finite: do not save it
                self.save(done)
        self._log_all(pending)
        return self._finish(done, stop.reason)

    def _step(self, batch: Any) -> Any:
        """Run a step and return its metrics, which may not be computed yet.

        It waits for the first step, which compiles, here or in another process.
        """
        first = "the first step" not in self.compiled_phases
        with self._phase("the first step") if first else nullcontext():
            self.state, metrics = self.components.step(self.state, batch)
            metrics = jax.block_until_ready(metrics) if first else metrics
        if first and (choice := self.components.step.context):
            self.screen.say(f"{choice}\n{describe_work(choice.seq_layout, batch)}")
        if first and (dispatch := self.components.step.experts):
            self.screen.say(str(dispatch))
        return metrics

    @contextmanager
    def _phase(self, doing: str) -> Iterator[None]:
        """Give a slow phase its own watchdog limit, and show it; the first time it compiles."""
        limit = WRITING if doing in self.compiled_phases else COMPILING
        self.compiled_phases.add(doing)
        message = f"compiling {doing}" if doing.startswith("the first") else doing
        with self.watchdog.allow(limit, doing), self.screen.busy(message):
            yield

    def _is_due(self, done: int, every: int) -> bool:
        return every > 0 and done % every == 0

    def _validates_first(self) -> bool:
        """Return whether to validate before the first step: given weights, or after a stop."""
        every, done = self._valid_every, self.first_step
        after_stop = done > 0 and (self._is_due(done, every) or done == self.config.steps)
        if not every or not (self.has_trained_weights or after_stop):
            return False
        return run_on_first(lambda: done not in self.trackers.file.validated_steps)

    @cached_property
    def _valid_every(self) -> int:
        every = self.config.eval.interval
        return max(self.config.steps // 4, 1) if every is None else every

    @cached_property
    def _save_every(self) -> int:
        every = self.config.checkpoint.interval
        return max(self.config.steps // 10, 25) if every is None else every

    def _log_all(self, pending: deque) -> None:
        while pending:
            self._log_step(pending.popleft())
        self.components.step.check(self.state)

    def _log_step(self, metrics: Any) -> None:
        """Read the metrics of a step, which waits for it, and log them."""
        numbers = {name: x for name, x in metrics.items() if not x.shape}
        values = {name: float(x) for name, x in numbers.items() if name not in NOT_LOGGED}
        step, skips = int(metrics["step"]), not bool(metrics["finite"])
        self.watchdog.beat(f"step {step + 1}")
        self.profile.after_step(step)
        self.speed.count_step()
        self.screen.advance()
        self.metrics = {
            "step": step,
            **values,
            "lr": float(self.components.rate(step - self.skipped_steps)),
        }
        self.skipped_steps += skips
        if self._is_due(step + 1, self.config.log.interval):
            self.metrics |= self.speed.measure()
            left = self.speed.seconds_left(self.config.steps - step - 1)
            self.screen.say(step_line(self.metrics, self.config.steps, left))
        if speaks():
            self.trackers.log(**self.metrics)

    # -- between steps --------------------------------------------------------------------

    def validate(self, done: int) -> None:
        """Log the loss on the validation set."""
        if self.components.valid is None or self.validated_step == done:
            return
        self.speed.pause()
        beat = partial(self.watchdog.beat, "validating")
        beat()
        if "the first validation" not in self.compiled_phases:
            batch = self.components.valid.at(0)
            with self._phase("the first validation"):
                jax.block_until_ready(self.components.evaluate(self._eval_state, batch))
        scores = self.components.validated(self._eval_state, self.config.eval.max_batches, beat)
        self.valid_loss, self.validated_step = scores.loss, done
        self.screen.say(validation_line(done, scores.line))
        if speaks():
            self.trackers.log(done, valid_loss=scores.loss, **scores.numbers)

    @property
    def _eval_state(self) -> hfjax.State:
        """The state to validate: with averaged parameters, if there are any."""
        return self.state if self.config.optimizer.ema is None else averaged(self.state)

    def save(self, done: int) -> None:
        """Start saving a checkpoint, with its validation loss if there is one."""
        if self.config.checkpoint.keep_best:
            self.validate(done)
        self.speed.pause()
        metrics = {"valid_loss": self.valid_loss} if self.validated_step == done else {}
        position = {"data": self.components.data.state(), "skipped": self.skipped_steps}
        position["valid"] = self._valid_identity
        with self._phase("saving a checkpoint"):
            self.checkpoints.save(self.state, data=position, metrics=metrics)
        self.saved_step = done
        if speaks() and not (self.config.directory / CONFIG).exists():  # moved or deleted: rewrite
            self._save_files(self.config.directory)

    # -- at the end -----------------------------------------------------------------------

    def _finish(self, done: int, reason: str | None) -> Result:
        if done > self.first_step and reason is None and self._valid_every:
            self.validate(done)
        if done > self.first_step and self.saved_step != done:
            self.save(done)
        with self._phase("writing the last checkpoint"):
            self.checkpoints.wait()
        if done > self.first_step and reason is None:
            self._sample()
        self._print_summary(done, reason)
        return Result(self.state, done, self.metrics.get("loss"), self.valid_loss, reason)

    def _sample(self) -> None:
        """Print a sample of generated text."""
        if not (count := self.config.log.sample_tokens) or not self.components.reads_text:
            return
        with self._phase("writing a sample"):
            text = self.components.written(self._eval_state, PROMPT, count, Sampling())
        self.screen.say(f"what it writes after {PROMPT!r}:")
        self.screen.say(text)

    def _print_summary(self, done: int, reason: str | None) -> None:
        for loader in (self.components.data, self.components.valid):
            for text in [] if loader is None else self.components.task.closing_lines(loader):
                self.screen.say(text)
        directory = quote(self.config.directory)
        if reason is not None:
            self.screen.say(f"stopped after step {done} ({reason}); start again to go on")
        elif done == self.first_step:
            ended = done < self.config.steps  # the data ended
            more = f"--data.epochs {2 * (self.config.data.epochs or 1)}"
            more = more if ended else f"--steps {2 * done}"
            self.screen.say(
                f"{directory} is complete: {done} steps, nothing was trained. To train on: {more}; "
                f"anew: --run-dir ANOTHER, or --checkpoint.init-from {directory} --run-dir ANOTHER "
                "to begin with its parameters"
            )
        else:
            has_metrics = (self.config.directory / METRICS).exists()
            lost = "but no metrics: it was moved or deleted while the run went on"
            outputs = f"the checkpoints{' and metrics' if has_metrics else f', {lost}'}"
            self.screen.say(f"done: {done} steps; {directory} has {outputs}")
