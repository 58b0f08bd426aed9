"""State in host memory: where it lies, and that it is updated as on the device, to the bit."""

import math
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
import pytest

import hfjax
from hfjax.models.gpt import next_token_loss
from hfjax.parallel.strategy import Strategy
from hfjax.step.init_state import init_program
from hfjax.testing import _check_placement
from hfjax.utils.paths import flatten
from tests.h200 import OPTIMIZED, h200s
from tests.small_checkpoint import EVERYTHING, same, small_layout, state_at
from tests.small_gpt import gpt_layout, mlp_layout, tokens
from tests.small_stack import rows, squared, stack_layout

DDP, FSDP, PIPE, TENSOR, ZERO1, ZERO2 = (
    hfjax.DDP,
    hfjax.FSDP,
    hfjax.PIPE,
    hfjax.TENSOR,
    hfjax.ZERO1,
    hfjax.ZERO2,
)
HOST = hfjax.HOST_OPTIMIZER
ONE = {"data": 1}
# XLA writes x / (1 - b ** t) now so and now otherwise, by what is near it; as it is written here,
# every update is the same to the last bit.
AS_WRITTEN = {"xla_disable_hlo_passes": "algsimp"}


def share(of):
    return Strategy(f"SHARE{of}", memory={"optimizer_state": of})


def mlps_layout(strategy, sizes):
    return mlp_layout(strategy, sizes, devices=jax.devices()[: math.prod(sizes.values())])


def steps(layout, count=3, loss=squared, batch=None, **execution):
    """The state and the losses after some steps; everything lies where the layout says."""
    step = hfjax.train_step(layout, loss, **({"unroll": 1} | execution))
    state, losses = hfjax.init(layout, schedule=execution.get("schedule")), []
    for _ in range(count):
        state, metrics = step(state, batch or rows())
        _check_placement(step.layout, state)
        losses.append(float(metrics["loss"]))
    return state, losses


steps_as_written = partial(steps, compiler_options=AS_WRITTEN)


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


def moments(state):
    return {x.sharding.memory_kind for x in jax.tree.leaves(state.optimizer) if x.ndim}


# -- the column ---------------------------------------------------------------------------


def test_the_column_is_merged_edited_and_shown_as_the_others_are():
    both = FSDP | HOST
    assert dict(both.memory) == {"optimizer_state": "host", "master": "host"}
    assert dict((both | HOST).memory) == dict(both.memory)
    assert str(both).endswith("\n  memory: optimizer_state -> host, master -> host")
    assert "memory" not in str(FSDP)
    edited = both.edit(memory={"optimizer_state": 0.25})
    assert dict(edited.memory) == {"optimizer_state": 0.25, "master": "host"}
    assert "optimizer_state -> 25% host" in str(edited)
    assert dict(share(1).memory) == {"optimizer_state": "host"}
    assert dict(share(0.0).memory) == {"optimizer_state": "device"}


def test_rows_that_say_different_things_are_refused_by_name():
    message = (
        r"HOST_OPTIMIZER \| SHARE0.5: both place memory row 'optimizer_state': HOST_OPTIMIZER says "
        "host, SHARE0.5 says 50% host"
    )
    with pytest.raises(ValueError, match=message):
        _ = HOST | share(0.5)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            {"gradients": "host"},
            "memory row 'gradients': one of optimizer_state, master, parameters",
        ),
        (
            {"optimizer_state": "disk"},
            'optimizer_state -> \'disk\': "host" or "device", or a fraction',
        ),
        ({"optimizer_state": 1.5}, "optimizer_state -> 1.5: the fraction .* is from 0 to 1"),
        ({"optimizer_state": True}, 'optimizer_state -> True: "host" or "device"'),
        ({"master": 0.5}, "master -> 0.5: a fraction is of optimizer_state"),
    ],
)
def test_rows_that_mean_nothing_are_refused(rows: Any, message):
    with pytest.raises(ValueError, match=message):
        Strategy("MINE", memory=rows)


# -- where things lie ---------------------------------------------------------------------


def test_a_state_is_born_where_the_layout_says_and_its_bytes_are_counted_apart():
    layout = stack_layout(FSDP | HOST, {"fsdp": 8})
    state, plain = hfjax.init(layout), stack_layout(FSDP, {"fsdp": 8})
    _check_placement(layout, state)
    assert moments(state) == {"pinned_host"}
    assert kinds((state.params, state.step, state.optimizer[0].count)) == {"device"}
    told, whole = layout.bytes_per_device(), plain.bytes_per_device()
    assert told["parameters"] == whole["parameters"]
    assert told["optimizer_state"] == 4  # the count
    assert told["host optimizer_state"] == whole["optimizer_state"] - 4
    assert "host optimizer_state" not in whole
    assert "same on host" in str(layout)
    assert "host optimizer_state 264 B" in str(layout)
    assert same(state, hfjax.init(plain))


@pytest.mark.parametrize("asked", [0.1, 0.37, 0.8])
def test_a_share_of_the_moments_is_met_within_one_array(asked):
    layout = stack_layout(FSDP | share(asked), {"fsdp": 8})
    told = layout.bytes_per_device()
    whole = told["host optimizer_state"] + told["optimizer_state"] - 4
    left = [
        x.size * x.dtype.itemsize // 8
        for x in jax.tree.leaves(layout.abstract_state().optimizer)
        if x.ndim and x.sharding.memory_kind != "pinned_host"
    ]
    assert 0 <= asked * whole - told["host optimizer_state"] < min(left)
    assert (
        f"{told['host optimizer_state'] / whole:.1%} of the optimizer state's bytes are on the host"
        in str(layout)
    )


def test_a_column_that_would_keep_nothing_on_the_host_is_refused():
    with pytest.raises(
        ValueError, match=r"optimizer_state -> host, .*no array like a parameter and"
    ):
        stack_layout(DDP | HOST, ONE, optax.sgd(1e-3))
    no_masters = r"master -> host: .*keeps no master weights \(hfjax.optimizers.mast"
    with pytest.raises(ValueError, match=no_masters):
        stack_layout(Strategy("MASTER", memory={"master": "host"}), ONE)


def test_devices_without_memory_of_the_host_are_refused(monkeypatch):
    monkeypatch.setattr("hfjax.parallel.offload.host_memory._memory_kinds", lambda mesh: ["device"])
    with pytest.raises(ValueError, match="these devices have no pinned_host memory"):
        stack_layout(DDP | HOST, ONE)


def test_parameters_on_the_host_are_stored_there():
    layout = stack_layout(FSDP | hfjax.HOST_PARAMETERS, {"fsdp": 8})
    state = hfjax.init(layout)
    assert kinds(state.params) == {"pinned_host"}
    told = layout.bytes_per_device()
    assert told["parameters"] == 0
    assert told["host parameters"] > 0
    assert 'P(None, "fsdp") on host' in str(layout)


# -- the update ---------------------------------------------------------------------------

MESHES = [
    (DDP, ONE, {}),
    (ZERO1, {"data": 4}, {"on_nonfinite": "skip"}),
    (
        ZERO2 | TENSOR,
        {"data": 2, "tensor": 2},
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5},
    ),
    (hfjax.HSDP, {"data": 2, "fsdp": 2}, {"on_nonfinite": "apply"}),
    (PIPE | FSDP, {"pipe": 2, "fsdp": 2}, {"schedule": hfjax.Schedule("1f1b", 4)}),
]


@pytest.mark.parametrize(("strategy", "sizes", "execution"), MESHES)
@pytest.mark.short("strategy0-sizes0-execution0")
def test_moments_on_the_host_are_updated_as_on_the_device_to_the_bit(strategy, sizes, execution):
    host = share(0.5) if strategy == DDP else HOST
    layout, of = stack_layout, {}
    if "tensor" in sizes:
        layout, of = mlps_layout, {"loss": next_token_loss, "batch": tokens()}
    wanted, losses = steps_as_written(layout(strategy, sizes), **execution, **of)
    state, found = steps_as_written(layout(strategy | host, sizes), **execution, **of)
    assert found == losses
    assert same(wanted, state)


def grouped():
    rate = hfjax.lr_schedule(1e-2, warmup_steps=2, steps=8)
    return hfjax.optimizers.by_path(
        {"*norm*": optax.lion(1e-3), "*": optax.adamw(rate, weight_decay=0.1)}
    )


OPTIMIZERS = {
    "groups, factors and an average": hfjax.optimizers.ema(
        hfjax.optimizers.scaled(grouped(), {"before": 0.1}), 0.5
    ),
    "lamb, whole arrays": optax.lamb(1e-3),
    "a norm of all gradients": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3)),
}


RARE = ("lamb, whole arrays", "a norm of all gradients")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in RARE else n for n in OPTIMIZERS]
)
def test_optimizers_put_together_are_streamed_too(name):
    frozen = ("norm/bias", "layers/bias")
    of = lambda strategy: stack_layout(strategy, {"fsdp": 2}, OPTIMIZERS[name]).freeze(*frozen)
    (wanted, _), (state, _) = (
        steps_as_written(of(s), max_grad_norm=0.5) for s in (FSDP, FSDP | HOST)
    )
    assert moments(state) == {"pinned_host"}
    assert same(wanted, state)


def test_an_optimizer_that_needs_all_moments_at_once_is_right_and_says_what_it_costs():
    optimizer = optax.chain(optax.adamw(1e-3), optax.clip_by_global_norm(0.01))
    wanted, _ = steps_as_written(stack_layout(FSDP, {"fsdp": 2}, optimizer), 2)
    with pytest.warns(RuntimeWarning, match="all that lies on the host is on the device at once"):
        state, _ = steps_as_written(stack_layout(FSDP | HOST, {"fsdp": 2}, optimizer), 2)
    assert same(wanted, state)


def test_a_step_that_is_not_finite_changes_nothing_on_the_host():
    layout = stack_layout(FSDP | HOST, {"fsdp": 2})

    def bad(outputs, batch):
        mean = squared(outputs, batch)
        return hfjax.Mean(mean.total * np.float32("nan"), mean.weight)

    state = hfjax.init(layout)
    before = hfjax.full_array(state)
    step = hfjax.train_step(layout, bad, on_nonfinite="skip")
    state, metrics = step(state, rows())
    assert not metrics["finite"]
    _check_placement(layout, state)
    assert same(before.params, hfjax.full_array(state.params))
    assert same(before.optimizer, hfjax.full_array(state.optimizer))
    assert state.step == 1


def test_a_state_that_lies_elsewhere_is_refused_and_says_how_to_move_it():
    near, far = stack_layout(FSDP, {"fsdp": 2}), stack_layout(FSDP | HOST, {"fsdp": 2})
    for has, wants in ((near, far), (far, near)):
        step = hfjax.train_step(wants, squared)
        with pytest.raises(ValueError, match=r"this state lies in .* memory where the layout"):
            step(hfjax.init(has), rows())


def test_a_share_too_small_for_any_array_is_told():
    with pytest.warns(UserWarning, match="the host keeps nothing. Raise the fraction"):
        stack_layout(DDP | share(1e-9), ONE)


def test_stages_that_update_by_themselves_refuse_the_column():
    layout = stack_layout(PIPE | HOST, {"pipe": 2})
    with pytest.raises(
        ValueError, match="HOST_OPTIMIZER with schedule 2bw: HOST_OPTIMIZER keeps a part of the"
    ):
        hfjax.train_step(layout, squared, schedule=hfjax.Schedule("2bw", 4))


def test_evaluation_and_another_order_of_layers_leave_moments_where_they_are():
    layout = stack_layout(PIPE | HOST, {"pipe": 2}, layers=4)
    schedule = hfjax.Schedule("interleaved", 4, chunks=2)
    state, _ = steps(layout, 1, schedule=schedule)
    loss = hfjax.eval_step(layout, squared)(state, rows())["loss"]
    plain = hfjax.to_model_order(layout, state)
    _check_placement(layout.model_layout, plain)
    alone = stack_layout(DDP, ONE, layers=4)
    state, _ = steps(alone, 1)
    wanted = hfjax.eval_step(alone, squared)(state, rows())["loss"]
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)


# -- master weights -----------------------------------------------------------------------


def rounded(state, masters):
    """Whether every parameter is its master weight, rounded."""
    params = flatten(hfjax.full_array(state.params))
    of = {path: x.astype("bfloat16") for path, x in flatten(hfjax.full_array(masters)).items()}
    return all(x.tobytes() == params[path].tobytes() for path, x in of.items())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [pytest.param(ZERO1, marks=pytest.mark.slow), ZERO1 | HOST])
def test_parameters_are_their_master_weights_rounded_after_every_step(strategy):
    optimizer = hfjax.optimizers.master_weights(hfjax.optimizers.ema(grouped(), 0.5))
    layout = stack_layout(strategy, {"data": 4}, optimizer)
    state = hfjax.init(layout)
    born = hfjax.init(stack_layout(DDP, ONE))
    assert {str(x.dtype) for x in jax.tree.leaves(state.params)} == {"bfloat16"}
    assert same(born.params, state.optimizer.master)  # not what is rounded
    step = hfjax.train_step(layout, squared, max_grad_norm=0.5, precision="bf16")
    for _ in range(3):
        state, _ = step(state, rows())
        assert rounded(state, state.optimizer.master)
        _check_placement(layout, state)
    assert moments(state) == {"pinned_host" if strategy.memory else "device"}
    assert not same(state.optimizer.master, born.params)
    average = hfjax.optimizers.averaged(state).params
    assert {str(x.dtype) for x in jax.tree.leaves(average)} == {"bfloat16"}


def test_the_optimizer_sees_master_weights_and_gradients_in_float32():
    seen = []

    def update(updates, state, params=None):
        seen.extend(str(x.dtype) for x in jax.tree.leaves((updates, params)))
        return updates, state

    spy = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    layout = stack_layout(
        DDP, ONE, hfjax.optimizers.master_weights(optax.chain(spy, optax.sgd(1e-3)))
    )
    hfjax.train_step(layout, squared).trace(rows())
    assert set(seen) == {"float32"}


def test_small_updates_that_bfloat16_would_lose_add_up_in_the_master_weights():
    layout = stack_layout(DDP, ONE, hfjax.optimizers.master_weights(optax.sgd(1e-6)))
    state, _ = steps(layout, 2)
    born = hfjax.init(layout)
    moved = lambda a, b: not same(a, b)
    assert moved(born.optimizer.master, state.optimizer.master)


@pytest.mark.slow
def test_master_weights_of_frozen_parameters_are_not_kept():
    layout = stack_layout(
        FSDP | HOST, {"fsdp": 2}, hfjax.optimizers.master_weights(optax.adamw(1e-3))
    )
    layout = layout.freeze("before")
    state, _ = steps(layout, 2)
    first = hfjax.init(layout)
    assert same(flatten(first.params)["before"], flatten(state.params)["before"])
    paths = [jax.tree_util.keystr(k) for k, _ in jax.tree.leaves_with_path(state.optimizer)]
    assert any("master" in path for path in paths)
    assert not any("'before'" in path for path in paths)


@pytest.mark.parametrize(
    "outer", [lambda inner: hfjax.optimizers.ema(inner, 0.9), hfjax.optimizers.master_weights]
)
def test_master_weights_inside_another_optimizer_are_refused(outer):
    with pytest.raises(
        ValueError, match=r"hfjax.optimizers.master_weights is inside another optimizer.* outermost"
    ):
        stack_layout(DDP, ONE, outer(hfjax.optimizers.master_weights(optax.sgd(1e-3))))


def test_a_dtype_that_needs_no_master_weights_is_refused():
    with pytest.raises(ValueError, match=r"stored=float32: .* narrower than float32"):
        hfjax.optimizers.master_weights(optax.sgd(1e-3), "float32")


# -- checkpoints --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "restored"),
    [(HOST, HOST), (HOST, None), (None, HOST), (share(0.5) | hfjax.HOST_PARAMETERS, HOST)],
)
def test_a_state_is_restored_into_the_memory_that_the_layout_says(tmp_path, saved, restored):
    of = lambda host, devices: small_layout(
        EVERYTHING if host is None else EVERYTHING | host, sizes={"fsdp": devices}
    )
    old, new = of(saved, 2), of(restored, 4)
    state = state_at(old, 3)
    _check_placement(old, state)
    hfjax.save(tmp_path, old, state)
    found = hfjax.restore(tmp_path, new).state
    _check_placement(new, found)
    assert same(state, found)


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_as_if_nothing_had_been(tmp_path):
    layout = stack_layout(
        FSDP | HOST, {"fsdp": 2}, hfjax.optimizers.master_weights(optax.adamw(1e-3))
    )
    step = hfjax.train_step(layout, squared)
    state, _ = step(hfjax.init(layout), rows())
    hfjax.save(tmp_path, layout, state)
    state, _ = step(state, rows())
    again, _ = step(hfjax.restore(tmp_path, layout).state, rows())
    assert same(state, again)
    begun = hfjax.restore(tmp_path, layout, parameters_only=True).state
    _check_placement(layout, begun)


# -- compiled for GPUs --------------------------------------------------------------------

EMBED, LENGTH = 256, 64
LAYER = 12 * EMBED * EMBED * 4  # bytes of one layer's kernels


def compiled(strategy, sizes, layers):
    count = int(np.prod(list(sizes.values())))
    shape = {"layers": layers, "embed": EMBED, "length": LENGTH, "heads": 4}
    layout = gpt_layout(strategy, sizes, devices=h200s(count), **shape)
    batch = {"tokens": jax.ShapeDtypeStruct((count, LENGTH + 1), "int32")}
    options = {"remat": "full", "compiler_options": OPTIMIZED}
    lowered = hfjax.train_step(layout, next_token_loss, **options).lower(batch)
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    return layout.bytes_per_device(), memory


@pytest.mark.cuda
@pytest.mark.parametrize(("strategy", "sizes"), [(DDP, ONE), (FSDP, {"fsdp": 8})])
def test_the_device_needs_moments_of_one_layer_more_however_many_there_are(strategy, sizes):
    of = lambda tree: tree["parameters"] + tree["optimizer_state"]
    more = {}
    for layers in (2, 8):
        _, plain = compiled(strategy, sizes, layers)
        told, host = compiled(strategy | HOST, sizes, layers)
        batch = (LENGTH + 1) * 4
        assert host.host_argument_size_in_bytes == told["host optimizer_state"]
        assert 0 <= host.argument_size_in_bytes - of(told) - batch < 1024  # the step, padding
        assert host.host_temp_size_in_bytes == 0
        more[layers] = host.temp_size_in_bytes - plain.temp_size_in_bytes
    moments = 2 * LAYER // sizes.get("fsdp", 1)
    assert more[2] <= 1.2 * moments
    assert more[8] <= 1.2 * moments


@pytest.mark.cuda
def test_a_state_is_born_on_the_host_one_array_after_another():
    """The device holds some arrays of one parameter, never the state."""
    whole = DDP | HOST | hfjax.HOST_PARAMETERS
    layout = gpt_layout(whole, ONE, devices=h200s(1), embed=EMBED, layers=8, heads=4)
    program = init_program(layout).lower(0).compile(OPTIMIZED)
    memory = program.memory_analysis()
    assert memory is not None
    state = layout.bytes_per_device()
    on_host = state["host parameters"] + state["host optimizer_state"]
    assert memory.host_output_size_in_bytes == on_host
    assert memory.temp_size_in_bytes < 0.5 * memory.host_output_size_in_bytes
