"""The loss is a true mean over all rows; what cannot be one is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hfjax
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss
from hfjax.parallel.strategy import DDP, FSDP
from hfjax.testing import assert_strategies_agree
from tests.small_gpt import tokens

CASES = {"DDP": (DDP, {"data": 8}), "FSDP": (FSDP.edit(replicate_below=0), {"data": 2, "fsdp": 4})}
RNG = np.random.default_rng(1)
BATCH = {"x": RNG.normal(size=(16, 8)).astype(np.float32), "weight": np.arange(16.0, dtype="f4")}
linear = lambda rngs: {"w": jax.random.normal(rngs.params(), (8, 4))}


def test_masked_tokens_weigh_nothing_wherever_they_lie():
    mask = (RNG.random((16, 24)) < np.linspace(0, 1, 16)[:, None]).astype(np.float32)
    batch = tokens(mask=mask)
    table = lambda rngs: {"table": jax.random.normal(rngs.params(), (64, 64))}
    loss = lambda params, batch: next_token_loss(params["table"][batch["tokens"][:, :-1]], batch)
    assert one_step(loss, table, batch)[1]["grad_norm"] > 0.05  # it is clipped
    assert_strategies_agree(
        table, loss, batch, CASES, gradient_accumulation_steps=2, max_grad_norm=0.05
    )


@pytest.mark.slow
def test_weights_unequal_between_devices_give_the_global_mean():
    def loss(params, batch):
        rows = ((batch["x"] @ params["w"]) ** 2).sum(-1)
        return hfjax.Mean((rows * batch["weight"]).sum(), batch["weight"].sum())

    assert_strategies_agree(linear, loss, BATCH, CASES, gradient_accumulation_steps=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "strategy"), [({"data": 2}, DDP), ({"row": 2, "tensor": 2}, hfjax.GRID)]
)
def test_tokens_of_few_bits_have_the_loss_of_the_same_numbers(sizes, strategy):
    config = dataclasses.replace(GPTConfig.tiny(), vocab=256, layers=1)
    mesh = hfjax.make_mesh(**sizes)
    layout = hfjax.layout(lambda rngs: GPT(config, rngs=rngs), optax.sgd(0.1), mesh, strategy)
    state, evaluate = hfjax.init(layout), hfjax.eval_step(layout, next_token_loss)
    numbers = np.random.default_rng(0).integers(0, 128, (4, 9))
    losses = {
        float(evaluate(state, {"tokens": numbers.astype(dtype)})["loss"])
        for dtype in ("int32", "uint8", "int8", "uint16")
    }
    assert len(losses) == 1
    assert np.isfinite(losses.pop())


@pytest.mark.slow
def test_a_loss_that_mixes_rows_sees_all_of_them_and_may_say_so():
    def contrastive(params, batch):
        mine = batch["x"] @ params["w"]
        everyone = hfjax.gather_batch(mine)  # as it was written when a loss had to ask
        return jax.nn.logsumexp(mine @ everyone.T, axis=1).mean()

    assert_strategies_agree(linear, contrastive, BATCH, CASES)
    assert_strategies_agree(linear, contrastive, BATCH, CASES, gradient_accumulation_steps=2)


def outputs_of(params, batch):
    return batch["x"] @ params["w"]


def entropies(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def clip_like(one, other):
    """The contrastive loss of pairs: of each row the right one among all others."""
    right = jnp.arange(len(one))
    return entropies(one @ other.T, right).mean() + entropies(other @ one.T, right).mean()


def normalised(x, every):
    """Batch norm, written inline."""
    mean, variance = (f(every, axis=0, keepdims=True) for f in (jnp.mean, jnp.var))
    return (x - mean) / jnp.sqrt(variance + 1e-5)


def squares(params, batch):
    return (outputs_of(params, batch) ** 2).sum(-1)


# Written for one device.
ROWS_MEET = {
    "a masked mean": lambda p, b: (squares(p, b) * b["weight"]).sum() / b["weight"].sum(),
    "a contrastive loss": lambda p, b: clip_like(outputs_of(p, b), b["x"][:, :4]),
    "a sum": lambda p, b: squares(p, b).sum(),
    "batch norm": lambda p, b: (normalised(outputs_of(p, b), outputs_of(p, b)) ** 4).mean(),
    "the greatest": lambda p, b: squares(p, b).max(),
    "a median": lambda p, b: jnp.median(squares(p, b)),
    "noise": lambda p, b: (outputs_of(p, b) * jax.random.normal(KEY, (len(b["x"]), 4))).mean(),
}
KEY = jax.random.key(3)


@pytest.mark.slow
@pytest.mark.parametrize("what", ROWS_MEET)
def test_what_joins_rows_is_as_on_one_device(what):
    case = {"FSDP": CASES["FSDP"]}
    assert_strategies_agree(linear, ROWS_MEET[what], BATCH, case, steps=2)
    assert_strategies_agree(
        linear, ROWS_MEET[what], BATCH, case, steps=2, gradient_accumulation_steps=2
    )


def test_a_metric_that_is_no_mean_is_made_of_all_rows():
    def loss(params, batch):
        rows = squares(params, batch)
        here = hfjax.per_device(jnp.max)(rows)
        return hfjax.Mean(rows.sum(), len(rows), {"most": rows.max(), "here": here})

    _, metrics = one_step(loss)
    rows = squares({"w": linear_weights()}, BATCH)
    np.testing.assert_allclose(metrics["most"], rows.max(), rtol=1e-5)
    assert metrics["here"] < 0.9 * metrics["most"]  # a mean over devices


def one_step(loss, model=linear, batch=BATCH):
    layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(data=8), DDP)
    return hfjax.train_step(layout, loss)(hfjax.init(layout), batch)


def test_further_metrics_travel_by_name_and_are_means_too():
    def loss(params, batch):
        out = batch["x"] @ params["w"]
        weighted = hfjax.Mean((out.sum(-1) * batch["weight"]).sum(), batch["weight"].sum())
        return hfjax.Mean((out**2).sum(), out.size, metrics={"mean": out.mean(), "by": weighted})

    _, metrics = one_step(loss)
    out = BATCH["x"] @ np.asarray(linear_weights())
    np.testing.assert_allclose(metrics["loss"], (out**2).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["mean"], out.mean(), rtol=1e-4)
    by = (out.sum(-1) * BATCH["weight"]).sum() / BATCH["weight"].sum()
    np.testing.assert_allclose(metrics["by"], by, rtol=1e-4)


def linear_weights():
    layout = hfjax.layout(linear, optax.sgd(0.1), hfjax.make_mesh(data=8), DDP)
    return hfjax.full_array(hfjax.init(layout).params)["w"]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda p, b: (p["w"].sum(), {}), "the loss is a tuple, which could mean .*hfjax.Mean"),
        (lambda p, b: b["x"] @ p["w"], r"the loss has shape \(16, 4\) .*a scalar is expected"),
        (lambda p, b: hfjax.Mean(p["w"], 1.0), r"the loss has shape \(8, 4\)"),
        (
            lambda p, b: hfjax.Mean(p["w"].sum(), 1.0, {"loss": 1.0}),
            r"metric 'loss': the step tells",
        ),
        (
            lambda p, b: hfjax.Mean(p["w"].sum(), 1.0, {"m": b["x"]}),
            r"metric 'm' has shape \(16, 8\)",
        ),
    ],
)
def test_what_is_no_loss_is_refused(loss, message):
    with pytest.raises(ValueError, match=message):
        one_step(loss)


def test_a_step_whose_weights_are_all_zero_is_reported_and_changes_nothing():
    layout = hfjax.layout(linear, optax.sgd(0.1), hfjax.make_mesh(data=8), DDP)
    nothing = lambda params, batch: hfjax.Mean((params["w"] ** 2).sum() * 0, jnp.zeros(()))
    step = hfjax.train_step(layout, nothing)
    state, metrics = step(hfjax.init(layout), BATCH)
    assert not metrics["finite"]
    np.testing.assert_array_equal(hfjax.full_array(state.params)["w"], linear_weights())
