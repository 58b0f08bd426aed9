"""Mixtures in training: biases that no optimizer moves, pyramids, groups of parameters, errors."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax import DDP, EXPERT, FSDP, HOST_OPTIMIZER, PIPE, TENSOR, ZERO2, Schedule
from hfjax.models.gpt import GPT, GPTConfig
from hfjax.models.loss import next_token_loss as of_tokens
from hfjax.models.moe import (
    MoE,
    MoEConfig,
    MoELlama,
    RoutedOutputs,
    Router,
    RouterMetrics,
    after_step,
    next_token_loss,
    uses_router_metrics,
    with_routing,
)
from hfjax.testing import assert_strategies_agree
from hfjax.utils.paths import flatten
from tests.moe_reference import updated_bias

RNG = np.random.default_rng(0)
TOKENS = {"tokens": RNG.integers(0, 32, (16, 9), np.int32)}
SHAPE: Any = {
    "vocab": 32,
    "length": 8,
    "layers": 2,
    "heads": 2,
    "kv_heads": 1,
    "embed": 16,
    "mlp": 8,
}
ROUTER = Router(scores="sigmoid", bias_rate=0.125, balance_loss=0, recentre=False)
BIASED = MoEConfig(**SHAPE, experts=4, min_capacity=1, router=ROUTER)
BIAS = "layers/mlp/router_bias"


@uses_router_metrics
def scaled_loss(outputs, batch):
    """Return the usual loss, times what the batch says."""
    mean = next_token_loss(outputs, {"tokens": batch["tokens"]})
    return replace(mean, total=mean.total * batch["scale"].mean())


def laid_out(config, strategy=DDP, optimizer=None, **sizes):
    devices = jax.devices()[: int(np.prod(list(sizes.values()), dtype=int))]
    mesh = hfjax.make_mesh(devices=devices, **sizes)
    model = lambda rngs: MoELlama(config, rngs=rngs)
    decayed = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.1))
    optimizer = optimizer or decayed
    return hfjax.layout(model, optimizer, mesh, strategy.edit(replicate_below=0))


def with_scale(scale):
    return TOKENS | {"scale": np.full(16, scale, np.float32)}


def bias_of(state):
    return np.asarray(hfjax.full_array(state.variables)["layers"]["mlp"]["router_bias"])


def moved(bias, metrics):
    """Return what a step makes of biases that had these loads."""
    loads = np.round(np.asarray(metrics["expert_load"]) * 16 * 8 * BIASED.top_k)
    assert loads.sum(1).tolist() == [16 * 8 * 2] * 2  # each choice counts once
    pairs = zip(bias, loads, strict=True)
    return [updated_bias(*pair, rate=0.125, recentred=False) for pair in pairs]


@pytest.mark.slow
def test_a_bias_moves_by_the_loads_of_a_step_whatever_the_optimizer_decays(tmp_path):
    """Microbatches, recomputed layers and devices count each token once."""
    layout = laid_out(BIASED, FSDP | EXPERT, expert=2, fsdp=2)
    run = {"gradient_accumulation_steps": 2, "remat": "full", "on_nonfinite": "skip"}
    step, state = hfjax.train_step(layout, scaled_loss, **run), hfjax.init(layout)
    assert not bias_of(state).any()
    before = bias_of(state)
    for _ in range(2):
        state, metrics = step(state, with_scale(1))
        np.testing.assert_array_equal(bias_of(state), moved(before, metrics))
        before = bias_of(state)
    assert before.any()
    state, metrics = step(state, with_scale(np.nan))
    assert not metrics["finite"]
    np.testing.assert_array_equal(bias_of(state), before)

    with hfjax.CheckpointManager(tmp_path, layout) as checkpoints:
        checkpoints.save(state)
    other = laid_out(BIASED, DDP, data=1)
    restored = hfjax.restore(tmp_path, other).state
    np.testing.assert_array_equal(bias_of(restored), before)
    restored, alone = hfjax.train_step(other, scaled_loss)(restored, with_scale(1))
    state, metrics = step(state, with_scale(1))
    np.testing.assert_array_equal(metrics["expert_load"], alone["expert_load"])
    np.testing.assert_array_equal(bias_of(restored), bias_of(state))


@pytest.mark.slow
def test_pyramids_train_and_tell_of_as_many_experts_as_each_layer_has():
    """A token goes to both experts of the first layer, and to three of the second."""
    config = MoEConfig(**SHAPE, experts=(2, 8), top_k=3, min_capacity=1)
    experts = hfjax.optimizers.by_path({"*/mlp/each/*": optax.sgd(1.0), "*": optax.sgd(0.5)})
    layout = laid_out(config, FSDP | EXPERT, experts, expert=2, fsdp=2)
    step, state = hfjax.train_step(layout, next_token_loss), hfjax.init(layout)
    state, first = step(state, TOKENS)
    for _ in range(6):
        state, _ = step(state, TOKENS)
    state, metrics = step(state, TOKENS)
    assert float(metrics["loss"]) < 0.9 * float(first["loss"])
    load = np.asarray(metrics["expert_load"])
    assert load.shape == (2, 8)
    assert not load[0, 2:].any()
    np.testing.assert_allclose(load.sum(1), 1, rtol=1e-6)
    most = float(max(2 * load[0].max(), 8 * load[1].max()))
    assert float(metrics["load_max_over_mean"]) == pytest.approx(most)
    assert metrics["dropped"].shape == metrics["router_entropy"].shape == (2,)
    assert 0 < float(metrics["router_entropy"][0]) <= np.log(2) * (1 + 1e-6)


@pytest.mark.slow
def test_in_bfloat16_tokens_that_are_gathered_train_as_those_that_are_exchanged():
    """XLA aborts on CPUs where a sum over devices is of bfloat16."""
    plain, found = replace(BIASED, router=Router()), {}
    for way in ("gather", "all_to_all"):
        layout = laid_out(plain, FSDP | EXPERT, expert=2, fsdp=2)
        step = hfjax.train_step(layout, next_token_loss, precision="bf16", dispatch=way)
        state, _ = step(hfjax.init(layout), TOKENS)
        found[way] = float(step(state, TOKENS)[1]["loss"])
    assert found["gather"] == pytest.approx(found["all_to_all"], rel=1e-3)
    assert np.isfinite(found["gather"])


@pytest.fixture(scope="module")
def still():
    """Experts that stay as they are: (layout, step)."""
    optimizer = hfjax.optimizers.by_path({"*/mlp/each/*": optax.sgd(0.0), "*": optax.sgd(0.1)})
    layout = laid_out(replace(BIASED, router=Router()), DDP | EXPERT, optimizer, expert=2)
    return layout, hfjax.train_step(layout, next_token_loss)


@pytest.mark.slow
def test_experts_may_have_an_optimizer_of_their_own(still):
    layout, step = still
    state = hfjax.init(layout)
    before = flatten(hfjax.full_array(state.params))
    state, _ = step(state, TOKENS)
    after = flatten(hfjax.full_array(state.params))
    same = {path for path, x in after.items() if np.array_equal(x, before[path])}
    assert same == {"layers/mlp/each/gate_up", "layers/mlp/each/down"}


class Own(nnx.Module):
    """Called as it is; an image is one token, and a group is of four."""

    def __init__(self, *, rngs):
        how = {"top_k": 1, "group": 4, "min_capacity": 1, "rngs": rngs}
        router = replace(ROUTER, balance_loss=0.1, z_loss=0.01, priority="random")
        own = lambda rngs: nnx.Linear(16, 16, rngs=rngs)
        self.first = MoE(16, 8, experts=4, shared=1, router=router, **how)
        self.second = MoE(16, 8, 2, expert=own, residual=True, router=router, **how)

    def __call__(self, batch):
        x = batch["x"]
        y, told = self.first(x, RouterMetrics.start(x, layers=2, experts=4))
        y, told = self.second(x + y, told)
        return RoutedOutputs(y, told)

    def after_step(self, variables, metrics):
        return after_step(variables, metrics, rate=0.125, counts=(4, 2))


@uses_router_metrics
def squares(routed, batch):
    losses = ((routed.outputs - batch["y"]) ** 2).mean(-1)
    return with_routing(losses, jnp.ones_like(losses), routed)


OWN = {
    "E": (DDP | EXPERT, {"expert": 2}),
    "E+D+Z": (FSDP | EXPERT, {"expert": 2, "fsdp": 2}),
    "E+D+M": (
        *(DDP | EXPERT | TENSOR, {"expert": 2, "tensor": 2}),
        {"gradient_accumulation_steps": 2},
    ),
    "E+Z-Off+M": (
        ZERO2 | EXPERT | TENSOR | HOST_OPTIMIZER, {"expert": 2, "data": 2, "tensor": 2},
    ),
    "no axis": (ZERO2, {"data": 4}),
}  # fmt: skip
DAILY = ("E+D+M",)
OTHERS = pytest.param([name for name in OWN if name not in DAILY], marks=pytest.mark.slow)


@pytest.mark.parametrize("names", [DAILY, OTHERS], ids=" ".join)
def test_models_that_are_called_as_they_are_train_as_on_one_device(names):
    batch = {name: RNG.normal(size=(16, 16)).astype(np.float32) for name in "xy"}
    cases = {name: (OWN[name][0].edit(replicate_below=0), *OWN[name][1:]) for name in names}
    optimizer = optax.sgd(0.1, momentum=0.9)
    assert_strategies_agree(
        lambda rngs: Own(rngs=rngs), squares, batch, cases, optimizer=optimizer, steps=2
    )


# Errors


def test_an_expert_axis_without_experts_is_refused():
    config = GPTConfig.tiny(vocab=32, length=8, layers=1, heads=2, embed=16)
    model, mesh = lambda rngs: GPT(config, rngs=rngs), hfjax.make_mesh(data=4, expert=2)
    layout = hfjax.layout(model, optax.sgd(0.1), mesh, DDP | EXPERT)
    with pytest.raises(ValueError, match=r"no parameter stays split over expert .*moe has such"):
        hfjax.train_step(layout, of_tokens)


def test_an_expert_axis_that_no_strategy_uses_is_refused():
    layout = laid_out(BIASED, DDP, data=2, expert=2)
    with pytest.raises(ValueError, match=r"no parameter .* under DDP\..* add hfjax.EXPERT\. To"):
        hfjax.train_step(layout, next_token_loss)


def test_experts_that_the_axis_does_not_divide_are_refused():
    message = r"each/down \(2, 6, 8, 16\).* \(experts, 6\) does not divide by 4 .* \[2, 3, 6\]; or"
    with pytest.raises(ValueError, match=message):
        laid_out(replace(BIASED, experts=6), EXPERT, expert=4)


def test_a_loss_that_takes_no_routing_is_refused_where_routers_add_to_it():
    step = hfjax.train_step(laid_out(BIASED, data=1), of_tokens)
    with pytest.raises(ValueError, match=r"the loss takes no part in it.*moe.next_token_loss"):
        step.lower(TOKENS)
    quiet = replace(BIASED, router=Router(balance_loss=0))
    hfjax.train_step(laid_out(quiet, data=1), of_tokens).lower(TOKENS)


@uses_router_metrics
def forgetful(outputs, batch):
    """Return the loss of tokens alone, though it is given what routers told."""
    return of_tokens(outputs.outputs, batch)


@pytest.mark.parametrize(
    ("strategy", "sizes", "fields"),
    [
        (DDP, {"data": 1}, {}),
        (DDP, {"data": 1}, {"optimizer_in_backward": True}),
        (PIPE, {"pipe": 2}, {"schedule": Schedule("pipedream", 2)}),
    ],
    ids=["autodiff", "in backward", "asynchronous"],
)
def test_a_loss_that_forgets_what_routers_told_is_refused_in_every_loop(strategy, sizes, fields):
    told = replace(BIASED, router=Router())
    step = hfjax.train_step(laid_out(told, strategy, optax.sgd(0.1), **sizes), forgetful, **fields)
    with pytest.raises(ValueError, match=r"the loss takes no part in it.*moe.next_token_loss"):
        step.trace(TOKENS)


def test_groups_that_do_not_divide_what_a_device_has_of_a_row_are_refused():
    step = hfjax.train_step(laid_out(replace(BIASED, group=3), data=1), next_token_loss)
    with pytest.raises(ValueError, match=r"MoE\(group=3\): .* choose one of 1, 2, 4, 8"):
        step.lower(TOKENS)


def test_a_list_of_unlike_mixtures_is_no_pipeline_with_an_expert_axis():
    config = MoEConfig(**SHAPE, experts=(4, 8))
    layout = laid_out(config, EXPERT | PIPE, expert=2, pipe=2)
    with pytest.raises(ValueError, match="from which none can stay split over expert"):
        hfjax.train_step(layout, next_token_loss, schedule=Schedule("1f1b", 4))


def test_the_first_router_whose_logits_are_not_finite_is_named(still):
    layout, step = still
    state = hfjax.init(layout)
    kernel = state.params["layers"]["mlp"]["router_kernel"]
    state.params["layers"]["mlp"]["router_kernel"] = kernel.at[1].set(3e38 * jnp.sign(kernel[1]))
    state, _ = step(state, TOKENS)
    with pytest.raises(FloatingPointError, match=r"finite: the first router .* mixture 1 of 2, c"):
        step.check(state)
