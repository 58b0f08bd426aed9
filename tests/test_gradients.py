"""`step.gradients` and `step.apply` are the step; between the two a user may do anything."""

import math
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import hfjax
from hfjax import DDP, FSDP, HSDP, PIPE, ZERO1, Schedule
from hfjax.models.gpt import next_token_loss
from hfjax.models.moe import next_token_loss as moe_loss
from hfjax.optimizers import master_weights
from hfjax.utils.paths import flatten
from tests.golden import Called, cases, gpt, mlps, of_experts, tokens
from tests.small_gpt import gpt_layout, mlp_layout

HOST = "pinned_host"
SEAMLESS = ("pipedream", "2bw", "in backward", "all on the host")
TRAINED = {name: case for name, case in cases().items() if case.run is None}
SHORT = ("called as it is",)


def layout_of(case):
    mesh = hfjax.make_mesh(devices=jax.devices()[: math.prod(case.sizes.values())], **case.sizes)
    optimizer = case.optimizer or optax.adamw(1e-3)
    strategy = case.strategy.edit(replicate_below=0)
    return hfjax.layout(case.model or gpt(dropout=0.1), optimizer, mesh, strategy)


def numbers_of(state):
    keys = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    leaves = jax.tree.leaves((state.params, state.variables, state.optimizer, state.scale))
    return [np.asarray(hfjax.full_array(x)) for x in leaves if not keys(x)]


def sent(*lowered):
    found = {}
    for c in (c for program in lowered for c in hfjax.collectives(program)):
        what = c.kind, c.axes, str(c.dtype), tuple(c.shape)
        found[what] = found.get(what, 0) + c.count * c.bytes
    return found


def lowered(step, state, batch, extra=None):
    """Return the programs of both halves."""
    shapes = replace(step.layout.abstract_state(), order=None, scale=None)
    specs = step._program.extra_specs(extra)
    first = step._gradients_of(specs, False).lower(shapes, batch, None, np.int32(0), extra)
    gradients, _ = step.gradients(state, batch, extra=extra)
    return first, step._jitted_apply.lower(shapes, gradients)


@pytest.mark.parametrize("name", [name for name in TRAINED if name not in SEAMLESS])
@pytest.mark.short(*SHORT)
def test_both_halves_are_the_step(name):
    """On CPUs to the last bit, but for what is streamed from the host."""
    case = TRAINED[name]
    layout, batch = layout_of(case), case.batch or tokens()
    step = hfjax.train_step(layout, case.loss, **case.execution)
    make = partial(hfjax.init, layout, 0, case.execution.get("schedule"))
    one, other = make(), make()
    for _ in range(3):
        one, wanted = step(one, batch)
        gradients, metrics = step.gradients(other, batch)
        other, found = step.apply(other, gradients)
        assert sorted(found) == sorted(wanted)
        for key in metrics:
            np.testing.assert_array_equal(metrics[key], found[key])
        np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=1e-6)
    exact = name != "optimizer on the host"
    for x, y in zip(numbers_of(one), numbers_of(other), strict=True):
        np.testing.assert_allclose(y, x, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6)


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [(FSDP, {"fsdp": 8}), pytest.param(ZERO1, {"data": 8}, marks=pytest.mark.slow)],
)
def test_halves_send_what_the_step_sends_and_a_changed_tree_only_its_norm(strategy, sizes):
    layout = mlp_layout(strategy, sizes)
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 1.0}
    step, batch = hfjax.train_step(layout, next_token_loss, **options), tokens()
    state = hfjax.init(layout)
    first, second = lowered(step, state, batch)
    compiled = second.compile()
    assert sent(first.compile(), compiled) == sent(step.lower(batch).compile())
    assert not any(kind == "all-reduce" for kind, *_ in sent(compiled))
    gradients, _ = step.gradients(state, batch)
    shapes = replace(layout.abstract_state(), order=None, scale=None)
    changed = gradients.with_tree(gradients.tree())
    more = sent(step._jitted_apply.lower(shapes, changed).compile())
    scalars = {k: n for k, n in more.items() if k not in sent(compiled)}
    # As the norm of the step itself: a scalar of each array, all in one message where XLA combines.
    (((kind, _, _, shape), sent_bytes),) = scalars.items()
    assert (kind, shape, sent_bytes) == ("all-reduce", (), 4 * len(gradients.sums))


def weighted(mask_seed):
    mask = np.random.default_rng(mask_seed).integers(0, 2, (8, 24)).astype(np.float64)
    draw = np.random.default_rng(mask_seed).integers(0, 64, (8, 25)).astype(np.int32)
    return {"tokens": draw, "mask": mask}


@pytest.mark.parametrize(
    ("model", "strategy", "sizes", "loss"),
    [
        (mlps(), FSDP, {"fsdp": 8}, next_token_loss),
        pytest.param(
            gpt(layers=4), PIPE, {"pipe": 2, "data": 2}, next_token_loss, marks=pytest.mark.slow
        ),
        pytest.param(of_experts, FSDP, {"fsdp": 8}, moe_loss, marks=pytest.mark.slow),
    ],
    ids=["FSDP", "PIPE", "experts"],
)
def test_a_sum_of_gradients_is_that_of_both_batches(model, strategy, sizes, loss):
    """Of weighted means, and of routers: as gradient accumulation has it."""
    halves = weighted(1), weighted(2)
    both = {name: np.concatenate([x[name] for x in halves]) for name in halves[0]}
    schedule = {"schedule": Schedule("1f1b", 2)} if strategy is PIPE else {}
    with jax.enable_x64(True):
        layout = gpt_layout(
            strategy,
            sizes,
            optax.adam(0.1),
            jax.devices()[: math.prod(sizes.values())],
            lambda: model,
        )
        twice = {"gradient_accumulation_steps": 2}
        step = hfjax.train_step(layout, loss, max_grad_norm=0.5, **schedule)
        whole = hfjax.train_step(layout, loss, max_grad_norm=0.5, **twice, **schedule)
        make = partial(hfjax.init, layout, 0, schedule.get("schedule"))
        wanted, metrics = whole(make(), both)
        state = make()
        one, two = (step.gradients(state, batch)[0] for batch in halves)
        found, told = step.apply(state, one + two)
        assert sorted(told) == sorted(metrics)
        for name, x in metrics.items():
            np.testing.assert_allclose(told[name], x, rtol=1e-10, err_msg=name)
        for x, y in zip(numbers_of(wanted), numbers_of(found), strict=True):
            np.testing.assert_allclose(y, x, rtol=1e-9, atol=1e-12)


def squares(outputs, batch):
    return jnp.mean(outputs**2)


def test_running_statistics_of_a_sum_are_those_of_both_batches():
    model = lambda rngs: nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
    layout = hfjax.layout(model, optax.sgd(0.0), hfjax.make_mesh(data=8), DDP)
    step, state = hfjax.train_step(layout, squares), hfjax.init(layout)
    x = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
    wanted, _ = step(hfjax.init(layout), x)
    one, two = step.gradients(state, x[:8])[0], step.gradients(state, x[8:])[0]
    found, _ = step.apply(state, one + two)
    np.testing.assert_allclose(found.variables["mean"], wanted.variables["mean"], rtol=1e-5)


def test_a_tree_is_the_gradient_of_the_mean_and_may_be_another():
    layout = gpt_layout(HSDP, {"data": 2, "fsdp": 4}, optax.sgd(0.5), model=mlps)
    layout = layout.freeze("tokens*")
    step, state, batch = hfjax.train_step(layout, next_token_loss), hfjax.init(layout), tokens()
    gradients, metrics = step.gradients(state, batch)
    tree = gradients.tree()
    assert "tokens" not in tree
    assert optax.tree.norm(tree) == pytest.approx(float(metrics["grad_norm"]), rel=1e-5)
    before = hfjax.full_array(state.params)
    after, told = step.apply(state, gradients.with_tree(jax.tree.map(jnp.sign, tree)))
    count = sum(int((np.asarray(x) != 0).sum()) for x in jax.tree.leaves(hfjax.full_array(tree)))
    assert float(told["grad_norm"]) == pytest.approx(math.sqrt(count), rel=1e-5)
    new = flatten(hfjax.full_array(after.params))
    moved = {path: np.abs(new[path] - x).max() for path, x in flatten(before).items()}
    assert moved.pop("tokens") == 0
    for distance in moved.values():
        assert distance == pytest.approx(0.5, rel=1e-5)


def test_a_fold_draws_other_masks_and_zero_those_of_the_step():
    layout = gpt_layout(FSDP, {"fsdp": 8}, model=mlps, dropout=0.5)
    step, state, batch = hfjax.train_step(layout, next_token_loss), hfjax.init(layout), tokens()
    losses = [float(step.gradients(state, batch, fold=n)[1]["loss"]) for n in (0, 1, 1, 2)]
    assert losses[1] == losses[2]
    assert len({*losses}) == 3
    assert float(step(state, batch)[1]["loss"]) == losses[0]


@pytest.mark.slow
def test_in_a_program_of_ones_own_both_are_pure():
    """Master weights follow parameters that were put into the state, as in a call of the step."""
    optimizer = master_weights(optax.sgd(0.1))
    layout = gpt_layout(FSDP, {"fsdp": 8}, optimizer, model=mlps, dropout=0.5)
    step, state, batch = hfjax.train_step(layout, next_token_loss), hfjax.init(layout), tokens()
    state, _ = step(state, batch)
    start = replace(state, params=jax.tree.map(lambda x: 2 * x, state.params))

    def halves(state, fold):
        gradients, metrics = step.gradients(state, batch, fold=fold)
        return step.apply(state, gradients)[0], metrics["loss"]

    found, losses = jax.jit(lambda state: jax.lax.scan(halves, state, jnp.arange(2)))(start)
    assert not any(x.is_deleted() for x in jax.tree.leaves(start.params))
    for fold in range(2):
        gradients, metrics = step.gradients(start, batch, fold=fold)
        assert float(metrics["loss"]) == pytest.approx(float(losses[fold]), rel=1e-6)
        start, _ = step.apply(start, gradients)
    for x, y in zip(numbers_of(start), numbers_of(found), strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-6)


def test_traced_halves_of_a_state_in_another_order_change_nothing():
    schedule = Schedule("v", 4, 2)
    layout = mlp_layout(PIPE, {"pipe": 2}, devices=jax.devices()[:2], layers=4)
    step = hfjax.train_step(layout, next_token_loss, schedule=schedule)
    gradients, _ = step.gradients(hfjax.init(layout, schedule=schedule), tokens())
    state = hfjax.init(layout)
    after, metrics = jax.jit(step.apply)(state, gradients)
    assert not metrics["finite"]
    for x, y in zip(numbers_of(state), numbers_of(after), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_batch_without_weight_adds_nothing_to_another():
    layout = mlp_layout(DDP, {"data": 8}, optax.sgd(0.1))
    step, state = hfjax.train_step(layout, next_token_loss), hfjax.init(layout)
    ones, zeros = (np.full((16, 24), x, np.float32) for x in (1, 0))
    one, wanted = step.gradients(state, tokens(mask=ones))
    none, metrics = step.gradients(state, tokens(mask=zeros))
    assert not metrics["finite"]
    _, found = step.apply(state, one + none)
    assert found["finite"]
    for name in ("loss", "grad_norm", "weight"):
        assert float(found[name]) == pytest.approx(float(wanted[name]), rel=1e-6)


def test_what_is_not_finite_stays_so_whatever_replaces_it():
    layout = mlp_layout(DDP, {"data": 8}, optax.sgd(0.1))
    loss = lambda outputs, batch: next_token_loss(outputs, batch).total * batch["w"].mean()
    step = hfjax.train_step(layout, loss, on_nonfinite="skip")
    state, bad = hfjax.init(layout), tokens(w=np.full(16, np.nan, np.float32))
    before = numbers_of(state)
    gradients, metrics = step.gradients(state, bad)
    assert not metrics["finite"]
    clean = gradients.with_tree(jax.tree.map(jnp.nan_to_num, gradients.tree()))
    state, metrics = step.apply(state, clean)
    assert not metrics["finite"]
    for x, y in zip(before, numbers_of(state), strict=True):
        np.testing.assert_array_equal(x, y)
    with pytest.warns(RuntimeWarning, match="step 1 is not finite.*skipped"):
        step.check(state)


def test_the_state_is_left_by_one_half_and_taken_by_the_other():
    layout = mlp_layout(FSDP, {"fsdp": 8})
    step, state = hfjax.train_step(layout, next_token_loss), hfjax.init(layout)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients, _ = step.gradients(state, tokens())
        after, _ = step.apply(state, gradients)
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))
    with pytest.raises(ValueError, match="given to an earlier step"):
        step.gradients(state, tokens())
    with pytest.raises(ValueError, match=r"gradients were given to an earlier step\.apply"):
        step.apply(after, gradients)


def test_what_has_no_moment_between_its_halves_is_refused_by_name(short_cases):
    for name in short_cases({name: name for name in SEAMLESS}, "2bw", "in backward"):
        case = TRAINED[name]
        layout = layout_of(case)
        step = hfjax.train_step(layout, case.loss, **case.execution)
        word = "optimizer_in_backward" if "back" in name or "host" in name else f"schedule {name}"
        with pytest.raises(ValueError, match=f"{word}: layers are updated during the backward"):
            step.gradients(hfjax.init(layout), tokens())


def test_gradients_of_something_else_are_refused():
    layout = mlp_layout(DDP, {"data": 8})
    step, state = hfjax.train_step(layout, next_token_loss), hfjax.init(layout)
    gradients, _ = step.gradients(state, tokens())
    tree: Any = gradients.tree()
    pair: Any = (gradients, 0)
    other = mlp_layout(DDP, {"data": 8}, layers=4)
    theirs, _ = hfjax.train_step(other, next_token_loss).gradients(hfjax.init(other), tokens())
    told = {
        "hfjax.Gradients are expected, found tuple": lambda: step.apply(state, pair),
        "hfjax.Gradients are expected, found dict": lambda: step.apply(state, tree),
        "step.apply: these gradients store layers in another order": lambda: step.apply(
            state, theirs
        ),
        "with_tree: gradients of other parameters; missing: ": lambda: gradients.with_tree({}),
        "fold=-1; a whole number": lambda: step.gradients(state, tokens(), fold=-1),
        "neither the loss nor forward asks for it": lambda: step.gradients(
            state, tokens(), extra=1.0
        ),
    }
    for message, call in told.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_a_state_in_another_order_is_refused_with_what_to_do():
    schedule = Schedule("v", 4, 2)
    layout = gpt_layout(PIPE, {"pipe": 2}, devices=jax.devices()[:2], layers=4)
    step = hfjax.train_step(layout, next_token_loss, schedule=schedule)
    with pytest.raises(ValueError, match=r"another order than this step.*hfjax.init\(layout, sch"):
        step.gradients(hfjax.init(layout), tokens())


# -- arrays beside the model and the batch ---------------------------------------------------------


def teach(params, x):
    return jnp.tanh(x @ params["up"]["kernel"]) @ params["down"]["kernel"]


class Student(nnx.Module):
    """Two matrices."""

    def __init__(self, rngs):
        linear = partial(nnx.Linear, use_bias=False, param_dtype=float, rngs=rngs)
        self.up, self.down = linear(8, 16), linear(16, 4)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def distilled(outputs, batch, extra):
    return extra["c"] * ((outputs - teach(extra["teacher"], batch)) ** 2).mean()


@pytest.mark.parametrize(
    ("strategy", "sizes"), [(DDP, {"data": 8}), (FSDP, {"fsdp": 8}), (HSDP, {"data": 2, "fsdp": 4})]
)
def test_the_parameters_of_another_network_are_gathered_where_they_are_used(strategy, sizes):
    with jax.enable_x64(True):
        theirs = hfjax.layout(
            Student, optax.sgd(0.0), hfjax.make_mesh(fsdp=8), FSDP.edit(replicate_below=0)
        )
        mesh = hfjax.make_mesh(**sizes)
        layout = hfjax.layout(Student, optax.sgd(0.1), mesh, strategy.edit(replicate_below=0))
        teacher = hfjax.init(theirs, 7).params
        step, state = hfjax.train_step(layout, distilled), hfjax.init(layout)
        x = np.random.default_rng(0).normal(size=(16, 8))
        extra = {"teacher": teacher, "c": 0.5}
        gradients, metrics = step.gradients(state, x, extra=extra)
        known = hfjax.full_array(teacher)
        loss = lambda params: distilled(teach(params, x), x, {"teacher": known, "c": 0.5})
        value, wanted = jax.value_and_grad(loss)(hfjax.full_array(state.params))
        assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-12)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-14),
            hfjax.full_array(gradients.tree()),
            wanted,
        )
        first, _ = lowered(step, state, x, extra)
        gathered = [n for (kind, *_), n in sent(first).items() if kind == "all-gather"]
        networks = 1 if strategy is DDP else 2
        assert sum(gathered) == networks * (8 * 16 + 16 * 4) * 8  # bytes of both matrices


@pytest.mark.slow
def test_extra_that_lies_in_another_way_in_other_memory_or_on_other_devices_is_copied():
    """What this mesh cannot express is replicated; what a step has taken is refused."""
    sharded = hfjax.HSDP.edit(replicate_below=0)
    mesh = hfjax.make_mesh(data=4, fsdp=2)
    theirs = hfjax.layout(Student, optax.sgd(0.0), mesh, sharded)
    layout = hfjax.layout(Student, optax.sgd(0.1), hfjax.make_mesh(fsdp=8), FSDP)
    step, state = hfjax.train_step(layout, distilled), hfjax.init(layout)
    x, teacher = np.ones((16, 8), np.float32), hfjax.init(theirs, 7).params
    host = jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind(HOST)), teacher)
    few = jax.device_put(
        teacher, jax.NamedSharding(hfjax.make_mesh(devices=jax.devices()[4:], data=4), P())
    )
    found = {
        float(step.gradients(state, x, extra={"teacher": tree, "c": 1.0})[1]["loss"])
        for tree in (teacher, hfjax.full_array(teacher), host, few)
    }
    assert len(found) == 1
    taken = {"teacher": state.params, "c": 1.0}
    state, _ = step.apply(state, step.gradients(state, x, extra=taken)[0])
    for message, extra in {
        r"extra\['teacher'\].*was given to a step": taken,
        r"extra\['c'\] is a str: arrays and numbers": {"teacher": teacher, "c": "soft"},
    }.items():
        with pytest.raises(ValueError, match=message):
            step.gradients(state, x, extra=extra)


def test_forward_may_ask_for_extra_too_whatever_looks_at_the_model_first():
    """A precision by path probes the model."""
    scaled = lambda model, batch, extra: model(batch) * extra
    layout = hfjax.layout(Student, optax.sgd(0.1), hfjax.make_mesh(fsdp=8), FSDP, forward=scaled)
    precision = {"*": "bf16", "down/*": "fp32"}
    step = hfjax.train_step(layout, squares, precision=precision)
    state, x = hfjax.init(layout), np.ones((16, 8), np.float32)
    one, two = (float(step.gradients(state, x, extra=n)[1]["loss"]) for n in (1.0, 2.0))
    assert two == pytest.approx(4 * one, rel=1e-2)
    with pytest.raises(ValueError, match=r"forward asks for `extra`.*eval_step and predict_step"):
        hfjax.eval_step(layout, squares)


def test_a_loss_that_asks_for_extra_says_so_where_none_is_given():
    layout = hfjax.layout(Called, optax.sgd(0.1), hfjax.make_mesh(data=8), DDP)
    step = hfjax.train_step(layout, lambda outputs, batch, extra: outputs.mean() * extra)
    with pytest.raises(ValueError, match="asks for `extra`, and none is given"):
        step(hfjax.init(layout), tokens())


@pytest.mark.slow
def test_in_a_layer_stack_and_in_a_pipeline_extra_is_there_too():
    loss = lambda outputs, batch, extra: jax.tree.map(
        lambda x: x * extra, next_token_loss(outputs, batch)
    )
    twice = {}
    for strategy, sizes, options in (
        (FSDP, {"fsdp": 2}, {}),
        (PIPE, {"pipe": 2}, {"schedule": Schedule("1f1b", 2)}),
    ):
        layout = gpt_layout(strategy, sizes, master_weights(optax.sgd(0.1)), jax.devices()[:2])
        step = hfjax.train_step(layout, loss, **options)
        state = hfjax.init(layout, 0, options.get("schedule"))
        found = [
            step.gradients(state, tokens(), extra=x)[1] for x in (np.float32(1), np.float32(3))
        ]
        twice[strategy.name] = [float(x["weight"]) for x in found]
        assert float(found[0]["loss"]) == pytest.approx(float(found[1]["loss"]), rel=1e-6)
    assert twice["FSDP"] == twice["PIPE"] == [384.0, 1152.0]
