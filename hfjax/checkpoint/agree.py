"""What process 0 finds, all processes know: one reads the directory, all go on or fail together."""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def agreed(ask: Callable[[], Any]) -> Any:
    """Return what `ask()` returns on process 0; all processes raise the ValueError it raises.

    What it returns has to be JSON. The directory is one that all processes see.
    """
    if jax.process_count() == 1:
        return ask()
    from jax.experimental import multihost_utils

    told = json.dumps(_outcome(ask)).encode() if jax.process_index() == 0 else b""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(told))))
    text = np.zeros(size, np.uint8)
    text[: len(told)] = np.frombuffer(told, np.uint8)
    outcome = json.loads(bytes(np.asarray(multihost_utils.broadcast_one_to_all(text))))
    if "refusal" in outcome:
        raise ValueError(outcome["refusal"])
    return outcome["value"]


def _outcome(ask: Callable[[], Any]) -> dict:
    try:
        return {"value": ask()}
    except ValueError as error:
        return {"refusal": str(error)}
    except Exception as error:  # the others wait for an answer
        return {"refusal": f"process 0: {type(error).__name__}: {error}"}
