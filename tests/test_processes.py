"""Two real processes: each gives its own rows, and they train as one."""

import os
import re
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

import hfjax
from hfjax import CONTEXT, DDP, GRID, PIPE, Schedule
from hfjax.models.gpt import next_token_loss
from hfjax.parallel.strategy import FSDP, SEQUENCE, TENSOR
from hfjax.trainer import RunComponents, TrainConfig
from hfjax.trainer.config import MeshConfig
from tests.small_gpt import gpt_layout, mlp_layout, tokens

FSDP_TENSOR = ((FSDP | TENSOR).edit(replicate_below=0), {"fsdp": 2, "tensor": 2}, None)
POSITIONS = (FSDP | CONTEXT, {"context": 4}, None)
PIPELINE = (PIPE | DDP, {"pipe": 2, "data": 2}, Schedule("1f1b", 2))
WIDTH = (DDP | TENSOR, {"tensor": 4}, None)
SQUARE = (GRID, {"row": 2, "tensor": 2}, None)  # row is what the processes share
CASES = {"rows": FSDP_TENSOR, "pipeline": PIPELINE, "positions": POSITIONS}
CASES |= {"width": WIDTH, "square": SQUARE}
FEW = ((FSDP | TENSOR | SEQUENCE).edit(replicate_below=0), {"fsdp": 2, "tensor": 2}, None)
STAGES = (PIPE | DDP | TENSOR, {"pipe": 2, "tensor": 2}, Schedule("1f1b", 2))
LONG = (FSDP | CONTEXT | TENSOR, {"context": 2, "tensor": 2}, None)
HALVES = (DDP | TENSOR, {"data": 3, "tensor": 2}, None)  # of rows 8 to 15 each of two has one
MORE = {"few": FEW, "stages": STAGES, "long": LONG, "grid": SQUARE, "halves": HALVES}
WORKER = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
port, rank, processes, devices = map(int, sys.argv[1:5])
jax.config.update("jax_num_cpu_devices", devices)
jax.distributed.initialize(f"localhost:{port}", num_processes=processes, process_id=rank)
from tests.test_processes import CASES, MORE, given, losses, refused
for case in sys.argv[5:]:  # the first of CASES alone splits rows between two processes
    rows = slice(8 * rank, 8 * rank + 8) if case == "rows" else slice(None)
    print(case, *losses(None if case in MORE else rows, *(CASES | MORE)[case]), flush=True)
if MORE.keys() & {*sys.argv[5:]}:
    sys.exit()
print("given", *given())
for refusal in refused(rank):
    print("refused", refusal)
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
    found = [hfjax.full_array(state.params)["tokens"].sum() for state in states]
    return [*map(float, found), *asked]


def refused(rank):
    """Return what is said of rows that differ, and of meshes that leave process 1 out."""
    layout = mlp_layout(DDP | TENSOR, {"tensor": 4}, layers=1)
    step, state = hfjax.train_step(layout, next_token_loss), hfjax.init(layout)
    ahead = hfjax.shard_batch(layout, tokens())
    yield refusal(lambda: step(state, {"tokens": (tokens()["tokens"] + rank) % 64}))
    yield refusal(lambda: hfjax.eval_step(layout, next_token_loss)(state, tokens(16 - 8 * rank)))
    yield f"{float(step(state, ahead)[1]['loss']) > 0}"
    yield refusal(lambda: hfjax.make_mesh(data=2))
    yield refusal(lambda: RunComponents(TrainConfig(mesh=MeshConfig(data=2))).mesh)
    yield refusal(lambda: mlp_layout(DDP, {"data": 2}, devices=jax.devices()[:2], layers=1))


def refusal(ask):
    try:
        ask()
    except ValueError as error:
        return str(error)
    return "nothing"


def losses(rows, strategy, sizes, schedule):
    layout = (gpt_layout if {"context", "row"} & {*sizes} else mlp_layout)(strategy, sizes)
    step = hfjax.train_step(
        layout, next_token_loss, gradient_accumulation_steps=2, schedule=schedule
    )
    state, whole = hfjax.init(layout), tokens(24 if sizes.get("data") == 3 else 16)["tokens"]
    mine = {
        "tokens": whole[hfjax.process_batch_slice(layout, len(whole)) if rows is None else rows]
    }
    found = []
    for _ in range(3):
        state, metrics = step(state, hfjax.shard_batch(layout, mine))
        found.append(float(metrics["loss"]))
    whole = hfjax.full_array(state.params)
    return [*found, float(sum(np.abs(x).sum() for x in [whole["tokens"], whole["positions"]]))]


@pytest.fixture(scope="module")
def told_by_two(request):
    """What two processes print that train the cases which are run."""
    names = [x.name for x in request.session.items if x.path == request.path]
    return told_by(2, 2, [case for case in CASES if any(f"[{case}]" in x for x in names)])


def told_by(processes, devices, cases):
    """Return what so many processes print that train these cases."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-W", "ignore", "-c", WORKER, port]
    path = f"{os.getcwd()}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    run = lambda rank: subprocess.Popen(
        [*command, str(rank), str(processes), str(devices), *cases],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    workers = [run(rank) for rank in range(processes)]
    told = [worker.communicate(timeout=400) for worker in workers]
    assert {worker.returncode for worker in workers} == {0}, told
    return [out for out, _ in told]


@pytest.mark.slow
def test_two_processes_are_asked_for_their_own_parts_of_given_parameters(told_by_two):
    lines = [re.findall(r"given (.*)", out)[0].split() for out in told_by_two]
    assert lines == [["4096.0", "4096.0", *rows] for rows in (["0", "16"], ["32", "48"])]


def test_rows_that_differ_and_processes_without_a_device_are_refused_by_number(told_by_two):
    first, second = (re.findall(r"refused (.*)", out) for out in told_by_two)
    assert first[:5] == second[:5]
    differ = (
        "process 1 gave other examples of the batch than process 0: on mesh tensor=4 devices along "
    )
    assert first[0].startswith(
        f"{differ}tensor compute with the same examples, and belong to both. "
    )
    assert (
        "Give the same in each: those of hfjax.process_batch_slice(layout, global_batch_size)"
        in first[0]
    )
    assert first[1] == first[0]  # also another number of them
    assert first[2] == "True"  # those that are the same are none
    assert first[3].startswith("mesh data=2 has no device of process 1 of 2: it would never")
    assert "data" in first[4]  # also by the command line
    assert first[5] == "nothing"  # a process may have a mesh of its own
    assert second[5].startswith("mesh data=2 has no device of process 1 of 2, which is this one")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.short("rows")
def test_two_processes_with_their_own_rows_stages_positions_or_parts_of_layers_train_as_one(
    told_by_two, case
):
    check(told_by_two, case, CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "devices", "cases"),
    [(4, 1, ["few", "stages", "long", "grid"]), (2, 3, ["halves"])],
)
def test_more_processes_each_with_the_rows_of_its_devices_train_as_one(processes, devices, cases):
    told = told_by(processes, devices, cases)
    for case in cases:
        check(told, case, MORE[case])


def check(told, case, given):
    lines = [re.findall(rf"{case} (.*)", out)[0].split() for out in told]
    found = [[float(x) for x in line] for line in lines]
    assert all(line == found[0] for line in found)
    np.testing.assert_allclose(found[0], losses(slice(None), *given), rtol=1e-5)
