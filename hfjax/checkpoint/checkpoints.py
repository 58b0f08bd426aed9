"""Checkpoints of a run: saved in the background, kept by a rule, restored under any layout.

A program that ends while a step is being written finishes it first, or reports that it is lost.
`save`, `restore`, `latest_step` and `checkpoint_metadata` each do one thing without opening
a run's checkpoints.
"""

import atexit
import concurrent.futures.thread  # noqa: F401  (its own exit is registered first: it runs last)
import logging
import os
import socket
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from jax.typing import DTypeLike

from hfjax.checkpoint.arrays import describe
from hfjax.checkpoint.compare import arrays_to_save, base_record, steps_taken
from hfjax.checkpoint.directory import (
    WriterLock,
    check_locked,
    directory_path,
    discard,
    is_hfjax_step,
    list_steps,
    make_directory,
    read_undeleted,
    rename_damaged,
    resolve_step,
    retry_if_deleted,
    sweep,
)
from hfjax.checkpoint.metadata import check_json, make_record, read_record
from hfjax.checkpoint.restoring import ReadOptions, RestoredRun, read
from hfjax.checkpoint.retention import Metrics, RetentionPolicy
from hfjax.checkpoint.writer import Writer
from hfjax.distributed.consensus import run_on_all, run_on_first
from hfjax.parallel.jaxprs.model_mesh import without_mesh
from hfjax.sharding.layout import Layout, State
from hfjax.utils.keywords import check_seconds
from hfjax.utils.tables import quote

logger = logging.getLogger(__name__)


class Closable(Protocol):
    """A resource that has to be closed."""

    def close(self) -> None: ...


_OPEN: dict[int, Closable] = {}


def register_at_exit(resource: Closable) -> None:
    """Close a resource when the program ends, unless `unregister` is called first.

    From Python 3.12 on no thread starts by then: a save that is not nearly written is lost.
    """
    _OPEN[id(resource)] = resource


def unregister(resource: Closable) -> None:
    """Forget a resource that is closed."""
    _OPEN.pop(id(resource), None)


def _close_all() -> None:
    for resource in list(_OPEN.values()):
        try:
            resource.close()
        except Exception as error:
            advice = "The program ended without close(): use `with hfjax.CheckpointManager(…)`."
            logger.error("%s %s", error, advice)


# A plain `atexit` comes too late: the executors with which Orbax writes accept no work by then.
getattr(threading, "_register_atexit", atexit.register)(_close_all)


class CheckpointManager:
    """The checkpoints of a directory, as its only writer; use it in a `with` statement.

    With several processes all of them call every method, and all see the directory.

    Args:
        directory: Where steps are saved; created if missing. Another writer is refused.
        layout: The layout of the states to save and restore.
        keep: Which steps are kept. None: `RetentionPolicy()`, the latest three.
        config: JSON data, written beside each step: how to rebuild the model, say.
        timeout: Seconds that writing a save may take.

    Example:
        >>> import hfjax, jax.numpy as jnp, optax, tempfile
        >>> model = lambda rngs: {"w": jnp.ones((8, 8))}
        >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(fsdp=8), hfjax.FSDP)
        >>> folder, state = tempfile.TemporaryDirectory(), hfjax.init(layout)
        >>> keep = hfjax.RetentionPolicy(latest=2)
        >>> with hfjax.CheckpointManager(folder.name, layout, keep=keep) as checkpoints:
        ...     checkpoints.save(state, data={"rows": 0}, metrics={"loss": 1.5})
        ...     checkpoints.wait()
        ...     checkpoints.steps(), checkpoints.latest(), checkpoints.restore().data
        ([0], 0, {'rows': 0})
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        layout: Layout,
        *,
        keep: RetentionPolicy | None = None,
        config: Any = None,
        timeout: int = 600,
    ) -> None:
        self.directory, self._layout = Path(os.path.abspath(directory_path(directory))), layout
        self._keep, self._config = keep or RetentionPolicy(), check_json("config", config)
        check_seconds("Checkpoints", timeout=timeout)
        self._lock: WriterLock | None = None
        self._timeout = timeout
        self._writer = self._lock_and_make_writer()
        self._open = True
        register_at_exit(self)

    def _lock_and_make_writer(self) -> Writer:
        """Lock the directory, which must be the same in all processes; return its writer."""
        lock_info = run_on_first(self._lock_directory)
        metrics = {int(step): values for step, values in lock_info["metrics"].items()}
        try:
            run_on_all(lambda: check_locked(self.directory, lock_info["place"], lock_info["lock"]))
        except ValueError:
            self._release()
            raise
        return Writer(self.directory, self._keep, metrics, self._timeout, self._holds_lock)

    def _holds_lock(self) -> bool:
        """Return, on process 0, whether the directory is still the one that it has locked."""
        return self._lock is not None and self._lock.holds()

    def _lock_directory(self) -> dict[str, Any]:
        """Lock the directory; return its name and lock, and the metrics of the steps in it."""
        make_directory(self.directory)
        self._lock = WriterLock(self.directory)
        try:
            sweep(self.directory)
        except BaseException:
            self._release()
            raise
        own_steps = [
            step for step in self._list_steps() if is_hfjax_step(self.directory / str(step))
        ]
        metrics = {str(step): _read_metrics(self.directory / str(step)) for step in own_steps}
        location = f"{self.directory} on {socket.gethostname()}"
        return {"place": location, "lock": self._lock.text, "metrics": metrics}

    def _list_steps(self) -> list[int]:
        return list_steps(self.directory)

    @without_mesh
    def save(
        self,
        state: State,
        *,
        data: Any = None,
        metrics: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> None:
        """Start saving a state under the number of its step; return when it may be donated.

        It waits for the previous save to be written, and raises its error here.

        Args:
            state: The state; its layers may be stored for any schedule.
            data: JSON data: the position in the data, for instance `loader.state()`.
            metrics: {name: number}, written beside it. `RetentionPolicy(best=…)` needs its own.
            force: Whether to delete the same and later steps first, those of an abandoned run.

        Raises:
            ValueError: The step is negative; or, without `force`, it or a later one is saved.
        """
        self._check_open()
        step = steps_taken(state)
        self._keep.check(metrics or {})
        arrays = arrays_to_save(self._layout, state)
        step_record = make_record(
            self._layout, step, describe(arrays), self._config, data, metrics or {}
        )
        if (base := base_record(self._layout)) is not None:
            step_record["base"] = base
        self.wait()
        self._ensure_directory()
        self._check_new(step, force)
        self._writer.start(step, arrays, step_record)

    def _ensure_directory(self) -> None:
        """Lock the directory anew if it was moved away: one made in its place has no lock."""
        if run_on_first(self._holds_lock):
            return
        warnings.warn(
            f"{quote(self.directory)} was moved or deleted while it is written to: it is made "
            "anew. The steps saved before are where it was moved to.",
            RuntimeWarning,
            stacklevel=3,
        )
        self._writer.close()
        self._release()
        self._writer = self._lock_and_make_writer()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _check_new(self, step: int, force: bool) -> None:
        later = [s for s in self.steps() if s >= step]
        if later and not force:
            problem = "is already saved" if step in later else f"comes before step {later[-1]}"
            raise ValueError(
                f"step {step} {problem} in {quote(self.directory)}. Go on from the latest step, "
                "save to another directory, or save with force=True: it deletes the same and later "
                f"steps first ({', '.join(map(str, later))})."
            )
        if later:
            run_on_first(lambda: discard(self.directory, later))
            self._writer.forget(later)

    @without_mesh
    def wait(self) -> None:
        """Return when everything is durable; raise OSError for what could not be written."""
        self._check_open()
        self._writer.wait()

    def steps(self) -> list[int]:
        """Return the steps that are durable, in ascending order."""
        return run_on_first(self._list_steps)

    def latest(self) -> int | None:
        """Return the last durable step; None if there is none."""
        return max(self.steps(), default=None)

    @without_mesh
    def restore(
        self,
        step: int | None = None,
        *,
        dtype: DTypeLike | None = None,
        parameters_only: bool = False,
        verify: bool = True,
        on_damage: str = "refuse",
    ) -> RestoredRun:
        """Return the state of a step, after any save in progress; see `hfjax.restore`.

        With on_damage="previous" damaged steps are skipped, and renamed, so that the run can save
        these steps again.

        Args:
            step: The step. None: the latest.
            dtype: As in `hfjax.restore`.
            parameters_only: As in `hfjax.restore`.
            verify: As in `hfjax.restore`.
            on_damage: As in `hfjax.restore`.
        """
        self.wait()
        options = ReadOptions(dtype, parameters_only, verify, on_damage)
        restored = read(self.directory, self._layout, step, options)
        if restored.damaged:
            run_on_first(lambda: [rename_damaged(self.directory, s) for s in restored.damaged])
            self._writer.forget(list(restored.damaged))
        return restored

    def close(self) -> None:
        """Wait for a save in progress and unlock the directory; a second call does nothing."""
        if not self._open:
            return
        try:
            self.wait()
        finally:
            self._open = False
            unregister(self)
            self._writer.close()
            self._release()

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.close()
        except OSError as failure:
            if not isinstance(error, Exception):  # none, or an exit that would not show it
                raise
            error.add_note(str(failure))

    def _check_open(self) -> None:
        if not self._open:
            raise ValueError(
                f"the checkpoints of {quote(self.directory)} are closed. Open them again."
            )


def _read_metrics(step: Path) -> Metrics:
    """Return the metrics of a step; a damaged one has none."""
    try:
        return read_record(step).get("metrics", {})
    except ValueError:
        return {}


@without_mesh
def save(
    directory: str | os.PathLike,
    layout: Layout,
    state: State,
    *,
    data: Any = None,
    config: Any = None,
    metrics: Mapping[str, Any] | None = None,
) -> None:
    """Save a state under the number of its step; return when it is durable. Nothing is deleted.

    Args:
        directory: Where steps are saved; created if missing.
        layout: The layout of the state.
        state: The state; its layers may be stored for any schedule.
        data: JSON data: the position in the data, for instance `loader.state()`.
        config: JSON data: how to rebuild the model, say.
        metrics: {name: number}.

    Raises:
        ValueError: The step or a later one is saved already, or the directory has another writer.

    Example:
        >>> import hfjax, jax.numpy as jnp, optax, tempfile
        >>> model = lambda rngs: {"w": jnp.ones((8, 8))}
        >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(fsdp=8), hfjax.FSDP)
        >>> folder = tempfile.TemporaryDirectory()
        >>> hfjax.save(folder.name, layout, hfjax.init(layout), config={"width": 8})
        >>> hfjax.latest_step(folder.name)
        0
    """
    with CheckpointManager(
        directory, layout, keep=RetentionPolicy(latest=None), config=config
    ) as checkpoints:
        checkpoints.save(state, data=data, metrics=metrics)


@without_mesh
def restore(
    directory: str | os.PathLike,
    layout: Layout,
    step: int | None = None,
    *,
    dtype: DTypeLike | None = None,
    parameters_only: bool = False,
    verify: bool = True,
    on_damage: str = "refuse",
) -> RestoredRun:
    """Return the state of a step, placed by the layout; takes no lock.

    Args:
        directory: Where steps are saved.
        layout: A layout of the model that was saved; its mesh, strategy and number of processes
            may differ.
        step: The step. None: the latest.
        dtype: Arrays saved in another floating dtype may be cast to this one, where the layout has
            it. None: a difference is refused.
        parameters_only: Whether to restore parameters and other variables only, with fresh
            optimizer state, new random keys and step 0.
        verify: Whether to compare every file with its checksum.
        on_damage: "refuse" a damaged step, or "previous": take the one before, and warn.

    Raises:
        ValueError: The step is missing, damaged or deleted meanwhile, or it is of another model or
            optimizer.

    Example:
        >>> import hfjax, jax.numpy as jnp, optax, tempfile
        >>> model = lambda rngs: {"w": jnp.ones((8, 8))}
        >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(fsdp=8), hfjax.FSDP)
        >>> folder = tempfile.TemporaryDirectory()
        >>> hfjax.save(folder.name, layout, hfjax.init(layout), data={"rows": 64})
        >>> other = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP)
        >>> restored = hfjax.restore(folder.name, other)
        >>> restored.data, restored.origin
        ({'rows': 64}, 'FSDP on fsdp=8, processes: 1')
    """
    if isinstance(directory, Layout) or not isinstance(layout, Layout):
        type_names = f"{type(directory).__name__} and {type(layout).__name__}"
        raise ValueError(
            f"restore(directory, layout) takes a directory, then a layout; found {type_names}."
        )
    options = ReadOptions(dtype, parameters_only, verify, on_damage)
    return read(Path(os.path.abspath(directory_path(directory))), layout, step, options)


def latest_step(directory: str | os.PathLike) -> int | None:
    """Return the last step saved in a directory; None if there is no step or no directory.

    Args:
        directory: Where steps are saved.

    Example:
        >>> import hfjax
        >>> hfjax.latest_step("no/such/directory") is None
        True
    """
    return max(list_steps(directory_path(directory)), default=None)


def checkpoint_metadata(directory: str | os.PathLike, step: int | None = None) -> dict[str, Any]:
    """Return the record beside the arrays of a step: config, data, metrics, versions ...

    It needs no layout: build the layout from this record.

    Args:
        directory: Where steps are saved.
        step: The step. None: the latest.

    Raises:
        ValueError: The step is missing, or its record is damaged.

    Example:
        >>> import hfjax, jax.numpy as jnp, optax, tempfile
        >>> model = lambda rngs: {"w": jnp.ones((8, 8))}
        >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(fsdp=8), hfjax.FSDP)
        >>> folder = tempfile.TemporaryDirectory()
        >>> hfjax.save(folder.name, layout, hfjax.init(layout), config={"width": 8})
        >>> hfjax.checkpoint_metadata(folder.name)["config"]
        {'width': 8}
    """
    folder = directory_path(directory)
    step_path = lambda: folder / str(resolve_step(folder, step))
    return retry_if_deleted(step, lambda: read_undeleted(step_path(), read_record))
