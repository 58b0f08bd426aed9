"""A step whose files changed is refused by name, and the last whole one is offered."""

import json
import logging
import os
import shutil
import sys
import warnings
from types import SimpleNamespace
from typing import Any, cast

import pytest

import hfjax
from hfjax.checkpoint.arrays import state_arrays, to_raw
from hfjax.checkpoint.manifest import find_damage
from hfjax.checkpoint.metadata import read_record
from hfjax.checkpoint.orbax_logging import silence_orbax
from hfjax.checkpoint.writer import required_bytes
from tests.small_checkpoint import same, saved, small_layout, state_at


def files(step):
    """Return every file of a step that a reader reads, the largest first."""
    later = {"_CHECKPOINT_METADATA", "commit_success.txt"}
    found = [p for p in step.rglob("*") if p.is_file() and str(p.relative_to(step)) not in later]
    return sorted(found, key=lambda p: -p.stat().st_size)


def flip(path, place=None):
    """Flip one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 16
    path.write_bytes(bytes(content))


def arrays(step):
    return next(p for p in files(step) if p.parent.name == "d")


def test_a_bit_that_is_flipped_in_any_file_is_found_in_that_file(tmp_path):
    saved(tmp_path, 1)
    step = tmp_path / "1"
    assert find_damage(step) == []
    for path in files(step):
        content = path.read_bytes()
        flip(path)
        lines = find_damage(step)
        if path.name == "manifest.json":  # of a name, a size or a checksum in it
            assert len(lines) == 1
        else:
            assert [line.split(" has CRC32 ")[0] for line in lines] == [str(path.relative_to(step))]
        path.write_bytes(content)
    assert find_damage(step) == []


def test_what_orbax_restores_silently_is_refused_and_the_previous_step_offered(tmp_path):
    layout = saved(tmp_path, 1, 2, 3, layout=small_layout(wide=4096))
    flip(arrays(tmp_path / "3"))
    silent = hfjax.restore(tmp_path, layout, verify=False).state
    assert not same(silent, state_at(layout, 3, 3))
    with pytest.raises(
        ValueError,
        match=r"step 3 of \S+ is damaged: state/ocdbt.process_0/d/\w+ has CRC32 \w+, \w+ was "
        r"written\. Step 2 is whole: hfjax.restore\(directory, layout, step=2\), or "
        r'on_damage="previous"',
    ):
        hfjax.restore(tmp_path, layout)
    assert same(hfjax.restore(tmp_path, layout, 2).state, state_at(layout, 2, 2))


def test_a_step_that_is_offered_is_whole(tmp_path):
    layout = saved(tmp_path, 1, 2, 3)
    for step in ("2", "3"):
        flip(arrays(tmp_path / step))
    with pytest.raises(ValueError, match=r"step 3 of .* Step 1 is whole"):
        hfjax.restore(tmp_path, layout)
    flip(arrays(tmp_path / "1"))
    with pytest.raises(ValueError, match="No earlier step is whole"):
        hfjax.restore(tmp_path, layout, on_damage="previous")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda p: os.truncate(p, p.stat().st_size // 2), r"has \d+ bytes, \d+ were written"),
        (lambda p: p.unlink(), "is missing"),
        (lambda p: shutil.rmtree(p.parent), "is missing"),
    ],
)
def test_truncated_and_missing_files_are_damage_too(tmp_path, change, told):
    layout = saved(tmp_path, 1)
    change(arrays(tmp_path / "1"))
    with pytest.raises(ValueError, match=rf"step 1 of \S+ is damaged: \S+ {told}"):
        hfjax.restore(tmp_path, layout)


def test_without_a_manifest_that_can_be_read_nothing_is_verified(tmp_path):
    layout = saved(tmp_path, 1)
    (tmp_path / "1/manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"step 1 .* is damaged: manifest.json does not parse"):
        hfjax.restore(tmp_path, layout)
    (tmp_path / "1/manifest.json").unlink()
    with pytest.raises(ValueError, match=r"step 1 .* is damaged: manifest.json is missing"):
        hfjax.restore(tmp_path, layout)
    assert same(hfjax.restore(tmp_path, layout, verify=False).state, state_at(layout, 1, 1))


def test_unattended_a_damaged_step_is_passed_over_with_a_warning(tmp_path):
    layout = saved(tmp_path, 1, 2, 3, data={"rows": 5})
    for step in ("2", "3"):
        flip(arrays(tmp_path / step))
    with pytest.warns(RuntimeWarning, match="is damaged: .* Restored step 1 instead") as told:
        restored = hfjax.restore(tmp_path, layout, on_damage="previous")
    assert ["step 3", "step 2"] == [str(w.message)[:6] for w in told]
    assert (restored.step, restored.damaged) == (1, (3, 2))
    assert hfjax.latest_step(tmp_path) == 3  # a reader changes nothing


def test_an_empty_step_is_damaged_as_a_power_failure_leaves_it(tmp_path):
    layout = saved(tmp_path, 1, 2)
    for left in ([], ["_CHECKPOINT_METADATA"]):
        shutil.rmtree(tmp_path / "2", ignore_errors=True)
        (tmp_path / "2").mkdir()
        for name in left:
            (tmp_path / "2" / name).touch()
        with pytest.raises(
            ValueError, match=r"step 2 .* is damaged: manifest.json is missing\. Ste"
        ):
            hfjax.restore(tmp_path, layout)
        with pytest.warns(RuntimeWarning, match="step 2 .* Restored step 1 instead"):
            assert hfjax.restore(tmp_path, layout, on_damage="previous").step == 1
    with hfjax.CheckpointManager(tmp_path, layout) as checkpoints:
        with pytest.warns(RuntimeWarning, match="step 2 .* Restored step 1 instead"):
            assert checkpoints.restore(on_damage="previous").step == 1
        assert checkpoints.steps() == [1]


def test_a_run_that_passes_over_a_damaged_step_can_save_it_again(tmp_path):
    layout = saved(tmp_path, 1, 2)
    flip(arrays(tmp_path / "2"))
    with hfjax.CheckpointManager(tmp_path, layout) as checkpoints:
        with pytest.warns(RuntimeWarning, match="step 2 .* Restored step 1 instead"):
            assert checkpoints.restore(on_damage="previous").step == 1
        assert checkpoints.steps() == [1]
        checkpoints.save(state_at(layout, 2, 5))
    assert (tmp_path / "2.damaged").is_dir()
    with warnings.catch_warnings(action="error"):
        assert same(hfjax.restore(tmp_path, layout).state, state_at(layout, 2, 5))


def test_damage_to_what_orbax_alone_reads_does_not_stop_a_run(tmp_path):
    layout = saved(tmp_path, 1)
    (tmp_path / "1/_CHECKPOINT_METADATA").write_text("{")
    with hfjax.CheckpointManager(tmp_path, layout) as checkpoints:
        assert checkpoints.restore().step == 1
        checkpoints.save(state_at(layout, 2))
    assert hfjax.restore(tmp_path, layout).step == 2


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_record_that_does_not_parse_is_named(tmp_path, content):
    layout = saved(tmp_path, 1)
    (tmp_path / "1/meta/metadata").write_text(content)
    with pytest.raises(ValueError, match=r"step 1 .* is damaged: meta/metadata has"):
        hfjax.restore(tmp_path, layout)
    with pytest.raises(ValueError, match=r"step 1: .*meta/metadata does not parse"):
        hfjax.restore(tmp_path, layout, verify=False)


def test_unverified_arrays_that_cannot_be_read_say_so(tmp_path):
    layout = saved(tmp_path, 1, layout=small_layout(wide=4096))
    shutil.rmtree(arrays(tmp_path / "1").parent)
    with pytest.raises(ValueError, match=r"step 1 of .* cannot be read: .* With verify=True"):
        hfjax.restore(tmp_path, layout, verify=False)


def test_no_trace_of_what_reads_is_printed_where_it_fails(monkeypatch):
    """Coroutines of which nobody takes the error: of the arrays after the first that fails."""
    printed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda given: printed.append(given.exc_value))
    silence_orbax.__wrapped__()
    for place in ("orbax/checkpoint/serialization.py", "other.py", "orbax/train.py"):
        with pytest.raises(ValueError, match=place) as told:
            exec(compile(f"raise ValueError({place!r})", place, "exec"))
        error = {"exc_type": told.type, "exc_value": told.value, "exc_traceback": told.tb}
        sys.unraisablehook(cast(Any, SimpleNamespace(**error)))
    assert [str(error) for error in printed] == ["other.py", "orbax/train.py"]


def test_warnings_of_orbax_are_not_printed_and_those_of_others_are():
    silence_orbax()
    orbax = sys.modules["orbax.checkpoint.checkpoint_manager"].__file__
    printed = lambda file, level: logging.getLogger("absl").filter(
        logging.LogRecord("absl", level, file, 1, "Waiting took %f seconds", (2.0,), None)
    )
    assert not printed(orbax, logging.WARNING)
    assert printed(orbax, logging.INFO), "who lowers absl's level asks for it"
    assert printed(orbax, logging.ERROR), "it may be of a manager of the user's own"
    for file in ("/home/me/orbax/train.py", "/home/me/tensorstore/train.py"):
        assert printed(file, logging.WARNING)


def test_a_save_that_waits_for_the_one_before_prints_nothing(tmp_path, monkeypatch, caplog):
    manager = sys.modules["orbax.checkpoint.checkpoint_manager"]
    monkeypatch.setattr(manager, "_WAIT_FOR_PREV_SAVE_WARNING_THRESHOLD_SECS", -1)
    saved(tmp_path, 1, 2)
    assert not caplog.records


@pytest.mark.parametrize("file", ["manifest.json", "meta/metadata"])
def test_a_step_in_a_later_format_asks_for_a_later_hfjax(tmp_path, file):
    layout = saved(tmp_path, 1)
    path = tmp_path / "1" / file
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))
    with pytest.raises(ValueError, match=r"written in format 2; this hfjax .* reads up to 1\. Up"):
        hfjax.restore(tmp_path, layout, verify=file == "manifest.json")


@pytest.mark.slow
def test_the_room_that_a_step_needs_is_that_of_all_its_files(tmp_path):
    for number, layout in enumerate((small_layout(), small_layout(wide=8192, sizes={"fsdp": 8}))):
        layout = saved(tmp_path / str(number), 1, layout=layout)
        stored = {path: to_raw(x) for path, x in state_arrays(state_at(layout, 1)).items()}
        step = tmp_path / str(number) / "1"
        found = sum(path.stat().st_size for path in step.rglob("*") if path.is_file())
        assert sum(x.nbytes for x in stored.values()) < found
        assert found <= required_bytes(stored, read_record(step)) < found + 130_000


def test_what_to_do_with_damage_is_one_of_two_words(tmp_path):
    with pytest.raises(ValueError, match="on_damage='ignore': one of refuse, previous"):
        hfjax.restore(tmp_path, small_layout(), on_damage="ignore")
