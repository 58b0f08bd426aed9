"""The results as a page: tables of kernels and of training, what was not measured and why."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

from benchmarks.gpu_sections.device import sheet
from benchmarks.gpu_sections.rows import floor_ms, ratio
from benchmarks.gpu_sections.training import SETTINGS, agree
from benchmarks.gpu_sections.vision import IMAGES

Row = dict[str, Any]
READ = {setting.name for setting in SETTINGS.values()}  # models of tokens
SEEN = {setting.name for group in IMAGES.values() for setting in group}  # and of images
TRAINED = READ | SEEN
NOTES = """
- *of floor*: the floor's time over the kernel's. The floor is the larger of the bytes that must be
  moved over the data sheet's bandwidth and the operations over its dense bf16 rate. *Of ceiling*:
  the same with what this device was measured to do (a copy, cuBLAS). *Ratio*: the rival's time over
  the kernel's: above 1 the kernel is faster.
- *Error*: relative, in norm, to an oracle in float32; a kernel beyond what is allowed is WRONG and
  has no time. *Memory*: temporaries and results, as compiled; of training, the most in use.
- A time is the median of blocks of queued calls, programs in turn, on random data, sets of operands
  larger than the cache in rotation. *MFU*: 6 (P - positions) + 12 layers embed length operations a
  token, over the data sheet's rate; attention in full, nothing computed again counted. Of images: 6
  for each multiplication that convolutions have in a forward pass. *Compiled*: what XLA planned to
  hold; the peak may have what was tried while it compiled."""


def page(found: Mapping[str, Any]) -> str:
    """Return the whole page in markdown."""
    rows: list[Row] = found["rows"]
    device = next((r for r in rows if r.get("kernel") == "device"), {})
    measured = {r["kernel"]: r.get("rate", 0.0) for r in rows if r.get("section") == "ceilings"}
    rates = _Rates(sheet(device.get("kind", "")), measured)
    parts = [
        "# On one GPU\n",
        "```",
        *[line for command in found["command"].split("; ") for line in _wrapped(command)],
        "```",
        "",
        *wrap(f"{found['date']}, {_device(device)}.", 100),
        *wrap(", ".join(f"{k} {v}" for k, v in found["versions"].items() if v) + ".", 100),
        "",
        *_ceilings(rates),
        *_kernels([r for r in rows if _is_kernel(r)], rates),
        *_training([r for r in rows if r.get("kernel") in READ], rates),
        *_images([r for r in rows if r.get("kernel") in SEEN], rates),
        *_tests([r for r in rows if r.get("kernel") == "tests"]),
        *_sections(found["sections"]),
        NOTES,
    ]
    return "\n".join([*parts, ""])


class _Rates:
    """Operations and bytes a second: promised, and measured."""

    def __init__(self, promised: tuple[float, float], measured: Mapping[str, float]):
        self.promised = promised
        self.measured = measured.get("product", 0.0), measured.get("copy", 0.0)
        self.launches = measured.get("launch", 0.0)


def _is_kernel(row: Row) -> bool:
    known = {"device", "copy", "product", "launch", "tests"} | TRAINED
    return row.get("kernel") not in known


def table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """Return a table in markdown, and an empty line."""
    cells = [columns, ["---"] * len(columns), *lines]
    return [*(f"| {' | '.join(line)} |" for line in cells), ""]


def _wrapped(command: str) -> list[str]:
    """Return a command in lines that a shell joins.

    >>> print(*_wrapped("gpu --only" + " variants" * 10), sep="\\n")
    gpu --only variants variants variants variants variants variants variants variants variants \\
        variants
    """
    *lines, last = wrap(command, 96, subsequent_indent="    ", break_on_hyphens=False)
    return [*(f"{line} \\" for line in lines), last]


def _device(row: Row) -> str:
    kind = row.get("kind", "no device was seen")
    return f"{kind} ({row['driver']})" if row.get("driver") else kind


def _ceilings(rates: _Rates) -> list[str]:
    (flops, moved), (product, copy) = rates.promised, rates.measured
    lines = [
        ["copy", f"{copy / 1e12:.2f} TB/s", f"{moved / 1e12:.2f} TB/s", _part(copy, moved)],
        [
            "product of 8192 x 8192, bf16",
            f"{product / 1e12:.0f} TFLOP/s",
            f"{flops / 1e12:.0f} TFLOP/s",
            _part(product, flops),
        ],
        ["launch", f"{rates.launches:,.0f} small programs a second", "", ""],
    ]
    return ["## Ceilings\n", *table(["", "measured", "data sheet", "part"], lines)]


def _part(found: float, most: float) -> str:
    return f"{found / most:.0%}" if found and most else ""


def _kernels(rows: Sequence[Row], rates: _Rates) -> list[str]:
    columns = ["kernel", "case", "ms", "of floor", "of ceiling", "rival", "ms ", "ratio"]
    columns += ["memory", "rival's", "error", "tuning", "goal"]
    return ["## Kernels\n", *table(columns, [_kernel(row, rates) for row in rows])]


def _kernel(row: Row, rates: _Rates) -> list[str]:
    if row["status"] != "ok":
        told = f"**{row['status']}**" + (f" (error {row['error']:.1e})" if row.get("error") else "")
        rival = [row.get("rival", ""), _ms(row.get("rival_ms"))]
        return [row["kernel"], row["case"], told, "", "", *rival, *[""] * 6]
    cells = [row["kernel"], row["case"], _ms(row["ms"])]
    cells += [_floor(row, rates.promised), _floor(row, rates.measured)]
    times = ratio(row)
    cells += [row.get("rival") or "", _ms(row.get("rival_ms")), f"{times:.2f}" if times else ""]
    cells += [_size(row.get("memory")), _size(row.get("rival_memory"))]
    cells += [f"{row['error']:.0e}" if row.get("error") is not None else ""]
    return [*cells, _tuning(row), "; ".join(goals(row, rates.measured))]


def _tuning(row: Row) -> str:
    """Return the tuning that was best, and what the default takes if that is another one."""
    best, usual = row.get("tuning") or "", row.get("default_ms")
    return best if usual in (None, row["ms"]) else f"{best} (default {_ms(usual)})"


def goals(row: Row, measured: tuple[float, float]) -> list[str]:
    """Return a word on each goal of a row: reached or missed."""
    floor, memory, rival = floor_ms(row, *measured), row.get("memory"), row.get("rival_memory")
    found: dict[str, tuple[float | None, Callable[[float, float], bool]]] = {
        "ratio": (ratio(row), float.__ge__),
        "of_ceiling": (floor / row["ms"] if floor else None, float.__ge__),
        "memory": (memory / rival if memory and rival else None, float.__le__),
    }
    said = []
    for goal in row.get("goals", ()):
        value, reached = found[goal["what"]]
        word = "unknown" if value is None else _word(reached(float(value), float(goal["bound"])))
        said.append(f"{goal['what'].replace('_', ' ')} {goal['bound']:g}: {word}")
    return said


def _word(reached: bool) -> str:
    return "reached" if reached else "**missed**"


def _floor(row: Row, rates: tuple[float, float]) -> str:
    floor = floor_ms(row, *rates)
    return f"{floor / row['ms']:.0%}" if floor else ""


def _ms(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.3f}" if ms < 10 else f"{ms:.1f}"


def _size(count: float | None) -> str:
    if not count:
        return ""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _training(rows: Sequence[Row], rates: _Rates) -> list[str]:
    columns = ["model", "program", "step", "tokens/s", "of torch", "MFU", "peak", "ready"]
    lines = [cells for _, cells in _compared(rows, "tokens_s", rates)]
    return ["## Training\n", *table(columns, lines), *_apart(rows)]


def _images(rows: Sequence[Row], rates: _Rates) -> list[str]:
    if not rows:
        return []
    columns = ["model", "program", "step", "images/s", "of torch", "MFU", "peak", "ready"]
    columns += ["TFLOP/s", "compiled"]
    lines = []
    for row, cells in _compared(rows, "images_s", rates):
        done = f"{row['flops'] / row['ms'] / 1e9:.0f}" if row["status"] == "ok" else ""
        lines.append([*cells, done, _size(row.get("compiled"))])
    return ["## Training on images\n", *table(columns, lines), *_apart(rows)]


def _compared(rows: Sequence[Row], rate: str, rates: _Rates) -> Iterator[tuple[Row, list[str]]]:
    """Yield each row with its cells, model by model."""
    for name in dict.fromkeys(row["kernel"] for row in rows):
        own = [row for row in rows if row["kernel"] == name]
        torch = next((r.get(rate) for r in own if r["case"].startswith("torch")), None)
        yield from ((row, _trained(row, rate, torch, rates.promised[0])) for row in own)


def _apart(rows: Sequence[Row]) -> list[str]:
    """Return which programs did not train alike."""
    names = sorted({row["kernel"] for row in rows})
    apart = [agree(row for row in rows if row["kernel"] == name) for name in names]
    told = [f"- **not the same training**: {what}" for what in apart if what]
    return [*told, ""] if told else []


def _trained(row: Row, rate: str, torch: float | None, flops: float) -> list[str]:
    if row["status"] != "ok":
        return [row["kernel"], row["case"], f"**{row['status']}**", *[""] * 5]
    used = 1e3 * row["flops"] / row["ms"] / flops if flops else None
    moved = (row.get("kept") or {}).get("moved")
    name = f"{row['case']} ({_size(moved)} on the host)" if moved else row["case"]
    cells = [row["kernel"], name, f"{row['ms']:.1f} ms", f"{row[rate]:,.0f}"]
    cells += [f"{row[rate] / torch:.2f}" if torch else "", f"{used:.1%}" if used else ""]
    return [*cells, _size(row.get("memory")), f"{row.get('ready_s', 0):.0f} s"]


def _tests(rows: Sequence[Row]) -> list[str]:
    count = lambda row, name: str(row.get(name, ""))
    lines = [[r["case"], count(r, "passed"), count(r, "skipped"), r["status"]] for r in rows]
    failed = [f"- {name}: {text}" for r in rows for name, text in (r.get("failed") or {}).items()]
    why = [line for text in failed for line in wrap(text, 100, subsequent_indent="  ")]
    return ["## Tests\n", *table(["file", "passed", "skipped", ""], lines), *why, ""]


def _sections(sections: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        [s["name"], f"{s['seconds']:.0f} s", f"{s['limit']:.0f} s", s["ended"]] for s in sections
    ]
    return ["## Sections\n", *table(["section", "took", "limit", "ended"], lines)]
