"""Asynchronous pipelines: which version of the weights each task uses, as columns of a 1F1B table.

Version u of a stage is its weights after u updates. An update comes after the B slot of its tick.
"""

import numpy as np

from hfjax.parallel.schedules.table import Table, Versions


def weight_versions(table: Table, every: int = 1) -> Versions:
    """Return the versions of PipeDream (every=1), or of PipeDream-2BW (every > 1).

    PipeDream (Narayanan et al. 2019) updates after every backward; a microbatch runs forward with
    the latest weights of each stage, and backward with the same ones (weight stashing).

    PipeDream-2BW (Narayanan et al. 2021) updates after every `every` microbatches, from the mean
    of their gradients: W(t+1) = W(t) - lr * gradient(W(t-1)), with W(-1) = W(0). So microbatches
    of group k (from 0) use version max(0, k - 1) on all stages, and their update makes version
    k + 1 from version k: the staleness is 1, and two versions are enough.

    >>> from hfjax.parallel.schedules.named import Schedule
    >>> table = Schedule("1f1b-published", microbatches=16).table(stages=4)
    >>> weight_versions(table).slots, weight_versions(table, every=4).slots
    (4, 2)
    """
    numbers = np.where(table.cells < 0, -1, table.cells // table.virtual)
    forward, backward = numbers[:, :, 0], numbers[:, :, 1]
    _check(table, forward, backward, every)
    uses = _version_uses(forward, backward, every)
    stages = range(table.stages)
    slots = [_assign_slots({kind: use[:, s] for kind, use in uses.items()}) for s in stages]
    slot_arrays = [np.array([*slot, -1], np.int32) for slot in slots]  # version -1 -> slot -1
    columns = {
        f"{kind}_version": np.stack([slot_arrays[s][use[:, s]] for s in stages], axis=1)
        for kind, use in uses.items()
    }
    staleness = np.where(uses["B"] >= 0, uses["L"] - uses["B"], 0).max(axis=0)
    final = tuple(slot[-1] for slot in slots)
    return Versions(columns, 1 + max(map(max, slots)), final, tuple(staleness.tolist()))


def _version_uses(forward: np.ndarray, backward: np.ndarray, every: int) -> dict[str, np.ndarray]:
    """Return the columns as versions, 0, 1, 2 ..., not yet as slots."""
    updates, latest = _find_updates(backward, every)
    by_forward = latest if every == 1 else np.maximum(forward // every - 1, 0)
    by_forward = np.where(forward < 0, -1, by_forward)
    by_backward = np.full_like(by_forward, -1)
    for stage in range(forward.shape[1]):
        version_of = dict(zip(forward[:, stage], by_forward[:, stage], strict=True)) | {-1: -1}
        by_backward[:, stage] = [version_of[m] for m in backward[:, stage]]
    new_versions = np.where(updates, latest + 1, -1)
    return {"F": by_forward, "B": by_backward, "L": latest, "U": new_versions}


def _assign_slots(uses: dict[str, np.ndarray]) -> list[int]:
    """Return the slot of each version of a stage: the first that no live version occupies."""
    births = [-1, *np.flatnonzero(uses["U"] >= 0).tolist()]
    slots: list[int] = []
    ends: dict[int, float] = {}  # slot -> the tick after whose B slot it is free
    for version, born in enumerate(births):
        use_ticks = [np.flatnonzero(uses[kind] == version) for kind in ("F", "B", "L")]
        slot = next(i for i in range(len(births)) if ends.get(i, -1) <= born)
        is_latest = version == len(births) - 1
        ends[slot] = (
            np.inf if is_latest else max(int(ticks[-1]) for ticks in use_ticks if len(ticks))
        )
        slots.append(slot)
    return slots


def _find_updates(backward: np.ndarray, every: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where an update comes after the B slot, and the latest version before each tick."""
    updates = (backward >= 0) & (backward % every == every - 1)
    return updates, np.cumsum(updates, axis=0) - updates


def _is_ready(forward: np.ndarray, backward: np.ndarray, every: int) -> bool:
    """Return whether the version of every forward exists before its tick."""
    _, latest = _find_updates(backward, every)
    return every == 1 or bool((forward // every - 1 <= latest).all())


def _check(table: Table, forward: np.ndarray, backward: np.ndarray, every: int) -> None:
    is_ordered = all((np.diff(column[column >= 0]) > 0).all() for column in backward.T)
    if table.chunks > 1 or table.splits_backward or not table.trains or not is_ordered:
        raise ValueError(
            f"{table.name}: weight versions are for tables with one chunk on each stage, whole "
            "backwards and microbatches in order. Use 1f1b or 1f1b-published."
        )
    divides = [n for n in range(1, table.microbatches + 1) if table.microbatches % n == 0]
    if every not in divides:
        raise ValueError(
            f"every={every!r}: an update comes after a number of microbatches that divides "
            f"{table.microbatches}: one of {divides}."
        )
    if not _is_ready(forward, backward, every):
        fits = [n for n in divides if _is_ready(forward, backward, n)]
        raise ValueError(
            f"every={every}: under {table.name} with {table.stages} stages a group of microbatches "
            "begins before the update that it waits for, that of the group two before it. Update "
            f"after one of {fits}."
        )
