"""Two real processes save together, fail together, and one process restores what they wrote."""

import os
import socket
import subprocess
import sys
import warnings

import pytest

import hfjax
from hfjax import FSDP
from hfjax.models.gpt import next_token_loss
from tests.small_gpt import gpt_layout, tokens
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
from tests.test_checkpoint_processes import work
with open(f"{directory}-{rank}", "w") as file:
    sys.stdout = file  # gloo writes to the other one
    work(rank, Path(directory))
"""


def work(rank, directory):
    """Train and save; restore; be refused; pass over what is damaged."""
    layout = gpt_layout(FSDP, {"fsdp": 4}, layers=1, dropout=0.1)
    step = hfjax.train_step(layout, next_token_loss)
    mine = {"tokens": tokens()["tokens"][8 * rank : 8 * rank + 8]}
    state = hfjax.init(layout)
    with hfjax.Checkpoints(directory, layout, keep=hfjax.Keep(latest=2)) as checkpoints:
        for _ in range(3):
            state, metrics = step(state, hfjax.shard_batch(layout, mine))
            checkpoints.save(state, data={"rows": 16}, metrics=metrics_of(metrics))
            print("loss", float(metrics["loss"]))
        print("refused", refusal(lambda: hfjax.Checkpoints(directory, layout)))
        restored = checkpoints.restore(2)
        print("steps", checkpoints.steps(), restored.data, restored.origin)
        print("again", float(step(restored.state, hfjax.shard_batch(layout, mine))[1]["loss"]))
        if rank == 0:
            flip(arrays(directory / "3"))
        print("refused", refusal(checkpoints.restore))
        with warnings.catch_warnings(record=True):
            print("previous", checkpoints.restore(on_damage="previous").step, checkpoints.steps())


def metrics_of(metrics):
    return {"loss": float(metrics["loss"])}


def refusal(ask):
    with pytest.raises(ValueError, match=r".") as told:
        ask()
    return str(told.value)


def run(rank, port, directory):
    path = f"{os.getcwd()}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", WORKER, port, str(rank), str(directory)],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_save_and_fail_together_and_one_restores_it(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    directory = tmp_path / "run"
    workers = [run(rank, port, directory) for rank in (0, 1)]
    told = [worker.communicate(timeout=240) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], told
    told = [(tmp_path / f"run-{rank}").read_text() for rank in (0, 1)]
    assert told[0] == told[1]
    lines = [line.split(" ", 1) for line in told[0].splitlines()]
    losses = [float(loss) for word, loss in lines if word == "loss"]
    others = [rest for word, rest in lines if word != "loss"]
    assert "is being written by this process itself" in others[0]
    assert others[1] == "[2, 3] {'rows': 16} FSDP on fsdp=4, processes: 2"
    assert float(others[2]) == losses[2]
    assert "step 3 of" in others[3]
    assert "Step 2 is whole" in others[3]
    assert others[4] == "2 [2]"
    assert (directory / "3.damaged").is_dir()
    layout = gpt_layout(FSDP, {"fsdp": 2}, layers=1, dropout=0.1)
    state = hfjax.restore(directory, layout).state
    found = hfjax.train_step(layout, next_token_loss)(state, tokens())[1]["loss"]
    assert float(found) == pytest.approx(losses[2], rel=1e-5)
