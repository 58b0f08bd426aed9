"""A step that updates layers in its backward pass equals the ordinary one and holds one gradient.

What it leaves is equal to rounding: to 1e-12 in float64.
"""

import math
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax import DDP, FSDP, HSDP, ZERO1, ZERO2, Mean, Schedule
from hfjax.models.attention import dot_product
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss
from hfjax.models.layers import stack_layers
from hfjax.models.moe import MoE, Router
from hfjax.testing import strategies
from tests.h200 import OPTIMIZED, h200s
from tests.small_gpt import mlp_layout, tokens
from tests.small_stack import Stack, of_stacks, rows, squared, stack_layout

LAYERS = 3
SUMS = 8  # total and weight of the loss, two float32 scalars
ADAMW = optax.adamw(optax.linear_schedule(1e-3, 1e-2, 3), eps=1e-4)
IN_BACKWARD = {"optimizer_in_backward": True}


def run(layout, loss=next_token_loss, batch=None, steps=3, **execution):
    """What the metrics told, and the state at the end, in host memory."""
    execution = {"unroll": 1} | execution
    state, step = hfjax.init(layout), hfjax.train_step(layout, loss, **execution)
    told = []
    for _ in range(steps):
        state, metrics = step(state, tokens() if batch is None else batch)
        told.append({name: float(x) for name, x in metrics.items()})
    wanted = layout.shardings()
    for x, where in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        assert x.sharding.is_equivalent_to(where, x.ndim)
    return told, hfjax.full_array((state.params, state.optimizer))


def norm(tree):
    return math.sqrt(sum(float(np.sum(np.square(x, dtype=float))) for x in jax.tree.leaves(tree)))


def assert_same(found, wanted, tolerance):
    """Equal metrics in every step; parameters, and moments, relative to the norm of the tree."""
    for mine, theirs in zip(found[0], wanted[0], strict=True):
        assert mine == pytest.approx(theirs, rel=tolerance, abs=tolerance)
    for mine, theirs in zip(found[1], wanted[1], strict=True):
        apart = jax.tree.map(lambda a, b: np.asarray(a, float) - np.asarray(b, float), mine, theirs)
        assert norm(apart) <= tolerance * norm(theirs)


# --- the same result ------------------------------------------------------------------------


def trained(strategy, sizes, of, **more):
    """A stack, or where kernels are split over tensor what says which, in float64."""
    with jax.enable_x64(True):
        shape = {"optimizer": ADAMW, "layers": LAYERS, "dropout": 0.1}
        if of == "stack":
            layout, given = stack_layout(strategy, sizes, **shape), (squared, rows())
        else:
            devices = jax.devices()[: math.prod(sizes.values())]
            layout = mlp_layout(strategy, sizes, devices=devices, **shape)
            given = next_token_loss, tokens()
        return run(layout, *given, precision="fp64", **more)


@cache
def ordinary(of):
    return trained(DDP, {"data": 1}, of)


EVERY = ("DDP", "ZERO1", "FSDP", "ZERO2 on two axes", "ZERO2+TENSOR", "HSDP+TENSOR+SEQUENCE")


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.short("FSDP")
def test_every_strategy_trains_as_the_ordinary_step_does_on_one_device(name):
    of = "mlps" if "TENSOR" in name else "stack"
    strategy, sizes = strategies(8)[name]
    assert_same(trained(strategy, sizes, of, **IN_BACKWARD), ordinary(of), 1e-12)


GROUPS = hfjax.optimizers.by_path(
    {"layers/*": optax.adamw(1e-2), "*norm*": optax.sgd(0.1), "*": ADAMW}
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "frozen", "sizes", "execution"),
    [
        pytest.param(
            *(ADAMW, (), {"data": 2, "fsdp": 2}, {"precision": "bf16", "remat": "full"}),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(ADAMW, (), {"fsdp": 4}, {"reshard_after_forward": False, "on_nonfinite": "apply"}),
            marks=pytest.mark.slow,
        ),
        (hfjax.optimizers.ema(GROUPS, 0.9), (), {"fsdp": 2}, {"remat": "dots"}),
        (ADAMW, ("before", "layers/kernel"), {"fsdp": 2}, {"unroll": True}),
    ],
    ids=["bf16, remat", "kept gathered", "an average, by path", "frozen, unrolled"],
)
def test_options_and_optimizers_go_with_it(optimizer, frozen, sizes, execution):
    layout = stack_layout(HSDP, sizes, optimizer, LAYERS)
    layout = layout.freeze(*frozen) if frozen else layout
    found, wanted = (
        run(layout, squared, rows(), **execution, **more) for more in (IN_BACKWARD, {})
    )
    assert_same(found, wanted, 2e-3 if "precision" in execution else 1e-5)


@pytest.mark.slow
def test_a_reduction_in_two_levels_goes_layer_by_layer():
    layout, loss = stack_layout(DDP, {"data": 2, "fsdp": 2}, ADAMW, LAYERS), (squared, rows())
    more = {"gradient_reduction": "hierarchical", **IN_BACKWARD}
    found = hfjax.collectives(hfjax.train_step(layout, squared, **more).lower(rows()))
    whole = sum(math.prod(p.shape) for p in layout.param_specs.values())
    assert found.total("reduce-scatter", "fsdp") == 4 * whole == found.total("all-gather", "fsdp")
    assert found.total("all-reduce", "data") == 4 * whole // 2
    wanted = run(stack_layout(DDP, {"data": 1}, ADAMW, LAYERS), *loss)
    assert_same(run(layout, *loss, **more), wanted, 1e-5)


class Listed(nnx.Module):
    """Unlike layers, one of them a function; the head reads what embed reads."""

    def __init__(self, rngs):
        self.before = nnx.Param(0.5 * jax.random.normal(rngs.params(), (4, 8)))
        wide, narrow = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
        self.layers = nnx.Sequential(wide, jnp.tanh, narrow, nnx.Linear(8, 8, rngs=rngs))

    def embed(self, batch):
        return batch["x"] @ self.before[...]

    def head(self, x):
        return x @ self.before[...].T


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(DDP, id="DDP", marks=pytest.mark.slow),
        pytest.param(ZERO1, id="ZERO1", marks=pytest.mark.slow),
        pytest.param(FSDP, id="FSDP"),
    ],
)
def test_a_list_of_unlike_layers_is_updated_one_by_one(strategy):
    mesh = hfjax.make_mesh(devices=jax.devices()[:4], data=2, fsdp=2)
    layout = hfjax.layout(Listed, ADAMW, mesh, strategy.edit(replicate_below=0))
    found, wanted = (run(layout, squared, rows(), **more) for more in (IN_BACKWARD, {}))
    assert_same(found, wanted, 1e-6)


class Mixed(nnx.Module):
    """A layer of experts that tells nothing."""

    def __init__(self, rngs):
        how = {"top_k": 1, "min_capacity": 1, "router": Router(balance_loss=0), "scale": 0.5}
        self.mixture = MoE(8, 8, experts=2, **how, rngs=rngs)

    def __call__(self, x):
        return x + self.mixture(x)[0]


class OfExperts(Stack):
    def __init__(self, rngs):
        super().__init__(1, rngs=rngs)
        self.layers = stack_layers(2, Mixed, rngs)


@pytest.mark.slow
def test_the_norm_of_gradients_is_that_of_the_experts_of_all_devices():
    mesh, strategy = hfjax.make_mesh(devices=jax.devices()[:2], expert=2), DDP | hfjax.EXPERT
    layout = hfjax.layout(OfExperts, optax.sgd(0.1), mesh, strategy)
    found, wanted = (run(layout, squared, rows(), 1, **more) for more in (IN_BACKWARD, {}))
    assert_same(found, wanted, 1e-6)


# --- what is sent ---------------------------------------------------------------------------


def lowered(strategy, sizes, **execution):
    layout = mlp_layout(strategy.edit(replicate_below=1024), sizes, layers=LAYERS)
    return layout, hfjax.train_step(layout, next_token_loss, **IN_BACKWARD, **execution).lower(
        tokens()
    )


def elements(layout, *, split, layers=None):
    """Elements of the matrices (split) or of the small arrays (whole), of layers or others."""
    size = lambda p: math.prod(p.shape) // (LAYERS if p.stacked else 1)
    return sum(
        math.prod(p.shape)
        for p in layout.param_specs.values()
        if (size(p) >= 1024) == split and layers in (None, p.stacked)
    )


def squares(layout):
    """Bytes that tell all devices whether the gradients of a layer are finite: one number each."""
    return (
        4
        * LAYERS
        * sum(
            p.stacked and bool(p.split_dims("optimizer_state")) for p in layout.param_specs.values()
        )
    )


def test_ddp_reduces_each_gradient_once_and_those_of_a_layer_in_its_turn():
    layout, program = lowered(DDP, {"data": 4})
    found = hfjax.collectives(program)
    whole = lambda layers: sum(elements(layout, split=s, layers=layers) for s in (True, False))
    in_loop = sum(row.bytes * row.count for row in found if "loop" in row.where)
    assert in_loop == 4 * whole(True)
    assert found.total("all-reduce", "data") == 4 * whole(None) + SUMS == found.total()


@pytest.mark.parametrize("remat", ["none", "full"])
def test_fsdp_gathers_each_layer_twice_and_scatters_it_once(remat):
    layout, program = lowered(FSDP, {"fsdp": 4}, remat=remat)
    found = hfjax.collectives(program)
    in_layers = elements(layout, split=True, layers=True)
    outside = elements(layout, split=True, layers=False)
    small = elements(layout, split=False)
    assert found.total("all-gather", "fsdp") == 4 * (2 * in_layers + outside)
    assert found.total("reduce-scatter", "fsdp") == 4 * (in_layers + outside)
    assert found.total("all-reduce", "fsdp") == 4 * small + SUMS + squares(layout)


def test_a_step_that_applies_whatever_comes_tells_squares_too():
    layout, program = lowered(FSDP, {"fsdp": 4}, on_nonfinite="apply")
    small = elements(layout, split=False)
    found = hfjax.collectives(program)
    assert found.total("all-reduce", "fsdp") == 4 * small + SUMS + squares(layout)


@pytest.mark.parametrize("strategy", [ZERO1, ZERO2], ids=["ZERO1", "ZERO2"])
def test_zero_scatters_gradients_and_gathers_the_new_parameters_of_each_layer(strategy):
    layout, program = lowered(strategy, {"data": 2, "fsdp": 2})
    found, both = hfjax.collectives(program), ("data", "fsdp")
    large, small = elements(layout, split=True), elements(layout, split=False)
    in_layers = elements(layout, split=True, layers=True)
    assert found.total("reduce-scatter", both) == 4 * large
    assert found.total("all-gather") == 4 * in_layers
    assert found.total("all-reduce", both) == 4 * small + SUMS + squares(layout)
    assert hfjax.collectives(program.compile()).total("all-gather") == 4 * large


# --- what is held ---------------------------------------------------------------------------

EMBED, LENGTH = 512, 128
LAYER = 12 * EMBED * EMBED * 4  # bytes of one layer's kernels, and of their gradients
CARRY = LENGTH * EMBED * 4  # bytes of one row's residual stream


def temporaries(strategy, sizes, layers, **execution):
    """Bytes beside the state that a step compiled for H200s needs, one row on each."""
    count = math.prod(sizes.values())
    mesh = hfjax.make_mesh(devices=h200s(count), **sizes)
    shape = {"vocab": 1024, "length": LENGTH, "layers": layers, "heads": 8, "embed": EMBED}
    config = GPTConfig(**shape, attention=partial(dot_product, implementation="xla"))
    layout = hfjax.layout(lambda rngs: GPT(config, rngs=rngs), optax.adamw(1e-3), mesh, strategy)
    options = {"remat": "full", "compiler_options": OPTIMIZED, **execution}
    step = hfjax.train_step(layout, next_token_loss, **options)
    batch = {"tokens": jax.ShapeDtypeStruct((count, LENGTH + 1), jnp.int32)}
    memory = step.lower(batch).compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("strategy", "sizes"), [(DDP, {"data": 1}), (FSDP, {"fsdp": 8}), (ZERO1, {"data": 8})]
)
def test_no_layer_adds_its_gradient_to_what_a_step_holds(strategy, sizes):
    four, sixteen = (temporaries(strategy, sizes, n, **IN_BACKWARD) for n in (4, 16))
    assert 0.99 * CARRY <= (sixteen - four) / 12 <= 2.5 * CARRY < 0.06 * LAYER
    assert four <= 3.5 * LAYER
    if strategy is not FSDP:  # whose gradients are an eighth
        four, sixteen = (temporaries(strategy, sizes, n) for n in (4, 16))
        assert (sixteen - four) / 12 >= LAYER + CARRY


# --- a step that is not finite --------------------------------------------------------------


class Fragile(nnx.Module):
    """Layer `at` divides by what may be zero: only its gradients, and those below, feel it."""

    def __init__(self, rngs):
        self.before = nnx.Param(jnp.ones((4, 4)))
        self.layers = stack_layers(LAYERS, lambda rngs: Root(rngs), rngs)

    def embed(self, batch):
        return batch["x"] @ self.before[...], batch["x"][:, 0]

    def head(self, stream):
        return stream[0]


class Root(nnx.Module):
    """Adds the root of its own number, whose derivative is infinite at zero."""

    def __init__(self, rngs):
        self.own = nnx.Param(jnp.ones((4,)))
        self.kernel = nnx.Param(0.3 * jax.random.normal(rngs.params(), (4, 4)))

    def __call__(self, stream):
        x, beside = stream
        root = jnp.sqrt(jnp.abs(self.own[...]))[None]
        return x @ self.kernel[...] + root, beside


def plain(outputs, batch):
    return jnp.square(outputs - batch["y"]).sum(axis=1).mean()


def broken(layout, layer):
    """A state in which the gradient of one layer is not finite, but its loss is."""
    state = hfjax.init(layout)
    own = state.params["layers"]["own"]
    state.params["layers"]["own"] = jax.device_put(own.at[layer].set(0.0), own.sharding)
    return state


def small_layout(model: Any = Fragile, optimizer: Any = ADAMW, **sizes: int):
    sizes = sizes or {"fsdp": 2}
    mesh = hfjax.make_mesh(devices=jax.devices()[: math.prod(sizes.values())], **sizes)
    strategy = FSDP.edit(replicate_below=0) if "fsdp" in sizes else DDP
    return hfjax.layout(model, optimizer, mesh, strategy)


def changed(before, after):
    """Which layers have other parameters, and whether the ends have."""
    apart = jax.tree.map(lambda a, b: np.asarray(a) != np.asarray(b), before, after)
    kernel = apart["layers"]["kernel"]
    return [i for i in range(LAYERS) if kernel[i].any()], bool(apart["before"].any())


def test_a_layer_whose_gradient_is_not_finite_and_all_below_stay_as_they_are():
    layout = small_layout()
    step = hfjax.train_step(layout, plain, **IN_BACKWARD)
    state = broken(layout, 1)
    before = hfjax.full_array((state.params, state.optimizer))
    state, metrics = step(state, rows())
    after = hfjax.full_array((state.params, state.optimizer))
    assert np.isfinite(float(metrics["loss"]))
    assert not metrics["finite"]
    assert changed(before[0], after[0]) == ([2], False)
    count = lambda kept: [int(x) for x in jax.tree.leaves(kept) if x.dtype == np.int32]
    assert count(after[1]) == count(before[1])
    with pytest.raises(FloatingPointError, match=r"took that step.*layers/own \(3, 4\) of layer 1"):
        step.check(state)


def by_weight(outputs, batch):
    apart = jnp.square(outputs - batch["y"]).sum(axis=1)
    return Mean((batch["weight"] * apart).sum(), batch["weight"].sum())


def test_a_loss_that_is_not_finite_changes_nothing():
    """Neither if it is infinite, nor if no row weighs anything, whose total is finite."""
    step = hfjax.train_step(small_layout(), by_weight, on_nonfinite="skip", **IN_BACKWARD)
    state = hfjax.init(step.layout)
    before = hfjax.full_array(state.params)
    for y, weight in ((np.inf, 1.0), (0.0, 0.0)):
        batch = rows()
        batch["y"][0, 0] = y
        state, _ = step(state, batch | {"weight": np.full(len(batch["y"]), weight, np.float32)})
        assert changed(before, hfjax.full_array(state.params)) == ([], False)
        with pytest.warns(RuntimeWarning, match=r"changed no parameter.*It was skipped"):
            step.check(state)


def test_apply_updates_whatever_comes():
    layout = small_layout()
    step = hfjax.train_step(layout, plain, on_nonfinite="apply", **IN_BACKWARD)
    state = broken(layout, 1)
    before = hfjax.full_array(state.params)
    state, _ = step(state, rows())
    assert changed(before, hfjax.full_array(state.params)) == ([0, 1, 2], True)


# --- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("execution", "message"),
    [
        (
            {"max_grad_norm": 1.0},
            r"max_grad_norm=1.0 with optimizer_in_backward=True: .* needs the norm .*optax.clip",
        ),
        (
            {"gradient_accumulation_steps": 2},
            r"_steps=2 with .* keeps the gradients of all layers.*gradient_accumulation_steps=1",
        ),
        (
            {"schedule": Schedule("gpipe", 2)},
            r"schedule gpipe with .*: a schedule runs backward passes of several",
        ),
        ({"remat": "every:2"}, r"every:2.* with .* recomputes several layers together"),
        (
            {"offload": hfjax.Offload(ratio=0.5)},
            r"offload=0.5 with .* hfjax's own loop over layers",
        ),
    ],
)
def test_what_needs_all_gradients_at_once_is_refused(execution, message):
    layout = stack_layout(DDP, {"data": 1})
    with pytest.raises(ValueError, match=message):
        hfjax.train_step(layout, squared, **IN_BACKWARD, **execution)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
        optax.lamb(1e-3),
        optax.adafactor(1e-3),
        optax.contrib.muon(1e-3, muon_weight_dimension_numbers=of_stacks),
    ],
    ids=["clip_by_global_norm", "LAMB", "Adafactor", "Muon"],
)
def test_an_optimizer_that_does_not_work_element_by_element_is_refused(optimizer):
    layout = stack_layout(FSDP, {"fsdp": 2}, optimizer)
    with pytest.raises(
        ValueError, match=r"an optimizer that .*, with optimizer_in_backward=True: each layer"
    ):
        hfjax.train_step(layout, squared, **IN_BACKWARD)


def test_a_norm_of_each_row_is_refused_only_where_rows_are_split():
    def update(updates, state, params=None):
        unit = lambda g: g / (1e-6 + jnp.linalg.norm(g, axis=-1, keepdims=True)) if g.size else g
        return jax.tree.map(unit, updates), state

    by_row = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    whole, split = (small_layout(optimizer=by_row, **sizes) for sizes in ({"data": 2}, {"fsdp": 2}))
    hfjax.train_step(whole, plain, **IN_BACKWARD)
    with pytest.raises(ValueError, match=r"updates .* otherwise if it is given a piece of a layer"):
        hfjax.train_step(split, plain, **IN_BACKWARD)


class Average(NamedTuple):
    """A state whose field has the name that master weights have."""

    master: Any


@pytest.mark.slow
def test_a_field_of_an_optimizer_that_is_called_master_is_no_master_weight():
    def update(updates, state, params=None):
        mixed = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.master, updates)
        return jax.tree.map(lambda m: -0.1 * m, mixed), Average(mixed)

    zeros = lambda params: Average(jax.tree.map(jnp.zeros_like, params))
    mixing = optax.GradientTransformation(zeros, update)
    for optimizer in (mixing, hfjax.optimizers.master_weights(mixing)):
        layout = stack_layout(DDP, {"data": 2}, optimizer)
        found, wanted = (run(layout, squared, rows(), **more) for more in (IN_BACKWARD, {}))
        assert_same(found, wanted, 1e-2 if optimizer is not mixing else 1e-5)


def test_a_model_in_one_piece_is_refused():
    layout = hfjax.layout(
        lambda rngs: nnx.Linear(4, 4, rngs=rngs), ADAMW, hfjax.make_mesh(data=1), DDP
    )
    with pytest.raises(
        ValueError, match=r"with a model in one part: .*not in three parts: methods embed"
    ):
        hfjax.train_step(layout, plain, **IN_BACKWARD)


class Counting(Root):
    """Writes to a variable."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.seen = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, stream):
        self.seen[...] = self.seen[...] + 1
        return super().__call__(stream)


class Written(Fragile):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.layers = stack_layers(LAYERS, lambda rngs: Counting(rngs), rngs)


def test_layers_that_write_to_variables_are_refused():
    layout = small_layout(Written)
    step = hfjax.train_step(layout, plain, **IN_BACKWARD)
    with pytest.raises(
        ValueError,
        match=r"a layer writes to layers/seen: with optimizer_in_backward, .* layers run",
    ):
        step.lower(rows())
