"""Consensus: the same data and settings, one reader of a directory, one process that prints.

`check_same` compares settings. `run_on_first` runs a function on process 0 and returns its result
on all, and `run_on_all` runs it on each, so that all continue or fail together. `say` prints on
process 0 only.
"""

import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from jax._src import distributed

from hfjax.distributed.exchange import gather_values

LIMIT = 6  # differences in a message

T = TypeVar("T")


def check_same(what: str, value: object) -> None:
    """Refuse, in all processes, a value that differs between them. All processes call it.

    Args:
        what: Name of the value, for the message.
        value: Any JSON value.

    Raises:
        ValueError: It differs; the message says in which processes, and in what.

    Example:
        >>> from hfjax.distributed import check_same
        >>> check_same("configuration", {"steps": 300, "batch": 32})
    """
    if jax.process_count() == 1:
        return
    if (values := _gather_if_different(value)) is not None:
        raise ValueError(explain(what, values))


def _gather_if_different(value: Any) -> list[Any] | None:
    """Return the JSON value of each process; None if all are equal."""
    text, processes = json.dumps(value, sort_keys=True), range(jax.process_count())
    if len({*gather_values(processes, zlib.crc32(text.encode())).values()}) == 1:
        return None
    return list(map(json.loads, gather_values(processes, text).values()))


def run_on_all(fn: Callable[[], T]) -> T:
    """Return the result of `fn()` here; if it fails in one process, all raise its message.

    All processes call it.
    """
    if not distributed.global_state.client or jax.process_count() == 1:
        return fn()
    try:
        outs, refusal = [fn()], None
    except (ValueError, OSError) as wrong:
        outs, refusal = [], str(wrong)
    for process, message in enumerate(
        _gather_if_different(refusal) or [refusal] * (refusal is not None)
    ):
        if message is not None:
            raise ValueError(message if process == 0 else f"process {process}: {message}")
    return outs[0]


def explain(subject: str, values: list[Any]) -> str:
    """Return the message about values that differ from the first one, and how.

    >>> explain("configuration", [{"steps": 4, "mesh": {"data": 2}}, {"steps": 4, "mesh": {}}])[:78]
    'the configuration of process 1 differs from that of process 0: mesh.data 2, th'
    """
    other = [process for process, value in enumerate(values) if value != values[0]]
    lines = list(_differences(values[0], values[other[0]], ""))
    more = f" and {len(lines) - LIMIT} more" if len(lines) > LIMIT else ""
    return (
        f"the {subject} of process {', '.join(map(str, other))} differs from that of process 0: "
        f"{'; '.join(lines[:LIMIT])}{more}. Give all processes the same; files must be the same on "
        "every machine."
    )


def _differences(first: Any, other: Any, path: str) -> Iterator[str]:
    if isinstance(first, dict) and isinstance(other, dict):
        for name in sorted({*first, *other}):
            yield from _differences(first.get(name), other.get(name), f"{path}.{name}".strip("."))
    elif first != other:
        yield f"{path} {_truncate(first)}, there {_truncate(other)}".strip()


def _truncate(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def run_on_first(fn: Callable[[], Any]) -> Any:
    """Return the result of `fn()` on process 0; all processes raise the ValueError it raises.

    The result has to be JSON. A directory that it reads is one that all processes see.
    """
    if not distributed.global_state.client or jax.process_count() == 1:
        return fn()
    local_outcome = _run(fn) if jax.process_index() == 0 else None
    outcome = gather_values(range(jax.process_count()), local_outcome)[0]
    if "refusal" in outcome:
        raise ValueError(outcome["refusal"])
    return outcome["value"]


def _run(fn: Callable[[], Any]) -> dict:
    try:
        return {"value": fn()}
    except ValueError as error:
        return {"refusal": str(error)}
    except Exception as error:  # the others wait for an answer
        return {"refusal": f"process 0: {type(error).__name__}: {error}"}


def speaks() -> bool:
    """Return whether this process is the one that prints and writes logs (starts no backend).

    Example:
        >>> from hfjax.distributed import speaks
        >>> speaks()  # in process 0, and where there is one only
        True
    """
    return distributed.global_state.process_id == 0


def say(*words: Any) -> None:
    """Print and flush, in process 0 only.

    Args:
        words: Arguments of `print`.

    Example:
        >>> from hfjax.distributed import say
        >>> say("step", 1)
        step 1
    """
    if speaks():
        print(*words, flush=True)
