"""What joins rows of the batch is what one device computes, in a loss and in a model."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

import hfjax
from hfjax.models.loss import token_losses
from hfjax.testing import assert_strategies_agree
from tests.small_gpt import mlps, tokens

RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(16, 4)).astype(np.float32),
    "mask": (RNG.random(16) < 0.4).astype(np.float32),
}
FOUR = {"DDP": (hfjax.DDP, {"data": 2, "fsdp": 2})}


def masked(outputs, batch):
    """The mean loss of tokens as people write it: a ratio of two sums over the batch."""
    losses, _ = token_losses(outputs, batch)
    return (losses * batch["mask"]).sum() / batch["mask"].sum()


def contrastive(outputs, batch):
    """Each row is to be nearest to itself, of all rows, by the mean of its logits."""
    of_row = outputs.mean(1)
    scores = of_row @ of_row.T
    right = jnp.arange(len(scores))
    return optax.softmax_cross_entropy_with_integer_labels(scores, right).mean()


MASK = (RNG.random((16, 24)) < np.linspace(0.05, 1, 16)[:, None]).astype(np.float32)
SPLIT = {
    "ZERO2": (hfjax.ZERO2, {"data": 4}),
    "FSDP": (hfjax.FSDP, {"fsdp": 4}),
    "TENSOR": (hfjax.DDP | hfjax.TENSOR, {"data": 2, "tensor": 2}),
    "HOST_PARAMETERS": (hfjax.FSDP | hfjax.HOST_PARAMETERS, {"fsdp": 4}),
}


@pytest.mark.short("contrastive-ZERO2")
@pytest.mark.parametrize("strategy", SPLIT)
@pytest.mark.parametrize("loss", [masked, contrastive])
def test_a_loss_that_joins_rows_trains_a_model_in_three_parts_as_one_device_does(strategy, loss):
    case = {strategy: SPLIT[strategy]}
    assert_strategies_agree(
        mlps(), loss, tokens(mask=MASK), case, steps=2, gradient_accumulation_steps=2
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("loss", [masked, contrastive])
def test_a_loss_that_joins_rows_trains_in_a_pipeline_with_the_microbatches_of_one_device(
    name, loss
):
    """One device with as many microbatches is the reference."""
    schedule = hfjax.Schedule(name, microbatches=2)
    run = {"strategy": hfjax.PIPE | hfjax.FSDP, "sizes": {"pipe": 2, "fsdp": 4}}
    found = trained(loss, **run, schedule=schedule)
    wanted = trained(loss, hfjax.DDP, {"data": 1}, gradient_accumulation_steps=2)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def trained(loss, strategy, sizes, **execution):
    """Return losses and norms of gradients."""
    mesh = hfjax.make_mesh(devices=jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)
    layout = hfjax.layout(mlps(layers=4), optax.adam(1e-2), mesh, strategy)
    step, state, told = hfjax.train_step(layout, loss, **execution), hfjax.init(layout), []
    for _ in range(3):
        state, metrics = step(state, tokens(mask=MASK))
        told.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return told


KEY = jax.random.key(0)
NUMBERED = np.linspace(0, 1, 64).astype(np.float32)
# What depends on the number of a row in its microbatch.
BY_NUMBER = {
    "keys": lambda o: jax.vmap(lambda k: jax.random.normal(k, (3,)))(jax.random.split(KEY, len(o))),
    "numbers": lambda o: jnp.arange(len(o))[:, None] * 0.1,
    "a table": lambda o: jnp.asarray(NUMBERED)[: len(o), None],
}


@pytest.mark.parametrize("what", BY_NUMBER)
@pytest.mark.short("numbers")
def test_rows_have_the_number_that_they_have_in_a_microbatch_of_one_device(what):
    loss = lambda o, b: ((o * BY_NUMBER[what](o) - 1) ** 2).mean()
    init = lambda rngs: nnx.Linear(4, 3, rngs=rngs)
    assert_strategies_agree(
        init,
        loss,
        BATCH,
        FOUR,
        steps=2,
        gradient_accumulation_steps=2,
        forward=lambda m, batch: m(batch["x"]),
    )


def test_a_solver_that_has_not_converged_is_given_the_whole_cotangent():
    def loss(params, batch):
        matrix, right = params["d"], params["b"]
        solve = lambda v: matrix.T @ (matrix @ v) + v
        found, _ = jax.scipy.sparse.linalg.cg(solve, right, maxiter=2)
        return ((batch["x"] @ found) ** 2).mean()

    draw = lambda rngs, *shape: jax.random.normal(rngs.params(), shape)
    init = lambda rngs: {"d": draw(rngs, 4, 4), "b": draw(rngs, 4, 2)}
    assert_strategies_agree(init, loss, BATCH, FOUR, steps=2)


def by_name(x):
    """Normalise and scale by the greatest, with collectives over the axis of a `vmap`."""
    mean, most = jax.lax.pmean(x, "rows"), jax.lax.pmax(jax.lax.stop_gradient(jnp.abs(x)), "rows")
    return (x - mean) / (1 + most) + jax.lax.psum(x, ("rows", "context"))


@pytest.mark.parametrize("sizes", [{"data": 4}, {"data": 2, "fsdp": 2}])
def test_collectives_over_the_axis_of_a_vmap_join_the_rows_of_all_devices(sizes):
    def forward(model, batch):
        return jax.vmap(lambda x: by_name(model(x)), axis_name="rows")(batch["x"])

    init = lambda rngs: nnx.Linear(4, 4, rngs=rngs)  # as many features as rows on a device
    case = {"DDP": (hfjax.DDP, sizes)}
    assert_strategies_agree(init, squares, BATCH, case, steps=2, forward=forward)


class Averages(nnx.Module):
    """A moving average of means: linear in what each device has."""

    def __init__(self, rngs):
        self.map, self.mean = nnx.Linear(4, 3, rngs=rngs), nnx.BatchStat(jnp.zeros(3))

    def __call__(self, batch):
        y = self.map(batch["x"])
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * jax.lax.stop_gradient(y).mean(0)
        return y


class Counts(nnx.Module):
    """Scales by the number of the microbatch."""

    def __init__(self, rngs):
        self.map, self.count = nnx.Linear(4, 3, rngs=rngs), nnx.BatchStat(jnp.float32(0))

    def __call__(self, batch):
        self.count[...] += 1
        return self.map(batch["x"]) * self.count[...]


class Masks(nnx.Module):
    """One mask for all rows of a microbatch."""

    def __init__(self, rngs):
        self.map = nnx.Linear(4, 3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, broadcast_dims=(0,), rngs=rngs)

    def __call__(self, batch):
        return self.drop(self.map(batch["x"]))


@pytest.mark.slow
@pytest.mark.parametrize("model", [Averages, Counts, Masks])
def test_what_only_microbatches_have_is_that_of_one_device(model):
    """Nothing joins rows by itself."""
    case = {"DDP": (hfjax.DDP, {"data": 2})}
    assert_strategies_agree(model, squares, BATCH, case, steps=1, gradient_accumulation_steps=2)


@pytest.mark.slow
def test_a_key_for_the_microbatch_draws_the_number_of_one_device():
    init, scaled = lambda rngs: nnx.Linear(4, 3, rngs=rngs), jax.random.uniform
    forward = lambda model, batch, key: model(batch["x"]) * scaled(key)
    assert_strategies_agree(
        init, squares, BATCH, FOUR, steps=1, gradient_accumulation_steps=2, forward=forward
    )


def centred(rows):
    return rows - rows.mean(1, keepdims=True)


REFUSED = {
    "jax.vmap is around hfjax.per_device": lambda m, b: jax.vmap(hfjax.per_device(centred))(
        jnp.stack([m(b["x"]), m(b["x"])])
    ),
    r"closes over \(hand it in as an argument\) is in hfjax.per_device": lambda m, b: (
        hfjax.per_device(lambda rows, w=m.kernel[...]: rows * w[:1, :1])(m(b["x"]))
    ),
    "differentiates, within its own program, .* in hfjax.per_device": lambda m, b: jax.grad(
        lambda x: hfjax.per_device(jnp.square)(x).sum()
    )(m(b["x"])),
    "differentiates, within its own program, with .* in hfjax.per_device": lambda m, b: jax.grad(
        lambda x: hfjax.per_device(lambda x: 2 * x + 1)(x).sum()  # whose tangent is not it
    )(m(b["x"])),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_own_rows_cannot_be_is_refused_on_several_devices(words):
    init = lambda rngs: nnx.Linear(4, 3, rngs=rngs)
    for devices in (1, 4):
        mesh = hfjax.make_mesh(devices=jax.devices()[:devices], data=devices)
        layout = hfjax.layout(init, optax.sgd(0.1), mesh, hfjax.DDP, forward=REFUSED[words])
        step = hfjax.train_step(layout, squares)
        if devices == 1:
            step.lower(BATCH)
        else:
            with pytest.raises(ValueError, match=words):
                step.lower(BATCH)


def test_a_loop_for_each_row_sends_nothing():
    def forward(model, batch):
        def count(row):
            return jax.lax.while_loop(lambda c: c < row[0], lambda c: c + 1, jnp.float32(0))

        counts = jax.lax.stop_gradient(jax.vmap(count)(batch["x"]))
        return model(batch["x"]) * counts[:, None]

    mesh, init = hfjax.make_mesh(data=8), lambda rngs: nnx.Linear(4, 3, rngs=rngs)
    layout = hfjax.layout(init, optax.sgd(0.1), mesh, hfjax.DDP, forward=forward)
    step = hfjax.train_step(layout, squares)
    assert {c.shape for c in hfjax.collectives(step.lower(BATCH))} == {(4, 3), (3,), ()}
    assert str(step.batch_comms) == "no examples meet"


class Joins(nnx.Module):
    """Batch norm written inline, a running sum, a codebook, noise for the batch, a queue."""

    def __init__(self, rngs):
        self.map = nnx.Linear(4, 4, rngs=rngs)
        self.book = nnx.BatchStat(jax.random.normal(rngs.params(), (5, 4)))
        self.used, self.most = nnx.BatchStat(jnp.zeros(5)), nnx.BatchStat(jnp.float32(-9))
        self.queue, self.at = nnx.BatchStat(jnp.zeros((32, 4))), nnx.BatchStat(jnp.int32(0))
        self.drop = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, batch):
        x = self.map(batch["x"])
        x = self.drop((x - x.mean(0, keepdims=True)) / jnp.sqrt(x.var(0, keepdims=True) + 1e-5))
        nearest = ((x[:, None] - self.book[...][None]) ** 2).sum(-1).argmin(-1)
        chosen = jax.nn.one_hot(nearest, 5)
        self.used[...] = 0.9 * self.used[...] + chosen.sum(0)
        self.book[...] = 0.9 * self.book[...] + 0.1 * (chosen.T @ x) / (1 + chosen.sum(0))[:, None]
        self.most[...] = jnp.maximum(self.most[...], x.max())
        self.queue[...] = jax.lax.dynamic_update_slice(self.queue[...], x, (self.at[...], 0))
        self.at[...] = (self.at[...] + x.shape[0]) % 32
        return x @ self.queue[...].T + self.book[nearest].sum(-1, keepdims=True)


def squares(outputs, batch):
    return (outputs**2).mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 2}], ids=["once", "accumulated"]
)
def test_a_model_that_joins_rows_writes_to_its_variables_what_one_device_writes(options):
    assert_strategies_agree(Joins, squares, BATCH, FOUR, steps=3, **options)


def step_of(loss=squares, model=lambda rngs: nnx.Linear(4, 3, rngs=rngs), **execution):
    layout = hfjax.layout(
        model, optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP, forward=lambda m, b: m(b["x"])
    )
    return layout, hfjax.train_step(layout, loss, **execution)


def ranked(outputs, batch):
    return jnp.sort(outputs[:, 0])[-3:].mean()


def test_a_step_prints_what_joins_rows_with_line_bytes_and_how_often():
    _, step = step_of(lambda o, b: ((o**2).mean(-1) * b["mask"]).sum() / b["mask"].sum())
    step.trace(BATCH)
    assert "test_global_batch.py:" in str(step.batch_comms)
    assert "div" in str(step.batch_comms)
    assert "summed over devices, 4 B  once" in str(step.batch_comms)
    _, plain = step_of()
    plain.trace(BATCH)
    assert str(plain.batch_comms) == "no examples meet"


@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_a_mean_in_bfloat16_is_complete_before_it_is_rounded_and_one_in_float32_is_free(dtype):
    """JAX sums bfloat16 in float32, and rounds what `mean` returns."""

    def loss(outputs, batch):
        assert outputs.dtype == jnp.bfloat16
        return hfjax.Mean(0.0, 1.0, {"first": outputs[:, 0].mean(dtype=dtype)})

    init = lambda rngs: nnx.Linear(4, 3, rngs=rngs)
    layout, step = step_of(loss, init, precision="bf16", gradient_accumulation_steps=2)
    sent = hfjax.collectives(step.lower(BATCH))
    kept = {row.kind for row in sent} == {"all-reduce"} and str(
        step.batch_comms
    ) == "no examples meet"
    assert kept == (dtype is not None)
    assert kept or "convert_element_type  summed over devices, 4 B" in str(step.batch_comms)
    found = float(step(hfjax.init(layout), BATCH)[1]["first"])
    one, forward = hfjax.make_mesh(devices=jax.devices()[:1]), lambda m, b: m(b["x"])
    alone = hfjax.layout(init, optax.sgd(0.1), one, hfjax.DDP, forward=forward)
    step = hfjax.train_step(alone, loss, precision="bf16", gradient_accumulation_steps=2)
    np.testing.assert_allclose(found, step(hfjax.init(alone), BATCH)[1]["first"], rtol=1e-2)


def test_what_no_rule_runs_on_parts_is_told_where_it_is_much_and_refused_on_request():
    """Much is 1 MiB, or 1 % of the bytes of the gradients."""
    wide = lambda rngs: nnx.Linear(4, 2**17, rngs=rngs)  # 2.6 MB of gradients
    _, step = step_of(ranked, wide)
    rows = lambda count: {"x": np.ones((count, 4), np.float32)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.trace(rows(16))
    told = r"test_global_batch.py.*sort: examples meet, .* gathers .*per_device"
    with pytest.warns(UserWarning, match=told):
        step.trace(rows(2**13))  # 32 KiB
    _, step = step_of(ranked, lambda rngs: nnx.Linear(4, 2**25, use_bias=False, rngs=rngs))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.trace(rows(2**17))  # 512 KiB
    with pytest.warns(UserWarning, match=told):
        step.trace(rows(2**18))
    _, strict = step_of(ranked, batch_view="strict")
    with pytest.raises(
        ValueError, match=r'test_global_batch.py.*sort: .*batch_view="strict" refuses that'
    ):
        strict.trace(BATCH)


def test_on_request_each_device_sees_its_own_rows():
    count = lambda outputs, batch: hfjax.Mean(
        (outputs**2).sum(), outputs.size, {"rows": jnp.float32(len(outputs))}
    )
    for view, expected in (("global", 16), ("local", 2)):
        layout, step = step_of(count, batch_view=view)
        assert float(step(hfjax.init(layout), BATCH)[1]["rows"]) == expected
    with pytest.raises(ValueError, match="batch_view='some': one of global, strict, local"):
        step_of(batch_view="some")


def test_outputs_that_join_rows_or_have_them_elsewhere_are_those_of_one_device():
    def outputs(model, batch):
        y = model(batch["x"])
        return {"y": y, "mean": y.mean(0), "across": y.T, "twice": jnp.concatenate([y, -y])}

    init = lambda rngs: nnx.Linear(4, 3, rngs=rngs)
    found = []
    for sizes in ({"data": 1}, {"data": 4}):
        mesh = hfjax.make_mesh(devices=jax.devices()[: sizes["data"]], **sizes)
        layout = hfjax.layout(init, optax.sgd(0.1), mesh, hfjax.DDP)
        predict = hfjax.predict_step(layout, outputs)
        found.append(jax.tree.map(np.asarray, predict(hfjax.init(layout), BATCH)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *found)
    odd = {name: x[:13] for name, x in BATCH.items()}
    with pytest.raises(
        ValueError, match=r"13 examples does not divide .*examples meet in the model"
    ):
        predict(hfjax.init(layout), odd)


class Counting(nnx.Module):
    """Its layer is scanned over rows: it counts them, and each is divided by its number."""

    def __init__(self, rngs):
        self.map = nnx.Linear(4, 3, rngs=rngs)
        self.seen = nnx.BatchStat(jnp.float32(2))

    def __call__(self, batch):
        def turn(model, row):
            model.seen[...] += 1
            return model, model.map(row) / model.seen[...]

        return nnx.scan(turn, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(self, batch["x"])[1]


def predicted(init, forward=None, batch=BATCH, devices=(1, 4)):
    """Return what a model predicts on one device and on several."""
    found = []
    for n in devices:
        mesh = hfjax.make_mesh(devices=jax.devices()[:n], data=n)
        layout = hfjax.layout(init, optax.sgd(0.1), mesh, hfjax.DDP, forward=forward)
        found.append(np.asarray(hfjax.predict_step(layout)(hfjax.init(layout), batch)))
    return found


def linear(rngs):
    return nnx.Linear(4, 3, rngs=rngs)


own = Primitive("own_operation")  # what hfjax has never heard of: each row and the one before it
own.def_impl(lambda x: x + jnp.roll(x, 1, 0))
own.def_abstract_eval(lambda x: x)
ad.primitive_jvps[own] = lambda xs, dxs: (own.bind(*xs), own.impl(*dxs))
mlir.register_lowering(own, mlir.lower_fun(own.impl, multiple_results=False))


@jax.custom_vjp
def own_with_rule(x):
    return own.bind(x)


own_with_rule.defvjp(lambda x: (own.bind(x), None), lambda _, g: (3 * g,))
AROUND = {
    "plainly": own.bind,
    "in a loop": lambda x: jax.lax.scan(lambda x, _: (own.bind(x), None), x, length=3)[0],
    "recomputed": lambda x: jax.checkpoint(lambda x: own.bind(x))(x),
    "in a rule": own_with_rule,
    "in all": lambda x: jax.lax.scan(
        jax.checkpoint(lambda x, _: (own_with_rule(x), None)), x, length=3
    )[0],
}


@pytest.mark.short("plainly-1", "in all-6")
@pytest.mark.parametrize(
    ("around", "times"),
    [("plainly", 1), ("in a loop", 3), ("recomputed", 1), ("in a rule", 1), ("in all", 6)],
)
def test_an_unknown_operation_is_named_with_its_line_and_what_it_gathers(around, times):
    def step_on(n):
        mesh = hfjax.make_mesh(devices=jax.devices()[:n], data=n)
        model = lambda params, batch: AROUND[around](batch["x"] @ params["kernel"])
        params = lambda rngs: {"kernel": jnp.eye(4)}
        layout = hfjax.layout(params, optax.sgd(0.1), mesh, hfjax.DDP, forward=model)
        step = hfjax.train_step(layout, lambda outputs, batch: jnp.square(outputs).mean())
        state, metrics = step(hfjax.init(layout), BATCH)
        return step, [metrics["loss"], metrics["grad_norm"], *jax.tree.leaves(state.params)]

    with pytest.warns(UserWarning, match=r"test_global_batch\.py:\d+.*: own_operation: .*gathers"):
        step, found = step_on(4)
    events = [e for e in step.batch_comms.comms if e.operation == "own_operation"]
    assert sum(e.times for e in events) == times
    assert all("test_global_batch.py:" in e.line for e in events)
    assert {(e.action, e.bytes, e.has_rule) for e in events} == {("gather", 256, False)}
    assert "own_operation  gathered, 256 B, since no rule knows it" in str(step.batch_comms)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, found, step_on(1)[1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*examples meet, and no rule")
def test_a_scan_over_rows_that_reads_its_counter_is_that_of_one_device():
    losses = []
    for n in (1, 4):
        mesh = hfjax.make_mesh(devices=jax.devices()[:n], data=n)
        layout = hfjax.layout(Counting, optax.sgd(0.1), mesh, hfjax.DDP)
        step = hfjax.train_step(layout, squares)
        state, _ = step(hfjax.init(layout), BATCH)
        state, metrics = step(state, BATCH)  # what it counts goes on
        losses.append(float(metrics["loss"]))
        assert ("scan  gathered, 256 B, since no rule knows it" in str(step.batch_comms)) == (n > 1)
    np.testing.assert_allclose(*losses, rtol=1e-6)
    np.testing.assert_allclose(*predicted(Counting), rtol=1e-6)


@pytest.mark.filterwarnings("ignore:.*examples meet, and no rule")
def test_a_sum_that_a_loop_shows_is_that_of_one_device():
    shown = []

    def forward(model, batch):
        def turn(total, row):
            jax.debug.callback(lambda total: shown.append(int(total)), total + row)
            return total + row, None

        return model(batch["x"]) * jax.lax.scan(turn, 0.0, batch["mask"])[0]

    predicted(linear, forward, BATCH | {"mask": np.ones(16, np.float32)}, [8])
    jax.effects_barrier()
    assert set(shown) == set(range(1, 17))


def keys_of_rows(key):
    """Return what draws with a key of each row, as people make them."""
    some = lambda keys, rows: jax.vmap(lambda k, r: r * jax.random.uniform(k, (4,)))(keys, rows)
    fold = jax.vmap(jax.random.fold_in, (None, 0))
    twice = lambda keys: jax.vmap(jax.random.split)(keys)[:, 1]
    return {
        "split": lambda x: some(jax.random.split(key, len(x)), x),
        "folded": lambda x: some(fold(key, jnp.arange(len(x))), x),
        "by what rows hold": lambda x: some(fold(key, (x[:, 0] * 9).astype("uint32")), x),
        "split again": lambda x: some(twice(jax.random.split(key, len(x))), x),
        "in a loop": lambda x: jax.lax.map(
            lambda kr: kr[1] * jax.random.uniform(kr[0]), (jax.random.split(key, len(x)), x)
        ),
        "for all": lambda x: x * jax.random.uniform(key, x.shape),
    }


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
@pytest.mark.short("rbg")
def test_keys_of_each_row_draw_what_they_draw_on_one_device(impl):
    draws = keys_of_rows(jax.random.key(3, impl=impl))
    forward = lambda m, b: jnp.concatenate([draw(b["x"]) for draw in draws.values()], 1) * m["w"]
    init = lambda rngs: {"w": jnp.ones((1, 1))}
    one, four = (x.reshape(16, len(draws), 4) for x in predicted(init, forward))
    for number, name in enumerate(draws):
        np.testing.assert_allclose(four[:, number], one[:, number], rtol=1e-6, err_msg=name)


@pytest.mark.filterwarnings("ignore:.*examples meet, and no rule")
def test_a_greatest_or_least_over_rows_of_which_one_is_nan_is_nan():
    x = np.arange(16, dtype=np.float32)[:, None] - np.full(5, 8, np.float32)
    x[[5, 9, 0, 15], range(1, 5)] = np.nan, -np.nan, np.inf, -np.inf
    of = lambda x: [x.max(0), x.min(0), jnp.abs(x).max(0), jax.lax.cummax(x)[-1], x[x.argmax(0), 0]]
    forward = lambda m, b: jnp.broadcast_to(jnp.concatenate(of(b["x"] * m["w"])), (16, 25))
    one, four = predicted(lambda rngs: {"w": jnp.ones((1, 1))}, forward, {"x": x})
    assert np.isnan(one).any()
    np.testing.assert_array_equal(four, one)


def test_a_callback_whose_value_is_used_in_a_loop_over_rows_is_refused():
    number = lambda row: io_callback(lambda y: y.sum(), jax.ShapeDtypeStruct((), "float32"), row)
    _, step = step_of(lambda o, b: jax.lax.map(number, o).mean())
    with pytest.raises(ValueError, match="io_callback returns a value that the model uses"):
        step.trace(BATCH)


@pytest.mark.filterwarnings("ignore:.*examples meet, and no rule")
def test_a_collective_in_a_branch_of_a_loop_over_rows_sees_one_device():
    def branch(row):
        return jax.lax.cond(row.sum() > 0, lambda r: jax.lax.psum(r, "data"), jnp.sin, row)

    forward = lambda m, b: jax.lax.map(branch, m(b["x"]))
    np.testing.assert_allclose(*predicted(linear, forward), rtol=1e-5)


def test_callbacks_see_all_rows_once_and_one_whose_value_is_used_is_refused():
    seen = []

    def loss(outputs, batch):
        jax.debug.callback(lambda y: seen.append(y.shape), outputs)
        return squares(outputs, batch)

    layout, step = step_of(loss)
    jax.block_until_ready(step(hfjax.init(layout), BATCH))
    jax.effects_barrier()
    assert seen == [(16, 3)]
    used = lambda o, b: io_callback(lambda y: y.sum(), jax.ShapeDtypeStruct((), "float32"), o)
    _, step = step_of(used)
    with pytest.raises(ValueError, match="io_callback returns a value that the model uses"):
        step.trace(BATCH)


def test_a_number_in_a_batch_is_refused_in_words():
    layout, step = step_of()
    with pytest.raises(ValueError, match="arrays with the same number of examples, at least one"):
        step(hfjax.init(layout), {**BATCH, "scale": jnp.float32(3)})
