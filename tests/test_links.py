"""A folder from a stranger may have links in it: nothing is written or deleted where they lead."""

import errno
import fcntl
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import hfjax
from hfjax.data import TokenSet, write_tokens
from hfjax.trainer.train_loop import Run
from hfjax.utils.atomic import atomic_file, replace_text
from tests.small_checkpoint import saved, small_layout, state_at
from tests.small_run import open_trackers, small


@pytest.fixture(name="mine")
def fixture_mine(tmp_path):
    """Return a folder and a file that are somebody's own; they are the same at the end."""
    folder, file = tmp_path / "mine", tmp_path / "mine.txt"
    (folder / "thesis").mkdir(parents=True)
    (folder / "thesis/text").write_text("years of work")
    (folder / "2020").mkdir()
    (folder / "2020/photo").write_text("a day")
    file.write_text("years of work")
    yield SimpleNamespace(folder=folder, file=file)
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    assert names == ["2020", "2020/photo", "thesis", "thesis/text"]
    assert (folder / "thesis/text").read_text() == file.read_text() == "years of work"


def test_a_folder_of_checkpoints_whose_own_files_are_links_is_refused(tmp_path, mine):
    layout, place = small_layout(), tmp_path / "run"
    place.mkdir()
    for name, there in ((".deleted", mine.folder), ("writer.lock", mine.file)):
        for target in (there, tmp_path / "nowhere"):
            (place / name).unlink(missing_ok=True)
            (place / name).symlink_to(target)
            with pytest.raises(
                ValueError, match=rf"run/{name} is a link to {target}: .*rm \S+/{name}"
            ):
                hfjax.CheckpointManager(place, layout)
            (place / name).unlink()
    assert not (tmp_path / "nowhere").exists()
    saved(place, 1, layout=layout)


def test_of_steps_that_are_links_only_the_links_go(tmp_path, mine):
    place = tmp_path / "run"
    layout = saved(place, 1, 2)
    (place / "1").rename(tmp_path / "elsewhere")
    (place / "1").symlink_to(tmp_path / "elsewhere")
    (place / "5.orbax-checkpoint-tmp").symlink_to(mine.folder)
    (place / ".deleted").mkdir(exist_ok=True)
    (place / ".deleted/4").symlink_to(mine.folder)
    assert hfjax.restore(place, layout, 1).step == 1
    with hfjax.CheckpointManager(
        place, layout, keep=hfjax.RetentionPolicy(latest=1)
    ) as checkpoints:
        checkpoints.save(state_at(layout, 3))
    assert sorted(path.name for path in place.iterdir()) == [".deleted", "3", "writer.lock"]
    assert not list((place / ".deleted").iterdir())
    assert (tmp_path / "elsewhere/manifest.json").exists()


def test_a_folder_of_checkpoints_may_be_a_link_and_what_hfjax_has_not_written_stays(tmp_path, mine):
    (tmp_path / "checkpoints").symlink_to(mine.folder)
    layout, more = small_layout(), mine.folder / "x.orbax-checkpoint-tmp"
    more.mkdir()
    with hfjax.CheckpointManager(
        tmp_path / "checkpoints", layout, keep=hfjax.RetentionPolicy(latest=1)
    ) as open_:
        for step in (3000, 3001):
            open_.save(state_at(layout, step))
        open_.wait()
        assert open_.steps() == [2020, 3001]
        with pytest.raises(ValueError, match=r"step 2020 of \S+ was not written by hfjax.* stays"):
            open_.save(state_at(layout, 5), force=True)
        assert open_.steps() == [2020, 3001]
    more.rmdir()
    with hfjax.CheckpointManager(tmp_path / "checkpoints", layout) as open_:
        (mine.folder / "2020").rename(tmp_path / "2020")
        open_.save(state_at(layout, 0), force=True)
        open_.wait()
        assert open_.steps() == [0]
    (tmp_path / "2020").rename(mine.folder / "2020")
    for name in ("0", ".deleted", "writer.lock"):
        path = mine.folder / name
        path.rename(tmp_path / f"made.{name}")
    broken = tmp_path / "broken"
    broken.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"broken is a link to \S+nowhere, which is not there"):
        hfjax.CheckpointManager(broken, layout)


FILES = ("config.yaml", "metrics.jsonl", "loss.png")
FOLDERS = ("tensorboard", "wandb", "profile", "profile/plugins", "profile/plugins/profile")


def test_a_run_refuses_links_before_it_prepares_anything(tmp_path, mine):
    place, link = tmp_path / "elsewhere", tmp_path / "run"
    (place / "profile/plugins").mkdir(parents=True)
    link.symlink_to(place)  # the user's own
    cases = [(name, mine.file) for name in FILES]
    for name, target in [*cases, *((folder, mine.folder) for folder in FOLDERS)]:
        path = place / name
        if path.is_dir():
            path.rename(tmp_path / "away")
        path.symlink_to(target)
        run = Run(small(link, tmp_path / "none"), None, None)  # type: ignore
        with pytest.raises(ValueError, match=rf"run/{name} is a link to {target}: hfjax writes"):
            run.find_sources()
        path.unlink()
        if (tmp_path / "away").exists():
            (tmp_path / "away").rename(path)


def test_a_file_that_is_replaced_goes_through_no_link_and_waits_for_no_pipe(tmp_path, mine):
    path = tmp_path / "some.txt"
    (tmp_path / ".some.txt.unfinished-1").symlink_to(mine.file)
    (tmp_path / ".some.txt.unfinished-2").mkdir()
    os.mkfifo(tmp_path / ".some.txt.unfinished-3")
    (left := tmp_path / ".some.txt.unfinished-4").write_text("left by a kill")
    replace_text(path, "text")
    assert path.read_text() == "text"
    assert not left.exists()
    path.unlink()
    path.symlink_to(mine.file)
    with pytest.raises(ValueError, match=r"some\.txt is a link to \S+mine\.txt: hfjax writes"):
        replace_text(path, "text")


@pytest.mark.parametrize("locks", [True, False])
def test_of_two_files_that_are_written_at_the_same_time_each_is_whole(locks, tmp_path, monkeypatch):
    if not locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    path = tmp_path / "some.txt"
    with atomic_file(path) as first:
        first.write(b"one ")
        with atomic_file(path) as second:
            second.write(b"two ")
            first.write(b"and ")
            second.write(b"more")
        assert path.read_text() == "two more"
        first.write(b"all")
    assert path.read_text() == "one and all"
    assert [path.name for path in tmp_path.iterdir()] == ["some.txt"]


def no_locks(*_):
    raise OSError(errno.ENOLCK, "No locks available")


def test_a_journal_writes_through_no_link(tmp_path, mine, caplog):
    for name in ("metrics.jsonl", "loss.png", "tensorboard"):
        (tmp_path / name).symlink_to(mine.folder if name == "tensorboard" else mine.file)
        with pytest.raises(ValueError, match=rf"{name} is a link to \S+mine"):
            open_trackers(tmp_path, tensorboard=True)
        (tmp_path / name).unlink()
    with open_trackers(tmp_path) as journal:
        journal.log(0, loss=1.0)
        (tmp_path / "loss.png").symlink_to(mine.file)
    assert "loss.png is not drawn: " in caplog.text


def test_what_lies_beside_a_data_set_is_not_followed(tmp_path, mine):
    place = tmp_path / "set"
    (tmp_path / ".set.unfinished-12").symlink_to(mine.folder)
    os.mkfifo(tmp_path / ".set.unfinished-34")
    write_tokens(place, [np.arange(5)], 8)
    (place / "more").symlink_to(mine.folder)
    write_tokens(place, [np.arange(6)], 8, overwrite=True)
    assert len(TokenSet(place)) == 6
    assert not list(Path(tmp_path).glob(".set.*"))
