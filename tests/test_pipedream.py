"""Asynchronous pipelines train as PipeDream says: a simulator runs the table event by event."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hfjax
from hfjax import DDP, FSDP, PIPE, TENSOR, ZERO1, ZERO2, Schedule
from hfjax.checks.optimizers import check_element_by_element
from hfjax.models.gpt import next_token_loss
from hfjax.parallel.jaxprs.walk import equations_in
from hfjax.parallel.schedules.named import SCHEDULES
from tests.constant_stack import Stack, Tied, rows, weighted
from tests.simulator import Simulator
from tests.small_gpt import gpt, tokens

LAYERS = 4


def partly_weightless(n, seed):
    """Microbatch 1 weighs nothing on both devices that have rows, microbatch 2 on one of them."""
    batch = rows(n, seed)
    by_microbatch = batch["weight"].reshape(2, n // 4, 2)
    by_microbatch[:, 1] = by_microbatch[0, 2] = 0
    return batch


def plan(optimizer, stages, data=1, model: Any = Stack, strategy=None, **sizes):
    count = stages * data * int(np.prod(list(sizes.values())))
    mesh = hfjax.make_mesh(pipe=stages, data=data, devices=jax.devices()[:count], **sizes)
    strategy = strategy or (PIPE | DDP if stages > 1 else DDP)
    return hfjax.layout(model, optimizer, mesh, strategy)


def versions_of(schedule, stages):
    versions = schedule.versions(stages)
    assert versions is not None
    return versions


def assert_close(found, wanted, tolerance):
    """Equal, relative to the norm of each array."""
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(found), strict=True
    ):
        apart = np.linalg.norm(np.asarray(a) - np.asarray(b)) / max(np.linalg.norm(a), 1e-6)
        assert apart < tolerance, f"{jax.tree_util.keystr(path)} differs by {apart:.1e}"


def assert_simulated(
    case, model: Any = Stack, loss=weighted, batch=rows, tolerance=1e-10, **execution
):
    """Two calls of the step leave the parameters and tell the metrics that the simulator does."""
    schedule, optimizer, stages, data = case
    layout = plan(optimizer, stages, data, model)
    step = hfjax.train_step(layout, loss, schedule=schedule, **execution)
    state, simulator = hfjax.init(layout, seed=0), Simulator(model, loss, optimizer, stages, data)
    every = None if schedule.name == "pipedream" else schedule.every or stages
    for seed in range(2):
        given = batch(2 * schedule.microbatches * data, seed)
        state, metrics = step(state, given)
        wanted = simulator.call(given, schedule.table(stages), every)
        assert {"finite", "step", *wanted} == set(metrics)
        assert_close({name: metrics[name] for name in wanted}, wanted, tolerance)
        params = hfjax.to_model_order(layout, state).params
        assert_close(params, simulator.params(), tolerance)
    found = tuple(simulator.stale[s] for s in range(stages))
    assert found == versions_of(schedule, stages).staleness


SGD, ADAM = optax.sgd(0.02, momentum=0.9), optax.adamw(1e-2)
# schedule, optimizer, stages, data; how the step runs
CASES = {
    "pipedream on 4 stages": ((Schedule("pipedream", 8), SGD, 4, 1), {}),
    "pipedream, fewer microbatches than stages": ((Schedule("pipedream", 2), ADAM, 4, 1), {}),
    "pipedream beside data, one microbatch without weight": (
        (Schedule("pipedream", 5), ADAM, 2, 2),
        {"batch": partly_weightless},
    ),
    "pipedream with layers that do not divide": ((Schedule("pipedream", 4), SGD, 3, 1), {}),
    "pipedream on one stage": ((Schedule("pipedream", 3), SGD, 1, 2), {}),
    "pipedream that keeps the last microbatch": (
        (Schedule("pipedream", 4), SGD, 2, 1),
        {"remat": "except_last"},
    ),
    "2bw on 4 stages": ((Schedule("2bw", 12), ADAM, 4, 1), {}),
    "2bw, fewer microbatches than stages": ((Schedule("2bw", 3, every=3), SGD, 4, 1), {}),
    "2bw beside data, in a loop": ((Schedule("2bw", 8), SGD, 2, 2), {"unroll": 1}),
    "2bw in larger groups, recomputed": (
        (Schedule("2bw", 12, every=4), ADAM, 2, 1),
        {"remat": "full"},
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.short("pipedream that keeps the last microbatch")
def test_a_call_is_what_the_simulator_does_event_by_event(name):
    case, execution = CASES[name]
    with jax.enable_x64(True):
        assert_simulated(case, **execution)


def test_a_parameter_that_both_ends_read_is_updated_once_with_both_gradients():
    with jax.enable_x64(True):
        assert_simulated((Schedule("pipedream", 3), ADAM, 2, 1), Tied)


def test_every_schedule_whose_stages_update_by_themselves_is_simulated():
    wanted = {name for name, builder in SCHEDULES.items() if builder.every is not None}
    assert {case[0].name for case, _ in CASES.values()} == wanted


@pytest.mark.slow
def test_a_gpt_does_what_the_simulator_does():
    case = (Schedule("pipedream", 4), optax.sgd(0.1, momentum=0.9), 2, 1)
    batch = lambda n, seed: tokens(rows=n)
    assert_simulated(case, gpt(layers=LAYERS), next_token_loss, batch, tolerance=1e-5)


def taken(step, calls, batch):
    """Return the state after some calls."""
    state = hfjax.init(step.layout, seed=0)
    for _ in range(calls):
        state, _ = step(state, batch)
    return state


@pytest.mark.slow
def test_one_group_is_the_step_that_waits():
    """With every=microbatches, 2bw has one update in a call, as any other schedule."""
    half = ("1f1b-published", "2bw")
    schedules = [Schedule(name, 4, every=4 if name == "2bw" else None) for name in half]
    with jax.enable_x64(True):
        layout = plan(ADAM, 2, 2)
        waits, alone = (
            taken(hfjax.train_step(layout, weighted, schedule=s), 3, rows(16)) for s in schedules
        )
        assert_close(alone, waits, 1e-10)
    assert jax.tree.structure(alone) == jax.tree.structure(waits)  # a checkpoint serves both


@pytest.mark.slow
def test_with_a_tensor_axis_it_is_the_same_step():
    results = []
    for strategy, sizes in ((PIPE | DDP, {}), (PIPE | DDP | TENSOR, {"tensor": 2})):
        layout = plan(SGD, 2, 2, strategy=strategy.edit(replicate_below=0), **sizes)
        step = hfjax.train_step(layout, weighted, schedule=Schedule("2bw", 4))
        results.append(hfjax.full_array(taken(step, 2, rows(16)).params))
    assert_close(results[1], results[0], 1e-5)


def marking():
    """Add to every parameter the number of updates so far, whatever its gradient."""

    def update(updates, state, params=None):
        return jax.tree.map(lambda g: jnp.full_like(g, state), updates), state + 1

    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)


@pytest.mark.slow
def test_a_count_advances_with_every_update_and_the_ends_take_it_as_the_call_began():
    layout = plan(optax.chain(optax.scale(0.0), marking()), 2)
    step = hfjax.train_step(layout, weighted, schedule=Schedule("pipedream", 3))
    old, new = (taken(step, calls, rows(6)) for calls in (0, 2))
    before, after = hfjax.full_array(old.params), hfjax.full_array(new.params)
    moved = jax.tree.map(lambda a, b: np.unique(np.round(b - a)).tolist(), before, after)
    assert moved == {
        "before": [0 + 3],
        "after": [0 + 3],
        "layers": {"up": [sum(range(6))], "down": [sum(range(6))]},
    }
    assert int(new.optimizer[1]) == 6


def test_a_call_that_is_not_finite_changes_nothing_on_any_stage():
    bad = rows(8)
    bad["x"][5] = np.nan  # the updates before it are undone as well
    with jax.enable_x64(True):
        step = hfjax.train_step(plan(ADAM, 2), weighted, schedule=Schedule("pipedream", 4))
        old, new = taken(step, 0, bad), taken(step, 1, bad)
        assert_close((new.params, new.optimizer), (old.params, old.optimizer), 1e-9)


def carried(jaxpr):
    """Yield the shape of every array that some loop of the program carries."""
    for equation, _ in equations_in(jaxpr):
        if equation.primitive.name == "scan":
            start = equation.params["num_consts"]
            yield from equation.invars[start : start + equation.params["num_carry"]]


@pytest.mark.parametrize(
    ("name", "stages", "slots", "stale"),
    [
        ("pipedream", 2, 2, (1, 0)),
        ("pipedream", 4, 4, (3, 2, 1, 0)),
        ("2bw", 2, 2, (1, 1)),
        ("2bw", 4, 2, (1, 1, 1, 1)),
    ],
)
def test_a_stage_keeps_as_many_versions_of_its_layers_as_theory_says(name, stages, slots, stale):
    schedule = Schedule(name, 4 * stages)
    versions = versions_of(schedule, stages)
    assert (versions.slots, versions.staleness) == (slots, stale)
    step = hfjax.train_step(plan(SGD, stages), weighted, schedule=schedule)
    batch, state = rows(8 * stages), step.layout.abstract_state()
    jaxpr = jax.make_jaxpr(step._program.step)(state, batch).jaxpr
    of_layers = [(slots, LAYERS // stages, *shape) for shape in ((8, 16), (16, 8))]
    kept = [v.aval for v in carried(jaxpr) if v.aval.shape in of_layers]
    layers = sum(4 * x.size for x in jax.tree.leaves(state.params["layers"]))
    assert sum(4 * np.prod(a.shape) for a in kept) == slots * layers // stages


def test_gradients_of_layers_are_averaged_over_data_at_every_update():
    batch, count = rows(16), 4
    schedule = Schedule("pipedream", count)
    step = hfjax.train_step(plan(SGD, 2, 2), weighted, schedule=schedule)
    program = hfjax.collectives(step.lower(batch))
    over_data = [row for row in program if row.axes == ("data",)]
    ticks = schedule.table(2).ticks  # at most one in a tick: in the branch of an update
    assert {row.where for row in over_data} == {f"loop of {ticks} > heaviest of 2 branches"}
    assert {row.count for row in over_data} == {ticks}
    assert sorted(row.shape for row in over_data) == [(), (2, 8, 16), (2, 16, 8)]
    updates = versions_of(schedule, 2).columns["U_version"] >= 0
    assert updates.sum(axis=0).tolist() == [count] * 2
    assert program.count("all-reduce", ("pipe", "data")) == 2 + 4  # ends; loss and metric: two each


# -- what is refused ----------------------------------------------------------------------


WAITS = r"Use a synchronous schedule, for instance hfjax.Schedule\(\"1f1b\", …\), or"


@pytest.mark.parametrize(
    ("execution", "message"),
    [
        (
            {"max_grad_norm": 1.0},
            f"max_grad_norm=1.0 with schedule pipedream: .* {WAITS} clip element by element",
        ),
        (
            {"gradient_accumulation_steps": 2},
            f"gradient_accumulation_steps=2 with schedule pipedream: .* {WAITS} raise microbatches",
        ),
        (
            {"gradient_reduction": "hierarchical"},
            f'gradient_reduction="hierarchical" with .* {WAITS} gradient_reduction="flat"',
        ),
    ],
)
def test_what_needs_the_whole_gradient_is_refused_by_name(execution, message):
    with pytest.raises(ValueError, match=message):
        hfjax.train_step(plan(SGD, 2), weighted, schedule=Schedule("pipedream", 2), **execution)


@pytest.mark.parametrize(
    ("strategy", "what"), [(ZERO1, "optimizer_state"), (ZERO2, "gradient"), (FSDP, "parameter")]
)
def test_a_strategy_that_splits_over_data_is_refused(strategy, what):
    strategy = (PIPE | strategy).edit(replicate_below=0)
    layout = plan(SGD, 2, 2, strategy=strategy, fsdp=2)
    with pytest.raises(
        ValueError,
        match=rf"the {what} of layers/.* split as .* with schedule 2bw: .* hfjax.PIPE \| hfjax.DDP",
    ):
        hfjax.train_step(layout, weighted, schedule=Schedule("2bw", 2))


OPTIMIZERS = {
    "LAMB": (optax.lamb(1e-3), "updates .* otherwise if it is given a layer alone"),
    "a clipped norm": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
        "updates .* otherwise if it is given a layer alone",
    ),
    "adafactor": (optax.adafactor(1e-3), r"keeps .*v_row.*\[1\], neither like a parameter nor"),
    "several steps in one": (optax.MultiSteps(SGD, 4), "keeps .mini_step, which is neither"),
    "as many as are tried": (optax.MultiSteps(SGD, 3), "keeps .*, which is neither"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_mixes_layers_is_refused(name):
    optimizer, why = OPTIMIZERS[name]
    with pytest.raises(
        ValueError, match=f"an optimizer that {why}.*, with an asynchronous schedule: each stage"
    ):
        hfjax.train_step(plan(optimizer, 2), weighted, schedule=Schedule("2bw", 2))


def only_kernels(params):
    return jax.tree.map(lambda x: x.ndim > 2, params)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 5, 50), mask=only_kernels),
        optax.chain(optax.clip(1.0), optax.lion(1e-3)),
        optax.inject_hyperparams(optax.rmsprop)(learning_rate=0.1),
        optax.multi_transform(
            {"fast": optax.sgd(0.1), "slow": optax.adam(1e-3)},
            lambda params: {key: "fast" if key == "layers" else "slow" for key in params},
        ),
    ],
    ids=["schedule and mask", "clip by element", "hyperparameters", "by label"],
)
def test_one_that_works_element_by_element_is_taken(optimizer):
    check_element_by_element(plan(optimizer, 2))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda: Schedule("pipedream", 4, every=2), "every=2 of pipedream: only 2bw updates"),
        (lambda: Schedule("1f1b", 4, every=2), "every=2 of 1f1b: only 2bw updates"),
        (lambda: Schedule("2bw", 4, every=1), r"every=1 of 2bw: .* at least 2.*\"pipedream\""),
        (lambda: Schedule("2bw", 6).versions(4), r"every=4: .* divides 6: one of \[1, 2, 3, 6\]"),
        (lambda: Schedule("2bw", 8, every=2).versions(4), "begins before the update that it wait"),
        (lambda: Schedule("2bw", 4, chunks=2), "chunks=2: 2bw has 1 on each stage"),
    ],
)
def test_updates_that_a_schedule_cannot_have_are_refused(schedule, message):
    with pytest.raises(ValueError, match=message):
        schedule()
