"""`hfjax.simulate_devices`: one program for a laptop, one GPU and eight."""

import json
import os
import subprocess
import sys
from typing import Any

import jax
import pytest

import hfjax

PROGRAM = """
import json, logging, os, sys
from unittest import mock
import hfjax, jax
logging.basicConfig(format="%(message)s", stream=sys.stdout)
where = "hfjax.distributed.simulated_devices"
for gpus, environment in json.loads(sys.argv[1]):
    jax.config.update("jax_platforms", None)
    jax.config.update("jax_num_cpu_devices", -1)
    with (
        mock.patch(f"{where}.visible_gpus", lambda: gpus),
        mock.patch(f"{where}.importlib.util.find_spec", lambda name: gpus or None),
        mock.patch.dict(os.environ, environment),
    ):
        hfjax.simulate_devices(8)
    print(jax.config.jax_platforms, jax.config.jax_num_cpu_devices)
"""


def test_devices_are_simulated_where_there_are_fewer_gpus_and_no_variable_chooses():
    cases = [
        ([], {}),
        (list("01234567"), {}),
        (["0"], {}),
        ([], {"JAX_PLATFORMS": "cuda"}),
        ([], {"JAX_NUM_CPU_DEVICES": "2"}),
    ]
    chosen = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in chosen}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(cases)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "cpu 8",
        "None -1",
        "simulating 8 devices on the CPU, since this machine has fewer GPUs: 1",
        "cpu 8",
        "None -1",
        "None -1",
    ]


def test_a_program_that_uses_jax_already_is_refused_if_it_has_too_few_devices():
    there = jax.device_count()
    hfjax.simulate_devices(there)
    told = rf"simulate_devices\(64\): JAX runs already, with {there} of them\. Call it before"
    with pytest.raises(ValueError, match=told):
        hfjax.simulate_devices(64)
    wrong: Any = (0, 2.5, None)
    for count in wrong:
        with pytest.raises(ValueError, match="a positive number of devices is expected"):
            hfjax.simulate_devices(count)
