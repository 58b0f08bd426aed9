"""What a run leaves behind: metrics.jsonl, a plot of them, and what other tools read."""

import json
import math
import os
import zlib
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from hfjax.distributed.consensus import say
from hfjax.trainer.config import Log
from hfjax.trainer.loss_plot import draw
from hfjax.utils.atomic import replace_text
from hfjax.utils.read_files import check_fields, check_ordinary, contents, is_number, parsed, whole
from hfjax.utils.tables import named
from hfjax.utils.write_files import check_no_link, opened

METRICS, PLOT = "metrics.jsonl", "loss.png"
DROPPED = "metrics.dropped.jsonl"
TENSORBOARD, WANDB = "tensorboard", "wandb"  # folders
FILES = (METRICS, PLOT)
WRITTEN = (*FILES, DROPPED, TENSORBOARD, WANDB)
SHOWN = 6  # stretches of steps in a message


class Journal:
    """A line of JSON for each step and each validation; what is not finite is null.

    Attributes:
        notes: What to tell of the lines that were there.
        validated: After which steps it has a validation.
    """

    def __init__(self, directory: Path, log: Log, config: Mapping[str, Any], start: int) -> None:
        self.directory = directory
        check_no_link(directory / PLOT)
        lines, dropped = _drop(directory / METRICS, start)
        self.notes = [
            *_moved(directory, dropped, start),
            *_holes(directory / METRICS, lines, start),
        ]
        self.validated = {line["step"] for line in lines if "valid_loss" in line}
        handle = opened(directory / METRICS, os.O_WRONLY | os.O_APPEND)
        self._file = open(handle, "a", encoding="utf-8")
        self._config, self._sinks = config, _sinks(directory, log, config)

    def write(self, step: int, **values: float) -> None:
        """Add a line; it is on disk when the call returns, as far as this process is concerned."""
        finite = {name: x if math.isfinite(x) else None for name, x in values.items()}
        try:
            self._file.write(json.dumps({"step": step, **finite}) + "\n")
            self._file.flush()
        except OSError as full:
            raise OSError(
                f"{named(self.directory / METRICS)} cannot be written: {full.strerror}. What was "
                "saved is whole: start again when it can be written."
            ) from full
        for sink in self._sinks:
            sink.write(step, values)

    def close(self) -> None:
        """Close the files, and draw the plot."""
        with suppress(OSError):  # `write` has told
            self._file.close()
        for sink in self._sinks:
            sink.close()
        try:
            draw(read(self.directory / METRICS), self.directory / PLOT, self._config)
        except (OSError, ValueError) as wrong:
            why = getattr(wrong, "strerror", wrong)
            say(f"{named(self.directory / PLOT)} is not drawn: {why}")

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file; a last line that a kill cut short is left out."""
    if not os.path.lexists(path):
        return []
    check_ordinary(path)
    lines, (*texts, _) = [], path.read_bytes().split(b"\n")
    for number, text in enumerate(texts, 1):
        try:
            lines.append(_line(text))
        except ValueError as wrong:
            raise ValueError(
                f"{named(path)}:{number} is no line of a run ({wrong}). Take it out, or move the "
                "file away."
            ) from None
    return lines


def _line(text: bytes) -> dict[str, Any]:
    """Return a line of a metrics file; ValueError if a run has not written it."""
    line = check_fields(parsed(text.decode()), {"step": whole(0)})
    number = lambda x: x is None or (is_number(x) and math.isfinite(x))
    return check_fields(line, dict.fromkeys(line, ("a number or null", number)))


def _drop(path: Path, start: int) -> tuple[list[dict], list[dict]]:
    """Take out the steps that are done again: from the checkpoint on that the run goes on from.

    Return the lines that stay, and those that are moved to a file beside it.
    """
    lines = read(path)
    stays = lambda step, line: step < start or (step == start > 0 and "loss" not in line)
    kept = [line for line in lines if stays(line["step"], line)]
    dropped = [line for line in lines if not stays(line["step"], line)]
    if dropped:
        beside = path.with_name(DROPPED)
        before = contents(beside) if os.path.lexists(beside) else ""
        replace_text(beside, before + _text(dropped))
    if path.exists():
        replace_text(path, _text(kept))
    return kept, dropped


def _text(lines: list[dict]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def _moved(directory: Path, dropped: list[dict], start: int) -> list[str]:
    """Return what is told of lines that were taken out."""
    why = "those steps are done again" if start else "no checkpoint is left, so the run begins anew"
    place = named(directory / DROPPED)
    lines = "1 line" if len(dropped) == 1 else f"{len(dropped)} lines"
    return [f"{lines} of {METRICS} moved to {place}: {why}"] * bool(dropped)


def _holes(path: Path, lines: list[dict], start: int) -> list[str]:
    """Return what is told of the steps before `start` that have no line, or several."""
    times = Counter(line["step"] for line in lines if "loss" in line)
    missing = [step for step in range(start) if step not in times]
    several = [step for step in range(start) if times[step] > 1]
    found = [f"no line of steps {_stretches(missing)}"] if missing else []
    found += [f"several of steps {_stretches(several)}"] if several else []
    return [f"{named(path)} has {' and '.join(found)} (the file counts from 0)"] if found else []


def _stretches(steps: list[int]) -> str:
    """Return numbers in short.

    >>> _stretches([2, 3, 4, 7])
    '2-4, 7'
    """
    of_one = groupby(enumerate(steps), key=lambda at: at[1] - at[0])  # they grow together
    runs = [[step for _, step in run] for _, run in of_one]
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs[:SHOWN]]
    left = sum(map(len, runs[SHOWN:]))
    return ", ".join(shown) + (f" and {left} more" if left else "")


# -- other tools --------------------------------------------------------------------------


class _TensorBoard:
    def __init__(self, directory: Path) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(directory / TENSORBOARD))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, directory: Path, project: str, config: Mapping[str, Any]) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        run = {"project": project, "config": dict(config), "name": directory.name}
        place = str(directory.absolute()).encode()
        identity = f"{directory.name}-{zlib.crc32(place):08x}"  # the same when the run goes on
        self._run = wandb.init(dir=str(directory), id=identity, resume="allow", **run)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _sinks(directory: Path, log: Log, config: Mapping[str, Any]) -> list[Any]:
    for folder in (TENSORBOARD, WANDB):
        check_no_link(directory / folder)
    try:
        found: list[Any] = [_TensorBoard(directory)] if log.tensorboard else []
        return found + ([_Wandb(directory, log.wandb, config)] if log.wandb else [])
    except ImportError as missing:
        raise ValueError(
            f"--log.tensorboard and --log.wandb need more: pip install 'hfjax[logs]' ({missing})."
        ) from None
