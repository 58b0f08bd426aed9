"""Mixtures of one's own, without hfjax.models.moe: their experts are whole where they are read."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax import DDP, EXPERT, FSDP, PIPE, ZERO1, ZERO2, Schedule
from hfjax.models.layers import run_stacked, stack_layers
from hfjax.models.moe import MoE, Router
from hfjax.testing import assert_strategies_agree

EXPERTS, WIDTH = 4, 8
QUIET = Router(balance_loss=0)
RNG = np.random.default_rng(0)
BATCH = {name: RNG.normal(size=(16, WIDTH)).astype(np.float32) for name in "xy"}


class Mixture(nnx.Module):
    """A layer that reads its experts in every way there is."""

    def __init__(self, *, rngs):
        self.router = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, EXPERTS)))
        kernels = 0.5 * jax.random.normal(rngs.params(), (EXPERTS, WIDTH, WIDTH))
        self.kernels_of_experts = nnx.Param(kernels, axes=("experts", "embed", None))

    def __call__(self, x):
        share = jax.nn.softmax(x @ self.router[...])
        kernels = self.kernels_of_experts[...]
        x = x + jnp.tanh(jnp.einsum("be,bd,edf->bf", share, x, kernels))
        x = x + sum(share[:, i, None] * jnp.tanh(x @ kernels[i]) for i in range(EXPERTS))
        x = x + jnp.einsum("bd,bdf->bf", x, kernels[share.argmax(-1)])
        each = jax.lax.map(lambda kernel: jnp.sin(x @ kernel), kernels)
        return jnp.tanh(x + jnp.einsum("be,ebd->bd", share, each))


class Called(nnx.Module):
    """Called as it is."""

    def __init__(self, rngs):
        self.mixture = Mixture(rngs=rngs)

    def __call__(self, batch):
        return self.mixture(batch["x"])


class Parts(nnx.Module):
    """In three parts: experts in embed, in the layers and in the head."""

    def __init__(self, rngs, listed=False):
        make = lambda rngs: Mixture(rngs=rngs)
        self.before = make(rngs)
        self.layers = nnx.List([make(rngs), make(rngs)]) if listed else stack_layers(2, make, rngs)
        self.after = make(rngs)

    def embed(self, batch):
        return self.before(batch["x"])

    def head(self, x):
        return self.after(x)

    def __call__(self, batch):
        x, each = self.embed(batch), self.layers
        if isinstance(each, nnx.List):
            for layer in each:
                x = layer(x)
            return self.head(x)
        graph, state = nnx.split(each)
        for number in range(2):
            x = nnx.merge(graph, jax.tree.map(lambda a, n=number: a[n], state))(x)
        return self.head(x)


def squares(outputs, batch):
    return jnp.square(outputs - batch["y"]).mean()


MODELS = {
    "called": Called,
    "parts": Parts,
    "listed": lambda rngs: Parts(rngs, listed=True),
}
TWICE = {"gradient_accumulation_steps": 2}
CASES = {
    "called": {
        "E": (DDP | EXPERT, {"expert": 4}),
        "E+D, accumulated": (DDP | EXPERT, {"expert": 2, "data": 2}, TWICE),
        "E+Z1": (ZERO1 | EXPERT, {"expert": 2, "data": 2}),
        "E+Z2, accumulated": (ZERO2 | EXPERT, {"expert": 2, "data": 2}, TWICE),
        "E+Z3": (FSDP | EXPERT, {"expert": 2, "fsdp": 2}),
    },
    "parts": {
        "E": (DDP | EXPERT, {"expert": 4}),
        "E+Z1, accumulated": (ZERO1 | EXPERT, {"expert": 2, "data": 2}, TWICE),
        "E+Z3, recomputed": (FSDP | EXPERT, {"expert": 2, "fsdp": 2}, {"remat": "full"}),
        "1F1B": (
            FSDP | EXPERT | PIPE, {"expert": 2, "fsdp": 2, "pipe": 2},
            {"schedule": Schedule("1f1b", 2)},
        ),
        "in the backward pass": (
            FSDP | EXPERT, {"expert": 2, "fsdp": 2}, {"optimizer_in_backward": True},
        ),
    },
    "listed": {
        "E": (DDP | EXPERT, {"expert": 4}),
        "E+Z3, accumulated": (FSDP | EXPERT, {"expert": 2, "fsdp": 2}, TWICE),
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*in no mixture")
@pytest.mark.parametrize("name", CASES)
def test_experts_of_ones_own_are_whole_where_they_are_read(name, short_cases):
    whole = lambda strategy: strategy.edit(replicate_below=0)
    chosen = short_cases(CASES[name], "E+Z1", "E+Z3, recomputed", "E+Z3, accumulated")
    cases = {case: (whole(given[0]), *given[1:]) for case, given in chosen.items()}
    optimizer = optax.sgd(0.1, momentum=0.9)
    assert_strategies_agree(MODELS[name], squares, BATCH, cases, optimizer=optimizer, steps=2)


class Penalised(nnx.Module):
    """Beside its mixture of hfjax, the model reads the experts of it."""

    def __init__(self, *, rngs):
        self.mixture = MoE(WIDTH, 4, EXPERTS, group=4, min_capacity=1, router=QUIET, rngs=rngs)

    def __call__(self, x):
        y, _ = self.mixture(x)
        down = self.mixture.each.down
        return x + y + jnp.square(down[...]).mean() * down[...][3, 0].sum()


class PenalisedParts(nnx.Module):
    """The same, layer by layer."""

    def __init__(self, rngs):
        self.layers = stack_layers(2, lambda rngs: Penalised(rngs=rngs), rngs)

    def embed(self, batch):
        return batch["x"]

    def head(self, x):
        return x

    def __call__(self, batch):
        return run_stacked(self.layers, batch["x"])


class PenalisedCalled(nnx.Module):
    def __init__(self, rngs):
        self.layer = Penalised(rngs=rngs)

    def __call__(self, batch):
        return self.layer(batch["x"])


@pytest.mark.slow
@pytest.mark.parametrize("model", [PenalisedCalled, PenalisedParts], ids=["called", "parts"])
def test_experts_of_hfjax_are_whole_for_what_reads_them_beside_their_mixture(model):
    cases = {"E": (DDP | EXPERT, {"expert": 4}), "E+Z3": (FSDP | EXPERT, {"expert": 2, "fsdp": 2})}
    cases = {name: (case[0].edit(replicate_below=0), *case[1:]) for name, case in cases.items()}
    assert_strategies_agree(model, squares, BATCH, cases, optimizer=optax.sgd(0.1), steps=2)


class InGroups(nnx.Module):
    """Groups of tokens that lie on several devices; the mixture runs twice in one function."""

    def __init__(self, rngs, group, width):
        self.into = nnx.Linear(4, width, rngs=rngs)
        options = {"group": group, "min_capacity": 1, "router": QUIET}
        self.mix = MoE(width, 8, 4, top_k=2, **options, rngs=rngs)
        self.out = nnx.Linear(width, 4, rngs=rngs)

    def __call__(self, batch):
        step = nnx.jit(lambda mix, x: x + mix(x)[0])
        return self.out(step(self.mix, step(self.mix, self.into(batch["x"]))))


@pytest.mark.slow
@pytest.mark.parametrize(("group", "width"), [(8, 6), (4, 8), (2, 8)])
@pytest.mark.parametrize("axis", ["data", "expert"])
def test_groups_of_any_size_have_the_experts_of_one_device(group, width, axis):
    strategy = hfjax.EXPERT if axis == "expert" else hfjax.DDP
    batch = {"x": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)}
    loss = lambda outputs, batch: ((outputs - 1) ** 2).mean()
    init = lambda rngs: InGroups(rngs, group, width)
    assert_strategies_agree(init, loss, batch, {axis: (strategy, {axis: 4})}, steps=1)


def test_which_experts_are_gathered_and_what_to_use_instead_is_told():
    message = r"mixture/kernels_of_experts: split over expert, and in no mixture .*moe.MoE\("
    mesh = hfjax.make_mesh(expert=4, data=2)
    layout = hfjax.layout(Called, optax.sgd(0.1), mesh, DDP | EXPERT)
    assert "note: mixture/kernels_of_experts: split over expert" in str(layout)
    with pytest.warns(UserWarning, match=message):
        hfjax.train_step(layout, squares)
    mine = hfjax.layout(PenalisedCalled, optax.sgd(0.1), mesh, DDP | EXPERT)
    assert "in no mixture" not in str(mine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hfjax.train_step(mine, squares)


def test_experts_of_hfjax_that_are_indexed_before_they_are_whole_are_refused():
    mesh = hfjax.make_mesh(expert=4, data=2)
    one = lambda model, batch: batch["x"] * model.layer.mixture.each.down[3, 0].sum()
    layout = hfjax.layout(PenalisedCalled, optax.sgd(0.1), mesh, DDP | EXPERT, forward=one)
    with pytest.raises(ValueError, match=r"has 1 of 4 experts.*parameter\[\.\.\.\]\[index\]"):
        hfjax.train_step(layout, squares).lower(BATCH)
