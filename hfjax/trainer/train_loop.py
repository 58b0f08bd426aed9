"""The loop of a run: steps, log lines, validations, checkpoints, until it ends or is stopped.

`go_on` continues from a checkpoint, after checking that the data is the same.
"""

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

import hfjax
from hfjax.checkpoint import Checkpoints, Keep
from hfjax.checkpoint.directory import NAME as LOCK, steps_in
from hfjax.data.indexed_loader import RowLoader
from hfjax.distributed.consensus import agreed, check_same, speaks
from hfjax.distributed.stop import Stop
from hfjax.distributed.watchdog import Watchdog
from hfjax.optimizers.transforms import averaged
from hfjax.parallel.extensions.context_parallel.sequence_layout import work_of
from hfjax.trainer import config_io, metrics_file, profile, source_snapshot
from hfjax.trainer.build import Parts
from hfjax.trainer.config import Train
from hfjax.trainer.console import Screen, Speed, line, validation, waiting
from hfjax.trainer.deepspeed_flags import FILE
from hfjax.trainer.metrics_file import METRICS, Journal
from hfjax.trainer.profile import Profile
from hfjax.trainer.sampling import Sampling
from hfjax.utils.atomic import replace_text
from hfjax.utils.mean import EXHAUSTED, OVERFLOW
from hfjax.utils.read_files import ANYTHING, FOLDER, check_fields, contents, what_is, whole
from hfjax.utils.tables import named
from hfjax.utils.write_files import check_no_links, check_ordinary_files
from hfjax.weights.model_folder import ModelFolder

CONFIG, CHECKPOINTS = "config.yaml", "checkpoints"
WRITTEN = (
    CONFIG,
    FILE,
    source_snapshot.COPY,
    *metrics_file.WRITTEN,
    *profile.WRITTEN,
)  # besides checkpoints
UNFIT = "does not hold what this layout wants"  # of hfjax.checkpoint.compare


def go_on(loader: RowLoader, told: Any, step: Path) -> int:
    """Put a loader where a step's record says; return how many steps were left out by then."""
    file = f"{step / 'meta' / 'metadata'}: data"
    try:
        if isinstance(told, dict):
            told = {"skipped": 0, **told}
        check_fields(told, {"data": ANYTHING, "skipped": whole(0, int(step.name))})
        file = f"{file}: data"
        check_fields(told["data"], {"rows": whole(0)})
    except ValueError as wrong:
        raise ValueError(
            f"{file}: {wrong}. hfjax train cannot go on from there: begin anew with its parameters "
            f"(--checkpoints.start {named(step.parent.parent)} --out ANOTHER)."
        ) from None
    loader.restore(told["data"])
    return told["skipped"]


def check_in_reach(directory: Path) -> None:
    """Refuse a run that has metrics, and no directory that its checkpoints were written to.

    A run locks that directory before it writes metrics, and the file of the lock stays.
    """
    place, metrics = directory / CHECKPOINTS, directory / METRICS
    if not os.path.lexists(metrics) or os.path.lexists(place / LOCK):
        return
    if (kind := what_is(place)) == FOLDER:
        if steps_in(place):
            return
        kind = f"a folder without {LOCK}"
    raise ValueError(
        f"{named(metrics)} is of a run, and its checkpoints are out of reach: {named(place)} is "
        f"{kind}. If they are on a disk that is not mounted, mount it. To begin anew: --out "
        f"ANOTHER, or mv {named(metrics)} {named(metrics)}.old"
    )


def steps_of(given: Path) -> Path:
    """Return the folder of steps that is meant: that of a run, or one that `hfjax.save` wrote."""
    found = next((p for p in (given / CHECKPOINTS, given) if steps_in(p)), None)
    if found is None:
        what = "it has no checkpoint" if given.exists() else "there is no such folder"
        raise ValueError(
            f"--checkpoints.start {named(given)}: {what}. Give the folder of a run of hfjax "
            "train, or one that hfjax.save wrote."
        )
    return found


def restored(
    restore: Callable[[], hfjax.Restored], config: Train, steps: Path, resumes: bool = False
) -> hfjax.Restored:
    """Return what `restore` reads; what does not fit is told by the flags that make it so."""
    try:
        with waiting("reading the checkpoint"):
            return restore()
    except ValueError as mistake:
        if UNFIT not in str(mistake):
            raise
        raise ValueError(_unfit(str(mistake), config, steps, resumes)) from None


def _unfit(told: str, config: Train, steps: Path, resumes: bool) -> str:
    folder = named(steps.parent if steps.name == CHECKPOINTS else steps)
    parameters = f"--checkpoints.start {folder} " * ("parameters_only" in told)
    anew = f", or begin anew: {parameters}--out ANOTHER" * resumes
    differ = config_io.differing(config, hfjax.recorded(steps)["config"])
    if not differ:
        lines = told.rpartition("\n")[0]  # without the advice for Python
        return f"{lines}\nGive the data and the flags that {folder} was trained with{anew}."
    here, there = (", ".join(flags) for flags in zip(*differ, strict=True))
    return (
        f"{here}: {folder} was trained {there}, and its checkpoint does not fit. Give the "
        f"same{anew}."
    )


UNREAD = ("step", "finite", OVERFLOW, EXHAUSTED)  # metrics that are told otherwise
LAG = 2  # steps behind which metrics are read: nothing waits for the device
COMPILING = 3600.0  # seconds that what compiles may take, at least
WRITING = 600.0  # and a checkpoint
PROMPT = "\ndef "


class Result(NamedTuple):
    """How a run ended.

    Attributes:
        state: The last state.
        step: The number of steps that it has taken.
        loss: Of the last step that this call did; None if it did none.
        valid_loss: The last validation's; None if there was none.
        reason: Why it stopped early, as `Stop.reason` has it; None if it did not.

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


def train(config: Train) -> Result:
    """Train, from the beginning or from the directory's latest checkpoint; return how it ended.

    It takes signals as `Stop` does (so: the main thread), ends the process if it hangs
    (`config.timeout`), and writes config.yaml, metrics and checkpoints to `config.directory`.

    Args:
        config: What is trained on what, and how: see `hfjax train --help`.

    Example:
        >>> from hfjax.trainer import Train, train
        >>> result = train(Train(steps=200, strategy="fsdp"))  # doctest: +SKIP
        >>> result.step, result.reason  # doctest: +SKIP
        (200, None)
    """
    with ExitStack() as stack:
        enter = stack.enter_context
        watchdog = enter(Watchdog(config.timeout))
        stop = enter(Stop())  # from now on a signal is answered after the step
        run = Run(config, Parts(config), watchdog)
        with watchdog.allow(COMPILING, "preparing"):
            run.prepare(enter)
        return run.go(stop)


@dataclass
class Run:
    """One call of `train`."""

    config: Train
    parts: Parts
    watchdog: Watchdog
    state: Any = None
    first: int = 0  # the step that this call begins with
    last: dict[str, Any] = field(default_factory=dict)  # what was told of the last step read
    valid_loss: float | None = None
    validated: int = -1  # after which step
    saved: int = -1  # the step of the last checkpoint that was begun
    skipped: int = 0  # steps that were not finite: no updates
    begins_with: ModelFolder | None = None  # whose weights this call begins with
    begins_trained: bool = False  # with some weights
    begun: set[str] = field(default_factory=set)  # phases that have compiled

    # -- before the first step ------------------------------------------------------------

    def prepare(self, enter: Any) -> None:
        """Make or restore the state, and open what the run writes to."""
        config, directory = self.config, self.config.directory
        agreed(lambda: check_no_links(directory, WRITTEN))
        agreed(lambda: check_ordinary_files(directory, (CONFIG, FILE, *metrics_file.FILES)))
        agreed(lambda: check_in_reach(directory))
        self.screen = Screen(config.steps)
        with waiting("preparing the model and the data"):
            check_same("configuration", config_io.plain(config))
            self._find_model()
            check_same("data", self.parts.data.identity)
            _ = self.parts.step, self.parts.evaluate, self.parts.valid  # a mistake is told now
            told = str(self.parts)
        self.screen.say(told)
        for words in self.parts.task.told():
            self.screen.say(words)
        for name, value in config_io.changed(config).items():
            self.screen.say(f"  {name}: {named(value) if isinstance(value, Path) else value}")
        keep = config.checkpoints
        best = "valid_loss" if keep.keep_best else None
        if best and self.parts.valid is None:
            raise ValueError("--checkpoints.keep-best needs a validation set: --data.valid DIR.")
        with waiting("opening the checkpoints"):
            self.checkpoints = enter(
                Checkpoints(
                    directory / CHECKPOINTS,
                    self.parts.layout,
                    keep=Keep(latest=keep.keep, every=keep.keep_every, best=best),
                    config=config_io.plain(config_io.anywhere(config)),
                    timeout=int(max(config.timeout, WRITING)),
                )
            )
        self._begin()
        with waiting("checking the validation"):
            self.parts.check_validation(self.state, config.log.valid_batches)
        self.speed, self.profile = Speed(self.parts), enter(Profile(config.profile, directory))
        self.screen = enter(Screen(config.steps, self.first))
        self.journal = None
        if speaks():
            if self.first < config.steps or not (directory / CONFIG).exists():
                self._save_files(directory)  # a complete run keeps what it was trained with
            self.journal = enter(
                Journal(directory, config.log, config_io.plain(config), self.first)
            )
            for words in self.journal.notes:
                self.screen.say(words)

    def _find_model(self) -> None:
        """Read what the model is: of a folder, or if the run goes on of its own copy."""
        folder, directory = self.config.model.pretrained, self.config.directory
        going_on, said = source_snapshot.going_on(self.config, directory / CHECKPOINTS)
        if going_on is not self.config:
            self.parts = replace(self.parts, config=going_on)
        elif folder is not None:
            agreed(lambda: source_snapshot.check_apart(folder, directory))
        if said is not None:
            self.screen.say(said)
        _ = self.parts.pretrained

    def _save_files(self, directory: Path) -> None:
        """Write what the run is made of: with copies of a file of DeepSpeed, of a model's files."""
        config = config_io.lasting(self.config)
        if config.deepspeed is not None:
            replace_text(directory / FILE, contents(config.deepspeed))
            config = replace(config, deepspeed=directory / FILE)
        config_io.save(config, directory / CONFIG)
        if self.begins_with is not None:
            source_snapshot.keep(self.begins_with, directory)

    def _begin(self) -> None:
        latest = self.checkpoints.latest()
        if latest is not None and self.config.checkpoints.resume == "never":
            raise ValueError(
                f"--checkpoints.resume never: {named(self.config.directory)} has checkpoints, the "
                f"latest of step {latest}. Give another --out, or remove them."
            )
        if latest is None:
            self.state = self._fresh()
            return
        found = self._restored()
        self.state, self.first = found.state, int(found.step)
        step = self.config.directory / CHECKPOINTS / str(found.step)
        self.skipped = go_on(self.parts.data, found.data, step)
        self.screen.say(f"going on after step {self.first} of {named(self.config.directory)}")
        before = hfjax.recorded(self.config.directory / CHECKPOINTS, step=self.first)["config"]
        for words in self._changes(before, found.data):
            self.screen.say(words)

    def _changes(self, before: Any, position: dict[str, Any]) -> Iterator[str]:
        """Yield what is not as it was when the checkpoint was saved that this call goes on from."""
        if changes := config_io.changes(self.config, before):
            yield f"settings that changed: {', '.join(changes)}"
        if start := config_io.other_start(self.config, before):
            yield (
                f"--checkpoints.start {named(start)} is not read: {named(self.config.directory)} "
                "has checkpoints. To begin with its parameters: --out ANOTHER"
            )
        if "valid" in position and position["valid"] != self._valid_identity:
            yield (
                "the data to validate on is not what it was: do not compare losses of validations "
                f"after step {self.first} with those before"
            )

    @property
    def _valid_identity(self) -> Any:
        """What the data to validate on is; None: there is none."""
        return None if self.parts.valid is None else self.parts.valid.identity["data"]

    def _restored(self) -> hfjax.Restored:
        directory = self.config.directory
        restore = partial(self.checkpoints.restore, on_damage="previous")
        return restored(restore, self.config, directory / CHECKPOINTS, resumes=True)

    def _fresh(self) -> hfjax.State:
        other, layout = self.config.checkpoints.start, self.parts.layout
        if other is None:
            return self._begun()
        steps = Path(agreed(lambda: str(steps_of(Path(other)))))
        restore = partial(hfjax.restore, steps, layout, parameters_only=True)
        found = restored(restore, self.config, steps)
        self.screen.say(f"starting with the parameters of {named(other)}, step {found.step}")
        return found.state

    def _begun(self) -> hfjax.State:
        """Return a state of the seed, or of the weights that the task has for it."""
        seed, schedule = self.config.seed, self.parts.schedule
        given = self.config.model.pretrained or self.config.model.weights
        doing = f"reading {named(given)}" if given else "compiling what makes the parameters"
        with waiting(doing):
            found = self.parts.task.begun(self.parts.layout, seed, schedule)
            if found is None:
                return hfjax.init(self.parts.layout, seed, schedule)
        state, said = found
        for words in said:
            self.screen.say(words)
        if self.parts.pretrained is not None:
            self.begins_with = self.parts.pretrained.folder
        self.begins_trained = True
        return state

    # -- steps ----------------------------------------------------------------------------

    def go(self, stop: Stop) -> Result:
        """Run the steps that are left."""
        began, unread, done = time.monotonic(), deque[Any](), self.first
        limit = None if self.config.minutes is None else 60 * self.config.minutes
        if self._validation_is_left() and not stop.agreed():
            self.validate(self.first)
        for number in range(self.first, self.config.steps):
            if stop.agreed():
                break
            self.watchdog.beat(f"reading the batch of step {number}")
            with self.speed.reading():
                batch = next(self.parts.data, None)
            if batch is None:
                self.screen.say(f"the data ends after {self.config.data.epochs} epochs")
                break
            self.profile.before(number)
            self.watchdog.beat(f"step {number}")
            unread.append(self._step(batch))
            self.speed.begin(unread[-1]["step"])
            while len(unread) > LAG:
                self._tell(unread.popleft())
            done = number + 1
            if limit is not None and time.monotonic() - began > limit:
                stop.request()
            valid = self._due(done, self._valid_every) and done < self.config.steps
            if valid and not stop.agreed():  # who is told to stop saves and leaves
                self._tell_all(unread)
                self.validate(done)
            if self._due(done, self._save_every) and done < self.config.steps:
                self._tell_all(unread)  # a step that was not finite is no step to save
                self.save(done)
        self._tell_all(unread)
        return self._end(done, stop.reason)

    def _step(self, batch: Any) -> Any:
        """Do a step, and return its metrics, which may not be computed yet.

        The first one is waited for: here or in another process it compiles.
        """
        first = "the first step" not in self.begun
        with self._phase("the first step") if first else nullcontext():
            self.state, metrics = self.parts.step(self.state, batch)
            metrics = jax.block_until_ready(metrics) if first else metrics
        if first and (choice := self.parts.step.context):
            self.screen.say(f"{choice}\n{work_of(choice.deal, batch)}")
        if first and (dispatch := self.parts.step.experts):
            self.screen.say(str(dispatch))
        return metrics

    @contextmanager
    def _phase(self, doing: str) -> Iterator[None]:
        """Let the watchdog wait for what is long, and say so; the first time it compiles."""
        limit = WRITING if doing in self.begun else COMPILING
        self.begun.add(doing)
        said = f"compiling {doing}" if doing.startswith("the first") else doing
        with self.watchdog.allow(limit, doing), self.screen.busy(said):
            yield

    def _due(self, done: int, every: int) -> bool:
        return every > 0 and done % every == 0

    def _validation_is_left(self) -> bool:
        """Return whether to validate before the first step: weights of others, or after a stop."""
        every, done = self._valid_every, self.first
        after_stop = done > 0 and (self._due(done, every) or done == self.config.steps)
        if not every or not (self.begins_trained or after_stop):
            return False
        return agreed(lambda: self.journal is None or done not in self.journal.validated)

    @cached_property
    def _valid_every(self) -> int:
        every = self.config.log.valid_every
        return max(self.config.steps // 4, 1) if every is None else every

    @cached_property
    def _save_every(self) -> int:
        every = self.config.checkpoints.every
        return max(self.config.steps // 10, 25) if every is None else every

    def _tell_all(self, unread: deque) -> None:
        while unread:
            self._tell(unread.popleft())
        self.parts.step.check(self.state)

    def _tell(self, metrics: Any) -> None:
        """Read the metrics of a step, which is done then, and tell them."""
        numbers = {name: x for name, x in metrics.items() if not x.shape}
        read = {name: float(x) for name, x in numbers.items() if name not in UNREAD}
        step, skips = int(metrics["step"]), not bool(metrics["finite"])
        self.watchdog.beat(f"step {step + 1}")
        self.profile.after(step)
        self.speed.count()
        self.screen.advance()
        self.last = {"step": step, **read, "lr": float(self.parts.rate(step - self.skipped))}
        self.skipped += skips
        if self._due(step + 1, self.config.log.every):
            self.last |= self.speed.look()
            left = self.speed.left(self.config.steps - step - 1)
            self.screen.say(line(self.last, self.config.steps, left))
        if self.journal is not None:
            self.journal.write(**self.last)

    # -- between steps --------------------------------------------------------------------

    def validate(self, done: int) -> None:
        """Tell the loss on the validation set."""
        if self.parts.valid is None or self.validated == done:
            return
        self.speed.pause()
        beat = partial(self.watchdog.beat, "validating")
        beat()
        if "the first validation" not in self.begun:
            batch = self.parts.valid.at(0)
            with self._phase("the first validation"):
                jax.block_until_ready(self.parts.evaluate(self._judged, batch))
        found = self.parts.validated(self._judged, self.config.log.valid_batches, beat)
        self.valid_loss, self.validated = found.loss, done
        self.screen.say(validation(done, found.line))
        if self.journal is not None:
            self.journal.write(done, valid_loss=found.loss, **found.numbers)

    @property
    def _judged(self) -> hfjax.State:
        """The state to validate: with the average of the parameters, if there is one."""
        return self.state if self.config.optimizer.ema is None else averaged(self.state)

    def save(self, done: int) -> None:
        """Begin to save a checkpoint, with the loss of its own validation."""
        if self.config.checkpoints.keep_best:
            self.validate(done)
        self.speed.pause()
        metrics = {"valid_loss": self.valid_loss} if self.validated == done else {}
        position = {"data": self.parts.data.state(), "skipped": self.skipped}
        position["valid"] = self._valid_identity
        with self._phase("saving a checkpoint"):
            self.checkpoints.save(self.state, data=position, metrics=metrics)
        self.saved = done
        if speaks() and not (self.config.directory / CONFIG).exists():  # moved or deleted: anew
            self._save_files(self.config.directory)

    # -- at the end -----------------------------------------------------------------------

    def _end(self, done: int, reason: str | None) -> Result:
        if done > self.first and reason is None and self._valid_every:
            self.validate(done)
        if done > self.first and self.saved != done:
            self.save(done)
        with self._phase("writing the last checkpoint"):
            self.checkpoints.wait()
        if done > self.first and reason is None:
            self._sample()
        self._say_end(done, reason)
        return Result(self.state, done, self.last.get("loss"), self.valid_loss, reason)

    def _sample(self) -> None:
        """Show what the model writes."""
        if not (count := self.config.log.sample) or not self.parts.reads_text:
            return
        with self._phase("writing a sample"):
            text = self.parts.written(self._judged, PROMPT, count, Sampling())
        self.screen.say(f"what it writes after {PROMPT!r}:")
        self.screen.say(text)

    def _say_end(self, done: int, reason: str | None) -> None:
        for loader in (self.parts.data, self.parts.valid):
            for words in [] if loader is None else self.parts.task.after(loader):
                self.screen.say(words)
        directory = named(self.config.directory)
        if reason is not None:
            self.screen.say(f"stopped after step {done} ({reason}); start again to go on")
        elif done == self.first:
            ended = done < self.config.steps  # the data has
            more = f"--data.epochs {2 * (self.config.data.epochs or 1)}"
            more = more if ended else f"--steps {2 * done}"
            self.screen.say(
                f"{directory} is complete: {done} steps, nothing was trained. To train on: {more}; "
                f"anew: --out ANOTHER, or --checkpoints.start {directory} --out ANOTHER to begin "
                "with its parameters"
            )
        else:
            there = (self.config.directory / metrics_file.METRICS).exists()
            lost = "but no metrics: it was moved or deleted while the run went on"
            what = f"the checkpoints{' and metrics' if there else f', {lost}'}"
            self.screen.say(f"done: {done} steps; {directory} has {what}")
