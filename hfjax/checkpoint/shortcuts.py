"""Save once, restore, look: without opening the checkpoints of a run."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hfjax.checkpoint.checkpoints import Checkpoints
from hfjax.checkpoint.directory import check_step, steps_in
from hfjax.checkpoint.keep import Keep
from hfjax.checkpoint.reading import Restored, Wish, read
from hfjax.checkpoint.record import read_record
from hfjax.plan import Layout, State


def save(
    directory: str | os.PathLike,
    layout: Layout,
    state: State,
    *,
    data: Any = None,
    config: Any = None,
    metrics: Mapping[str, Any] | None = None,
) -> None:
    """Save a state under the number of its step; return when it is durable. Nothing is deleted."""
    with Checkpoints(directory, layout, keep=Keep(latest=None), config=config) as checkpoints:
        checkpoints.save(state, data=data, metrics=metrics)


def restore(
    directory: str | os.PathLike,
    layout: Layout,
    step: int | None = None,
    *,
    dtype: Any = None,
    parameters_only: bool = False,
    verify: bool = True,
    on_damage: str = "refuse",
) -> Restored:
    """Return the state of a step (default: the latest) as the layout has it; takes no lock.

    `dtype`: arrays saved in another floating dtype may be cast to this one, where the layout has
    it. `parameters_only`: parameters and other variables, a fresh optimizer, step 0. `verify`:
    every file against its checksum. `on_damage`: "previous" passes over damaged steps, and warns.
    """
    wish = Wish(dtype, parameters_only, verify, on_damage)
    return read(Path(os.path.abspath(directory)), layout, step, wish)


def latest(directory: str | os.PathLike) -> int | None:
    """Return the last step that is saved in a directory; None if there is none, or no directory."""
    return max(steps_in(Path(directory)), default=None)


def recorded(directory: str | os.PathLike, step: int | None = None) -> dict[str, Any]:
    """Return what is written beside the arrays of a step: config, data, metrics, versions ...

    It needs no layout: make the layout of what is told here.
    """
    return read_record(Path(directory) / str(check_step(Path(directory), step)))
