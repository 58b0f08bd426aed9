"""Killed at any moment, a run loses nothing and goes on as if it had not been killed."""

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
from tests.small_checkpoint import same, saved, state_at
from tests.small_gpt import gpt_layout

ROOT = Path(__file__).parent.parent
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


class Run:
    """A run in processes of their own, that write losses and checkpoints."""

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
        process = self.start()
        told = process.communicate(timeout=300)
        assert process.returncode == 0, told
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
        latest = hfjax.latest(self.directory) or 0
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
    layout = gpt_layout(FSDP, {"fsdp": 4}, layers=1, dropout=0.1)
    run, latest, interrupted = Run(tmp_path / "killed", steps), 0, 0
    done = 0
    for number in range(kills):
        if not run.kill_after(random.Random(number).uniform(0, longest)):
            break
        done += 1
        interrupted += len(list(run.directory.glob("*.orbax-checkpoint-tmp")))
        latest = run.check(layout, latest)
    assert run.finish() == undisturbed
    assert hfjax.latest(run.directory) == steps
    assert not list(run.directory.glob("*.orbax-checkpoint-tmp"))
    return done, interrupted


def test_three_kills_lose_nothing(tmp_path):
    kill_again_and_again(tmp_path, kills=3, steps=12, longest=1.5)


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
import conftest, os, sys
from orbax.checkpoint._src.path import atomicity
import hfjax
from hfjax.checkpoint import writer
from tests.small_checkpoint import small_layout, state_at

layout = small_layout()
with hfjax.Checkpoints(sys.argv[1], layout, keep=hfjax.Keep(latest=1)) as checkpoints:
    die = lambda *_: os.kill(os.getpid(), 9)
    {}
    checkpoints.save(state_at(layout, 2, 2))
"""


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_step_counts_with_its_manifest_or_not_at_all(tmp_path, moment):
    layout = saved(tmp_path, 1)
    change, steps = MOMENTS[moment]
    code = DYING.format(change.replace("\n", "\n    "))
    done = subprocess.run([sys.executable, "-c", code, tmp_path], env=ENVIRONMENT, timeout=120)
    assert done.returncode == -signal.SIGKILL
    last = steps[-1]
    assert hfjax.latest(tmp_path) == last
    assert same(hfjax.restore(tmp_path, layout).state, state_at(layout, last, last))
    with hfjax.Checkpoints(tmp_path, layout) as checkpoints:
        assert checkpoints.steps() == steps
        leftovers = [p.name for p in tmp_path.iterdir() if p.name not in map(str, steps)]
        assert sorted(leftovers) in (["writer.lock"], [".deleted", "writer.lock"])
        checkpoints.save(state_at(layout, 3, 3))
    assert hfjax.restore(tmp_path, layout).step == 3


FORGETFUL = """
import conftest, sys
import hfjax
from tests.small_checkpoint import small_layout, state_at

layout = small_layout(wide=8192)
hfjax.Checkpoints(sys.argv[1], layout).save(state_at(layout, 5, 5))
"""


def test_what_is_being_written_when_a_program_ends_is_finished_or_told_to_be_lost(tmp_path):
    command = [sys.executable, "-c", FORGETFUL, tmp_path]
    done = subprocess.run(command, env=ENVIRONMENT, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lost = "hfjax: step 5 was not saved in" in done.stderr
    assert lost == ("use `with hfjax.Checkpoints(…)`" in done.stderr)
    assert hfjax.latest(tmp_path) == (None if lost else 5)
    if sys.version_info < (3, 12):  # later ones start no thread at the end of a program
        assert not lost
