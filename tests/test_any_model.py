"""What a model is made of: modes, statistics, constants, names, keys, rows of state, bare trees."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

import hfjax
from hfjax.models.stateful import StatefulModel
from hfjax.parallel.strategy import DDP, FSDP, TENSOR
from hfjax.testing import assert_strategies_agree
from tests.test_parameters_as_data import BATCH, CASES, on_x, squares

ONE: Any = {"devices": jax.devices()[:1]}
FOUR = {"devices": jax.devices()[:4], "data": 2, "fsdp": 2}
SPLIT = FSDP.edit(replicate_below=0)


def linear(rngs):
    return nnx.Linear(8, 8, rngs=rngs)


@pytest.fixture(
    params=[("FSDP",), pytest.param(("DDP", "ZERO1"), marks=pytest.mark.slow)], ids=" ".join
)
def agree(request):
    """A function that compares some of CASES with one device: every day FSDP, which gathers."""
    cases = {name: CASES[name] for name in request.param}

    def compared(init, loss=squares, forward: Any = on_x, **options):
        return assert_strategies_agree(
            init, loss, BATCH, cases, steps=2, forward=forward, **options
        )

    return compared


def plan(init, mesh: Any = FOUR, forward: Any = on_x, **options):
    strategy = DDP if mesh is ONE else SPLIT
    layout = hfjax.layout(
        init, optax.sgd(0.1), hfjax.make_mesh(**mesh), strategy, forward=forward, **options
    )
    return layout, hfjax.init(layout)


def losses(init, mesh=FOUR, batch=BATCH, steps=2, loss=squares, **options):
    """Return the losses of some steps, and that of an evaluation after them."""
    layout, state = plan(init, mesh, **options)
    step, found = hfjax.train_step(layout, loss), []
    for _ in range(steps):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return [*found, float(hfjax.eval_step(layout, loss)(state, batch)["loss"])]


def lower(init, mesh=FOUR, batch=BATCH, loss=squares, forward: Any = on_x, **options):
    """Lower a step, which tells and refuses whatever does not depend on numbers."""
    strategy, on = SPLIT, hfjax.make_mesh(**mesh)
    layout = hfjax.layout(init, optax.sgd(0.1), on, strategy, forward=forward, **options)
    return hfjax.train_step(layout, loss).lower(batch)


# -- modes ----------------------------


class Backbone(nnx.Module):
    """Has a frozen part (statistics as they are, no dropout) and one that trains."""

    def __init__(self, *, rngs):
        self.up = linear(rngs)
        self.frozen = nnx.BatchNorm(8, use_running_average=True, rngs=rngs)
        self.still = nnx.Dropout(0.9, deterministic=True, rngs=rngs)
        self.free = nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x):
        return self.free(self.still(self.frozen(self.up(x))))


@pytest.mark.slow
def test_a_step_keeps_the_mode_in_which_each_part_was_built_and_evaluation_switches_all(agree):
    init = lambda rngs: Backbone(rngs=rngs)
    agree(init)
    layout, state = plan(init)
    plain = float(squares(hfjax.to_model(layout, state)(BATCH["x"]), BATCH))
    model = hfjax.to_model(layout, state)
    model.eval()
    evaluated = float(squares(model(BATCH["x"]), BATCH))
    got = float(hfjax.eval_step(layout, squares)(state, BATCH)["loss"])
    np.testing.assert_allclose(got, evaluated, rtol=1e-5)
    state, metrics = hfjax.train_step(layout, squares)(state, BATCH)
    np.testing.assert_allclose(float(metrics["loss"]), plain, rtol=1e-5)
    changed = hfjax.full_array(state.variables)
    assert not changed["frozen"]["mean"].any()
    assert changed["free"]["mean"].any()


# -- BatchNorm ----------------------------


class Normed(nnx.Module):
    def __init__(self, axis_name=None, *, rngs):
        self.up, self.norm = linear(rngs), nnx.BatchNorm(8, axis_name=axis_name, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.up(x))


class LinenNormed(linen.Module):
    axis_name: Any = None

    @linen.compact
    def __call__(self, x, train):
        x = linen.Dense(8)(x)
        return linen.BatchNorm(use_running_average=not train, axis_name=self.axis_name)(x)


def linen_normed(axis_name):
    module = LinenNormed(axis_name)
    return lambda rngs: nnx.bridge.ToNNX(module, rngs=rngs).lazy_init(BATCH["x"], train=False)


def with_mode(model, batch, train):
    return model(batch["x"], train=train, mutable=["batch_stats"] if train else False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "axis_name", [None, *(pytest.param(x, marks=pytest.mark.slow) for x in ("batch", "data"))]
)
def test_batch_norm_is_over_the_rows_of_all_devices_as_on_one_whatever_its_axis_is_called(
    agree,
    axis_name,
):
    agree(lambda rngs: Normed(axis_name, rngs=rngs))
    agree(linen_normed(axis_name), forward=with_mode)
    assert losses(linen_normed(axis_name), forward=with_mode) == pytest.approx(
        losses(linen_normed(axis_name), ONE, forward=with_mode), rel=1e-5
    )


def test_batch_norm_over_the_rows_of_each_device_on_request_and_the_layout_tells():
    init = lambda rngs: Normed(rngs=rngs)
    one, own = losses(init, ONE), losses(init, sync_batch_norm=False)
    assert losses(init) == pytest.approx(one, rel=1e-5)
    assert own != pytest.approx(one, rel=1e-2)
    assert losses(linen_normed(None), forward=with_mode, sync_batch_norm=False) != pytest.approx(
        losses(linen_normed(None), ONE, forward=with_mode), rel=1e-2
    )
    assert "BatchNorm (1): normalises over the examples of all devices" in str(plan(init)[0])


class LinenNorms(linen.Module):
    def setup(self):
        self.shared, self.other = (linen.BatchNorm(use_running_average=False) for _ in range(2))

    def __call__(self, x):
        return self.other(self.shared(self.shared(x)))


class TwoLinenNorms(nnx.Module):
    def __init__(self, *, rngs):
        self.first, self.second = (
            nnx.bridge.ToNNX(LinenNorms(), rngs=rngs).lazy_init(BATCH["x"]) for _ in range(2)
        )
        self.third = nnx.BatchNorm(8, rngs=rngs)


@pytest.mark.slow
def test_the_layout_counts_batch_norms_of_linen_whose_modules_exist_in_calls_only():
    layout = lambda make, **options: str(plan(make, **options)[0])
    assert "BatchNorm (5): normalises over the examples of all" in layout(
        lambda rngs: TwoLinenNorms(rngs=rngs)
    )
    bare = lambda rngs: LinenNormed(None).init(rngs.params(), BATCH["x"], train=False)
    before = linen_normed(None)(nnx.Rngs(0))
    for make in (linen_normed(None), bare, lambda rngs: before):
        told = layout(make, sync_batch_norm=False)
        assert "BatchNorm (1): normalises over the examples of each device" in told
    assert "BatchNorm" not in layout(lambda rngs: linear(rngs))


class Masked(nnx.Module):
    def __init__(self, kind, *, rngs):
        self.norm, self.up = kind(rngs), linear(rngs)

    def __call__(self, batch):
        return self.up(self.norm(batch["x"], mask=batch["x"][:, :1] > 0))


LINEN = linen.BatchNorm(use_running_average=False)
MASKED = {
    "nnx": lambda rngs: nnx.BatchNorm(8, rngs=rngs),
    "linen": lambda rngs: nnx.bridge.ToNNX(LINEN, rngs=rngs).lazy_init(BATCH["x"]),
}


@pytest.mark.parametrize("kind", MASKED)
@pytest.mark.short("nnx")
def test_batch_norm_with_a_mask_is_over_the_rows_of_all_devices_that_count(kind):
    def forward(model, batch):
        more = {"mutable": ["batch_stats"]} if kind == "linen" else {}
        return model.up(model.norm(batch["x"], mask=batch["x"][:, :1] > 0, **more))

    init = lambda rngs: Masked(MASKED[kind], rngs=rngs)
    assert losses(init, forward=forward) == pytest.approx(
        losses(init, ONE, forward=forward), rel=1e-5
    )


# -- variables that a step writes to ----------------------------


class Writes(nnx.Module):
    """Writes what `change(old, x)` says to a variable."""

    def __init__(self, value, change, *, rngs):
        self.up, self.held, self.change = linear(rngs), nnx.Variable(value), change

    def __call__(self, x):
        self.held.set_value(self.change(self.held[...], x))
        return self.up(x)


def written(value, change):
    layout, state = plan(lambda rngs: Writes(value, change, rngs=rngs))
    state, _ = hfjax.train_step(layout, squares)(state, BATCH)
    return hfjax.full_array(state.variables)["held"]


def test_a_variable_is_the_average_of_what_devices_write_to_it():
    found = written(jnp.float32(0), lambda old, x: x.mean())
    assert float(found) == pytest.approx(float(BATCH["x"].mean()), rel=1e-5)


@pytest.mark.parametrize("strategy", [SPLIT, SPLIT | hfjax.HOST_OPTIMIZER], ids=["device", "host"])
def test_a_step_that_is_not_finite_writes_to_no_variable(strategy):
    init = lambda rngs: Writes(jnp.float32(0), lambda old, x: old + 1, rngs=rngs)
    mesh, bad = hfjax.make_mesh(**FOUR), lambda outputs, batch: squares(outputs, batch) * np.nan
    layout = hfjax.layout(init, optax.adam(0.1), mesh, strategy, forward=on_x)
    step = hfjax.train_step(layout, bad, on_nonfinite="skip")
    state, metrics = step(hfjax.init(layout), BATCH)
    assert not metrics["finite"]
    assert float(hfjax.full_array(state.variables)["held"]) == 0


def test_narrow_variables_are_averaged_in_float32():
    half = written(jnp.ones(3, jnp.bfloat16), lambda old, x: old * jnp.bfloat16(0.5))
    assert (half.dtype, float(half[0])) == (jnp.bfloat16, 0.5)
    assert written(jnp.float16(60000), lambda old, x: old + 0) == 60000


def test_whole_numbers_count_the_rows_of_all_devices():
    positive = lambda x: (x[:, 0] > 0).sum()
    count = (BATCH["x"][:, 0] > 0).sum()
    assert written(jnp.int32(0), lambda old, x: old + positive(x)) == count
    summed = lambda old, x: old + jax.lax.psum(positive(x), ("data", "fsdp"))
    assert written(jnp.int32(0), summed) == count  # it sees one device
    assert written(jnp.int32(0), lambda old, x: old + len(x)) == len(BATCH["x"])
    assert written(jnp.array(False), lambda old, x: True)


def test_a_variable_keeps_its_shape_and_dtype():
    with pytest.raises(ValueError, match=r"held \(3,\) float32: the model writes \(3,\) int32"):
        written(jnp.ones(3), lambda old, x: old.astype(jnp.int32))


# -- arrays that are no variables ----------------------------


class Tables(nnx.Module):
    """Holds arrays in every way but a Variable, and a list of one."""

    def __init__(self, *, rngs):
        self.up = linear(rngs)
        self.jax = jnp.arange(8.0)
        self.numpy = np.arange(8, dtype=np.float32)
        self.data = nnx.data(np.arange(8))
        self.tree = nnx.data({"a": [jnp.ones(8)]})

    def __call__(self, x):
        held = self.jax + self.numpy + self.data + self.tree["a"][0]
        return self.up(x) + held[None]


def test_arrays_that_are_no_variables_are_constants_of_the_state(agree):
    init = lambda rngs: Tables(rngs=rngs)
    agree(init)
    layout, state = plan(init)
    assert set(state.variables) == {"jax", "numpy", "data", "tree"}
    before = hfjax.full_array(state.variables)
    state, _ = hfjax.train_step(layout, squares)(state, BATCH)
    jax.tree.map(np.testing.assert_array_equal, before, hfjax.full_array(state.variables))
    np.testing.assert_array_equal(hfjax.to_model(layout, state).jax, np.arange(8.0))


# -- names of axes that models of flax have ----------------------------


def named(rngs):
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
    back = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("mlp", "embed"))
    return nnx.Sequential(
        nnx.Linear(8, 16, kernel_init=init, use_bias=False, rngs=rngs),
        nnx.tanh,
        nnx.Linear(16, 8, kernel_init=back, use_bias=False, rngs=rngs),
    )


class LinenNamed(linen.Module):
    @linen.compact
    def __call__(self, x):
        lecun = linen.initializers.lecun_normal()
        up = linen.with_logical_partitioning(lecun, ("embed", "mlp"))
        down = linen.with_logical_partitioning(lecun, ("mlp", "embed"))
        x = jnp.tanh(linen.Dense(16, kernel_init=up, use_bias=False)(x))
        return linen.Dense(8, kernel_init=down, use_bias=False)(x)


def linen_named(rngs):
    return nnx.bridge.ToNNX(LinenNamed(), rngs=rngs).lazy_init(BATCH["x"])


@pytest.mark.parametrize("init", [named, linen_named])
@pytest.mark.short("named")
def test_names_that_a_model_has_for_its_axes_are_the_logical_axes_of_strategies(init):
    layout = hfjax.layout(
        init, optax.sgd(0.1), hfjax.make_mesh(data=4, tensor=2), TENSOR, forward=on_x
    )
    assert list(layout.specs.values()) == [P(None, "tensor"), P("tensor")]
    cases = {"TENSOR": (TENSOR, {"data": 2, "tensor": 2}), "FSDP": CASES["FSDP"]}
    assert_strategies_agree(init, squares, BATCH, cases, steps=2, forward=on_x)


# -- recurrent nets ----------------------------


def by_scan(rngs):
    """A cell whose first carry is a constant, in the user's own scan, on a bare tree."""
    return {"w": jax.random.normal(rngs.params(), (16, 8)) / 4, "b": jnp.zeros(8)}


def run_scan(params, batch):
    def cell(h, x):
        h = jnp.tanh(jnp.concatenate([h, x], -1) @ params["w"] + params["b"][None])
        return h, None

    steps = jnp.stack([batch["x"]] * 3)
    return jax.lax.scan(cell, jnp.zeros_like(batch["x"]), steps)[0]


# Orthogonal kernels, as cells have by default, take long to compile.
NORMAL: Any = {"recurrent_kernel_init": nnx.initializers.lecun_normal()}


class LinenRecurrent(linen.Module):
    cell: Any

    @linen.compact
    def __call__(self, x):
        h: Any = x.reshape(len(x), 2, 4)
        h = linen.RNN(self.cell(8, **NORMAL))(h)
        return h[:, -1]


class Layered(nnx.Module):
    """Three parts, whose layers are recurrent."""

    def __init__(self, cell, *, rngs):
        self.layers = nnx.List([nnx.RNN(cell(8, 8, **NORMAL, rngs=rngs)) for _ in range(2)])

    def embed(self, batch):
        return jnp.stack([batch["x"]] * 3, 1)

    def head(self, x):
        return x[:, -1]


@pytest.mark.slow
def test_loops_that_begin_with_constants_need_no_edit(agree):
    agree(by_scan, lambda outputs, batch: squares(outputs, batch), forward=run_scan)


LONG = (linen.LSTMCell, linen.GRUCell)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [linen.SimpleCell, *(pytest.param(x, marks=pytest.mark.slow) for x in LONG)],
)
def test_recurrent_nets_of_flax_need_no_edit(agree, cell):
    init = lambda rngs: nnx.bridge.ToNNX(LinenRecurrent(cell), rngs=rngs).lazy_init(BATCH["x"])
    agree(init)


PIPED = {"1F1B": (hfjax.PIPE | DDP, {"pipe": 2}, {"schedule": hfjax.Schedule("1f1b", 2)})}
BY_MESH = {"HSDP": (SPLIT, {"data": 2, "fsdp": 2})}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "cases"),
    [
        (nnx.SimpleCell, PIPED),
        pytest.param(nnx.LSTMCell, PIPED, marks=pytest.mark.slow),
        pytest.param(nnx.LSTMCell, BY_MESH, marks=pytest.mark.slow),
    ],
)
def test_recurrent_layers_of_a_model_in_three_parts_also_in_a_pipeline(cell, cases):
    assert_strategies_agree(lambda rngs: Layered(cell, rngs=rngs), squares, BATCH, cases, steps=2)


class Dropped(nnx.Module):
    """Three parts, whose layers drop by nnx's own generator, which counts in a variable."""

    def __init__(self, rate, *, rngs):
        layer = lambda: nnx.Sequential(linear(rngs), nnx.Dropout(rate, rngs=rngs))
        self.layers = nnx.List([layer(), layer()])

    def embed(self, batch):
        return batch["x"]

    def head(self, x):
        return x


@pytest.mark.slow
def test_dropout_of_flax_works_in_the_layers_of_a_pipeline():
    mesh = hfjax.make_mesh(devices=jax.devices()[:2], pipe=2)
    init = lambda rngs: Dropped(0.5, rngs=rngs)
    layout = hfjax.layout(init, optax.sgd(0.0), mesh, hfjax.PIPE | hfjax.DDP)
    step = hfjax.train_step(layout, squares, schedule=hfjax.Schedule("1f1b", 2))
    state, found = hfjax.init(layout), []
    whole = hfjax.to_model_order(layout, state)
    before, model = hfjax.full_array(whole.params), hfjax.to_model(layout.model_layout, whole)
    model.eval()
    plain = functools.reduce(lambda x, layer: layer(x), model.layers, BATCH["x"])
    for _ in range(2):
        state, metrics = step(state, BATCH)
        found.append(float(metrics["loss"]))
    after = hfjax.full_array(hfjax.to_model_order(layout, state).params)
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert len({*found, float(squares(plain, BATCH))}) == 3


# -- random keys ----------------------------


def with_row_keys(model, batch, example_keys):
    """Noise by row, which no mesh changes."""
    if example_keys is None:
        return model(batch["x"])
    noise = jax.vmap(lambda key: jax.random.normal(key, (8,)))(example_keys)
    return model(batch["x"]) + noise


def with_key(model, batch, key):
    noise = 0 if key is None else jax.random.normal(key, batch["x"].shape)
    return model(batch["x"]) * 0 + noise


@pytest.mark.slow
def test_forward_may_ask_for_a_key_of_each_row_and_every_mesh_draws_the_same(agree):
    agree(linear, forward=with_row_keys)
    agree(linear, forward=with_row_keys, gradient_accumulation_steps=2)


@pytest.mark.slow
def test_forward_may_ask_for_a_key_whose_masks_are_those_of_one_device(agree):
    agree(linear, forward=with_key)
    agree(linear, forward=with_key, gradient_accumulation_steps=2)


def test_a_key_that_forward_asks_for_differs_by_step_and_is_none_in_evaluation():
    layout, state = plan(linear, forward=with_key)
    first = lambda outputs, batch: hfjax.Mean(
        jnp.float32(0), len(outputs), {"first": outputs[0, 0], "spread": outputs.std()}
    )
    step, found = hfjax.train_step(layout, first), []
    for _ in range(2):
        state, metrics = step(state, BATCH)
        found.append((float(metrics["first"]), float(metrics["spread"])))
    assert found[0] != found[1]
    assert all(spread > 0.1 for _, spread in found)  # not one number in all rows
    assert float(hfjax.eval_step(layout, squares)(state, BATCH)["loss"]) == pytest.approx(
        float(np.mean(BATCH["y"] ** 2)), rel=1e-5
    )
    assert set(state.variables) == {"forward.key"}
    assert hfjax.full_array(state.variables)["forward.key"].shape == ()


def test_forward_that_asks_for_what_is_not_known_is_refused():
    with pytest.raises(ValueError, match=r"'rng' is not known.*`key`.*`example_keys`.*`train`"):
        plan(linear, forward=lambda model, batch, rng: model(batch["x"]))


def test_forward_that_takes_no_batch_is_refused_and_what_is_bound_stays():
    with pytest.raises(ValueError, match=r"it is called with \(model, batch\)"):
        plan(linear, forward=lambda model: model)
    twice = lambda model, batch, train: model(batch["x"]) * (2.0 if train else 1.0)
    bound = functools.partial(twice, train=False)
    assert losses(linear, forward=bound) == pytest.approx(losses(linear), rel=1e-6)


class Keyed(nnx.Module):
    """Keeps a typed key in a Variable of its own and splits it."""

    def __init__(self, *, rngs):
        self.up, self.key = linear(rngs), nnx.Variable(jax.random.key(3))

    def __call__(self, x):
        self.key[...], now = jax.random.split(self.key[...])
        return self.up(x) * 0 + jax.random.normal(now, x.shape)


def test_a_typed_key_in_a_variable_is_another_one_in_each_step():
    found = losses(lambda rngs: Keyed(rngs=rngs), steps=3)
    assert len(set(found[:3])) == 3


# -- rows of state ----------------------------


class Remembers(nnx.Module):
    """Has a row of state for each row of the batch."""

    def __init__(self, rows=16, *, rngs, **names):
        self.up, self.memory = linear(rngs), nnx.Variable(jnp.zeros((rows, 8)), **names)

    def __call__(self, x):
        self.memory[...] = 0.5 * self.memory[...] + x
        return self.up(x) + self.memory[...]


@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 2}], ids=["once", "accumulated"]
)
@pytest.mark.short("FSDP-once")
def test_a_variable_with_a_row_for_each_row_of_the_batch_is_split_as_the_batch_is(agree, options):
    init = lambda rngs: Remembers(rngs=rngs, axes=("batch", None))
    agree(init, **options)
    layout, state = plan(init)
    state, _ = hfjax.train_step(layout, squares, **options)(state, BATCH)
    assert state.variables["memory"].sharding.spec == P(("data", "fsdp"))
    np.testing.assert_allclose(hfjax.full_array(state.variables)["memory"], BATCH["x"], rtol=1e-6)


def test_rows_of_state_that_do_not_say_so_are_whole_on_every_device(agree):
    agree(lambda rngs: Remembers(rngs=rngs))


# -- bare trees ----------------------------


@jax.tree_util.register_pytree_with_keys_class
class Tree:
    """As equinox makes them: a tree with functions and numbers among its leaves, and called."""

    def __init__(self, *leaves):
        self.leaves = leaves

    def tree_flatten_with_keys(self):
        names = ("kernel", "act", "scale", "depth", "table")
        key = jax.tree_util.GetAttrKey
        return [(key(n), x) for n, x in zip(names, self.leaves, strict=True)], None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)

    def __call__(self, x):
        kernel, act, scale, depth, table = self.leaves
        for _ in range(depth):
            x = act(x @ kernel) * scale + table[None]
        return x


def test_a_tree_with_functions_and_numbers_among_its_leaves_trains_its_arrays(agree):
    def init(rngs):
        kernel = jax.random.normal(rngs.params(), (8, 8))
        return Tree(kernel, jax.nn.relu, 0.5, 2, jnp.arange(8))

    agree(init)
    layout, state = plan(init)
    assert list(layout.specs) == ["kernel"]
    assert "Python numbers stay as they are and are not trained: scale" in str(layout)
    model = hfjax.to_model(layout, state)
    assert isinstance(model, Tree)
    np.testing.assert_allclose(
        float(squares(model(BATCH["x"]), BATCH)),
        float(hfjax.eval_step(layout, squares)(state, BATCH)["loss"]),
        rtol=1e-5,
    )


def running(parameters, state, x, train):
    """As Haiku's transform_with_state makes them: (parameters, state, x) -> (y, new state)."""
    mean = jax.lax.pmean(x.mean(0), ("data", "fsdp")) if train else state["mean"]
    y = (x - mean[None]) @ parameters["w"] * parameters["depth"]
    return y, {"mean": 0.9 * state["mean"] + 0.1 * mean, "steps": state["steps"] + 1}


def with_state(model, batch, train):
    return model(lambda parameters, state: running(parameters, state, batch["x"], train))


def test_a_function_of_parameters_and_state_is_a_module_in_one_line(agree):
    def init(rngs):
        parameters = {"w": jax.random.normal(rngs.params(), (8, 8)), "depth": 2}
        return StatefulModel(parameters, {"mean": jnp.zeros(8), "steps": jnp.int32(0)})

    agree(init, forward=with_state)
    layout, state = plan(init, forward=with_state)
    step = hfjax.train_step(layout, squares)
    for _ in range(2):
        state, _ = step(state, BATCH)
    assert list(layout.specs) == ["parameters/w"]
    held = hfjax.full_array(state.variables)["state"]
    np.testing.assert_allclose(held["mean"], 0.19 * BATCH["x"].mean(0), rtol=1e-5, atol=1e-7)
    assert held["steps"] == 2


def test_a_list_comes_back_as_a_list():
    init = lambda rngs: [jnp.ones((8, 8)), {"b": jnp.zeros(8)}]
    layout, state = plan(init, forward=lambda p, batch: batch["x"] @ p[0] + p[1]["b"][None])
    first, second = hfjax.to_model(layout, state)
    assert (first.shape, second["b"].shape) == ((8, 8), (8,))


REFUSED = {
    "two arrays of one path": (
        lambda rngs: {"a/b": jnp.ones(8), "a": {"b": jnp.ones(8)}},
        r"two arrays have the path 'a/b'.*Rename it",
    ),
    "an array inside of another": (
        lambda rngs: {"a": jnp.ones(8), "a/b": jnp.ones(8)},
        r"two arrays have the path 'a/b', or a part of it",
    ),
    "a number that may be a parameter": (
        lambda rngs: {"w": jnp.ones(8), "b": 0.0},
        r"b is the Python number 0.0.*jnp.asarray\(0.0\)",
    ),
    "nothing": (lambda rngs: {}, "model_init returned dict: an nnx.Module or a pytree"),
    "rows that do not split": (
        lambda rngs: Remembers(15, rngs=rngs, axes=("batch", None)),
        r"memory \(15, 8\) .* 15 examples do not split over 4 devices",
    ),
    "complex numbers": (lambda rngs: {"w": jnp.ones(8, complex)}, "w .*complex64: .*imaginary"),
    "no array": (lambda rngs: {"a": jax.nn.relu}, r"returned no array, but \w+"),
    "a Linen module": (lambda rngs: linen.Dense(8), r"the Linen module Dense, .*ToNNX"),
    "no parameter": (lambda rngs: nnx.Dropout(0.5, rngs=rngs), "no parameters .*nnx.Param"),
    "whole numbers": (lambda rngs: {"ids": jnp.arange(8)}, r"no parameters \(1 other variables\)"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_model_is_refused_with_what_to_do(what):
    init, words = REFUSED[what]
    with pytest.raises(ValueError, match=words):
        plan(init)


@pytest.mark.parametrize("loss", [lambda o, b: jnp.int32(3), lambda o, b: (o + 0j).sum()])
def test_a_loss_that_is_no_real_number_is_refused(loss):
    with pytest.raises(ValueError, match=r"the loss is \w+: a real floating-point number"):
        lower(linear, loss=loss)


def test_a_loss_that_depends_on_no_parameter_is_told():
    with pytest.warns(UserWarning, match=r"reads 2 of 2 parameters nowhere"):
        lower(linear, loss=lambda outputs, batch: 2.0)


def test_an_array_without_elements_stays_whole(agree):
    init = lambda rngs: {"w": jnp.ones((8, 8)), "none": jnp.zeros((0, 3))}
    agree(init, forward=lambda p, batch: batch["x"] @ p["w"] + p["none"].sum())


def test_an_axis_that_no_mesh_has_is_refused_with_the_ones_that_it_has():
    loss = lambda outputs, batch: jax.lax.pmean(squares(outputs, batch), "batch")
    with pytest.raises(ValueError, match=r"names the axis 'batch'.*\"data\", \"fsdp\""):
        lower(linear, loss=loss)


def test_a_batch_without_a_field_is_refused_with_the_fields_that_it_has():
    with pytest.raises(ValueError, match=r"asks for 'y', which this batch does not have.*: x\."):
        lower(linear, batch={"x": BATCH["x"]})


class Shared(nnx.Module):
    """Its head reads a parameter of a layer."""

    def __init__(self, raw, *, rngs):
        self.layers, self.raw = nnx.List([linear(rngs), linear(rngs)]), raw

    def embed(self, batch):
        return batch["x"]

    def head(self, x):
        if self.raw:
            return x * sum(leaf.sum() for leaf in jax.tree.leaves(nnx.state(self, nnx.Param)))
        return x @ self.layers[0].kernel

    def __call__(self, batch):
        x = self.embed(batch)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("raw", [False, True])
def test_a_head_that_reads_a_layer_is_refused_and_the_way_around_is_right(agree, raw):
    init = lambda rngs: Shared(raw, rngs=rngs)
    with pytest.raises(ValueError, match=r"layers/\d/\w+ is used outside of its layer.*forward="):
        lower(init, forward=None)
    agree(init, forward=lambda model, batch: model(batch))


def test_ddp_on_one_device_is_plain_jax_for_a_module_that_is_merged_and_split():
    """A bare step of optax on nnx's own gradient, no engine involved."""
    layout = hfjax.layout(linear, optax.adam(1e-2), hfjax.make_mesh(**ONE), DDP, forward=on_x)
    state = hfjax.init(layout)
    model = hfjax.to_model(layout, state)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    step = hfjax.train_step(layout, squares)
    for _ in range(3):
        optimizer.update(model, nnx.grad(lambda m: squares(on_x(m, BATCH), BATCH))(model))
        state, _ = step(state, BATCH)
    np.testing.assert_allclose(
        hfjax.full_array(state.params)["kernel"], model.kernel[...], rtol=1e-5, atol=1e-6
    )


class RawKey(nnx.Module):
    """Keeps a raw key, which nothing tells from other numbers."""

    def __init__(self, *, rngs):
        self.up, self.key = linear(rngs), nnx.Variable(jax.random.PRNGKey(0))

    def __call__(self, x):
        draw = lambda row: jnp.where(jax.random.bernoulli(self.key[...], 0.5, (8,)), row, 0)
        return jax.lax.map(draw, self.up(x))


def closes_over(model, batch):
    return model(batch["x"]) * jax.random.bernoulli(jax.random.key(0), 0.5, (1, 8))


@pytest.mark.parametrize("what", ["a raw key", "a constant"])
@pytest.mark.short("FSDP-a raw key")
def test_random_numbers_that_each_step_draws_alike_are_those_of_one_device(agree, what):
    raw = what == "a raw key"
    agree((lambda rngs: RawKey(rngs=rngs)) if raw else linear, forward=on_x if raw else closes_over)


@pytest.mark.filterwarnings("error:random numbers")
def test_random_numbers_that_differ_are_not_told():
    lower(linear, forward=with_key)
    lower(linear, forward=with_row_keys)
    lower(lambda rngs: nnx.Sequential(linear(rngs), nnx.Dropout(0.5, rngs=rngs)))
    lower(lambda rngs: Keyed(rngs=rngs))
    by_row = lambda row: row * jax.random.normal(jax.random.key(row[0].astype(int)), (8,))
    lower(linear, forward=lambda model, batch: jax.vmap(by_row)(model(batch["x"])))


class TwoStacks(nnx.Module):
    """Two stacks of unlike depths under one name, the shallower one first by path."""

    def __init__(self, rngs):
        draw = lambda depth: jax.random.normal(rngs.params(), (depth, 8, 8)) / 4
        axes = ("layers", None, None)
        self.a, self.b = nnx.Param(draw(2), axes=axes), nnx.Param(draw(4), axes=axes)

    def __call__(self, batch):
        x = batch["x"] @ jnp.ones((batch["x"].shape[-1], 8)) / 4
        for stack in (self.a, self.b):
            x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w) + x, None), x, stack[...])
        return x


@pytest.mark.slow
def test_stacks_of_unlike_depths_are_updated_to_their_last_layer():
    cases = {
        strategy.name: (strategy.edit(replicate_below=0), {"data": 2, "fsdp": 2})
        for strategy in (hfjax.ZERO1, hfjax.ZERO2, hfjax.FSDP)
    }
    loss = lambda outputs, batch: (outputs**2).mean()
    assert_strategies_agree(TwoStacks, loss, {"x": BATCH["x"]}, cases, steps=2)
