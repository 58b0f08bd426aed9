"""Where a run goes on: what a checkpoint says of the data, checked."""

from pathlib import Path
from typing import Any

from hfjax.data import Loader
from hfjax.found import ANYTHING, check_fields, whole


def go_on(loader: Loader, told: Any, step: Path) -> int:
    """Put a loader where a step's record says; return how many steps were left out by then."""
    file = f"{step / 'meta' / 'metadata'}: data"
    try:
        if isinstance(told, dict):
            told = {"skipped": 0, **told}
        check_fields(told, {"data": ANYTHING, "skipped": whole(0)})
        file = f"{file}: data"
        check_fields(told["data"], {"rows": whole(0)})
    except ValueError as wrong:
        raise ValueError(
            f"{file}: {wrong}. hfjax train cannot go on from there: begin anew with its parameters "
            f"(--checkpoints.start {step.parent.parent} --out ANOTHER)."
        ) from None
    loader.restore(told["data"])
    return told["skipped"]
