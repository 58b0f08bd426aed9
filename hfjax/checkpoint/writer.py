"""Orbax's manager of one directory: each step gets its manifest before it counts as a step.

If a step cannot be written, the error says how many bytes it needs and how many are free.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from hfjax.checkpoint.arrays import to_raw
from hfjax.checkpoint.directory import (
    TEMPORARY,
    TRASH,
    delete_unowned,
    empty_trash,
    list_steps,
    sweep_repeatedly,
)
from hfjax.checkpoint.manifest import write_manifest
from hfjax.checkpoint.orbax_logging import silence_orbax
from hfjax.checkpoint.retention import KeepPolicy, Metrics, RetentionPolicy
from hfjax.utils.paths import nest
from hfjax.utils.tables import quote

NO_ROOM = ("No space left on device", "Disk quota exceeded", "File too large")
PER_ARRAY, PER_DEVICE = 1500, 32  # bytes in addition to an array, and more for each of its devices
BLOCK, FILES = 4096, 24  # bytes of a block; files and folders that a process writes
LATE = ("DEADLINE_EXCEEDED", "Timed out while waiting")  # others: the cause comes first


def save_error(directory: Path, step: int, needed: int, error: BaseException) -> OSError:
    """Return the error that says why a step was not saved, and that the others are."""
    saved, errors = list_steps(directory), list(_error_chain(error))
    steps = ", ".join(map(str, saved)) or "none"
    if MOVED in str(error):
        return OSError(
            f"step {step} was not saved in {quote(directory)}: {MOVED}. Steps saved before are "
            "where it was moved to: move it back, and start again."
        )
    if step in saved:
        return OSError(
            f"step {step} is saved in {quote(directory)}, but what is no longer kept cannot be "
            f"deleted: {_reason(errors)[1]}. Steps there: {steps}. Delete the oldest yourself, or "
            "keep all: RetentionPolicy(latest=None)."
        )
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    no_room, reason = _reason(errors)
    fewer = " (RetentionPolicy(latest=…) with fewer steps)" * bool(saved)
    advice = f" Make room{fewer} and save again." * no_room
    before = f"Steps saved before are intact: {steps}" if saved else "No step was saved before"
    return OSError(
        f"step {step} was not saved in {quote(directory)}: {reason}. It needs {needed} bytes, "
        f"{free} are free. {before}.{advice}"
    )


def required_bytes(raw_arrays: Mapping[str, jax.Array], record: dict) -> int:
    """Return the maximum disk space of a step in bytes: that of all its files.

    What Orbax writes for each array grows with its devices; each file ends within a block.
    """
    array_bytes = sum(
        x.nbytes + PER_ARRAY + PER_DEVICE * len(x.sharding.device_set) for x in raw_arrays.values()
    )
    return array_bytes + len(json.dumps(record)) + BLOCK * FILES * jax.process_count()


def _reason(errors: list[BaseException]) -> tuple[bool, str]:
    """Return whether there was no room, and the reason in a few words."""
    texts = [str(error) for error in errors]
    if matches := [phrase for phrase in NO_ROOM for text in texts if phrase in text]:
        return True, matches[0]
    own_errors = [error for error in errors if not any(phrase in str(error) for phrase in LATE)]
    if not own_errors:
        return False, "another process did not write its part in time; its own error tells why"
    first = next(iter(str(own_errors[0]).splitlines()), "").strip().rstrip(".")
    return False, f"{type(own_errors[0]).__name__}: {first}"


def _error_chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


MOVED = "the directory was moved or deleted while the step was written"


class Writer:
    """Writes steps in the background, one at a time; an error is raised by the next call."""

    def __init__(
        self,
        directory: Path,
        keep: RetentionPolicy,
        metrics: dict[int, Metrics],
        timeout: int,
        holds: Callable[[], bool],
    ) -> None:
        self._directory, self._keep, self._timeout = directory, keep, timeout
        self._holds = holds  # whether the directory is still the one that is locked (process 0)
        self._metrics = metrics  # of the existing steps
        self._saving: tuple[int, int] | None = None  # step, bytes
        self._manager: ocp.CheckpointManager | None = None  # opened by the first step

    def _open(self) -> ocp.CheckpointManager:
        silence_orbax()
        background = ocp.AsyncOptions(
            timeout_secs=self._timeout,
            create_directories_asynchronously=False,  # else a failure hangs the exit
            post_finalization_callback=self._seal,
        )
        options = ocp.CheckpointManagerOptions(
            create=False,
            save_root_metadata=False,
            lightweight_initialize=True,  # metadata of a damaged step would stop it
            todelete_subdir=TRASH,
            preservation_policy=KeepPolicy(self._keep, self._metrics),
            async_options=background,
        )
        handlers = {
            "state": ocp.PyTreeCheckpointHandler(use_zarr3=True, use_compression=False),
            "meta": ocp.JsonCheckpointHandler(),
        }
        return ocp.CheckpointManager(self._directory, options=options, item_handlers=handlers)

    def _seal(self) -> None:
        """Write the manifest: all files exist, the directory is not yet renamed to a step."""
        assert self._saving is not None
        if not self._holds():
            raise OSError(MOVED)
        write_manifest(self._directory / f"{self._saving[0]}{TEMPORARY}")

    def start(self, step: int, arrays: Mapping[str, Any], record: dict) -> None:
        """Copy the arrays and start writing them; return when they may change."""
        raw_arrays = {path: to_raw(x) for path, x in arrays.items()}
        self._saving = (step, required_bytes(raw_arrays, record))
        self._metrics[step] = record["metrics"]
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(nest(raw_arrays)), meta=ocp.args.JsonSave(record)
        )
        self._manager = self._manager or self._open()
        try:
            self._manager.save(step, args=items, force=True)
        except Exception as error:
            raise self._failure(error) from error

    def wait(self) -> None:
        """Return when what was started is durable; raise OSError if it is not."""
        if self._saving is None or self._manager is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failure(error) from error
        self._saving = None
        if jax.process_index() == 0 and self._holds():
            empty_trash(self._directory)

    def _failure(self, error: Exception) -> OSError:
        """Clean up a failed save so that the next one can begin; return the error to raise."""
        assert self._saving is not None
        (step, needed), self._saving = self._saving, None
        self.forget([] if step in list_steps(self._directory) else [step])
        if jax.process_index() == 0:
            if self._holds():
                sweep_repeatedly(self._directory)
            else:
                error = OSError(MOVED)  # whatever it looked like to Orbax
                delete_unowned(self._directory, step)
        return save_error(self._directory, step, needed, error)

    def forget(self, steps: list[int]) -> None:
        """Forget these steps; reopen the manager at the next save, with those in the directory."""
        for step in steps:
            self._metrics.pop(step, None)
        self.close()

    def close(self) -> None:
        """Stop Orbax's threads; what failed has been raised by `wait`."""
        manager, self._manager = self._manager, None
        with contextlib.suppress(Exception):
            if manager is not None:
                manager.close()
