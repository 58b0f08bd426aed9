"""Which steps are kept: a rule that never deletes the latest, and its work on real directories."""

import math
import sys

import pytest

import hfjax
from hfjax import RetentionPolicy
from hfjax.checkpoint.directory import discard, list_steps
from tests.small_checkpoint import same, saved, small_layout, state_at

LOSSES = {10: 5.0, 20: 1.0, 30: 4.0, 40: 2.0, 50: 3.0, 60: math.nan}


def kept(keep):
    return keep.kept({step: {"loss": loss} for step, loss in LOSSES.items()})


@pytest.mark.parametrize(
    ("keep", "steps"),
    [
        (RetentionPolicy(), [40, 50, 60]),
        (RetentionPolicy(latest=1), [60]),
        (RetentionPolicy(latest=None), [10, 20, 30, 40, 50, 60]),
        (RetentionPolicy(latest=1, every=20), [20, 40, 60]),
        (RetentionPolicy(latest=1, every=25), [30, 50, 60]),
        (RetentionPolicy(latest=1, every=1000), [60]),
        (RetentionPolicy(latest=1, best="loss"), [20, 60]),
        (RetentionPolicy(latest=1, best="loss", bests=2), [20, 40, 60]),
        (RetentionPolicy(latest=1, best="loss", highest=True), [10, 60]),
        (RetentionPolicy(latest=2, every=30, best="loss"), [20, 30, 50, 60]),
    ],
)
def test_a_step_stays_while_any_part_of_the_rule_wants_it(keep, steps):
    assert kept(keep) == steps


def test_deleting_step_by_step_keeps_what_the_rule_keeps_of_all():
    keep, there = RetentionPolicy(latest=2, every=25, best="loss"), {}
    for step, loss in LOSSES.items():
        there[step] = {"loss": loss}
        there = {step: there[step] for step in keep.kept(there)}
    assert list(there) == kept(keep)


@pytest.mark.slow
def test_steps_are_deleted_on_disk_also_by_a_run_that_goes_on(tmp_path):
    layout, keep = small_layout(), RetentionPolicy(latest=1, best="loss")
    for steps in ([1, 2, 3], [4, 5]):
        with hfjax.CheckpointManager(tmp_path, layout, keep=keep) as checkpoints:
            for step in steps:
                loss = {2: 0.5}.get(step, 1.0 + step)
                checkpoints.save(state_at(layout, step), metrics={"loss": loss})
    assert sorted(p.name for p in tmp_path.iterdir()) == [".deleted", "2", "5", "writer.lock"]
    assert not list((tmp_path / ".deleted").iterdir())


@pytest.mark.parametrize("wrong", [{"latest": 0}, {"every": -1}, {"bests": None}, {"latest": True}])
def test_a_rule_counts_in_positive_whole_numbers(wrong):
    with pytest.raises(ValueError, match="a positive whole number is expected"):
        RetentionPolicy(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"best": 1.5}, r"best=1.5\): the name of a metric, or None"),
        ({"best": True}, r"best=True\): the name of a metric, or None"),
        ({"best": ""}, r"best=''\): the name of a metric, or None"),
        ({"highest": "no"}, r"highest='no'\): true or false"),
        ({"highest": float("nan")}, r"highest=nan\): true or false"),
    ],
)
def test_a_rule_of_the_best_names_a_metric(wrong, message):
    with pytest.raises(ValueError, match=message):
        RetentionPolicy(**wrong)


def test_the_best_needs_its_metric(tmp_path):
    layout = small_layout()
    with hfjax.CheckpointManager(
        tmp_path, layout, keep=RetentionPolicy(best="loss")
    ) as checkpoints:
        with pytest.raises(ValueError, match="judges steps by a metric that was not given, found"):
            checkpoints.save(state_at(layout, 1), metrics={"accuracy": 1.0})


MOMENTS = [("check_is_ours", "before"), ("find_damage", "before"), ("find_damage", "after")]
MOMENTS += [("_load_arrays", "before"), ("_load_arrays", "after")]


@pytest.mark.parametrize(("moment", "when"), MOMENTS)
def test_where_a_run_deletes_the_step_that_is_read_a_later_one_is_read(
    tmp_path, monkeypatch, moment, when
):
    layout = saved(tmp_path, 1)
    deleting(monkeypatch, tmp_path, layout, f"hfjax.checkpoint.restoring.{moment}", when)
    restored = hfjax.restore(tmp_path, layout, on_damage="previous")
    read_by_then = (moment, when) == ("_load_arrays", "after")
    assert restored.step == (1 if read_by_then else 2)
    assert restored.damaged == ()
    assert same(restored.state, state_at(layout, restored.step, restored.step))


@pytest.mark.parametrize("moment", ["find_damage", "_load_arrays"])
def test_a_step_that_was_asked_for_and_is_deleted_meanwhile_is_told_so(
    tmp_path, monkeypatch, moment
):
    layout = saved(tmp_path, 1)
    deleting(monkeypatch, tmp_path, layout, f"hfjax.checkpoint.restoring.{moment}", "before")
    with pytest.raises(ValueError, match=r"step 1 of \S+ was deleted while it was read: .* 2\."):
        hfjax.restore(tmp_path, layout, 1)


def test_what_is_recorded_of_a_step_that_is_deleted_is_that_of_a_later_one(tmp_path, monkeypatch):
    layout = saved(tmp_path, 1)
    place = "hfjax.checkpoint.checkpoints.read_record"
    deleting(monkeypatch, tmp_path, layout, place, "before")
    assert hfjax.checkpoint_metadata(tmp_path)["step"] == 2
    deleting(monkeypatch, tmp_path, layout, place, "before")
    with pytest.raises(ValueError, match=r"step 2 of \S+ was deleted while it was read: .* 3\."):
        hfjax.checkpoint_metadata(tmp_path, 2)


def deleting(monkeypatch, directory, layout, place, when):
    """Let a run save a step and delete the one before, the first time a function is called."""
    module, _, name = place.rpartition(".")
    ask, left = getattr(sys.modules[module], name), [when]

    def asked(*given):
        if left == ["before"]:
            left.pop()
            delete_next(directory, layout)
        answer = ask(*given)
        if left == ["after"]:
            left.pop()
            delete_next(directory, layout)
        return answer

    monkeypatch.setattr(place, asked)


def delete_next(directory, layout):
    [step] = list_steps(directory)
    saved(directory, step + 1, layout=layout)
    discard(directory, [step])
