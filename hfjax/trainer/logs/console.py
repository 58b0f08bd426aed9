"""What a run logs in process 0, and its progress bar on a terminal.

`SpeedMeter` measures tokens and floating-point operations a second, and their share of the peak.
"""

import logging
import math
import resource
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from hfjax.distributed.consensus import speaks
from hfjax.hardware.machine import machine_of
from hfjax.trainer.build import RunComponents, format_count
from hfjax.utils.mean import SCALE, SKIPPED
from hfjax.utils.progress import show_progress
from hfjax.utils.tables import human

logger = logging.getLogger(__name__)


def peak_flops(device: Any) -> float | None:
    """Return the FLOP/s of a device by its name; None for a CPU or an unknown one."""
    machine = machine_of(device.device_kind)
    return machine.peak if machine else None


def peak_memory(device: Any) -> int:
    """Return the peak memory in bytes: of a GPU, or of this process."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def show_waiting(task: str) -> Any:
    """Show the progress of a slow task, in the process that logs."""
    return show_progress(task) if speaks() else nullcontext()


class SpeedMeter:
    """Measures tokens (or images) a second, without what a run does between steps."""

    def __init__(self, components: RunComponents) -> None:
        self._unit, units_per_example = components.task.unit, components.task.units_per_example
        self._units_per_step = (
            components.config.global_batch_size * units_per_example / components.mesh.size
        )
        self._flops = components.task.flops(components.layout)
        self._peak = peak_flops(components.mesh.devices.flat[0])
        self._device = components.mesh.local_devices[0]
        self._wait_time = 0.0  # for batches, in total
        self._pending = deque[Any]()  # a result of each step that is not known to have ended
        self._end_times = deque[np.ndarray]()  # of steps that are not counted yet
        self._last_end: np.ndarray | None = None  # end of the last step
        self._start: np.ndarray | None = None  # None: the first step compiles, and does not count
        self._end = self._now()
        self._steps = 0
        self._seconds: float | None = None  # of a step, when last measured

    def begin(self, result: Any) -> None:
        """Record that a step has begun; `result` is one of its outputs."""
        self._last_end = self._now() if self._last_end is None else self._last_end
        self._pending.append(result)

    def poll(self) -> None:
        """Record which steps have ended; several found together are spaced evenly.

        The time of reading their metrics says little: a validation first reads several together.
        """
        count = 0
        while self._pending and self._pending[0].is_ready():
            self._pending.popleft()
            count += 1
        if count:
            now, last = self._now(), self._last_end
            assert last is not None
            self._end_times.extend(last + (now - last) * (i + 1) / count for i in range(count))
            self._last_end = now

    def _now(self) -> np.ndarray:
        """Return the time, and the time that steps have waited for batches so far."""
        return np.array([time.perf_counter(), self._wait_time])

    def count_step(self) -> None:
        """Count a step whose metrics were read on one device; others may still run it."""
        if not self._end_times:
            self._pending[0].block_until_ready()
            self.poll()
        self._end = self._end_times.popleft()
        if self._start is None:
            self._start = self._end
        else:
            self._steps += 1

    @contextmanager
    def waiting_for_batch(self) -> Iterator[None]:
        """Count the time of the block as waiting for a batch."""
        self.poll()
        began = time.perf_counter()
        yield
        self._wait_time += time.perf_counter() - began
        self.poll()

    def pause(self) -> None:
        """Stop measuring until the next step, which begins a new measurement."""
        self._start, self._last_end, self._steps = None, None, 0

    def measure(self) -> Mapping[str, Any]:
        """Return rate, TFLOP/s and MFU per device since the last call; only memory if none ran."""
        metrics: dict[str, Any] = {"memory": peak_memory(self._device)}
        if self._start is None or not self._steps:
            return metrics
        time_passed, waiting_passed = map(float, self._end - self._start)
        self._seconds = max(time_passed, SHORTEST) / self._steps
        rate, waited = (
            self._units_per_step / self._seconds,
            waiting_passed / max(time_passed, SHORTEST),
        )
        self._start, self._steps = self._end, 0
        metrics |= {f"{self._unit}{RATE}": rate, "waiting_for_data": waited}
        if not self._flops:  # not known
            return metrics
        flops = rate * self._flops
        metrics["tflops"] = flops / 1e12
        return metrics | ({"mfu": flops / self._peak} if self._peak else {})

    def seconds_left(self, steps: int) -> float | None:
        """Return the seconds that `steps` steps will take; None if not known yet."""
        return None if self._seconds is None else self._seconds * steps


SHORTEST = 1e-9  # seconds: a clock may not resolve less
MIN_WAITING = 0.02  # fraction of the time
RATE = "_per_second"  # suffix of the name of a device's rate
PERIOD = 600.0  # seconds of steps from which a bar estimates the time left: some take minutes


class Screen:
    """Logs in process 0 only; on a terminal it shows a progress bar."""

    def __init__(self, console: Console | None, steps: int, done: int = 0) -> None:
        self._bar = None
        if console is not None and console.is_terminal and speaks():
            columns = (BarColumn(40), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                *columns,
                TimeRemainingColumn(),
                console=console,
                speed_estimate_period=PERIOD,
            )
            self._task = self._bar.add_task("step", total=steps, completed=done)

    def __enter__(self) -> "Screen":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str = "") -> None:
        """Log a line."""
        if speaks():
            logger.info("%s", text)

    @contextmanager
    def busy(self, task: str) -> Iterator[None]:
        """Show a slow task: beside the bar, or in lines of its own."""
        if self._bar is None:
            with show_waiting(task):
                yield
            return
        self._bar.update(self._task, description=task)
        try:
            yield
        finally:
            self._bar.update(self._task, description="step")

    def advance(self) -> None:
        """Show that another step is done."""
        if self._bar is not None:
            self._bar.advance(self._task)


def step_line(values: Mapping[str, Any], steps: int, seconds_left: float | None = None) -> str:
    """Return the log line of a step; `seconds_left` is the time that the remaining steps will take.

    >>> step_line({"step": 9, "loss": 2.5, "lr": 1e-3, "grad_norm": 0.25, "memory": 2**30}, 300)
    'step  10/300  loss 2.5000  lr 1.00e-03  grad norm 0.250  memory 1.0 GiB'
    """
    number = str(values["step"] + 1).rjust(len(str(steps)))
    fields = [f"step {number}/{steps}", f"loss {values['loss']:.4f}", f"lr {values['lr']:.2e}"]
    fields.append(f"grad norm {values['grad_norm']:.3f}")
    if "load_max_over_mean" in values:
        fields.append(f"load of experts {values['load_max_over_mean']:.2f} of the mean")
        fields.append(f"dropped {values['dropped_mean']:.1%}")
    if SCALE in values:
        fields.append(f"loss scale {values[SCALE]:g}, {values[SKIPPED]:g} skipped")
    for name in (name for name in values if name.endswith(RATE)):
        fields.append(f"{format_count(values[name])} {name.removesuffix(RATE)}/s/device")
    if "tflops" in values:
        fields.append(f"{values['tflops']:.3g} TFLOP/s/device")
    if "mfu" in values:
        fields.append(f"MFU {values['mfu']:.1%}")
    if (waited := values.get("waiting_for_data", 0)) >= MIN_WAITING:
        fields.append(f"waiting for data {waited:.0%}")
    fields.append(f"memory {human(values['memory'])}")
    return "  ".join(
        fields + ([f"{timedelta(seconds=math.ceil(seconds_left))} left"] if seconds_left else [])
    )


def validation_line(step: int, scores: str) -> str:
    """Return the log line of a validation with its scores."""
    when = f"after step {step}" if step else "before the first step"
    return f"validated {when}: {scores}"
