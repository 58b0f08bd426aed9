"""The equality kit sees what it says: losses, metrics, gradients, parameters, variables."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import hfjax
from hfjax.models.gpt import next_token_loss
from hfjax.models.layers import Dropout
from hfjax.models.moe import MoEConfig, MoELlama
from hfjax.testing import Case, assert_strategies_agree, default_cases, strategies
from tests.small_gpt import gpt, mlps, tokens

RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(16, 4)).astype(np.float32),
    "mask": (RNG.random(16) < 0.4).astype(np.float32),
}
DDP: dict[str, Any] = {"DDP": (hfjax.DDP, {"data": 4})}


class Counts(nnx.Module):
    """A linear map that keeps something of the rows that it has seen."""

    def __init__(self, rngs, keep):
        self.map, self.keep = nnx.Linear(4, 3, rngs=rngs), keep
        self.seen = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, batch):
        self.seen[...] = self.keep(self.seen[...], batch["x"])
        return self.map(batch["x"])


KEPT = {
    "a running sum": lambda seen, x: seen + (x**2).sum(),
    "a running maximum": lambda seen, x: jnp.maximum(seen, x.max()),
    "a count of rows": lambda seen, x: seen + x.shape[0],
}


def squares(outputs, batch):
    return (outputs**2).mean()


def on_own_rows(keep):
    """Return what a variable keeps, of a device's own rows: it depends on the mesh."""
    return lambda seen, x: hfjax.per_device(keep)(seen, x)


@pytest.mark.short("a running maximum", "a count of rows")
@pytest.mark.parametrize("kept", KEPT)
def test_a_variable_that_is_another_on_a_mesh_is_seen_and_named_with_both_values(kept):
    model = lambda rngs: Counts(rngs, on_own_rows(KEPT[kept]))
    told = (
        r"(?s)DDP .* variable seen after step \d by .* \(\S+ for.*meet in it here:\n.*"
        r"test_equality_kit.py"
    )
    with pytest.raises(AssertionError, match=told):
        assert_strategies_agree(model, squares, BATCH, DDP, steps=2)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.short("a running maximum")
def test_what_a_variable_keeps_of_all_rows_is_what_one_device_keeps(kept):
    model = lambda rngs: Counts(rngs, KEPT[kept])
    assert_strategies_agree(model, squares, BATCH, DDP, steps=2)
    assert_strategies_agree(model, squares, BATCH, DDP, steps=2, gradient_accumulation_steps=2)


class Forgets(nnx.Module):
    """Counts rows, in whole numbers, and holds a sum of its rows in every other step only."""

    def __init__(self, rngs, off):
        self.map, self.off = nnx.Linear(4, 3, rngs=rngs), off
        self.count = nnx.BatchStat(jnp.int32(1_000_000))
        self.seen, self.even = nnx.BatchStat(jnp.zeros(())), nnx.BatchStat(jnp.int32(0))

    def __call__(self, batch):
        rows, total = hfjax.per_device(lambda x: (jnp.int32(len(x)), (x**2).sum()))(batch["x"])
        self.count[...] += rows == 16 if self.off == "count" else 1
        self.seen[...] = total * (self.even[...] == 0) * (self.off == "seen")
        self.even[...] = 1 - self.even[...]
        return self.map(batch["x"])


@pytest.mark.parametrize("off", ["count", "seen"])
def test_whole_numbers_are_compared_exactly_and_variables_after_each_step(off):
    model = lambda rngs: Forgets(rngs, off)
    with pytest.raises(AssertionError, match=rf"variable {off} after step \d by"):
        assert_strategies_agree(model, squares, BATCH, DDP, steps=2)


def largest(most):
    """Return a loss with a metric that is no mean."""

    def loss(outputs, batch):
        mean = squares(outputs, batch)
        return hfjax.Mean(mean * len(outputs), len(outputs) * 1.0, {"largest": most(outputs)})

    return loss


@pytest.mark.slow
def test_a_metric_of_own_rows_is_seen_and_one_of_all_rows_agrees():
    model = lambda rngs: Counts(rngs, lambda seen, x: seen)
    assert_strategies_agree(model, largest(jnp.max), BATCH, DDP, steps=1)
    with pytest.raises(AssertionError, match=r"metric largest of step 0 by .*hfjax.per_device"):
        assert_strategies_agree(model, largest(hfjax.per_device(jnp.max)), BATCH, DDP, steps=1)


class Noisy(nnx.Module):
    """BatchNorm, masks with a key for each row, and masks of flax."""

    def __init__(self, rngs):
        self.map, self.norm = nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.drop, self.other = Dropout(0.3, rngs=rngs), nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, batch):
        return self.other(self.drop(self.norm(self.map(batch["x"]))))


class OfLinen(linen.Module):
    @linen.compact
    def __call__(self, batch):
        return linen.Dense(3)(batch["x"])


def linen_model(rngs):
    return nnx.bridge.ToNNX(OfLinen(), rngs=rngs).lazy_init(BATCH)


def tree(rngs):
    return {"w": jax.random.normal(rngs.params(), (4, 3))}


MODELS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "variables and keys": (Noisy, {}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.01}),
    "linen": (linen_model, {}, {}),
    "a tree": (tree, {"forward": lambda tree, batch: batch["x"] @ tree["w"]}, {}),
    "forward asks for keys": (
        tree,
        {
            "forward": lambda tree, batch, key: (
                batch["x"] @ tree["w"] + jax.random.normal(key, (1, 3))
            )
        },
        {},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_one_device_is_compared_with_plain_jax_whatever_the_model_is(name):
    model, options, execution = MODELS[name]
    case = Case(model, squares, BATCH, optax.adam(1e-2), 3, options, execution)
    assert (plain := case.run_plain()) is not None
    assert plain.gradients.keys() == plain.parameters.keys()
    agree = assert_strategies_agree(
        model, squares, BATCH, {"again": (hfjax.DDP, {"data": 1})}, **options, **execution
    )
    assert agree["again"] < 1e-5


def test_one_device_that_differs_from_plain_jax_is_told(monkeypatch):
    right = Case.run_plain
    off = lambda run: run._replace(variables={p: x + 1 for p, x in run.variables.items()})
    monkeypatch.setattr(Case, "run_plain", lambda case: off(right(case)))
    with pytest.raises(AssertionError, match=r"one device differs from plain JAX: variable"):
        assert_strategies_agree(Noisy, squares, BATCH, DDP, steps=1)


@pytest.mark.slow
def test_by_default_a_gpt_has_a_pipeline_shared_rows_and_a_grid_too():
    batch = tokens(rows=16)
    found = assert_strategies_agree(
        gpt(layers=2), next_token_loss, batch, steps=1, gradient_accumulation_steps=2
    )
    assert {"PIPE", "CONTEXT", "GRID", "HSDP+TENSOR+SEQUENCE"} <= found.keys()


def test_the_default_cases_on_eight_devices_are_those_of_the_page():
    """docs/any_model.md has a table of them; README.md rests on it."""
    found = strategies(8, of_parts=["PIPE", "CONTEXT", "EXPERT", "GRID"])
    four, eight = {"data": 2, "fsdp": 4}, {"data": 2, "fsdp": 2, "tensor": 2}
    assert {name: sizes for name, (_, sizes, *_) in found.items()} == {
        "DDP": {"data": 8},
        "ZERO1": {"data": 8},
        "ZERO2": {"data": 8},
        "FSDP": {"fsdp": 8},
        "HSDP": four,
        "ZERO2 on two axes": four,
        "TENSOR": {"data": 4, "tensor": 2},
        "TENSOR+SEQUENCE": {"data": 2, "tensor": 4},
        "FSDP+TENSOR": {"fsdp": 4, "tensor": 2},
        "ZERO1+TENSOR+SEQUENCE": {"data": 4, "tensor": 2},
        "HSDP+TENSOR+SEQUENCE": eight,
        "ZERO2+TENSOR": eight,
        "PIPE": {"pipe": 2, "data": 4},
        "CONTEXT": {"context": 2, "data": 4},
        "EXPERT": {"expert": 2, "data": 4},
        "GRID": {"row": 2, "tensor": 2, "data": 2},
    }
    page = (Path(__file__).parents[1] / "docs/any_model.md").read_text(encoding="utf-8")
    table = page[page.index("By default these are compared") : page.index("## What to write for")]
    for name in found:
        words = (
            "`ZERO2` on two axes" if "two" in name else f"`{name.replace('+', f' {chr(92)}| ')}`"
        )
        assert words in table, name


def test_what_a_model_cannot_have_is_left_out_by_default_and_told_with_its_reason(caplog):
    has_parts = {"PIPE", "CONTEXT", "GRID"}
    assert has_parts <= default_cases(gpt(layers=2)).keys()
    assert "left out: EXPERT (no dimension named experts divides by 2)" in caplog.text
    assert not has_parts & default_cases(lambda rngs: nnx.Linear(4, 4, rngs=rngs)).keys()
    assert "PIPE (the model is not in three parts); CONTEXT (no dim" in caplog.text
    experts = lambda rngs: MoELlama(MoEConfig.tiny(), rngs=rngs)
    assert {"EXPERT", "PIPE"} <= default_cases(experts).keys()


def test_a_default_case_that_a_check_refuses_is_left_out_and_one_that_fails_fails(
    monkeypatch, caplog
):
    """Four rows for two microbatches of four devices; a loss that knows one size."""
    known = strategies(8, of_parts=["PIPE"])
    cases = {"DDP": (hfjax.DDP, {"data": 2}), "PIPE": known["PIPE"]}
    monkeypatch.setattr("hfjax.testing.default_cases", lambda *_: cases)
    batch = tokens(rows=4)
    found = assert_strategies_agree(mlps(), next_token_loss, batch, steps=1)
    assert found.keys() == {"DDP"}
    told = r"PIPE on pipe=2 x data=4: left out: batch of 4 examples does not divide by .*8 examples"
    assert re.search(told, caplog.text)

    @hfjax.per_device
    def check(outputs):
        if outputs.shape[0] != 4:
            raise ValueError("four rows are expected")
        return outputs

    def of_four(outputs, batch):
        return next_token_loss(check(outputs), batch)

    with pytest.raises(ValueError, match="four rows are expected"):
        assert_strategies_agree(mlps(), of_four, batch, steps=1)
