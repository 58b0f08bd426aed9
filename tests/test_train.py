"""The step: donated state, batches checked, dropout the same on every mesh, NaN told by name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax.models.gpt import next_token_loss
from hfjax.models.layers import Dropout
from hfjax.parallel.strategy import DDP, FSDP, SEQUENCE, TENSOR, ZERO1
from hfjax.trainer.config import ModelConfig
from tests.small_gpt import mlp_layout, mlps, tokens


@pytest.fixture(scope="module")
def ddp():
    layout = mlp_layout(DDP, {"data": 4}, optax.sgd(0.1))
    return layout, hfjax.train_step(layout, next_token_loss)


@pytest.mark.slow
def test_the_state_given_is_donated_and_counts_its_steps(ddp):
    layout, step = ddp
    first = hfjax.init(layout)
    second, _ = step(first, tokens())
    assert int(second.step) == 1
    assert all(x.is_deleted() for x in jax.tree.leaves(first.params))
    with pytest.raises(ValueError, match="this state was given to an earlier step"):
        step(first, tokens())


@pytest.mark.slow
def test_a_seed_gives_the_same_parameters_on_every_mesh():
    alone = mlp_layout(DDP, {"data": 1}, devices=jax.devices()[:1])
    one = hfjax.init(alone, seed=3)
    many = hfjax.init(mlp_layout(FSDP | TENSOR, {"fsdp": 4, "tensor": 2}), seed=3)
    other = hfjax.init(alone, seed=4)
    pairs = zip(
        *(jax.tree.leaves(hfjax.full_array(s.params)) for s in (one, many, other)), strict=True
    )
    differs = []
    for a, b, c in pairs:
        np.testing.assert_array_equal(a, b)
        differs.append(not np.array_equal(a, c))
    assert any(differs)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            tokens(rows=6),
            r"batch of 6 examples does not divide by 4 devices .*Use 4 or 8 examples\.$",
        ),
        (tokens(rows=3), r"batch of 3 examples does not divide by 4 devices .*Use 4 examples\.$"),
        (
            tokens() | {"mask": np.ones((8, 24))},
            r"same number of examples.* found: mask 8, tokens 16\.",
        ),
        ({"tokens": np.zeros((0, 25), np.int32)}, r"at least one; found: tokens 0\."),
        ({"tokens": [[1, 2]] * 4}, r"found Python numbers in it. Convert lists first"),
        ({}, r"at least one; found: none\."),
    ],
)
def test_a_batch_that_does_not_split_is_refused(ddp, batch, message):
    layout, step = ddp
    state = hfjax.init(layout)
    with pytest.raises(ValueError, match=message):
        step(state, batch)
    step(state, tokens())  # nothing was lost


def test_a_batch_must_divide_by_the_microbatches_too():
    layout = mlp_layout(DDP, {"data": 4})
    step = hfjax.train_step(layout, next_token_loss, gradient_accumulation_steps=3)
    message = r"16 examples does not divide by 3 microbatches x 4 .*Use 12 or 24 examples, or"
    with pytest.raises(ValueError, match=message):
        step.lower(tokens())


def test_rows_longer_than_the_model_are_refused(ddp):
    _, step = ddp
    with pytest.raises(ValueError, match=r"40 tokens a row, the model has 24 positions"):
        step.lower(tokens(length=40))


def test_shard_batch_splits_the_rows_over_data_and_fsdp():
    layout = mlp_layout(FSDP, {"data": 2, "fsdp": 2, "tensor": 1})
    batch = hfjax.shard_batch(layout, tokens())
    assert batch["tokens"].addressable_shards[0].data.shape == (4, 25)
    with pytest.raises(ValueError, match=r"does not divide"):
        hfjax.shard_batch(layout, tokens(rows=6))


class Dropped(nnx.Module):
    def __init__(self, *, rngs):
        self.dropout = Dropout(0.5, rngs=rngs)
        self.scale = nnx.Param(np.ones((), np.float32))

    def __call__(self, batch):
        return self.dropout(batch["x"]) * self.scale[...]


def test_dropout_of_everything_is_zero_and_so_is_its_gradient():
    drop, x = Dropout(1.0, rngs=nnx.Rngs(0)), jnp.ones((4, 8))
    value, gradient = jax.value_and_grad(lambda x: drop(x).sum())(x)
    assert (value, np.abs(gradient).max()) == (0, 0)
    drop.deterministic = True
    np.testing.assert_array_equal(drop(x), x)
    layout = mlp_layout(FSDP, {"fsdp": 2}, dropout=1.0, layers=1)
    _, metrics = hfjax.train_step(layout, next_token_loss)(hfjax.init(layout), tokens())
    assert metrics["finite"]


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan"), True])
def test_a_module_and_a_run_refuse_the_same_rates_of_dropout(rate):
    with pytest.raises(ValueError, match=r"Dropout\(rate=.*\): the part that is dropped is from 0"):
        Dropout(rate, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"--model.dropout"):
        ModelConfig(dropout=rate)
    assert [ModelConfig(dropout=rate).dropout for rate in (0.0, 1.0)] == [0.0, 1.0]


@pytest.mark.slow
def test_dropout_masks_are_the_same_on_every_mesh_bit_by_bit():
    def loss(outputs, batch):
        return hfjax.Mean(outputs.sum(), outputs.size, {"kept": (outputs != 0).mean()})

    def run(strategy, sizes, **execution):
        mesh = hfjax.make_mesh(devices=jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)
        layout = hfjax.layout(lambda rngs: Dropped(rngs=rngs), optax.sgd(0.0), mesh, strategy)
        step = hfjax.train_step(layout, loss, **execution)
        state, losses = hfjax.init(layout), []
        for _ in range(3):
            state, metrics = step(state, {"x": np.ones((16, 8, 4), np.float32)})
            losses.append((float(metrics["loss"]), float(metrics["kept"])))
        return losses

    wanted = run(DDP, {"data": 1})
    assert len(set(wanted)) == 3  # another mask in every step
    assert 0.3 < wanted[0][1] < 0.7
    assert run(DDP, {"data": 8}) == wanted
    assert run(FSDP, {"data": 2, "fsdp": 2}, gradient_accumulation_steps=2) == wanted


def test_evaluation_drops_nothing_and_leaves_the_state(ddp):
    layout = mlp_layout(FSDP | TENSOR | SEQUENCE, {"data": 2, "fsdp": 2, "tensor": 2}, dropout=0.5)
    plain, _ = ddp
    wanted = hfjax.eval_step(plain, next_token_loss)(hfjax.init(plain), tokens())
    state = hfjax.init(layout)
    evaluate = hfjax.eval_step(layout, next_token_loss)
    for _ in range(2):
        np.testing.assert_allclose(evaluate(state, tokens())["loss"], wanted["loss"], rtol=1e-6)


def test_full_returns_whole_arrays_in_host_memory():
    layout = mlp_layout(FSDP.edit(replicate_below=0) | TENSOR, {"fsdp": 4, "tensor": 2})
    whole = hfjax.full_array(hfjax.init(layout).params)
    assert isinstance(whole["tokens"], np.ndarray)
    assert whole["layers"]["mlp"]["up"]["kernel"].shape == (2, 32, 128)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_told_by_step_and_loses_nothing():
    layout = mlp_layout(ZERO1, {"data": 4}, optax.adamw(1e-3))
    poisoned = lambda logits, batch: (
        next_token_loss(logits, batch).total * batch["poison"].mean() / 1e3
    )
    step = hfjax.train_step(layout, poisoned)
    good, bad = np.ones(16, np.float32), np.full(16, np.nan, np.float32)
    state, _ = step(hfjax.init(layout), tokens(poison=good))
    before = hfjax.full_array(state.params)
    state, metrics = step(state, tokens(poison=bad))
    assert not metrics["finite"]
    with pytest.raises(FloatingPointError, match=r"step 2 is not finite.*look at the batch"):
        step.check(state)
    jax.tree.map(np.testing.assert_array_equal, before, hfjax.full_array(state.params))
    state, metrics = step(state, tokens(poison=good))
    assert metrics["finite"]
    assert int(state.step) == 3


def test_a_parameter_that_is_not_finite_is_told_by_name_at_a_later_call():
    layout = mlp_layout(DDP, {"data": 4}, optax.sgd(0.1))
    step = hfjax.train_step(layout, next_token_loss)
    state = hfjax.init(layout)
    state.params["norm"]["scale"] = state.params["norm"]["scale"] * np.nan
    for number in range(3):
        state, metrics = step(state, tokens())
        assert int(metrics["step"]) == number
    with pytest.raises(FloatingPointError, match=r"step 1 .*the first is norm/scale \(32,\): "):
        step(state, tokens())


@pytest.mark.slow
def test_a_float32_model_stays_float32_under_bfloat16_arithmetic():
    layout = mlp_layout(FSDP, {"fsdp": 4})
    wide, narrow = (
        hfjax.train_step(layout, next_token_loss, precision=p)(hfjax.init(layout), tokens())
        for p in ("fp32", "bf16")
    )
    assert {x.dtype for x in jax.tree.leaves(narrow[0].params)} == {np.dtype("float32")}
    assert wide[1]["loss"] != narrow[1]["loss"]
    np.testing.assert_allclose(wide[1]["loss"], narrow[1]["loss"], rtol=1e-2)


def test_bfloat16_reductions_beside_a_tensor_axis_are_refused_on_a_cpu():
    layout = mlp_layout(DDP | TENSOR, {"data": 2, "tensor": 2})
    narrow = hfjax.Precision(compute="bfloat16", reduce="bfloat16")
    with pytest.raises(ValueError, match=r"crashes XLA's CPU compiler"):
        hfjax.train_step(layout, next_token_loss, precision=narrow)


def test_an_unknown_keyword_of_train_step_is_refused():
    with pytest.raises(TypeError, match=r"microbatch"):
        hfjax.train_step(mlp_layout(DDP, {"data": 8}), next_token_loss, microbatch=2)


@pytest.mark.slow
def test_the_model_alone_computes_what_the_step_computes():
    model = mlps()(nnx.Rngs(jax.random.key(0)))
    model.eval()
    layout = mlp_layout(FSDP, {"fsdp": 8})
    found = hfjax.eval_step(layout, next_token_loss)(hfjax.init(layout), tokens())
    mean = next_token_loss(model(tokens()), tokens())
    np.testing.assert_allclose(found["loss"], mean.total / mean.weight, rtol=1e-5)


def test_gradients_of_microbatches_are_added_in_float32_whatever_they_are_computed_in():
    """A bfloat16 of 256 stays what it is when 1 is added."""
    layout = hfjax.layout(
        lambda rngs: {"w": jnp.ones(())}, optax.sgd(0.0), hfjax.make_mesh(data=1), DDP
    )
    loss = lambda params, batch: hfjax.Mean((params["w"] * batch["x"]).sum(), jnp.float32(1))
    step = hfjax.train_step(layout, loss, gradient_accumulation_steps=8, precision="bf16")
    _, metrics = step(hfjax.init(layout), {"x": np.array([256.0] + 7 * [1.0], np.float32)})
    assert metrics["grad_norm"] == (256 + 7) / 8
