"""metrics.jsonl, the tracker that every run has, and the plot of it."""

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from hfjax.trainer.logs.loss_plot import draw_plot
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

logger = logging.getLogger(__name__)

METRICS, PLOT = "metrics.jsonl", "loss.png"
DROPPED = "metrics.dropped.jsonl"
FILES = (METRICS, PLOT)
MAX_RANGES = 6  # ranges of steps in a message


class MetricsFile:
    """Writes a line of JSON for each step and each validation; non-finite values become null.

    Attributes:
        notes: Messages about the lines that were there.
        validated_steps: The steps after which it has a validation.
    """

    def start(self, directory: Path, config: Mapping[str, Any], step: int) -> None:
        """Open the file; lines of `step` and of later steps are moved to another."""
        check_no_link(directory / PLOT)
        self._directory, self._config = directory, config
        lines, dropped = _drop_redone_steps(directory / METRICS, step)
        self.notes = [
            *_moved_notes(directory, dropped, step),
            *_gap_notes(directory / METRICS, lines, step),
        ]
        self.validated_steps = {line["step"] for line in lines if "valid_loss" in line}
        handle = open_ordinary(directory / METRICS, os.O_WRONLY | os.O_APPEND)
        self._file = open(handle, "a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line, flushed to the operating system when the call returns."""
        finite = {name: x if math.isfinite(x) else None for name, x in metrics.items()}
        try:
            self._file.write(json.dumps({"step": step, **finite}) + "\n")
            self._file.flush()
        except OSError as full:
            raise OSError(
                f"{quote(self._directory / METRICS)} cannot be written: {full.strerror}. What was "
                "saved is whole: start again when it can be written."
            ) from full

    def finish(self) -> None:
        """Close the file, and draw the plot."""
        with suppress(OSError):  # `log` has raised it
            self._file.close()
        directory = self._directory
        try:
            draw_plot(read_metrics(directory / METRICS), directory / PLOT, self._config)
        except (OSError, ValueError) as wrong:
            why = getattr(wrong, "strerror", wrong)
            logger.warning("%s is not drawn: %s", quote(directory / PLOT), why)


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
