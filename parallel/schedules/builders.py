"""The functions that build the named schedules.

Looped schedules: the model goes round the stages once (chunks=1) or several times. Combined ones
run a forward and a backward (and weights) slot side by side in every tick, on all stages; the
others run one task per stage and tick.

Schedules on a V: the model goes down the stages and up again, two chunks on each stage. Stage 0
holds the first and the last chunk, so the loss is computed where the model begins.
"""

from collections import Counter
from itertools import accumulate, pairwise

from hfjax.parallel.schedules.table import (
    Cell,
    Homes,
    Lane,
    Order,
    Table,
    Task,
    lane_of,
    lay_out,
    with_weights,
)


def loop(stages: int, chunks: int) -> Homes:
    """Return the placement that goes round and round the stages.

    >>> loop(2, 2)
    ((0, 0), (1, 0), (0, 1), (1, 1))
    """
    return tuple((g % stages, g // stages) for g in range(stages * chunks))


def _rounds(microbatches: int, stages: int) -> list[range]:
    """Return the microbatches in rounds of at least `stages`, as even as can be.

    Shorter rounds would let stages wait for the next chunk, a longer one after a shorter one too.

    >>> _rounds(10, 4)
    [range(0, 5), range(5, 10)]
    """
    rounds = max(1, microbatches // stages)
    least, longer = divmod(microbatches, rounds)
    edges = accumulate((least + (i < longer) for i in range(rounds)), initial=0)
    return [range(first, end) for first, end in pairwise(edges)]


def _looped(stage: int, stages: int, chunks: int, rounds: list[range]) -> tuple[Order, Order]:
    """Return the forward and backward orders of a stage: round by round, chunk by chunk."""
    forward = [(c, m) for turn in rounds for c in range(chunks) for m in turn]
    backward = [(chunks - 1 - c, m) for c, m in forward]
    place = lambda order: [(c * stages + stage, m) for c, m in order]
    return place(forward), place(backward)


def _combined(name: str, stages: int, microbatches: int, chunks: int) -> Table:
    """Forward and backward slots side by side; both in rounds (Megatron-LM's interleaved order)."""
    rounds = _rounds(microbatches, stages)
    orders = [_looped(stage, stages, chunks, rounds) for stage in range(stages)]
    lanes = [[lane_of("F", forward), lane_of("B", backward)] for forward, backward in orders]
    return lay_out(name, loop(stages, chunks), lanes)


def gpipe(stages: int, microbatches: int, chunks: int) -> Table:
    """All forwards, then all backwards (Huang et al. 2019)."""
    return _all_then_all("gpipe", stages, microbatches, chunks)


def looped_bfs(stages: int, microbatches: int, chunks: int) -> Table:
    """gpipe with more chunks, breadth first (Lamy-Poirier 2023)."""
    return _all_then_all("looped-bfs", stages, microbatches, chunks)


def _all_then_all(name: str, stages: int, microbatches: int, chunks: int) -> Table:
    lanes = []
    for stage in range(stages):
        forward, backward = _looped(stage, stages, chunks, [range(microbatches)])
        lanes.append([[*lane_of("F", forward), *lane_of("B", backward)]])
    return lay_out(name, loop(stages, chunks), lanes)


def one_f_one_b(stages: int, microbatches: int, chunks: int) -> Table:
    """A forward and a backward in every tick (1F1B, combined)."""
    return _combined("1f1b", stages, microbatches, chunks)


def interleaved(stages: int, microbatches: int, chunks: int) -> Table:
    """1f1b with more chunks: the bubble divided by them (Narayanan et al. 2021)."""
    return _combined("interleaved", stages, microbatches, chunks)


def zero_bubble(stages: int, microbatches: int, chunks: int) -> Table:
    """1f1b or interleaved with a weights slot in every tick (after Qi et al. 2023)."""
    return with_weights(_combined("zb", stages, microbatches, chunks), "zb")


def one_f_one_b_published(stages: int, microbatches: int, chunks: int) -> Table:
    """A forward or a backward in a tick: the memory of 1F1B (PipeDream-flush)."""
    return _alternating("1f1b-published", stages, microbatches, chunks)


def pipedream(stages: int, microbatches: int, chunks: int) -> Table:
    """Stages update after every backward, without a flush: stale weights (Narayanan 2019)."""
    return _alternating("pipedream", stages, microbatches, chunks)


def two_versions(stages: int, microbatches: int, chunks: int) -> Table:
    """Updates by groups of microbatches, one group late, without a flush (PipeDream-2BW, 2021)."""
    return _alternating("2bw", stages, microbatches, chunks)


def interleaved_published(stages: int, microbatches: int, chunks: int) -> Table:
    """A forward or a backward in a tick, interleaved as in Megatron-LM."""
    return _alternating("interleaved-published", stages, microbatches, chunks)


def _alternating(name: str, stages: int, microbatches: int, chunks: int) -> Table:
    rounds = _rounds(microbatches, stages)
    lanes = []
    for stage in range(stages):
        forward, backward = _looped(stage, stages, chunks, rounds)
        ahead = stages - 1 - stage
        if chunks > 1:
            ahead = 2 * ahead + (chunks - 1) * max(map(len, rounds))
        lanes.append([_alternate(lane_of("F", forward), lane_of("B", backward), ahead)])
    return lay_out(name, loop(stages, chunks), lanes, branches=True)


def _alternate(forward: Lane, backward: Lane, ahead: int) -> Lane:
    """Return `ahead` forwards, then forward and backward in turn, then the backwards left."""
    ahead = min(ahead, len(forward))
    pairs = zip(forward[ahead:], backward, strict=False)
    steady = [cell for pair in pairs for cell in pair]
    return [*forward[:ahead], *steady, *backward[len(forward) - ahead :]]


def zb_h1(stages: int, microbatches: int, chunks: int) -> Table:
    """Zero bubble, the stash of 1F1B; what W needs of B is kept besides (Qi et al. 2023)."""
    lanes = [[_delayed_weights(s, microbatches, stages - 1 - s, s)] for s in range(stages)]
    return lay_out("zb-h1", loop(stages, chunks), lanes, branches=True)


def zb_h2(stages: int, microbatches: int, chunks: int) -> Table:
    """zb-h1 with twice that stash: no stage rests once it has begun."""
    lanes = [
        [_delayed_weights(s, microbatches, 2 * (stages - 1 - s), 2 * s)] for s in range(stages)
    ]
    return lay_out("zb-h2", loop(stages, chunks), lanes, branches=True)


def _delayed_weights(stage: int, microbatches: int, ahead: int, behind: int) -> Lane:
    """Return 1F1B with the weights `behind` backwards late, and the rest of them in the drain."""
    task = lambda kind, m: (Task(kind, stage, m),)
    lane: list[Cell] = [task("F", m) for m in range(min(ahead, microbatches))]
    for m in range(microbatches):
        lane += [task("F", m + ahead)] if m + ahead < microbatches else []
        lane += [task("B", m)]
        lane += [task("W", m - behind)] if m >= behind else []
    return [*lane, *(task("W", m) for m in range(max(0, microbatches - behind), microbatches))]


def vee(stages: int) -> Homes:
    """Return the placement that goes down the stages and up again: two chunks on each.

    >>> vee(2)
    ((0, 0), (1, 0), (1, 1), (0, 1))
    """
    return (*((s, 0) for s in range(stages)), *((s, 1) for s in reversed(range(stages))))


def v_combined(stages: int, microbatches: int, chunks: int = 2) -> Table:
    """1f1b on a V: about half its memory."""
    last = 2 * stages - 1
    lanes = []
    for mine in ((stage, last - stage) for stage in range(stages)):
        order = [(g, m) for g in mine for m in range(microbatches)]
        forward = sorted(order, key=lambda task: 2 * task[1] + task[0])
        backward = sorted(order, key=lambda task: 2 * task[1] - task[0])
        lanes.append([lane_of("F", forward), lane_of("B", backward)])
    return lay_out("v", vee(stages), lanes)


def v_zero_bubble(stages: int, microbatches: int, chunks: int = 2) -> Table:
    """v with a weights slot in every tick."""
    return with_weights(v_combined(stages, microbatches), "v-zb")


class _Line:
    """The cells of one stage as they are written down, step by step."""

    def __init__(self, stage: int, stages: int) -> None:
        self.homes = (stage, 2 * stages - 1 - stage)  # the virtual stages of chunk 0 and chunk 1
        self.count: Counter[tuple[str, int]] = Counter()
        self.late: list[int] = []  # chunks whose weights wait, the oldest first
        self.cells: list[Cell] = []

    def run(self, *works: str) -> None:
        """Add one cell, e.g. `run("F0", "B1")`; I is a B whose weights wait, W the oldest."""
        self.cells.append(tuple(task for work in works for task in self._tasks(work)))

    def _tasks(self, work: str) -> list[Task]:
        if work == "W":
            return [self._next("W", self.late.pop(0))]
        kind, chunk = work[0], int(work[1])
        if kind == "B":
            return [self._next("B", chunk), self._next("W", chunk)]
        if kind == "I":
            self.late.append(chunk)
        return [self._next({"I": "B"}.get(kind, kind), chunk)]

    def _next(self, kind: str, chunk: int) -> Task:
        self.count[kind, chunk] += 1
        return Task(kind, self.homes[chunk], self.count[kind, chunk] - 1)

    def first(self, microbatches: int) -> Lane:
        """Return the weights that wait at the end, and no task of later microbatches."""
        while self.late:
            self.run("W")
        kept = (tuple(t for t in cell if t.microbatch < microbatches) for cell in self.cells)
        return [cell for cell in kept if cell]


def zb_v(stages: int, microbatches: int, chunks: int = 2) -> Table:
    """Zero bubble on a V; what W needs of B is kept besides (Qi et al. 2024)."""
    lanes = [[_zb_v(stage, stages, microbatches)] for stage in range(stages)]
    return lay_out("zb-v", vee(stages), lanes, branches=True)


def _zb_v(stage: int, stages: int, microbatches: int) -> Lane:
    written = max(microbatches, 2 * stages - 1)  # fewer do not fill the V: write them, drop them
    line, below = _Line(stage, stages), stages - 1 - stage
    for _ in range(2 * below + 1):
        line.run("F0")
    for _ in range(stage):
        line.run("F1")
        line.run("F0")
    for _ in range(below + 1):
        for work in ("F1", "I1", "W"):
            line.run(work)
    for step in range(written - stages):
        forward = ("F0",) if step < written - 2 * below - 1 - stage else ()
        for work in (*forward, "I0", "W", "F1", "I1", "W"):
            line.run(work)
    for _ in range(stage):
        line.run("I0")
        line.run("I1")
    for _ in range(below + 1):
        line.run("I0")
        line.run("W")
    return line.first(microbatches)


def dualpipe_v(stages: int, microbatches: int, chunks: int = 2) -> Table:
    """Forward and backward of two microbatches in one tick (DeepSeek's DualPipeV)."""
    lanes = [[_dualpipe_v(stage, stages, microbatches)] for stage in range(stages)]
    return lay_out("dualpipe-v", vee(stages), lanes, branches=True)


def _dualpipe_v(stage: int, stages: int, microbatches: int) -> Lane:
    """Return the eight steps of dualpipev.py; under two microbatches a stage the first of those."""
    written = max(microbatches, 2 * stages)
    line, below = _Line(stage, stages), stages - 1 - stage
    _fill(line, stage, below)
    for step in range(written - 2 * stages + stage + 1):  # 4, the main one: overlapped pairs
        apart = step == 0 and below == 0
        for cell in (("F0",), ("B1",)) if apart else (("F0", "B1"),):
            line.run(*cell)
        line.run("F1", "B0")
    for _ in range(below):  # 5
        line.run("B1")
        line.run("F1", "B0")
    _drain(line, stage, below)
    return line.first(microbatches)


def _fill(line: _Line, stage: int, below: int) -> None:
    for _ in range(2 * below):  # 1
        line.run("F0")
    for _ in range(stage + 1):  # 2
        line.run("F0")
        line.run("F1")
    for _ in range(below):  # 3
        for work in ("I1", "W", "F1"):
            line.run(work)


def _drain(line: _Line, stage: int, below: int) -> None:
    for step in range(stage + 1):  # 6: from the middle on, weights wait
        half = (stage + 1) // 2
        line.run("I1" if step > half or (step == half and stage % 2) else "B1")
        line.run("I0" if step >= half else "B0")
    for _ in range(below):  # 7; step 8, the weights left, is what `first` adds
        line.run("W")
        line.run("I0")
