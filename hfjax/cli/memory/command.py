"""`hfjax memory`: estimates the memory of a training step on each device, before anything runs."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import jax
from rich.console import Console

from hfjax.analysis.search_offload import OffloadSearch, least_offload
from hfjax.analysis.targets import (
    FRACTION,
    GPUS,
    can_compile_for_gpus,
    how_to_install,
    memory_fraction,
    target_devices,
)
from hfjax.cli.arguments import expand_short, parse_flags
from hfjax.cli.memory import plot
from hfjax.cli.memory.settings import AUTO, Memory, alternatives, memory_settings, with_offload
from hfjax.cli.memory.table import Report, table
from hfjax.cli.train import check_recipe, config_of
from hfjax.parallel.mesh import PIPE_AXIS, auto_axes, describe_mesh, in_use
from hfjax.planner.programs.estimate import estimate, program_memory
from hfjax.planner.programs.placeholder_attention import fused_attention
from hfjax.planner.programs.planned_run import PlannedRun, compile_for_gpu
from hfjax.trainer.build import check_flags_used
from hfjax.trainer.deepspeed_flags import with_deepspeed_file
from hfjax.utils.command_errors import FAILED, report_errors, run_command
from hfjax.utils.progress import show_progress
from hfjax.utils.tables import human, parse_bytes

WIDTH, COLUMN = 26, 11  # of the table: labels, and the least for a number


def main(argv: Sequence[str]) -> int:
    """Run `hfjax memory` with these arguments; return the exit status."""
    with report_errors("memory"):
        default, rest = config_of(argv)
        settings: Memory = parse_flags(
            Memory, rest, "memory", memory_settings(default), config=True
        )
        if settings.deepspeed is not None:
            num_devices = settings.cpu_devices or (
                jax.device_count() if settings.gpu == "here" else settings.count
            )
            typed = expand_short(Memory, rest)
            settings, _ = with_deepspeed_file(settings, typed, num_devices)
        check_flags_used([config for _, config in alternatives(settings)], rest)
        if settings.model.pretrained is None:
            check_recipe(argv, settings, settings.vocab)
    console = Console(highlight=False)
    return run_command("memory", lambda: _print_report(settings, console))


def _print_report(settings: Memory, console: Console) -> int | None:
    _configure_jax(settings)
    if (
        settings.gpu != "here"
        and settings.offload.activations != AUTO
        and not can_compile_for_gpus()
    ):
        print(
            "no package here compiles for CUDA: this is compiled for the CPU, and what it says of "
            f"temporaries and peak is not of a {settings.gpu.upper()}. Install what compiles for "
            f"it (no GPU is needed): {how_to_install()}",
            file=sys.stderr,
            flush=True,
        )
    memory_report = report(settings, lambda line: print(line, file=sys.stderr, flush=True))
    headings = [estimate.heading.splitlines() for estimate in memory_report.estimates]
    columns = sum(3 + max(COLUMN, *map(len, lines)) for lines in headings)
    console.width = max(console.width, WIDTH + columns)
    console.print(table(memory_report))
    for note in memory_report.notes:
        console.print(f"* {note}", style="dim")
    if settings.json is not None:
        settings.json.write_text(json.dumps(asdict(memory_report), indent=1), encoding="utf-8")
    if settings.plot is not None:
        plot.draw(memory_report, settings.plot)
        console.print(f"{settings.plot} is drawn.")
    if memory_report.missed is None:
        return None
    print(f"hfjax memory: {memory_report.missed}", file=sys.stderr)
    return FAILED


def _configure_jax(settings: Memory) -> None:
    """Set JAX up before its first use."""
    if settings.gpu == "here" and settings.cpu_devices is None:
        return
    jax.config.update("jax_platforms", "cpu")
    num_devices = settings.cpu_devices if settings.gpu == "here" else settings.count
    jax.config.update("jax_num_cpu_devices", num_devices)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # of drivers that are not needed


def report(settings: Memory, log: Callable[[str], Any] = lambda line: None) -> Report:
    """Return estimates of the settings and of alternatives; `log` gets each peak as it comes."""
    devices = _devices(settings)
    run, notes, missed = _plan_run(settings, devices), [], None
    settings = replace(settings, precision=run.config.precision)
    device = run.mesh.devices.flat[0]
    memory, device_name = _device_memory(settings, device)
    list(alternatives(settings))  # refuses wrong alternatives before anything is compiled
    if settings.offload.activations == AUTO:
        least = _search_offload(settings, devices, memory, log)
        ratio = 1 if least.ratio is None else least.ratio
        settings = with_offload(settings, f"{ratio:g}" if ratio else None)
        notes, missed = [_offload_note(least)], _offload_failure(least)
    estimates, refused = [], {}
    for name, config in alternatives(settings):
        try:
            with show_progress(f"compiling {name}"):
                estimates.append(estimate(name, _plan_run(config, devices)))
            log(f"{name}: peak {human(estimates[-1].peak)}")
        except ValueError as wrong:
            if not estimates:
                raise
            refused[name] = str(wrong)
            log(f"{name}: cannot be, as told below the table")
    kind = "CPU" if device.platform == "cpu" else device.device_kind
    batch_text = f"{settings.global_batch_size} {run.task.describe_example()}"
    layout_text = f"{run.layout.strategy.name} on {describe_mesh(run.mesh)}"
    title = (
        f"{run.model.name}, {layout_text} ({run.mesh.size} x {kind}), {batch_text}, precision "
        f"{settings.precision}"
    )
    if any(e.sent_whole for e in estimates):
        notes.append("sent in a step: some of it is counted whole along tensor, more than is sent.")
    notes = (*notes, *_notes(settings, run))
    return Report(title, tuple(estimates), refused, memory, device_name, notes, missed)


# -- the least offload --------------------------------------------------------------------


def _search_offload(
    settings: Memory, devices: Any, memory: int | None, log: Callable[[str], Any]
) -> OffloadSearch:
    """Return the least offload that fits the memory of a device, by programs compiled for it."""
    if not _is_for_gpu(settings):
        raise ValueError(
            "--offload.activations auto compares programs compiled for the GPU: the compiler for "
            f"CPUs counts no offload. Install what compiles: {how_to_install()}"
        )
    if memory is None:
        raise ValueError(
            "--offload.activations auto: the memory that a step may use is needed. Give it: "
            "--device-memory 24GiB"
        )

    def peak(ratio: float) -> int:
        name = f"offload={ratio:g}"
        with show_progress(f"compiling {name}"):
            offload = f"{ratio:g}" if ratio else None  # without any, layers run in no loop
            run = _plan_run(with_offload(settings, offload), devices)
            size = program_memory(compile_for_gpu(run.trace().lower()))["peak"]
        log(f"{name}: peak {human(size)}")
        return size

    return least_offload(peak, memory)


def _offload_note(least: OffloadSearch) -> str:
    peaks = ", ".join(f"{ratio:g}: {human(least.peaks[ratio])}" for ratio in sorted(least.peaks))
    verdict = "no ratio fits" if least.ratio is None else f"{least.ratio:g} is the least that fits"
    text = (
        f"--offload.activations auto: {verdict} {human(least.memory)}. Peaks as compiled: {peaks}"
    )
    return text + ("" if least.monotone else ". Here and there more offload takes more memory.")


def _offload_failure(least: OffloadSearch) -> str | None:
    if least.ratio is not None:
        return None
    return (
        f"even with all that layers keep on the host a step takes {human(least.peaks[1.0])}, more "
        f"than {human(least.memory)}. The table shows what takes it. Else try --remat full, "
        "--gradient-accumulation-steps N (smaller microbatches), --offload.optimizer, --mesh.fsdp "
        "-1 or --count with more devices, or a smaller --model.seq-len."
    )


# -- devices ------------------------------------------------------------------------------


def _is_for_gpu(settings: Memory) -> bool:
    """Return whether the step is compiled for a GPU."""
    if settings.gpu == "here":
        return jax.default_backend() == "gpu"
    return can_compile_for_gpus()


def _devices(settings: Memory) -> Sequence[Any] | None:
    if settings.gpu == "here":
        return None
    if can_compile_for_gpus():
        return target_devices(settings.gpu, settings.count)
    devices = jax.devices()
    if len(devices) < settings.count:
        raise ValueError(f"--count {settings.count}: there are {len(devices)} devices to stand in.")
    return devices[: settings.count]


def _plan_run(settings: Memory, devices: Sequence[Any] | None) -> PlannedRun:
    is_gpu = devices is not None and devices[0].platform != "cpu"
    known = with_offload(settings, None) if settings.offload.activations == AUTO else settings
    attention = fused_attention if is_gpu else None
    run = PlannedRun(known, devices, settings.vocab, attention=attention)
    device = jax.devices()[0] if settings.gpu == "here" else GPUS[settings.gpu]
    return replace(run, config=replace(known, precision=run.precision_on(device)))


def _device_memory(settings: Memory, device: Any) -> tuple[int | None, str]:
    """Return the memory of a device that a program may use, and the name of that device."""
    if settings.device_memory is not None:
        return parse_bytes(settings.device_memory), "device memory"
    if settings.gpu != "here":
        return int(memory_fraction() * GPUS[settings.gpu].memory), GPUS[settings.gpu].name
    stats = device.memory_stats() if device.platform != "cpu" else None
    return (stats or {}).get("bytes_limit"), device.device_kind


def _notes(settings: Memory, run: PlannedRun) -> Iterator[str]:
    """Yield caveats."""
    if (
        settings.gpu != "here"
        and settings.device_memory is None
        and (fraction := memory_fraction()) < 1
    ):
        yield (
            f"JAX takes {fraction:.0%} of the {human(GPUS[settings.gpu].memory)} of a "
            f"{settings.gpu.upper()}. For more set {FRACTION}, here and where it runs: "
            f"{FRACTION}=0.95"
        )
    if not _is_for_gpu(settings) and settings.gpu != "here":
        yield (
            "temporaries and peak are those of a program compiled for CPUs, which lays memory out "
            f"otherwise than a {settings.gpu.upper()} and counts no offload. To compile for the "
            f"GPU, which need not be here: {how_to_install()}"
        )
    if run.attention and run.model.shape is not None and run.task.unit == "tokens":
        yield (
            "attention is one call in cuDNN's place: it keeps queries, keys, values, the result "
            "and a number for each query. cuDNN's own working memory is not counted. In float32 it "
            "is XLA's, which keeps scores, here as where it runs."
        )
    if auto_axes(run.mesh):
        yield (
            "kept for the backward pass: as the trace says, whole along tensor; the compiled "
            "program splits some of it."
        )
    if in_use(run.mesh, (PIPE_AXIS,)):
        yield (
            "kept by layers: all slots of the rings that microbatches in flight share, on each "
            "stage. First and last stage are alike: in one program."
        )
