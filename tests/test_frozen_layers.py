"""The first layers stay as they are, bit by bit, whatever stores them, and all else trains."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

import hfjax
from hfjax import DDP, FSDP, HOST_OPTIMIZER, PIPE, ZERO1, Schedule
from hfjax.models.gpt import next_token_loss
from hfjax.utils.paths import flatten
from tests.small_gpt import mlp_layout, tokens
from tests.test_given_params import INTERLEAVED, ONE, ROWS, adam, alone, made, same, squares

FROZEN = {  # name: strategy, mesh, schedule, optimizer, fields of the step
    "FSDP": (FSDP, {"fsdp": 4}, None, adam, {"max_grad_norm": 0.1}),
    "PIPE, interleaved": (PIPE | ZERO1, {"pipe": 2, "data": 2}, INTERLEAVED, adam, {}),
    "PIPE, padded": (
        PIPE,
        {"pipe": 3},
        Schedule("gpipe", 2),
        lambda: hfjax.optimizers.master_weights(adam()),
        {},
    ),
    "HOST_OPTIMIZER": (
        FSDP | HOST_OPTIMIZER,
        {"fsdp": 2},
        None,
        lambda: hfjax.optimizers.ema(hfjax.adamw(1e-2, eps=1e-4), 0.5),
        {},
    ),
}


def begun(state):
    """Return the state with moments that are not zero; copies of parameters are what they are."""

    def more(keys, x):
        copy = any(word in jax.tree_util.keystr(keys) for word in ("master", "average"))
        still = copy or not x.ndim
        return x if still else jax.device_put(np.asarray(x) + np.float32(1e-3), x.sharding)

    moments = jax.tree_util.tree_map_with_path(more, state.optimizer)
    return replace(state, optimizer=moments)


def trained(layout, schedule=None, steps=2, **run):
    step = hfjax.train_step(layout, next_token_loss, schedule=schedule, unroll=1, **run)
    state = begun(hfjax.init(layout, schedule=schedule))
    first = hfjax.full_array(hfjax.to_model_order(layout, state))
    for _ in range(steps):
        state, _ = step(state, tokens(rows=8))
    return first, hfjax.full_array(hfjax.to_model_order(layout, state))


@pytest.mark.parametrize("name", FROZEN)
@pytest.mark.short("FSDP")
def test_the_first_layers_stay_bit_by_bit_and_all_else_trains_as_on_one_device(name):
    strategy, sizes, schedule, optimizer, run = FROZEN[name]
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    found = []
    for given in ((strategy, sizes, optimizer(), devices), (DDP, {"data": 1}, optimizer(), ONE)):
        layout = mlp_layout(*given, layers=4).freeze("positions").freeze("layers/*", first=2)
        before, after = trained(layout, schedule if given[3] is devices else None, **run)
        for path, x in flatten(after.params).items():
            if path.startswith("layers/"):
                np.testing.assert_array_equal(x[:2], flatten(before.params)[path][:2])
                assert (x[2:] != flatten(before.params)[path][2:]).any()
        in_layers = lambda x: x.ndim and x.shape[0] == 4
        states = map(jax.tree.leaves, (before.optimizer, after.optimizer))
        for old, new in zip(*states, strict=True):
            if in_layers(new):  # moments, master weights, averages
                np.testing.assert_array_equal(new[:2], old[:2])
        found.append(flatten(after.params))
    for path, x in found[1].items():
        limit = 1e-5 if x.dtype == np.float32 else 5e-2
        apart = found[0][path].astype(np.float32) - x.astype(np.float32)
        assert np.abs(apart).max() < limit, path


@pytest.mark.slow
def test_layers_of_a_list_freeze_where_there_is_no_pipeline():
    found = []
    for layout, run in ((made("a list"), {"optimizer_in_backward": True}), (alone("a list"), {})):
        one, two = layout.freeze("layers/0/*"), layout.freeze("layers/*", first=1)
        assert list(one.gradient_bytes) == list(two.gradient_bytes)
        assert "layers/0/kernel" not in two.gradient_bytes
        assert "layers/1/kernel" in two.gradient_bytes
        step, state = hfjax.train_step(two, squares, **run), hfjax.init(two, seed=3)
        before = hfjax.full_array(state.params)
        for _ in range(2):
            state, _ = step(state, ROWS)
        found.append(hfjax.full_array(state.params))
        same(found[-1]["layers"]["0"], before["layers"]["0"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *found)


def test_layers_that_stay_are_noted_and_what_cannot_be_is_refused():
    layout = made("FSDP")
    assert "mlp/up/kernel: its first 2 layers stay" in str(layout.freeze("layers/*", first=2))
    wrong: tuple[Any, ...] = (0, 4, True, "2")
    for first in wrong:
        with pytest.raises(ValueError, match="a number of layers from 1 to 3 is expected"):
            layout.freeze("layers/*", first=first)
    with pytest.raises(ValueError, match=r"norm/bias is in no layer\. Freeze the first layers by"):
        layout.freeze("*", first=2)
    frozen = layout.freeze("layers/*", first=2)
    with pytest.raises(ValueError, match=r"freeze\(…, first=…\), .* with optimizer_in_backward"):
        hfjax.train_step(frozen, next_token_loss, optimizer_in_backward=True)
    pipe = mlp_layout(PIPE, {"pipe": 2}, devices=jax.devices()[:2]).freeze("layers/*", first=1)
    told = r"freeze\(\"layers/.*, first=1\) with schedule pipedream"
    with pytest.raises(ValueError, match=told):
        hfjax.train_step(pipe, next_token_loss, schedule=Schedule("pipedream", 4))
    listing = alone("a list").freeze("layers/0/*")
    with pytest.raises(ValueError, match="layers/0/bias is in a list of layers"):
        hfjax.train_step(listing, squares, schedule=Schedule("gpipe", 2))
