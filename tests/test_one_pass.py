"""hfjax.adamw is optax.adamw; a step that recognises it updates each shard in one pass."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax.base.paths import flatten
from hfjax.models.gpt import next_token_loss
from hfjax.optimizers.fused_adamw import recognised
from hfjax.pallas_kernels import adamw as adamw_shard, choice
from hfjax.pallas_kernels.choice import cannot_run
from hfjax.parallel.strategy import DDP, FSDP, HOST_OPTIMIZER, PIPE, TENSOR, ZERO1, ZERO2
from hfjax.run.config import Optimizer, Train
from hfjax.run.optimizer import optimizer_of
from hfjax.update import one_pass
from tests.h200 import OPTIMIZED, h200s
from tests.kernels import interpreted
from tests.small_gpt import mlp_layout, tokens

__all__ = ["interpreted"]

RATE = optax.linear_schedule(1e-2, 1e-3, 4)
HOW: dict[str, Any] = {"eps": 1e-4, "weight_decay": 0.1, "mask": hfjax.matching("*/kernel")}
ADAMW = hfjax.adamw(RATE, **HOW)
ONE_PASS: dict[str, Any] = {"kernels": "reference"}
NAMES = {"up/kernel": ("embed", "mlp"), "down/kernel": ("mlp", "embed"), "up/bias": ("mlp",)}
CASES: dict[str, Any] = {
    "one device": (DDP, {"data": 1}, {}),
    "DDP": (DDP, {"data": 8}, {}),
    "ZERO1": (ZERO1, {"data": 8}, {"accumulate": 2}),
    "ZERO2+TENSOR": (ZERO2 | TENSOR, {"data": 4, "tensor": 2}, {}),
    "FSDP": (FSDP, {"data": 2, "fsdp": 4}, {"reduction": "hierarchical"}),
    "FSDP+TENSOR": (FSDP | TENSOR, {"data": 2, "fsdp": 2, "tensor": 2}, {"accumulate": 2}),
}


class MLP(nnx.Module):
    def __init__(self, *, rngs, **how):
        self.up, self.down = (
            nnx.Linear(8, 32, rngs=rngs, **how),
            nnx.Linear(32, 8, rngs=rngs, **how),
        )

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


def squares(outputs, batch):
    return jnp.mean((outputs - batch["y"]) ** 2)


def batch(**changed):
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(16, 8)).astype(np.float32) for name in "xy"} | changed


def layout_of(optimizer: Any = ADAMW, strategy=DDP, mesh=None, devices=None):
    sizes = mesh or {"data": 1}
    given = {"forward": lambda model, batch: model(batch["x"]), "axes": NAMES}
    mesh = hfjax.make_mesh(devices=devices or jax.devices()[: math.prod(sizes.values())], **sizes)
    strategy = strategy.edit(replicate_below=0)
    return hfjax.layout(lambda rngs: MLP(rngs=rngs), optimizer, mesh, strategy, **given)


def after(layout, steps=3, **execution):
    """State after some steps, and the step."""
    step = hfjax.train_step(layout, squares, **{"clip": 0.5, **execution})
    state: Any = hfjax.init(layout)
    for _ in range(steps):
        state, metrics = step(state, batch())
        assert metrics["finite"]
    return state, step


def assert_same(found, expected, atol=2e-6):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = zip(*(jax.tree_util.tree_leaves_with_path(x) for x in (found, expected)), strict=True)
    for (path, x), (_, y) in pairs:
        name = jax.tree_util.keystr(path)
        assert x.dtype == y.dtype, name
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim), name
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        np.testing.assert_allclose(x, y, atol=atol, rtol=1e-5, err_msg=name)


# -- the optimizer --------------------------------------------------------------------------


def test_it_has_the_state_and_the_numbers_of_optax():
    mine, theirs = (make(RATE, **HOW) for make in (hfjax.adamw, optax.adamw))
    params = {"a": {"kernel": jnp.ones((3, 2))}, "b": jnp.ones(4)}
    states = [optimizer.init(params) for optimizer in (mine, theirs)]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    moved = [o.update(params, s, params) for o, s in zip((mine, theirs), states, strict=True)]
    for x, y in zip(*map(jax.tree.leaves, moved), strict=True):
        np.testing.assert_array_equal(x, y)


def test_its_checkpoint_is_that_of_optax(tmp_path):
    theirs = layout_of(optax.adamw(RATE, **HOW))
    state, _ = after(theirs, steps=1)
    hfjax.save(tmp_path, theirs, state)
    assert_same(hfjax.restore(tmp_path, layout_of()).state, state, atol=0)


def test_numbers_that_change_from_step_to_step_are_refused():
    with pytest.raises(ValueError, match=r"adamw: b1=Array.*a plain number.*optax.adamw"):
        hfjax.adamw(1e-3, b1=jnp.float32(0.9))  # pyright: ignore[reportArgumentType]


# -- the step -------------------------------------------------------------------------------


DAILY = ("one device", "ZERO1", "FSDP+TENSOR")
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in DAILY]


@pytest.mark.parametrize("name", [*DAILY, *OTHERS])
@pytest.mark.drawn
def test_a_step_in_one_pass_is_the_ordinary_step(name):
    strategy, mesh, execution = CASES[name]
    layout = layout_of(ADAMW, strategy, mesh)
    plain, _ = after(layout, **execution)
    state, step = after(layout, **execution, **ONE_PASS)
    assert step.kernels.forms("adamw_shard") == {"reference"}
    assert_same(state, plain)


@pytest.mark.parametrize(
    "name", ["ZERO1", "FSDP+TENSOR", pytest.param("one device", marks=pytest.mark.slow)]
)
@pytest.mark.drawn
def test_with_master_weights_the_parameters_are_these_rounded(name):
    strategy, mesh, execution = CASES[name]
    layout = layout_of(hfjax.master(ADAMW), strategy, mesh)
    plain, _ = after(layout, **execution)
    state, step = after(layout, **execution, **ONE_PASS)
    assert step.kernels.forms("adamw_shard") == {"reference"}
    assert_same(state.optimizer, plain.optimizer, atol=1e-4)  # a parameter may round otherwise
    master = flatten(state.optimizer.master)
    for path, x in flatten(state.params).items():
        assert x.sharding.is_equivalent_to(flatten(plain.params)[path].sharding, x.ndim)
        assert (x == master[path].astype(jnp.bfloat16)).all()


@pytest.mark.slow
def test_stages_of_a_pipeline_update_their_layers_so():
    layout = mlp_layout(PIPE | ZERO1, {"pipe": 2, "data": 2}, ADAMW, jax.devices()[:4])
    schedule, states = hfjax.Schedule("1f1b", 2), []
    for how in ({}, ONE_PASS):
        step = hfjax.train_step(layout, next_token_loss, schedule=schedule, **how)
        states.append(step(hfjax.init(layout, schedule=schedule), tokens())[0])
    assert_same(states[1], states[0])


@pytest.mark.parametrize("optimizer", [ADAMW, hfjax.master(hfjax.adamw(1e-2))], ids=["", "master"])
def test_frozen_parameters_stay_as_they_are(optimizer):
    layout = layout_of(optimizer, ZERO1, {"data": 2}).freeze("up/*")
    plain, _ = after(layout)
    state, step = after(layout, **ONE_PASS)
    assert "reference" in str(step.kernels)
    assert_same(state, plain, atol=1e-3 if optimizer is not ADAMW else 2e-6)
    assert (state.params["up"]["kernel"] == hfjax.init(layout).params["up"]["kernel"]).all()


@pytest.mark.parametrize("nonfinite", ["skip", "apply"])
def test_a_step_that_is_not_finite_leaves_the_state_to_the_bit_unless_it_is_to_be_applied(
    nonfinite,
):
    layout = layout_of(strategy=FSDP, mesh={"fsdp": 2})
    step = hfjax.train_step(layout, squares, nonfinite=nonfinite, **ONE_PASS)
    state: Any = hfjax.init(layout)
    before = jax.tree.map(np.asarray, (state.params, state.optimizer))
    new, metrics = step(state, batch(y=np.full((16, 8), np.nan, np.float32)))
    assert not metrics["finite"]
    found = jax.tree.leaves((new.params, new.optimizer))
    same = [np.array_equal(x, y) for x, y in zip(found, jax.tree.leaves(before), strict=True)]
    assert all(same) if nonfinite == "skip" else not any(same)


@pytest.mark.parametrize("optimizer", [ADAMW, hfjax.master(ADAMW)], ids=["", "master"])
def test_the_kernel_itself_updates_a_state(interpreted, monkeypatch, optimizer):
    monkeypatch.setattr(choice, "cannot_run", lambda device: None)
    layout = layout_of(optimizer)
    plain, _ = after(layout, steps=2, **ONE_PASS)
    state, step = after(layout, steps=2, kernels="pallas")
    assert step.kernels.forms("adamw_shard") == {"pallas"}
    assert_same(state, plain, atol=1e-4 if optimizer is not ADAMW else 2e-6)


# -- when it is taken -----------------------------------------------------------------------


def test_the_ordinary_program_is_that_of_optax_to_the_letter():
    texts = [
        hfjax.train_step(layout_of(o), squares, clip=1.0).lower(batch()).as_text()
        for o in (hfjax.adamw(RATE, **HOW), optax.adamw(RATE, **HOW))
    ]
    assert texts[0] == texts[1]


SIZES = "N=8; N=256; N=32"
IDLE = "adamw_shard - nothing in this step has use for it"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: layout_of(optax.adamw(1e-3)), IDLE),
        (lambda: layout_of(hfjax.ema(hfjax.adamw(1e-3), 0.9)), IDLE),
        (lambda: layout_of(hfjax.adamw(1e-3, mu_dtype=jnp.bfloat16)), IDLE),
        (lambda: layout_of(strategy=DDP | HOST_OPTIMIZER), IDLE),
        (lambda: layout_of(), f"adamw_shard xla {cannot_run(jax.devices()[0])} {SIZES}"),
    ],
    ids=["optax", "in another", "moments in bfloat16", "on the host", "on CPU"],
)
def test_other_steps_run_the_optimizer_itself(make, told):
    step = hfjax.train_step(make(), squares)
    (line,) = [line for line in str(step.kernels).splitlines() if line.startswith("adamw_shard")]
    assert line.split() == told.split()


def test_the_kernel_asked_for_by_name_for_another_optimizer_is_refused(monkeypatch):
    monkeypatch.setattr(choice, "cannot_run", lambda device: None)
    with pytest.raises(ValueError, match=r"adamw_shard cannot run here: the optimizer is not hfj"):
        hfjax.train_step(layout_of(optax.adamw(1e-3)), squares, kernels={"adamw_shard": "pallas"})


def test_what_neither_form_can_update_goes_by_the_optimizer():
    bf16 = lambda rngs: MLP(rngs=rngs, param_dtype=jnp.bfloat16)
    layout = hfjax.layout(bf16, ADAMW, hfjax.make_mesh(data=8), DDP)
    step = hfjax.train_step(layout, squares, kernels="reference")
    assert step.kernels.forms("adamw_shard") == {"xla"}


def test_one_shard_that_the_kernel_cannot_take_leaves_it_the_others(monkeypatch):
    monkeypatch.setattr(choice, "cannot_run", lambda device: None)
    entry = {"shape": {"N": 256}, "ratio": 2.0, "rival": "optax", "jax": "0"}
    monkeypatch.setattr(choice, "_table", lambda: {"cpu": {"adamw_shard": [entry]}})
    monkeypatch.setattr(adamw_shard, "MOST", 32)
    monkeypatch.setitem(one_pass.FORMS, "pallas", adamw_shard.reference)  # no GPU is here
    layout = layout_of()
    plain, _ = after(layout, kernels="xla")
    state, step = after(layout, kernels="auto")
    forms = {one.of: one.form for one in step.kernels.choices["adamw_shard"]}
    assert forms == {"N=8": "pallas", "N=256": "xla", "N=32": "pallas"}
    assert "from 1 to 32 elements are updated at once" in str(step.kernels)
    assert_same(state, plain)


def test_what_the_kernel_cannot_take_is_told(monkeypatch):
    monkeypatch.setattr(choice, "cannot_run", lambda device: None)
    bf16 = lambda rngs: MLP(rngs=rngs, param_dtype=jnp.bfloat16)
    layout = hfjax.layout(bf16, ADAMW, hfjax.make_mesh(data=8), DDP)
    with pytest.raises(ValueError, match=r"down/bias: parameter is bfloat16\[8\]"):
        hfjax.train_step(layout, squares, kernels="pallas")


def test_hfjax_train_makes_it():
    config = Train(optimizer=Optimizer(weight_decay=0.2, no_decay=("*/bias",)))
    fields: Any = recognised(optimizer_of(config, hfjax.rate(1e-3, steps=10)))
    assert fields.weight_decay == 0.2
    decays = fields.decays({"up/kernel": jnp.ones(2), "up/bias": jnp.ones(2)})
    assert decays == {"up/kernel": True, "up/bias": False}


@pytest.mark.cuda
@pytest.mark.parametrize("strategy", [DDP, ZERO1], ids=["DDP", "ZERO1"])
def test_on_h200s_no_part_of_the_state_is_copied(strategy):
    layout = layout_of(hfjax.master(ADAMW), strategy, {"data": 2}, h200s(2))
    step = hfjax.train_step(layout, squares, clip=1.0, kernels={"adamw_shard": "pallas"})
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch())
    compiled: Any = step.lower(given).compile(compiler_options=OPTIMIZED)
    text = compiled.as_text()
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 2  # biases are too small for one
    assert not re.findall(r"= \w+\[\d[\d,]*\]\S* copy(?:-start)?\(", text)  # counts may be
    memory = compiled.memory_analysis()
    batch_bytes = 2 * 16 * 8 * 4 // 2
    assert memory.alias_size_in_bytes >= memory.argument_size_in_bytes - batch_bytes - 64
