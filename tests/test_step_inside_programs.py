"""A step within a program of the user's own, and states and batches that do not belong to it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax.models.layers import stack_layers
from hfjax.parallel.strategy import DDP, FSDP, PIPE, ZERO1
from tests.test_parameters_as_data import BATCH, on_x, squares

CASES = {
    "DDP": (DDP, {"data": 4}),
    "ZERO1": (ZERO1.edit(replicate_below=0), {"data": 4}),
    "FSDP": (FSDP.edit(replicate_below=0), {"fsdp": 4}),
}


def linear(rngs):
    return nnx.Linear(8, 8, rngs=rngs)


def plan(strategy=DDP, sizes=None, optimizer=None, init=linear, forward=on_x):
    mesh = hfjax.make_mesh(devices=jax.devices()[:4], **(sizes or {"data": 4}))
    layout = hfjax.layout(init, optimizer or optax.adam(1e-2), mesh, strategy, forward=forward)
    return layout, hfjax.init(layout)


def batches(steps):
    return jax.tree.map(lambda x: np.stack([x * (i + 1) for i in range(steps)]), BATCH)


@pytest.mark.parametrize("name", ["DDP", "ZERO1", "FSDP"])
@pytest.mark.short("DDP")
def test_steps_in_a_scan_of_ones_own_are_those_of_a_loop(name):
    layout, state = plan(*CASES[name])
    step, evaluate, many = (
        hfjax.train_step(layout, squares),
        hfjax.eval_step(layout, squares),
        batches(3),
    )
    one, loop = hfjax.init(layout), list[float]()
    for i in range(3):
        one, metrics = step(one, jax.tree.map(lambda x, i=i: x[i], many))
        loop.append(float(metrics["loss"]))

    @jax.jit
    def run(state, many):
        state, metrics = jax.lax.scan(step, state, many)
        return state, metrics, evaluate(state, BATCH)

    state, metrics, after = run(state, many)
    np.testing.assert_array_equal(metrics["loss"], np.asarray(loop, np.float32))
    assert metrics["finite"].all()
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6)
    jax.tree.map(same, hfjax.full_array(state.params), hfjax.full_array(one.params))
    same(after["loss"], evaluate(one, BATCH)["loss"])
    wanted = layout.shardings().params["kernel"]
    assert state.params["kernel"].sharding.is_equivalent_to(wanted, 2)
    step(state, BATCH)  # and goes on in a loop


def test_a_step_in_a_program_that_is_not_finite_is_told_and_changes_nothing():
    layout, state = plan()
    before = hfjax.full_array(state.params)
    step, many = hfjax.train_step(layout, squares), batches(3)
    many["x"][:] = np.nan
    state, metrics = jax.jit(lambda state, many: jax.lax.scan(step, state, many))(state, many)
    assert not metrics["finite"].any()
    jax.tree.map(np.testing.assert_array_equal, before, hfjax.full_array(state.params))


class Three(nnx.Module):
    def __init__(self, *, rngs):
        self.layers = stack_layers(4, linear, rngs)

    def embed(self, batch):
        return batch["x"]

    def head(self, x):
        return x


def test_a_pipeline_in_a_program_refuses_to_run_layers_in_another_order():
    init, schedule = lambda rngs: Three(rngs=rngs), hfjax.Schedule("interleaved", 2, chunks=2)
    layout, plain = plan(PIPE | DDP, {"pipe": 2, "data": 2}, init=init, forward=None)
    step = hfjax.train_step(layout, squares, schedule=schedule)
    mine = hfjax.init(layout, schedule=schedule)
    _, metrics = jax.jit(step)(mine, BATCH)
    assert bool(metrics["finite"])
    before = hfjax.full_array(plain.params)
    state, metrics = jax.jit(step)(plain, BATCH)
    assert not bool(metrics["finite"])
    jax.tree.map(np.testing.assert_array_equal, before, hfjax.full_array(state.params))


def test_a_state_of_another_optimizer_or_model_is_refused_by_the_name_of_what_differs():
    layout, _ = plan(optimizer=optax.sgd(0.1))
    _, other = plan(optimizer=optax.adam(0.1))
    step = hfjax.train_step(layout, squares)
    with pytest.raises(ValueError, match=r"not of this layout: optimizer.*count.*nothing"):
        step(other, BATCH)
    _, state = plan(optimizer=optax.sgd(0.1), init=lambda rngs: nnx.Linear(8, 9, rngs=rngs))
    with pytest.raises(
        ValueError, match=r"params\['bias'\] is float32\[9\], the layout has .*\[8\]"
    ):
        step(state, BATCH)
    with pytest.raises(ValueError, match=r"params\['bias'\] is float32\[9\]"):
        hfjax.eval_step(layout, squares)(state, BATCH)
    with pytest.raises(ValueError, match=r"a hfjax\.State is expected"):
        step(state.params, BATCH)


def test_an_evaluation_of_a_state_that_a_step_has_taken_is_refused():
    layout, state = plan()
    hfjax.train_step(layout, squares)(state, BATCH)
    with pytest.raises(ValueError, match="took its memory"):
        hfjax.eval_step(layout, squares)(state, BATCH)


def test_a_metric_may_have_any_name_that_the_step_does_not_tell_itself():
    layout, state = plan()
    loss = lambda outputs, batch: hfjax.Mean(
        squares(outputs, batch) * len(outputs), len(outputs), {"squares": jnp.float32(3)}
    )
    _, metrics = hfjax.train_step(layout, loss)(state, BATCH)
    assert float(metrics["squares"]) == 3


GIVEN = {"kernel": np.eye(8, dtype=np.float32) / 3, "bias": np.zeros(8, np.float32)}


def put(state, layout):
    """Return the state with given parameters: the way in of pretrained weights by hand."""
    to = lambda x, like: jax.device_put(x.astype(like.dtype), like.sharding)
    return replace(state, params=jax.tree.map(to, GIVEN, state.params))


@pytest.mark.parametrize(
    ("name", "host"),
    [(name, host) for name in CASES for host in (False, True)],
)
@pytest.mark.short("DDP-False")
def test_parameters_put_into_a_state_are_those_that_train_also_with_master_weights(name, host):
    strategy, sizes = CASES[name]
    strategy = strategy | hfjax.HOST_OPTIMIZER if host else strategy
    layout, state = plan(strategy, sizes, hfjax.optimizers.master_weights(optax.sgd(0.0)))
    step, state = hfjax.train_step(layout, squares), put(state, layout)
    wanted = float(hfjax.eval_step(layout, squares)(state, BATCH)["loss"])
    for _ in range(2):
        state, metrics = step(state, BATCH)
        assert float(metrics["loss"]) == pytest.approx(wanted, rel=1e-5)
    master = hfjax.full_array(state.optimizer.master)
    np.testing.assert_allclose(master["kernel"], GIVEN["kernel"], rtol=2**-8)


@pytest.mark.parametrize("strategy", [FSDP, FSDP | hfjax.HOST_OPTIMIZER], ids=["device", "host"])
@pytest.mark.short("device")
def test_parameters_put_into_a_state_are_those_that_train_in_a_program_too(strategy):
    optimizer = hfjax.optimizers.master_weights(hfjax.optimizers.ema(optax.sgd(0.0), 0.9))
    layout, state = plan(strategy.edit(replicate_below=0), {"fsdp": 4}, optimizer)
    step = hfjax.train_step(layout, squares)
    state, _ = jax.jit(lambda s, many: jax.lax.scan(step, s, many))(put(state, layout), batches(2))
    for found in (state.params, hfjax.optimizers.averaged(state).params):
        kernel = np.float32(hfjax.full_array(found)["kernel"])
        np.testing.assert_allclose(kernel, GIVEN["kernel"], rtol=2**-7)


def test_master_weights_that_agree_to_rounding_stay_as_they_are():
    layout, state = plan(optimizer=hfjax.optimizers.master_weights(optax.sgd(0.0)))
    before = hfjax.full_array(state.optimizer.master)
    assert (before["kernel"] != np.asarray(state.params["kernel"], np.float32)).any()
    state, _ = hfjax.train_step(layout, squares)(state, BATCH)
    jax.tree.map(np.testing.assert_array_equal, before, hfjax.full_array(state.optimizer.master))


def test_an_average_begins_with_parameters_that_were_put_into_a_new_state():
    layout, state = plan(
        optimizer=hfjax.optimizers.master_weights(hfjax.optimizers.ema(optax.sgd(0.0), 0.9))
    )
    state, _ = hfjax.train_step(layout, squares)(put(state, layout), BATCH)
    found = hfjax.full_array(hfjax.optimizers.averaged(state).params)["kernel"]
    np.testing.assert_allclose(np.float32(found), GIVEN["kernel"], rtol=2**-7)
