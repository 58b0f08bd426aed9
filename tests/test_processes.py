"""Two real processes: each gives its own rows, and they train as one."""

import os
import socket
import subprocess
import sys

import numpy as np

import hfjax
from hfjax.models.gpt import next_token_loss
from hfjax.parallel.strategy import FSDP, TENSOR
from tests.small_gpt import gpt_layout, tokens

WORKER = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
rank = int(sys.argv[2])
jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=2, process_id=rank)
from tests.test_processes import losses
rows = slice(8 * rank, 8 * rank + 8)
print("losses", *losses(rows))
"""


def losses(rows):
    layout = gpt_layout((FSDP | TENSOR).edit(replicate_below=0), {"fsdp": 2, "tensor": 2})
    step, state = hfjax.train_step(layout, next_token_loss, accumulate=2), hfjax.init(layout)
    mine = {"tokens": tokens()["tokens"][rows]}
    found = []
    for _ in range(3):
        state, metrics = step(state, hfjax.shard_batch(layout, mine))
        found.append(float(metrics["loss"]))
    whole = hfjax.full(state.params)
    return [*found, float(sum(np.abs(x).sum() for x in [whole["tokens"], whole["positions"]]))]


def test_two_processes_with_their_own_rows_train_as_one():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-W", "ignore", "-c", WORKER, port]
    path = f"{os.getcwd()}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    run = lambda rank: subprocess.Popen(
        [*command, str(rank)],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    workers = [run(0), run(1)]
    told = [worker.communicate(timeout=240) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], told
    lines = [out.split("losses ")[1].split() for out, _ in told]
    found = [[float(x) for x in line] for line in lines]
    assert found[0] == found[1]
    np.testing.assert_allclose(found[0], losses(slice(None)), rtol=1e-5)
