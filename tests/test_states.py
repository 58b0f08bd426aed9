"""A state of another layout, or one that a step has taken, is refused wherever a state is given."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import optax
import pytest

import hfjax
from hfjax import DDP, PIPE
from hfjax.models.gpt import next_token_loss
from tests.small_gpt import gpt, mlp_layout, tokens
from tests.small_stack import rows, squared, stack_layout

SGD = optax.sgd(0.1, momentum=0.9)
LAYOUT = mlp_layout(DDP, {"data": 2}, SGD, devices=jax.devices()[:2])
BATCH = tokens(rows=2)


@cache
def step_of(kind, *given):
    return getattr(hfjax, f"{kind}_step")(LAYOUT, *given)


def taken_by(tmp_path):
    """Return every function that takes a state, by name."""
    return {
        "train_step": lambda state: step_of("train", next_token_loss)(state, BATCH),
        "eval_step": lambda state: step_of("eval", next_token_loss)(state, BATCH),
        "predict_step": lambda state: step_of("predict")(state, BATCH),
        "generate": lambda state: hfjax.generate(LAYOUT, state, [1, 2], 2, length=8),
        "module": partial(hfjax.to_model, LAYOUT),
        "canonical": partial(hfjax.to_model_order, LAYOUT),
        "save": partial(hfjax.save, tmp_path, LAYOUT),
    }


def state_of(**changes):
    model = changes.pop("model", None)
    options = {"model": model} if model else {}
    return hfjax.init(
        mlp_layout(DDP, {"data": 2}, SGD, devices=jax.devices()[:2], **options, **changes)
    )


def cast(state):
    narrow = lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x
    return dataclasses.replace(state, params=jax.tree.map(narrow, state.params))


OTHERS = {
    r"params\S+ is float32\[3,\S+, the layout has float32\[2,": partial(state_of, layers=3),
    r"params\S+ is float32\[1,\S+, the layout has float32\[2,": partial(state_of, layers=1),
    r"params\S+ is float32\[\S*48\S*, the layout has float32\[\S*32": partial(state_of, embed=48),
    r"params\S+ is float32\S+ the layout has nothing": partial(state_of, model=gpt),
    r"params\S+ is bfloat16\[\S+, the layout has float32": lambda: cast(state_of()),
}


@pytest.mark.parametrize("message", OTHERS)
def test_a_state_of_another_model_is_refused_by_all_that_take_one(message, tmp_path):
    state = OTHERS[message]()
    for name, take in taken_by(tmp_path).items():
        with pytest.raises(ValueError, match=f"(?s)not of this layout: {message}.*hfjax.init"):
            pytest.fail(f"{name}: {take(state)}")


def test_a_state_that_a_step_has_taken_is_refused_by_all_that_take_one(tmp_path):
    first = hfjax.init(LAYOUT)
    hfjax.generate(LAYOUT, first, [1, 2], 2, length=8)  # compiled: what comes next does not trace
    state, _ = step_of("train", next_token_loss)(first, BATCH)
    for name, take in (taken_by(tmp_path) | {"full": hfjax.full_array}).items():
        with pytest.raises(ValueError, match=r"took its memory \(donation\)"):
            pytest.fail(f"{name}: {take(first)}")
    with pytest.raises(ValueError, match=r"a hfjax.State is expected, found tuple.*hfjax.init"):
        step_of("train", next_token_loss).check((state, {}))
    half = dataclasses.replace(state, params=first.params)
    for name in ("generate", "module", "save"):
        with pytest.raises(ValueError, match=r"took its memory \(donation\)"):
            pytest.fail(f"{name}: {taken_by(tmp_path)[name](half)}")


@pytest.mark.parametrize("stored_for", [None, hfjax.Schedule("interleaved", 2, chunks=2)])
def test_a_deeper_state_of_a_pipeline_is_not_taken_for_one_of_another_schedule(stored_for):
    layout, deeper = (stack_layout(PIPE, {"pipe": 2}, SGD, layers=n) for n in (4, 8))
    state, schedule = hfjax.init(deeper, schedule=stored_for), hfjax.Schedule("1f1b", 2)
    step = hfjax.train_step(layout, squared, schedule=schedule)
    evaluate = hfjax.eval_step(layout, squared, schedule=schedule)
    for take in (step, evaluate, lambda state, _: hfjax.to_model_order(layout, state)):
        with pytest.raises(ValueError, match=r"is float32\[8,8\S*, the layout has float32\[4,8"):
            take(state, rows())


def test_an_optimizer_of_another_kind_is_named_where_layers_are_rearranged():
    layout = stack_layout(PIPE, {"pipe": 2}, SGD, layers=4)
    other = stack_layout(PIPE, {"pipe": 2}, optax.adam(0.1), layers=4)
    state = hfjax.init(other, schedule=hfjax.Schedule("interleaved", 2, chunks=2))
    with pytest.raises(ValueError, match=r"not of this layout: optimizer\S+ is .*nothing"):
        hfjax.to_model_order(layout, state)


def test_a_state_is_looked_at_once_for_each_form(monkeypatch):
    from hfjax.sharding import check_state

    looked, compare = [], check_state.find_mismatches
    monkeypatch.setattr(
        check_state, "find_mismatches", lambda *of: looked.append(of) or compare(*of)
    )
    layout = mlp_layout(DDP, {"data": 2}, SGD, devices=jax.devices()[:2])
    step = hfjax.train_step(layout, next_token_loss)
    state = hfjax.init(layout)
    for _ in range(3):
        state, _ = step(state, BATCH)
    assert len(looked) == 1
