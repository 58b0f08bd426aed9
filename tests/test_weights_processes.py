"""Real processes read and write a model together: each byte by one of them, or none goes on."""

import json
import os
import socket
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import hfjax
from hfjax.weights import load
from tests.model_folders import BF16, CONFIGS, drawn, written
from tests.test_weights import PADDED, assert_same_bits
from tests.workers import finished, start

SPLIT = hfjax.FSDP.edit(replicate_below=0)
CASES: dict[str, Any] = {
    "DDP": (hfjax.DDP, {"data": 4}),
    "FSDP": (SPLIT, {"fsdp": 4}),
    "TENSOR": (SPLIT | hfjax.TENSOR, {"fsdp": 2, "tensor": 2}),
    "PIPE": (hfjax.PIPE, {"pipe": 4}),
    "HOST": (SPLIT | hfjax.HOST_PARAMETERS, {"fsdp": 4}),
}
WORKER = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
port, rank, processes = map(int, sys.argv[1:4])
jax.config.update("jax_num_cpu_devices", 4 // processes)
jax.distributed.initialize(f"localhost:{port}", num_processes=processes, process_id=rank)
from tests.test_weights_processes import work
work(sys.argv[4], rank)
"""
WRONG = {"gone", "other", "unread", "full"}


def layout_of(model, case="FSDP"):
    strategy, sizes = CASES[case]
    return hfjax.layout(model.create, optax.sgd(0.1), hfjax.make_mesh(**sizes), strategy)


def sums_of(state):
    """A number for each parameter that its elements and their places make."""
    weigh = lambda x: (x * jax.numpy.cos(jax.numpy.arange(x.size).reshape(x.shape))).sum()
    put = lambda x: jax.device_put(x, jax.memory.Space.Device)
    return [float(jax.jit(lambda x: weigh(put(x)))(x)) for x in jax.tree.leaves(state.params)]


def work(root, rank):
    """What each process does; it prints a line of JSON for each case."""
    root = Path(root)
    say = lambda **words: print(json.dumps(words), flush=True)
    for most in (load.GROUP_BYTES, 4096):
        load.GROUP_BYTES = most
        model = hfjax.pretrained(root / "in", **PADDED)
        for case in CASES:
            weights, layout = model.weights, layout_of(model, case)
            state = hfjax.init(layout, parameters=weights)
            say(case=case, read=weights.read, sums=sums_of(state))
    layout = layout_of(model)
    state = hfjax.init(layout, parameters=model.weights)
    wrote = hfjax.export(root / "out", layout, state, like=model, shard="20kB")
    say(case="export", read=wrote)
    say(case="gone", told=refusal(lambda: hfjax.pretrained(root / ("in" if rank else "nowhere"))))
    other = hfjax.pretrained(root / ("other" if rank else "in"), **PADDED)
    say(case="other", told=refusal(lambda: hfjax.init(layout, parameters=other.weights)))

    weights = model.weights
    with denied() if rank else nullcontext():
        read = refusal(lambda: hfjax.init(layout, parameters=weights))
    say(case="unread", told=read)

    def full(*_):
        raise OSError(28, "No space left on device")

    if rank:
        os.pwrite = full
    export = lambda: hfjax.export(root / "never", layout, state, like=model)
    say(case="full", told=refusal(export), left=[p.name for p in root.glob("*never*")])


@contextmanager
def denied():
    """No file of tensors can be opened."""
    usual, os.open = os.open, lambda file, *more: _open(usual, file, *more)
    try:
        yield
    finally:
        os.open = usual


def _open(usual, file, *more):
    if str(file).endswith(".safetensors"):
        raise PermissionError(13, "Permission denied", file)
    return usual(file, *more)


def refusal(ask):
    try:
        ask()
    except ValueError as error:
        return str(error)
    return "nothing"


def told_by(processes, root):
    """Return the lines of each process."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    workers = [start(WORKER, port, rank, processes, root) for rank in range(processes)]
    told = finished(*workers, limit=150)
    assert {status for status, *_ in told} == {0}, told
    return [[json.loads(x) for x in out.splitlines() if x[:1] == "{"] for _, out, _ in told]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_read_and_write_a_model_together(processes, tmp_path):
    tensors = written(tmp_path / "in", CONFIGS["llama"], drawn(BF16), files=2)
    written(tmp_path / "other", CONFIGS["llama"] | {"rope_theta": 5e4}, drawn(BF16), files=2)
    told = told_by(processes, tmp_path)
    model = hfjax.pretrained(tmp_path / "in", **PADDED)
    one = hfjax.layout(
        model.create, optax.sgd(0.1), hfjax.make_mesh(devices=jax.devices()[:1]), hfjax.DDP
    )
    sums = sums_of(hfjax.init(one, parameters=model.weights))
    size = sum(x.nbytes for x in tensors.values())
    for lines in zip(*told, strict=True):
        case = lines[0]["case"]
        if case in WRONG:
            continue
        read = [line["read"] for line in lines]
        assert sum(read) == size, case  # every byte, once
        assert max(read) <= 1.3 * size / processes, case  # a share each
        if "sums" in lines[0]:
            np.testing.assert_allclose(lines[-1]["sums"], sums, rtol=1e-4, atol=1e-4)
    assert_same_bits(tmp_path / "out", tmp_path / "in")
    wrong = [{line["case"]: line for line in lines if line["case"] in WRONG} for lines in told]
    for of in wrong:
        assert "nowhere is missing: the folder of a model is expected" in of["gone"]["told"]
        assert "folder of the model of process 1" in of["other"]["told"].replace(", 2, 3", "")
        assert "process 1: " in of["unread"]["told"]
        assert "part-0.safetensors cannot be read (Permission denied)" in of["unread"]["told"]
        assert "process 1: " in of["full"]["told"]
        assert "No space left on device" in of["full"]["told"]
    assert wrong[0]["full"]["left"] == []  # the first process tidies up before it raises
