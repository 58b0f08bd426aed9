"""Which kernels beat their rivals, on this kind of device: what kernels="auto" reads."""

import json
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.gpu_sections.rows import ratio

MEASURED = Path(__file__).parents[2] / "pallas_kernels" / "measured.json"
FAMILIES = ("NVIDIA H100", "NVIDIA H200")
CHOSEN = ("flash_block", "cross_entropy", "adamw_shard")  # not what rings of one GPU can tell


def family(kind: str) -> str:
    """Return the name under which a device is recorded.

    >>> family("NVIDIA H100 80GB HBM3")
    'NVIDIA H100'
    """
    return next((name for name in FAMILIES if kind.startswith(name)), kind)


def recorded(rows: Iterable[Mapping[str, Any]], jax_version: str) -> dict[str, dict[str, Any]]:
    """Return what is known of each kernel: its worst ratio, by how much it beats its rival.

    Counted with the tuning that users get; `best` has the ratio of the best tuning. A kernel that
    was wrong in any case, or failed in one, is not there.
    """
    found: dict[str, dict[str, Any]] = {}
    spoilt = set()
    for row in rows:
        name = row.get("kernel")
        if name not in CHOSEN or row["status"] in ("not there", "no time left"):
            continue
        times = ratio({**row, "ms": row.get("default_ms")})
        if times is None:
            spoilt.add(name)
            continue
        entry = found.setdefault(name, {"ratio": times, "rival": row["rival"], "cases": {}})
        entry["cases"][row["case"]] = round(times, 3)
        if times <= entry["ratio"]:
            best = {"tuning": row.get("tuning"), "ratio": round(ratio(dict(row)) or 0, 3)}
            entry |= {"ratio": round(times, 3), "rival": row["rival"], "best": best}
    when = {"jax": jax_version, "date": date.today().isoformat()}
    return {name: entry | when for name, entry in found.items() if name not in spoilt}


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
