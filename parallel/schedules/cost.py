"""What a table costs, before anything runs: time, bubble, memory and messages.

Times are in units of the caller; `forward` and `backward` are those of all the chunks of one stage
for one microbatch, `weights` is the part of `backward` that the W slot runs in a split table.
"""

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

import numpy as np

from hfjax.parallel.schedules.compile import (
    LINK_NAMES,
    PHASES,
    WRITES,
    Ticks,
    compile_table,
    find_segments,
    link_between,
)
from hfjax.parallel.schedules.table import KINDS, Table, Task, dependencies

compile_cached = lru_cache(maxsize=1)(compile_table)
# Which of the slots F, B and W are busy, by the number that says so in bits.
BUSY_SLOTS = np.array([[number >> slot & 1 for slot in range(3)] for number in range(8)], bool)
TIME_MODELS = ("lockstep", "neighbour", "free")


def cost(
    table: Table,
    forward: float = 1,
    backward: float = 2,
    weights: float = 1,
    model: str = "lockstep",
) -> float:
    """Return the time of a table.

    `lockstep` is what the executor does: a tick ends for all stages at once, after every slot in
    use where there are no branches, after the busiest stage where there are. `neighbour`: a stage
    waits for itself and its two neighbours only. `free`: for the inputs of its next tick only.

    >>> from hfjax.parallel.schedules.named import Schedule
    >>> cost(Schedule("1f1b", microbatches=16).table(stages=4))  # (16 + 4 - 1) * (1 + 2)
    57.0
    """
    if model not in TIME_MODELS:
        raise ValueError(f"model={model!r}: one of {', '.join(TIME_MODELS)}.")
    task_times = _task_times(table, forward, backward, weights)
    if model == "lockstep":
        return _lockstep_time(table, task_times)
    durations = _durations(table, task_times)
    return (
        _free_time(table, durations) if model == "free" else _neighbour_time(durations.sum(axis=2))
    )


def start_times(
    table: Table, forward: float = 1, backward: float = 2, weights: float = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Return when each slot starts and how long it takes, in lockstep: [ticks, stages, slots]."""
    durations = _durations(table, _task_times(table, forward, backward, weights))
    ticks = durations.sum(axis=2).max(axis=1)
    begins = np.cumsum(ticks) - ticks
    return begins[:, None, None] + durations.cumsum(axis=2) - durations, durations


def _durations(table: Table, task_times: np.ndarray) -> np.ndarray:
    """Return how long each slot of each stage takes, whether it has a task or is masked."""
    busy = table.cells >= 0
    if not table.branches:
        busy = np.broadcast_to(busy.any(axis=1, keepdims=True), busy.shape)
    return busy * task_times


def _lockstep_time(table: Table, task_times: np.ndarray) -> float:
    """Return the time in lockstep: ticks in which the same slots are busy take equally long."""
    longest = (BUSY_SLOTS * task_times).sum(axis=1)
    sets, set_of_tick = _busy_sets(table)
    set_times = np.array([longest[list(busy)].max() for busy in sets])
    return float(set_times[set_of_tick].sum())


@lru_cache(maxsize=2048)
def _busy_sets(table: Table) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """Return the distinct sets of busy slots (as bits) of the stages of a tick; each tick's set.

    Without branches all stages run what one of them does.
    """
    bits = (table.cells >= 0) << np.arange(len(KINDS))
    bits_by_stage = np.bitwise_or.reduce(bits, axis=2)
    if not table.branches:
        bits_by_stage = np.bitwise_or.reduce(bits_by_stage, axis=1, keepdims=True)
    busy_by_tick = np.bitwise_or.reduce(1 << bits_by_stage, axis=1)
    sets, set_of_tick = np.unique(busy_by_tick, return_inverse=True)
    return [
        tuple(busy for busy in range(8) if set_bits >> busy & 1) for set_bits in sets.tolist()
    ], set_of_tick


def _task_times(table: Table, forward: float, backward: float, weights: float) -> np.ndarray:
    """Return the time of one task of each kind."""
    times = np.array((forward, backward, weights), float)
    if not np.isfinite(times).all() or times.min() < 0 or forward + backward <= 0:
        raise ValueError(
            f"forward={forward}, backward={backward}, weights={weights}: times are finite numbers, "
            "none negative, and those of forward and backward not both zero."
        )
    if table.splits_backward and weights > backward:
        raise ValueError(
            f"weights={weights} is part of backward={backward}: give at most {backward}."
        )
    kind_times = (
        (forward, backward - weights, weights) if table.splits_backward else (forward, backward, 0)
    )
    return np.array(kind_times, float) / table.chunks


def _neighbour_time(durations: np.ndarray) -> float:
    ends = np.zeros(durations.shape[1])
    for duration in durations:
        ends = np.maximum(ends, np.maximum(np.roll(ends, 1), np.roll(ends, -1))) + duration
    return float(ends.max())


def _free_time(table: Table, durations: np.ndarray) -> float:
    """Return the time if a stage begins a tick as soon as the inputs of its tasks are there.

    As in the executor its slots run one after another, no F overlaps a B, and a forward's message
    leaves after its slot.
    """
    cells: dict[tuple[int, int], list[Task]] = {}
    for task, tick, stage in table.tasks():
        cells.setdefault((tick, stage), []).append(task)
    ends, ready_times = np.zeros(table.stages), dict[Task, float]()
    for tick, stage in np.ndindex(durations.shape[:2]):
        tasks = cells.get((tick, stage), [])
        inputs = {need for task in tasks for need, _ in dependencies(task, table.virtual)}
        begin = max([ends[stage], *(ready_times[need] for need in inputs.difference(tasks))])
        ends[stage] = begin + durations[tick, stage].sum()
        first = begin + durations[tick, stage, 0]
        ready_times |= {task: first if task.kind == "F" else ends[stage] for task in tasks}
    return float(ends.max())


def bubble(
    table: Table,
    forward: float = 1,
    backward: float = 2,
    weights: float = 1,
    model: str = "lockstep",
) -> float:
    """Return the fraction of the time in which a stage does no useful work, 0 to 1.

    >>> from hfjax.parallel.schedules.named import Schedule
    >>> round(bubble(Schedule("1f1b", microbatches=16).table(stages=4)), 3)  # 3 of 19
    0.158
    """
    work = table.microbatches * (forward + backward * table.trains)
    return 1 - work / cost(table, forward, backward, weights, model)


def stash(table: Table) -> tuple[float, ...]:
    """Return for how many microbatches each stage keeps activations at most, in whole stages.

    They are kept from F to the last task that reads them: B, or W in a split table.

    >>> from hfjax.parallel.schedules.named import Schedule
    >>> stash(Schedule("1f1b-published", microbatches=16).table(stages=4))
    (4.0, 3.0, 2.0, 1.0)
    """
    if not table.trains:
        return (0.0,) * table.stages
    times, last = table.times(), "W" if table.splits_backward else "B"
    changes = np.zeros((table.ticks + 1, table.stages), int)
    for task, tick, stage in table.tasks():
        if task.kind == "F":
            changes[tick, stage] += 1
            changes[times[task._replace(kind=last)] + 1, stage] -= 1
    return tuple((changes.cumsum(axis=0).max(axis=0) / table.chunks).tolist())


def b_to_w_stash(table: Table) -> tuple[float, ...]:
    """Return for how many microbatches each stage can keep what W needs of B, in whole stages.

    These are slots of the executor's buffer `b_to_w`; only a split table has any.

    >>> from hfjax.parallel.schedules.named import Schedule
    >>> b_to_w_stash(Schedule("zb-h1", microbatches=16).table(stages=4))
    (1.0, 2.0, 3.0, 4.0)
    """
    columns = [
        compile_cached(table).columns[name] for name, into in WRITES.items() if into == "b_to_w"
    ]
    slots = np.stack(columns).max(axis=(0, 1)) + 1
    return tuple((slots / table.chunks).tolist())


def messages(table: Table) -> dict[tuple[int, int], int]:
    """Return how many messages each stage needs from each other one, in stage order.

    >>> from hfjax.parallel.schedules.named import Schedule
    >>> messages(Schedule("1f1b", microbatches=16).table(stages=3))
    {(0, 1): 16, (1, 0): 16, (1, 2): 16, (2, 1): 16}
    """
    counts = Counter()
    for task, _, stage in table.tasks():
        for need, _ in dependencies(task, table.virtual):
            source = table.stage_map[need.virtual][0]
            counts[source, stage] += source != stage
    return {link: count for link, count in sorted(counts.items()) if count}


def count_permutes(table: Table) -> int:
    """Return how many collective-permutes the program has, per array that layers pass on.

    Each tick of a segment sends on every link that the segment uses, needed or not.

    >>> from hfjax.parallel.schedules.named import Schedule
    >>> count_permutes(Schedule("1f1b", microbatches=16).table(stages=4))  # 2 (16 + 4 - 1)
    38
    """
    return sum(count for _, _, count in list_permutes(compile_cached(table)))


def list_permutes(ticks: Ticks) -> Iterator[tuple[str, int, int]]:
    """Yield kind, link and count of the permutes of a program, segment by segment."""
    for start, end, _ in ticks.segments:
        for kind, link in ticks.messages:
            is_later = kind != "B"  # B's message is sent at the start of the next tick
            if link and ticks.has_arrivals(kind, link, start + is_later, end + is_later):
                yield kind, link, end - start


def sent_messages(table: Table) -> dict[tuple[int, int], int]:
    """Return how many messages each stage sends each other one, needed or not, in stage order."""
    ticks, counts = compile_cached(table), Counter()
    for kind, link, count in list_permutes(ticks):
        for pair in ticks.route(kind, link):
            counts[pair] += count
    return dict(sorted(counts.items()))


def compile_outline(table: Table) -> Ticks:
    """Return a compiled table without its columns, with only the ring buffers stash and b_to_w.

    Predictions need no more. It is a tenth of the work of `compile_table`; the table is one that a
    schedule built, and is not checked again.

    >>> from hfjax.parallel.schedules.named import Schedule
    >>> compile_outline(Schedule("1f1b", microbatches=8).table(stages=4)).depth
    {'stash': 7, 'b_to_w': 0}
    """
    forward, backward, weights = _task_ticks(table)
    depth = {"stash": 0, "b_to_w": 0}
    if table.trains:
        depth["stash"] = _count_slots(table, "F", forward, "B", backward)
    if table.splits_backward:
        depth["b_to_w"] = _count_slots(table, "B", backward, "W", weights)
    arrivals = {"F": _find_arrivals(table, "F", forward), "B": _find_arrivals(table, "B", backward)}
    return Ticks(table, {}, depth, find_segments(table), arrivals)


def _task_ticks(table: Table) -> np.ndarray:
    """Return the tick of each task: [kinds, virtual stages, microbatches]; -1: there is none."""
    ticks = np.full((len(KINDS), table.virtual, table.microbatches), -1)
    tick, stage, slot = np.nonzero(table.cells >= 0)
    microbatch, virtual = np.divmod(table.cells[tick, stage, slot], table.virtual)
    ticks[slot, virtual, microbatch] = tick
    return ticks


def _count_slots(
    table: Table, write: str, write_ticks: np.ndarray, read: str, read_ticks: np.ndarray
) -> int:
    """Return the number of slots of a buffer that one phase writes: the values alive at once.

    It is one more if an idle stage runs the phase while all of its slots are taken.
    """
    stage = np.broadcast_to(
        np.array([stage_of for stage_of, _ in table.stage_map])[:, None], write_ticks.shape
    )
    changes = np.zeros((table.ticks * 5 + 1, table.stages), int)
    np.add.at(changes, (write_ticks * 5 + PHASES[write], stage), 1)
    np.add.at(changes, (read_ticks * 5 + PHASES[read] + 1, stage), -1)
    alive = changes.cumsum(axis=0)
    peak, has_task = int(alive.max()), table.cells[:, :, KINDS.index(write)] >= 0
    idle = has_task.any(axis=1, keepdims=True) & ~has_task & (not table.branches)
    return peak + bool((idle & (alive[PHASES[write] : -1 : 5] == peak)).any())


def _find_arrivals(table: Table, kind: str, made_ticks: np.ndarray) -> dict[int, np.ndarray]:
    """Return in which ticks messages of a kind arrive, by link."""
    arrivals = {hop: np.zeros(table.ticks, bool) for hop in LINK_NAMES}
    pairs = pairwise(range(table.virtual))
    for source, target in pairs if kind == "F" else ((b, a) for a, b in pairs):
        if (made_ticks[source] >= 0).all():
            arrivals[link_between(table, source, target)][made_ticks[source] + 1] = True
    return arrivals
