"""Training on a real GPU: as on a CPU, and with state and activations in host memory."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import hfjax
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss
from hfjax.parallel.compiler_options import host_options
from hfjax.parallel.execution import Execution
from hfjax.parallel.offload.check_host_loops import check_host_loops
from hfjax.utils.paths import flatten

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[1]
SHAPE: dict[str, Any] = {
    "vocab": 256,
    "length": 64,
    "layers": 2,
    "heads": 2,
    "embed": 128,
}  # heads of 64
ROWS, STEPS = 2, 4
# The gradients of key biases are zero but for rounding, which a smaller eps makes large updates of.
EPS = 1e-4
# Products as XLA chooses them without trying: two programs choose alike. And updates as written.
ALIKE = {"xla_gpu_autotune_level": 0, "xla_disable_hlo_passes": "algsimp"}
REFERENCE = "from tests.test_gpu import trained; import json; print(json.dumps(trained()[1]))"


def layout_of(strategy=hfjax.DDP):
    config = GPTConfig(**SHAPE)
    mesh = hfjax.make_mesh(devices=jax.devices()[:1], data=1)
    optimizer = optax.adamw(1e-3, eps=EPS)
    return hfjax.layout(lambda rngs: GPT(config, rngs=rngs), optimizer, mesh, strategy)


def batch(number):
    draw = np.random.default_rng(number)
    shape = (ROWS, SHAPE["length"] + 1)
    return {"tokens": draw.integers(0, SHAPE["vocab"], shape).astype(np.int32)}


def trained(strategy=hfjax.DDP, **execution):
    """The state and the losses after some steps."""
    layout = layout_of(strategy)
    with jax.default_matmul_precision("highest"):
        fields = {"precision": "stored", **execution}
        step = hfjax.train_step(layout, next_token_loss, **fields)
        state, losses = hfjax.init(layout), []
        for number in range(STEPS):
            state, metrics = step(state, batch(number))
            losses.append(float(metrics["loss"]))
    step.check(state)
    return state, losses


def on_cpu():
    """The losses of the same training on a CPU, in a process that knows no GPU."""
    settings = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", REFERENCE]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-1000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def reference():
    return on_cpu()


def alike(**execution: Any) -> dict[str, Any]:
    return {"compiler_options": ALIKE, **execution}


def assert_same_bits(one, other):
    for (path, x), y in zip(flatten(one).items(), flatten(other).values(), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=path)


def assert_same_but_for_rounding(one, other, limit=1e-4):
    """Each parameter, relative to its norm: single numbers may be as good as zero."""
    for (path, x), y in zip(flatten(one).items(), flatten(other).values(), strict=True):
        apart = np.linalg.norm(np.asarray(x) - np.asarray(y)) / np.linalg.norm(np.asarray(y))
        assert apart <= limit, (path, apart)


def test_training_in_float32_gives_the_losses_of_a_cpu(reference):
    np.testing.assert_allclose(trained()[1], reference, rtol=1e-4)


@pytest.mark.parametrize("execution", [{}, {"remat": "full"}, {"unroll": True}])
def test_training_in_bfloat16_with_cudnn_gives_nearly_the_losses_of_a_cpu(reference, execution):
    np.testing.assert_allclose(trained(precision="bf16", **execution)[1], reference, rtol=1e-2)


def test_gradients_of_loops_that_use_the_host_are_right_here():
    layout = layout_of()
    check_host_loops(layout.mesh, host_options("gpu"))
    check_host_loops(layout.mesh, host_options("gpu", parameters=True))


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_offload_changes_no_loss(ratio):
    plain, losses = trained(**alike(unroll=1))
    state, found = trained(**alike(offload=ratio))
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    assert_same_but_for_rounding(state.params, plain.params)


@pytest.mark.parametrize(
    ("strategy", "part"),
    [(hfjax.HOST_OPTIMIZER, "optimizer"), (hfjax.HOST_PARAMETERS, "params")],
)
def test_a_state_on_the_host_stays_there_and_trains_as_on_the_device(strategy, part):
    state, losses = trained(hfjax.DDP | strategy, **alike())
    plain, expected = trained(**alike())
    arrays = [x for x in jax.tree.leaves(getattr(state, part)) if x.ndim]
    assert {x.sharding.memory_kind for x in arrays} == {"pinned_host"}
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_same_but_for_rounding(state.params, plain.params)


def test_a_state_is_saved_and_restored(tmp_path):
    state, _ = trained()
    layout = layout_of()
    hfjax.save(tmp_path / "saved", layout, state)
    restored = hfjax.restore(tmp_path / "saved", layout).state
    assert_same_bits(restored.params, state.params)


def test_training_with_every_kernel_gives_the_losses_of_none():
    if "kernels" not in {field.name for field in fields(Execution)}:
        pytest.skip("the execution has no field kernels")
    none = trained(precision="bf16", kernels="xla")[1]
    every = trained(precision="bf16", kernels="pallas")[1]
    np.testing.assert_allclose(every, none, rtol=1e-2)
