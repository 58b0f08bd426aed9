"""`hfjax memory`: what a training step would take of each device, before anything runs."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import jax
from rich.console import Console

from hfjax.analysis.search_offload import Least, least_offload
from hfjax.analysis.targets import (
    FRACTION,
    GPUS,
    can_compile_for_gpus,
    fraction_taken,
    how_to_install,
    target_devices,
)
from hfjax.cli.arguments import parsed
from hfjax.cli.memory import plot
from hfjax.cli.memory.settings import AUTO, Memory, alternatives, of_run
from hfjax.cli.memory.table import Report, table
from hfjax.cli.run import config_of
from hfjax.parallel.mesh import PIPE_AXIS, describe_mesh, in_use, partitioned
from hfjax.planner.programs.estimate import compiled, estimate
from hfjax.planner.programs.placeholder_attention import fused_attention
from hfjax.planner.programs.planned_run import Planned, compile_for_gpu
from hfjax.trainer.build import check_used
from hfjax.trainer.deepspeed_flags import with_file
from hfjax.utils.command_errors import FAILED, carried_out, ending_in_words
from hfjax.utils.progress import said_while
from hfjax.utils.tables import bytes_of, human

WIDTH, COLUMN = 26, 11  # of the table: what is told, and the least for a number


def main(argv: Sequence[str]) -> int:
    """Run `hfjax memory` with these arguments; return the exit status."""
    with ending_in_words("memory"):
        default, rest = config_of(argv)
        given: Memory = parsed(Memory, rest, "memory", of_run(default), config=True)
        if given.deepspeed is not None:
            here = given.cpu_devices or (jax.device_count() if given.gpu == "here" else given.count)
            given, _ = with_file(given, rest, here)
        check_used([config for _, config in alternatives(given)], rest)
    console = Console(highlight=False)
    return carried_out("memory", lambda: _tell(given, console))


def _tell(given: Memory, console: Console) -> int | None:
    _prepare(given)
    if given.gpu != "here" and given.offload != AUTO and not can_compile_for_gpus():
        print(
            f"no package here compiles for CUDA: this is compiled for the CPU, and what it says of "
            f"temporaries and peak is not of a {given.gpu.upper()}. Install what compiles for it "
            f"(no GPU is needed): {how_to_install()}",
            file=sys.stderr,
            flush=True,
        )
    found = report(given, lambda row: print(row, file=sys.stderr, flush=True))
    headings = [estimate.heading.splitlines() for estimate in found.estimates]
    columns = sum(3 + max(COLUMN, *map(len, lines)) for lines in headings)
    console.width = max(console.width, WIDTH + columns)
    console.print(table(found))
    for note in found.notes:
        console.print(f"* {note}", style="dim")
    if given.json is not None:
        given.json.write_text(json.dumps(asdict(found), indent=1), encoding="utf-8")
    if given.out is not None:
        plot.draw(found, given.out)
        console.print(f"{given.out} is drawn.")
    if found.missed is None:
        return None
    print(f"hfjax memory: {found.missed}", file=sys.stderr)
    return FAILED


def _prepare(given: Memory) -> None:
    """Set JAX up before its first use."""
    if given.gpu == "here" and given.cpu_devices is None:
        return
    jax.config.update("jax_platforms", "cpu")
    here = given.cpu_devices if given.gpu == "here" else given.count
    jax.config.update("jax_num_cpu_devices", here)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # of drivers that are not needed


def report(given: Memory, tell: Callable[[str], Any] = lambda row: None) -> Report:
    """Return what the settings take, and their alternatives; `tell` gets each peak as it comes."""
    devices = _devices(given)
    parts, notes, missed = _planned(given, devices), [], None
    device = parts.mesh.devices.flat[0]
    memory, of = _memory(given, device)
    list(alternatives(given))  # what is wrong with them is said before anything is compiled
    if given.offload == AUTO:
        least = _least(given, devices, memory, tell)
        ratio = 1 if least.ratio is None else least.ratio
        given = replace(given, offload=f"{ratio:g}" if ratio else None)
        notes, missed = [_said(least)], _missed(least)
    found, refused = [], {}
    for name, config in alternatives(given):
        try:
            with said_while(f"compiling {name}"):
                found.append(estimate(name, _planned(config, devices)))
            tell(f"{name}: peak {human(found[-1].peak)}")
        except ValueError as wrong:
            if not found:
                raise
            refused[name] = str(wrong)
            tell(f"{name}: cannot be, as told below the table")
    kind = "CPU" if device.platform == "cpu" else device.device_kind
    rows = f"{given.batch} {parts.task.rows()}, precision {given.precision}"
    where = f"{parts.layout.strategy.name} on {describe_mesh(parts.mesh)}"
    title = f"{parts.model.name}, {where} ({parts.mesh.size} x {kind}), {rows}"
    if any(e.sent_whole for e in found):
        notes.append("sent in a step: some of it is counted whole along tensor, more than is sent.")
    notes = (*notes, *_notes(given, parts))
    return Report(title, tuple(found), refused, memory, of, notes, missed)


# -- the least offload --------------------------------------------------------------------


def _least(given: Memory, devices: Any, memory: int | None, tell: Callable[[str], Any]) -> Least:
    """Return the least offload that fits the memory of a device, by programs compiled for it."""
    if not _for_gpu(given):
        raise ValueError(
            "--offload auto compares programs compiled for the GPU: the compiler for CPUs counts "
            f"no offload. Install what compiles: {how_to_install()}"
        )
    if memory is None:
        raise ValueError("--offload auto: which memory is to be kept to? --device-memory 24GiB")

    def peak(ratio: float) -> int:
        name = f"offload={ratio:g}"
        with said_while(f"compiling {name}"):
            offload = f"{ratio:g}" if ratio else None  # without any, layers run in no loop
            parts = _planned(replace(given, offload=offload), devices)
            found = compiled(compile_for_gpu(parts.trace().lower()))["peak"]
        tell(f"{name}: peak {human(found)}")
        return found

    return least_offload(peak, memory)


def _said(least: Least) -> str:
    peaks = ", ".join(f"{ratio:g}: {human(least.peaks[ratio])}" for ratio in sorted(least.peaks))
    found = "no ratio fits" if least.ratio is None else f"{least.ratio:g} is the least that fits"
    text = f"offload auto: {found} {human(least.memory)}. Peaks as compiled: {peaks}"
    return text + ("" if least.monotone else ". Here and there more offload takes more memory.")


def _missed(least: Least) -> str | None:
    if least.ratio is not None:
        return None
    return (
        f"even with all that layers keep on the host a step takes {human(least.peaks[1.0])}, more "
        f"than {human(least.memory)}. The table shows what takes it. Else try --remat full, "
        "--accumulate N (fewer rows at a time), the optimizer on the host, --strategy fsdp or "
        "--count with more devices, or a smaller --model.length."
    )


# -- devices ------------------------------------------------------------------------------


def _for_gpu(given: Memory) -> bool:
    """Return whether the step is compiled for a GPU."""
    if given.gpu == "here":
        return jax.default_backend() == "gpu"
    return can_compile_for_gpus()


def _devices(given: Memory) -> Sequence[Any] | None:
    if given.gpu == "here":
        return None
    if can_compile_for_gpus():
        return target_devices(given.gpu, given.count)
    devices = jax.devices()
    if len(devices) < given.count:
        raise ValueError(f"--count {given.count}: there are {len(devices)} devices to stand in.")
    return devices[: given.count]


def _planned(given: Memory, devices: Sequence[Any] | None) -> Planned:
    elsewhere = devices is not None and devices[0].platform != "cpu"
    known = replace(given, offload=None) if given.offload == AUTO else given
    attention = fused_attention if elsewhere else None
    return Planned(known, devices, given.vocab, attention=attention)


def _memory(given: Memory, device: Any) -> tuple[int | None, str]:
    """Return the memory that a program has of a device, and of what it is."""
    if given.device_memory is not None:
        return bytes_of(given.device_memory), "device memory"
    if given.gpu != "here":
        return int(fraction_taken() * GPUS[given.gpu].memory), GPUS[given.gpu].name
    stats = device.memory_stats() if device.platform != "cpu" else None
    return (stats or {}).get("bytes_limit"), device.device_kind


def _notes(given: Memory, parts: Planned) -> Iterator[str]:
    """Yield what to bear in mind."""
    if given.gpu != "here" and given.device_memory is None and (part := fraction_taken()) < 1:
        yield (
            f"JAX takes {part:.0%} of the {human(GPUS[given.gpu].memory)} of a "
            f"{given.gpu.upper()}. For more set {FRACTION}, here and where it runs: {FRACTION}=0.95"
        )
    if not _for_gpu(given) and given.gpu != "here":
        yield (
            "temporaries and peak are those of a program compiled for CPUs, which lays memory out "
            f"otherwise than a {given.gpu.upper()} and counts no offload. To compile for the GPU, "
            f"which need not be here: {how_to_install()}"
        )
    if parts.attention and parts.model.shape is not None and parts.task.unit == "tokens":
        yield (
            "attention is one call in cuDNN's place: it keeps queries, keys, values, the result "
            "and a number for each query. cuDNN's own working memory is not counted. In float32 it "
            "is XLA's, which keeps scores, here as where it runs."
        )
    if partitioned(parts.mesh):
        yield (
            "kept for the backward pass: as the trace says, whole along tensor; the compiled "
            "program splits some of it."
        )
    if in_use(parts.mesh, (PIPE_AXIS,)):
        yield (
            "kept by layers: all slots of the rings that microbatches in flight share, on each "
            "stage. First and last stage are alike: in one program."
        )
