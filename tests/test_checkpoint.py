"""Saved while training goes on; restored under any strategy, mesh and dtype, or in part."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore
from flax import nnx

import hfjax
from hfjax import DDP, FSDP, PIPE, Schedule
from hfjax.models.gpt import next_token_loss
from hfjax.parallel.strategy import TENSOR, ZERO1
from hfjax.utils.paths import flatten
from tests.small_checkpoint import EVERYTHING, Two, same, saved, small_layout, state_at
from tests.small_gpt import mlp_layout, tokens
from tests.test_uneven_stages import ROWS, mlp, squares


def test_a_run_goes_on_under_any_other_strategy_and_number_of_devices(tmp_path):
    runs = [
        (mlp_layout(FSDP, {"fsdp": 4}, layers=2), None),
        (mlp_layout(ZERO1 | TENSOR, {"data": 2, "tensor": 2}, layers=2), None),
        (mlp_layout(PIPE, {"pipe": 2}, layers=2), Schedule("1f1b", 2)),
    ]
    step = hfjax.train_step(runs[0][0], next_token_loss)
    state, wanted = hfjax.init(runs[0][0]), []
    for _ in runs:
        state, metrics = step(state, tokens())
        wanted.append(float(metrics["loss"]))
    state, metrics = step(hfjax.init(runs[0][0]), tokens())
    hfjax.save(tmp_path, runs[0][0], state)
    found = [float(metrics["loss"])]
    for layout, schedule in runs[1:]:  # each goes on where the one before it stopped
        step = hfjax.train_step(layout, next_token_loss, schedule=schedule)
        state, metrics = step(hfjax.restore(tmp_path, layout).state, tokens())
        hfjax.save(tmp_path, layout, state)
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert hfjax.latest_step(tmp_path) == 3


def test_what_is_restored_lies_where_the_layout_says(tmp_path):
    layout = saved(tmp_path, 3)
    other = small_layout(DDP, sizes={"data": 4})
    restored = hfjax.restore(tmp_path, other)
    leaves = [jax.tree.leaves(x) for x in (restored.state, other.shardings())]
    assert all(x.sharding.is_equivalent_to(s, x.ndim) for x, s in zip(*leaves, strict=True))
    assert same(restored.state, state_at(layout, 3, 3))


def test_the_state_may_be_donated_as_soon_as_save_returns(tmp_path):
    layout = mlp_layout(FSDP, {"fsdp": 2}, layers=1, dropout=0.1)
    step = hfjax.train_step(layout, next_token_loss)
    state, wanted = hfjax.init(layout), {}
    with hfjax.CheckpointManager(
        tmp_path, layout, keep=hfjax.RetentionPolicy(latest=None)
    ) as checkpoints:
        for number in range(1, 4):
            state, _ = step(state, tokens(8))
            wanted[number] = jax.tree.map(np.array, state.params)  # a copy
            checkpoints.save(state)
    for number, params in wanted.items():
        assert same(hfjax.restore(tmp_path, layout, number).state.params, params)


def test_beside_the_state_are_config_data_metrics_versions_and_origin(tmp_path):
    config = {"model": {"embed": 32}, "rates": [1e-3, 1e-4], "none": None}
    layout = saved(tmp_path, 5, config=config, data={"rows": 640}, metrics={"loss": 2.5})
    found = hfjax.restore(tmp_path, layout)
    assert (found.config, found.data, found.step) == (config, {"rows": 640}, 5)
    assert found.metrics == {"loss": 2.5}
    assert found.versions["jax"] == jax.__version__
    assert sorted(found.versions) == sorted(
        ["python", "hfjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"]
    )
    assert found.origin == "FSDP on fsdp=2, processes: 1"
    told = hfjax.checkpoint_metadata(tmp_path)  # needs no layout
    assert (told["config"], told["data"], told["format"]) == (config, {"rows": 640}, 1)
    assert told["arrays"]["params/first/kernel"] == ["float32", [8, 16]]


def test_steps_that_are_durable_are_listed_and_the_latest_needs_no_layout(tmp_path):
    assert hfjax.latest_step(tmp_path / "nowhere") is None
    layout = small_layout()
    with hfjax.CheckpointManager(tmp_path / "run", layout) as checkpoints:
        assert (checkpoints.steps(), checkpoints.latest()) == ([], None)
        for step in (9, 10, 11):
            checkpoints.save(state_at(layout, step))
        checkpoints.wait()
        assert (checkpoints.steps(), checkpoints.latest()) == ([9, 10, 11], 11)
    assert hfjax.latest_step(tmp_path / "run") == 11


def test_parameters_only_begins_a_new_run_with_another_optimizer(tmp_path):
    layout = saved(tmp_path, 7)
    other = small_layout(optimizer=optax.sgd(0.1, momentum=0.9))
    restored = hfjax.restore(tmp_path, other, parameters_only=True)
    assert same(restored.state.params, state_at(layout, 7, 7).params)
    fresh = replace(hfjax.init(other), params=restored.state.params)
    assert same(restored.state, fresh)
    assert (int(restored.state.step), restored.step) == (0, 7)


def test_parameters_only_reads_no_moments_from_the_disk(tmp_path):
    layout = saved(tmp_path, 1, layout=small_layout(wide=4096))
    size = sum(x.size * 4 for x in layout.arrays.values() for x in [np.empty(x.shape)])

    def bytes_read(**wish):
        name = "/tensorstore/kvstore/file/bytes_read"
        told = lambda: tensorstore.experimental_collect_matching_metrics(name)[0]["values"][0]
        before = told()["value"]
        hfjax.restore(tmp_path, layout, verify=False, **wish)
        return told()["value"] - before

    read, everything = bytes_read(parameters_only=True), bytes_read()
    assert size <= read < 1.3 * size
    assert 3 * size <= everything


@pytest.mark.slow
def test_random_keys_go_on_and_are_new_where_only_parameters_are_wanted(tmp_path):
    layout = mlp_layout(FSDP, {"fsdp": 2}, layers=1, dropout=0.1)
    hfjax.save(tmp_path, layout, state := hfjax.init(layout, seed=4))
    assert same(hfjax.restore(tmp_path, layout).state.variables, state.variables)
    restored = hfjax.restore(tmp_path, layout, parameters_only=True).state
    assert same(restored.variables, hfjax.init(layout, seed=0).variables)
    still = mlp_layout(FSDP, {"fsdp": 2}, layers=1)
    assert not hfjax.restore(tmp_path, still, parameters_only=True).state.variables


def noisy(strategy, sizes):
    """A layout whose optimizer keeps a random key."""
    optimizer = optax.chain(optax.add_noise(0.1, 0.55, jax.random.key(3)), optax.adam(0.1))
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = hfjax.make_mesh(devices=devices, **sizes)
    return hfjax.layout(lambda rngs: {"w": rngs.normal((8, 8))}, optimizer, mesh, strategy)


@pytest.mark.slow
def test_the_random_key_of_an_optimizer_goes_on_under_any_mesh(tmp_path):
    loss, batch = lambda w, x: ((x @ w["w"]) ** 2).mean(), np.eye(8, dtype=np.float32)
    run = lambda layout, state: hfjax.train_step(layout, loss)(state, batch)[0]
    straight = noisy(DDP, {"data": 1})
    once = run(straight, hfjax.init(straight))
    wanted = run(straight, jax.tree.map(jnp.copy, once))
    split = noisy(EVERYTHING, {"fsdp": 4})
    assert "optimizer_state 144 B" in str(split)  # two of 8x8 in four, two counts, a key
    hfjax.save(tmp_path, split, run(split, hfjax.init(split)))
    for layout in (split, noisy(DDP, {"data": 2})):
        state = run(layout, hfjax.restore(tmp_path, layout).state)
        assert same(state.optimizer[0], wanted.optimizer[0])
        np.testing.assert_allclose(state.params["w"], wanted.params["w"], rtol=1e-5, atol=1e-6)


class Counting(Two):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.mean = nnx.BatchStat(jnp.full(4, 2.5))


def test_statistics_of_the_model_come_with_its_parameters(tmp_path):
    layout = saved(tmp_path, 1, layout=small_layout(model=Counting))
    found = hfjax.restore(tmp_path, layout, parameters_only=True).state
    assert np.asarray(flatten(found.variables)["mean"]).tolist() == [2.5] * 4
    with pytest.raises(ValueError, match=r"variables/mean float32\[4\] is saved, not wanted"):
        hfjax.restore(tmp_path, small_layout(), parameters_only=True)


@pytest.mark.parametrize("parameters_only", [False, True])
def test_another_dtype_is_cast_where_it_is_asked_for(tmp_path, parameters_only):
    layout = saved(tmp_path, 2)
    half = small_layout(dtype=jnp.bfloat16)
    wish = {"dtype": "bfloat16", "parameters_only": parameters_only}
    found = hfjax.restore(tmp_path, half, **wish).state
    wanted = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state_at(layout, 2, 2).params)
    assert same(found.params, wanted)
    assert {str(x.dtype) for x in jax.tree.leaves(found.optimizer)} == {"bfloat16", "int32"}
    hfjax.save(tmp_path / "half", half, state_at(half, 4))
    back = hfjax.restore(tmp_path / "half", layout, dtype=np.float32).state
    assert {str(x.dtype) for x in jax.tree.leaves(back.params)} == {"float32"}


@pytest.mark.slow
def test_a_pipelines_state_is_saved_in_the_models_order(tmp_path):
    layout, schedule = mlp_layout(PIPE, {"pipe": 2}, layers=3), Schedule("1f1b", 2)
    state = hfjax.init(layout, schedule=schedule)
    hfjax.save(tmp_path, layout, state)
    arrays = hfjax.checkpoint_metadata(tmp_path)["arrays"]
    assert arrays["params/layers/mlp/up/kernel"] == ["float32", [3, 32, 128]]
    plain = mlp_layout(EVERYTHING, {"fsdp": 2}, layers=3)
    restored = hfjax.restore(tmp_path, plain).state
    assert same(restored.params, hfjax.to_model_order(layout, state).params)


@pytest.mark.slow
def test_packed_rows_of_unlike_layers_are_saved_as_the_models_own_arrays(tmp_path):
    two = hfjax.layout(mlp, optax.adam(1e-3), hfjax.make_mesh(pipe=2), PIPE)
    state = hfjax.init(two, schedule=Schedule("1f1b", 2))
    hfjax.save(tmp_path, two, state)
    one = hfjax.layout(mlp, optax.adam(1e-3), hfjax.make_mesh(data=1), DDP)
    wanted = replace(hfjax.to_model_order(two, state), order=None)
    for layout in (one, two):
        restored = hfjax.restore(tmp_path, layout).state
        assert same(replace(restored, order=None), wanted)
    fresh = hfjax.restore(tmp_path, two, parameters_only=True).state
    assert same(fresh.params, wanted.params)
    metrics = hfjax.train_step(two, squares, schedule=Schedule("1f1b", 2))(restored, ROWS)[1]
    assert np.isfinite(metrics["loss"])
