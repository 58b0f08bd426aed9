"""Experts on several devices: as on one device, routing bit for bit, and the bytes of formulas."""

import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import hfjax
from hfjax import (
    CONTEXT,
    DDP,
    EXPERT,
    FSDP,
    HOST_OPTIMIZER,
    HOST_PARAMETERS,
    PIPE,
    SEQUENCE,
    TENSOR,
    ZERO1,
    ZERO2,
    Schedule,
)
from hfjax.models.moe import (
    MoE,
    MoEConfig,
    MoELlama,
    RoutedOutputs,
    Router,
    next_token_loss,
    uses_router_metrics,
    with_routing,
)
from hfjax.models.moe.router import RouterNoise, choose_experts
from hfjax.testing import assert_strategies_agree
from tests.test_context_parallel import apart, doubled

LENGTH = 16
RNG = np.random.default_rng(0)
TOKENS = {"tokens": RNG.integers(0, 64, (16, LENGTH + 1), np.int32)}
DOCUMENTS = TOKENS | {"documents": np.sort(RNG.integers(0, 4, (16, LENGTH + 1), np.int32), 1)}
SHAPE: Any = {"vocab": 64, "length": LENGTH, "layers": 2, "heads": 4, "kv_heads": 2, "embed": 32}
CONFIG = MoEConfig(
    **SHAPE, mlp=16, min_capacity=1, router=Router(balance_loss=0.1, z_loss=1e-3, bias_rate=0.01)
)
V3 = replace(Router.preset("deepseek-v3"), groups=4, best_groups=2, bias_rate=0.05)
MODELS = {
    "mixtral": CONFIG,
    "small groups": replace(CONFIG, group=4),
    "deepseek": replace(CONFIG, experts=16, top_k=3, shared=1, group=4, router=V3),
    "drawn": replace(
        CONFIG,
        router=Router(normalise="kept", noise="rsample", sample_second=True, priority="random"),
    ),
    "jitter, PR-MoE": replace(
        CONFIG, residual=True, router=Router(noise="jitter", priority="choice")
    ),
    "over the batch": replace(CONFIG, router="mixtral"),
    "dropless": replace(CONFIG, capacity=None),
    "unlike layers": replace(CONFIG, experts=(0, 8)),
}


MOMENTUM = optax.sgd(0.1, momentum=0.9)


def trained(name, strategy, sizes, batch, steps=2, **execution):
    """Return what a run told, its parameters and variables, and its step."""
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = hfjax.make_mesh(devices=devices, **sizes)
    model = lambda rngs: doubled(MoELlama(MODELS[name], rngs=rngs))
    layout = hfjax.layout(model, MOMENTUM, mesh, strategy.edit(replicate_below=0))
    step = hfjax.train_step(layout, next_token_loss, **execution)
    state, told, routing = hfjax.init(layout, 0, execution.get("schedule")), [], []
    for _ in range(steps):
        state, metrics = step(state, batch)
        told += [metrics[what] for what in ("loss", "grad_norm", "router_entropy")]
        routing += [metrics[what] for what in ("expert_load", "dropped")]
    state = hfjax.to_model_order(layout, state)
    biases = {path: x for path, x in flat(state.variables).items() if "bias" in path}
    kept = jax.device_get((told, routing, biases))
    return (*kept, hfjax.full_array(state.params)), step


def flat(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(keys): x for keys, x in leaves}


BIAS = "['layers']['mlp']['router_bias']"
SAME = ("max_grad_norm",)  # what changes the numbers of one device as well


@pytest.fixture(scope="module")
def alone():
    """Return (model, batch, execution) -> what one device has, made once."""
    known = {}

    def of(name, batch, execution):
        same = {key: execution[key] for key in SAME if key in execution}
        key = (name, "documents" in batch, str(same))
        if key not in known:
            known[key] = trained(name, DDP, {"data": 1}, batch, **same)[0]
        return known[key]

    return of


GATHER = {"dispatch": "gather"}
ACCUMULATE = {"gradient_accumulation_steps": 2}
CASES = {
    "E 8": ("mixtral", TOKENS, DDP | EXPERT, {"expert": 8}, {}),
    "E 4": ("mixtral", TOKENS, DDP | EXPERT, {"expert": 4}, {"dispatch": "all_to_all"}),
    "E 2, tokens travel": ("mixtral", TOKENS, DDP | EXPERT, {"expert": 2}, GATHER),
    "E+D": ("deepseek", TOKENS, DDP | EXPERT, {"expert": 4, "data": 2}, {"max_grad_norm": 0.1}),
    "E+Z1": ("mixtral", TOKENS, ZERO1 | EXPERT, {"expert": 4, "data": 2}, {}),
    "E+Z2": ("drawn", TOKENS, ZERO2 | EXPERT, {"expert": 2, "data": 4}, ACCUMULATE),
    "E+Z3": ("deepseek", TOKENS, FSDP | EXPERT, {"expert": 4, "fsdp": 2}, GATHER),
    "E+Z3+D, by axis": (
        "mixtral", TOKENS, FSDP | EXPERT, {"expert": 2, "fsdp": 2, "data": 2},
        {"gradient_reduction": "hierarchical"},
    ),
    "E+D+M": (
        "mixtral", TOKENS, DDP | EXPERT | TENSOR, {"expert": 2, "data": 2, "tensor": 2}, {},
    ),
    "E+M with sequences": (
        "small groups", TOKENS, DDP | EXPERT | TENSOR | SEQUENCE, {"expert": 4, "tensor": 2},
        {"remat": "full"},
    ),
    "E+D+Z+offload": (
        "mixtral", TOKENS, ZERO2 | EXPERT | HOST_OPTIMIZER, {"expert": 4, "data": 2}, {},
    ),
    "E, parameters on the host": (
        "mixtral", TOKENS, FSDP | EXPERT | HOST_PARAMETERS, {"expert": 2, "fsdp": 2}, {},
    ),
    "in the backward pass": (
        "deepseek", TOKENS, FSDP | EXPERT, {"expert": 4, "fsdp": 2},
        {"optimizer_in_backward": True},
    ),
    "context": (
        "deepseek", TOKENS, FSDP | EXPERT | CONTEXT, {"expert": 2, "context": 2, "fsdp": 2},
        {"context": "ring"},
    ),
    "context, documents, Ulysses": (
        "small groups", DOCUMENTS, DDP | EXPERT | CONTEXT, {"expert": 4, "context": 2},
        {"context": "ulysses", **GATHER},
    ),
    "1F1B": (
        "deepseek", TOKENS, DDP | EXPERT | PIPE, {"expert": 2, "pipe": 2, "data": 2},
        {"schedule": Schedule("1f1b", 2)},
    ),
    "split backward passes": (
        "drawn", TOKENS, FSDP | EXPERT | PIPE, {"expert": 2, "pipe": 2, "fsdp": 2},
        {"schedule": Schedule("zb", 2), **GATHER},
    ),
    "a schedule with branches": (
        "mixtral", TOKENS, DDP | EXPERT | PIPE, {"expert": 2, "pipe": 2},
        {"schedule": Schedule("zb-h1", 4)},
    ),
    "unlike layers": ("unlike layers", TOKENS, FSDP | EXPERT, {"expert": 4, "fsdp": 2}, {}),
    "unlike stages": (
        "unlike layers", TOKENS, DDP | PIPE, {"data": 2, "pipe": 2},
        {"schedule": Schedule("1f1b", 4)},
    ),
    "dropless": ("dropless", TOKENS, FSDP | EXPERT, {"expert": 2, "fsdp": 2}, {}),
    "dropless, tensor": (
        "dropless", TOKENS, DDP | EXPERT | TENSOR, {"expert": 4, "tensor": 2}, {},
    ),
    "dropless, 1F1B, recomputed": (
        "dropless", TOKENS, DDP | EXPERT | PIPE, {"expert": 2, "pipe": 2},
        {"schedule": Schedule("1f1b", 4), "remat": "full"},
    ),
    "over the batch": ("over the batch", TOKENS, FSDP | EXPERT, {"expert": 4, "data": 2}, {}),
    "PR-MoE": ("jitter, PR-MoE", TOKENS, ZERO1 | EXPERT, {"expert": 2, "data": 4}, {}),
    "no axis": ("drawn", DOCUMENTS, FSDP | TENSOR, {"fsdp": 4, "tensor": 2}, ACCUMULATE),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.short("1F1B")
def test_training_equals_one_device(alone, case):
    name, batch, strategy, sizes, execution = CASES[case]
    with jax.enable_x64(True):
        wanted = alone(name, batch, execution)
        found, _ = trained(name, strategy, sizes, batch, **execution)
    assert apart(found[1], wanted[1]) < 1e-12  # shares of whole numbers of choices
    assert apart(found, wanted) < 1e-9


@pytest.mark.parametrize(
    ("optimizer", "mixes"), [(optax.adamw(0.1), False), (optax.lamb(0.1), True)]
)
def test_an_optimizer_that_mixes_experts_is_told(optimizer, mixes):
    model = lambda rngs: MoELlama(CONFIG, rngs=rngs)
    layout = hfjax.layout(model, optimizer, hfjax.make_mesh(expert=8), DDP | EXPERT)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        hfjax.train_step(layout, next_token_loss)
    assert ["treats the experts of" in str(w.message) for w in told] == [True] * mixes


def layout_of(config, strategy, optimizer=None, **sizes):
    mesh = hfjax.make_mesh(devices=jax.devices()[: int(np.prod([*sizes.values()]))], **sizes)
    model = lambda rngs: MoELlama(config, rngs=rngs)
    return hfjax.layout(model, optimizer or optax.sgd(0.1), mesh, strategy.edit(replicate_below=0))


@pytest.mark.slow
def test_evaluation_and_prediction_equal_one_device_and_nothing_is_random():
    alone = layout_of(MODELS["drawn"], DDP, data=1)
    split = layout_of(MODELS["drawn"], FSDP | EXPERT, expert=4, fsdp=2)
    state, made = jax.device_get(hfjax.init(alone)), []
    for layout in (alone, split):
        placed = jax.device_put(state, layout.shardings())
        metrics = hfjax.eval_step(layout, next_token_loss)(placed, TOKENS)
        np.testing.assert_allclose(np.asarray(metrics["expert_load"]).sum(1), 1, rtol=1e-6)
        logits = hfjax.predict_step(layout)(placed, TOKENS)
        made.append(jax.device_get((metrics["loss"], metrics["token_loss"], logits)))
    one, other = made
    assert one[0] == one[1]  # routers add nothing to an evaluation
    assert apart(one, other) < 1e-5


class Begun(NamedTuple):
    """A run after its first step, and what that told."""

    layout: Any
    step: Any
    state: Any
    metrics: Any


@pytest.fixture(scope="module")
def begun():
    layout = layout_of(CONFIG, FSDP | EXPERT, MOMENTUM, expert=4, fsdp=2)
    step = hfjax.train_step(layout, next_token_loss)
    return Begun(layout, step, *step(hfjax.init(layout), TOKENS))


ELSEWHERE = {
    "E+Z1": (ZERO1 | EXPERT, {"expert": 2, "data": 2}),
    "one device": (DDP, {"data": 1}),  # so does a bias every day, in test_moe_training
}


@pytest.mark.slow
@pytest.mark.parametrize("where", ["E+Z1", pytest.param("one device", marks=pytest.mark.slow)])
def test_a_state_goes_on_under_another_mesh_of_experts(tmp_path, begun, where):
    strategy, sizes = ELSEWHERE[where]
    other = layout_of(CONFIG, strategy, MOMENTUM, **sizes)
    hfjax.save(tmp_path / "run", begun.layout, begun.state)
    losses = []
    for layout in (begun.layout, other):
        again = hfjax.restore(tmp_path / "run", layout).state
        assert np.array_equal(*(flat(s.variables)[BIAS] for s in (again, begun.state)))
        go_on = hfjax.train_step(layout, next_token_loss) if layout is other else begun.step
        losses.append(float(go_on(again, TOKENS)[1]["loss"]))
    assert max(losses) - min(losses) < 1e-5


def test_metrics_say_how_even_loads_are_and_what_is_dropped(begun):
    load, dropped = (np.asarray(begun.metrics[name]) for name in ("expert_load", "dropped"))
    assert load.shape == (2, 8)
    np.testing.assert_allclose(load.sum(1), 1, rtol=1e-6)
    places = 5 / (LENGTH * CONFIG.top_k)  # ceil(16 * 2 / 8 * 1.25) of a row's 32 choices
    assert (dropped >= load.max(1) - places - 1e-6).all()
    assert "chosen" in str(begun.step.experts)


@pytest.mark.parametrize("strategy", [FSDP, FSDP | TENSOR, hfjax.HSDP], ids=lambda s: s.name)
def test_experts_are_never_gathered_over_their_axis_by_the_row_that_fits_all(strategy):
    sizes = {"expert": 2, "fsdp": 2} | ({"tensor": 2} if "TENSOR" in strategy.name else {})
    layout = layout_of(CONFIG, strategy, **sizes)
    assert all(
        "experts" not in p.axes or not p.sharded_compute for p in layout.param_specs.values()
    )
    with pytest.raises(ValueError, match=r"no parameter stays split over expert .* add hfjax.EXPE"):
        hfjax.train_step(layout, next_token_loss)


def test_what_stays_split_comes_first_on_its_dimension():
    layout = layout_of(CONFIG, FSDP | EXPERT, expert=2, fsdp=2)
    path = "layers/mlp/each/down"
    with pytest.raises(
        ValueError, match=r"what stays split comes before .* Write \('expert', 'fsdp"
    ):
        layout.with_specs({path: P(None, ("fsdp", "expert"))})
    assert layout.with_specs({path: P(None, ("expert", "fsdp"))}).param_specs[
        path
    ].sharded_compute == ("expert",)


class Own(nnx.Module):
    """A model that is called as it is, with one mixture."""

    def __init__(self, rngs, router, group=4):
        self.first = nnx.Linear(8, 16, rngs=rngs)
        how = {"min_capacity": 1, "router": router, "rngs": rngs}
        self.mixture = MoE(16, 8, experts=4, group=group, **how)

    def __call__(self, x):
        y, told = self.mixture(self.first(x))
        return RoutedOutputs(y, told)


@uses_router_metrics
def small(outputs, batch):
    losses = (outputs.outputs**2).mean(-1)
    return with_routing(losses, np.ones(losses.shape, np.float32), outputs)


@pytest.mark.slow
def test_of_rows_that_devices_share_losses_and_draws_are_those_of_whole_rows():
    router = Router(noise="jitter", balance_loss=0.5, balance_over="row")
    model = lambda group: lambda rngs: Own(rngs, router, group)
    batch = np.random.default_rng(0).normal(size=(4, 8, 8)).astype(np.float32)
    case, optimizer = (DDP | CONTEXT, {"context": 2}), optax.sgd(0.1)
    options = {"optimizer": optimizer, "steps": 1}
    assert_strategies_agree(model(2), small, batch, {"context": case}, **options)
    mesh = hfjax.make_mesh(devices=jax.devices()[:2], **case[1])
    step = hfjax.train_step(hfjax.layout(model(None), optimizer, mesh, case[0]), small)
    with pytest.raises(ValueError, match=r"groups of 8 tokens, and 2 that follow each other are"):
        step.trace(batch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*examples meet, and no rule")
def test_experts_in_a_loop_over_rows_are_those_of_one_device():
    batch, losses = np.random.default_rng(0).normal(size=(4, 8, 8)).astype(np.float32), []
    router = Router(balance_loss=0)
    forward = lambda model, x: jax.lax.map(lambda row: model(row[None]).outputs[0], x)
    for sizes in ({"data": 1}, {"data": 2}):
        mesh = hfjax.make_mesh(devices=jax.devices()[: sizes["data"]], **sizes)
        layout = hfjax.layout(
            lambda rngs: Own(rngs, router), optax.sgd(0.1), mesh, DDP, forward=forward
        )
        found = hfjax.predict_step(layout)(hfjax.init(layout), batch)
        losses.append(np.asarray(found))
    np.testing.assert_allclose(*losses, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("router", "message"),
    [
        (Router.preset("mixtral"), r"balances over the batch .* nothing has added that loss"),
        (Router(bias_rate=0.1), r"mixture/router_bias moves once in a step .* no method after_st"),
    ],
)
def test_what_a_router_needs_of_a_model_is_said(router, message):
    mesh = hfjax.make_mesh(expert=4, data=2)
    layout = hfjax.layout(lambda rngs: Own(rngs, router), optax.sgd(0.1), mesh, DDP | EXPERT)
    with pytest.raises(ValueError, match=message):
        hfjax.train_step(layout, small).lower(np.ones((32, 8), np.float32))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"noise": "rsample", "scores": "sigmoid"}, "draw experts by a softmax of the logits"),
        ({"sample_second": True, "bias_rate": 0.1}, "draw experts by a softmax of the logits"),
        ({"scale": float("nan")}, r"Router\(scale=nan\): a finite number"),
        ({"balance_over": "rows"}, "one of group, row, batch"),
    ],
)
def test_a_router_that_cannot_be_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Router(**given)


def test_draws_stay_in_the_groups_of_a_token_and_third_choices_are_not_drawn():
    router = Router(groups=4, best_groups=2, sample_second=True)
    logits = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    noise = np.random.default_rng(1).gumbel(size=(64, 8)).astype(np.float32)
    best = replace(router, sample_second=False)
    # of all three at once: (the best 3, the drawn 3, the best 4) of each token
    chosen = lambda logits, noise: (
        choose_experts(best, 3, logits, None, RouterNoise()).experts,
        choose_experts(router, 3, logits, None, RouterNoise(second=noise)).experts,
        choose_experts(best, 4, logits, None, RouterNoise()).experts,
    )
    plain, drawn, every = jax.device_get(jax.jit(chosen)(logits, noise))
    groups = lambda experts: [sorted(set((np.asarray(row) // 2).tolist())) for row in experts]
    assert all(set(a) <= set(b) for a, b in zip(groups(drawn), groups(every), strict=True))
    assert (drawn[:, 0] == plain[:, 0]).all()
    assert (drawn[:, 1] != plain[:, 1]).any()


def test_kept_weights_are_scaled_after_they_are_normalised():
    x = jax.random.normal(jax.random.key(0), (1, 16, 8))

    def output(x, scale):
        router = Router(normalise="kept", scale=scale)
        return MoE(8, 8, experts=4, router=router, rngs=nnx.Rngs(0))(x)[0]

    made = jax.jit(lambda x: [output(x, scale) for scale in (1.0, 2.5)])(x)
    np.testing.assert_allclose(2.5 * made[0], made[1], rtol=1e-5, atol=1e-9)
