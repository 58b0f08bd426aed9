"""What cannot be saved or restored is refused with the path, both values and what to do."""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hfjax
from hfjax.checkpoint.writer import Writer
from hfjax.parallel.strategy import ZERO1
from hfjax.utils.tables import quote
from tests.full_disk import allowed_bytes
from tests.small_checkpoint import saved, small_layout, state_at
from tests.test_checkpoint import Counting


def refused(path, match, layout=None, *args, **wish):
    with pytest.raises(ValueError, match=match):
        hfjax.restore(path, layout or small_layout(), *args, **wish)


def test_where_there_is_no_checkpoint_it_says_what_is_there(tmp_path):
    refused(tmp_path / "no", r"no checkpoint in \S+/no: there is no such directory\.")
    refused(tmp_path, r"no checkpoint in \S+: it is empty\.")
    for name in "abcdefg":
        (tmp_path / name).touch()
    refused(tmp_path, r"no checkpoint in \S+: found a, b, c, d, e and 2 more\.")
    saved(tmp_path / "run", 3)
    refused(tmp_path, r"/run holds steps \[3\]\.")
    refused(tmp_path / "run/3", r"/run holds steps \[3\]\.")


def test_arguments_in_another_order_are_told_the_right_one(tmp_path):
    layout: Any = small_layout()
    state: Any = hfjax.init(layout)
    with pytest.raises(ValueError, match=r"a directory, then a layout; found Layout and PosixPath"):
        hfjax.restore(layout, tmp_path)
    with pytest.raises(ValueError, match=r"a layout, then a state; found State and Layout"):
        hfjax.to_model(state, layout)


def test_a_step_that_is_not_there_is_told_with_those_that_are(tmp_path):
    layout = saved(tmp_path, 1, 2)
    refused(tmp_path, r"step 7 is not in \S+\. Saved: 1, 2\.", layout, 7)
    for step in (2.0, True, "2"):
        refused(
            tmp_path, rf"step={step!r}: a whole number is expected, .* Saved: 1, 2\.", layout, step
        )
    two: Any = np.int64(2)
    assert hfjax.restore(tmp_path, layout, two).step == 2


def test_what_something_else_has_written_is_no_checkpoint(tmp_path):
    (tmp_path / "7/default").mkdir(parents=True)
    refused(tmp_path, r"step 7 of \S+ was not written by hfjax: no manifest.* found default\.")


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "file").touch()
    match = "file is a file: checkpoints are saved in a directory"
    refused(tmp_path / "file", match)
    with pytest.raises(ValueError, match=match):
        hfjax.CheckpointManager(tmp_path / "file", small_layout())
    with pytest.raises(ValueError, match=match):
        hfjax.latest_step(tmp_path / "file")


def test_a_directory_that_cannot_be_made_or_written_is_told_at_once(tmp_path):
    (tmp_path / "file").touch()
    for place, match in {
        tmp_path / "file/run": "file/run cannot be made: Not a directory. Save to a directory",
        "/proc": "/proc cannot be written: .*Save to a directory in which you may make files",
    }.items():
        with pytest.raises(ValueError, match=match):
            hfjax.CheckpointManager(place, small_layout())


def test_an_empty_name_is_no_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    layout = small_layout()
    for call in (
        lambda: hfjax.save("", layout, state_at(layout, 1)),
        lambda: hfjax.CheckpointManager("", layout),
        lambda: hfjax.restore("", layout),
        lambda: hfjax.latest_step(""),
        lambda: hfjax.checkpoint_metadata(""),
    ):
        with pytest.raises(ValueError, match=r"'' is no directory.* \"\.\" is the folder at hand"):
            call()
    assert not list(tmp_path.iterdir())


def test_a_step_below_zero_is_not_saved(tmp_path):
    layout = small_layout()
    with pytest.raises(ValueError, match=r"step -5 of this state: .* at least 0\. Give the state"):
        hfjax.save(tmp_path, layout, state_at(layout, -5))
    assert hfjax.latest_step(tmp_path) is None


def test_another_model_is_refused_before_any_read_by_path_and_shape(tmp_path):
    saved(tmp_path, 4)
    refused(
        tmp_path,
        r"step 4 of \S+ does not hold what this layout wants:\n"
        r"  params/first/bias is float32\[16\] saved, wanted as float32\[32\]\n"
        r"(?s:.*)… and 1 more\nMake the layout of the model that was saved: hfjax",
        small_layout(wide=32),
    )


def test_names_that_are_missing_are_told_with_the_nearest_that_is_saved(tmp_path):
    saved(tmp_path, 1, layout=small_layout(model=Counting))
    refused(tmp_path, r"  variables/mean float32\[4\] is saved, not wanted\n")

    class Renamed(Counting):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.means = self.mean
            del self.mean

    refused(
        tmp_path,
        r"  variables/means float32\[4\] is not saved \(nearest: variables/mean\)\n",
        small_layout(model=Renamed),
    )


def test_another_optimizer_is_refused_and_parameters_only_offered(tmp_path):
    saved(tmp_path, 1)
    refused(
        tmp_path,
        r"optimizer/0/trace/first/bias float32\[16\] is not saved(?s:.*)Only the optimizer's state "
        "differs. .*restore with parameters_only=True",
        small_layout(optimizer=optax.sgd(0.1, momentum=0.9)),
    )


def test_another_dtype_is_never_cast_silently(tmp_path):
    saved(tmp_path, 1)
    half = small_layout(dtype=jnp.bfloat16)
    refused(
        tmp_path,
        r"params/first/bias is float32\[16\] saved, wanted as bfloat16\[16\](?s:.*)"
        'To cast them on purpose, restore with dtype="bfloat16"',
        half,
    )
    refused(
        tmp_path,
        "dtype='float16': the arrays of this layout are bfloat16",
        half,
        dtype=np.float16,
    )
    refused(tmp_path, "dtype='half-ish': the arrays of this layout are", half, dtype="half-ish")
    refused(tmp_path, r"wanted as float32\[32\]", small_layout(wide=32), dtype="float32")
    small = small_layout(optimizer=optax.adam(1e-3, mu_dtype=jnp.bfloat16))
    refused(tmp_path, r"mu/first/bias is .*(?s:.*)restore with dtype=\"bfloat16\"", small)
    assert hfjax.restore(tmp_path, small, dtype=jnp.bfloat16).step == 1


OTHER = """
import json, sys
from pathlib import Path
from hfjax.checkpoint.directory import WriterLock, make_directory
for line in sys.stdin:
    try:
        if place := json.loads(line):
            make_directory(Path(place))
            lock = WriterLock(Path(place))
        else:
            lock.release()
        told = ""
    except ValueError as refused:
        told = str(refused)
    print(json.dumps(told), flush=True)
"""


@pytest.fixture(scope="module")
def other():
    """Lets another process take a directory, or none; returns how that is refused."""
    both: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", OTHER], text=True, **both) as process:
        source, target = process.stdout, process.stdin
        assert source is not None
        assert target is not None

        def take(place):
            target.write(json.dumps(place and str(place)) + "\n")
            target.flush()
            return json.loads(source.readline())

        yield take
        process.communicate("")


def test_a_second_writer_is_refused_and_told_who_writes(tmp_path, other):
    layout = small_layout()
    with hfjax.CheckpointManager(tmp_path, layout) as checkpoints:
        with pytest.raises(ValueError, match="is being written by this process itself"):
            hfjax.CheckpointManager(tmp_path / "." / "", layout)
        told = other(tmp_path)
        assert f"is being written by process {os.getpid()} on " in told
        assert "a directory has one writer. Close that one first" in told
        checkpoints.save(state_at(layout, 1))
        checkpoints.wait()
        assert hfjax.restore(tmp_path, layout).step == 1  # a reader needs no lock
    hfjax.CheckpointManager(tmp_path, layout).close()


def test_a_directory_that_is_moved_away_is_taken_again(tmp_path, other):
    layout, place, away = small_layout(), tmp_path / "run", tmp_path / "away"
    with hfjax.CheckpointManager(
        place, layout, keep=hfjax.RetentionPolicy(latest=1)
    ) as checkpoints:
        checkpoints.save(state_at(layout, 1))
        checkpoints.wait()
        place.rename(away)
        with pytest.warns(RuntimeWarning, match="/run was moved or deleted .* made anew"):
            checkpoints.save(state_at(layout, 2))
        with pytest.raises(ValueError, match="is being written by this process itself"):
            hfjax.CheckpointManager(place, layout)
        checkpoints.save(state_at(layout, 3))
    assert (hfjax.latest_step(away), hfjax.latest_step(place)) == (1, 3)
    with hfjax.CheckpointManager(place, layout) as checkpoints:
        place.rename(tmp_path / "again")
        with other_writer(other, place), pytest.raises(ValueError, match="written by process"):
            with pytest.warns(RuntimeWarning, match="moved or deleted"):
                checkpoints.save(state_at(layout, 4))
    assert hfjax.latest_step(place) is None


def test_a_directory_that_is_moved_while_a_step_is_written_is_told_and_not_made_anew(
    tmp_path, monkeypatch
):
    layout, place, sealed = small_layout(), tmp_path / "runs" / "run" / "checkpoints", Writer._seal

    def moved_away(writer):
        if writer._saving[0] == 2:
            place.parent.rename(tmp_path / "runs" / "away")
            (place / "2.orbax-checkpoint-tmp" / "state").mkdir(parents=True)  # as Orbax' threads do
        sealed(writer)

    monkeypatch.setattr(Writer, "_seal", moved_away)
    checkpoints = hfjax.CheckpointManager(place, layout)
    checkpoints.save(state_at(layout, 1))
    checkpoints.save(state_at(layout, 2))
    match = (
        r"^step 2 was not saved in \S+/checkpoints: the directory was moved or deleted while the "
        r"step was written\. Steps saved before are where it was moved to: move it back, and start"
    )
    with pytest.raises(OSError, match=match):
        checkpoints.wait()
    checkpoints.close()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["away"]
    assert hfjax.latest_step(tmp_path / "runs" / "away" / "checkpoints") == 1


def test_a_step_that_cannot_be_deleted_is_named_and_the_new_one_is_saved(tmp_path):
    layout, trash = small_layout(), tmp_path / ".deleted"
    checkpoints = hfjax.CheckpointManager(tmp_path, layout, keep=hfjax.RetentionPolicy(latest=1))
    checkpoints.save(state_at(layout, 1))
    checkpoints.wait()
    trash.write_text("no folder")
    checkpoints.save(state_at(layout, 2))
    match = r"^step 2 is saved in \S+, but what is no longer kept cannot be deleted: .* 1, 2\."
    with pytest.raises(OSError, match=match):
        checkpoints.wait()
    trash.unlink()
    checkpoints.save(state_at(layout, 3))
    checkpoints.wait()
    assert checkpoints.steps() == [3]
    checkpoints.close()


def test_a_directory_of_a_full_disk_is_opened(tmp_path):
    layout = saved(tmp_path, 1)
    with allowed_bytes(0), hfjax.CheckpointManager(tmp_path, layout) as checkpoints:
        assert checkpoints.restore().step == 1


@pytest.mark.parametrize("name", ["rate[0.1]", "a*", "a?", r"a\b", "a\udcff"])
def test_a_path_under_which_a_step_could_not_be_read_again_is_refused(tmp_path, name):
    odd = quote(name[4] if len(name) > 4 else name[1])
    match = re.escape(f"{quote(name)}: checkpoints saved in a folder with {odd} in its path could")
    with pytest.raises(ValueError, match=match):
        saved(tmp_path / name, 1)
    assert not (tmp_path / name).exists()
    layout = saved(tmp_path / "well", 1)
    (tmp_path / "well").rename(tmp_path / name)
    if name[1] in "\\\udcff":
        refused(tmp_path / name, match, layout)
    else:
        assert hfjax.restore(tmp_path / name, layout).step == 1


def test_a_lock_outlives_a_copy_that_its_holder_makes_of_the_folder(tmp_path, other):
    with hfjax.CheckpointManager(tmp_path / "run", small_layout()):
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        assert "is being written by process" in other(tmp_path / "run")


def test_a_step_whose_directory_is_moved_meanwhile_is_no_step_of_the_next_writer(
    tmp_path, monkeypatch, other
):
    layout, place = small_layout(), tmp_path / "run"
    sealed, others = Writer._seal, []

    def moved_away(writer):
        if not others:
            place.rename(tmp_path / "away")
            others.append(other_writer(other, place))
            others[0].__enter__()
            (place / "1.orbax-checkpoint-tmp").mkdir()
        sealed(writer)

    monkeypatch.setattr(Writer, "_seal", moved_away)
    checkpoints = hfjax.CheckpointManager(place, layout)
    checkpoints.save(state_at(layout, 1))
    with pytest.raises(OSError, match=r"step 1 was not saved .* moved or deleted while the step"):
        checkpoints.wait()
    names = {path.name for path in place.iterdir()}
    assert names == {"writer.lock", "1.orbax-checkpoint-tmp"}  # the other writer's, as they were
    others[0].__exit__(None, None, None)
    checkpoints.close()


@contextmanager
def other_writer(other, place):
    """Let another process have a directory."""
    assert not other(place)
    yield
    assert not other(None)


def test_a_folder_that_bears_the_name_of_another_step_is_refused(tmp_path):
    layout = saved(tmp_path, 3, 5)
    (tmp_path / "5").rename(tmp_path / "7")
    match = r"step 7 of \S+ is step 5: its folder was renamed.* again: mv \S+/7 \S+/5$"
    for wish in ({}, {"on_damage": "previous"}, {"parameters_only": True}, {"verify": False}):
        refused(tmp_path, match, layout, **wish)
    with pytest.raises(ValueError, match=match):
        hfjax.checkpoint_metadata(tmp_path)
    with (
        hfjax.CheckpointManager(tmp_path, layout) as checkpoints,
        pytest.raises(ValueError, match=match),
    ):
        checkpoints.restore()
    assert hfjax.restore(tmp_path, layout, 3).step == 3
    shutil.copytree(tmp_path / "7", tmp_path / "5")
    (tmp_path / "3").rename(tmp_path / "9")
    exchanged = r"step 9 .* is step 3: .* again: mv \S+/9 \S+/3$"
    refused(tmp_path, exchanged, layout, 9)
    refused(tmp_path, r"again: mv \S+/5 \S+/5.other && mv \S+/7 \S+/5$", layout, 7)


def test_a_step_that_is_there_is_replaced_only_by_force(tmp_path):
    layout = saved(tmp_path, 3, 5)
    with hfjax.CheckpointManager(tmp_path, layout) as checkpoints:
        with pytest.raises(
            ValueError, match=r"step 5 is already saved in .* force=True: it delete"
        ):
            checkpoints.save(state_at(layout, 5))
        with pytest.raises(ValueError, match=r"step 4 comes before step 5 in .* first \(5\)"):
            checkpoints.save(state_at(layout, 4))
        checkpoints.save(state_at(layout, 4), force=True)
        checkpoints.wait()
        assert checkpoints.steps() == [3, 4]
        checkpoints.save(state_at(layout, 4, seed=9), force=True)
    found = hfjax.restore(tmp_path, layout).state.params
    wanted = state_at(layout, 4, 9).params
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), found, wanted))


def test_a_state_that_was_donated_is_refused(tmp_path):
    layout = small_layout()
    state = state_at(layout, 1)
    jax.jit(lambda s: s, donate_argnums=0)(state)
    with pytest.raises(ValueError, match=r"given to a later step, which took its memory \(donat"):
        hfjax.save(tmp_path, layout, state)


def test_a_state_of_another_layout_is_refused_by_path(tmp_path):
    layout = small_layout()
    with pytest.raises(ValueError, match=r"a hfjax.State is expected, found dict"):
        hfjax.save(tmp_path, layout, {})  # pyright: ignore
    wide = state_at(small_layout(wide=32), 1)
    match = r"params\['first'\]\['bias'\] is float32\[32\], the layout has float32\[16\].*made with"
    with pytest.raises(ValueError, match=match):
        hfjax.save(tmp_path, layout, wide)
    other = state_at(small_layout(optimizer=optax.sgd(0.1)), 1)
    with pytest.raises(ValueError, match=r"optimizer\[0\]\.count is nothing, the layout has int"):
        hfjax.save(tmp_path, layout, other)
    with pytest.raises(ValueError, match=r"params\['first'\]\['bias'\] is nothing, the layout has"):
        hfjax.save(tmp_path, layout, state_at(small_layout(model=Renamed), 1))


class Renamed(Counting):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.kernel = self.first.kernel
        del self.first


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({"at": {1: 2}}, r"data\['at'\]: \{1: 2\} would come back from JSON as \{'1': 2\}"),
        ({"at": [(1, 2)]}, r"data\['at'\]\[0\]: \(1, 2\) would come back from JSON as \[1, 2\]"),
        ({"at": object()}, "data is written as JSON, which Object of type object is not"),
        (1j, "data is written as JSON, which Object of type complex is not"),
    ],
)
def test_what_json_would_change_is_not_written(tmp_path, data, match):
    layout = small_layout()
    with pytest.raises(ValueError, match=match):
        hfjax.save(tmp_path, layout, state_at(layout, 1), data=data)
    assert hfjax.latest_step(tmp_path) is None
    with pytest.raises(ValueError, match=match.replace("data", "config")):
        hfjax.CheckpointManager(tmp_path, layout, config=data)
    hfjax.CheckpointManager(tmp_path, layout).close()


def test_closed_checkpoints_say_so(tmp_path):
    layout = small_layout()
    with hfjax.CheckpointManager(tmp_path, layout) as checkpoints:
        pass
    checkpoints.close()
    with pytest.raises(ValueError, match=r"the checkpoints of .* are closed. Open them again"):
        checkpoints.save(state_at(layout, 1))


def test_steps_of_another_strategy_are_no_mistake(tmp_path):
    saved(tmp_path, 1)
    assert hfjax.restore(tmp_path, small_layout(ZERO1, sizes={"data": 8})).step == 1


@pytest.mark.parametrize("given", [float("nan"), float("inf"), -5, 0, True, "3"])
def test_a_time_that_is_no_number_of_seconds_is_refused(tmp_path, given):
    wanted = f"timeout={given!r}; a number of seconds above 0"
    with pytest.raises(ValueError, match=f"Checkpoints: {wanted}"):
        hfjax.CheckpointManager(tmp_path / "run", small_layout(), timeout=given)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=f"init_distributed: {wanted}"):
        hfjax.init_distributed(timeout=given)
    with pytest.raises(ValueError, match=f"init_distributed: heartbeat={given!r}; a number of sec"):
        hfjax.init_distributed(heartbeat=given)
