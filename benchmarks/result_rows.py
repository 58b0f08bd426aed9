"""Rows of a page of results: each run of a benchmark replaces its own, and keeps the others."""

import datetime
import re
from collections.abc import Sequence
from pathlib import Path


def put(page: Path, head: str, columns: Sequence[str], row: Sequence[str], key: int = 2) -> None:
    """Put a row into a page, in place of that whose first `key` cells are the same.

    `head` is written above the table, with today's date for its `{date}`; what stands below the
    table, from the first heading on, stays.
    """
    old = page.read_text() if page.exists() else ""
    kept = (tuple(re.split(r" \| ", line[2:-2])) for line in old.splitlines() if line[:2] == "| ")
    table = {r[:key]: r for r in kept if r[0] not in (columns[0], "---")}
    table[tuple(row[:key])] = tuple(row)
    lines = [columns, ("---",) * len(columns), *(table[k] for k in sorted(table))]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    notes = old[old.index("\n## ") :] if "\n## " in old else ""
    page.write_text(f"{head.format(date=datetime.date.today())}\n{text}\n{notes}")
