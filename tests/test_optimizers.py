"""Parameter groups, frozen parameters, averages, learning rates; what was not finite, by name."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax.models.gpt import next_token_loss
from hfjax.models.layers import run_stacked
from hfjax.parallel.strategy import DDP, FSDP, PIPE, SEQUENCE, TENSOR, ZERO1, ZERO2
from hfjax.utils.paths import flatten
from tests.small_gpt import mlp_layout, tokens
from tests.small_stack import Stack, of_stacks, rows, squared, stack_layout

ONE = {"data": 1}
NO_NUMBER: Any = "0.001"
MESHES = [
    pytest.param(DDP, {"data": 8}, {}, marks=pytest.mark.slow),
    (ZERO1, {"data": 8}, {"gradient_accumulation_steps": 2}),
    pytest.param(ZERO2 | TENSOR, {"data": 4, "tensor": 2}, {}, marks=pytest.mark.slow),
    (
        FSDP | TENSOR | SEQUENCE,
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"gradient_accumulation_steps": 2},
    ),
    (
        PIPE | ZERO1,
        {"pipe": 2, "data": 2},
        {"schedule": hfjax.Schedule("interleaved", 4, chunks=1)},
    ),
]


def grouped():
    rate = hfjax.lr_schedule(1e-2, warmup_steps=2, steps=8)
    return hfjax.optimizers.by_path(
        {
            "*/bias": optax.sgd(rate),
            "*norm*": optax.adamw(0.1 * 1e-2, weight_decay=0.0),
            "*": optax.chain(optax.clip(1.0), optax.adamw(rate, weight_decay=0.1)),
        }
    )


def after(layout, steps=4, loss=squared, batch=None, **execution):
    step = hfjax.train_step(layout, loss, max_grad_norm=0.5, unroll=1, **execution)
    state, losses = hfjax.init(layout, schedule=execution.get("schedule")), []
    for _ in range(steps):
        state, metrics = step(state, batch or rows())
        losses.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return hfjax.to_model_order(layout, state) if layout.order is not None else state, losses


def alone(optimizer=None):
    return stack_layout(DDP, ONE, optimizer, layers=2)


FROZEN = ("positions", "layers/mlp/up/*")


def mlps_after(strategy, mesh, **execution):
    devices = jax.devices()[: int(np.prod(list(mesh.values())))]
    layout = mlp_layout(strategy, mesh, hfjax.optimizers.ema(grouped(), 0.5), devices).freeze(
        *FROZEN
    )
    return layout, *after(layout, loss=next_token_loss, batch=tokens(), **execution)


@cache
def grouped_alone():
    return mlps_after(DDP, ONE)[1:]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "mesh", "execution"), MESHES)
def test_groups_frozen_parameters_and_an_average_are_those_of_one_device(strategy, mesh, execution):
    wanted, losses = grouped_alone()
    layout, state, found = mlps_after(strategy, mesh, **execution)
    np.testing.assert_allclose(found, losses, rtol=2e-5)
    for tree in (lambda s: s.params, lambda s: hfjax.optimizers.averaged(s).params):
        old, new = flatten(hfjax.full_array(tree(wanted))), flatten(hfjax.full_array(tree(state)))
        for path, x in old.items():
            np.testing.assert_allclose(new[path], x, atol=2e-5, err_msg=path)
    first = flatten(hfjax.full_array(hfjax.init(layout).params))
    np.testing.assert_array_equal(
        flatten(hfjax.full_array(state.params))["positions"], first["positions"]
    )


@pytest.mark.slow
def test_a_frozen_parameter_has_no_gradient_no_moments_and_no_part_in_the_norm():
    frozen = ("layers/*", "positions")
    still = mlp_layout(DDP, {"data": 8}).freeze(*frozen)
    whole = mlp_layout(DDP, {"data": 8})
    frozen, trained = 0, 0
    for p in still.param_specs.values():
        size = 4 * int(np.prod(p.shape))
        frozen, trained = frozen + size * p.frozen, trained + size * (not p.frozen)
    memory = still.bytes_per_device()
    assert memory["gradients"] == trained
    assert memory["optimizer_state"] == 2 * trained + 4
    moved = [
        hfjax.collectives(hfjax.train_step(x, next_token_loss).lower(tokens())).moved
        for x in (whole, still)
    ]
    assert moved[0] - moved[1] == 2 * 7 * frozen // 8  # an all-reduce among 8
    assert "none" in str(still)


@pytest.mark.slow
def test_what_is_frozen_step_by_step_is_frozen_together():
    def norm(layout):
        return after(layout, steps=1)[1][0][1]

    wanted = norm(alone().freeze("before", "layers/*"))
    assert norm(alone().freeze("before").freeze("layers/*")) == wanted
    assert norm(alone().freeze("layers/*").freeze("before")) == wanted
    assert norm(alone()) > wanted


@pytest.mark.slow
def test_averages_of_groups_are_put_together():
    groups = {
        "before": hfjax.optimizers.ema(optax.sgd(0.1), 0.5),
        "*": hfjax.optimizers.ema(optax.sgd(0.1), 0.5),
    }
    several, _ = after(alone(hfjax.optimizers.by_path(groups)))
    one, _ = after(alone(hfjax.optimizers.ema(optax.sgd(0.1), 0.5)))
    jax.tree.map(
        np.testing.assert_array_equal,
        hfjax.full_array(hfjax.optimizers.averaged(several).params),
        hfjax.full_array(hfjax.optimizers.averaged(one).params),
    )


def test_frozen_layers_of_a_list_are_refused():
    class Listed(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])

        def embed(self, batch):
            return batch["x"]

        def head(self, x):
            return x

        def __call__(self, batch):
            x = self.embed(batch)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    mesh = hfjax.make_mesh(pipe=2, devices=jax.devices()[:2])
    layout = hfjax.layout(lambda rngs: Listed(rngs), optax.sgd(0.1), mesh, PIPE)
    with pytest.raises(ValueError, match=r"layers/0/bias is in a list of layers.*stack them"):
        layout.freeze("layers/0/*")


def test_a_frozen_parameter_may_be_scaled_too():
    layout = alone(hfjax.optimizers.scaled(optax.sgd(0.1), {"*": 0.5})).freeze("before")
    half, _ = after(layout, steps=1)
    wanted, _ = after(alone(optax.sgd(0.05)).freeze("before"), steps=1)
    for path, x in flatten(hfjax.full_array(wanted.params)).items():
        np.testing.assert_allclose(flatten(hfjax.full_array(half.params))[path], x, rtol=1e-6)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda x: x.freeze("layer/*"), r"pattern 'layer/\*' matches no parameter. Nearest"),
        (lambda x: x.freeze("*"), r"all parameters are, and nothing would train"),
        (
            lambda x: hfjax.init(alone(hfjax.optimizers.by_path({"layers/*": optax.sgd(1.0)}))),
            r"by_path: before \(and 2 more\) matches none of \['layers/\*'\]. Add a last",
        ),
        (
            lambda x: hfjax.init(
                alone(hfjax.optimizers.by_path({"x*": optax.sgd(1), "*": optax.sgd(1)}))
            ),
            r"pattern 'x\*' matches no parameter",
        ),
        (lambda x: x.freeze(), r"freeze\(\): patterns of paths are expected, at least one"),
        (lambda x: x.freeze(["tokens"]), r"freeze\(\['tokens'\],\): patterns of paths"),
        (
            lambda x: hfjax.init(
                alone(hfjax.optimizers.by_path({"*": optax.sgd(1), "norm/*": optax.sgd(1)}))
            ),
            r"by_path: 'norm/\*' never counts, since patterns before it match the same paths",
        ),
        (
            lambda x: hfjax.optimizers.ema(optax.sgd(1), NO_NUMBER),
            r"ema: decay=.0.001.; a number between",
        ),
        (
            lambda x: hfjax.lr_schedule(NO_NUMBER),
            r"lr_schedule: peak=.0.001.; a positive learning rate",
        ),
        (
            lambda x: hfjax.optimizers.averaged(5),
            r"averaged\(state\): a hfjax.State is expected, found 5",
        ),
        (
            lambda x: hfjax.optimizers.ema(optax.sgd(1), 1.0),
            r"ema: decay=1.0; a number between 0 and 1",
        ),
        (lambda x: hfjax.optimizers.averaged(hfjax.init(x)), r"its optimizer keeps no average"),
        (lambda x: hfjax.lr_schedule(0.0), r"peak=0.0; a positive learning rate"),
        (
            lambda x: hfjax.lr_schedule(1.0, warmup_steps=5, steps=5),
            r"steps=5 leave nothing to decay",
        ),
        (
            lambda x: hfjax.lr_schedule(1.0, steps=5, final_fraction=2),
            r"final_fraction=2; steps are whole",
        ),
        (
            lambda x: hfjax.lr_schedule(1.0, steps=5, type="cos"),
            r"type='cos', warmup_type='linear'; type is one of",
        ),
        (
            lambda x: hfjax.train_step(x, squared, on_nonfinite="ignore"),
            r"on_nonfinite='ignore': one of stop, skip, apply",
        ),
        (
            lambda x: hfjax.train_step(x, squared, max_skipped=0),
            r"max_skipped=0: a positive number of steps",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(act, message):
    with pytest.raises(ValueError, match=message):
        act(alone())


PLATEAU = optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau())


@pytest.mark.parametrize(
    ("optimizer", "asks"),
    [
        (PLATEAU, "'value'"),
        (hfjax.optimizers.by_path({"*/bias": optax.sgd(0.1), "*": PLATEAU}), "'value'"),
        (hfjax.optimizers.master_weights(PLATEAU), "'value'"),
        (optax.polyak_sgd(), "'value'"),
        (optax.lbfgs(), "'value', 'grad', and 'value_fn'"),
    ],
    ids=["plateau", "a group", "master", "polyak", "lbfgs"],
)
def test_an_optimizer_that_asks_for_the_loss_is_refused_before_a_step(optimizer, asks):
    with pytest.raises(ValueError, match=rf"update asks for {asks}, and a step .*Leave out"):
        mlp_layout(DDP, ONE, optimizer)


def test_an_optimizer_that_gives_what_another_asks_for_is_taken():
    def update(updates, state, params=None):
        return PLATEAU.update(updates, state, params, value=optax.tree.norm(updates))

    mlp_layout(DDP, ONE, optax.GradientTransformation(PLATEAU.init, update))


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peak": True}, "peak=True; a positive learning"),
        ({"warmup_steps": 1.5}, "warmup_steps=1.5, .*; steps are whole numbers"),
        ({"warmup_steps": NAN, "type": "constant"}, "warmup_steps=nan, .*; steps are whole"),
        ({"warmup_steps": INF, "type": "constant"}, "warmup_steps=inf, .*; steps are whole"),
        ({"stable_steps": True}, "stable_steps=True, .*; steps are whole numbers"),
        ({"stable_steps": "3"}, "stable_steps='3', .*; steps are whole numbers"),
        (
            {"final_fraction": True},
            "final_fraction=True; steps are whole numbers from 0 on, and the fraction",
        ),
        (
            {"final_fraction": NAN},
            "final_fraction=nan; steps are whole numbers from 0 on, and the fraction",
        ),
        ({"steps": True}, "steps=True leave nothing to decay"),
    ],
)
def test_a_rate_of_what_is_no_number_is_refused(fields, message):
    given: Any = {"peak": 1.0, "steps": 100} | fields
    with pytest.raises(ValueError, match=f"lr_schedule: .*{message}"):
        hfjax.lr_schedule(**given)
    whole: Any = {"warmup_steps": 1e1, "steps": np.int64(50)}
    assert float(hfjax.lr_schedule(1.0, **whole)(9)) == 1


WRAPPERS = {
    "by_path: '\\*'": lambda x: hfjax.optimizers.by_path({"*": x}),
    "ema": lambda x: hfjax.optimizers.ema(x, 0.9),
    "master": hfjax.optimizers.master_weights,
    "scaled": lambda x: hfjax.optimizers.scaled(x, {"*": 2.0}),
}


@pytest.mark.parametrize("what", WRAPPERS)
@pytest.mark.parametrize(
    ("given", "found"),
    [
        (1e-3, "0.001"),
        (hfjax.lr_schedule(1e-3, type="constant"), "the function learning_rate"),
        (optax.adamw, "the function adamw"),
        ("adamw", "'adamw'"),
        ({"init": 1e-3}, "{'init': 0.001}"),
        (None, "None"),
    ],
)
def test_what_is_no_optimizer_is_refused_where_one_is_wrapped(what, given, found):
    words = rf"an optax optimizer is expected, for instance optax.adamw\(1e-3\), found {found}\.$"
    with pytest.raises(ValueError, match=f"^{what}: {words}"):
        WRAPPERS[what](given)


def test_groups_are_a_dictionary_of_patterns():
    given: Any
    for given in ([("*", optax.sgd(1.0))], None, {3: optax.sgd(1.0)}, {}):
        with pytest.raises(ValueError, match=r"^by_path: a dictionary .* is expected, found "):
            hfjax.optimizers.by_path(given)


@pytest.mark.parametrize("name", ["learning_rate", "b1", "b2", "eps", "weight_decay"])
@pytest.mark.parametrize("given", [NAN, INF, -1.0, True, "3"])
def test_adamw_of_what_is_no_number_is_refused(name, given):
    fields: Any = {"learning_rate": 1e-3} | {name: given}
    with pytest.raises(ValueError, match=rf"adamw: {name}={given!r}: a (plain|finite) number"):
        hfjax.adamw(**fields)


@pytest.mark.parametrize("given", [NAN, INF, -1.0, True, "3"])
def test_a_factor_that_is_no_number_is_refused(given):
    with pytest.raises(ValueError, match=rf"scaled: w={given!r}; a finite factor"):
        hfjax.optimizers.scaled(optax.sgd(1.0), {"w": given})


@pytest.mark.parametrize(
    ("clip", "length"),
    [(None, 2.0), (3.0, 2.0), (0.5, 0.5), (INF, 2.0), (1e39, 2.0), (3e38, 2.0)],
)
def test_a_gradient_is_shortened_where_it_is_longer_than_clip_and_nowhere_else(clip, length):
    mesh, forward = hfjax.make_mesh(data=2, devices=jax.devices()[:2]), lambda w, batch: batch @ w
    layout = hfjax.layout(lambda rngs: jnp.zeros(4), optax.sgd(1.0), mesh, DDP, forward=forward)
    step = hfjax.train_step(layout, lambda outputs, batch: outputs.mean(), max_grad_norm=clip)
    state, metrics = step(hfjax.init(layout), np.ones((8, 4), np.float32))
    assert float(metrics["grad_norm"]) == pytest.approx(2.0)
    moved = np.concatenate([np.ravel(x) for x in jax.tree.leaves(hfjax.full_array(state.params))])
    assert float(np.linalg.norm(moved)) == pytest.approx(length)


@pytest.mark.parametrize("clip", [0, -1.0, 1e-39, 1e-50, NAN, -INF, True, "1"])
def test_a_clip_that_is_no_positive_number_of_float32_is_refused(clip):
    with pytest.raises(ValueError, match=rf"max_grad_norm={clip!r}: a positive norm, or None"):
        hfjax.Execution(max_grad_norm=clip)


def test_an_infinite_clip_is_none_wherever_a_clip_is_refused():
    """Of layers that are updated in the backward pass nobody knows the norm before the end."""
    clip: Any
    for clip in (INF, np.float32(INF)):
        assert hfjax.Execution(max_grad_norm=clip, optimizer_in_backward=True).max_grad_norm is None
    layout = mlp_layout(FSDP, {"fsdp": 2}, optax.sgd(0.1), layers=2)
    hfjax.train_step(layout, next_token_loss, max_grad_norm=INF, optimizer_in_backward=True)
    layout = mlp_layout(PIPE, {"pipe": 2}, optax.sgd(0.1), layers=2)
    hfjax.train_step(layout, next_token_loss, max_grad_norm=INF, schedule=hfjax.Schedule("2bw", 4))


def test_an_average_follows_the_parameters_by_its_decay():
    layout = alone(hfjax.optimizers.ema(optax.sgd(0.1), 0.9))
    step, state = hfjax.train_step(layout, squared), hfjax.init(layout)
    wanted = flatten(hfjax.full_array(state.params))
    for _ in range(3):
        state, _ = step(state, rows())
        new = flatten(hfjax.full_array(state.params))
        wanted = {path: 0.9 * x + 0.1 * new[path] for path, x in wanted.items()}
    for path, x in flatten(hfjax.full_array(hfjax.optimizers.averaged(state).params)).items():
        np.testing.assert_allclose(x, wanted[path], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"warmup_steps": 4, "type": "constant"}, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        ({"steps": 4, "type": "linear", "final_fraction": 0.5}, [1, 0.875, 0.75, 0.625, 0.5, 0.5]),
        (
            {"warmup_steps": 1, "stable_steps": 2, "steps": 5, "type": "linear"},
            [1, 1, 1, 1, 0.5, 0, 0],
        ),
        ({"warmup_steps": 4, "warmup_type": "log", "type": "constant"}, [0, 0, 0.5, 0.79248, 1]),
    ],
)
def test_a_rate_goes_up_stays_and_goes_down(fields, wanted):
    found = [float(hfjax.lr_schedule(1.0, **fields)(n)) for n in range(len(wanted))]
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def of_deepspeed(kind, update, warmup, steps, end):
    """Return the rate of an update, from 0 on, where scheduler.step() follows each update."""
    last, warmup = update - 1, max(warmup, 2)  # its last_batch_iteration; no fewer than two
    if last < 0:
        return 0.0
    if last < warmup:
        return np.log(last + 1) / np.log(warmup)
    if kind == "WarmupLR":
        return 1.0
    if kind == "WarmupDecayLR":
        return max(0.0, (steps - last) / (steps - warmup))
    part = min(1.0, (last - warmup + 1) / (steps - warmup))
    return end + (1 - end) * (1 + np.cos(np.pi * part)) / 2


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("WarmupLR", {"type": "constant"}),
        ("WarmupDecayLR", {"type": "linear", "stable_steps": 1, "steps": 13}),
        ("WarmupCosineLR", {"type": "cosine", "final_fraction": 0.0001, "steps": 12}),
    ],
)
def test_a_rate_is_that_of_deepspeed_at_every_update(kind, fields):
    for warmup in (1, 2, 5):
        rate = hfjax.lr_schedule(1.0, warmup_steps=warmup, warmup_type="log", **fields)
        wanted = [of_deepspeed(kind, n, warmup, 12, 0.0001) for n in range(16)]
        np.testing.assert_allclose([float(rate(n)) for n in range(16)], wanted, atol=1e-6)


def poisoned(outputs, batch):
    """The loss stays finite; the gradient of what `poison` multiplies does not."""
    mean = squared(outputs, batch)
    return mean.total * 1.0 + 0 * (batch["poison"].sum() * outputs.sum())


def run(step, state, batches):
    for batch in batches:
        state, _ = step(state, batch)
    return state


BAD = rows(poison=np.full(8, np.inf, np.float32))
GOOD = rows(poison=np.zeros(8, np.float32))


@pytest.mark.slow
def test_steps_that_are_not_finite_are_skipped_told_and_not_counted_by_the_optimizer():
    layout = stack_layout(ZERO1, {"data": 4}, optax.adam(1e-3))
    step = hfjax.train_step(layout, poisoned, on_nonfinite="skip")
    plain = hfjax.train_step(layout, poisoned)
    state, wanted = hfjax.init(layout), hfjax.init(layout)
    with pytest.warns(RuntimeWarning, match=r"step 2 is not finite.*look at the batch.*skipped"):
        state = run(step, state, (GOOD, BAD, GOOD, GOOD, GOOD))
    wanted = run(plain, wanted, [GOOD] * 4)
    jax.tree.map(
        np.testing.assert_array_equal,
        hfjax.full_array(state.params),
        hfjax.full_array(wanted.params),
    )
    assert int(state.step) == 5


def test_too_many_steps_in_a_row_that_are_not_finite_stop_the_run():
    layout = stack_layout(DDP, {"data": 4}, optax.sgd(0.1))
    step = hfjax.train_step(layout, poisoned, on_nonfinite="skip", max_skipped=3)
    state, told = hfjax.init(layout), pytest.warns(RuntimeWarning, match="skipped")
    with told, pytest.raises(FloatingPointError, match=r"3 in a row \(max_skipped=3\).*step 5"):
        run(step, state, (BAD, GOOD, BAD, BAD, BAD, GOOD, GOOD, GOOD))


@jax.custom_vjp
def breaks(x):
    return x


breaks.defvjp(lambda x: (x, None), lambda _, dx: (dx * np.inf,))


def test_the_parameter_whose_gradient_broke_is_named_and_the_loss_given():
    def forward(model, batch):
        return model.head(breaks(run_stacked(model.layers, model.embed(batch))))

    mesh = hfjax.make_mesh(data=4, devices=jax.devices()[:4])
    init = lambda rngs: Stack(3, rngs=rngs)
    layout = hfjax.layout(init, optax.sgd(0.1), mesh, DDP, forward=forward)
    step = hfjax.train_step(layout, squared)
    state, _ = step(hfjax.init(layout), rows())
    told = r"loss was 28\.\d+, the gradients of 3 of 5 .* the first is that of before \(4, 8\)"
    with pytest.raises(FloatingPointError, match=told):
        step.check(state)


# -- muon: which arrays are matrices ----------------------------------------------------------


def of_layers(params):
    return {name: "muon" if name == "layers" else "sgd" for name in params}


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.contrib.muon(1e-3),
        optax.chain(optax.clip(1.0), optax.contrib.muon(1e-3)),
        hfjax.optimizers.by_path({"layers/*": optax.contrib.muon(1e-3), "*": optax.sgd(1e-3)}),
        hfjax.optimizers.ema(optax.contrib.muon(1e-3), 0.9),
        hfjax.optimizers.master_weights(
            hfjax.optimizers.scaled(optax.contrib.muon(1e-3), {"layers/*": 0.5})
        ),
        optax.partition({"muon": optax.contrib.muon(1e-3), "sgd": optax.sgd(1e-3)}, of_layers),
        optax.masked(optax.contrib.muon(1e-3), lambda params: jax.tree.map(jnp.ndim, params)),
        optax.inject_hyperparams(optax.contrib.muon)(learning_rate=1e-3),
        optax.contrib.muon(hfjax.lr_schedule(1e-3, warmup_steps=2, type="constant")),
        optax.MultiSteps(optax.contrib.muon(1e-3), 2).gradient_transformation(),
        optax.apply_if_finite(optax.contrib.muon(1e-3), 3),
    ],
    ids=[
        *("alone", "in a chain", "of some paths", "averaged", "scaled", "in a partition"),
        *("masked", "with a rate in its state", "with a schedule", "now and then", "if finite"),
    ],
)
def test_muon_that_takes_stacks_of_vectors_for_matrices_is_refused(optimizer):
    with pytest.raises(
        ValueError, match=r"(?s)muon makes layers/\S*bias \[2, \d+\] orthogonal.*up"
    ):
        mlp_layout(DDP, ONE, optimizer)


def test_muon_that_leaves_fused_kernels_to_adam_is_refused():
    class Fused(nnx.Module):
        def __init__(self, rngs):
            named = {"axes": ("embed", "heads", None)}
            self.qkv = nnx.LinearGeneral(8, (2, 4), kernel_metadata=named, rngs=rngs)
            self.out = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, batch):
            return self.out(self.qkv(batch["x"]).reshape(-1, 8))

    with pytest.raises(ValueError, match=r"muon updates qkv/kernel \[8, 2, 4\], which holds matri"):
        hfjax.layout(Fused, optax.contrib.muon(1e-3), hfjax.make_mesh(data=1), DDP)


@pytest.mark.slow
def test_muon_that_is_told_the_matrices_of_a_stack_trains_each_of_them_alone():
    def moved(optimizer):
        layout = mlp_layout(DDP, ONE, optimizer)
        state = hfjax.init(layout)
        kernel = lambda state: hfjax.full_array(state.params)["layers"]["mlp"]["up"]["kernel"]
        before = kernel(state)
        return kernel(hfjax.train_step(layout, next_token_loss)(state, tokens(rows=8))[0]) - before

    found = moved(optax.contrib.muon(0.1, muon_weight_dimension_numbers=of_stacks))
    alone: Any = optax.contrib.muon(0.1)
    for layer, gradient in zip(found, -moved(optax.sgd(1.0)), strict=True):
        wanted, _ = alone.update(gradient, alone.init(gradient), gradient)
        np.testing.assert_allclose(layer, wanted, rtol=1e-2, atol=1e-4)


def by_plain_optax(model, optimizer, batch, steps):
    """Return the parameters after some steps, by path: no engine is involved."""
    graph, held = nnx.split(model, nnx.Param)

    def loss(params):
        nnx.replace_by_pure_dict(held, params)
        found = next_token_loss(nnx.merge(graph, held)(batch), batch)
        return found.total / found.weight

    params: Any = nnx.to_pure_dict(held)
    gradient = jax.jit(jax.grad(loss))
    state = optimizer.init(params)
    for _ in range(steps):
        updates, state = optimizer.update(gradient(params), state, params)
        params = optax.apply_updates(params, updates)
    return flatten(params)


@pytest.mark.slow
def test_muon_that_is_told_its_matrices_trains_as_plain_optax_on_one_device():
    muon, wanted = (
        partial(optax.contrib.muon, hfjax.lr_schedule(0.01, warmup_steps=2, type="constant")),
        {},
    )
    for told in (of_stacks, None):
        init = hfjax.init(mlp_layout(FSDP, {"fsdp": 4}))
        tree = told or of_stacks(init.params)
        layout = mlp_layout(FSDP, {"fsdp": 4}, muon(muon_weight_dimension_numbers=tree))
        step, state = hfjax.train_step(layout, next_token_loss), hfjax.init(layout)
        if not wanted:
            one, plain = (
                hfjax.to_model(layout, state),
                muon(muon_weight_dimension_numbers=of_stacks),
            )
            wanted = by_plain_optax(one, plain, tokens(), steps=2)
        for _ in range(2):
            state, _ = step(state, tokens())
        for path, x in flatten(hfjax.full_array(state.params)).items():
            np.testing.assert_allclose(x, wanted[path], rtol=1e-4, atol=1e-5)


def test_muon_for_some_paths_says_nothing_of_the_others():
    """What another optimizer updates, in words of one's own, is no matrix that muon has missed."""
    muon, sgd = optax.contrib.muon(1e-3), optax.sgd(1e-3)
    mlp_layout(DDP, ONE, hfjax.optimizers.by_path({"tokens": muon, "*": sgd}))
    kernels = optax.contrib.MuonDimensionNumbers(0, 1)
    only = lambda params: {**jax.tree.map(lambda _: None, params), "tokens": kernels}
    mlp_layout(DDP, ONE, optax.contrib.muon(1e-3, muon_weight_dimension_numbers=only))


def test_muon_of_a_model_of_plain_matrices_stays_as_it_is():
    model = lambda rngs: nnx.Sequential(nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs))
    hfjax.layout(model, optax.contrib.muon(1e-3), hfjax.make_mesh(data=1), DDP)
