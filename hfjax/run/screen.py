"""What a run prints: a progress bar and log lines on a terminal, plain lines elsewhere.

`Speed` measures tokens and floating-point operations a second, and their share of the peak.
"""

import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

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

from hfjax.base.mean import SCALE, SKIPPED
from hfjax.base.progress import said_while
from hfjax.base.tables import harmless, human
from hfjax.parallel.engine.blueprint import LAYERS
from hfjax.parallel.mesh import EXPERTS
from hfjax.processes.agreement import speaks
from hfjax.run.build import Parts, short

# Dense matmuls in bfloat16, FLOP/s of one device (makers' data sheets).
PEAKS = {
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "V100": 125e12,
    "B200": 2250e12,
}


def flops_per_token(parts: Parts) -> float:
    """Return what training needs for one token: 6 for each parameter of a matmul, and attention.

    As in PaLM's appendix B: nothing is counted for what is computed again, nor less for causality,
    but for windows of attention it is; of experts those that a token goes to; embeddings count
    where they are the head's matrix. Of one's own model every matrix is counted, and no attention.
    """
    shape = parts.model.shape
    arrays = parts.layout.arrays.items()
    matrices = {path: math.prod(a.shape) for path, a in arrays if len(a.shape) > 1}
    if shape is None:
        return 6.0 * sum(matrices.values())
    used = lambda path: _share_in_use(shape, parts.layout.arrays[path].axes)
    in_layers = {path: size for path, size in matrices.items() if _is_matrix_of_layer(path)}
    layers = sum(size * used(path) for path, size in in_layers.items())
    head = shape.embed * shape.vocab
    width = shape.heads * getattr(shape, "width", shape.embed // shape.heads)
    return 6.0 * (layers + head) + 12.0 * width * _positions(shape, parts.model.length)


def _is_matrix_of_layer(path: str) -> bool:
    """Return whether tokens are multiplied by a parameter: biases and norms are no matrices."""
    return path.startswith(LAYERS) and not path.endswith(("/bias", "/scale"))


def _positions(shape: Any, length: int) -> int:
    """Return how many positions a token is scored against, by all layers together."""
    seen = lambda attend: min(getattr(attend, "window", None) or length, length)
    local = getattr(shape, "local", None)
    some = 0 if local is None else len(local.layers)
    others = (shape.layers - some) * seen(shape.attention)
    return others + (some * seen(local.attention) if local is not None else 0)


def _share_in_use(shape: Any, axes: tuple) -> float:
    """Return which part of an array a token computes with: of experts, those that it chose."""
    most = getattr(shape, "by_layer", (1,))
    return shape.top_k / max(most) if EXPERTS in axes else 1.0


def peak_flops(device: Any) -> float | None:
    """Return the FLOP/s of a device by its name; None for a CPU or an unknown one."""
    return next((flops for name, flops in PEAKS.items() if name in device.device_kind), None)


def memory(device: Any) -> int:
    """Return the most bytes that were in use: of a GPU, or of this process."""
    found = device.memory_stats() if device.platform != "cpu" else None
    if found and "peak_bytes_in_use" in found:
        return found["peak_bytes_in_use"]
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def waiting(what: str) -> Any:
    """Say what goes on while it takes long, in the process that speaks."""
    return said_while(what) if speaks() else nullcontext()


class Speed:
    """Tokens a second since the last look, without what the run did between its steps."""

    def __init__(self, parts: Parts):
        self._each = parts.config.batch * parts.model.length / parts.mesh.size
        self._flops = flops_per_token(parts)
        self._peak = peak_flops(parts.mesh.devices.flat[0])
        self._device = parts.mesh.local_devices[0]
        self._since: float | None = None  # None: the first step, which compiles, is not counted
        self._steps = 0
        self._seconds: float | None = None  # that a step took when it was last measured

    def count(self) -> None:
        """A step is done."""
        if self._since is None:
            self._since = time.perf_counter()
        else:
            self._steps += 1

    def pause(self) -> None:
        """What follows is no step; the next step begins a new measurement."""
        self._since, self._steps = None, 0

    def look(self) -> Mapping[str, Any]:
        """Return tokens/s, TFLOP/s and MFU per device since the last look; {} if too little ran."""
        found: dict[str, Any] = {"memory": memory(self._device)}
        if self._since is None or not self._steps:
            return found
        now = time.perf_counter()
        self._seconds = (now - self._since) / self._steps
        tokens = self._each / self._seconds
        self._since, self._steps = now, 0
        flops = tokens * self._flops
        found |= {"tokens_per_second": tokens, "tflops": flops / 1e12}
        return found | ({"mfu": flops / self._peak} if self._peak else {})

    def left(self, steps: int) -> float | None:
        """Return the seconds that so many steps will take; None: not known yet."""
        return None if self._seconds is None else self._seconds * steps


PERIOD = 600.0  # seconds of steps by which a bar tells the time left: some take minutes


class Screen:
    """Speaks in the first process only."""

    def __init__(self, steps: int, done: int = 0):
        self._console = Console(highlight=False, soft_wrap=True, quiet=not speaks())
        self._bar = None
        if self._console.is_terminal and speaks():
            columns = (BarColumn(40), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                *columns,
                TimeRemainingColumn(),
                console=self._console,
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

    def say(self, words: str = "") -> None:
        """Print a line, above the progress bar; a terminal shows its control characters."""
        words = harmless(words) if self._console.is_terminal else words
        self._console.print(words, markup=False)

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Say what goes on while it takes long: beside the bar, or in lines of its own."""
        if self._bar is None:
            with waiting(what):
                yield
            return
        self._bar.update(self._task, description=what)
        try:
            yield
        finally:
            self._bar.update(self._task, description="step")

    def advance(self) -> None:
        """Show that another step is done."""
        if self._bar is not None:
            self._bar.advance(self._task)


def line(values: Mapping[str, Any], steps: int, left: float | None = None) -> str:
    """Return the log line of a step; `left` are the seconds that the other steps will take.

    >>> line({"step": 9, "loss": 2.5, "lr": 1e-3, "grad_norm": 0.25, "memory": 2**30}, 300)
    'step  10/300  loss 2.5000  lr 1.00e-03  grad norm 0.250  memory 1.0 GiB'
    """
    number = str(values["step"] + 1).rjust(len(str(steps)))
    told = [f"step {number}/{steps}", f"loss {values['loss']:.4f}", f"lr {values['lr']:.2e}"]
    told.append(f"grad norm {values['grad_norm']:.3f}")
    if "load_max_over_mean" in values:
        told.append(f"load of experts {values['load_max_over_mean']:.2f} of the mean")
        told.append(f"dropped {values['dropped_mean']:.1%}")
    if SCALE in values:
        told.append(f"loss scale {values[SCALE]:g}, {values[SKIPPED]:g} skipped")
    if "tokens_per_second" in values:
        told.append(f"{short(values['tokens_per_second'])} tokens/s/device")
        told.append(f"{values['tflops']:.3g} TFLOP/s/device")
    if "mfu" in values:
        told.append(f"MFU {values['mfu']:.1%}")
    told.append(f"memory {human(values['memory'])}")
    return "  ".join(told + ([f"{timedelta(seconds=math.ceil(left))} left"] if left else []))


def validation(step: int, loss: float, tokens: int) -> str:
    """Return the line of a validation."""
    perplexity = math.exp(min(loss, 700.0))
    told = f"loss {loss:.4f}, perplexity {perplexity:.2f}, {tokens} tokens"
    when = f"after step {step}" if step else "before the first step"
    return f"validated {when}: {told}"
