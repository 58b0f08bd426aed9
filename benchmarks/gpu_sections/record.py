"""Which kernels beat their rivals, on this kind of device: what kernels="auto" reads."""

import json
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.gpu_sections.rows import ratio

MEASURED = Path(__file__).parents[2] / "pallas_kernels" / "measured.json"
FAMILIES = ("NVIDIA H100", "NVIDIA H200")
CHOSEN = ("flash_block", "cross_entropy")  # not what rings of one GPU can tell


def family(kind: str) -> str:
    """Return the name under which a device is recorded.

    >>> family("NVIDIA H100 80GB HBM3")
    'NVIDIA H100'
    """
    return next((name for name in FAMILIES if kind.startswith(name)), kind)


def recorded(rows: Iterable[Mapping[str, Any]], jax_version: str) -> dict[str, list[dict]]:
    """Return what is known of each kernel: of each shape its worst ratio, how much faster it is.

    Counted with the tuning that users get; `best` has the ratio of the best tuning. At a shape
    where it fails the ratio is 0. A kernel that was wrong in any case is not there.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    rows = list(rows)
    wrong = {row.get("kernel") for row in rows if _is_wrong(row)}
    for row in rows:
        name, times = row.get("kernel"), _times(row)
        if name not in CHOSEN or name in wrong or times is None:
            continue
        shape = row.get("shape", {})
        fresh = {"shape": shape, "ratio": times, "rival": row.get("rival"), "cases": {}}
        entry = found.setdefault(name, {}).setdefault(json.dumps(shape), fresh)
        entry["cases"][row["case"]] = round(times, 3)
        if times <= entry["ratio"]:
            best = {"tuning": row.get("tuning"), "ratio": round(ratio(dict(row)) or 0, 3)}
            entry |= {"ratio": round(times, 3), "best": best}
    when = {"jax": jax_version, "date": date.today().isoformat()}
    return {name: [one | when for one in shapes.values()] for name, shapes in found.items()}


def _is_wrong(row: Mapping[str, Any]) -> bool:
    """Return whether a kernel, or the tuning of it that users get, gave a wrong result."""
    usual = next(iter(row.get("candidates", {}).values()), "")
    return row.get("status") == "WRONG" or str(usual).startswith("wrong")


def _times(row: Mapping[str, Any]) -> float | None:
    """Return the rival's time over the kernel's, 0 where this fails; None: nobody knows."""
    status = str(row.get("status"))
    if status.startswith("failed") or (status == "ok" and not row.get("default_ms")):
        return 0.0
    return ratio({**row, "ms": row.get("default_ms")})


def write(kind: str, rows: Iterable[Mapping[str, Any]], version: str, also: Path) -> None:
    """Put what was measured into the table beside the kernels, and into a folder."""
    rows = list(rows)
    table = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    tried = {row.get("kernel") for row in rows}
    old = {name: x for name, x in table.get(family(kind), {}).items() if name not in tried}
    table[family(kind)] = dict(sorted((old | recorded(rows, version)).items()))
    text = json.dumps(dict(sorted(table.items())), indent=1) + "\n"
    MEASURED.write_text(text)
    (also / MEASURED.name).write_text(text)
