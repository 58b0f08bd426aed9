"""To trace a step calls each kind of layer once in each mode, whatever reads the model first."""

import re
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax import CONTEXT, EXPERT, FSDP, GRID, PIPE, Schedule
from hfjax.models.gpt import Block, next_token_loss
from hfjax.models.moe import next_token_loss as routed_loss
from hfjax.models.moe.moe_llama import Block as MixtureBlock
from hfjax.step import train_step
from hfjax.testing import assert_strategies_agree
from tests.golden import Called, Unlike, numbers, of_experts, squares
from tests.small_gpt import gpt, tokens


def train(layout, loss, batch, execution):
    hfjax.train_step(layout, loss, **execution).trace(batch)


def evaluate(layout, loss, batch, execution):
    jax.jit(hfjax.eval_step(layout, loss, **execution)).trace(layout.abstract_state(), batch)


def predict(layout, loss, batch, execution):
    jax.jit(hfjax.predict_step(layout, **execution)).trace(layout.abstract_state(), batch)


STACK = gpt(layers=4, dropout=0.1), next_token_loss, tokens(), Block
WHOLE = Called, next_token_loss, tokens(), Called
LIST = Unlike, squares, numbers(), nnx.Linear  # two layers and the head
MIXTURES = of_experts, routed_loss, tokens(), MixtureBlock
EIGHT, TWICE = {"fsdp": 8}, {"gradient_accumulation_steps": 2}
RING, PIPES = {"fsdp": 2, "context": 4}, {"pipe": 2, "data": 4}
BY_PATH = {"precision": {"*": "bf16", "*norm*": "fp32"}}
# What runs, on which mesh, and the calls before programs were kept.
CASES = {
    "whole model": (train, WHOLE, FSDP, EIGHT, {}, 1),
    "whole model, accumulate": (train, WHOLE, FSDP, EIGHT, TWICE, 2),
    "stack": (train, STACK, FSDP, EIGHT, {}, 2),
    "accumulate": (train, STACK, FSDP, EIGHT, TWICE, 2),
    "list": (train, LIST, FSDP, EIGHT, {}, 3),
    "CONTEXT": (train, STACK, FSDP | CONTEXT, RING, {}, 4),
    "GRID": (train, STACK, FSDP | GRID, {"fsdp": 2, "row": 2, "tensor": 2}, {}, 4),
    "pipe": (train, STACK, PIPE, PIPES, {"schedule": Schedule("1f1b", 4)}, 2),
    "pipe, B and W": (train, STACK, PIPE, PIPES, {"schedule": Schedule("zb-h1", 4)}, 2),
    "pipe alone": (train, STACK, PIPE, {"pipe": 2}, {"schedule": Schedule("zb-h1", 4)}, 1),
    "pipe, CONTEXT": (
        train, STACK, PIPE | CONTEXT, {"pipe": 2, "context": 4},
        {"schedule": Schedule("1f1b", 4)}, 4,
    ),
    "experts": (train, MIXTURES, EXPERT, {"expert": 4, "data": 2}, {}, 2),
    "predict": (predict, STACK, FSDP, EIGHT, {}, 4),
    "eval": (evaluate, STACK, FSDP, EIGHT, {}, 2),
    "eval, CONTEXT": (evaluate, STACK, FSDP | CONTEXT, RING, {}, 4),
    "bf16 by path": (train, STACK, FSDP, EIGHT, BY_PATH, 5),
}  # fmt: skip
ONCE = {"list": 3}


@pytest.mark.parametrize("name", CASES)
def test_layers_are_called_once(name):
    run, (model, loss, batch, kind), strategy, sizes, execution, _ = CASES[name]
    devices = jax.devices()[: 2 if name == "pipe alone" else 8]
    mesh = hfjax.make_mesh(devices=devices, **sizes)
    layout = hfjax.layout(model, optax.adamw(1e-3), mesh, strategy)
    spy = mock.patch.object(kind, "__call__", autospec=True, side_effect=kind.__call__)
    with spy as called:
        run(layout, loss, batch, execution)
    assert called.call_count == ONCE.get(name, 1)


def test_a_batch_goes_through_the_files_in_the_order_that_is_written():
    """The docstring of step/train_step.py lists them."""
    layout = hfjax.layout(Called, optax.adamw(1e-3), hfjax.make_mesh(data=8), hfjax.DDP)
    step, batch, entered = hfjax.train_step(layout, next_token_loss), tokens(), {}

    def note(frame, event, _):
        if event == "call":
            entered.setdefault("/".join(Path(frame.f_code.co_filename).parts[-2:]))

    sys.setprofile(note)
    try:
        step.trace(batch)
    finally:
        sys.setprofile(None)
    written = re.findall(r"`([a-z_]+/[a-z_]+\.py)`", train_step.__doc__ or "")
    assert [file for file in entered if file in written] == written


class Signed(nnx.Module):
    """A layer whose number is equal to another's, and does not compute the same."""

    def __init__(self, number, *, rngs):
        self.number, self.map = number, nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.map(x) * jnp.copysign(jnp.ones_like(x), jnp.full_like(x, float(self.number)))


class Scaled(nnx.Module):
    """A layer that keeps an array which is no variable."""

    def __init__(self, number):
        self.scale = np.full((1, 8), number, np.float32)

    def __call__(self, x):
        return x * self.scale


class Text(str):
    """Text that is equal to plain text, and is another type."""

    def __float__(self):
        return -1.0


class AlmostEqual(nnx.Module):
    def __init__(self, rngs):
        numbers = (0.0, -0.0, 0, False, "1", Text("1"), np.float64(1))
        signed = [Signed(number, rngs=rngs) for number in numbers]
        self.layers = nnx.List([*signed, Scaled(2), Scaled(3)])

    def embed(self, batch):
        return batch["x"]

    def head(self, x):
        return x[:, :5]


def test_layers_that_are_equal_to_python_only_are_not_one():
    cases = {"FSDP": (FSDP, EIGHT)}
    assert_strategies_agree(AlmostEqual, squares, numbers(), cases)
