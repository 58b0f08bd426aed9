"""A disk that is full: told with bytes and steps, nothing lost, the process goes on or ends."""

import os
import re
import shutil
import subprocess
import sys

import pytest

FULL = """
import conftest, resource, shutil, sys
from pathlib import Path
import hfjax
from tests.small_checkpoint import same, small_layout, state_at

path, way = Path(sys.argv[1]), sys.argv[2]
layout = small_layout(wide=8192)  # 1.2 MB

def no_more_room(full):
    if way != "tmpfs":
        limit = 100_000 if full else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

with hfjax.Checkpoints(path, layout, keep=hfjax.Keep(latest=None)) as checkpoints:
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
TOLD = r"told: step 2 was not saved in \S+: {}\. It needs \d+ bytes, \d+ are free\. "
TOLD += r"Steps saved before are intact: 1\. Make room \(Keep\(latest=…\) with fewer steps\)"


def run(path, way, *prefix):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    command = [*prefix, sys.executable, "-W", "ignore", "-c", FULL, str(path), way]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def check_goes_on(done, reason):
    assert done.returncode == 0, done.stderr
    assert re.search(TOLD.format(reason), done.stdout), done.stdout
    assert "left: 1\n" in done.stdout
    assert "steps: 3\n" in done.stdout
    assert done.stderr == ""


def test_files_that_may_not_grow_are_told_and_the_run_goes_on(tmp_path):
    check_goes_on(run(tmp_path, "limit"), "File too large")


@pytest.mark.parametrize("way", ["exit", "mistake"])
def test_the_process_ends_without_hanging_and_tells_what_was_not_saved(tmp_path, way):
    done = run(tmp_path, way)
    assert done.returncode == 1
    assert "step 2 was not saved in" in done.stderr
    assert ("RuntimeError: a mistake in the loop" in done.stderr) == (way == "mistake")
    assert sorted(p.name for p in tmp_path.iterdir() if p.name[0].isdigit()) == ["1"]


def test_a_full_file_system_is_told_and_the_run_goes_on(tmp_path):
    mount = ["unshare", "-rm", "sh", "-c", f"mount -t tmpfs -o size=2m none {tmp_path} && exec $@"]
    if shutil.which("unshare") is None or subprocess.run([*mount, "-", "true"]).returncode:
        pytest.skip("mounting a file system needs user namespaces (unshare -rm)")
    mount[-1] = mount[-1].replace("$@", '"$@"')
    check_goes_on(run(tmp_path, "tmpfs", *mount, "-"), "No space left on device")
