"""The functions that build the named schedules.

Looped schedules: the model goes round the stages once (chunks=1) or several times. Combined ones
run a forward and a backward (and weights) slot side by side in every tick, on all stages; the
others run one task per stage and tick.

Schedules on a V: the model goes down the stages and up again, two chunks on each stage. Stage 0
holds the first and the last chunk, so the loss is computed where the model begins.
"""

from collections import Counter
from collections.abc import Callable
from itertools import accumulate, pairwise

from hfjax.parallel.schedules.lay_out import Cell, Lane, add_weight_slots, lay_out, make_lane
from hfjax.parallel.schedules.table import StageMap, Table, Task


def loop_stage_map(stages: int, chunks: int) -> StageMap:
    """Return the stage map that goes round the stages `chunks` times.

    >>> loop_stage_map(2, 2)
    ((0, 0), (1, 0), (0, 1), (1, 1))
    """
    return tuple((g % stages, g // stages) for g in range(stages * chunks))


def _split_rounds(microbatches: int, stages: int) -> list[range]:
    """Return the microbatches in rounds of at least `stages`, as even as possible.

    Stages would wait for the next chunk with shorter rounds, and with a longer after a shorter one.

    >>> _split_rounds(10, 4)
    [range(0, 5), range(5, 10)]
    """
    rounds = max(1, microbatches // stages)
    shortest, longer = divmod(microbatches, rounds)
    edges = accumulate((shortest + (i < longer) for i in range(rounds)), initial=0)
    return [range(first, end) for first, end in pairwise(edges)]


def _loop_lanes(stages: int, chunks: int, rounds: list[range]) -> list[list[Lane]]:
    """Return the forward and backward lanes of each stage: round by round, chunk by chunk."""
    forward = [(c, m) for round_ in rounds for c in range(chunks) for m in round_]
    backward = [(chunks - 1 - c, m) for c, m in forward]
    kinds = (("F", forward), ("B", backward))
    to_virtual = lambda order, stage: [(c * stages + stage, m) for c, m in order]
    return [[make_lane(kind, to_virtual(order, s)) for kind, order in kinds] for s in range(stages)]


def build_1f1b(name: str, stages: int, microbatches: int, chunks: int) -> Table:
    """Forward and backward slots side by side; both in rounds (Megatron-LM's interleaved order)."""
    lanes = _loop_lanes(stages, chunks, _split_rounds(microbatches, stages))
    return lay_out(name, loop_stage_map(stages, chunks), lanes)


def build_gpipe(name: str, stages: int, microbatches: int, chunks: int) -> Table:
    """All forwards, then all backwards."""
    lanes = _loop_lanes(stages, chunks, [range(microbatches)])
    return lay_out(
        name,
        loop_stage_map(stages, chunks),
        [[[*forward, *backward]] for forward, backward in lanes],
    )


def build_zero_bubble(
    build: Callable, name: str, stages: int, microbatches: int, chunks: int
) -> Table:
    """A combined schedule with a weights slot in every tick."""
    return add_weight_slots(build(name, stages, microbatches, chunks))


def build_alternating_1f1b(name: str, stages: int, microbatches: int, chunks: int) -> Table:
    """A forward or a backward in a tick, alternating once enough forwards have run."""
    rounds = _split_rounds(microbatches, stages)
    lanes = []
    for stage, (forward, backward) in enumerate(_loop_lanes(stages, chunks, rounds)):
        ahead = stages - 1 - stage
        if chunks > 1:
            ahead = 2 * ahead + (chunks - 1) * max(map(len, rounds))
        lanes.append([_alternate(forward, backward, ahead)])
    return lay_out(name, loop_stage_map(stages, chunks), lanes, branches=True)


def _alternate(forward: Lane, backward: Lane, ahead: int) -> Lane:
    """Return `ahead` forwards, then alternating forwards and backwards, then the backwards left."""
    ahead = min(ahead, len(forward))
    pairs = zip(forward[ahead:], backward, strict=False)
    steady = [cell for pair in pairs for cell in pair]
    return [*forward[:ahead], *steady, *backward[len(forward) - ahead :]]


def build_zb_h(times: int, name: str, stages: int, microbatches: int, chunks: int) -> Table:
    """Zero bubble with one chunk per stage, and `times` the stash of 1F1B."""
    make_stage_lane = lambda s: _zb_h_lane(s, microbatches, times * (stages - 1 - s), times * s)
    lanes = [[make_stage_lane(stage)] for stage in range(stages)]
    return lay_out(name, loop_stage_map(stages, chunks), lanes, branches=True)


def _zb_h_lane(stage: int, microbatches: int, ahead: int, behind: int) -> Lane:
    """Return 1F1B with each W `behind` backwards late, and the remaining W in the drain."""
    task = lambda kind, m: (Task(kind, stage, m),)
    lane: list[Cell] = [task("F", m) for m in range(min(ahead, microbatches))]
    for m in range(microbatches):
        lane += [task("F", m + ahead)] if m + ahead < microbatches else []
        lane += [task("B", m)]
        lane += [task("W", m - behind)] if m >= behind else []
    return [*lane, *(task("W", m) for m in range(max(0, microbatches - behind), microbatches))]


def v_stage_map(stages: int) -> StageMap:
    """Return the stage map that goes down the stages and up again: two chunks on each.

    >>> v_stage_map(2)
    ((0, 0), (1, 0), (1, 1), (0, 1))
    """
    return (*((s, 0) for s in range(stages)), *((s, 1) for s in reversed(range(stages))))


def build_v_combined(name: str, stages: int, microbatches: int, chunks: int) -> Table:
    """Forward and backward slots side by side, on a V."""
    last = 2 * stages - 1
    lanes = []
    for mine in ((stage, last - stage) for stage in range(stages)):
        order = [(g, m) for g in mine for m in range(microbatches)]
        forward = sorted(order, key=lambda task: 2 * task[1] + task[0])
        backward = sorted(order, key=lambda task: 2 * task[1] - task[0])
        lanes.append([make_lane("F", forward), make_lane("B", backward)])
    return lay_out(name, v_stage_map(stages), lanes)


class _VLane:
    """The cells of one stage, written step by step."""

    def __init__(self, stage: int, stages: int) -> None:
        self.virtual_stages = (
            stage,
            2 * stages - 1 - stage,
        )  # the virtual stages of chunk 0 and chunk 1
        self.count: Counter[tuple[str, int]] = Counter()
        self.pending_weights: list[int] = []  # chunks whose W is deferred, the oldest first
        self.cells: list[Cell] = []

    def add(self, times: int, *cells: str) -> None:
        """Add cells several times, e.g. `add(2, "F0+B1", "W")`.

        I is a B whose W is deferred, W the oldest deferred one.
        """
        for cell in cells * times:
            self.cells.append(tuple(task for work in cell.split("+") for task in self._tasks(work)))

    def _tasks(self, work: str) -> list[Task]:
        if work == "W":
            return [self._next("W", self.pending_weights.pop(0))]
        kind, chunk = work[0], int(work[1])
        if kind == "B":
            return [self._next("B", chunk), self._next("W", chunk)]
        if kind == "I":
            self.pending_weights.append(chunk)
        return [self._next({"I": "B"}.get(kind, kind), chunk)]

    def _next(self, kind: str, chunk: int) -> Task:
        self.count[kind, chunk] += 1
        return Task(kind, self.virtual_stages[chunk], self.count[kind, chunk] - 1)

    def finish(self, microbatches: int) -> Lane:
        """Return the lane: with the deferred W at the end, without tasks of later microbatches."""
        self.add(len(self.pending_weights), "W")
        lane_cells = (tuple(t for t in cell if t.microbatch < microbatches) for cell in self.cells)
        return [cell for cell in lane_cells if cell]


def build_on_v(
    make_stage_lane: Callable, name: str, stages: int, microbatches: int, chunks: int
) -> Table:
    """A schedule on a V; `make_stage_lane` writes the lane of each stage."""
    lanes = [[make_stage_lane(stage, stages, microbatches)] for stage in range(stages)]
    return lay_out(name, v_stage_map(stages), lanes, branches=True)


def zb_v_lane(stage: int, stages: int, microbatches: int) -> Lane:
    """Return a stage of zero bubble on a V."""
    num_written = max(
        microbatches, 2 * stages - 1
    )  # fewer do not fill the V: write more, drop the surplus
    line, stages_below = _VLane(stage, stages), stages - 1 - stage
    line.add(2 * stages_below + 1, "F0")
    line.add(stage, "F1", "F0")
    line.add(stages_below + 1, "F1", "I1", "W")
    for step in range(num_written - stages):
        forward = ("F0",) if step < num_written - 2 * stages_below - 1 - stage else ()
        line.add(1, *forward, "I0", "W", "F1", "I1", "W")
    line.add(stage, "I0", "I1")
    line.add(stages_below + 1, "I0", "W")
    return line.finish(microbatches)


def dualpipe_v_lane(stage: int, stages: int, microbatches: int) -> Lane:
    """Return dualpipev.py's eight steps for 2 or more microbatches a stage; drop the surplus."""
    num_written = max(microbatches, 2 * stages)
    line, stages_below = _VLane(stage, stages), stages - 1 - stage
    line.add(2 * stages_below, "F0")  # 1
    line.add(stage + 1, "F0", "F1")  # 2
    line.add(stages_below, "I1", "W", "F1")  # 3
    for step in range(num_written - 2 * stages + stage + 1):  # 4, the main one: overlapped pairs
        is_separate = step == 0 and stages_below == 0
        line.add(1, *(("F0", "B1") if is_separate else ("F0+B1",)), "F1+B0")
    line.add(stages_below, "B1", "F1+B0")  # 5
    half = (stage + 1) // 2
    for step in range(stage + 1):  # 6: from the middle on, W is deferred
        splits_backward = step > half or (step == half and stage % 2)
        line.add(1, "I1" if splits_backward else "B1", "I0" if step >= half else "B0")
    line.add(stages_below, "W", "I0")  # 7; step 8, the remaining W, is what `finish` adds
    return line.finish(microbatches)
