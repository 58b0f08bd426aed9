"""What the program of one training step tells, compiled for GPUs that need not be here.

Where layers follow each other without a loop, a program takes as long to compile as it has layers,
and each layer adds the same to it. So it is compiled at two `DEPTHS`, and all else is their
difference; which moment takes most memory changes with the depth, though (`live_bytes`). Layers in
a loop, a pipeline's too, are compiled as they are.

`compiled` runs it as a process of its own: settings come in as JSON, what the program tells goes
out as JSON.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import jax

from hfjax.analysis.overlap import Flight, flights
from hfjax.analysis.targets import target_devices
from hfjax.parallel.engine.gradient_engine import AutodiffPlane
from hfjax.parallel.layer_stack.ordered_layers import unroll
from hfjax.planner.programs.estimate import compiled as memory_of
from hfjax.planner.programs.live_bytes import at_layers, live_bytes
from hfjax.planner.programs.placeholder_attention import fused_attention
from hfjax.planner.programs.planned_run import Planned, compile_for_gpu
from hfjax.trainer import config_io
from hfjax.trainer.config import Train
from hfjax.utils.tables import counted

# Four layers and less are scheduled in a way of their own, and DDP's sums of gradients are joined
# across layers: two and four told 5 % too much of the peak of llama3-8b, four and eight 3 % too
# many collectives of DDP. These two are right within 1 % and 2 %.
DEPTHS = (6, 12)
KERNELS = "xla_gpu_kernel_cache_file"  # the option of XLA that keeps the code of kernels
DIGITS = 6  # of numbers that tell transfers apart


@dataclass(frozen=True)
class CompiledTransfer:
    """One kind of collective call: the same bytes, beside the same matmuls."""

    kind: str
    axes: str  # joined by +
    bytes: float  # payload of one call on one device
    count: float
    seconds: float  # that one call takes, modelled (hfjax.analysis.overlap)
    covered: float  # of those seconds
    flops: float  # of matmuls while one call is under way, also those that cover another call
    synchronous: bool  # nothing runs beside it


@dataclass(frozen=True)
class Compiled:
    """What a compiled program tells of one step on one device.

    Attributes:
        peak: Bytes of the device at once, as its compiler counts them.
        arguments: Bytes of the state and the batch.
        temporaries: Bytes of all that comes and goes.
        host: Bytes in the host's memory.
        transfers: The collectives, as they are scheduled. Calls that XLA joined otherwise at the
            two depths are told by their mean.
        seconds: How long it took to compile.
        depths: The layers of the two programs that were compiled; none: the whole program was.
    """

    peak: float
    arguments: float
    temporaries: float
    host: float
    transfers: tuple[CompiledTransfer, ...]
    seconds: float = 0.0
    depths: tuple[int, ...] = ()


def compile_step(
    config: Train, gpu: str, count: int, vocab: int | None = None, kernels: Path | None = None
) -> Compiled:
    """Return what the program of a configuration tells; it is compiled in this process.

    Args:
        config: The run.
        gpu: What it is compiled for: h200, h100.
        count: How many of them.
        vocab: The tokens of the vocabulary. None: those of the data.
        kernels: A file of kernels that were compiled before; new ones are added to it.
    """
    began = time.perf_counter()
    devices = target_devices(gpu, count)
    plan = lambda config: Planned(config, devices, vocab, attention=fused_attention)
    at = lambda layers: plan(replace(config, model=replace(config.model, layers=layers)))
    parts = plan(config)
    layers = layers_without_loop(parts)
    if layers is None or layers <= 2 * DEPTHS[1]:  # which takes no longer
        found = program_of(parts, kernels)[0]
    else:
        found = of_two_depths(at, layers, kernels)
    return replace(found, seconds=time.perf_counter() - began)


def layers_without_loop(parts: Planned) -> int | None:
    """Return how many layers a step has if none is in a loop and another number may be asked for.

    None: they loop, or a pipeline runs them, or the model is no preset, whose layers are alike.
    """
    given, plane = parts.config.model, parts.step.plane
    preset = given.own is None and given.pretrained is None and parts.task.unit == "tokens"
    if not preset or not isinstance(plane, AutodiffPlane) or not plane.context.in_parts:
        return None
    layers = plane.context.blueprint.number_of_layers
    return layers if unroll(plane.context.options, layers) is True else None


def program_of(parts: Planned, kernels: Path | None = None) -> tuple[Compiled, tuple[float, float]]:
    """Return what the program of a run's step tells, compiled as it is; and its `live_bytes`."""
    program = _compile(parts.trace().lower(), kernels)
    memory = memory_of(program)
    found = Compiled(
        peak=memory["peak"],
        arguments=memory["arguments"],
        temporaries=memory["temporaries"],
        host=memory["host_compiled"],
        transfers=_transfers(flights(program)),
    )
    return found, live_bytes(program.as_text() or "")


def _compile(lowered: jax.stages.Lowered, kernels: Path | None) -> jax.stages.Compiled:
    """Return a program; of kernels that are compiled already only what they are called is new."""
    if kernels is not None:
        with suppress(jax.errors.JaxRuntimeError):
            return compile_for_gpu(lowered, {KERNELS: str(kernels)})
        kernels.unlink(missing_ok=True)  # a damaged file, or a jax without the option
    return compile_for_gpu(lowered)


def _transfers(found: Iterable[Flight]) -> tuple[CompiledTransfer, ...]:
    """Return flights as plain rows, equal ones together."""
    rows = []
    for f in found:
        covered, axes = _rounded(f.seconds * f.covered), "+".join(f.axes)
        told = _rounded(f.seconds), covered, _rounded(f.flops), f.synchronous
        rows.append(CompiledTransfer(f.kind, axes, f.bytes, f.count, *told))
    return tuple(counted(rows))


def _rounded(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")


# -- two depths ---------------------------------------------------------------------------


def of_two_depths(
    at: Callable[[int], Planned], layers: int, kernels: Path | None = None
) -> Compiled:
    """Return what a program of so many layers tells; `at` plans one of any other number."""
    (few, live_few), (more, live_more) = (program_of(at(depth), kernels) for depth in DEPTHS)
    found, sizes = at_depth(layers, few, more), (few.temporaries, more.temporaries)
    temporaries = at_layers(layers, DEPTHS, sizes, (live_few, live_more))
    peak = found.peak + temporaries - found.temporaries
    return replace(found, temporaries=temporaries, peak=peak, depths=DEPTHS)


def at_depth(layers: int, few: Compiled, more: Compiled) -> Compiled:
    """Return what a program of so many layers tells, of which two others have `DEPTHS`.

    >>> program = lambda peak: Compiled(peak, 0, 0, 0, ())
    >>> at_depth(24, program(16.0), program(22.0)).peak
    34.0
    """
    further = (layers - DEPTHS[1]) / (DEPTHS[1] - DEPTHS[0])
    line = lambda a, b: b + (b - a) * further
    numbers = [f.name for f in fields(Compiled) if f.name not in ("transfers", "depths")]
    values = {name: line(getattr(few, name), getattr(more, name)) for name in numbers}
    groups = dict.fromkeys((t.kind, t.axes) for t in (*few.transfers, *more.transfers))
    of = lambda rows, group: [t for t in rows if (t.kind, t.axes) == group]
    rows = [
        row
        for group in groups
        for row in _at_depth(of(few.transfers, group), of(more.transfers, group), line)
    ]
    return Compiled(**values, transfers=tuple(rows))


def _at_depth(
    few: Sequence[CompiledTransfer],
    more: Sequence[CompiledTransfer],
    line: Callable[[float, float], float],
) -> list[CompiledTransfer]:
    """Return the transfers of one kind along some axes: those of both depths, and others' mean."""
    plain = lambda t: replace(t, count=0)
    a, b = ({plain(t): t.count for t in rows} for rows in (few, more))
    counts = {t: line(a[t], b[t]) for t in a if t in b}
    same = {t: count for t, count in counts.items() if count >= 0}
    rest = lambda rows: [t for t in rows if plain(t) not in same]
    mean = _mean(rest(few), rest(more), line)
    if mean is None:
        same, mean = {}, _mean(few, more, line) or []
    return [*(replace(t, count=count) for t, count in same.items() if count), *mean]


def _mean(
    few: Sequence[CompiledTransfer],
    more: Sequence[CompiledTransfer],
    line: Callable[[float, float], float],
) -> list[CompiledTransfer] | None:
    """Return all transfers as one row, no row if there are none; None: fewer than none are left."""
    total = lambda rows, of: sum(of(t) * t.count for t in rows)
    count = line(total(few, lambda t: 1), total(more, lambda t: 1))
    sums = {
        name: line(*(total(rows, lambda t: getattr(t, name)) for rows in (few, more)))  # noqa: B023
        for name in ("bytes", "seconds", "covered", "flops")
    }
    if count <= 0 or min(sums.values()) < 0:
        return None if count or any(sums.values()) else []
    means = {name: value / count for name, value in sums.items()}
    means["covered"] = min(means["covered"], means["seconds"])
    first = (*more, *few)[0]
    alone = all(t.synchronous for t in (*few, *more))
    return [CompiledTransfer(first.kind, first.axes, count=count, synchronous=alone, **means)]


# -- a process of its own -----------------------------------------------------------------


def main() -> None:
    """Compile what a line of standard input asks for; print what it tells, or what is wrong."""
    given = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    jax.config.update("jax_platforms", "cpu")  # what it compiles for is not here
    kernels = given["kernels"] and Path(given["kernels"])
    try:
        config = config_io.read(Train, given["settings"], "settings")
        found = compile_step(config, given["gpu"], given["count"], given["vocab"], kernels)
    except Exception as wrong:  # of the settings, the model or the compiler
        print(f"{type(wrong).__name__}: {' '.join(str(wrong).split())}", file=sys.stderr)
        raise SystemExit(1) from None
    print(json.dumps(asdict(found)))


def _end_with_parent() -> None:
    """Wait until nobody holds the other end of standard input; end the process."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
