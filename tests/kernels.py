"""Equipment of the kernels' tests: errors, the interpreter, what the assembler says of a kernel."""

import os
import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from hfjax.pallas_kernels import mosaic
from tests.h200 import OPTIMIZED

# One program after another: else what is said of two kernels mixes.
ALONE = {**OPTIMIZED, "xla_gpu_force_compilation_parallelism": "1"}
SHARED_MEMORY = 227 * 1024  # bytes that a block of a Hopper GPU may take
WITHOUT_INTERPRETER = jax.__version_info__ < (0, 11, 2)
needs_interpreter = pytest.mark.skipif(
    WITHOUT_INTERPRETER, reason="kernels are interpreted from jax 0.11.2 on (Python 3.12)"
)


@pytest.fixture
def interpreted(monkeypatch):
    """Every kernel runs in the interpreter, which looks for races and poisons what nobody wrote."""
    _interpret(monkeypatch, "races_raise")


@pytest.fixture
def interpreted_ring(monkeypatch):
    """As `interpreted`, on several fake devices: semaphores, peers' refs, deadlocks that raise."""
    _interpret(monkeypatch, "install")


def _interpret(monkeypatch, prepare):
    if WITHOUT_INTERPRETER:
        pytest.skip("kernels are interpreted from jax 0.11.2 on (Python 3.12)")
    from tests import interpreter  # needs what older versions lack

    getattr(interpreter, prepare)(monkeypatch)
    races: Any = getattr(plgpu, "InterpretGPUParams")(detect_races=True)  # noqa: B009
    monkeypatch.setattr(mosaic, "interpreter", races)


def relative(found, expected):
    """Return the error's norm over the norm of what is expected; NaN is an error of 1."""
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if not np.isfinite(found).all():
        return 1.0
    return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30))


def lowered(function, *arguments):
    """Return the text of a function lowered for CUDA: no wheel of CUDA is needed."""
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text, "no kernel is in this program"
    return text


@dataclass(frozen=True)
class Figures:
    """What the assembler says of one kernel."""

    registers: int
    spilled: int  # bytes
    shared: int | None  # bytes; unknown before jax 0.11

    def __str__(self):
        return f"{self.registers} registers, {self.spilled} bytes spilled, shared {self.shared}"


@contextmanager
def _asking_the_assembler():
    names = ("MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_RESOURCES")
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


def figures(capfd, function, *arguments):
    """Return the figures of each kernel in a function compiled for GPUs that are not here.

    The arguments are shapes with shardings on `tests.h200.h200s(…)`. `capfd` is pytest's.
    """
    capfd.readouterr()
    with _asking_the_assembler():
        jax.jit(function).lower(*arguments).compile(compiler_options=ALONE)
    text = capfd.readouterr().out
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", text)]
    spilled = re.findall(r"frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
    shared = [int(n) for n in re.findall(r"smem_scratch_bytes=(\d+)", text)]
    assert registers, f"the assembler said nothing:\n{text}"
    known = shared if len(shared) == len(registers) else [None] * len(registers)
    found = zip(registers, spilled, known, strict=True)
    return [Figures(r, int(s) + int(l), smem) for r, (s, l), smem in found]


def assert_fits(found):
    """No spills, shared memory in bounds; the figures are printed."""
    for kernel in found:
        print(kernel)
        assert kernel.spilled == 0, kernel
        assert kernel.shared is None or kernel.shared <= SHARED_MEMORY, kernel


def gaussian(seed, shape, dtype=jnp.float32):
    """Return normal numbers that NumPy drew: no program is compiled for them."""
    numbers = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return jnp.asarray(numbers.astype(dtype))


def normal(seed, shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)
