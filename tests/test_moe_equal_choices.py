"""In bfloat16 tokens choose on a mesh as they do on one device; what routers tell is not lost."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax import DDP, EXPERT, FSDP
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
from hfjax.utils.paths import flatten
from hfjax.utils.rounding import widen

RNG = np.random.default_rng(0)
TOKENS = {"tokens": RNG.integers(0, 64, (16, 17), np.int32)}
SHAPE: Any = {"vocab": 64, "length": 16, "layers": 2, "heads": 4, "kv_heads": 2, "embed": 32}
BF16 = hfjax.Precision(compute="bfloat16", reduce="float32")


def layout_of(model, strategy, **sizes):
    mesh = hfjax.make_mesh(devices=jax.devices()[: int(np.prod([*sizes.values()]))], **sizes)
    return hfjax.layout(model, optax.sgd(0.1), mesh, strategy.edit(replicate_below=0))


@pytest.mark.slow
def test_in_bfloat16_every_layer_chooses_as_on_one_device():
    config = MoEConfig(**SHAPE, mlp=16, min_capacity=1)
    loads: list[Any] = []
    cases = ((DDP, {"data": 1}), (DDP | EXPERT, {"expert": 4}), (FSDP | EXPERT, {"expert": 2}))
    for strategy, sizes in cases:
        layout = layout_of(lambda rngs: MoELlama(config, rngs=rngs), strategy, **sizes)
        # Not by a gather: XLA:CPU ends the process on its sum in bfloat16.
        travel = {"dispatch": "all_to_all"} if "expert" in sizes else {}
        step = hfjax.train_step(layout, next_token_loss, precision=BF16, **travel)
        metrics = step(hfjax.init(layout), TOKENS)[1]
        loads.append(
            np.round(np.asarray(metrics["expert_load"]) * TOKENS["tokens"][:, 1:].size * 2)
        )
    assert loads[0].sum(1).tolist() == [512, 512]
    np.testing.assert_array_equal(loads[1], loads[0])
    np.testing.assert_array_equal(loads[2], loads[0])


def test_a_number_that_is_decided_by_is_rounded_whatever_xla_leaves_out():
    x = RNG.normal(size=1024).astype(np.float32)
    rounded = np.asarray(jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32))
    found = jax.jit(lambda x: widen((x * 1).astype(jnp.bfloat16)))(x)
    np.testing.assert_array_equal(found, rounded)
    assert "reduce_precision" in str(jax.make_jaxpr(widen)(jnp.bfloat16(1)))
    assert "reduce_precision" not in str(jax.make_jaxpr(widen)(jnp.float32(1)))


class Two(nnx.Module):
    """Two mixtures, called in an order that may not be that of their names."""

    def __init__(self, rngs, names=("first", "second"), hands=True):
        router = Router(balance_loss=0, bias_rate=0.125, recentre=False)
        how: Any = {"top_k": 1, "group": 4, "min_capacity": 0, "router": router, "rngs": rngs}
        self.names, self.hands = names, hands
        for name in names:
            setattr(self, name, MoE(8, 4, experts=4, **how))

    def __call__(self, batch):
        told, x = RouterMetrics.start(batch["x"], layers=2, experts=4), batch["x"]
        for name in self.names:
            y, told = getattr(self, name)(x, told, batch.get("used"))
            x = x + 3 * y
        return RoutedOutputs(x, told) if self.hands else x

    def after_step(self, variables, metrics):
        return after_step(variables, metrics, rate=0.125, recentre=False)


@uses_router_metrics
def squares(routed, batch):
    losses = jnp.square(routed.outputs - batch["y"]).mean(-1)
    return with_routing(losses, jnp.ones_like(losses), routed)


BATCH = {name: RNG.normal(size=(16, 8)).astype(np.float32) for name in "xy"}


@pytest.mark.slow
def test_each_bias_moves_by_the_load_of_its_own_mixture_whatever_the_names():
    found = []
    for names in (("first", "second"), ("second", "first"), ("of9", "of10")):
        layout = layout_of(lambda rngs, names=names: Two(rngs, names), DDP | EXPERT, expert=2)
        state, metrics = hfjax.train_step(layout, squares)(hfjax.init(layout), BATCH)
        variables = flatten(hfjax.full_array(state.variables))
        load = np.asarray(metrics["expert_load"])[:: -1 if names[0] == "second" else 1]
        found.append(([variables[f"{name}/router_bias"] for name in names], load))
    assert not np.array_equal(found[0][0][0], found[0][0][1])
    jax.tree.map(np.testing.assert_array_equal, found[0], found[1])
    jax.tree.map(np.testing.assert_array_equal, found[0], found[2])


def without_routing(outputs, batch):
    y = outputs.outputs if isinstance(outputs, RoutedOutputs) else outputs
    return jnp.square(y - batch["y"]).mean()


@pytest.mark.parametrize("hands", [True, False], ids=["to the loss", "to none"])
def test_what_a_router_tells_is_lost_on_no_model(hands):
    layout = layout_of(lambda rngs: Two(rngs, hands=hands), DDP, data=2)
    with pytest.raises(ValueError, match=r"takes no part in it\..*return .*with_routing\("):
        hfjax.train_step(layout, without_routing).lower(BATCH)
    hfjax.eval_step(layout, without_routing)(hfjax.init(layout), BATCH)


def test_a_step_in_which_no_token_is_used_has_finite_metrics():
    layout = layout_of(Two, DDP, data=2)
    batch = BATCH | {"used": np.zeros(16, np.int32)}
    state, metrics = hfjax.train_step(layout, squares)(hfjax.init(layout), batch)
    assert all(np.isfinite(x).all() for x in metrics.values())
    assert not np.asarray(metrics["expert_load"]).any()
    assert not flatten(hfjax.full_array(state.variables))["first/router_bias"].any()


@pytest.mark.parametrize(
    ("x", "used", "message"),
    [
        ((2, 4, 6), None, r"MoE\(embed=8\) is given an array of shape \(2, 4, 6\): tokens are"),
        ((8,), None, r"MoE\(embed=8\) is given an array of shape \(8,\)"),
        ((2, 4, 8), np.ones(2, bool), r"used=…\) of shape \(2,\) .* one flag for each"),
        ((2, 4, 8), np.ones((2, 4)), r"used=…\) of dtype float\d\d: flags, or whole numbers"),
        ((2, 4, 8), 2 * np.ones((2, 4), int), r"used=…\) of dtype int\d\d: flags, or whole"),
    ],
)
def test_tokens_and_flags_of_another_form_are_refused(x, used, message):
    moe = MoE(8, 4, experts=4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=message):
        moe(jnp.ones(x), used=used)


def test_settings_without_effect_are_refused():
    with pytest.raises(
        ValueError, match=r"top_k=1\) with Router\(sample_second=True\): there is no"
    ):
        MoE(8, 4, experts=4, top_k=1, router="deepspeed-top2", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"only the loss over groups knows first choices"):
        Router(first_choices_only=True, balance_over="row")
    for strategy, sizes in ((DDP, {"data": 2}), (FSDP, {"fsdp": 2})):
        layout = layout_of(Two, strategy, **sizes)
        with pytest.raises(ValueError, match=r"dispatch='gather' on .*no tokens travel"):
            hfjax.train_step(layout, squares, dispatch="gather")
