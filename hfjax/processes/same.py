"""What must be the same in every process: data, settings."""

import json
import zlib
from typing import Any

import jax
import numpy as np


def check_same(what: str, value: Any) -> None:
    """Refuse, in all processes, a value (as JSON has it) that differs between processes."""
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    mine = np.uint32(zlib.crc32(json.dumps(value, sort_keys=True).encode()))
    found = np.asarray(multihost_utils.process_allgather(mine)).reshape(-1)
    if other := np.flatnonzero(found != found[0]).tolist():
        raise ValueError(
            f"the {what} of process {', '.join(map(str, other))} differs from that of process 0. "
            "Give all processes the same; files must be the same on every machine."
        )
