"""What joins rows in a model in three parts, in embed, layers and head, is as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax.testing import assert_strategies_agree

RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(16, 4)).astype(np.float32),
    "y": RNG.normal(size=(16, 4)).astype(np.float32),
    "mask": (np.arange(16) % 3 == 0).astype(np.float32),
}


class Joins(nnx.Module):
    """Batch norm written inline, rows that attend to rows, numbers that it hands on, statistics."""

    def __init__(self, rngs, rate, writes):
        self.map, self.writes = nnx.Linear(4, 4, use_bias=False, rngs=rngs), writes
        self.drop = nnx.Dropout(rate, rngs=rngs)
        if writes:
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.seen, self.rows = nnx.BatchStat(jnp.zeros(4)), nnx.BatchStat(jnp.int32(0))
            self.most = nnx.BatchStat(jnp.float32(-9))

    def __call__(self, given):
        x, added, mean = given
        y = self.map(x)
        y = (y - y.mean(0, keepdims=True)) / jnp.sqrt(y.var(0, keepdims=True) + 1e-3)
        if self.writes:
            y = self.norm(y)
            still = jax.lax.stop_gradient(y)
            self.seen[...] += (still**4).sum(0)
            self.most[...] = jnp.maximum(self.most[...], still.max())
            self.rows[...] += len(y)
        y = x + self.drop(jnp.tanh(y) + jax.nn.softmax(y @ y.T / 4) @ y)
        return y, added + (y**2).sum(), mean * 1.01 + y.mean(0, keepdims=True)


class Model(nnx.Module):
    """A stack or a list of such layers, between an embed and a head that join rows too."""

    def __init__(self, rngs, listed=False, layers=2, rate=0.0, writes=False):
        self.into = nnx.Linear(4, 4, rngs=rngs)
        if listed:
            self.layers = nnx.List([Joins(rngs, rate, writes) for _ in range(layers)])
        else:
            make = nnx.vmap(lambda rngs: Joins(rngs, rate, writes), in_axes=0, out_axes=0)
            self.layers = nnx.split_rngs(splits=layers)(make)(rngs)
        self.out = nnx.Linear(4, 4, rngs=rngs)

    def embed(self, batch):
        return (
            self.into(batch["x"] - batch["x"].mean(0, keepdims=True)),
            jnp.float32(0),
            jnp.zeros((1, 4)),
        )

    def head(self, given):
        x, added, mean = given
        x = self.out(x)
        return {"x": x - x.max(0, keepdims=True) + mean, "added": added / 100}


def model(**options):
    return lambda rngs: Model(rngs, **options)


def loss(outputs, batch):
    """A masked mean, a number of the whole batch, and each row against all."""
    x, mask = outputs["x"], batch["mask"]
    apart = optax.softmax_cross_entropy_with_integer_labels(x @ x.T, jnp.arange(len(x)))
    masked = (((x - batch["y"]) ** 2).mean(-1) * mask).sum() / mask.sum()
    return masked + outputs["added"] / 16 + apart.mean()


STRATEGIES = {
    "DDP": (hfjax.DDP, {"data": 4}),
    "ZERO2": (hfjax.ZERO2, {"data": 2, "fsdp": 2}),
    "FSDP": (hfjax.FSDP, {"fsdp": 4}),
    "HSDP": (hfjax.HSDP, {"data": 2, "fsdp": 4}),
}
RUNS = {
    "at once": ({"writes": True}, {}),
    "microbatches, with masks of nnx.Dropout": (
        {"writes": True, "rate": 0.3},
        {"gradient_accumulation_steps": 2},
    ),
    "recomputed": ({"writes": True}, {"remat": "full"}),
    "on the host": ({"rate": 0.3}, {"offload": 0.5}),
    "updated in the backward pass": ({"rate": 0.3}, {"optimizer_in_backward": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("listed", [False, True], ids=["stack", "list"])
def test_rows_meet_anywhere_in_a_model_as_on_one_device(strategy, run, listed):
    options, execution = RUNS[run]
    case = {strategy: STRATEGIES[strategy]}
    init = model(listed=listed, **options)
    assert_strategies_agree(init, loss, BATCH, case, steps=2, **execution)


@pytest.mark.slow
@pytest.mark.parametrize("listed", [False, True], ids=["stack", "list"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_also_where_layers_are_fetched_from_the_host_one_by_one(listed, accumulate):
    case = {"on the host": (hfjax.FSDP | hfjax.HOST_PARAMETERS, {"fsdp": 4})}
    init = model(listed=listed, rate=0.3)
    assert_strategies_agree(
        init, loss, BATCH, case, steps=2, gradient_accumulation_steps=accumulate
    )


def trained(init, strategy, sizes, loss=loss, **execution):
    """Return losses and norms of gradients."""
    mesh = hfjax.make_mesh(devices=jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)
    layout = hfjax.layout(init, optax.adam(1e-2), mesh, strategy)
    step, told = hfjax.train_step(layout, loss, **execution), []
    state = hfjax.init(layout, 0, execution.get("schedule"))
    for _ in range(3):
        state, metrics = step(state, BATCH)
        told.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return told


class Remembers(nnx.Module):
    """A layer that keeps the rows it was given last: all of them, and in each row its own."""

    def __init__(self, rngs):
        self.map = nnx.Linear(4, 4, rngs=rngs)
        self.last = nnx.BatchStat(jnp.zeros((16, 4)))
        self.rows = nnx.Cache(jnp.zeros((16, 4)), axes=("batch", None))

    def __call__(self, x):
        y = jnp.tanh(self.map(x)) + 0.1 * self.last[...] + 0.1 * self.rows[...]
        self.last[...] = jax.lax.stop_gradient(y)
        self.rows[...] = jax.lax.stop_gradient(x)
        return y


class OfRemembering(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Remembers(rngs) for _ in range(2)])

    def embed(self, batch):
        return batch["x"]

    def head(self, x):
        return x


def test_variables_of_layers_hold_the_rows_of_all_devices_or_those_here():
    squares = lambda outputs, batch: ((outputs - batch["y"]) ** 2).mean()
    cases = {name: STRATEGIES[name] for name in ("DDP", "HSDP")}
    assert_strategies_agree(OfRemembering, squares, BATCH, cases, steps=3)


class Pooled(nnx.Module):
    """A stack that is handed the mean of all rows, and a number of them."""

    def __init__(self, rngs):
        make = nnx.vmap(Maps, in_axes=0, out_axes=0)
        self.layers = nnx.split_rngs(splits=4)(make)(rngs)

    def embed(self, batch):
        return batch["x"].mean(0, keepdims=True), batch["x"].sum()

    def head(self, given):
        x, number = given
        return {"x": x + 0 * x.sum(), "added": number}


class Maps(nnx.Module):
    """Hands on a sum as it is."""

    def __init__(self, rngs):
        self.map = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, given):
        x, number = given
        return jnp.tanh(self.map(x)), number * 1.5


def pooled_loss(outputs, batch):
    return ((outputs["x"] - batch["y"].mean(0, keepdims=True)) ** 2).mean() + outputs["added"] ** 2


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_what_is_linear_in_rows_is_handed_on_as_on_one_device(schedule):
    how = (
        {"schedule": hfjax.Schedule(schedule, 2)}
        if schedule
        else {"gradient_accumulation_steps": 2}
    )
    sizes = {"pipe": 2, "data": 2} if schedule else {"data": 2}
    strategy = hfjax.PIPE if schedule else hfjax.DDP
    found = trained(Pooled, strategy, sizes, pooled_loss, **how)
    wanted = trained(Pooled, hfjax.DDP, {"data": 1}, pooled_loss, gradient_accumulation_steps=2)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


PIPES = {
    "gpipe": (hfjax.PIPE | hfjax.FSDP, {"pipe": 2, "fsdp": 4}),
    "1f1b": (hfjax.PIPE, {"pipe": 2, "data": 2}),
    "1f1b-published": (hfjax.PIPE, {"pipe": 2, "data": 2}),
    "interleaved": (hfjax.PIPE, {"pipe": 2, "data": 4}),
    "zb-h1": (hfjax.PIPE, {"pipe": 2, "data": 2}),
    "zb-v": (hfjax.PIPE | hfjax.ZERO1, {"pipe": 2, "data": 4}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPES)
@pytest.mark.parametrize("listed", [False, True], ids=["stack", "list"])
def test_in_a_pipeline_microbatches_are_those_of_one_device(name, listed):
    init, (strategy, sizes) = model(layers=4, listed=listed, rate=0.3), PIPES[name]
    found = trained(init, strategy, sizes, schedule=hfjax.Schedule(name, microbatches=2))
    wanted = trained(init, hfjax.DDP, {"data": 1}, gradient_accumulation_steps=2)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipedream", "2bw"])
def test_also_where_stages_update_by_themselves(name):
    init, schedule = model(layers=4, rate=0.3), hfjax.Schedule(name, microbatches=4)
    found = trained(init, hfjax.PIPE, {"pipe": 2, "data": 2}, schedule=schedule)
    wanted = trained(init, hfjax.PIPE, {"pipe": 2}, schedule=schedule)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


class Tells(Model):
    """A model whose outputs have rows, have them elsewhere, twice, or not at all."""

    def head(self, given):
        found = super().head(given)
        x = found["x"]
        return {**found, "mean": x.mean(), "across": x.T, "pairs": x @ x.T}


EVALUATED = {
    "DDP": hfjax.DDP,
    "FSDP": hfjax.FSDP,
    "HOST_PARAMETERS": hfjax.FSDP | hfjax.HOST_PARAMETERS,
}


@pytest.mark.short("FSDP-list")
@pytest.mark.parametrize("listed", [False, True], ids=["stack", "list"])
@pytest.mark.parametrize("strategy", EVALUATED)
def test_evaluations_and_outputs_are_those_of_one_device(listed, strategy):
    init = lambda rngs: Tells(rngs, listed=listed, rate=0.3)

    def found(strategy, sizes):
        mesh = hfjax.make_mesh(devices=jax.devices()[: sizes.get("fsdp", 1)], **sizes)
        layout = hfjax.layout(init, optax.sgd(0.1), mesh, strategy)
        state = hfjax.init(layout)
        outputs = hfjax.full_array(hfjax.predict_step(layout)(state, BATCH))
        return {**outputs, **hfjax.eval_step(layout, loss)(state, BATCH)}

    wanted = found(hfjax.DDP, {"data": 1})
    told = found(EVALUATED[strategy], {"fsdp": 4})
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, told, wanted)


def test_a_step_tells_where_rows_meet_in_each_part():
    layout = hfjax.layout(model(), optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP)
    step = hfjax.train_step(layout, loss)
    step.lower(BATCH)
    told = str(step.batch_comms)
    for part, times in (("embed", "once"), ("__call__", "2 times"), ("head", "once")):
        lines = [line for line in told.splitlines() if f"({part})" in line or f".{part})" in line]
        assert any(line.endswith(times) for line in lines), told


@pytest.mark.parametrize("sizes", [{"data": 2, "tensor": 2}, {"tensor": 2}])
def test_split_rows_refuses_layers_in_which_rows_meet(sizes):
    mesh = hfjax.make_mesh(devices=jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)
    names = {"layers/map/kernel": ("layers", None, "mlp")}

    class Joining(nnx.Module):
        def __init__(self, rngs):
            self.map = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return self.map(x) - x.mean(0, keepdims=True)

    class Alone(nnx.Module):
        def __init__(self, rngs):
            self.out = nnx.Linear(4, 4, rngs=rngs)
            make = nnx.vmap(Joining, in_axes=0, out_axes=0)
            self.layers = nnx.split_rngs(splits=2)(make)(rngs)

        def embed(self, batch):
            return batch["x"]

        def head(self, x):
            return self.out(x)

    layout = hfjax.layout(Alone, optax.sgd(0.1), mesh, hfjax.TENSOR, axes=names)
    step = hfjax.train_step(
        layout, lambda o, b: ((o - b["y"]) ** 2).mean(), tensor_overlap_chunks=2
    )
    with pytest.raises(
        ValueError, match=r"tensor_overlap_chunks=2: .*__call__.*: a layer mixes examples"
    ):
        step(hfjax.init(layout), BATCH)
