"""Some of the processes tell each other something small, by JAX's coordinator.

Their devices take no part and go on with what they do. Only processes that are named wait.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax._src import distributed

PATIENCE = 1000  # milliseconds of one question: in between Python answers signals
_calls: Counter[tuple[int, ...]] = Counter()  # of this process, by who takes part


def exchanged(processes: Sequence[int], mine: Any) -> dict[int, Any]:
    """Return what each of these processes gives: all of them call it, equally often.

    Args:
        processes: Their numbers, in order; this process is one of them.
        mine: Anything that JSON has, of a few kilobytes.
    """
    me, first = jax.process_index(), processes[0]
    everybody = f"hfjax/exchange/{'-'.join(map(str, processes))}"
    number = _calls[tuple(processes)]
    _calls[tuple(processes)] += 1
    client: Any = distributed.global_state.client
    client.key_value_set(f"{everybody}/{number}/of/{me}", json.dumps(mine))
    if me == first:
        told = _told(client, f"{everybody}/{number}/of", processes)
        client.key_value_set(f"{everybody}/{number}/all", json.dumps(told))
        client.key_value_delete(f"{everybody}/{number - 1}")  # all have come here, so have read it
        return dict(zip(processes, told, strict=True))
    told = json.loads(_read(client, f"{everybody}/{number}/all"))
    return dict(zip(processes, told, strict=True))


def _told(client: Any, folder: str, processes: Iterable[int]) -> list[Any]:
    """Return what all of them have written into a folder, when the last has."""
    names, found = [f"{folder}/{process}" for process in processes], {}
    while missing := [name for name in names if name not in found]:
        _read(client, missing[0])
        found = dict(client.key_value_dir_get(folder))
    return [json.loads(found[name]) for name in names]


def _read(client: Any, name: str) -> str:
    """Return what is written under a name, when it is."""
    while True:
        try:
            return client.blocking_key_value_get(name, PATIENCE)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
