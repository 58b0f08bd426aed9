"""What a pipeline cannot do it refuses, with what was given, what is allowed, and what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import hfjax
from hfjax import DDP, FSDP, PIPE, Schedule
from hfjax.models.gpt import next_token_loss
from hfjax.models.layers import run_stacked, stack_layers
from hfjax.testing import assert_strategies_agree
from tests.constant_stack import rows, stack, stack_layout, weighted
from tests.small_gpt import mlp_layout, tokens

FOUR = Schedule("1f1b", 4)


class Wider(nnx.Module):
    """A layer that hands on more than it is given."""

    def __init__(self, rngs):
        self.weight = nnx.Param(jnp.ones((4, 6)), axes=("embed", "mlp"))

    def __call__(self, x):
        return x @ self.weight[...]


class Counting(nnx.Module):
    """A layer that counts its calls."""

    def __init__(self, rngs):
        self.weight = nnx.Param(jnp.ones((4, 4)), axes=("embed", None))
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1.0
        return x @ self.weight[...]


class Stack(nnx.Module):
    """Layers between an identity and a mean."""

    def __init__(self, layer, rngs, layers=4):
        self.layers = stack_layers(layers, layer, rngs)

    def embed(self, batch):
        return batch["x"]

    def head(self, x):
        return x.mean(-1)

    def __call__(self, batch):
        return self.head(run_stacked(self.layers, self.embed(batch)))


def step_of(layer, forward=None, schedule=FOUR):
    mesh = hfjax.make_mesh(pipe=4)
    init = lambda rngs: Stack(layer, rngs)
    layout = hfjax.layout(init, optax.sgd(0.1), mesh, PIPE, forward=forward)
    step = hfjax.train_step(layout, lambda y, batch: y.mean(), schedule=schedule)
    return step, hfjax.init(layout)


ROWS = {"x": np.ones((8, 4), np.float32)}


def train(strategy, sizes, schedule, **changes):
    layout = mlp_layout(strategy, sizes, **changes)
    return hfjax.train_step(layout, next_token_loss, schedule=schedule)


def test_a_pipe_axis_needs_a_schedule():
    with pytest.raises(ValueError, match=r"pipe=2: a pipe axis needs a schedule.*Schedule\("):
        train(PIPE, {"pipe": 2}, None)


def test_a_schedule_is_a_schedule():
    with pytest.raises(ValueError, match=r"schedule='1f1b': a hfjax.Schedule is expected"):
        train(PIPE, {"pipe": 2}, "1f1b")


def test_a_pipe_axis_needs_a_strategy_that_places_the_layers_on_it():
    with pytest.raises(ValueError, match=r"does not split the layers over pipe.*Add hfjax.PIPE"):
        train(DDP, {"pipe": 2, "data": 2}, FOUR)


def test_stacked_arrays_of_a_model_in_one_part_are_no_stages():
    mesh = hfjax.make_mesh(pipe=2, devices=jax.devices()[:2])
    model, named = lambda rngs: {"w": jnp.ones((2, 8, 8))}, {"w": ("layers", None, None)}
    layout = hfjax.layout(model, optax.sgd(0.1), mesh, PIPE, axes=named)
    with pytest.raises(ValueError, match=r"pipe=2 with .*: stages are made of a model in three"):
        hfjax.train_step(layout, next_token_loss)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match=r"2 layers for 4 parts .*fewer stages.*or fewer chunks"):
        mlp_layout(PIPE, {"pipe": 4}, layers=2)
    with pytest.raises(ValueError, match="4 layers for 8 parts"):
        train(PIPE, {"pipe": 2}, Schedule("interleaved", 4, 4), layers=4)


@pytest.mark.parametrize("balance", [(3, 2), (2, 1, 1), (4, 0)])
def test_a_balance_that_does_not_deal_all_layers_is_refused(balance):
    with pytest.raises(ValueError, match=r"balance|positive"):
        train(PIPE, {"pipe": 2}, Schedule("1f1b", 4, balance=balance), layers=4)


def test_a_batch_that_does_not_split_into_microbatches_is_refused():
    step = train(PIPE | DDP, {"pipe": 2, "data": 2}, FOUR)
    with pytest.raises(
        ValueError, match=r"12 examples does not divide by 4 microbatches x 2 devices"
    ):
        step.lower(tokens(12))


def test_layers_that_change_the_shape_of_what_they_are_given_are_refused():
    step, _ = step_of(Wider)
    with pytest.raises(ValueError, match=r"given float32\[2,4\].* returns float32\[2,6\].*cast"):
        step.lower(ROWS)


def test_layers_that_write_to_variables_are_refused_by_name():
    step, _ = step_of(Counting)
    with pytest.raises(ValueError, match=r"a layer writes to layers/calls.*GroupNorm.*pytree"):
        step.lower(ROWS)


def test_a_model_in_one_part_cannot_be_cut():
    init = lambda rngs: nnx.Linear(4, 4, rngs=rngs)
    layout = hfjax.layout(init, optax.sgd(0.1), hfjax.make_mesh(data=8), DDP)
    with pytest.raises(ValueError, match=r"three parts.*embed.*head.*layers"):
        hfjax.train_step(layout, next_token_loss, schedule=FOUR)
    with pytest.raises(ValueError, match=r"three parts.*no forward="):
        step_of(Wider, forward=lambda model, batch: model(batch))


def test_pipe_splits_layers_and_nothing_else_of_theirs():
    layout = mlp_layout(PIPE | FSDP, {"pipe": 2, "fsdp": 2})
    bad = jax.sharding.PartitionSpec(None, "pipe")
    with pytest.raises(ValueError, match=r"pipe splits the layers, dimension 0"):
        layout.with_specs({"layers/mlp/up/kernel": bad})
    bad = jax.sharding.PartitionSpec("fsdp")
    with pytest.raises(ValueError, match=r"stacks the layers.*only over pipe"):
        layout.with_specs({"layers/mlp/up/kernel": bad})


def test_a_users_table_is_for_its_own_number_of_stages_and_runs_there():
    own = Schedule.from_text("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    with pytest.raises(ValueError, match=r"for 2 stages, the mesh has 4"):
        train(PIPE, {"pipe": 4}, own, layers=4)
    case = {"own": (PIPE, {"pipe": 2}, {"schedule": own})}
    assert_strategies_agree(stack(layers=3), weighted, rows(), case, steps=2)


@pytest.mark.slow
def test_the_ends_of_a_model_may_be_split_over_the_stages():
    strategy = PIPE.edit(parameters={"vocab": "pipe"})
    case = {"ends": (strategy, {"pipe": 2}, {"schedule": FOUR})}
    layout = stack_layout(strategy, {"pipe": 2})
    assert layout.specs["before"] == jax.sharding.PartitionSpec("pipe")
    assert_strategies_agree(stack(layers=3), weighted, rows(), case, steps=2)


def test_an_optimizer_that_takes_means_over_padded_layers_is_refused():
    layout = stack_layout(PIPE, {"pipe": 2}, optax.adafactor(1e-2), layers=3)
    with pytest.raises(ValueError, match=r"3 layers are padded to 4 rows.*adamw"):
        hfjax.train_step(layout, weighted, schedule=FOUR)
    for optimizer in (optax.lamb(1e-3), optax.adamw(1e-3), optax.sgd(0.1, momentum=0.9)):
        hfjax.train_step(
            stack_layout(PIPE, {"pipe": 2}, optimizer, layers=3), weighted, schedule=FOUR
        )


def test_means_over_padded_layers_are_seen_also_where_parameters_are_bfloat16():
    half = lambda rngs: nnx.Linear(4, 4, param_dtype=jnp.bfloat16, rngs=rngs)
    layout = hfjax.layout(
        lambda rngs: Stack(half, rngs, layers=3),
        optax.adafactor(1e-2),
        hfjax.make_mesh(pipe=2, devices=jax.devices()[:2]),
        PIPE,
    )
    with pytest.raises(ValueError, match=r"3 layers are padded to 4 rows.*adamw"):
        hfjax.train_step(layout, lambda outputs, batch: outputs.mean(), schedule=FOUR)


def test_a_table_that_only_evaluates_does_not_train():
    with pytest.raises(ValueError, match=r"schedule forward has no backward passes"):
        train(PIPE, {"pipe": 2}, Schedule("forward", 4))


class Looping(nnx.Module):
    """A layer whose loop ends on what embed makes, but would never end on zeros."""

    def __init__(self, rngs):
        self.weight = nnx.Param(jnp.ones((4, 4)), axes=("embed", None))

    def __call__(self, x):
        start = jax.lax.stop_gradient(x)
        more = lambda z: jnp.abs(z).max() < 1
        return x @ self.weight[...] + jax.lax.while_loop(more, lambda z: 2 * z, start)


def test_idle_slots_run_layers_on_what_embed_makes_not_on_zeros():
    step, state = step_of(Looping, schedule=Schedule("1f1b", 4, branches=False))
    assert np.isfinite(step(state, ROWS)[1]["loss"])


class Unread(nnx.Module):
    """A layer that has a parameter and does not use it."""

    def __init__(self, rngs):
        self.weight = nnx.Param(jnp.ones((4, 4)), axes=("embed", None))

    def __call__(self, x):
        return jnp.sin(x) + x


def test_a_layer_without_a_gradient_of_its_own_comes_apart_too():
    mesh = hfjax.make_mesh(pipe=2)
    layout = hfjax.layout(lambda rngs: Stack(Unread, rngs), optax.sgd(0.1), mesh, PIPE)
    schedule = Schedule("zb-h1", 2)
    step = hfjax.train_step(layout, lambda y, batch: y.mean(), schedule=schedule)
    assert np.isfinite(step(hfjax.init(layout), ROWS)[1]["loss"])


def test_rows_that_layers_or_criterion_cannot_take_are_told_with_their_shapes():
    layers = [nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(4)]
    pipe = hfjax.compat.GPipe(hfjax.compat.partition(layers, stages=2), microbatches=2)
    x, wide = np.ones((8, 8), np.float32), np.ones((8, 9), np.float32)
    criterion = lambda outputs, y: jnp.mean((outputs - y) ** 2)
    with pytest.raises(ValueError, match=r"cannot take x float32\[8, 9\] with labels"):
        pipe.forward_backward(wide, criterion=criterion, labels=(x,))
    with pytest.raises(ValueError, match=r"with labels \('float32\[8, 9\]',\)"):
        pipe.forward_backward(x, criterion=criterion, labels=(wide,))
    with pytest.raises(ValueError, match=r"cannot take x float32\[8, 9\]"):
        pipe.forward(wide)


def test_specs_of_a_listed_layer_that_is_packed_on_stages_are_refused_with_what_to_edit():
    mesh = hfjax.make_mesh(pipe=2, devices=jax.devices()[:2])
    layout = hfjax.layout(
        lambda rngs: Listed(rngs=rngs), optax.sgd(0.1), mesh, hfjax.PIPE | hfjax.DDP
    )
    with pytest.raises(ValueError, match=r"packed into rows: edit layers/packed_float32, or stack"):
        layout.with_specs({"layers/0/kernel": P()})


class Listed(nnx.Module):
    def __init__(self, *, rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(4)])

    def embed(self, batch):
        return batch["x"]

    def head(self, x):
        return x
