"""A user's own model trains as it is: any NNX module, a list of layers, Linen, a bare pytree."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import hfjax
from hfjax.parallel.strategy import DDP, FSDP, HSDP, ZERO2
from hfjax.testing import assert_strategies_agree

CASES = {
    "DDP": (DDP, {"data": 8}),
    "ZERO2": (ZERO2.edit(replicate_below=0), {"data": 2, "fsdp": 4}),
    "FSDP": (FSDP.edit(replicate_below=0), {"fsdp": 4}),
    "HSDP": (HSDP.edit(replicate_below=0), {"data": 2, "fsdp": 2}),
}
DAILY = ("HSDP",)


@pytest.fixture(
    params=[DAILY, pytest.param([n for n in CASES if n not in DAILY], marks=pytest.mark.slow)],
    ids=" ".join,
)
def cases(request):
    """A part of CASES: every day the one that gathers parameters and sums over nodes."""
    return {name: CASES[name] for name in request.param}


RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(16, 8)).astype(np.float32),
    "y": RNG.normal(size=(16, 8)).astype(np.float32),
}


BATCH_AXES: Any = ("data", "fsdp")


def on_x(model, batch):
    return model(batch["x"])


def squares(outputs, batch):
    return jnp.mean((outputs - batch["y"]) ** 2)


class Perceptron(nnx.Module):
    """The MLP of the NNX tutorial: it knows nothing of hfjax."""

    def __init__(self, *, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.norm(self.up(x))))


def test_a_module_that_knows_nothing_of_hfjax(cases):
    init = lambda rngs: Perceptron(rngs=rngs)
    assert_strategies_agree(init, squares, BATCH, cases, forward=on_x)


class Normed(nnx.Module):
    """Batch statistics over all devices, as flax spells it."""

    def __init__(self, *, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, axis_name=BATCH_AXES, momentum=0.5, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(self.norm(self.up(x)))


def test_batch_statistics_over_all_devices_are_carried_in_the_state(cases):
    init = lambda rngs: Normed(rngs=rngs)
    assert_strategies_agree(init, squares, BATCH, cases, forward=on_x)
    mesh = hfjax.make_mesh(data=4, fsdp=2)
    layout = hfjax.layout(init, optax.sgd(0.1), mesh, hfjax.FSDP, forward=on_x)
    state = hfjax.init(layout)
    before = hfjax.full_array(state.variables)["norm"]["mean"]
    state, _ = hfjax.train_step(layout, squares)(state, BATCH)
    assert not np.allclose(before, hfjax.full_array(state.variables)["norm"]["mean"])
    held = hfjax.full_array(state.variables)["norm"]["mean"]
    hfjax.eval_step(layout, squares)(state, BATCH)
    np.testing.assert_array_equal(held, hfjax.full_array(state.variables)["norm"]["mean"])


class Frozen(Perceptron):
    """Has a table that nothing writes to."""

    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.table = nnx.Variable(jax.random.normal(rngs.params(), (8, 3)))

    def __call__(self, x):
        return super().__call__(x * self.table[...].sum())


def test_a_variable_that_nothing_writes_to_is_not_sent_and_stays_bit_by_bit():
    mesh = hfjax.make_mesh(devices=jax.devices()[:6], data=6)
    layout = hfjax.layout(lambda rngs: Frozen(rngs=rngs), optax.sgd(0.1), mesh, DDP, forward=on_x)
    step, state = hfjax.train_step(layout, squares), hfjax.init(layout)
    batch = jax.tree.map(lambda x: x[:12], BATCH)
    before = hfjax.full_array(state.variables)["table"]
    assert not [row for row in hfjax.collectives(step.lower(batch)) if row.shape == (8, 3)]
    for _ in range(5):
        state, _ = step(state, batch)
    np.testing.assert_array_equal(before, hfjax.full_array(state.variables)["table"])


class Residual(nnx.Module):
    def __init__(self, width, *, rngs):
        self.up, self.down = nnx.Linear(8, width, rngs=rngs), nnx.Linear(width, 8, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


class Unlike(nnx.Module):
    """Three parts; the layers are a list of unlike modules."""

    def __init__(self, *, rngs):
        self.layers = nnx.List([Residual(width, rngs=rngs) for width in (16, 24)])
        self.out = nnx.Linear(8, 8, rngs=rngs)

    def embed(self, batch):
        return batch["x"]

    def head(self, x):
        return self.out(x)

    def __call__(self, batch):
        x = self.embed(batch)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remat", "name"),
    [
        ("full", "HSDP"),
        pytest.param("none", "ZERO2", marks=pytest.mark.slow),
        pytest.param("dots", "HSDP", marks=pytest.mark.slow),
        pytest.param("none", "HSDP", marks=pytest.mark.slow),
        pytest.param("full", "ZERO2", marks=pytest.mark.slow),
        pytest.param("dots", "ZERO2", marks=pytest.mark.slow),
    ],
)
def test_a_list_of_unlike_layers_under_every_remat(remat, name):
    init = lambda rngs: Unlike(rngs=rngs)
    assert_strategies_agree(init, squares, BATCH, {name: CASES[name]}, remat=remat)


class Tracked(Unlike):
    """A list in which a layer keeps running statistics."""

    def __init__(self, *, rngs):
        normed = nnx.BatchNorm(8, axis_name=BATCH_AXES, rngs=rngs)
        self.layers = nnx.List([Residual(16, rngs=rngs), normed])
        self.out = nnx.Linear(8, 8, rngs=rngs)


def test_a_listed_layer_writes_its_statistics_under_remat():
    mesh, init = hfjax.make_mesh(data=8), lambda rngs: Tracked(rngs=rngs)
    layout = hfjax.layout(init, optax.sgd(0.1), mesh, DDP)
    found = {}
    for remat in ("none", "full"):
        state, _ = hfjax.train_step(layout, squares, remat=remat)(hfjax.init(layout), BATCH)
        found[remat] = hfjax.full_array(state.variables)["layers"]["1"]["mean"]
        assert found[remat].any()
    np.testing.assert_allclose(found["full"], found["none"], rtol=1e-5)


class Scanned(nnx.Module):
    """A stack under the user's own nnx.scan and nnx.remat."""

    def __init__(self, *, rngs):
        make = nnx.vmap(lambda rngs: Residual(16, rngs=rngs), in_axes=(0,), out_axes=0)
        self.blocks = nnx.split_rngs(splits=4)(make)(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x, block):
            return block(x)

        return run(x, self.blocks)


STACK_NAMES = {
    f"blocks/{part}/{leaf}": ("layers", *names)
    for part in ("up", "down")
    for leaf, names in (("kernel", (None, None)), ("bias", (None,)))
}


@pytest.mark.slow
def test_a_stack_under_the_users_own_scan_with_the_name_of_the_stacked_dimension(cases):
    init = lambda rngs: Scanned(rngs=rngs)
    assert_strategies_agree(init, squares, BATCH, cases, forward=on_x, axes=STACK_NAMES)


class LinenPerceptron(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(8)(linen.relu(linen.Dense(16)(x)))


@pytest.mark.slow
def test_a_linen_module_through_flax_bridge(cases):
    def init(rngs):
        return nnx.bridge.ToNNX(LinenPerceptron(), rngs=rngs).lazy_init(BATCH["x"])

    assert_strategies_agree(init, squares, BATCH, cases, forward=on_x)


@pytest.mark.slow
def test_a_bare_pytree_is_a_model_whose_loss_is_given_the_tree(cases):
    def init(rngs):
        return {
            "up": jax.random.normal(rngs.params(), (8, 16)),
            "down": [jax.random.normal(rngs.params(), (16, 8)), jnp.zeros((8,))],
        }

    def loss(params, batch):
        outputs = jax.nn.relu(batch["x"] @ params["up"]) @ params["down"][0]
        return squares(outputs + params["down"][1][None], batch)

    assert_strategies_agree(init, loss, BATCH, cases)


class Transposed(nnx.Module):
    """Reads its parameter by every way there is."""

    def __init__(self, *, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (8, 8)))

    def __call__(self, x):
        return (x @ self.w.T + x @ self.w[:, ::-1] + x * self.w.sum()) @ self.w.get_value()


@pytest.mark.slow
def test_a_parameter_is_whole_by_whatever_way_it_is_read(cases):
    assert_strategies_agree(lambda rngs: Transposed(rngs=rngs), squares, BATCH, cases, forward=on_x)


class Pair(NamedTuple):
    weight: Any
    bias: Any


@pytest.mark.slow
def test_a_tree_keeps_the_order_of_its_own_leaves(cases):
    """Names sort otherwise than the leaves of a named tuple, or of a list of more than ten."""

    def init(rngs):
        many = [jnp.full((8, 8), float(i)) / 8 for i in range(12)]
        return {"pair": Pair(jnp.ones((8, 8)), jnp.zeros((8,))), "many": many}

    def loss(params, batch):
        x = batch["x"] @ params["pair"].weight + params["pair"].bias[None]
        return squares(x @ params["many"][2] + x @ params["many"][10] * 2, batch)

    assert_strategies_agree(init, loss, BATCH, cases)
    layout = hfjax.layout(init, optax.sgd(0.1), hfjax.make_mesh(fsdp=8), CASES["FSDP"][0])
    found = hfjax.train_step(layout, loss)(hfjax.init(layout), BATCH)[1]["loss"]
    np.testing.assert_allclose(found, loss(init(None), BATCH), rtol=1e-5)


class Lookalike(nnx.Module):
    """Has embed, layers and head, but they are modules: its own call is what counts."""

    def __init__(self, *, rngs):
        self.embed, self.head = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + nnx.relu(layer(x))
        return self.head(x)


@pytest.mark.slow
def test_a_model_that_only_looks_like_three_parts_is_called_as_it_is(cases):
    init = lambda rngs: Lookalike(rngs=rngs)
    assert_strategies_agree(init, squares, BATCH, cases, forward=on_x)


class Chain(nnx.Module):
    """Three parts; the layers are an nnx.Sequential that holds a function."""

    def __init__(self, *, rngs):
        self.layers = nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), nnx.relu, Residual(16, rngs=rngs))

    def embed(self, batch):
        return batch["x"]

    def head(self, x):
        return x

    def __call__(self, batch):
        return self.head(self.layers(self.embed(batch)))


@pytest.mark.slow
def test_a_sequential_with_functions_runs_layer_by_layer(cases):
    assert_strategies_agree(lambda rngs: Chain(rngs=rngs), squares, BATCH, cases)


class Rematted(Perceptron):
    @nnx.remat
    def __call__(self, x):
        return super().__call__(x)


@pytest.mark.slow
def test_two_steps_of_one_model_with_cached_inner_traces():
    layout = hfjax.layout(
        lambda rngs: Rematted(rngs=rngs),
        optax.sgd(0.1),
        hfjax.make_mesh(fsdp=8),
        FSDP,
        forward=on_x,
    )
    for _ in range(2):
        hfjax.train_step(layout, squares)(hfjax.init(layout), BATCH)
