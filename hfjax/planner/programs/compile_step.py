"""Compiles one training step for GPUs that need not be here, and reports its statistics.

Without a loop over layers, compile time grows with the number of layers, and each layer adds the
same to a program. So it is compiled at two `DEPTHS` and extrapolated linearly. The point of peak
memory, though, changes with the depth (`live_bytes`). Layers in a loop, a pipeline's too, are
compiled at their real depth.

`compile_candidate` runs it as a separate process, with settings and statistics as JSON.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from operator import attrgetter
from pathlib import Path

import jax

from hfjax.analysis.overlap import Flight, flights
from hfjax.analysis.targets import target_devices
from hfjax.parallel.engine.gradient_engine import AutodiffEngine
from hfjax.parallel.layer_stack.unrolled_layers import unroll
from hfjax.planner.programs.estimate import program_memory as memory_of
from hfjax.planner.programs.live_bytes import live_bytes, temporaries_at_depth
from hfjax.planner.programs.placeholder_attention import fused_attention
from hfjax.planner.programs.planned_run import PlannedRun, compile_for_gpu
from hfjax.trainer import config_io
from hfjax.trainer.config import TrainConfig
from hfjax.utils.tables import count_equal

# Up to four layers are scheduled differently, and DDP's gradient reductions are combined
# across layers: depths of two and four gave 5 % too high a peak for llama3-8b, four and eight 3 %
# too many collectives of DDP. These two are right within 1 % and 2 %.
DEPTHS = (6, 12)
KERNELS = "xla_gpu_kernel_cache_file"  # XLA's option for a file that keeps the code of kernels
DIGITS = 6  # of numbers that tell transfers apart


@dataclass(frozen=True)
class CompiledTransfer:
    """One kind of collective call: the same bytes, beside the same matmuls."""

    kind: str
    axes: str  # joined by +
    bytes: float  # payload of one call on one device
    count: float
    seconds: float  # of one call, modelled (hfjax.analysis.overlap)
    covered: float  # of those seconds
    flops: float  # of matmuls while one call is in flight, also those that cover another call
    synchronous: bool  # nothing runs beside it


@dataclass(frozen=True)
class ProgramStats:
    """Statistics of a compiled program, for one step on one device.

    Attributes:
        peak: Peak bytes of the device, as the compiler counts them.
        arguments: Bytes of the state and the batch.
        temporaries: Bytes of temporaries.
        host: Bytes in host memory.
        transfers: The collectives, as scheduled. Calls that XLA combined differently at the two
            depths are represented by their mean.
        seconds: Compile time.
        depths: Numbers of layers of the two programs; empty: the real program was compiled.
    """

    peak: float
    arguments: float
    temporaries: float
    host: float
    transfers: tuple[CompiledTransfer, ...]
    seconds: float = 0.0
    depths: tuple[int, ...] = ()


def compile_step(
    config: TrainConfig, gpu: str, count: int, vocab: int | None = None, kernels: Path | None = None
) -> ProgramStats:
    """Return statistics of a configuration's program, compiled in this process.

    Args:
        config: The run.
        gpu: GPU to compile for: h200, h100.
        count: Number of GPUs.
        vocab: Vocabulary size. None: that of the data.
        kernels: File of kernels that were compiled before; new ones are added to it.
    """
    began = time.perf_counter()
    devices = target_devices(gpu, count)
    plan = lambda config: PlannedRun(config, devices, vocab, attention=fused_attention)
    at = lambda layers: plan(replace(config, model=replace(config.model, num_layers=layers)))
    run = plan(config)
    layers = layers_without_loop(run)
    if layers is None or layers <= 2 * DEPTHS[1]:  # which takes no longer
        stats = compile_program(run, kernels)[0]
    else:
        stats = compile_two_depths(at, layers, kernels)
    return replace(stats, seconds=time.perf_counter() - began)


def layers_without_loop(run: PlannedRun) -> int | None:
    """Return the number of layers if none is in a loop and the number can be changed.

    None: they loop, or run in a pipeline, or the model is no preset, whose layers are alike.
    """
    model, engine = run.config.model, run.step.engine
    preset = model.factory is None and model.pretrained is None and run.task.unit == "tokens"
    if not preset or not isinstance(engine, AutodiffEngine) or not engine.context.is_layer_stack:
        return None
    layers = engine.context.template.num_layers
    return layers if unroll(engine.context.options, layers) is True else None


def compile_program(
    run: PlannedRun, kernels: Path | None = None
) -> tuple[ProgramStats, tuple[float, float]]:
    """Return statistics of a run's program, compiled at its real depth, and its `live_bytes`."""
    program = _compile(run.trace().lower(), kernels)
    memory = memory_of(program)
    stats = ProgramStats(
        peak=memory["peak"],
        arguments=memory["arguments"],
        temporaries=memory["temporaries"],
        host=memory["host_compiled"],
        transfers=_transfers(flights(program)),
    )
    return stats, live_bytes(program.as_text() or "")


def _compile(lowered: jax.stages.Lowered, kernels: Path | None) -> jax.stages.Compiled:
    """Return a compiled program, reusing the code of kernels that were compiled before."""
    if kernels is not None:
        with suppress(jax.errors.JaxRuntimeError):
            return compile_for_gpu(lowered, {KERNELS: str(kernels)})
        kernels.unlink(missing_ok=True)  # a damaged file, or a jax without the option
    return compile_for_gpu(lowered)


def _transfers(in_flight: Iterable[Flight]) -> tuple[CompiledTransfer, ...]:
    """Return flights as plain entries, with equal ones merged."""
    transfers = []
    for f in in_flight:
        covered, axes = _round_digits(f.seconds * f.covered), "+".join(f.axes)
        numbers = _round_digits(f.seconds), covered, _round_digits(f.flops), f.synchronous
        transfers.append(CompiledTransfer(f.kind, axes, f.bytes, f.count, *numbers))
    return tuple(count_equal(transfers))


def _round_digits(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")


# -- two depths ---------------------------------------------------------------------------


def compile_two_depths(
    at: Callable[[int], PlannedRun], layers: int, kernels: Path | None = None
) -> ProgramStats:
    """Return extrapolated statistics for `layers` layers; `at` plans a run of any depth."""
    (few, live_few), (more, live_more) = (compile_program(at(depth), kernels) for depth in DEPTHS)
    stats, sizes = extrapolate_depth(layers, few, more), (few.temporaries, more.temporaries)
    temporaries = temporaries_at_depth(layers, DEPTHS, sizes, (live_few, live_more))
    peak = stats.peak + temporaries - stats.temporaries
    return replace(stats, temporaries=temporaries, peak=peak, depths=DEPTHS)


def extrapolate_depth(layers: int, few: ProgramStats, more: ProgramStats) -> ProgramStats:
    """Return statistics of a program of `layers` layers, from two programs of `DEPTHS`.

    >>> program = lambda peak: ProgramStats(peak, 0, 0, 0, ())
    >>> extrapolate_depth(24, program(16.0), program(22.0)).peak
    34.0
    """
    further = (layers - DEPTHS[1]) / (DEPTHS[1] - DEPTHS[0])
    line = lambda a, b: b + (b - a) * further
    numbers = [f.name for f in fields(ProgramStats) if f.name not in ("transfers", "depths")]
    values = {name: line(getattr(few, name), getattr(more, name)) for name in numbers}
    groups = dict.fromkeys((t.kind, t.axes) for t in (*few.transfers, *more.transfers))
    of = lambda transfers, group: [t for t in transfers if (t.kind, t.axes) == group]
    transfers = [
        transfer
        for group in groups
        for transfer in _extrapolate_transfers(
            of(few.transfers, group), of(more.transfers, group), line
        )
    ]
    return ProgramStats(**values, transfers=tuple(transfers))


def _extrapolate_transfers(
    few: Sequence[CompiledTransfer],
    more: Sequence[CompiledTransfer],
    line: Callable[[float, float], float],
) -> list[CompiledTransfer]:
    """Return the transfers of one kind and axes: those of both depths, and the mean of others."""
    plain = lambda t: replace(t, count=0)
    a, b = ({plain(t): t.count for t in transfers} for transfers in (few, more))
    counts = {t: line(a[t], b[t]) for t in a if t in b}
    same = {t: count for t, count in counts.items() if count >= 0}
    rest = lambda transfers: [t for t in transfers if plain(t) not in same]
    mean = _merge_transfers(rest(few), rest(more), line)
    if mean is None:
        same, mean = {}, _merge_transfers(few, more, line) or []
    return [*(replace(t, count=count) for t, count in same.items() if count), *mean]


def _merge_transfers(
    few: Sequence[CompiledTransfer],
    more: Sequence[CompiledTransfer],
    line: Callable[[float, float], float],
) -> list[CompiledTransfer] | None:
    """Return all transfers as one entry, or none; None: the count would be negative."""
    weighted_sum = lambda transfers, of: sum(of(t) * t.count for t in transfers)
    count = line(weighted_sum(few, lambda t: 1), weighted_sum(more, lambda t: 1))
    sums = {
        name: line(*(weighted_sum(transfers, attrgetter(name)) for transfers in (few, more)))
        for name in ("bytes", "seconds", "covered", "flops")
    }
    if count <= 0 or min(sums.values()) < 0:
        return None if count or any(sums.values()) else []
    means = {name: value / count for name, value in sums.items()}
    means["covered"] = min(means["covered"], means["seconds"])
    first = (*more, *few)[0]
    synchronous = all(t.synchronous for t in (*few, *more))
    return [CompiledTransfer(first.kind, first.axes, count=count, synchronous=synchronous, **means)]


# -- a separate process -------------------------------------------------------------------


def main() -> None:
    """Compile the request on standard input; print its statistics, or an error."""
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    jax.config.update("jax_platforms", "cpu")  # the devices that it compiles for are not here
    kernels = request["kernels"] and Path(request["kernels"])
    try:
        config = config_io.parse_dataclass(TrainConfig, request["settings"], "settings")
        stats = compile_step(config, request["gpu"], request["count"], request["vocab"], kernels)
    except Exception as wrong:  # of the settings, the model or the compiler
        print(f"{type(wrong).__name__}: {' '.join(str(wrong).split())}", file=sys.stderr)
        raise SystemExit(1) from None
    print(json.dumps(asdict(stats)))


def _end_with_parent() -> None:
    """Wait until the other end of standard input is closed; end the process."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
