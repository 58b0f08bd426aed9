"""`step.gradients(…, returns=…)`: losses of microbatches, outputs of the model in that pass."""

import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax import CONTEXT, DDP, FSDP, HOST_PARAMETERS, PIPE, TENSOR, Schedule
from hfjax.models.gpt import next_token_loss
from hfjax.step.batches import batch_sharding
from tests.golden import cases, tokens
from tests.small_gpt import gpt_layout, mlps
from tests.test_gradients import SEAMLESS, layout_of

BOTH = ("losses", "outputs")
ACCUMULATED = {"gradient_accumulation_steps": 4}
PIPELINE = {"schedule": Schedule("1f1b", 4)}
CASES: dict[str, Any] = {
    "DDP": (DDP, {"data": 4}, {}, 1),
    "DDP, accumulated": (DDP, {"data": 2}, ACCUMULATED, 4),
    "FSDP, accumulated": (FSDP, {"fsdp": 4}, ACCUMULATED, 4),
    "TENSOR": (TENSOR, {"data": 2, "tensor": 2}, {}, 1),
    "1f1b": (PIPE, {"pipe": 2, "data": 2}, PIPELINE, 4),
    "1f1b, accumulated": (PIPE, {"pipe": 2}, PIPELINE | {"gradient_accumulation_steps": 2}, 8),
    "HOST_PARAMETERS": (FSDP | HOST_PARAMETERS, {"fsdp": 2}, ACCUMULATED, 4),
    "CONTEXT": (CONTEXT, {"data": 2, "context": 2}, ACCUMULATED, 4),
}
BATCH = tokens(mask=np.random.default_rng(0).integers(0, 2, (16, 24)).astype(np.float64))


def step_of(strategy, sizes, options):
    devices = jax.devices()[: math.prod(sizes.values())]
    layout = gpt_layout(strategy, sizes, optax.sgd(0.1), devices, mlps, dropout=0.5)
    step = hfjax.train_step(layout, next_token_loss, **options)
    return step, hfjax.init(layout, 0, options.get("schedule"))


@cache
def one_device():
    """Return gradients and metrics of one device, whose kernels would not compute any logits."""
    step, state = step_of(DDP, {"data": 1}, {"kernels": "reference"})
    gradients, metrics = step.gradients(state, BATCH, returns=("outputs",))
    return hfjax.full_array((gradients.tree(), metrics))


def loss_of(outputs, rows):
    """Return the loss of some rows, and their weight."""
    mean = next_token_loss(outputs[rows], {name: x[rows] for name, x in BATCH.items()})
    return float(mean.total / mean.weight), float(mean.weight)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.short("FSDP, accumulated", "1f1b")
def test_losses_and_outputs_are_those_of_one_device(name):
    """With dropout: outputs are those of this pass."""
    strategy, sizes, options, count = CASES[name]
    with jax.enable_x64(True):
        tree, expected = one_device()
        step, state = step_of(strategy, sizes, options)
        _, metrics = step.gradients(state, BATCH, returns=BOTH)
        assert sorted(metrics) == sorted([*expected, "losses"])
        outputs = metrics["outputs"]
        assert outputs.sharding.is_equivalent_to(batch_sharding(step.layout.mesh), outputs.ndim)
        limit: Any = {"rtol": 1e-10, "atol": 1e-12}
        np.testing.assert_allclose(hfjax.full_array(outputs), expected["outputs"], **limit)
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-10)
        assert metrics["losses"].shape == (count,)
        shards = math.prod(sizes.get(axis, 1) for axis in ("data", "fsdp"))
        rows = np.arange(16).reshape(shards, count, -1)
        parts = [loss_of(expected["outputs"], rows[:, m].reshape(-1)) for m in range(count)]
        losses, weights = np.array(parts).T
        np.testing.assert_allclose(metrics["losses"], losses, rtol=1e-10)
        mean = (hfjax.full_array(metrics["losses"]) * weights).sum() / weights.sum()
        np.testing.assert_allclose(mean, metrics["loss"], rtol=1e-12)
        norm = np.sqrt(sum((x**2).sum() for x in jax.tree.leaves(tree)))
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-10)


def squares(outputs, batch):
    return jnp.mean((outputs - batch) ** 2)


@pytest.mark.parametrize("sizes", [{"data": 1}, {"data": 4}])
def test_microbatches_in_which_examples_interact_are_those_of_one_device(sizes):
    """Outputs are in the order of the batch all the same."""
    mesh = hfjax.make_mesh(devices=jax.devices()[: sizes["data"]], **sizes)
    layout = hfjax.layout(lambda rngs: nnx.BatchNorm(3, rngs=rngs), optax.sgd(0.1), mesh, DDP)
    step = hfjax.train_step(layout, squares, gradient_accumulation_steps=2)
    x = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
    _, metrics = step.gradients(hfjax.init(layout), x, returns=BOTH)
    halves = [(half - half.mean(0)) / np.sqrt(half.var(0) + 1e-5) for half in (x[:8], x[8:])]
    np.testing.assert_allclose(metrics["outputs"], np.concatenate(halves), atol=1e-5)
    losses = [float(squares(y, half)) for y, half in zip(halves, (x[:8], x[8:]), strict=True)]
    np.testing.assert_allclose(metrics["losses"], losses, rtol=1e-5)


def with_total(model, batch):
    return {"y": model(batch), "total": batch.sum()}


def test_what_cannot_be_returned_is_refused_by_name():
    model = lambda rngs: nnx.Linear(3, 3, rngs=rngs)
    layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(data=8), DDP)
    forward = hfjax.layout(model, optax.sgd(0.1), layout.mesh, DDP, forward=with_total)
    named = lambda y, batch: hfjax.Mean(y.sum(), 1.0, metrics={"outputs": y.mean()})
    step, state = hfjax.train_step(layout, squares), hfjax.init(layout)
    x = np.ones((16, 3), np.float32)
    refused = {
        r"returns='losses'; a tuple of losses, outputs is": (step, "losses"),
        r"returns=\('loss',\); a tuple of losses, outputs": (step, ("loss",)),
        "returns=None; a tuple of losses, outputs": (step, None),
        r"the loss has a metric 'outputs'. Choose another": (
            hfjax.train_step(layout, named),
            ("outputs",),
        ),
        r"output\['total'\] of a microbatch, \[\], does not begin with its examples": (
            hfjax.train_step(forward, lambda y, batch: y["y"].mean()),
            ("outputs",),
        ),
    }
    for message, (step, returns) in refused.items():
        with pytest.raises(ValueError, match=message):
            step.gradients(state, x, returns=returns)


@pytest.mark.slow
def test_a_program_of_ones_own_has_both_too():
    step, state = step_of(FSDP, {"fsdp": 4}, ACCUMULATED)
    expected = step.gradients(state, BATCH, returns=BOTH)[1]
    run = jax.jit(lambda state, batch: step.gradients(state, batch, returns=BOTH)[1])
    for name, x in run(state, BATCH).items():
        np.testing.assert_allclose(x, expected[name], rtol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, case in cases().items() if case.run is None and name not in SEAMLESS]
)
def test_the_loss_of_the_outputs_is_that_of_the_step(name):
    """Under every strategy and synchronous schedule."""
    case = cases()[name]
    layout, batch = layout_of(case), case.batch or tokens()
    step = hfjax.train_step(layout, case.loss, **case.execution)
    state = hfjax.init(layout, 0, case.execution.get("schedule"))
    _, metrics = step.gradients(state, batch, returns=BOTH)
    loss = case.loss(hfjax.full_array(metrics["outputs"]), batch)
    value = loss.total / loss.weight if isinstance(loss, hfjax.Mean) else loss
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-2 if "bf16" in str(case) else 1e-5)
    np.testing.assert_allclose(metrics["losses"].mean(), value, rtol=1e-2)
