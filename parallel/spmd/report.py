"""What a step reports of its operations across shards: a table to print, warnings, errors."""

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hfjax.parallel.spmd.partition_context import CommEvent
from hfjax.utils.tables import align, human

LARGE_BYTES, LARGE_FRACTION = (
    2**20,
    0.01,
)  # gathers for want of a rule are reported from so many bytes on

_ACTIONS = {
    "sum": "summed over devices, {}",
    "greatest": "greatest of all devices, {}",
    "least": "least of all devices, {}",
    "average": "averaged over devices, of their own examples, {}",
    "gather": "gathered, {}",
    "cut": "each device takes part, {}",
    "draw": "drawn for the batch, {}",
    "rule": "a derivative that is not linear: it sees the weight of all examples",
    "alone": "a collective that sees one device with all examples",
}


@dataclass(frozen=True)
class CommReport:
    """The operations across shards in the model and the loss of a step; print it."""

    comms: tuple[CommEvent, ...]
    subject: str = "examples"

    def __str__(self) -> str:
        if not self.comms:
            return f"no {self.subject} meet"
        times: Counter = Counter()
        for j in self.comms:
            times[j.line, j.operation, j.action, j.bytes, j.has_rule] += j.times
        entries = [
            (
                line or "(no line)",
                operation,
                _ACTIONS[action].format(human(size))
                + ("" if has_rule or action != "gather" else ", since no rule knows it"),
                f"{count} times" if count > 1 else "once",
            )
            for (line, operation, action, size, has_rule), count in times.items()
        ]
        return "\n".join(align(entries))


def check_gathers(comms: Sequence[CommEvent], strict: bool, gradient_bytes: int) -> None:
    """Warn of large gathers for want of a rule, or refuse all such gathers.

    Large is at least 1 MiB, or 1 % of the bytes that a step sends for its gradients.
    """
    gathers = [j for j in comms if j.action == "gather" and not j.has_rule]
    threshold = min(LARGE_BYTES, LARGE_FRACTION * gradient_bytes)
    large_gathers = [j for j in gathers if strict or j.bytes * j.times >= threshold]
    for line, operation in dict.fromkeys((j.line, j.operation) for j in large_gathers):
        line_gathers = [j for j in large_gathers if (j.line, j.operation) == (line, operation)]
        size = human(sum(j.bytes * j.times for j in line_gathers))
        text = (
            f"{line}: {operation}: examples meet, and no rule runs this on parts of them, so each "
            f"device gathers {size} in a microbatch and runs it whole. "
        )
        if strict:
            raise ValueError(
                f'{text}batch_view="strict" refuses that: keep examples apart, run it on each '
                'device\'s own (hfjax.per_device), or take batch_view="global".'
            )
        warnings.warn(
            f"{text}The result is that of one device. To spare it keep examples apart, or run it "
            "on each device's own examples (hfjax.per_device).",
            UserWarning,
            stacklevel=2,
        )
