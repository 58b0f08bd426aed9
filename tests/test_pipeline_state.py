"""What a pipeline stores: layers by stage, canonical when saved, any other layout when restored."""

import dataclasses
import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import hfjax
from hfjax import DDP, FSDP, PIPE, Schedule
from hfjax.utils.paths import flatten
from tests.constant_stack import rows, stack_layout, weighted

STAGES = {"pipe": 4}
FOUR = Schedule("1f1b", 4)


def trained(layout, schedule):
    """Return the state after two steps, and the losses of two more."""
    step = hfjax.train_step(layout, weighted, schedule=schedule)
    state = hfjax.init(layout, schedule=schedule)
    for _ in range(2):
        state, _ = step(state, rows())
    return state, after(step, jax.tree.map(jnp.copy, state))


def continued(layout, state, schedule=None):
    return after(hfjax.train_step(layout, weighted, schedule=schedule), state)


def after(step, state):
    """Return the losses of two steps: moments are in the second."""
    state, first = step(state, rows())
    return [float(first["loss"]), float(step(state, rows())[1]["loss"])]


@functools.cache
def six_on_four():
    """Return the layout of six layers on four stages, and a state of it after two steps."""
    layout = stack_layout(PIPE, STAGES, layers=6)
    return layout, trained(layout, FOUR)[0]


@pytest.mark.slow
def test_specs_and_saved_state_name_the_models_own_arrays_whatever_the_schedule():
    layout, state = six_on_four()
    path = "layers/up"
    assert layout.specs[path] == jax.sharding.PartitionSpec("pipe")
    assert layout.arrays[path].shape == (6, 8, 16)
    assert flatten(state.params)[path].shape == (8, 8, 16)  # two of eight places are empty
    saved = flatten(hfjax.to_model_order(layout, state).params)
    assert {p: x.shape for p, x in saved.items()} == {
        p: array.shape for p, array in layout.arrays.items()
    }


class Listed(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(3)])

    embed = head = lambda self, x: x


def test_a_layout_says_how_a_state_stores_its_layers():
    listed = lambda sizes: hfjax.layout(Listed, optax.sgd(0.1), hfjax.make_mesh(**sizes), PIPE)
    plain, stacked = stack_layout(FSDP, {"fsdp": 2}, layers=3), six_on_four()[0]
    packed = listed({"pipe": 2})
    found = [type(layout.storage).__name__ for layout in (plain, stacked, packed)]
    assert found == ["ModelOrder", "StackedLayers", "PackedStages"]
    assert [np.asarray(layout.order).tolist() for layout in (plain, packed)] == [
        [0, 1, 2],
        [[0, 1], [2, -1]],
    ]
    assert [type(x.model_layout.storage).__name__ for x in (stacked, packed)] == 2 * ["ModelOrder"]
    assert packed.storage.packed is not None
    held = [v for x in (plain, stacked, packed) for v in vars(x.storage).values()]
    assert not [x for x in held if isinstance(x, dict | list | set)]  # nothing is kept in it


def test_empty_places_stay_zero():
    _, state = six_on_four()
    for path, x in flatten(state.params).items():
        if path.startswith("layers/"):
            assert not np.asarray(x)[[5, 7]].any(), path


@pytest.mark.slow
@pytest.mark.parametrize("layers", [6, pytest.param(8, marks=pytest.mark.slow)])
def test_a_state_goes_from_one_schedule_to_another_and_to_no_pipeline(tmp_path, layers):
    layout = stack_layout(PIPE, {"pipe": 2}, layers=layers)
    schedule = Schedule("interleaved", 4, 2)
    before, wanted = trained(layout, schedule)
    manager = ocp.StandardCheckpointer()
    manager.save(tmp_path / "saved", hfjax.to_model_order(layout, before))
    other = stack_layout(FSDP, {"fsdp": 4}, layers=layers)
    manager.wait_until_finished()
    restored = manager.restore(tmp_path / "saved", other.abstract_state())
    assert continued(other, restored) == pytest.approx(wanted, rel=1e-5)
    assert continued(layout, before, Schedule("v", 4, 2)) == pytest.approx(wanted, rel=1e-5)
    four = stack_layout(PIPE, {"pipe": 4}, layers=layers)
    back = manager.restore(tmp_path / "saved", four.model_layout.abstract_state())
    assert continued(four, back, FOUR) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
def test_a_state_saved_in_stages_tells_the_order_of_its_layers(tmp_path):
    layout = stack_layout(PIPE, {"pipe": 2}, layers=4)
    schedule = Schedule("interleaved", 4, 2)
    state, wanted = trained(layout, schedule)
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(tmp_path / "saved", state)
    checkpointer.wait_until_finished()
    plain = stack_layout(DDP, {"data": 2}, layers=4)
    restored = checkpointer.restore(tmp_path / "saved", plain.abstract_state())
    assert np.asarray(restored.order).tolist() == [0, 2, 1, 3]
    assert continued(plain, restored) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("schedule", [None, Schedule("interleaved", 4, 2)])
def test_evaluation_runs_forward_only_and_equals_one_device(schedule):
    layout = stack_layout(PIPE | DDP, {"pipe": 2, "data": 2}, layers=4, dropout=0.3)
    state = hfjax.init(layout, schedule=schedule)
    found = hfjax.eval_step(layout, weighted, schedule=schedule)(state, rows())
    assert float(found["loss"]) == pytest.approx(evaluated_on_one_device(), rel=1e-6)


@functools.cache
def evaluated_on_one_device():
    one = stack_layout(DDP, {"data": 1}, layers=4, dropout=0.3)
    return float(hfjax.eval_step(one, weighted)(hfjax.init(one), rows())["loss"])


@pytest.mark.slow
def test_what_is_compiled_for_a_layout_dies_with_it():
    layout, schedule = stack_layout(PIPE, {"pipe": 2}, layers=4), Schedule("interleaved", 4, 2)
    step = hfjax.train_step(layout, weighted, schedule=schedule)
    state = hfjax.init(layout, schedule=schedule)
    assert not np.array_equal(hfjax.to_model_order(layout, state).order, state.order)
    held = [weakref.ref(x) for x in (layout, layout.model_layout, layout.template, step)]
    del layout, step, state
    gc.collect()
    assert [x() for x in held] == [None] * len(held)


def test_an_order_that_was_looked_at_is_not_looked_at_again(monkeypatch):
    layout, looked = stack_layout(FSDP, {"fsdp": 2}, layers=2), []
    assert layout.order is layout.order
    state, evaluate = hfjax.init(layout), hfjax.eval_step(layout, weighted)
    equal = np.array_equal
    look = lambda a, b: looked.append(b) or equal(a, b)
    monkeypatch.setattr("hfjax.sharding.reorder_layers.np.array_equal", look)
    for _ in range(3):
        evaluate(state, rows())
    assert len(looked) == 1
    other = dataclasses.replace(state, order=jnp.array([1, 0]))
    moved = hfjax.to_model_order(layout, other)
    assert len(looked) == 2
    kernel = lambda state: np.asarray(flatten(state.params)["layers/up"])
    np.testing.assert_array_equal(kernel(moved), kernel(state)[::-1])


@pytest.mark.slow
def test_adafactors_factored_moments_follow_their_layers():
    optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=8)
    layout = stack_layout(PIPE, {"pipe": 2}, optimizer, layers=4)
    before, wanted = trained(layout, Schedule("interleaved", 4, 2))
    assert continued(layout, before, Schedule("1f1b", 4)) == pytest.approx(wanted, rel=1e-5)


def test_each_device_holds_its_stage_and_the_ends():
    layout = stack_layout(PIPE, STAGES, layers=4)
    state = hfjax.init(layout)
    for path, x in flatten(state.params).items():
        piece = x.addressable_shards[0].data
        assert piece.size == x.size // (4 if path.startswith("layers/") else 1), path
