"""What schedules cost: the published formulas, for all sizes, and weight versions."""

from itertools import product

import numpy as np
import pytest

from hfjax.parallel.schedules.compile import compile_table
from hfjax.parallel.schedules.cost import (
    b_to_w_stash,
    bubble,
    compile_outline,
    cost,
    count_permutes,
    list_permutes,
    messages,
    sent_messages,
    start_times,
    stash,
)
from hfjax.parallel.schedules.named import SCHEDULES, Schedule
from hfjax.parallel.schedules.text import parse_table
from hfjax.parallel.schedules.versions import weight_versions

SIZES = list(product(range(1, 9), (1, 2, 3, 5, 7, 8, 12, 16, 17)))
F, B, W = 1.0, 2.25, 0.75  # unequal, to tell apart what a formula counts


def table(name: str, stages: int = 4, microbatches: int = 16, chunks: int | None = None):
    return Schedule(name, microbatches, chunks).table(stages)


# S=4, M=16, F=1, B=2 of which W=1: bubble in per cent; activations kept in whole stages, and what
# crosses from B to W; permutes. The table of docs/pipelines.md.
@pytest.mark.parametrize(
    ("name", "chunks", "percent", "kept", "w_residuals", "permuted"),
    [
        ("gpipe", 1, 15.8, 16, 0, 38),
        ("1f1b", 1, 15.8, 7, 0, 38),
        ("1f1b-published", 1, 33.3, 4, 0, 76),
        ("interleaved", 2, 8.6, 5.5, 0, 70),
        ("interleaved", 4, 4.5, 4.75, 0, 134),
        ("interleaved-published", 2, 27.3, 5.5, 0, 140),
        ("looped-bfs", 2, 8.6, 16, 0, 70),
        ("zb", 1, 11.1, 7, 4, 38),
        ("zb", 2, 5.9, 5.5, 2, 70),
        ("zb-h1", 1, 5.9, 4, 4, 102),
        ("zb-h2", 1, 5.9, 7, 7, 102),
        ("v", 2, 15.8, 4, 0, 152),
        ("v-zb", 2, 11.1, 4, 2, 146),
        ("zb-v", 2, 3.0, 4, 3.5, 198),
        ("dualpipe-v", 2, 11.1, 4.5, 2, 200),
    ],
)
def test_the_table_of_what_schedules_cost(name, chunks, percent, kept, w_residuals, permuted):
    schedule = table(name, chunks=chunks)
    assert round(100 * bubble(schedule), 1) == percent
    assert (max(stash(schedule)), max(b_to_w_stash(schedule))) == (kept, w_residuals)
    assert count_permutes(schedule) == permuted


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_outline_is_the_compiled_table_without_its_columns(name):
    """The planner asks outlines: slots of rings, segments and permutes are the executor's."""
    for stages, microbatches in ((1, 3), (2, 5), (3, 8), (4, 4), (5, 11)):
        for chunks in (None,) if SCHEDULES[name].fixed_chunks else (1, 2, 3):
            found = table(name, stages, microbatches, chunks)
            whole, short = compile_table(found), compile_outline(found)
            assert {ring: whole.depth[ring] for ring in short.depth} == short.depth
            assert (whole.segments, whole.links) == (short.segments, short.links)
            assert [*list_permutes(whole)] == [*list_permutes(short)]
            lengths = start_times(found, F, B, W)[1].sum(axis=2).max(axis=1)
            assert cost(found, F, B, W) == lengths.sum()


# The time over that of the work itself, from how many microbatches on, under which model.
@pytest.mark.parametrize(
    ("name", "chunks", "model", "least", "extra"),
    [
        ("gpipe", 1, "lockstep", lambda S: 1, lambda S: (S - 1) * (F + B)),
        ("1f1b", 1, "lockstep", lambda S: 1, lambda S: (S - 1) * (F + B)),
        ("1f1b-published", 1, "free", lambda S: 1, lambda S: (S - 1) * (F + B)),
        ("interleaved", 2, "lockstep", lambda S: S, lambda S: (S - 1) * (F + B) / 2),
        ("interleaved", 3, "lockstep", lambda S: S, lambda S: (S - 1) * (F + B) / 3),
        ("interleaved-published", 2, "free", lambda S: S, lambda S: (S - 1) * (F + B) / 2),
        ("looped-bfs", 3, "lockstep", lambda S: S, lambda S: (S - 1) * (F + B) / 3),
        ("zb", 1, "lockstep", lambda S: 1, lambda S: (S - 1) * (F + B - W)),
        ("zb", 2, "lockstep", lambda S: S, lambda S: (S - 1) * (F + B - W) / 2),
        ("zb-h1", 1, "free", lambda S: S, lambda S: (S - 1) * (F + B - 2 * W)),
        ("v", 2, "lockstep", lambda S: 1, lambda S: (S - 1) * (F + B)),
        ("v-zb", 2, "lockstep", lambda S: 1, lambda S: (S - 1) * (F + B - W)),
    ],
)
def test_the_bubble_is_that_of_the_formula(name, chunks, model, least, extra):
    for stages, microbatches in SIZES:
        if microbatches >= least(stages):
            found = cost(table(name, stages, microbatches, chunks), F, B, W, model)
            assert found == pytest.approx(microbatches * (F + B) + extra(stages)), stages


@pytest.mark.parametrize(("name", "chunks"), [("zb-h2", 1), ("zb-v", 2)])
def test_zero_bubble_schedules_never_rest_between_their_first_task_and_their_last(name, chunks):
    """At F = B = W: what is left is that stages begin one after another."""
    for stages, microbatches in SIZES:
        if microbatches < 2 * stages - 1:
            continue
        schedule = table(name, stages, microbatches)
        for stage in range(stages):
            busy = np.flatnonzero((schedule.cells[:, stage] >= 0).any(axis=1))
            assert busy[0] == stage
            assert len(busy) == busy[-1] - busy[0] + 1 == 3 * chunks * microbatches
        assert cost(schedule) == 3 * microbatches + (stages - 1) / chunks


def test_the_two_tasks_of_a_tick_run_one_after_another_and_the_forward_sends_first():
    """Whoever waits for its inputs only: on DualPipe's V 5.9 %, not 3.0 % as with an overlap."""
    assert bubble(table("dualpipe-v"), model="free") == pytest.approx(3 / 51)
    free = lambda text: cost(parse_table(text, branches=True), model="free")
    below = "\n 1F0 1B0 1F1 1B1"
    assert free("0F0 0F1 0B0 0B1" + below) == 1 + 1 + 2 + 1 + 2 + 2
    assert free("0F0 0F1+0B0 0B1" + below) == 1 + 1 + 2 + 1 + 1 + 2 + 2


def test_dualpipe_v_is_within_its_formula():
    """Its README: bubble (PP/2-1)(F&B + B - 3W), activations PP+1, of PP = 2 S chunks."""
    for stages, microbatches in SIZES:
        if microbatches >= 2 * stages:
            schedule = table("dualpipe-v", stages, microbatches)
            bound = microbatches * 3 + (stages - 1) * ((1 + 2) + 2 - 3) / 2
            assert cost(schedule, model="free") <= bound
            assert max(stash(schedule)) <= (2 * stages + 1) / 2


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("gpipe", lambda S, M, s: M),
        ("looped-bfs", lambda S, M, s: M),
        ("1f1b", lambda S, M, s: min(M, 2 * (S - 1 - s) + 1)),
        ("1f1b-published", lambda S, M, s: min(M, S - s)),
        ("zb-h1", lambda S, M, s: min(M, S)),
        ("zb-h2", lambda S, M, s: min(M, 2 * S - 1)),
        ("forward", lambda S, M, s: 0),
    ],
)
def test_stored_activations_are_those_of_the_formula(name, kept):
    for stages, microbatches in SIZES:
        found = stash(table(name, stages, microbatches))
        assert found == tuple(kept(stages, microbatches, s) for s in range(stages))


@pytest.mark.parametrize("name", ["v", "v-zb", "zb-v"])
def test_on_a_v_no_stage_keeps_more_than_1f1b_does(name):
    for stages, microbatches in SIZES:
        assert max(stash(table(name, stages, microbatches))) <= min(stages, microbatches)


def test_a_split_backward_keeps_what_crosses_in_the_slots_of_the_executor():
    for name, kept in (("zb-h1", (1, 2, 3, 4)), ("zb-v", (0.5, 1.5, 2.5, 3.5)), ("1f1b", (0,) * 4)):
        assert b_to_w_stash(table(name)) == kept
        column = compile_table(table(name)).columns["B_b_to_w"]
        assert tuple((column.max(axis=0) + 1) / table(name).chunks) == kept


def test_to_wait_for_less_is_never_slower():
    for name in SCHEDULES:
        schedule = table(name)
        free, neighbour, lockstep = (
            cost(schedule, F, B, W, model) for model in ("free", "neighbour", "lockstep")
        )
        assert 16 * (F + B * schedule.trains) <= free + 1e-9
        assert free <= neighbour + 1e-9
        assert neighbour <= lockstep + 1e-9


def test_messages_are_counted_per_link():
    assert messages(table("1f1b", 3, 5)) == {(0, 1): 5, (1, 0): 5, (1, 2): 5, (2, 1): 5}
    looped = messages(table("interleaved", 3, 6, 2))  # back to stage 0 for the second chunk
    assert looped == {(0, 1): 12, (0, 2): 6, (1, 0): 12, (1, 2): 12, (2, 0): 6, (2, 1): 12}
    assert messages(table("zb-v", 3, 6)) == {link: 12 for link in ((0, 1), (1, 0), (1, 2), (2, 1))}
    assert messages(table("interleaved", 1, 6, 2)) == {}
    assert (
        sent_messages(table("interleaved", 1, 6, 2)),
        count_permutes(table("interleaved", 1, 6, 2)),
    ) == ({}, 0)


def test_sent_is_every_tick_of_a_link_needed_or_not():
    assert sent_messages(table("1f1b", 3, 5)) == dict.fromkeys(((0, 1), (1, 0), (1, 2), (2, 1)), 7)
    for name in SCHEDULES:
        needed, all_sent = messages(table(name)), sent_messages(table(name))
        assert needed.keys() == all_sent.keys()
        assert all(all_sent[link] >= count for link, count in needed.items())
        of_middle = sum(count for (here, _), count in all_sent.items() if here == 1)
        assert of_middle == count_permutes(table(name)), name  # it has neighbours on both sides


def test_times_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="weights=3 is part of backward=2: give at most 2"):
        cost(table("zb"), 1, 2, 3)
    with pytest.raises(ValueError, match=r"forward=-1, .* none negative"):
        cost(table("1f1b"), -1, 2)
    for time in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"forward={time}, .*: times are finite numbers"):
            cost(table("1f1b"), time, 2)
    with pytest.raises(ValueError, match="model='fast': one of lockstep, neighbour, free"):
        cost(table("1f1b"), model="fast")


def versions_by_hand(schedule, every: int):
    """Yield kind, microbatch, tick, stage, version used and latest version of each task."""
    used, latest = {}, dict.fromkeys(range(schedule.stages), 0)
    for (kind, _, m), tick, stage in schedule.tasks():
        if kind == "F":
            used[stage, m] = latest[stage] if every == 1 else max(0, m // every - 1)
        yield kind, m, tick, stage, used[stage, m], latest[stage]
        latest[stage] += kind == "B" and (m + 1) % every == 0


@pytest.mark.parametrize(
    ("name", "every"),
    [("1f1b", 1), ("1f1b-published", 1), ("gpipe", 1), ("1f1b", 8), ("1f1b-published", 4)],
)
def test_every_task_finds_its_version_of_the_weights_in_the_slot_named(name, every):
    """PipeDream: the latest at the forward. 2BW: W(t+1) = W(t) - lr * gradient(W(t-1))."""
    for stages in range(1, 6):
        schedule = table(name, stages, 16)
        versions = weight_versions(schedule, every)
        columns = versions.columns
        rings = [[0, *[None] * (versions.slots - 1)] for _ in range(stages)]
        for kind, m, tick, stage, used, latest in versions_by_hand(schedule, every):
            ring = rings[stage]
            assert ring[columns[f"{kind}_version"][tick, stage]] == used
            assert ring[columns["L_version"][tick, stage]] == latest
            if kind == "B":
                slot = columns["U_version"][tick, stage]
                assert (slot >= 0) == (m % every == every - 1)
                ring[slot] = latest + 1 if slot >= 0 else ring[slot]
        assert (columns["U_version"] >= 0).sum() == stages * 16 // every
        assert [rings[s][slot] for s, slot in enumerate(versions.final)] == [16 // every] * stages


def test_pipedream_keeps_a_version_per_microbatch_in_flight_and_2bw_keeps_two():
    for stages in range(2, 8):
        half = weight_versions(table("1f1b-published", stages, 16))
        assert half.slots == stages
        assert half.staleness == tuple(stages - 1 - s for s in range(stages))
        assert weight_versions(table("1f1b", stages, 32)).slots == 2 * stages - 1
        two = weight_versions(table("1f1b-published", stages, 32), every=8)
        assert two.slots == 2
        assert two.staleness == (1,) * stages


@pytest.mark.parametrize(
    ("name", "every", "message"),
    [
        ("1f1b", 5, r"every=5: .* divides 16: one of \[1, 2, 4, 8, 16\]"),
        ("1f1b", 2, r"every=2: under 1f1b with 4 stages .* Update after one of \[1, 8, 16\]"),
        ("interleaved", 1, "one chunk on each stage, .* Use 1f1b or 1f1b-published"),
        ("zb-h1", 1, "whole backwards"),
    ],
)
def test_versions_that_cannot_be_are_refused(name, every, message):
    with pytest.raises(ValueError, match=message):
        weight_versions(table(name), every)
