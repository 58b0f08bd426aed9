"""Layers in no loop, tied to one another: those of one device; they send what a loop does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax.models.gpt import next_token_loss
from hfjax.parallel.layer_stack.unrolled_layers import describe_unroll
from hfjax.testing import assert_strategies_agree
from tests.small_gpt import gpt, gpt_layout, tokens
from tests.test_layer_stack_batch import BATCH, loss, model

STRATEGIES = {
    "FSDP": (hfjax.FSDP.edit(replicate_below=0), {"fsdp": 4}),
    "HSDP": (hfjax.HSDP.edit(replicate_below=0), {"data": 2, "fsdp": 4}),
    "DDP": (hfjax.DDP, {"data": 4}),
    "ZERO2": (hfjax.ZERO2.edit(replicate_below=0), {"data": 2, "fsdp": 2}),
}
RUNS = {
    "kept": {"remat": "none"},
    "full": {"remat": "full"},
    "dots": {"remat": "dots"},
    "microbatches": {"remat": "full", "gradient_accumulation_steps": 2},
    "gathered once": {"remat": "full", "reshard_after_forward": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("listed", [False, True], ids=["stack", "list"])
def test_layers_in_turn_are_those_of_one_device(strategy, run, listed):
    """Rows that join, statistics and dropout in each layer."""
    init = model(listed=listed, layers=3, writes=True, rate=0.3)
    case = {strategy: STRATEGIES[strategy]}
    assert_strategies_agree(init, loss, BATCH, case, steps=2, unroll=True, **RUNS[run])


TENSORS = {
    "FSDP | TENSOR | SEQUENCE": (
        hfjax.FSDP | hfjax.TENSOR | hfjax.SEQUENCE,
        {"fsdp": 2, "tensor": 2},
    ),
    "FSDP | CONTEXT": (hfjax.FSDP | hfjax.CONTEXT, {"fsdp": 2, "context": 2}),
    "FSDP, rows in parts": (hfjax.FSDP, {"fsdp": 2}, {"tensor_overlap_chunks": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("remat", ["none", "full", "names:mlp_up"])
def test_also_of_a_gpt(name, remat):
    strategy, *rest = TENSORS[name]
    case = {name: (strategy.edit(replicate_below=0), *rest)}
    execution = {"unroll": True, "remat": remat}
    assert_strategies_agree(gpt(), next_token_loss, tokens(), case, steps=2, **execution)


class Bare(nnx.Module):
    """A layer without parameters."""

    def __call__(self, x):
        return jnp.sin(x)


class Unlike(nnx.Module):
    """Layers that are not alike: one has no parameters, one is a function."""

    def __init__(self, rngs):
        one = lambda: nnx.Linear(4, 4, rngs=rngs)
        self.layers = nnx.Sequential(one(), Bare(), jnp.tanh, nnx.BatchNorm(4, rngs=rngs), one())

    def embed(self, batch):
        return batch["x"]

    def head(self, x):
        return {"x": x, "added": 0.0}


@pytest.mark.parametrize("remat", ["none", "full"])
def test_layers_of_a_list_may_be_anything(remat):
    cases = {name: STRATEGIES[name] for name in ("FSDP", "HSDP")}
    execution = {"unroll": True, "remat": remat}
    assert_strategies_agree(Unlike, loss, BATCH, cases, steps=2, **execution)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_one_layer_has_no_neighbours(count):
    case = {"FSDP": STRATEGIES["FSDP"]}
    init = model(layers=count, rate=0.3)
    assert_strategies_agree(init, loss, BATCH, case, steps=2, unroll=True, remat="full")


def steps(plan, batch, **execution):
    step, state, told = hfjax.train_step(plan, next_token_loss, **execution), hfjax.init(plan), []
    for _ in range(3):
        state, metrics = step(state, batch)
        told.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return step, told


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize(
    "frozen", [("layers/mlp/*",), ("layers/*",), ("tokens*", "layers/attention/*")]
)
def test_frozen_parameters_have_no_gradient(remat, frozen):
    plan = gpt_layout(hfjax.FSDP, {"fsdp": 8}, dropout=0.1).freeze(*frozen)
    _, wanted = steps(plan, tokens(), remat=remat, unroll=1)
    _, found = steps(plan, tokens(), remat=remat, unroll=True)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("precision", ["stored", "bf16"])
def test_a_loop_sends_the_same(remat, precision):
    """Each parameter is gathered twice, its gradient scattered once, whatever the form."""
    plan, batch = gpt_layout(hfjax.HSDP, {"data": 2, "fsdp": 4}, layers=4), tokens()
    sent = []
    for unroll in (1, True):
        step = hfjax.train_step(
            plan, next_token_loss, remat=remat, unroll=unroll, precision=precision
        )
        found = {}
        for c in hfjax.collectives(step.lower(batch)):
            found[c.kind, c.axes, c.dtype] = (
                found.get((c.kind, c.axes, c.dtype), 0) + c.bytes * c.count
            )
        sent.append(found)
    assert sent[0] == sent[1]


@pytest.mark.slow
def test_a_number_that_does_not_divide_the_layers_is_taken_as_it_is():
    plan, batch = gpt_layout(hfjax.FSDP, {"fsdp": 8}, layers=3), tokens()
    _, wanted = steps(plan, batch, unroll=1)
    for unroll in (2, True, 7):
        np.testing.assert_allclose(steps(plan, batch, unroll=unroll)[1], wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("execution", "words"),
    [
        ({}, "layers in a loop (as measured on CPUs)"),
        ({"unroll": True}, "layers in no loop, tied to their neighbours"),
        ({"unroll": 2}, "layers in a loop (unroll=2)"),
        ({"reshard_after_forward": False}, "layers in no loop,"),
    ],
)
def test_a_step_tells_how_its_layers_run(execution, words):
    plan = gpt_layout(hfjax.FSDP, {"fsdp": 8})
    assert words in repr(hfjax.train_step(plan, next_token_loss, **execution))


def test_on_gpus_the_reason_for_a_loop_is_told():
    step = hfjax.train_step(gpt_layout(hfjax.FSDP, {"fsdp": 8}), next_token_loss)
    run = dataclasses.replace(step.engine.context.options, platform="gpu")
    assert describe_unroll(run, 40) == "in no loop, tied to their neighbours"
    assert describe_unroll(run, 41) == "in a loop (more than 40)"
    others = dataclasses.replace(run, only_batch_axes=False)
    assert describe_unroll(others, 2) == "in a loop (the mesh has axes that are not of examples)"
    grouped = dataclasses.replace(run, execution=hfjax.Execution(remat=hfjax.Remat.of("group:2")))
    assert describe_unroll(grouped, 2) == "in a loop (remat is of several)"
    sent = dataclasses.replace(run, execution=hfjax.Execution(offload=hfjax.Offload.of(0.5)))
    assert describe_unroll(sent, 2) == "in a loop (the host keeps a part)"


def test_layers_of_a_list_are_told_to_be_in_no_loop():
    sizes = {"fsdp": 4}
    mesh = hfjax.make_mesh(devices=jax.devices()[:4], **sizes)
    plan = hfjax.layout(Unlike, optax.adam(1e-2), mesh, hfjax.FSDP.edit(replicate_below=0))
    assert "layers in no loop, Execution" in repr(hfjax.train_step(plan, loss))
    assert "tied to their neighbours" in repr(hfjax.train_step(plan, loss, unroll=True))
