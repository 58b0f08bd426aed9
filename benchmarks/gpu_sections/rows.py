"""What was measured: rows that a section prints as it goes, and the verdict on a kernel's."""

import json
import time
from dataclasses import dataclass
from typing import Any, TextIO

MARK = "ROW "


@dataclass
class Reporter:
    """Prints rows, one a line, and knows how long the section may still go on."""

    section: str
    seconds: float
    smoke: bool = False
    to: TextIO | None = None  # standard output

    def __post_init__(self):
        self.end = time.monotonic() + self.seconds

    @property
    def left(self) -> float:
        """Seconds that are left to this section."""
        return self.end - time.monotonic()

    def row(self, **fields: Any) -> None:
        """Print a row of this section."""
        print(MARK + json.dumps({"section": self.section, **fields}), file=self.to, flush=True)


def row_in(line: str) -> dict[str, Any] | None:
    """Return the row that a line has, if it has one.

    >>> row_in('ROW {"section": "copy"}')
    {'section': 'copy'}
    """
    if not line.startswith(MARK):
        return None
    try:
        return json.loads(line[len(MARK) :])
    except json.JSONDecodeError:
        return None  # cut off where the section was ended


def ratio(row: dict[str, Any]) -> float | None:
    """Return the rival's time over the kernel's; of a kernel that is wrong there is none.

    >>> ratio({"status": "ok", "ms": 2.0, "rival_ms": 3.0})
    1.5
    """
    if row.get("status") != "ok" or not row.get("ms") or not row.get("rival_ms"):
        return None
    return row["rival_ms"] / row["ms"]


def floor_ms(row: dict[str, Any], flops: float, bandwidth: float) -> float | None:
    """Return the least milliseconds of a row's work, at rates per second.

    >>> floor_ms({"flops": 0, "bytes": 2e9}, 1e12, 1e12)
    2.0
    """
    if not flops or not bandwidth or row.get("flops") is None:
        return None
    return 1e3 * max(row["flops"] / flops, row["bytes"] / bandwidth)
