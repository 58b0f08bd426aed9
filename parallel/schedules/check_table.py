"""Checks of a table that somebody wrote: `check_table`."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from hfjax.parallel.schedules.table import StageMap, Table, Task, dependencies
from hfjax.utils.tables import align


def check_table(table: Table) -> Table:
    """Return the table; raise ValueError, with the faulty cell marked, if it cannot run.

    Every task must be there once, on its own stage, with messages between neighbours only and every
    input in time. `hfjax.parallel.schedules.compile` ensures that no message and no stored value is
    overwritten.
    """
    if problem := stage_map_fault(table.stage_map, table.stages):
        message, virtual = problem
        cells = [(tick, stage) for task, tick, stage in table.tasks() if task.virtual == virtual]
        raise (
            table_error(table, *cells[0], message)
            if cells
            else ValueError(f"{table.name}: {message}")
        )
    check_complete(table)
    check_order(table)
    return table


def stage_map_fault(stage_map: StageMap, stages: int) -> tuple[str, int] | None:
    """Return what is wrong with a stage map, and a virtual stage that shows it; None: nothing."""
    virtual_of_stage = [
        [g for g, (home, _) in enumerate(stage_map) if home == stage] for stage in range(stages)
    ]
    chunks = list(range(len(stage_map) // stages))
    for stage, virtuals in enumerate(virtual_of_stage):
        if sorted(stage_map[g][1] for g in virtuals) != chunks:
            message = (
                f"{len(stage_map)} virtual stages on {stages} stages are {len(chunks)} for "
                f"each stage, found {len(virtuals)} on stage {stage}. Give every stage as many."
            )
            return message, (virtuals or [0])[-1]
    for g, ((source, _), (target, _)) in enumerate(pairwise(stage_map)):
        if (target - source) % stages not in (0, 1, stages - 1):
            message = (
                f"virtual stage {g} is on stage {source}, the next one on stage {target}: "
                "messages go between neighbours only (the last stage and stage 0 are "
                f"neighbours). Put {g + 1} on stage {source}, {(source + 1) % stages} or "
                f"{(source - 1) % stages}."
            )
            return message, g + 1
    return None


def check_complete(table: Table) -> None:
    """Refuse a table in which a task is missing, is there twice, or is on the wrong stage."""
    positions: dict[Task, tuple[int, int]] = {}
    for task, tick, stage in table.tasks():
        if problem := _placement_fault(table, task, stage, positions):
            raise table_error(table, tick, stage, f"{table.task_name(task)} {problem}")
        positions[task] = (tick, stage)
    for task in _expected_tasks(table):
        if task not in positions:
            raise _missing_error(table, task, positions)


def _placement_fault(
    table: Table, task: Task, stage: int, seen_positions: dict[Task, tuple[int, int]]
) -> str:
    """Return why a task cannot be where it is; nothing if it can."""
    if task.microbatch >= table.microbatches:
        return f"is of microbatch {task.microbatch}, of {table.microbatches}. Remove it."
    if (home := table.stage_map[task.virtual][0]) != stage:
        return f"is on stage {stage}, virtual stage {task.virtual} on {home}. Move it."
    if task in seen_positions:
        return f"is here a second time, first in tick {seen_positions[task][0]}. Remove one."
    return ""


def _expected_tasks(table: Table) -> Iterator[Task]:
    kinds = "F" + "B" * table.trains + "W" * table.splits_backward
    for m in range(table.microbatches):
        for kind in kinds:
            yield from (Task(kind, g, m) for g in range(table.virtual))


def _missing_error(table: Table, task: Task, positions: dict[Task, tuple[int, int]]) -> ValueError:
    """Return the error, marking a task that comes before or after the missing one, or any."""
    waits_for_task = lambda other: any(
        need == task for need, _ in dependencies(other, table.virtual)
    )
    before = [need for need, _ in dependencies(task, table.virtual) if need in positions]
    after = [other for other in positions if waits_for_task(other)]
    hint = f", after {table.task_name(before[0])} (marked)" if before else ""
    if after and not before:
        hint = f", before {table.task_name(after[0])} (marked)"
    message = (
        f"{table.task_name(task)} is missing. Add it to stage "
        f"{table.stage_map[task.virtual][0]}{hint}."
    )
    return table_error(table, *positions[[*before, *after, *positions][0]], message)


def check_order(table: Table) -> None:
    """Refuse a task whose input is not there yet, and a tick in which no stage works."""
    times = table.times()
    for task, tick, stage in table.tasks():
        for need, wait in dependencies(task, table.virtual):
            if times[need] > tick - wait:
                message = (
                    f"{table.task_name(task)} in tick {tick} needs {table.task_name(need)}, which "
                    f"runs in tick {times[need]}. Move it to tick {times[need] + wait} or later."
                )
                raise table_error(table, tick, stage, message)
    idle_ticks = np.flatnonzero((table.cells < 0).all(axis=(1, 2)))
    if len(idle_ticks):
        message = f"nobody works in tick {idle_ticks[0]}. Remove the tick."
        raise table_error(table, int(idle_ticks[0]), 0, message)


def table_error(table: Table, tick: int, stage: int, message: str) -> ValueError:
    """Return the error with its message above the part of the grid around the marked cell."""
    ticks = range(max(0, tick - 4), min(table.ticks, tick + 4))
    grid = [[""] + [str(t) for t in ticks]]
    for s in range(table.stages):
        cells = [table.cell_text(t, s) for t in ticks]
        if s == stage:
            cells[ticks.index(tick)] = f">{cells[ticks.index(tick)]}<"
        grid.append([f"stage {s}", *cells])
    return ValueError("\n  ".join([f"{table.name}: {message}", *align(grid, justify=str.center)]))
