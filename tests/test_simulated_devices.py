"""`hfjax.simulate_devices`: one program for a laptop, one GPU and eight."""

import os
import subprocess
import sys
from typing import Any

import jax
import pytest

import hfjax

PROGRAM = """
import sys
from unittest import mock
import hfjax
visible, count = sys.argv[1].split(",") if sys.argv[1] else [], int(sys.argv[2])
find = {"find_spec": lambda name: visible or None}
where = "hfjax.distributed.simulated_devices"
with mock.patch(f"{where}.visible_gpus", lambda: visible), mock.patch.multiple(
    f"{where}.importlib.util", **find
):
    hfjax.simulate_devices(count)
import jax
print(jax.config.jax_platforms, jax.config.jax_num_cpu_devices)
"""


def _configured(gpus, count, **environment):
    """Return what a program on a machine with these GPUs sets, and what it logs."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS")
    }
    command = [sys.executable, "-c", PROGRAM, ",".join(gpus), str(count)]
    done = subprocess.run(
        command, env=inherited | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip(), done.stderr


def test_devices_are_simulated_where_there_are_fewer_gpus():
    assert _configured([], 8) == ("cpu 8", "")
    assert _configured(list("01234567"), 8) == ("None -1", "")
    configured, logged = _configured(["0"], 8)
    assert configured == "cpu 8"
    assert "8 devices are needed and there are 1 GPUs: simulated CPU devices take" in logged


def test_a_choice_of_the_environment_stays():
    assert _configured([], 8, JAX_PLATFORMS="cuda")[0] == "cuda -1"
    assert _configured([], 8, JAX_NUM_CPU_DEVICES="2")[0] == "None 2"


def test_a_program_that_uses_jax_already_is_refused_if_it_has_too_few_devices():
    there = jax.device_count()
    hfjax.simulate_devices(there)
    told = rf"simulate_devices\(64\): JAX runs already, on {there} devices\. Call it before"
    with pytest.raises(ValueError, match=told):
        hfjax.simulate_devices(64)
    wrong: Any = (0, 2.5, None)
    for count in wrong:
        with pytest.raises(ValueError, match="a positive number of devices is expected"):
            hfjax.simulate_devices(count)
