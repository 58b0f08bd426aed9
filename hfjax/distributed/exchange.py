"""Exchange small values between some of the processes, through JAX's coordinator.

Their devices take no part and continue their work. Only the named processes wait.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax._src import distributed

POLL_MS = 1000  # milliseconds of one wait: in between Python handles signals
_calls: Counter[tuple[int, ...]] = Counter()  # of this process, by participants


def gather_values(processes: Sequence[int], value: Any) -> dict[int, Any]:
    """Return the value of each of these processes: all of them call it, equally often.

    Args:
        processes: Their numbers, in order; this process is one of them.
        value: Any JSON value of a few kilobytes.
    """
    process, first = jax.process_index(), processes[0]
    folder = f"hfjax/exchange/{'-'.join(map(str, processes))}"
    number = _calls[tuple(processes)]
    _calls[tuple(processes)] += 1
    client: Any = distributed.global_state.client
    client.key_value_set(f"{folder}/{number}/of/{process}", json.dumps(value))
    if process == first:
        values = _gather(client, f"{folder}/{number}/of", processes)
        client.key_value_set(f"{folder}/{number}/all", json.dumps(values))
        client.key_value_delete(f"{folder}/{number - 1}")  # all are in this call, so have read it
        return dict(zip(processes, values, strict=True))
    values = json.loads(_wait_for(client, f"{folder}/{number}/all"))
    return dict(zip(processes, values, strict=True))


def _gather(client: Any, folder: str, processes: Iterable[int]) -> list[Any]:
    """Return the values that all of them have written into a folder, once the last has."""
    names, entries = [f"{folder}/{process}" for process in processes], {}
    while missing := [name for name in names if name not in entries]:
        _wait_for(client, missing[0])
        entries = dict(client.key_value_dir_get(folder))
    return [json.loads(entries[name]) for name in names]


def _wait_for(client: Any, name: str) -> str:
    """Return the value written under a name, once it is there."""
    while True:
        try:
            return client.blocking_key_value_get(name, POLL_MS)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
