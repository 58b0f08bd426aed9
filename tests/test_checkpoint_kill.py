"""Killed at any moment, a run loses nothing and goes on as if it had not been killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hfjax
from hfjax import FSDP
from tests import checkpoint_worker
from tests.small_checkpoint import same, saved, small_layout, state_at
from tests.small_gpt import mlp_layout

ROOT = Path(__file__).parent.parent
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


class Run:
    """A run that writes losses and checkpoints: in processes of their own, the last one here."""

    def __init__(self, path, steps):
        path.mkdir(exist_ok=True)
        self.directory, self.losses, self.steps = path / "run", path / "losses", steps
        self.command = [sys.executable, "-W", "ignore", str(ROOT / "tests/checkpoint_worker.py")]
        self.command += [self.directory, self.losses, str(steps), path.parent / "cache"]

    def start(self):
        """Start it and wait until it opens its checkpoints."""
        process = subprocess.Popen(
            self.command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n", process.communicate()[1]
        return process

    def finish(self):
        checkpoint_worker.main(self.directory, self.losses, self.steps)
        return self.read()

    def kill_after(self, seconds):
        """Kill it; return whether it was still running."""
        process = self.start()
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        out, _ = process.communicate()
        assert process.returncode == (0 if "done" in out else -signal.SIGKILL)
        return "done" not in out

    def read(self):
        """Return the loss of each step; one that was taken twice is the same, bit for bit."""
        found: dict[int, str] = {}
        lines = self.losses.read_text().splitlines() if self.losses.exists() else []
        for number, loss in (line.split() for line in lines):
            assert found.setdefault(int(number), loss) == loss, (number, found)
        assert list(found) == list(range(len(found)))
        return found

    def check(self, layout, before):
        """Return the latest step, which restores, and lies at most one save behind."""
        latest = hfjax.latest_step(self.directory) or 0
        assert latest >= before
        assert len(self.read()) - latest <= 2  # one being written, one just taken
        if latest:
            restored = hfjax.restore(self.directory, layout)
            assert restored.data == {"next": latest}
            assert int(restored.state.step) == latest
        return latest


def kill_again_and_again(tmp_path, kills, steps, longest):
    undisturbed = Run(tmp_path / "undisturbed", steps).finish()
    assert len(undisturbed) == steps
    layout = mlp_layout(FSDP, {"fsdp": 4}, layers=1, dropout=0.1)
    run, latest, interrupted = Run(tmp_path / "killed", steps), 0, 0
    done = 0
    for number in range(kills):
        if not run.kill_after(random.Random(number).uniform(0, longest)):
            break
        done += 1
        interrupted += len(list(run.directory.glob("*.orbax-checkpoint-tmp")))
        latest = run.check(layout, latest)
    assert run.finish() == undisturbed
    assert hfjax.latest_step(run.directory) == steps
    assert not list(run.directory.glob("*.orbax-checkpoint-tmp"))
    return done, interrupted


@pytest.mark.slow
def test_two_kills_lose_nothing(tmp_path):
    kill_again_and_again(tmp_path, kills=2, steps=12, longest=1.5)


@pytest.mark.slow
def test_thirty_two_kills_lose_nothing(tmp_path):
    kills, interrupted = kill_again_and_again(tmp_path, kills=32, steps=400, longest=2.5)
    assert kills == 32
    assert interrupted >= 3  # so many fell into the writing of a step


MOMENTS = {  # what is done last before the kill; then the steps that are there
    "before the manifest": ("writer.write_manifest = die", [1]),
    "after the manifest": (
        "real = writer.write_manifest\ndef after(path): real(path); die()\n"
        "writer.write_manifest = after",
        [1],
    ),
    "before the rename": ("atomicity.AtomicRenameTemporaryPath.finalize = die", [1]),
    "while old steps are deleted": ("writer.empty_trash = die", [2]),
}
DYING = """
import conftest, json, os, sys
from orbax.checkpoint._src.path import atomicity
import hfjax
from hfjax.checkpoint import writer
from tests.small_checkpoint import small_layout, state_at

def die(*_):
    os.kill(os.getpid(), 9)

for folder, change in json.loads(sys.argv[1]).items():
    if child := os.fork():  # of a process in which JAX has not begun
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    layout = small_layout()
    keep = hfjax.RetentionPolicy(latest=1)
    with hfjax.CheckpointManager(folder, layout, keep=keep) as checkpoints:
        exec(change)
        checkpoints.save(state_at(layout, 2, 2))
    break
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """By moment, a folder with a step in which a process was killed that saved another one."""
    folders = {moment: tmp_path_factory.mktemp("killed") for moment in MOMENTS}
    for folder in folders.values():
        saved(folder, 1)
    changes = json.dumps({str(folders[moment]): code for moment, (code, _) in MOMENTS.items()})
    command = [sys.executable, "-W", "ignore", "-c", DYING, changes]
    done = subprocess.run(command, env=ENVIRONMENT, timeout=120, stdout=subprocess.PIPE, text=True)
    assert done.stdout.split() == [str(-signal.SIGKILL)] * len(MOMENTS)
    return folders


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_step_counts_with_its_manifest_or_not_at_all(killed, moment):
    folder, steps, layout = killed[moment], MOMENTS[moment][1], small_layout()
    last = steps[-1]
    assert hfjax.latest_step(folder) == last
    assert same(hfjax.restore(folder, layout).state, state_at(layout, last, last))
    with hfjax.CheckpointManager(folder, layout) as checkpoints:
        assert checkpoints.steps() == steps
        leftovers = [p.name for p in folder.iterdir() if p.name not in map(str, steps)]
        assert sorted(leftovers) in (["writer.lock"], [".deleted", "writer.lock"])
        checkpoints.save(state_at(layout, 3, 3))
    assert hfjax.restore(folder, layout).step == 3


FORGETFUL = """
import conftest, sys
import hfjax
from tests import checkpoint_worker
from tests.small_checkpoint import small_layout, state_at

layout = small_layout(wide=8192)
hfjax.CheckpointManager(sys.argv[1], layout).save(state_at(layout, 5, 5))
"""


def test_what_is_being_written_when_a_program_ends_is_finished_or_told_to_be_lost(tmp_path):
    command = [sys.executable, "-c", FORGETFUL, tmp_path]
    done = subprocess.run(command, env=ENVIRONMENT, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lost = "hfjax: step 5 was not saved in" in done.stderr
    assert lost == ("use `with hfjax.CheckpointManager(…)`" in done.stderr)
    assert hfjax.latest_step(tmp_path) == (None if lost else 5)
    if sys.version_info < (3, 12):  # later ones start no thread at the end of a program
        assert not lost
