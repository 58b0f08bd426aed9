"""Everything that only a GPU can tell, in one command that fits in ten minutes: `make gpu`.

What the device can do, the tests marked gpu, each kernel beside its rivals and its floor, GPT-2
and models of images trained by hfjax and by torch.compile, the offload curve. Each section is a
process of its own with a limit: one that fails, hangs or breaks the device costs nobody else's
results. gpu.json and gpu.md are written after every row.

    python -m benchmarks.gpu [--out DIR] [--seconds N] [--only SECTION …] [--more] [--record]
    python -m benchmarks.gpu --smoke      tiny, on a CPU: all sections run, nothing is measured
"""

import argparse
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu_sections.device import is_there, versions
from benchmarks.gpu_sections.rows import Reporter, row_in

RESULTS = Path(__file__).parent / "results"
SECONDS = 560.0  # for everything: less than ten minutes by what writing and leaving take
LEAST_S = 10.0  # a section is not begun with less
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
SHOWN = ("kernel", "case", "status", "ms", "rival_ms")
MEMORY = {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".9"}  # of the device, for a section's process
TAIL = 600  # characters of what a section that failed said last


@dataclass(frozen=True)
class Section:
    """What runs, for how long at most, and about how long it is thought to take (in seconds)."""

    run: str  # module of gpu_sections, or module:argument
    limit: float
    thought: float

    def function(self) -> Callable[[Reporter], None]:
        """Return what measures."""
        module, _, argument = self.run.partition(":")
        found = import_module(f"benchmarks.gpu_sections.{module}")
        return found.section(argument) if argument else found.run


SECTIONS: Mapping[str, Section] = {
    "ceilings": Section("ceilings", 40, 15),
    "tests": Section("gpu_tests", 210, 160),
    "flash_block": Section("attention", 160, 120),
    "cross_entropy": Section("loss", 80, 40),
    "products": Section("products", 70, 40),
    "experts": Section("experts", 150, 100),
    "124M-16": Section("training:small 16", 120, 60),
    "medium-16": Section("training:medium 16", 130, 65),
    "124M-32": Section("training:small 32", 130, 65),
    "medium-32": Section("training:medium 32", 140, 75),
    "offload": Section("training:offload", 130, 65),
    "forms": Section("training:forms", 150, 90),
    "vision": Section("vision:main", 240, 170),
    "regnet": Section("vision:more", 150, 90),
    "variants": Section("training:variants", 180, 100),  # with --more: the others fill the time
}


@dataclass
class Found:
    """What was measured so far, and where it is written."""

    out: Path
    head: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    sections: list[dict[str, Any]] = field(default_factory=list)

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row, show it, and write everything."""
        self.rows.append(row)
        shown = {k: row[k] for k in ("kernel", "case", "status", "ms", "rival_ms") if row.get(k)}
        print(
            "  ", *(f"{v:.3f}" if isinstance(v, float) else v for v in shown.values()), flush=True
        )
        self.write()

    def write(self) -> None:
        """Write gpu.json and gpu.md, each in one piece."""
        from benchmarks.gpu_sections.report import page

        found = {**self.head, "sections": self.sections, "rows": self.rows}
        for name, text in (("gpu.json", json.dumps(found, indent=1)), ("gpu.md", page(found))):
            beside = self.out / f".{name}"
            beside.write_text(text.rstrip() + "\n")
            beside.replace(self.out / name)


def run_section(command: Sequence[str], limit: float, keep: Callable[[dict], None]) -> str:
    """Run a section, give its rows to `keep`, end it at its limit; return how it ended."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, process_group=0)
        assert process.stdout is not None
        try:
            in_time = _read(process.stdout, time.monotonic() + limit, keep)
            status = process.wait(5) if in_time else None
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
        if status == 0:
            return "ok"
        errors.seek(0)
        said = " ".join(errors.read().decode(errors="replace")[-TAIL:].split())
        how = f"ended with {status}" if status is not None else f"cut off after {limit:.0f} s"
        return f"{how}: {said}".replace("|", "/")


def _read(stream: IO[bytes], end: float, keep: Callable[[dict], None]) -> bool:
    """Read rows until the stream ends; return whether it ended in time."""
    waiting, rest = selectors.DefaultSelector(), b""
    waiting.register(stream, selectors.EVENT_READ)
    while (left := end - time.monotonic()) > 0:
        if not waiting.select(left):
            continue
        piece = os.read(stream.fileno(), 1 << 16)
        if not piece:
            return True
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if (row := row_in(line.decode(errors="replace"))) is not None:
                keep(row)
    return False


def _end(process: subprocess.Popen) -> None:
    """End a section and all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def run_all(given: argparse.Namespace, found: Found) -> None:
    """Run the sections asked for, as long as there is time."""
    end = time.monotonic() + given.seconds
    done = {s["name"] for s in found.sections if s["ended"] == "ok"}
    for name in (name for name in given.only or SECTIONS if name not in done):
        left, section = end - time.monotonic(), SECTIONS[name]
        limit = min(section.limit, left)
        told = {"name": name, "limit": section.limit, "seconds": 0.0}
        if left < LEAST_S:
            found.sections.append(told | {"ended": "no time left: not run"})
            continue
        print(f"{name} (about {section.thought:.0f} s, {left:.0f} s left)", flush=True)
        command = [sys.executable, "-u", "-m", "benchmarks.gpu", "--section", name]
        command += ["--seconds", str(limit - 2)] + ["--smoke"] * given.smoke
        start = time.monotonic()
        ended = run_section(command, limit, found.add)
        found.sections.append(told | {"seconds": time.monotonic() - start, "ended": ended})
        print(f"  {ended[:200]} after {time.monotonic() - start:.0f} s", flush=True)
        found.write()


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the results")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything")
    parser.add_argument("--only", nargs="+", choices=[*SECTIONS], metavar="SECTION")
    parser.add_argument("--more", action="store_true", help="go on where an earlier run ended")
    parser.add_argument("--record", action="store_true", help="write pallas_kernels/measured.json")
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU")
    parser.add_argument("--section", choices=[*SECTIONS], help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> int:
    """Run one section, or all of them; 1 if nothing was measured, 2 if nothing can be."""
    given = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends with it
    if given.smoke:
        os.environ |= {"JAX_PLATFORMS": "cpu", "BENCHMARK_ON_CPU": "1", "XLA_FLAGS": QUICK}
    if given.section:
        SECTIONS[given.section].function()(Reporter(given.section, given.seconds, given.smoke))
        return 0
    if not given.smoke and not is_there():
        print("no GPU is here: nothing would be measured. --smoke is the dry run.", file=sys.stderr)
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    found = started(given)
    print(found.head["command"], found.head["versions"], sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as tuned:
        os.environ |= {"BENCHMARK_TUNED": tuned, **MEMORY}
        try:
            run_all(given, found)
        except KeyboardInterrupt:
            found.write()
            print(f"stopped: what was measured is in {given.out}; --more goes on", file=sys.stderr)
            return 130
    found.write()
    print((given.out / "gpu.md").read_text())
    if given.record:
        _record(given, found)
    return 0 if found.rows else 1


def started(given: argparse.Namespace) -> Found:
    """Return what is there before any section runs: nothing, or what an earlier run found."""
    command = " ".join(["python -m benchmarks.gpu", *sys.argv[1:]])
    head = {"command": command, "date": date.today().isoformat(), "versions": versions()}
    found = Found(given.out, head | {"seconds": given.seconds, "smoke": given.smoke})
    path = given.out / "gpu.json"
    if given.more and path.exists():
        before = json.loads(path.read_text())
        found.sections = [s for s in before["sections"] if s["ended"] == "ok"]
        whole = {s["name"] for s in found.sections}
        found.rows = [row for row in before["rows"] if row["section"] in whole]
        found.head["command"] = f"{before['command']}; {command}"
    return found


def _record(given: argparse.Namespace, found: Found) -> None:
    """Write down who won, unless there is no GPU."""
    from benchmarks.gpu_sections.record import write

    device = next((row for row in found.rows if row.get("kernel") == "device"), {})
    if device.get("platform") != "gpu":
        print("--record: nothing is recorded, since no GPU was seen")
        return
    write(device["kind"], found.rows, str(found.head["versions"]["jax"]), given.out)


if __name__ == "__main__":
    sys.exit(main())
