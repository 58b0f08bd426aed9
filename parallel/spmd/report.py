"""What a step says of rows that meet in it: a table to print, warnings, refusals."""

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hfjax.parallel.spmd.partition_context import Join
from hfjax.utils.tables import aligned, human

LARGE, SHARE = 2**20, 0.01  # what is gathered for want of a rule is told from so many bytes on

_HOW = {
    "sum": "summed over devices, {}",
    "greatest": "greatest of all devices, {}",
    "least": "least of all devices, {}",
    "average": "averaged over devices, of their own rows, {}",
    "gather": "gathered, {}",
    "cut": "each device takes part, {}",
    "draw": "drawn for the batch, {}",
    "rule": "a derivative that is not linear: it sees the weight of all rows",
    "alone": "a collective that sees one device with all rows",
}


@dataclass(frozen=True)
class Joins:
    """What joins rows in the model and the loss of a step; print it."""

    joins: tuple[Join, ...]
    of: str = "rows"

    def __str__(self) -> str:
        if not self.joins:
            return f"no {self.of} meet"
        times: Counter = Counter()
        for j in self.joins:
            times[j.line, j.operation, j.how, j.bytes, j.known] += j.times
        rows = [
            (
                line or "(no line)",
                operation,
                _HOW[how].format(human(size))
                + ("" if known or how != "gather" else ", since no rule knows it"),
                f"{count} times" if count > 1 else "once",
            )
            for (line, operation, how, size, known), count in times.items()
        ]
        return "\n".join(aligned(rows))


def check_gathers(joins: Sequence[Join], strict: bool, sent: int) -> None:
    """Warn of arrays that are gathered since no rule knows an operation, or refuse all.

    They are those of 1 MiB, or of 1 % of the bytes that a step sends for its gradients.
    """
    unknown = [j for j in joins if j.how == "gather" and not j.known]
    least = min(LARGE, SHARE * sent)
    told = [j for j in unknown if strict or j.bytes * j.times >= least]
    for line, operation in dict.fromkeys((j.line, j.operation) for j in told):
        found = [j for j in told if (j.line, j.operation) == (line, operation)]
        size = human(sum(j.bytes * j.times for j in found))
        text = (
            f"{line}: {operation}: rows meet, and no rule runs this on parts of them, so each "
            f"device gathers {size} in a microbatch and runs it whole. "
        )
        if strict:
            raise ValueError(
                f'{text}rows="strict" refuses that: keep rows apart, run it on each device\'s own '
                'rows (hfjax.own_rows), or take rows="all".'
            )
        warnings.warn(
            f"{text}The result is that of one device. To spare it keep rows apart, or run it on "
            "each device's own rows (hfjax.own_rows).",
            UserWarning,
            stacklevel=2,
        )
