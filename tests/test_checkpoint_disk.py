"""A disk that is full: told with bytes and steps, nothing lost, the process goes on or ends."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

FULL = """
import conftest, os, resource, shutil, sys
from pathlib import Path
import hfjax
from tests.small_checkpoint import same, small_layout, state_at

for path in map(Path, sys.argv[1:]):
    if child := os.fork():  # of a process in which JAX has not begun
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    way = path.name
    for number in (1, 2):
        os.dup2(os.open(f"{path}.{number}", os.O_WRONLY | os.O_CREAT), number)
    break
else:
    sys.exit()

layout = small_layout(wide=8192)  # 1.2 MB

def no_more_room(full):
    if way != "tmpfs":
        limit = 100_000 if full else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

with hfjax.CheckpointManager(path, layout, keep=hfjax.RetentionPolicy(latest=None)) as checkpoints:
    checkpoints.save(state_at(layout, 1, 1))
    checkpoints.wait()
    no_more_room(True)
    checkpoints.save(state_at(layout, 2, 2))
    if way == "exit":
        sys.exit(0)
    if way == "mistake":
        raise RuntimeError("a mistake in the loop")
    try:
        checkpoints.save(state_at(layout, 3, 3))
        print("nothing raised")
    except OSError as error:
        print("told:", error)
    no_more_room(False)
    print("left:", *sorted(p.name for p in path.iterdir() if p.name[0].isdigit()))
    assert same(hfjax.restore(path, layout).state, state_at(layout, 1, 1))
    shutil.rmtree(path / "1")
    checkpoints.save(state_at(layout, 3, 3))
    checkpoints.wait()
    print("steps:", *checkpoints.steps())
    assert same(hfjax.restore(path, layout).state, state_at(layout, 3, 3))
"""
WAYS = ["limit", "exit", "mistake", "tmpfs"]
TOLD = r"told: step 2 was not saved in \S+: {}\. It needs \d+ bytes, \d+ are free\. "
TOLD += (
    r"Steps saved before are intact: 1\. Make room \(RetentionPolicy\(latest=…\) with fewer steps\)"
)


class Done(NamedTuple):
    folder: Path
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """How each way ended, of those there are here: a process forks one for each."""
    folder = tmp_path_factory.mktemp("full")
    (folder / "tmpfs").mkdir()
    mount = f"mount -t tmpfs -o size=2m none {folder}/tmpfs && exec"
    prefix = ["unshare", "-rm", "sh", "-c", f'{mount} "$@"', "-"]
    ways = WAYS
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"]).returncode:
        prefix, ways = [], WAYS[:-1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    command = [*prefix, sys.executable, "-W", "ignore", "-c", FULL, *(folder / way for way in ways)]
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=240)
    codes = dict(zip(ways, map(int, ended.stdout.split()), strict=True))
    told = lambda way: [(folder / f"{way}.{number}").read_text() for number in (1, 2)]
    return {way: Done(folder / way, code, *told(way)) for way, code in codes.items()}


def check_goes_on(done, reason):
    assert done.returncode == 0, done.stderr
    assert re.search(TOLD.format(reason), done.stdout), done.stdout
    assert "left: 1\n" in done.stdout
    assert "steps: 3\n" in done.stdout
    assert done.stderr == ""


def test_files_that_may_not_grow_are_told_and_the_run_goes_on(done):
    check_goes_on(done["limit"], "File too large")


@pytest.mark.parametrize("way", ["exit", "mistake"])
def test_the_process_ends_without_hanging_and_tells_what_was_not_saved(done, way):
    folder, code, _, told = done[way]
    assert code == 1
    assert "step 2 was not saved in" in told
    assert ("RuntimeError: a mistake in the loop" in told) == (way == "mistake")
    assert sorted(p.name for p in folder.iterdir() if p.name[0].isdigit()) == ["1"]


def test_a_full_file_system_is_told_and_the_run_goes_on(done):
    if "tmpfs" not in done:
        pytest.skip("mounting a file system needs user namespaces (unshare -rm)")
    check_goes_on(done["tmpfs"], "No space left on device")
