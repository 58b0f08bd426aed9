"""The output of a run: metrics.jsonl, a plot of it, and logs for other tools."""

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
from hfjax.trainer.config import LogConfig
from hfjax.trainer.loss_plot import draw_plot
from hfjax.utils.atomic import replace_text
from hfjax.utils.read_files import (
    check_fields,
    check_ordinary,
    integer,
    is_number,
    parse_json,
    read_text,
)
from hfjax.utils.tables import quote
from hfjax.utils.write_files import check_no_link, open_ordinary

METRICS, PLOT = "metrics.jsonl", "loss.png"
DROPPED = "metrics.dropped.jsonl"
TENSORBOARD, WANDB = "tensorboard", "wandb"  # folders
FILES = (METRICS, PLOT)
WRITTEN = (*FILES, DROPPED, TENSORBOARD, WANDB)
MAX_RANGES = 6  # ranges of steps in a message


class MetricsWriter:
    """Writes a line of JSON for each step and each validation; non-finite values become null.

    Attributes:
        notes: Messages about the lines that were there.
        validated_steps: The steps after which it has a validation.
    """

    def __init__(
        self, directory: Path, log: LogConfig, config: Mapping[str, Any], start: int
    ) -> None:
        self.directory = directory
        check_no_link(directory / PLOT)
        lines, dropped = _drop_redone_steps(directory / METRICS, start)
        self.notes = [
            *_moved_notes(directory, dropped, start),
            *_gap_notes(directory / METRICS, lines, start),
        ]
        self.validated_steps = {line["step"] for line in lines if "valid_loss" in line}
        handle = open_ordinary(directory / METRICS, os.O_WRONLY | os.O_APPEND)
        self._file = open(handle, "a", encoding="utf-8")
        self._config, self._sinks = config, _open_sinks(directory, log, config)

    def write(self, step: int, **values: float) -> None:
        """Append a line, flushed to the operating system when the call returns."""
        finite = {name: x if math.isfinite(x) else None for name, x in values.items()}
        try:
            self._file.write(json.dumps({"step": step, **finite}) + "\n")
            self._file.flush()
        except OSError as full:
            raise OSError(
                f"{quote(self.directory / METRICS)} cannot be written: {full.strerror}. What was "
                "saved is whole: start again when it can be written."
            ) from full
        grouped = {group_name(name): x for name, x in values.items()}
        for sink in self._sinks:
            sink.write(step, grouped)

    def close(self) -> None:
        """Close the files, and draw the plot."""
        with suppress(OSError):  # `write` has raised it
            self._file.close()
        for sink in self._sinks:
            sink.close()
        try:
            draw_plot(read_metrics(self.directory / METRICS), self.directory / PLOT, self._config)
        except (OSError, ValueError) as wrong:
            why = getattr(wrong, "strerror", wrong)
            say(f"{quote(self.directory / PLOT)} is not drawn: {why}")

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file, without a last line that a kill cut short."""
    if not os.path.lexists(path):
        return []
    check_ordinary(path)
    lines, (*texts, _) = [], path.read_bytes().split(b"\n")
    for number, text in enumerate(texts, 1):
        try:
            lines.append(_parse_line(text))
        except ValueError as wrong:
            raise ValueError(
                f"{quote(path)}:{number} is no line of a run ({wrong}). Take it out, or move the "
                "file away."
            ) from None
    return lines


def _parse_line(text: bytes) -> dict[str, Any]:
    """Return a line of a metrics file; raise ValueError if no run wrote it."""
    line = check_fields(parse_json(text.decode()), {"step": integer(0)})
    number = lambda x: x is None or (is_number(x) and math.isfinite(x))
    return check_fields(line, dict.fromkeys(line, ("a number or null", number)))


def _drop_redone_steps(path: Path, start: int) -> tuple[list[dict], list[dict]]:
    """Remove the lines of steps that are done again, from the resumed checkpoint on.

    Return the lines that stay, and those that are moved to a file beside it.
    """
    lines = read_metrics(path)
    is_kept = lambda step, line: step < start or (step == start > 0 and "loss" not in line)
    remaining = [line for line in lines if is_kept(line["step"], line)]
    dropped = [line for line in lines if not is_kept(line["step"], line)]
    if dropped:
        dropped_path = path.with_name(DROPPED)
        old_text = read_text(dropped_path) if os.path.lexists(dropped_path) else ""
        replace_text(dropped_path, old_text + _text(dropped))
    if path.exists():
        replace_text(path, _text(remaining))
    return remaining, dropped


def _text(lines: list[dict]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def _moved_notes(directory: Path, dropped: list[dict], start: int) -> list[str]:
    """Return messages about the lines that were removed."""
    why = "those steps are done again" if start else "no checkpoint is left, so the run begins anew"
    target = quote(directory / DROPPED)
    lines = "1 line" if len(dropped) == 1 else f"{len(dropped)} lines"
    return [f"{lines} of {METRICS} moved to {target}: {why}"] * bool(dropped)


def _gap_notes(path: Path, lines: list[dict], start: int) -> list[str]:
    """Return messages about steps before `start` that have no line, or several."""
    times = Counter(line["step"] for line in lines if "loss" in line)
    missing = [step for step in range(start) if step not in times]
    several = [step for step in range(start) if times[step] > 1]
    gaps = [f"no line of steps {_format_ranges(missing)}"] if missing else []
    gaps += [f"several of steps {_format_ranges(several)}"] if several else []
    return [f"{quote(path)} has {' and '.join(gaps)} (the file counts from 0)"] if gaps else []


def _format_ranges(steps: list[int]) -> str:
    """Return step numbers as ranges.

    >>> _format_ranges([2, 3, 4, 7])
    '2-4, 7'
    """
    groups = groupby(enumerate(steps), key=lambda at: at[1] - at[0])  # constant within a range
    runs = [[step for _, step in run] for _, run in groups]
    ranges = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs[:MAX_RANGES]]
    num_left = sum(map(len, runs[MAX_RANGES:]))
    return ", ".join(ranges) + (f" and {num_left} more" if num_left else "")


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
        path = str(directory.absolute()).encode()
        identity = f"{directory.name}-{zlib.crc32(path):08x}"  # the same when the run resumes
        self._run = wandb.init(dir=str(directory), id=identity, resume="allow", **run)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _open_sinks(directory: Path, log: LogConfig, config: Mapping[str, Any]) -> list[Any]:
    for folder in (TENSORBOARD, WANDB):
        check_no_link(directory / folder)
    try:
        sinks: list[Any] = [_TensorBoard(directory)] if log.tensorboard else []
        return sinks + ([_Wandb(directory, log.wandb, config)] if log.wandb else [])
    except ImportError as missing:
        raise ValueError(
            f"--log.tensorboard and --log.wandb need more: pip install 'hfjax[logs]' ({missing})."
        ) from None
