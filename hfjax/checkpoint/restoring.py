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
    PARAMS,
    describe,
    from_raw,
    model_arrays,
    state_arrays,
    to_raw,
    with_arrays,
)
from hfjax.checkpoint.compare import check_same, without_base
from hfjax.checkpoint.directory import (
    DeletedError,
    folder_identity,
    list_steps,
    read_undeleted,
    resolve_step,
    retry_if_deleted,
)
from hfjax.checkpoint.manifest import find_damage, manifest_checksum
from hfjax.checkpoint.metadata import check_is_ours, read_record
from hfjax.checkpoint.orbax_logging import silence_orbax
from hfjax.distributed.consensus import run_on_all, run_on_first
from hfjax.optimizer_step.loss_scale import initial_scale
from hfjax.parallel.offload.host_memory import to_device
from hfjax.parallel.precision.dtypes import LossScale
from hfjax.sharding.layout import Layout, State
from hfjax.utils.paths import flatten, nest
from hfjax.utils.read_files import check_ordinary
from hfjax.utils.tables import quote

ON_DAMAGE = ("refuse", "previous")
Damaged = list[tuple[int, list[str]]]  # skipped steps, and what is wrong with each


@dataclass(frozen=True)
class RestoredRun:
    """A restored state and the record beside it.

    Attributes:
        state: The state, placed by the layout.
        step: The step of the checkpoint; with parameters_only the state itself begins at step 0.
        data: The position in the data that was given to `save`.
        config: The config that was given to `save` or `Checkpoints`.
        metrics: {name: number}.
        versions: Versions of Python and of the packages that wrote it.
        origin: The strategy, mesh and processes that wrote it, as text.
        damaged: Later steps that were skipped.

    Example:
        >>> import hfjax
        >>> metrics = {"loss": 1.5}
        >>> hfjax.RestoredRun(None, 3, {"rows": 96}, {}, metrics, {}, "DDP on one device").data
        {'rows': 96}
    """

    state: State
    step: int  # of the checkpoint; with parameters_only the state itself begins at step 0
    data: Any
    config: Any
    metrics: dict[str, float]
    versions: dict[str, str]
    origin: str  # strategy, mesh and processes that wrote it
    damaged: tuple[int, ...] = ()  # later steps that were skipped


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


def read(directory: Path, layout: Layout, step: int | None, options: ReadOptions) -> RestoredRun:
    """Return the state of a step, placed by the layout, and the record beside it."""
    restored, damaged = retry_if_deleted(step, lambda: _read(directory, layout, step, options))
    for number, lines in damaged:
        warnings.warn(
            f"{_damage_message(directory, number, lines)} Restored step {restored.step} instead.",
            RuntimeWarning,
            stacklevel=3,
        )
    return restored


def _read(
    directory: Path, layout: Layout, step: int | None, options: ReadOptions
) -> tuple[RestoredRun, Damaged]:
    """Return the restored step and the damaged ones; all processes raise `DeletedError`."""
    chosen = run_on_first(
        lambda: retry_if_deleted(step, lambda: _choose_step(directory, step, options))
    )
    path, record = directory / str(chosen["step"]), chosen["record"]
    try:
        run_on_all(lambda: _check_manifest(path, chosen["manifest"]))
        state = _read_state(path, layout, record, options)
    except ValueError:
        if run_on_first(lambda: folder_identity(path) == chosen["identity"]):
            raise
        raise DeletedError(path) from None
    restored = RestoredRun(
        state=state,
        step=chosen["step"],
        origin=_format_origin(record),
        damaged=tuple(number for number, _ in chosen["damaged"]),
        **{name: record[name] for name in ("data", "config", "metrics", "versions")},
    )
    return restored, chosen["damaged"]


def _format_origin(record: dict) -> str:
    return quote(f"{record['strategy']} on {record['mesh']}, processes: {record['processes']}")


def _choose_step(directory: Path, step: int | None, options: ReadOptions) -> dict:
    """Return the step to read, its record, and the damaged ones that are skipped."""
    step = resolve_step(directory, step)
    read_undeleted(directory / str(step), check_is_ours)
    damaged: Damaged = []
    while options.verify and (lines := read_undeleted(directory / str(step), find_damage)):
        damaged.append((step, lines))
        earlier = [s for s in list_steps(directory) if s < step]
        if options.on_damage == "refuse" or not earlier:
            raise ValueError(_refusal_message(directory, damaged[0], earlier))
        step = earlier[-1]
    path = directory / str(step)
    if not options.verify:
        read_undeleted(path, _check_files)
    choice = {"step": step, "identity": folder_identity(path), "damaged": damaged}
    choice["manifest"] = manifest_checksum(path)
    return choice | {"record": read_undeleted(path, read_record)}


def _check_manifest(step: Path, checksum_on_first: str | None) -> None:
    """Refuse, in another process, a step that is not the one that process 0 has chosen."""
    if (actual := manifest_checksum(step)) != checksum_on_first:
        difference = f"it is another one ({actual}, there {checksum_on_first})"
        raise ValueError(
            f"step {step.name} of {quote(step.parent)} is not the one that process 0 reads: "
            f"{difference if step.exists() else 'there is no such step'}. Give all processes one "
            "directory that all of them see: its whole path, on a shared disk."
        )


def _check_files(step: Path) -> None:
    """Refuse pipes and devices, which would block a reader that does not verify first."""
    for path in step.rglob("*"):
        if not path.is_dir():
            check_ordinary(path)


def _damage_message(directory: Path, step: int, lines: list[str]) -> str:
    more = f" (and {len(lines) - 1} more files)" if len(lines) > 1 else ""
    return f"step {step} of {quote(directory)} is damaged: {lines[0]}{more}."


def _refusal_message(
    directory: Path, damaged_step: tuple[int, list[str]], earlier: list[int]
) -> str:
    good = next((s for s in reversed(earlier) if not find_damage(directory / str(s))), None)
    offer = (
        "No earlier step is whole."
        if good is None
        else f"Step {good} is whole: hfjax.restore(directory, layout, step={good}), or "
        'on_damage="previous" to pass over what is damaged.'
    )
    return f"{_damage_message(directory, *damaged_step)} {offer}"


def _read_state(path: Path, layout: Layout, record: dict, options: ReadOptions) -> State:
    """Return the state read from the directory of a step."""
    like, saved, base = layout.model_layout.abstract_state(), record["arrays"], record.get("base")
    if any(p.startswith("scale/") for p in saved):
        like = replace(like, scale=_scale_shapes(layout))
    arrays = state_arrays(like)
    expected = describe(arrays)
    label = f"step {path.name} of {quote(path.parent)}"
    if base is not None:
        expected = without_base(_check_has_base(layout, base, label), expected)
    if options.parameters_only:
        saved, expected = model_arrays(saved), model_arrays(expected)
    check_same(saved, expected, options.dtype, label)
    loaded = _load_arrays(path / "state", {path: arrays[path] for path in expected}, label)
    if base is not None:
        loaded = _load_base(layout, base, label) | loaded
    state = with_arrays(replace(like, order=_saved_order(layout)), loaded)
    if options.parameters_only:
        return _restart_from_params(layout, replace(state, scale=None))
    _check_scale(state, label)
    return state


def _check_has_base(layout: Layout, base: dict, label: str) -> Layout:
    """Return the layout; refuse one without adapters for a checkpoint of adapters alone."""
    if layout.template.base_weights is None:
        raise ValueError(
            f"{label} holds adapters, and not the parameters of {base.get('source')} below them. "
            "Restore it into a layout of hfjax.adapters.lora(hfjax.pretrained(…), …), with the "
            "options that it was trained with."
        )
    return layout


def _load_base(layout: Layout, base: dict, label: str) -> dict[str, Any]:
    """Return the frozen parameters that a checkpoint does not hold, from the model's files."""
    params = layout.template.base_weights.into(layout.model_layout)
    layout.template.base_weights.check(base, label)
    return {f"{PARAMS}{path}": x for path, x in params.items()}


def _scale_shapes(layout: Layout) -> Any:
    """Return the numbers of a loss scale, as shapes on the devices of the layout."""
    sharding = layout.shardings().step
    number = lambda x: jax.ShapeDtypeStruct((), x.dtype, sharding=sharding)
    return jax.tree.map(number, initial_scale(LossScale()))


def _check_scale(state: State, label: str) -> None:
    """Refuse a loss scale with which no step can be taken."""
    if state.scale is not None and not (math.isfinite(x := float(state.scale.value)) and x > 0):
        raise ValueError(
            f"{label} holds a loss scale of {x:g}: a positive number is expected. Go on from an "
            "earlier step, or without it: dataclasses.replace(state, scale=None)."
        )


def _load_arrays(path: Path, specs: dict[str, Any], label: str) -> dict[str, Any]:
    """Return the arrays of `specs` by path; only they are read."""
    item = nest({path: to_raw(x) for path, x in specs.items()})
    arguments = ocp.args.PyTreeRestore(
        item=item,
        restore_args=ocp.checkpoint_utils.construct_restore_args(item),
        partial_restore=True,
    )
    silence_orbax()
    raw_arrays = run_on_all(lambda: flatten(_read_arrays(path, arguments, label)))
    return {path: from_raw(raw_arrays[path], like) for path, like in specs.items()}


def _read_arrays(path: Any, arguments: Any, label: str) -> dict[str, Any]:
    """Return what Orbax reads in this process; its `Checkpointer` would wait for all others."""
    with closing(ocp.PyTreeCheckpointHandler()) as handler:
        try:
            return handler.restore(path, args=arguments)
        except Exception as error:
            raise ValueError(
                f"{label} cannot be read: {str(error).splitlines()[0]} With verify=True a damaged "
                "file is named."
            ) from error


def _saved_order(layout: Layout) -> Any:
    """Return the order of the layers as they are saved, on the devices of the layout."""
    plain = layout.model_layout
    return None if plain.order is None else jax.device_put(plain.order, plain.shardings().order)


def _restart_from_params(layout: Layout, state: State) -> State:
    """Return the initial state of a run with these parameters, and with new random keys."""
    unordered = layout.model_layout
    shardings = unordered.shardings()
    variables = jax.jit(lambda: unordered.create(0).variables, out_shardings=shardings.variables)()
    is_new = lambda x: isinstance(x, jax.ShapeDtypeStruct)
    variables = jax.tree.map(lambda x, new: new if is_new(x) else x, state.variables, variables)
    begin = lambda params: layout.optimizer.init(to_device(params))
    optimizer_state = jax.jit(begin, out_shardings=shardings.optimizer)(state.params)
    step = jax.jit(lambda: jnp.zeros((), jnp.int32), out_shardings=shardings.step)()
    return replace(state, step=step, optimizer=optimizer_state, variables=variables)
