"""Restore: one process chooses a step and verifies its files; all compare and read it."""

import math
import warnings
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from hfjax.checkpoint.arrays import (
    arrays_of,
    describe,
    of_the_model,
    raw,
    unraw,
    with_arrays,
)
from hfjax.checkpoint.compare import check_same
from hfjax.checkpoint.directory import (
    DeletedError,
    ask_whole,
    check_step,
    identity,
    read_step,
    steps_in,
)
from hfjax.checkpoint.manifest import find_damage, manifest_sum
from hfjax.checkpoint.metadata import check_written, read_record
from hfjax.checkpoint.orbax_logging import keep_quiet
from hfjax.distributed.consensus import agreed, in_all
from hfjax.optimizer_step.loss_scale import fresh
from hfjax.parallel.offload.host_memory import to_device
from hfjax.parallel.precision.dtypes import LossScale
from hfjax.sharding.layout import Layout, State
from hfjax.utils.paths import flatten, nest
from hfjax.utils.read_files import check_ordinary
from hfjax.utils.tables import named

ON_DAMAGE = ("refuse", "previous")
Damaged = list[tuple[int, list[str]]]  # steps that are passed over, and what is wrong with each


@dataclass(frozen=True)
class Restored:
    """A state and what was written beside it.

    Attributes:
        state: The state, as the layout has it.
        step: That of the checkpoint; with parameters_only the state itself begins at step 0.
        data: The position in the data that was given to `save`.
        config: What was given to `save` or `Checkpoints`.
        metrics: {name: number}.
        versions: Of Python and of the packages that wrote it.
        origin: The strategy, mesh and processes that wrote it, for a person.
        damaged: Later steps that were passed over.

    Example:
        >>> import hfjax
        >>> hfjax.Restored(None, 3, {"rows": 96}, {}, {"loss": 1.5}, {}, "DDP on one device").data
        {'rows': 96}
    """

    state: State
    step: int  # of the checkpoint; with parameters_only the state itself begins at step 0
    data: Any
    config: Any
    metrics: dict[str, float]
    versions: dict[str, str]
    origin: str  # strategy, mesh and processes that wrote it
    damaged: tuple[int, ...] = ()  # later steps that were passed over


@dataclass(frozen=True)
class ReadOptions:
    """How a step is to be read."""

    dtype: Any = None
    parameters_only: bool = False
    verify: bool = True
    on_damage: str = "refuse"

    def __post_init__(self) -> None:
        if self.on_damage not in ON_DAMAGE:
            raise ValueError(f"on_damage={self.on_damage!r}: one of {', '.join(ON_DAMAGE)}.")


def read(directory: Path, layout: Layout, step: int | None, options: ReadOptions) -> Restored:
    """Return the state of a step, as the layout has it, and what was written beside it."""
    restored, damaged = read_step(step, lambda: _read(directory, layout, step, options))
    for number, lines in damaged:
        warnings.warn(
            f"{_damaged(directory, number, lines)} Restored step {restored.step} instead.",
            RuntimeWarning,
            stacklevel=3,
        )
    return restored


def _read(
    directory: Path, layout: Layout, step: int | None, options: ReadOptions
) -> tuple[Restored, Damaged]:
    """Return what is restored, and what is damaged; all processes raise `DeletedError` together."""
    chosen = agreed(lambda: read_step(step, lambda: _choose(directory, step, options)))
    path, found = directory / str(chosen["step"]), chosen["record"]
    try:
        in_all(lambda: _check_manifest(path, chosen["manifest"]))
        state = _state(path, layout, found["arrays"], options)
    except ValueError:
        if agreed(lambda: identity(path) == chosen["identity"]):
            raise
        raise DeletedError(path) from None
    restored = Restored(
        state=state,
        step=chosen["step"],
        origin=_origin(found),
        damaged=tuple(number for number, _ in chosen["damaged"]),
        **{name: found[name] for name in ("data", "config", "metrics", "versions")},
    )
    return restored, chosen["damaged"]


def _origin(found: dict) -> str:
    return named(f"{found['strategy']} on {found['mesh']}, processes: {found['processes']}")


def _choose(directory: Path, step: int | None, options: ReadOptions) -> dict:
    """Return which step is read, its record, and the damaged ones that are passed over."""
    step = check_step(directory, step)
    ask_whole(directory / str(step), check_written)
    damaged: Damaged = []
    while options.verify and (lines := ask_whole(directory / str(step), find_damage)):
        damaged.append((step, lines))
        before = [s for s in steps_in(directory) if s < step]
        if options.on_damage == "refuse" or not before:
            raise ValueError(_refusal(directory, damaged[0], before))
        step = before[-1]
    path = directory / str(step)
    if not options.verify:
        ask_whole(path, _check_files)
    told = {"step": step, "identity": identity(path), "damaged": damaged}
    told["manifest"] = manifest_sum(path)
    return told | {"record": ask_whole(path, read_record)}


def _check_manifest(step: Path, wanted: str | None) -> None:
    """Refuse, in another process, a step that is not the one that process 0 has chosen."""
    if (found := manifest_sum(step)) != wanted:
        differs = f"it is another one ({found}, there {wanted})"
        raise ValueError(
            f"step {step.name} of {named(step.parent)} is not the one that process 0 reads: "
            f"{differs if step.exists() else 'there is no such step'}. Give all processes one "
            "directory that all of them see: its whole path, on a shared disk."
        )


def _check_files(step: Path) -> None:
    """Refuse pipes and devices, which would block a reader that does not verify first."""
    for path in step.rglob("*"):
        if not path.is_dir():
            check_ordinary(path)


def _damaged(directory: Path, step: int, lines: list[str]) -> str:
    more = f" (and {len(lines) - 1} more files)" if len(lines) > 1 else ""
    return f"step {step} of {named(directory)} is damaged: {lines[0]}{more}."


def _refusal(directory: Path, found: tuple[int, list[str]], before: list[int]) -> str:
    good = next((s for s in reversed(before) if not find_damage(directory / str(s))), None)
    offer = (
        "No earlier step is whole."
        if good is None
        else f"Step {good} is whole: hfjax.restore(directory, layout, step={good}), or "
        'on_damage="previous" to pass over what is damaged.'
    )
    return f"{_damaged(directory, *found)} {offer}"


def _state(path: Path, layout: Layout, saved: dict, options: ReadOptions) -> State:
    """Return the state that is read from the directory of a step."""
    like = layout.as_the_model.abstract_state()
    if any(p.startswith("scale/") for p in saved):
        like = replace(like, scale=_scale_like(layout))
    arrays = arrays_of(like)
    wanted = describe(arrays)
    if options.parameters_only:
        saved, wanted = of_the_model(saved), of_the_model(wanted)
    where = f"step {path.name} of {named(path.parent)}"
    check_same(saved, wanted, options.dtype, where)
    found = _load(path / "state", {path: arrays[path] for path in wanted}, where)
    state = with_arrays(replace(like, order=_order(layout)), found)
    if options.parameters_only:
        return _begun(layout, replace(state, scale=None))
    _check_scale(state, where)
    return state


def _scale_like(layout: Layout) -> Any:
    """Return the numbers of a loss scale, as shapes on the devices of the layout."""
    here = layout.shardings().step
    number = lambda x: jax.ShapeDtypeStruct((), x.dtype, sharding=here)
    return jax.tree.map(number, fresh(LossScale()))


def _check_scale(state: State, where: str) -> None:
    """Refuse a loss scale with which no step can be taken."""
    if state.scale is not None and not (math.isfinite(x := float(state.scale.value)) and x > 0):
        raise ValueError(
            f"{where} holds a loss scale of {x:g}: a positive number is expected. Go on from an "
            "earlier step, or without it: dataclasses.replace(state, scale=None)."
        )


def _load(path: Path, wanted: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the wanted arrays by path; only they are read."""
    item = nest({path: raw(x) for path, x in wanted.items()})
    arguments = ocp.args.PyTreeRestore(
        item=item,
        restore_args=ocp.checkpoint_utils.construct_restore_args(item),
        partial_restore=True,
    )
    keep_quiet()
    found = in_all(lambda: flatten(_read_arrays(path, arguments, where)))
    return {path: unraw(found[path], like) for path, like in wanted.items()}


def _read_arrays(path: Any, arguments: Any, where: str) -> dict[str, Any]:
    """Return what Orbax reads in this process; its `Checkpointer` would wait for all others."""
    with closing(ocp.PyTreeCheckpointHandler()) as handler:
        try:
            return handler.restore(path, args=arguments)
        except Exception as error:
            raise ValueError(
                f"{where} cannot be read: {str(error).splitlines()[0]} With verify=True a damaged "
                "file is named."
            ) from error


def _order(layout: Layout) -> Any:
    """Return the order of the layers as they are saved, on the devices of the layout."""
    plain = layout.as_the_model
    return None if plain.order is None else jax.device_put(plain.order, plain.shardings().order)


def _begun(layout: Layout, state: State) -> State:
    """Return the state of a run that begins with these parameters; random keys are new ones."""
    plain = layout.as_the_model
    shardings = plain.shardings()
    variables = jax.jit(lambda: plain.create(0).variables, out_shardings=shardings.variables)()
    is_new = lambda x: isinstance(x, jax.ShapeDtypeStruct)
    variables = jax.tree.map(lambda x, new: new if is_new(x) else x, state.variables, variables)
    begin = lambda params: layout.optimizer.init(to_device(params))
    moments = jax.jit(begin, out_shardings=shardings.optimizer)(state.params)
    step = jax.jit(lambda: jnp.zeros((), jnp.int32), out_shardings=shardings.step)()
    return replace(state, step=step, optimizer=moments, variables=variables)
