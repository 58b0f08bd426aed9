"""A state that does not fit is told in words: before it is made, or where making it fails."""

import subprocess
import sys

import jax
import optax
import pytest
from flax import nnx

import hfjax
from hfjax.__main__ import main

PROGRAM = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (6_000_000_000, 6_000_000_000))
import jax
jax.config.update("jax_num_cpu_devices", 2)
import hfjax, optax
from flax import nnx
model = lambda rngs: nnx.Linear(40_000, 20_000, rngs=rngs)
layout = hfjax.layout(model, optax.adam(1e-3), hfjax.make_mesh(fsdp=2), hfjax.FSDP)
try:
    hfjax.init(layout)
except MemoryError as error:
    print(error)
"""


@pytest.mark.slow
def test_where_making_a_state_fails_it_is_told_what_it_needs():
    run = [sys.executable, "-c", PROGRAM]
    told = subprocess.run(run, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "the state does not fit: a device needs parameters 1.5 GiB, moments 3.0 GiB" in told
    assert "FSDP on fsdp=2" in told
    assert "hfjax.HOST_OPTIMIZER" in told


def test_a_state_larger_than_the_machine_is_refused_before_it_is_made():
    model = lambda rngs: nnx.Linear(1_000_000, 1_000_000, rngs=rngs)
    mesh = hfjax.make_mesh(devices=jax.devices()[:2], data=2)
    layout = hfjax.layout(model, optax.adam(1e-3), mesh, hfjax.DDP)
    with pytest.raises(MemoryError, match=r"a device needs parameters 3\.6 TiB.*there is room for"):
        hfjax.init(layout)


@pytest.mark.parametrize(
    ("flags", "told", "status"),
    [
        (["--model.hidden-size", "400000"], "the state does not fit: a device needs parameters", 1),
        (["--model.num-layers", "1000000000"], "layers=1000000000: from 1 to 100000 layers", 2),
    ],
)
def test_a_run_says_so_too(flags, told, status, tmp_path, capsys):
    given = [*flags, "--steps", "1", "--run-dir", str(tmp_path / "run"), "--log.sample-tokens", "0"]
    with pytest.raises(SystemExit) as ended:
        main(["train", *given])
    assert ended.value.code == status
    assert f"hfjax train: {told}" in capsys.readouterr().err
