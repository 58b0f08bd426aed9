"""Parameters that are given start a run under any strategy as they do on one device."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax import DDP, FSDP, HOST_OPTIMIZER, HOST_PARAMETERS, PIPE, TENSOR, ZERO1, Schedule
from hfjax.models.gpt import next_token_loss
from hfjax.parallel.offload.host_memory import to_device
from hfjax.utils.paths import flatten, nest
from tests.small_gpt import mlp_layout, tokens

ONE = jax.devices()[:1]
INTERLEAVED = Schedule("interleaved", 2)
ROWS = {"x": np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)}


class Listed(nnx.Module):
    """A model in three parts whose layers are a list of unlike ones."""

    def __init__(self, rngs):
        wide, narrow = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
        last = nnx.Linear(8, 8, rngs=rngs)
        self.layers = nnx.List([wide, narrow, last])
        self.before, self.after = nnx.LayerNorm(8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

    def embed(self, batch):
        return self.before(batch["x"])

    def head(self, x):
        return {"y": self.after(x), "x": x}

    def __call__(self, batch):
        x = self.embed(batch)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def squares(outputs, batch):
    return (outputs["y"] ** 2).mean()


def listed(strategy, sizes, optimizer=None, devices=None):
    mesh = hfjax.make_mesh(devices=devices, **sizes)
    strategy = strategy.edit(replicate_below=0)
    return hfjax.layout(Listed, optimizer or optax.adamw(1e-2), mesh, strategy)


def adam(**_):
    return optax.adamw(1e-2, eps=1e-4)


# name: strategy, mesh, schedule, what makes the optimizer of adamw, layers are a list
CASES: dict[str, tuple] = {
    "FSDP": (FSDP, {"fsdp": 4}, None, adam, False),
    "FSDP+TENSOR": (FSDP | TENSOR, {"fsdp": 2, "tensor": 2}, None, adam, False),
    "PIPE, interleaved": (PIPE | ZERO1, {"pipe": 2, "data": 2}, INTERLEAVED, adam, False),
    "PIPE, padded": (PIPE, {"pipe": 3}, Schedule("gpipe", 2), adam, False),
    "PIPE, a list": (PIPE | FSDP, {"pipe": 2, "fsdp": 2}, Schedule("1f1b", 2), adam, True),
    "a list": (FSDP, {"fsdp": 4}, None, adam, True),
    "HOST_PARAMETERS": (
        FSDP | HOST_OPTIMIZER | HOST_PARAMETERS,
        {"fsdp": 2},
        None,
        lambda: hfjax.optimizers.master_weights(adam()),
        False,
    ),
    "master": (ZERO1, {"data": 2}, None, lambda: hfjax.optimizers.master_weights(adam()), False),
    "ema": (
        PIPE | FSDP,
        {"pipe": 2, "fsdp": 2},
        INTERLEAVED,
        lambda: hfjax.optimizers.ema(adam(), 0.5),
        False,
    ),
}


def made(name, devices=None, strategy=None, sizes=None):
    """Return the layout of a case, or the same on other devices."""
    case = CASES[name]
    make = listed if case[4] else lambda *given, **more: mlp_layout(*given, layers=4, **more)
    wanted = strategy or case[0], sizes or case[1]
    count = int(np.prod(list(wanted[1].values())))
    return make(*wanted, case[3](), devices=devices or jax.devices()[:count])


@cache
def alone(name):
    return made(name, ONE, DDP, {"data": 1})


@cache
def given(name):
    """Parameters that no seed of the test gives, in host memory: float32."""
    layout = listed(DDP, {"data": 1}, devices=ONE) if CASES[name][4] else None
    layout = layout or mlp_layout(DDP, {"data": 1}, adam(), devices=ONE, layers=4)
    return flatten(hfjax.full_array(hfjax.init(layout, seed=3).params))


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


def loss_of(name):
    return (squares, ROWS) if CASES[name][4] else (next_token_loss, tokens(rows=8))


LIKE_OTHERS = ("FSDP", "ema", "a list")  # FSDP+TENSOR; master; PIPE, a list


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LIKE_OTHERS)) for n in CASES]
)
def test_given_parameters_make_the_state_that_the_seed_makes_of_the_same_ones(name):
    layout, schedule = made(name), CASES[name][2]
    wanted = hfjax.init(layout, seed=3, schedule=schedule)
    found = hfjax.init(layout, schedule=schedule, parameters=given(name))
    same(found.params, wanted.params)
    same(found.optimizer, wanted.optimizer)
    place = lambda x: (x.sharding, x.sharding.memory_kind)
    jax.tree.map(lambda a, b: place(a) == place(b) or pytest.fail(str(place(a))), found, wanted)
    whole = flatten(hfjax.full_array(hfjax.to_model_order(layout, found).params))
    assert whole.keys() == given(name).keys()
    again = hfjax.init(layout, schedule=schedule, parameters=whole)
    same(again.params, found.params)
    same(hfjax.to_model_order(layout, again).params, hfjax.to_model_order(layout, found).params)


DAILY = ("FSDP+TENSOR", "PIPE, a list", "HOST_PARAMETERS")
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in DAILY]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DAILY, *OTHERS])
def test_a_step_from_given_parameters_is_that_of_one_device(name):
    loss, batch = loss_of(name)
    found = []
    for layout, schedule in ((made(name), CASES[name][2]), (alone(name), None)):
        state = hfjax.init(layout, schedule=schedule, parameters=given(name))
        state, metrics = hfjax.train_step(layout, loss, schedule=schedule)(state, batch)
        whole = flatten(hfjax.full_array(hfjax.to_model_order(layout, state).params))
        found.append((float(metrics["loss"]), whole))
    (loss, params), (wanted, after) = found
    assert loss == pytest.approx(wanted, rel=1e-5)
    for path, x in after.items():
        limit = 1e-5 if x.dtype == np.float32 else 1e-2
        apart = np.abs(params[path].astype(np.float32) - x.astype(np.float32)).max()
        assert apart <= limit, path


def test_a_function_is_asked_for_the_parts_of_this_process_and_each_once():
    layout, asked = made("FSDP"), []

    def part(path, slices):
        asked.append((path, tuple((s.start, s.stop) for s in slices)))
        return given("FSDP")[path][slices]

    same(hfjax.init(layout, parameters=part).params, hfjax.init(layout, seed=3).params)
    assert len(asked) == len(set(asked))
    kernel = sorted(slices for path, slices in asked if path == "layers/mlp/up/kernel")
    assert kernel == [((0, 4), (8 * i, 8 * i + 8), (0, 128)) for i in range(4)]


@pytest.mark.parametrize(
    "name", ["FSDP", "PIPE, interleaved", pytest.param("PIPE, a list", marks=pytest.mark.slow)]
)
def test_none_says_that_the_seed_gives_a_parameter(name):
    layout, schedule = made(name), CASES[name][2]
    path = min(given(name))
    wanted = given(name) | {path: flatten(hfjax.full_array(hfjax.init(alone(name)).params))[path]}
    partly = given(name) | {path: None}
    part = lambda path, at: None if partly[path] is None else given(name)[path][at]
    for source in (partly, part):
        state = hfjax.init(layout, schedule=schedule, parameters=source)
        same(hfjax.to_model_order(layout, state).params, nest(wanted))


@pytest.mark.slow
def test_the_tree_may_be_that_of_a_state_or_a_module_in_numpy_or_jax_of_another_float_dtype():
    layout = made("FSDP")
    wanted = hfjax.init(alone("FSDP"), seed=3)
    model = hfjax.to_model(alone("FSDP"), wanted)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), hfjax.full_array(wanted.params))
    for parameters in (wanted.params, nnx.state(model, nnx.Param), model, wide):
        state = hfjax.init(layout, parameters=parameters)
        same(state.params, wanted.params)
        assert all(x.dtype == np.float32 for x in jax.tree.leaves(state.params))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["FSDP", "a list", "PIPE, a list", "PIPE, padded", "PIPE, interleaved"]
)
def test_a_state_may_be_given_wherever_its_layers_lie(name):
    layout, schedule = made(name), CASES[name][2]
    state = hfjax.init(layout, schedule=schedule, seed=3)
    wanted = hfjax.full_array(hfjax.to_model_order(layout, state).params)
    for given in (state, hfjax.full_array(state), wanted):
        for to, on in ((layout, schedule), (alone(name), None)):
            found = hfjax.init(to, schedule=on, parameters=given)
            same(hfjax.to_model_order(to, found).params, wanted)
    if schedule is None:  # as the model has them
        same(hfjax.init(layout, parameters=hfjax.full_array(state.params)).params, wanted)


@pytest.mark.parametrize("name", ["PIPE, a list", "PIPE, padded"])
def test_parameters_as_a_pipeline_stores_them_are_told_what_to_give(name):
    state = hfjax.init(made(name), schedule=CASES[name][2])
    with pytest.raises(ValueError, match=r"as a pipeline stores them: give the whole state"):
        hfjax.init(alone(name), parameters=hfjax.full_array(state.params))


@pytest.mark.slow
def test_what_is_given_stays_the_users_own():
    """A step donates its state; the arrays that it was made of are none of it."""
    mine = jax.tree.map(jnp.array, hfjax.init(alone("FSDP"), seed=3).params)
    theirs = jax.tree.map(np.array, hfjax.full_array(mine))
    before = jax.tree.map(np.copy, theirs)
    for parameters in (mine, theirs):
        state = hfjax.init(alone("FSDP"), parameters=parameters)
        hfjax.train_step(alone("FSDP"), next_token_loss)(state, tokens(rows=8))
        same(parameters, before)


MESHES = {  # small models shard nothing unless told to
    "one device": (DDP, {"data": 1}),
    "DDP": (DDP, {"data": 4}),
    "ZERO1": (ZERO1.edit(replicate_below=0), {"data": 4}),
    "FSDP": (FSDP.edit(replicate_below=0), {"data": 2, "fsdp": 2}),
    "HOST_PARAMETERS": (FSDP | HOST_OPTIMIZER | HOST_PARAMETERS, {"fsdp": 4}),
}
KEEPS = {  # what an optimizer keeps of the parameters that it begins with
    "optimizer_state": lambda: optax.adam(0.1),
    "master weights": lambda: hfjax.optimizers.master_weights(optax.adam(0.1), "bfloat16"),
    "an average": lambda: hfjax.optimizers.ema(optax.adam(0.1), 0.5),
    "the parameters": lambda: optax.contrib.schedule_free_adamw(0.1),
}
take = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)


def places_of(mesh):
    """Where a user's array may lie: on one device, on each, or split over all of a mesh."""
    every = lambda spec: jax.sharding.NamedSharding(mesh, spec)
    devices = mesh.devices.flat
    return devices[0], devices[-1], every(jax.P()), every(jax.P(mesh.axis_names))


@pytest.mark.parametrize("keeps", KEEPS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.short(
    "one device-optimizer_state",
    "DDP-an average",
    "FSDP-master weights",
    "HOST_PARAMETERS-the parameters",
)
def test_an_array_that_is_given_outlives_a_state_that_is_donated_wherever_it_lay(mesh, keeps):
    strategy, sizes = MESHES[mesh]
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    on, dtypes = hfjax.make_mesh(devices=devices, **sizes), {"w": jnp.float32, "b": jnp.bfloat16}
    model = lambda rngs: {name: jnp.zeros((8, 8), dtype) for name, dtype in dtypes.items()}
    layout = hfjax.layout(model, KEEPS[keeps](), on, strategy)
    for place in places_of(on):
        whole = {name: np.full((8, 8), 3, dtype) for name, dtype in dtypes.items()}
        mine = jax.tree.map(lambda x, place=place: jax.device_put(x, place), whole)
        mine = jax.tree.map(jnp.copy, mine)  # JAX's own memory, not NumPy's
        take(to_device(hfjax.init(layout, parameters=mine)))
        same(mine, whole)


def test_a_module_and_a_state_that_are_given_outlive_a_state_that_is_donated():
    layout = made("a list", strategy=DDP, sizes={"data": 4})
    model, first = Listed(nnx.Rngs(0)), hfjax.init(layout, seed=3)
    mine = nnx.state(model), first
    before = hfjax.full_array(mine)
    for parameters in (model, first):
        take(hfjax.init(layout, parameters=parameters))
        same(hfjax.full_array(mine), before)


@pytest.mark.slow
def test_a_state_on_one_device_outlives_its_copy_in_the_models_order():
    layout, schedule = made("PIPE, a list"), Schedule("1f1b", 2)
    state = hfjax.init(layout, 3, schedule)
    mine = jax.tree.map(jnp.asarray, hfjax.full_array(state))
    take(hfjax.to_model_order(layout, mine))
    same(mine, state)


def test_paths_and_shapes_that_do_not_fit_are_told_with_both_sides():
    flat = given("FSDP")
    wrong = {path.replace("kernel", "kernl"): x for path, x in flat.items()}
    wrong |= {"tokens": flat["tokens"].T, "positions": flat["positions"].astype(np.int32)}
    with pytest.raises(ValueError, match="not those of the layout's model") as told:
        hfjax.init(made("FSDP"), parameters=wrong)
    lines = str(told.value).splitlines()
    near = "(nearest: layers/mlp/up/kern"
    assert f"  layers/mlp/up/kernel (4, 32, 128) is missing {near}l)" in lines
    assert (
        f"  layers/mlp/up/kernl float32[4, 32, 128] is no parameter of the model {near}el)" in lines
    )
    assert "  tokens is float32[32, 64], the model has float32[64, 32]" in lines
    assert "  positions is int32[24, 32], the model has float32[24, 32]" in lines
    assert "print(layout) shows them" in lines[-1]
    with pytest.raises(ValueError, match=r"\n  … and \d+ more\n") as told:
        hfjax.init(made("FSDP"), parameters={f"layer_{i}": np.ones(2) for i in range(20)})
    assert len(str(told.value).splitlines()) <= 2 + 2 * 9


@pytest.mark.parametrize(
    ("parameters", "found"),
    [
        ("weights.npz", "str"),
        ([1.0, 2.0], "list"),
        ([np.ones(2), np.ones(3)], "list"),
        ({"tokens": [1.0, 2.0]}, "dict with float at tokens/0"),
    ],
)
def test_parameters_of_another_kind_are_told_what_they_may_be(parameters, found):
    message = rf"\{{path: array\}}, .* is expected, found {found}\. print.* np\.asarray"
    with pytest.raises(ValueError, match=message):
        hfjax.init(made("FSDP"), parameters=parameters)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (lambda path, at: np.ones(3), r"returned float64\[3\]: .* of shape \(.*\) are expected"),
        (lambda path, at: given("FSDP")[path][at].astype(complex), "returned complex128"),
        (lambda path, at: [1, 2], r"parameters\('.*', \[0:.*\]\) returned int64\[2\]"),
    ],
)
def test_a_part_of_another_shape_or_kind_is_refused(part, message):
    with pytest.raises(ValueError, match=message):
        hfjax.init(made("FSDP"), parameters=part)
