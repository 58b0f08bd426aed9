"""Two real processes save together, fail together, and one process restores what they wrote."""

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from jax.experimental import multihost_utils

import hfjax
from hfjax import FSDP
from hfjax.checkpoint import restoring
from hfjax.models.gpt import next_token_loss
from tests.small_checkpoint import same, small_layout, state_at
from tests.small_gpt import mlp_layout, tokens
from tests.test_checkpoint_damage import arrays, flip

WORKER = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
rank, directory = int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=2, process_id=rank)
from pathlib import Path
from tests import test_checkpoint_processes
with open(f"{directory}-{rank}", "w") as file:
    sys.stdout = file  # gloo writes to the other one
    getattr(test_checkpoint_processes, sys.argv[4])(rank, Path(directory))
"""


def work(rank, directory):
    """Train and save; restore; be refused; pass over what is damaged."""
    layout = mlp_layout(FSDP, {"fsdp": 4}, layers=1, dropout=0.1)
    step = hfjax.train_step(layout, next_token_loss)
    mine = {"tokens": tokens()["tokens"][8 * rank : 8 * rank + 8]}
    state = hfjax.init(layout)
    with hfjax.CheckpointManager(
        directory, layout, keep=hfjax.RetentionPolicy(latest=2)
    ) as checkpoints:
        for _ in range(3):
            state, metrics = step(state, hfjax.shard_batch(layout, mine))
            checkpoints.save(state, data={"rows": 16}, metrics=metrics_of(metrics))
            print("loss", float(metrics["loss"]))
        print("refused", refusal(lambda: hfjax.CheckpointManager(directory, layout)))
        restored = checkpoints.restore(2)
        print("steps", checkpoints.steps(), restored.data, restored.origin)
        print("again", float(step(restored.state, hfjax.shard_batch(layout, mine))[1]["loss"]))
        print("without 3", without_latest(rank, directory, checkpoints.restore))
        if rank == 0:
            flip(arrays(directory / "3"))
        print("refused", refusal(checkpoints.restore))
        with warnings.catch_warnings(record=True):
            print("previous", checkpoints.restore(on_damage="previous").step, checkpoints.steps())
    print("apart", *apart(rank, directory, layout, state))


def without_latest(rank, directory, restore):
    """Return the step that is restored where process 1 finds the latest deleted."""
    read, away = restoring._read_arrays, directory.parent / "away"

    def deleted(path, *given):
        if rank == 1 and path.parent.name == "3":
            path.parent.rename(away)
        return read(path, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restoring, "_read_arrays", deleted)
        step = restore().step
    multihost_utils.sync_global_devices("restored")
    if rank == 1:
        away.rename(directory / "3")
    multihost_utils.sync_global_devices("moved back")
    return step


def apart(rank, directory, layout, state):
    """Return what is said of directories that are not one."""
    own = directory.parent / f"own{rank}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hfjax.checkpoint.directory.SEEN", 0.0)
        yield refusal(lambda: hfjax.CheckpointManager(own, layout))
        if rank == 1:
            own.mkdir()
        yield refusal(lambda: hfjax.CheckpointManager(own, layout))
    with hfjax.CheckpointManager(own.parent / "own0", layout) as checkpoints:  # is free again
        checkpoints.save(state)
    yield refusal(lambda: hfjax.restore(own, layout))
    if rank == 1:
        shutil.copytree(directory / "2", own / "3")
    yield refusal(lambda: hfjax.restore(own, layout))


def no_room(rank, directory):
    """Let the disk of process 1 be full; go on when it is not."""
    layout = small_layout(wide=8192, sizes={"fsdp": 4})
    limit = lambda n: resource.setrlimit(resource.RLIMIT_FSIZE, (n, resource.RLIM_INFINITY))
    with hfjax.CheckpointManager(directory, layout, timeout=8) as checkpoints:
        checkpoints.save(state_at(layout, 1, 1))
        checkpoints.wait()
        if rank == 1:
            limit(100_000)
        checkpoints.save(state_at(layout, 2, 2))
        print(refusal(checkpoints.wait, OSError))
        limit(resource.RLIM_INFINITY)
        checkpoints.save(state_at(layout, 3, 3))


def metrics_of(metrics):
    return {"loss": float(metrics["loss"])}


def refusal(ask, kind: type[Exception] = ValueError):
    with pytest.raises(kind, match=r".") as told:
        ask()
    return str(told.value)


def run(directory, what):
    """Run two processes; return what each of them printed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    path = f"{os.getcwd()}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, "-W", "ignore", "-c", WORKER, port]
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(directory), what],
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    told = [worker.communicate(timeout=240) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], told
    return [Path(f"{directory}-{rank}").read_text() for rank in (0, 1)]


def test_two_processes_save_and_fail_together_and_one_restores_it(tmp_path):
    directory = tmp_path / "run"
    told = run(directory, "work")
    assert told[0] == told[1]
    lines = [line.split(" ", 1) for line in told[0].splitlines()]
    losses = [float(loss) for word, loss in lines if word == "loss"]
    others = [rest for word, rest in lines if word != "loss"]
    assert "is being written by this process itself" in others[0]
    assert others[1] == "[2, 3] {'rows': 16} FSDP on fsdp=4, processes: 2"
    assert float(others[2]) == losses[2]
    assert others[3] == "3 2"
    assert "step 3 of" in others[4]
    assert "Step 2 is whole" in others[4]
    assert others[5] == "2 [2]"
    own = rf"{tmp_path}/own"
    lock = f"process 1: {own}1 is not the directory that process 0 writes to, {own}0 on "
    step = f"process 1: step 3 of {own}1 is not the one that process 0 reads: "
    said = [f"{lock}\\S+: there is no such directory\\. ", f"{lock}\\S+: it has no writer.lock\\. "]
    said += [f"{step}there is no such step\\. ", rf"{step}it is another one \(CRC32 \w+ of its "]
    assert re.match(".*".join(said), others[6])
    assert (directory / "3.damaged").is_dir()
    layout = mlp_layout(FSDP, {"fsdp": 2}, layers=1, dropout=0.1)
    state = hfjax.restore(directory, layout).state
    found = hfjax.train_step(layout, next_token_loss)(state, tokens())[1]["loss"]
    assert float(found) == pytest.approx(losses[2], rel=1e-5)


@pytest.mark.slow
def test_a_process_without_room_stops_the_step_of_all_and_they_go_on(tmp_path):
    other, own = run(tmp_path / "run", "no_room")
    assert "step 2 was not saved in" in other
    assert "another process did not write its part in time; its own error tells why" in other
    assert "step 2 was not saved in" in own
    assert "File too large" in own
    layout = small_layout(wide=8192)
    assert same(hfjax.restore(tmp_path / "run", layout).state, state_at(layout, 3, 3))
    assert hfjax.restore(tmp_path / "run", layout, 1).step == 1
