"""Schedules whose model goes round and round the stages, in one round (chunks=1) or several.

The combined ones run a forward and a backward (and weights) slot side by side in every tick, on all
stages, without a branch; the others run one task per stage and tick.
"""

from itertools import accumulate, pairwise

from hfjax.parallel.lanes import Cell, Lane, Order, lane_of, lay_out, with_weights
from hfjax.parallel.schedule import Homes, Table, Task


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
    """A forward and a backward in every tick, no branches (1F1B, combined)."""
    return _combined("1f1b", stages, microbatches, chunks)


def interleaved(stages: int, microbatches: int, chunks: int) -> Table:
    """1f1b with more chunks: the bubble divided by them (Narayanan et al. 2021)."""
    return _combined("interleaved", stages, microbatches, chunks)


def zero_bubble(stages: int, microbatches: int, chunks: int) -> Table:
    """1f1b or interleaved with a weights slot in every tick (after Qi et al. 2023)."""
    return with_weights(_combined("zb", stages, microbatches, chunks), "zb")


def one_f_one_b_half(stages: int, microbatches: int, chunks: int) -> Table:
    """A forward or a backward in a tick: the memory of 1F1B (PipeDream-flush)."""
    return _alternating("1f1b-half", stages, microbatches, chunks)


def pipedream(stages: int, microbatches: int, chunks: int) -> Table:
    """1f1b-half, a stage updates after every backward: stale weights (Narayanan et al. 2019)."""
    return _alternating("pipedream", stages, microbatches, chunks)


def two_versions(stages: int, microbatches: int, chunks: int) -> Table:
    """1f1b-half, updates by groups of microbatches, one group late (PipeDream-2BW, 2021)."""
    return _alternating("2bw", stages, microbatches, chunks)


def interleaved_half(stages: int, microbatches: int, chunks: int) -> Table:
    """A forward or a backward in a tick, interleaved as in Megatron-LM."""
    return _alternating("interleaved-half", stages, microbatches, chunks)


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
