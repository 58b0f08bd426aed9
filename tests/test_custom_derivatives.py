"""A derivative that is not linear in its cotangent sees what it sees in a loop of plain JAX.

The loop has as many microbatches as the step: a number that the loss returns is differentiated
with a seed of one, of a `Mean` total / weight is.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax import Schedule
from hfjax.models.layers import stack_layers
from hfjax.parallel.strategy import (
    CONTEXT,
    DDP,
    FSDP,
    HOST_OPTIMIZER,
    HOST_PARAMETERS,
    PIPE,
    TENSOR,
    ZERO1,
)

RULES = {
    "clip": lambda g: jnp.clip(g, -0.003, 0.003),
    "root": lambda g: jnp.sign(g) * jnp.sqrt(jnp.abs(g)),
    "direction of each example": lambda g: g / (1e-3 + jnp.abs(g).sum(-1, keepdims=True)),
    "direction of all": lambda g: g / (1e-3 + jnp.sqrt((g * g).sum())),
}


def bent(name):
    """The identity with a rule of this name."""

    @jax.custom_vjp
    def function(x):
        return x

    function.defvjp(lambda x: (x, None), lambda _, g: (RULES[name](g),))
    return function


class Layer(nnx.Module):
    def __init__(self, *, rngs):
        self.kernel = nnx.Param(0.5 * jax.random.normal(rngs.params(), (8, 8)), axes=(None, "mlp"))

    def __call__(self, x):
        return x + bent("root")(jnp.tanh(x @ self.kernel[...]))


class Stack(nnx.Module):
    """A model in three parts, with another rule in each of them."""

    def __init__(self, *, rngs):
        self.before = nnx.Param(0.5 * jax.random.normal(rngs.params(), (4, 8)))
        self.layers = stack_layers(2, lambda rngs: Layer(rngs=rngs), rngs)

    def embed(self, batch):
        return bent("clip")(batch["x"] @ self.before[...])

    def head(self, x):
        x = bent("direction of all")(x) @ self.before[...].T
        return bent("direction of each example")(x)


def plain(p, batch):
    """The same as a function of its parameters and a batch."""
    x = bent("clip")(batch["x"] @ p["before"])
    for kernel in p["layers"]["kernel"]:
        x = x + bent("root")(jnp.tanh(x @ kernel))
    x = bent("direction of all")(x) @ p["before"].T
    return bent("direction of each example")(x)


def number(outputs, batch):
    return jnp.square(outputs - batch["y"]).mean()


def mean(outputs, batch):
    """Examples weigh unequally; the factor is none of the weight's."""
    apart = jnp.square(outputs - batch["y"]).sum(axis=1) * batch["weight"]
    return hfjax.Mean(3 * apart.sum(), batch["weight"].sum())


def mean_of_tokens(outputs, batch):
    apart = jnp.square(outputs - batch["y"]).sum(axis=2) * batch["weight"]
    return hfjax.Mean(apart.sum(), batch["weight"].sum())


def of_outputs(outputs, batch):
    """The weight follows from the outputs."""
    weight = jax.lax.stop_gradient(jnp.abs(outputs).sum())
    return hfjax.Mean(jnp.square(outputs - batch["y"]).sum() * weight, weight)


def examples(n=16):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, n, 4)).astype(np.float32)
    return {"x": x, "y": y, "weight": rng.integers(0, 5, n).astype(np.float32)}


def loop(forward, loss, params, batch, microbatches, scale=1.0):
    """Return the gradient of the mean, as a loop of plain JAX has it."""

    def one(params, part):
        found = loss(forward(params, part), part)
        found = found if isinstance(found, hfjax.Mean) else hfjax.Mean(found, jnp.ones(()))
        return scale * found.total / found.weight, found.weight

    n = len(batch["x"]) // microbatches
    sums, weights = None, 0.0
    for i in range(microbatches):
        part = jax.tree.map(lambda x, i=i: x[i * n : (i + 1) * n], batch)
        gradient, weight = jax.grad(one, has_aux=True)(params, part)
        weighed = jax.tree.map(lambda g, w=weight: g * w / scale, gradient)
        sums = weighed if sums is None else jax.tree.map(jnp.add, sums, weighed)
        weights += weight
    return jax.tree.map(lambda g: g / weights, sums)


def trained(model, strategy, sizes, loss, batch, called=None, **run):
    """Return the gradient of one step, the parameters before it, and the step."""
    mesh = hfjax.make_mesh(devices=jax.devices()[: math.prod(sizes.values())], **sizes)
    strategy = strategy.edit(replicate_below=0)
    layout = hfjax.layout(model, optax.sgd(1.0, momentum=0.9), mesh, strategy, forward=called)
    state = hfjax.init(layout)
    before = hfjax.full_array(hfjax.to_model_order(layout, state).params)
    step = hfjax.train_step(layout, loss, **run)
    state, _ = step(state, batch)
    after = hfjax.full_array(hfjax.to_model_order(layout, state).params)
    return jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), before, after), before, step


CASES = {
    "one device": (DDP, {"data": 1}, {}, 1),
    "DDP": (DDP, {"data": 4}, {}, 1),
    "DDP, accumulated": (DDP, {"data": 4}, {"gradient_accumulation_steps": 2}, 2),
    "FSDP": (FSDP, {"fsdp": 4}, {"gradient_accumulation_steps": 2, "remat": "full"}, 2),
    "FSDP and TENSOR": (FSDP | TENSOR, {"data": 2, "fsdp": 2, "tensor": 2}, {}, 1),
    "in the backward pass": (FSDP, {"fsdp": 4}, {"optimizer_in_backward": True}, 1),
    "parameters on the host": (
        FSDP | HOST_PARAMETERS,
        {"fsdp": 2},
        {"gradient_accumulation_steps": 2},
        2,
    ),
    "optimizer on the host": (FSDP | HOST_OPTIMIZER, {"fsdp": 2}, {}, 1),
    "GPipe": (PIPE | ZERO1, {"pipe": 2, "data": 2}, {"schedule": Schedule("gpipe", 4)}, 4),
    "1F1B, accumulated": (
        PIPE,
        {"pipe": 2, "data": 2},
        {"schedule": Schedule("1f1b", 2), "gradient_accumulation_steps": 2},
        4,
    ),
    "zero bubble": (PIPE | FSDP, {"pipe": 2, "fsdp": 2}, {"schedule": Schedule("zb-h1", 2)}, 2),
}


def check(case, losses, model: Any = Stack, forward=plain, batch=None, **more):
    """Yield the step with each loss, once its gradient was that of the loop."""
    strategy, sizes, run, microbatches = case
    batch = examples() if batch is None else batch
    for loss in losses:
        made = lambda rngs: model(rngs=rngs)
        found, before, step = trained(made, strategy, sizes, loss, batch, **run, **more)
        wanted = loop(forward, loss, before, batch, microbatches)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6, err_msg=loss.__name__)
        yield step


@pytest.mark.short("zero bubble")
@pytest.mark.parametrize("name", CASES)
def test_rules_see_what_they_see_in_a_loop_of_plain_jax(name):
    list(check(CASES[name], [number, mean]))


def tree(*, rngs):
    """The parameters of `plain`, which is called as it is."""
    keys = jax.random.split(rngs.params(), 2)
    kernel = 0.5 * jax.random.normal(keys[0], (2, 8, 8))
    return {
        "before": 0.5 * jax.random.normal(keys[1], (4, 8)),
        "layers": {"kernel": kernel},
    }


@pytest.mark.short("strategy0-sizes0-2")
@pytest.mark.parametrize(
    ("strategy", "sizes", "accumulate"),
    [(DDP, {"data": 4}, 2), (FSDP, {"fsdp": 4}, 1)],
)
def test_so_do_those_of_a_model_that_is_called_as_it_is(strategy, sizes, accumulate):
    case = strategy, sizes, {"gradient_accumulation_steps": accumulate}, accumulate
    for step in check(case, [number, mean, of_outputs], tree, called=plain):
        assert "a derivative that is not linear: it sees the weight of all" in str(step.batch_comms)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "accumulate"), [({"context": 2}, 2), ({"data": 2, "context": 2}, 1)]
)
def test_so_do_those_where_devices_share_sequences(sizes, accumulate):
    def forward(p, batch):
        x = bent("clip")(batch["x"] @ p["before"])
        x = bent("direction of all")(x + jnp.cumsum(x, axis=1))
        return bent("root")(x) @ p["before"].T

    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, 4, 8, 4)).astype(np.float32)
    sequences = {"x": x, "y": y, "weight": rng.integers(0, 3, (4, 8)).astype(np.float32)}
    case = DDP | CONTEXT, sizes, {"gradient_accumulation_steps": accumulate}, accumulate
    only = lambda *, rngs: {"before": tree(rngs=rngs)["before"]}
    list(check(case, [number, mean_of_tokens], only, forward, sequences, called=forward))


def test_a_device_that_sees_its_own_rows_only_begins_with_one():
    list(check((DDP, {"data": 4}, {"batch_view": "local"}, 4), [number]))


@pytest.mark.parametrize("sizes", [{"data": 1}, {"data": 4}])
def test_under_a_loss_scale_they_see_so_many_times_more_as_with_deepspeed(sizes):
    """Each device that has rows of its own scales the mean of theirs."""
    seen = []

    @jax.custom_vjp
    def spy(x):
        return x

    spy.defvjp(lambda x: (x, None), lambda _, g: (jax.debug.callback(seen.append, g) or g,))
    forward = lambda p, batch: spy(batch["x"] @ p["w"])
    precision = hfjax.Precision("float16", scale=hfjax.LossScale(2.0**10))
    layout = hfjax.layout(
        lambda rngs: {"w": jnp.eye(4)},
        optax.sgd(1.0),
        hfjax.make_mesh(devices=jax.devices()[: sizes["data"]], **sizes),
        DDP,
        forward=forward,
    )
    for loss in (
        lambda outputs, batch: outputs.mean(),
        lambda outputs, batch: hfjax.Mean(7 * outputs.mean(), 7.0),
    ):
        step = hfjax.train_step(layout, loss, precision=precision, gradient_accumulation_steps=2)
        step.check(step(hfjax.init(layout), examples())[0])
        jax.effects_barrier()
        rows = 16 // sizes["data"]  # of a device, in a step
        assert {float(x) for g in seen for x in np.ravel(g)} == {2.0**10 / rows / 4}
        seen.clear()
