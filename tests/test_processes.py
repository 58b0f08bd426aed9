"""Two real processes: each gives its own rows, and they train as one."""

import os
import re
import socket
import subprocess
import sys

import numpy as np
import pytest

import hfjax
from hfjax import CONTEXT, DDP, PIPE, Schedule
from hfjax.models.gpt import next_token_loss
from hfjax.parallel.strategy import FSDP, TENSOR
from tests.small_gpt import gpt_layout, mlp_layout, tokens

FSDP_TENSOR = ((FSDP | TENSOR).edit(replicate_below=0), {"fsdp": 2, "tensor": 2}, None)
POSITIONS = (FSDP | CONTEXT, {"context": 4}, None)
PIPELINE = (PIPE | DDP, {"pipe": 2, "data": 2}, Schedule("1f1b", 2))
CASES = {"rows": FSDP_TENSOR, "pipeline": PIPELINE, "positions": POSITIONS}
WORKER = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
rank = int(sys.argv[2])
jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=2, process_id=rank)
from tests.test_processes import CASES, given, losses
for case in sys.argv[3:]:  # stages and parts of all rows: both give all rows
    rows = slice(8 * rank, 8 * rank + 8) if case == "rows" else slice(None)
    print(case, *losses(rows, *CASES[case]))
print("given", *given())
"""


def given():
    """Return the sum of parameters that a function gave, and which rows of one were asked for."""
    layout, asked = mlp_layout(FSDP.edit(replicate_below=0), {"fsdp": 4}), []
    whole = {path: np.full(x.shape, 2.0, np.float32) for path, x in layout.arrays.items()}

    def part(path, slices):
        if path == "tokens":
            asked.append(slices[0].start)
        return whole[path][slices]

    states = [hfjax.init(layout, parameters=parameters) for parameters in (part, whole)]
    found = [hfjax.full(state.params)["tokens"].sum() for state in states]
    return [*map(float, found), *asked]


def losses(rows, strategy, sizes, schedule):
    layout = (gpt_layout if "context" in sizes else mlp_layout)(strategy, sizes)
    step = hfjax.train_step(layout, next_token_loss, accumulate=2, schedule=schedule)
    state = hfjax.init(layout)
    mine = {"tokens": tokens()["tokens"][rows]}
    found = []
    for _ in range(3):
        state, metrics = step(state, hfjax.shard_batch(layout, mine))
        found.append(float(metrics["loss"]))
    whole = hfjax.full(state.params)
    return [*found, float(sum(np.abs(x).sum() for x in [whole["tokens"], whole["positions"]]))]


@pytest.fixture(scope="module")
def told_by_two(request):
    """What two processes print that train the cases which were drawn."""
    drawn = [case for case in CASES if any(f"[{case}]" in x.name for x in request.session.items)]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-W", "ignore", "-c", WORKER, port]
    path = f"{os.getcwd()}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    run = lambda rank: subprocess.Popen(
        [*command, str(rank), *drawn],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    workers = [run(0), run(1)]
    told = [worker.communicate(timeout=240) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], told
    return [out for out, _ in told]


def test_two_processes_are_asked_for_their_own_parts_of_given_parameters(told_by_two):
    lines = [re.findall(r"given (.*)", out)[0].split() for out in told_by_two]
    assert lines == [["4096.0", "4096.0", *rows] for rows in (["0", "16"], ["32", "48"])]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.drawn
def test_two_processes_with_their_own_rows_stages_or_positions_train_as_one(told_by_two, case):
    lines = [re.findall(rf"{case} (.*)", out)[0].split() for out in told_by_two]
    found = [[float(x) for x in line] for line in lines]
    assert found[0] == found[1]
    wanted = losses(slice(None), *CASES[case])
    np.testing.assert_allclose(found[0], wanted, rtol=1e-5)
