"""float16 with a loss scale: DeepSpeed's rules, the same on any mesh, kept in the state."""

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hfjax
from hfjax import (
    CONTEXT,
    DDP,
    FSDP,
    HOST_OPTIMIZER,
    PIPE,
    TENSOR,
    ZERO1,
    ZERO2,
    LossScale,
    Precision,
    Schedule,
)
from hfjax.models.gpt import next_token_loss
from hfjax.optimizer_step.loss_scale import initial_scale, update_scale
from hfjax.step.nonfinite import NonfiniteMonitor
from hfjax.utils.mean import OVERFLOW, SCALE
from hfjax.utils.paths import flatten
from tests.deepspeed_scaler import Simulated
from tests.golden import Unlike
from tests.small_gpt import gpt_layout, tokens
from tests.small_stack import rows, squared, stack_layout

SETTINGS = {
    "DeepSpeed's": LossScale(2.0**12, window=10),
    "at once": LossScale(2.0**12, window=7, hysteresis=1),
    "consecutive": LossScale(2.0**8, window=5, hysteresis=3, consecutive=True),
    "low": LossScale(2.0**4, window=3, minimum=0.25),
}
JUDGED = jax.jit(update_scale, static_argnums=0)
SMALL = LossScale(2.0**8, window=4)
HALF = Precision("float16", scale=SMALL)
NO_SCALE: Any = 2.0
PLANTED = (3, 5, 6)  # steps whose gradient overflows
SCALES = [256, 256, 256, 256, 256, 256, 128, 64, 64, 64, 64, 64, 128]


def after(settings, overflows):
    """Return the scale before each step, and what is left at the end."""
    scale, scales, exhausted = initial_scale(settings), [], []
    for overflow in overflows:
        scales.append(float(scale.value))
        scale, spent = JUDGED(settings, scale, jnp.bool_(overflow))
        exhausted.append(bool(spent))
    return [*scales, float(scale.value)], scale, exhausted


@pytest.mark.parametrize("name", SETTINGS)
def test_scales_are_deepspeeds(name):
    settings = SETTINGS[name]
    overflows = np.random.default_rng(0).random(200) < 0.12
    simulated = Simulated(settings)
    wanted = [settings.initial, *map(simulated.after, overflows)]
    found, scale, exhausted = after(settings, overflows)
    assert found == wanted
    assert (int(scale.skipped), int(scale.steps)) == (simulated.skipped, 200)
    assert any(exhausted) == simulated.stopped


def test_a_scale_doubles_as_often_as_deepspeeds():
    grown = lambda scales: [i for i in range(1, len(scales)) if scales[i] > scales[i - 1]]
    assert grown(after(LossScale(16, window=10), [False] * 32)[0]) == [11, 21, 31]
    assert grown(after(LossScale(16, window=10), [i == 4 for i in range(32)])[0]) == [16, 26]
    assert max(after(LossScale(16, window=1, maximum=64), [False] * 9)[0]) == 64
    assert set(after(LossScale(16, window=None), [i % 3 == 0 for i in range(9)])[0]) == {16}


def planted(step):
    """A batch whose rows are so loud that its gradient overflows, and the loss does not."""
    return rows(16, loud=np.full(16, 3e7 if step in PLANTED else 1, np.float32))


def scaled_loss(outputs, batch):
    """Rows weigh unequally, and their sum does not divide by it."""
    apart = jnp.square(outputs.astype(jnp.float32) - batch["y"]).sum(axis=1) * batch["weight"]
    return hfjax.Mean((apart * batch.get("loud", 1)).sum(), batch["weight"].sum())


def trained(layout, steps=13, precision=HALF, batches=planted, **run) -> tuple[Any, Any]:
    """Return losses, scales and skips step by step, and the state."""
    step = hfjax.train_step(layout, scaled_loss, precision=precision, **run)
    told, state = [], hfjax.init(layout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for n in range(steps):
            state, metrics = step(state, batches(n))
            told.append([float(metrics[k]) for k in ("loss", "loss_scale", "skipped_steps")])
        step.check(state)
    return np.array(told).T, state


MESHES = {
    "one device": (DDP, {"data": 1}, {}),
    "DDP": (DDP, {"data": 8}, {}),
    "ZERO2, accumulated": (ZERO2, {"data": 2}, {"gradient_accumulation_steps": 4}),
    "FSDP, remat, clip": (FSDP, {"fsdp": 4}, {"remat": "full", "max_grad_norm": 100.0}),
    "a pipeline": (PIPE | ZERO1, {"pipe": 3, "data": 2}, {"schedule": Schedule("1f1b", 2)}),
    "the host": (FSDP | HOST_OPTIMIZER, {"fsdp": 2}, {}),
    "own rows": (DDP, {"data": 2}, {"batch_view": "local"}),
}


@pytest.fixture(scope="module")
def in_float32():
    """Losses of one device that skips the same steps."""
    layout = stack_layout(DDP, {"data": 1})
    step, state, losses = hfjax.train_step(layout, scaled_loss), hfjax.init(layout), []
    for n in range(13):
        kept = jax.tree.map(jnp.copy, state)
        new, metrics = step(state, planted(n))
        state = kept if n in PLANTED else new
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.short("one device", "own rows")
@pytest.mark.parametrize("name", MESHES)
def test_scales_and_skips_are_those_of_one_device(name, in_float32):
    strategy, sizes, run = MESHES[name]
    (losses, scales, skipped), state = trained(stack_layout(strategy, sizes), **run)
    assert scales.tolist() == SCALES
    assert skipped.tolist() == [0, 0, 0, 1, 1, 2, 3, 3, 3, 3, 3, 3, 3]
    np.testing.assert_allclose(losses, in_float32, rtol=2e-3)
    assert int(state.scale.skipped) == 3
    assert int(state.step) == 13
    assert int(optax.tree.get(state.optimizer, "count")) == 10  # nor does a schedule of rates


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        (FSDP | TENSOR, {"fsdp": 2, "tensor": 2}),
        (DDP | CONTEXT, {"data": 2, "context": 2}),
        pytest.param(HOST_OPTIMIZER | FSDP, {"fsdp": 4}, marks=pytest.mark.slow),
    ],
)
def test_a_language_model_trains_as_in_float32(strategy, sizes):
    layout = gpt_layout(strategy, sizes)
    found = {}
    for word in ("fp32", "fp16"):
        step, state = hfjax.train_step(layout, next_token_loss, precision=word), hfjax.init(layout)
        found[word] = []
        for _ in range(4):
            state, metrics = step(state, tokens(8, length=16))
            found[word].append(float(metrics["loss"]))
    np.testing.assert_allclose(found["fp16"], found["fp32"], rtol=2e-3)


def test_small_gradients_are_not_lost():
    """2.5e-9 is less than the smallest number of float16."""
    loss = lambda outputs, batch: (outputs * jnp.float16(1e-4)).mean() * 1e-4
    forward = lambda model, batch: batch * model["w"]
    mesh, model = hfjax.make_mesh(data=8), lambda rngs: {"w": jnp.zeros((1, 4))}
    layout = hfjax.layout(model, optax.sgd(1.0), mesh, DDP, forward=forward)
    for scale, wanted in ((LossScale(2.0**15), -2.5e-9), (LossScale(1.0, window=None), 0)):
        step = hfjax.train_step(layout, loss, precision=Precision("float16", scale=scale))
        state, _ = step(hfjax.init(layout), np.ones((8, 4), np.float32))
        np.testing.assert_allclose(state.params["w"], wanted, rtol=0.01)


def test_master_weights_may_be_stored_in_float16():
    optimizer = hfjax.optimizers.master_weights(optax.adamw(1e-2), "float16")
    layout = stack_layout(ZERO1, {"data": 2}, optimizer)
    (losses, scales, _), state = trained(layout, 3, Precision(scale=SMALL), lambda _: planted(0))
    assert {x.dtype.name for x in flatten(state.params).values()} == {"float16"}
    assert losses[2] < losses[0]
    assert set(scales) == {256.0}


# -- kept in the state ------------------------------------------------------------------------


def test_dtypes_have_short_words_wherever_one_is_given():
    short = Precision(compute="fp16", gather="bf16", reduce="fp32", scale=LossScale())
    assert short == Precision("float16", "bfloat16", "float32", LossScale())
    assert Precision(reduce="fp64") == Precision(reduce="float64")
    assert hfjax.optimizers.master_weights(optax.sgd(0.1), "bf16").param_dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="master: stored='half a float': a dtype, "):
        hfjax.optimizers.master_weights(optax.sgd(0.1), "half a float")


@pytest.mark.slow
def test_a_scale_is_saved_and_goes_on_under_another_mesh(tmp_path):
    (_, scales, _), state = trained(stack_layout(FSDP, {"fsdp": 4}), 7)
    hfjax.save(tmp_path, stack_layout(FSDP, {"fsdp": 4}), state)
    other = stack_layout(DDP, {"data": 2})
    restored = hfjax.restore(tmp_path, other).state
    assert jax.tree.map(float, restored.scale) == jax.tree.map(float, state.scale)
    step = hfjax.train_step(other, scaled_loss, precision=HALF)
    found = []
    for n in range(7, 13):
        restored, metrics = step(restored, planted(n))
        found.append(float(metrics["loss_scale"]))
    assert [*scales, *found] == SCALES
    assert hfjax.restore(tmp_path, other, parameters_only=True).state.scale is None


def test_a_state_without_a_scale_begins_one_and_tells_it():
    layout = stack_layout(DDP, {"data": 1})
    step, half = (hfjax.train_step(layout, scaled_loss, precision=p) for p in ("fp32", HALF))
    state, _ = step(hfjax.init(layout), rows(8))
    with pytest.warns(UserWarning, match="state of step 1 has no loss scale: it begins at 256"):
        state, metrics = half(state, rows(8))
    state, metrics = step(state, rows(8))
    assert state.scale is None
    assert "loss_scale" not in metrics


@pytest.mark.parametrize("value", [0.0, np.inf, np.nan])
def test_a_scale_that_is_none_is_refused(tmp_path, value):
    layout = stack_layout(DDP, {"data": 1})
    _, state = trained(layout, 1)
    bad = dataclasses.replace(state.scale, value=jnp.float32(value))
    hfjax.save(tmp_path, layout, dataclasses.replace(state, scale=bad))
    with pytest.raises(ValueError, match=rf"step 1 of .* holds a loss scale of {value:g}: a pos"):
        hfjax.restore(tmp_path, layout)


def test_a_pipeline_of_unlike_layers_gives_its_model_back_beside_a_scale():
    mesh = hfjax.make_mesh(devices=jax.devices()[:2], pipe=2)
    layout, schedule = hfjax.layout(Unlike, optax.sgd(0.1), mesh, PIPE), Schedule("1f1b", 2)
    state = hfjax.init(layout, schedule=schedule)
    scaled = dataclasses.replace(state, scale=initial_scale(LossScale()))
    plain = hfjax.to_model_order(layout, scaled)
    assert plain.scale
    assert scaled.scale
    assert float(plain.scale.value) == float(scaled.scale.value)
    jax.tree.map(
        np.testing.assert_array_equal, plain.params, hfjax.to_model_order(layout, state).params
    )


def test_a_scale_that_is_fixed_is_so_after_one_that_moved():
    layout = stack_layout(DDP, {"data": 1})
    _, state = trained(layout, 1)
    fixed = Precision("float16", scale=LossScale(128, window=None))
    _, metrics = hfjax.train_step(layout, scaled_loss, precision=fixed)(state, rows(8))
    assert float(metrics["loss_scale"]) == 128


def test_a_loss_that_is_not_finite_leaves_the_scale_as_it_is():
    layout = stack_layout(DDP, {"data": 1})
    scale = Precision("float16", scale=LossScale(2.0**8, window=1))
    step = hfjax.train_step(layout, scaled_loss, precision=scale, on_nonfinite="skip")
    state: Any = hfjax.init(layout)
    for _ in range(4):
        state, _ = step(state, rows(8) | {"y": np.full((8, 4), np.nan, np.float32)})
    assert (float(state.scale.value), int(state.scale.steps)) == (256, 0)


# -- what goes wrong --------------------------------------------------------------------------


def run_until_told(layout, batch, settings, steps=12, **run):
    step = hfjax.train_step(
        layout, scaled_loss, precision=Precision("float16", scale=settings), **run
    )
    state = hfjax.init(layout)
    for _ in range(steps):
        state, _ = step(state, batch)
    step.check(state)


def test_an_overflow_for_good_stops_the_run_at_the_least_scale():
    layout = stack_layout(DDP, {"data": 1})
    with (
        pytest.warns(RuntimeWarning, match="two steps in a row overflowed float16"),
        pytest.raises(
            FloatingPointError,
            match=r"The loss scale is the least, 64, and .*step 4 is not finite.*the first is "
            r"that of .*4 steps were skipped",
        ),
    ):
        run_until_told(layout, planted(3), LossScale(2.0**8, minimum=64, window=4))


def test_many_overflows_that_are_apart_are_told_once():
    layout = stack_layout(DDP, {"data": 1})
    state, watch = hfjax.init(layout), NonfiniteMonitor(layout, "stop", 10)
    squares = {path: np.float32(np.inf if path == "before" else 1) for path in layout.param_specs}
    told = []
    for step in range(0, 140, 2):
        metrics = {"step": step, "loss": 1.0, "finite": False, OVERFLOW: True, SCALE: 64.0}
        watch.add(metrics, squares)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            watch.check(state, lag=0)
        told += [str(w.message) for w in found]
    assert len(told) == 1
    assert "step 101: the gradient of 51 of the last 1000 steps overflowed float16" in told[0]
    assert "the first is that of before" in told[0]


def test_an_overflow_never_counts_towards_patience():
    layout = stack_layout(DDP, {"data": 1})
    settings = LossScale(2.0**20, window=100, minimum=2.0**-20)
    with pytest.warns(RuntimeWarning, match="overflowed"):
        run_until_told(layout, planted(3), settings, on_nonfinite="skip", max_skipped=2)


def test_a_parameter_that_is_not_finite_is_named_at_once():
    layout = stack_layout(DDP, {"data": 1})
    state = hfjax.init(layout)
    broken = dict(state.params) | {"before": state.params["before"].at[0, 0].set(jnp.nan)}
    step = hfjax.train_step(layout, scaled_loss, precision=HALF)
    state, _ = step(dataclasses.replace(state, params=broken), rows(8))
    with pytest.raises(FloatingPointError, match=r"step 1 .*1 parameters are not finite.*before"):
        step.check(state)


def test_a_loss_that_is_not_finite_is_judged_as_without_a_scale():
    layout = stack_layout(DDP, {"data": 1})
    bad = rows(8) | {"y": np.full((8, 4), np.nan, np.float32)}
    with pytest.raises(FloatingPointError, match="look at the batch and the loss"):
        run_until_told(layout, bad, SMALL, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Precision("half a float"),
            r"compute='half a float': a dtype, float32, bf16 …, is e",
        ),
        (lambda: Precision("float16"), 'compute=float16 without a loss scale.*precision="fp16"'),
        (lambda: Precision("bfloat16", scale=LossScale()), "only float16 needs one"),
        (lambda: Precision(reduce="float16"), "reduce=float16: .*A sum over devices overflows"),
        (lambda: Precision(scale=NO_SCALE), "scale=2.0: a hfjax.LossScale is expected"),
        (lambda: LossScale(hysteresis=0), "hysteresis=0: at least 1"),
        (lambda: LossScale(window=0), "window=0: a positive number of steps, or None"),
        (lambda: LossScale(8, minimum=16), "initial=8: it lies outside of minimum=16"),
        (lambda: LossScale(float("nan")), "initial=nan: a positive number"),
    ],
)
def test_settings_that_cannot_be_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("optimizer", "run", "message"),
    [
        (optax.sgd(0.1), {"precision": Precision(scale=SMALL)}, "nothing is float16"),
        (optax.sgd(0.1), {"precision": "fp16", "on_nonfinite": "apply"}, "lives by skipping"),
        (
            optax.sgd(0.1),
            {"precision": "fp16", "optimizer_in_backward": True},
            "updated before it is known",
        ),
    ],
)
def test_steps_that_cannot_be_are_refused(optimizer, run, message):
    with pytest.raises(ValueError, match=message):
        hfjax.train_step(stack_layout(DDP, {"data": 1}, optimizer), squared, **run)


def test_float16_parameters_need_a_float32_copy():
    model = lambda rngs: {"w": jnp.ones((4,), jnp.float16)}
    layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(data=8), DDP)
    loss = lambda outputs, batch: outputs["w"].mean()
    with pytest.raises(
        ValueError, match=r"w is stored in float16: .*hfjax.optimizers.master_weights"
    ):
        hfjax.train_step(layout, loss, precision="fp16")
    kept = hfjax.layout(
        model, hfjax.optimizers.master_weights(optax.sgd(0.1), "float16"), layout.mesh, DDP
    )
    with pytest.raises(ValueError, match="w is computed in float16, which needs a loss scale"):
        hfjax.train_step(kept, loss)
    hfjax.eval_step(kept, loss)(hfjax.init(kept), np.ones((8, 4), np.float32))


@pytest.mark.parametrize("name", SETTINGS)
def test_the_simulator_is_deepspeeds_own_class(name):
    scaler = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    scaler.dist.get_rank = lambda: 0
    given = dataclasses.replace(SETTINGS[name], maximum=2.0**100)  # DeepSpeed has none
    theirs = scaler.DynamicLossScaler(
        init_scale=given.initial,
        scale_window=given.window,
        min_scale=given.minimum,
        delayed_shift=given.hysteresis,
        consecutive_hysteresis=given.consecutive,
        raise_error_at_min_scale=False,
    )
    ours = Simulated(given)
    for overflow in np.random.default_rng(1).random(200) < 0.12:
        theirs.update_scale(overflow)
        assert ours.after(overflow) == theirs.cur_scale
