"""A program of its own on 64 fake devices: what is only lowered for more than a test has."""

import os
import subprocess
import sys

SET_UP = """
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 64)
"""


def printed(program: str) -> list[int]:
    """Return the numbers that a program prints, a line each."""
    where = os.environ | {"PYTHONPATH": f"{os.getcwd()}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-W", "ignore", "-c", SET_UP + program]
    done = subprocess.run(command, capture_output=True, text=True, env=where)
    assert done.returncode == 0, done.stderr[-2000:]
    return [int(line) for line in done.stdout.split()]
