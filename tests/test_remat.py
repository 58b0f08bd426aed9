"""Remat: by words, by name, in one layer of k, in groups; what is kept is counted."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import hfjax
from hfjax import DDP, FSDP, HOST_PARAMETERS, PIPE, Schedule
from hfjax.analysis.residuals import saved_residuals
from hfjax.models.gpt import GPTConfig, next_token_loss
from hfjax.models.layers import stack_layers
from tests.small_gpt import SHAPE, MLPs, OnlyMLP, gpt, gpt_layout, mlps, tokens

Remat = hfjax.Remat
LAYERS, ROWS, LENGTH, EMBED = 6, 8, 32, 32
CARRY = ROWS * LENGTH * EMBED * 4  # bytes of what enters a layer


def gpt_step(remat, strategy=DDP, sizes=None, model=gpt, **options):
    shape = {"layers": LAYERS, "length": LENGTH, "embed": EMBED, "model": model}
    layout = gpt_layout(strategy, sizes or {"data": 1}, optax.sgd(0.1), **shape)
    return hfjax.train_step(layout, next_token_loss, remat=remat, unroll=1, **options)


@cache
def waiting(remat):
    """What layers keep until the backward pass."""
    found = saved_residuals(gpt_step(remat).trace(tokens(ROWS, LENGTH)))
    assert found is not None
    return [k for k in found if k.layers]


def kept(remat):
    return sum(k.total for k in waiting(remat))


def test_words_say_what_fields_do():
    assert Remat.of("full") == Remat()
    assert Remat.of("names:qkv, mlp_up") == Remat(names=("qkv", "mlp_up"))
    assert Remat.of("every:2") == Remat(every=2)
    assert Remat.of("group:4") == Remat(group=4)
    assert Remat.of(Remat("dots")) == Remat("dots")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("thin", r"remat='thin': one of none, dots, full"),
        ("every:some", r"remat='every:some': one of"),
        ("names:", r"remat='names:': one of"),
        (7, r"remat=7: one of"),
        ({"every": 0}, r"remat every=0: a positive number"),
        ({"every": 2, "group": 2}, "not with each other"),
        ({"what": "dots", "group": 2}, 'go with what="full"'),
        ({"what": "dots", "names": ("qkv",)}, "names are what"),
    ],
)
def test_what_is_no_remat_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Remat(**given) if isinstance(given, dict) else Remat.of(given)


def test_full_keeps_what_enters_each_layer():
    assert kept("full") == LAYERS * CARRY


@pytest.mark.slow
def test_by_name_it_also_keeps_what_is_named():
    wide = 4 * CARRY  # an MLP is four times as wide
    assert kept("names:mlp_up") == LAYERS * (CARRY + wide)
    assert kept("names:qkv,mlp_up") == LAYERS * (CARRY + 3 * CARRY + wide)


@pytest.mark.slow
def test_of_two_layers_one_keeps_all_and_the_other_what_enters_it():
    """It also keeps nothing of its weights; the layer that keeps all makes its views again."""
    assert 3 * CARRY < kept("every:2") <= (kept("full") + kept("none")) / 2
    assert not any(k.shape[0] != ROWS for k in waiting("every:2"))


@pytest.mark.slow
def test_of_a_group_only_what_enters_it_is_kept():
    assert kept("group:2") == 3 * CARRY
    assert kept("group:3") == 2 * CARRY


@cache
def trained(remat, strategy, sizes):
    step = gpt_step(remat, strategy, dict([sizes]), mlps)
    state, _ = step(hfjax.init(step.layout), tokens(ROWS, LENGTH))
    return hfjax.full_array(state.params)


@pytest.mark.parametrize(
    ("remat", "strategy", "sizes"),
    [
        ("every:4", FSDP, ("fsdp", 4)),
        ("group:4", DDP, ("data", 2)),
        ("names:mlp_up", FSDP, ("fsdp", 4)),
        ("every:4", DDP, ("data", 2)),
        ("group:4", FSDP, ("fsdp", 4)),
        ("names:mlp_up", DDP, ("data", 2)),
    ],
)
@pytest.mark.short("group:4-strategy1-sizes1")
def test_gradients_are_those_of_no_remat(remat, strategy, sizes):
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6)
    plain = trained("none", DDP, ("data", 2))
    jax.tree.map(close, trained(remat, strategy, sizes), plain)


class Unlike(nnx.Module):
    """Three layers in a list, two of which write to a variable."""

    def __init__(self, rngs):
        widths = ((8, 12), (12, 6), (6, 8))
        self.layers = nnx.List([Counting(*width, rngs) for width in widths])

    def embed(self, batch):
        return batch["x"]

    def head(self, x):
        return x

    def __call__(self, batch):
        x = self.embed(batch)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Counting(nnx.Module):
    """A layer that knows the mean of what it was given."""

    def __init__(self, inside, outside, rngs):
        self.linear = nnx.Linear(inside, outside, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(inside))

    def __call__(self, x):
        self.mean[...] = x.mean(axis=0)
        return jnp.tanh(self.linear(x))


@pytest.mark.parametrize("remat", ["every:2", "group:2"])
@pytest.mark.short("every:2")
def test_layers_of_a_list_go_together_and_keep_their_statistics(remat):
    mesh, batch = (
        hfjax.make_mesh(data=1),
        {"x": np.linspace(-1, 1, 32, dtype="float32").reshape(4, 8)},
    )
    layout = hfjax.layout(Unlike, optax.sgd(0.1), mesh, DDP)

    def trained(remat, **options):
        loss = lambda y, batch: (y**2).mean()
        step = hfjax.train_step(layout, loss, remat=remat, **options)
        state, _ = step(hfjax.init(layout), batch)
        return hfjax.full_array(state.params), hfjax.full_array(state.variables)

    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6)
    found = trained(remat)
    jax.tree.map(close, found, trained("none"))
    same = lambda a, b: np.testing.assert_array_equal(a, b)
    jax.tree.map(same, trained(remat, offload=0.5), found)


LOOPS = {
    "autodiff": (DDP, {"data": 1}, {}),
    "a pipeline": (PIPE, {"pipe": 2}, {"schedule": Schedule("1f1b", 2)}),
    "asynchronous": (PIPE, {"pipe": 2}, {"schedule": Schedule("pipedream", 2)}),
    "from the host": (HOST_PARAMETERS, {"data": 1}, {}),
    "in backward": (DDP, {"data": 1}, {"optimizer_in_backward": True}),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_names_that_no_layer_gives_are_refused(loop):
    strategy, sizes, fields = LOOPS[loop]
    step = gpt_step("names:qkv,nope", strategy, sizes, **fields)
    with pytest.raises(ValueError, match=r"no tensor of a layer is named 'nope'; named are .*qkv"):
        step.trace(tokens(ROWS, LENGTH))


class Longer(OnlyMLP):
    """A layer that keeps one tensor more of long rows, and names it."""

    def __call__(self, x):
        y = super().__call__(x)
        return jnp.sin(checkpoint_name(jnp.sin(y), "long")) if x.shape[1] == LENGTH else y


class Lengths(MLPs):
    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.layers = stack_layers(config.layers, lambda rngs: Longer(config, rngs=rngs), rngs)


def by_length(**changes):
    return lambda rngs: Lengths(GPTConfig.tiny(**(SHAPE | changes)), rngs=rngs)


def test_names_are_those_of_the_trace_that_asks_for_them():
    """Not of one before it, of a batch of another shape."""
    step = gpt_step("names:long", model=by_length)
    step.trace(tokens(ROWS, LENGTH))
    with pytest.raises(ValueError, match=r"no tensor of a layer is named 'long'; named are"):
        step.trace(tokens(ROWS, LENGTH // 2))
    step.trace(tokens(ROWS, LENGTH))  # JAX kept it: nothing is traced


@pytest.mark.slow
def test_the_report_of_what_is_offloaded_is_of_the_last_trace():
    both, short = (gpt_step("none", model=by_length, offload=0.5) for _ in range(2))
    both.trace(tokens(ROWS, LENGTH))
    for step in both, short:
        step.trace(tokens(ROWS, LENGTH // 2))
    assert both.offloaded.total_bytes == short.offloaded.total_bytes


def test_a_model_without_layers_has_none_to_compute_again():
    class Whole(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, batch):
            return self.linear(batch["x"])

    layout = hfjax.layout(Whole, optax.sgd(0.1), hfjax.make_mesh(data=1), DDP)
    with pytest.raises(ValueError, match="does not run in three parts"):
        hfjax.train_step(layout, lambda y, batch: (y**2).mean(), remat="full")
