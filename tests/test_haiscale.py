"""haiscale's shape of a pipeline: losses, outputs, gradients and training equal plain JAX."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax import PIPE, TENSOR, ZERO2
from hfjax.compat import GPipe, Interleaved1F1B, PipeDream, partition
from hfjax.models.layers import Dropout, stack_layers
from hfjax.parallel.layer_stack.bound_model import BoundModel
from tests.constant_stack import rows, stack_layout, weighted as of_rows

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 6)).astype(np.float32)
Y = np.sin(X)
WEIGHT = (RNG.uniform(size=16) + 0.1).astype(np.float32)


class Block(nnx.Module):
    def __init__(self, *, rngs, width=8):
        self.up, self.down = nnx.Linear(6, width, rngs=rngs), nnx.Linear(width, 6, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


def blocks(count):
    rngs = nnx.Rngs(0)
    return [Block(rngs=rngs) for _ in range(count)]


def squares(outputs, y):
    return jnp.mean((outputs - y) ** 2)


def weighted(outputs, y, weight):
    """A weighted mean over rows; `error` is a metric beside it."""
    rows = jnp.mean((outputs - y) ** 2, axis=1)
    error = jnp.mean(jnp.abs(outputs - y))
    return hfjax.Mean(jnp.sum(rows * weight), jnp.sum(weight), metrics={"error": error})


def mesh(**sizes):
    return hfjax.make_mesh(devices=jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)


@jax.jit
def plain(parameters, x):
    """The blocks in plain JAX, on stacked parameters."""

    def block(x, layer):
        up, down = layer["up"], layer["down"]
        hidden = jnp.tanh(jnp.dot(x, up["kernel"]) + up["bias"][None])
        return x + jnp.dot(hidden, down["kernel"]) + down["bias"][None], None

    return jax.lax.scan(block, x, parameters["layers"])[0]


@functools.partial(jax.jit, static_argnums=1)
def mean_of(parameters, criterion, x, labels):
    value = criterion(plain(parameters, x), *labels)
    return value.total / value.weight if isinstance(value, hfjax.Mean) else value


def stack_of(layers):
    """What the pipe's parameters are in the model's order."""
    rows = [nnx.to_pure_dict(nnx.state(layer, nnx.Param)) for layer in layers]
    return {"layers": jax.tree.map(lambda *a: np.stack(a), *rows)}


def assert_close(found, wanted, tolerance=2e-6):
    check = lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance * 10, atol=tolerance)
    jax.tree.map(check, found, wanted)


def microbatch(m, count, devices):
    """The rows of the m-th microbatch of every device."""
    return np.arange(len(X)).reshape(devices, count, -1)[:, m].reshape(-1)


OPTIMIZER = optax.adam(1e-2, eps=1e-4)


@jax.jit
def updated(gradients, moments, parameters):
    """Return the parameters and the moments after an update of optax."""
    updates, moments = OPTIMIZER.update(gradients, moments, parameters)
    return optax.apply_updates(parameters, updates), moments


SLOW = pytest.mark.slow
PIPES = {
    "GPipe": (GPipe, 1, {"pipe": 4}),
    "PipeDream": (PipeDream, 1, {"pipe": 2}),
    "PipeDream beside data": (PipeDream, 1, {"pipe": 2, "data": 2}),
    "Interleaved1F1B": (Interleaved1F1B, 2, {"pipe": 2}),
    "one stage": (PipeDream, 1, {"pipe": 1, "data": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "GPipe",
        "PipeDream beside data",
        "Interleaved1F1B",
        pytest.param("PipeDream", marks=SLOW),
        pytest.param("one stage", marks=SLOW),
    ],
)
def test_a_pipe_trains_as_plain_jax_does(name):
    kind, chunks, sizes = PIPES[name]
    layers = blocks(5)  # an even split is not possible
    on = mesh(**sizes)
    pipe = kind(partition(layers, on.shape["pipe"], chunks=chunks), 4, mesh=on)
    wanted = stack_of(layers)
    jax.tree.map(np.testing.assert_array_equal, hfjax.full_array(pipe.canonical()), wanted)
    mine, theirs = OPTIMIZER.init(pipe.parameters), OPTIMIZER.init(wanted)
    for _ in range(2):
        losses, outputs = pipe.forward_backward(
            X, criterion=squares, labels=(Y,), return_outputs=True
        )
        rows = [microbatch(m, 4, on.shape["data"]) for m in range(4)]
        assert_close(losses, [mean_of(wanted, squares, X[r], (Y[r],)) for r in rows])
        assert_close(outputs, plain(wanted, X))
        gradients = jax.grad(mean_of)(wanted, squares, X, (Y,))
        assert_close(pipe.canonical(pipe.gradients), gradients)
        pipe.parameters, mine = updated(pipe.gradients, mine, pipe.parameters)
        wanted, theirs = updated(gradients, theirs, wanted)
    assert_close(pipe.canonical(), wanted, 1e-5)


def test_several_labels_a_weighted_mean_and_its_metrics():
    pipe = PipeDream(partition(blocks(3), 2), 4, mesh=mesh(pipe=2, data=2))
    labels = (Y, WEIGHT)
    losses, outputs = pipe.forward_backward(X, criterion=weighted, labels=labels)
    assert outputs is None
    assert losses.shape == (4,)
    parameters = hfjax.full_array(pipe.canonical())
    wanted, gradients = jax.value_and_grad(mean_of)(parameters, weighted, X, labels)
    assert_close(pipe.canonical(pipe.gradients), gradients)
    parts = [microbatch(m, 4, 2) for m in range(4)]
    of_parts = [mean_of(parameters, weighted, X[r], (Y[r], WEIGHT[r])) for r in parts]
    assert_close(losses, np.array(of_parts))
    error = np.mean(np.abs(plain(parameters, X) - Y))
    assert_close(pipe.metrics, {"loss": wanted, "error": error})
    assert_close(pipe.evaluate(X, criterion=weighted, labels=labels), pipe.metrics)


def test_a_stacked_module_and_a_sequential_are_layers_too():
    for layers in (
        stack_layers(4, lambda rngs: Block(rngs=rngs), nnx.Rngs(0)),
        nnx.Sequential(*blocks(4)),
    ):
        pipe = GPipe(partition(layers, 2), 2, mesh=mesh(pipe=2))
        assert_close(pipe.forward(X), plain(pipe.canonical(), X))


def test_evaluation_runs_forward_only_and_without_dropout():
    class Dropped(Block):
        def __init__(self, *, rngs):
            super().__init__(rngs=rngs)
            self.dropout = Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(super().__call__(x))

    rngs = nnx.Rngs(0)
    parts = partition([Dropped(rngs=rngs) for _ in range(2)], 2)
    pipe = PipeDream(parts, 4, mesh=mesh(pipe=2, data=2))
    wanted = plain(hfjax.full_array(pipe.canonical()), X)
    few = slice(0, 6)  # rows that do not split into four microbatches
    assert_close(pipe(X[few]), wanted[few])
    assert_close(pipe.evaluate(X, criterion=squares, labels=(Y,))["loss"], squares(wanted, Y))
    with pytest.raises(ValueError, match="no gradients yet"):
        pipe.gradients  # noqa: B018
    first, _ = pipe.forward_backward(X, criterion=squares, labels=(Y,))
    second, _ = pipe.forward_backward(X, criterion=squares, labels=(Y,))
    assert not np.allclose(first, second)  # another mask in every call


@pytest.mark.slow
def test_a_program_compiles_once_for_a_shape_and_gradients_add_up_if_asked():
    traced = []

    def criterion(outputs, y):
        traced.append(outputs.shape)
        return squares(outputs, y)

    pipe = PipeDream(partition(blocks(2), 2), 2, mesh=mesh(pipe=2))
    run = lambda rows, **how: pipe.forward_backward(
        X[:rows], criterion=criterion, labels=(Y[:rows],), **how
    )
    run(16)
    once, times = hfjax.full_array(pipe.gradients), len(traced)
    run(16, accumulate=True)
    assert_close(pipe.gradients, jax.tree.map(lambda g: 2 * g, once))
    run(16)
    assert_close(pipe.gradients, once)
    assert len(traced) == times
    run(8)
    assert len(traced) > times


def test_a_criterion_made_anew_for_every_call_is_warned_of():
    pipe = PipeDream(partition(blocks(1), 1), 1, mesh=mesh(pipe=1))
    lower = lambda: pipe.lower(X, criterion=lambda outputs: jnp.mean(outputs))
    for _ in range(8):
        lower()
    with pytest.warns(UserWarning, match="define the criterion once"):
        lower()


def test_parameters_live_on_their_stages_and_come_back_as_the_layers_given():
    layers = blocks(5)
    pipe = Interleaved1F1B(partition(layers, 2, chunks=2), 2, mesh=mesh(pipe=2))
    spec = pipe.parameters["layers"]["up"]["kernel"].sharding.spec
    assert spec == jax.sharding.PartitionSpec("pipe")
    pipe.parameters = jax.tree.map(lambda a: 2 * a, pipe.parameters)
    for old, new in zip(layers, pipe.layers(), strict=True):
        np.testing.assert_array_equal(2 * old.down.kernel[...], new.down.kernel[...])
        assert_close(new(X), Block.__call__(new, X))
    pipe.load(stack_of(layers))
    assert_close(pipe(X), plain(stack_of(layers), X))


@jax.jit
def one_more(tree):
    return jax.tree.map(lambda x: x + 1, tree)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_pipe_and_the_arrays_that_it_was_given_do_not_delete_each_other(stages):
    """A program of one's own may donate both; NumPy arrays may be written to."""
    take = jax.jit(one_more, donate_argnums=0)
    arrays = lambda layers: [nnx.state(layer) for layer in layers]
    layers = blocks(2)
    before = jax.device_get(arrays(layers))
    pipe = PipeDream(partition(layers, stages), 2, mesh=mesh(pipe=stages, data=2))
    take(pipe.parameters)
    jax.tree.map(np.testing.assert_array_equal, arrays(layers), before)

    def is_still(wanted):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(pipe.parameters), wanted)

    for give in (pipe.load, lambda new: setattr(pipe, "parameters", new)):
        for made in (jnp.array, np.array):
            mine = jax.tree.map(lambda x, made=made: made(np.array(x)), stack_of(blocks(2)))
            wanted = jax.tree.map(np.array, mine)
            give(mine)
            new = take(pipe.parameters)
            jax.tree.map(np.testing.assert_array_equal, mine, wanted)
            assert_close(new, one_more(wanted))
            give(mine)
            if made is np.array:
                jax.tree.map(lambda x: x.fill(7), mine)
            else:
                take(mine)
            is_still(wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "remat"),
    [(GPipe, "always"), (GPipe, "except_last"), (Interleaved1F1B, "except_last")],
)
def test_what_is_recomputed_changes_no_gradient(kind, remat):
    parts = partition(blocks(5), 2, chunks=2 if kind.chunked else 1)
    pipe = kind(parts, 3, mesh=mesh(pipe=2), remat=remat)
    losses, _ = pipe.forward_backward(X[:12], criterion=squares, labels=(Y[:12],))
    wanted = stack_of(blocks(5))
    assert_close(losses.mean(), mean_of(wanted, squares, X[:12], (Y[:12],)))
    gradients = jax.grad(mean_of)(wanted, squares, X[:12], (Y[:12],))
    assert_close(pipe.canonical(pipe.gradients), gradients)


def test_except_last_keeps_the_last_microbatch_and_no_other(monkeypatch):
    """Give the layers of the microbatch that is kept another function: only its loss changes."""
    model = BoundModel.model

    def plus_one(passes):
        def forward(known, x):
            y, *kept = passes.forward(known, x)
            return y + 1, *kept

        return replace(passes, forward=forward)

    def shifted(staged):
        made: Any = model(staged)
        return replace(made, last_passes=lambda *given: plus_one(made.last_passes(*given)))

    monkeypatch.setattr(BoundModel, "model", shifted)
    pipe = PipeDream(partition(blocks(1), 1), 4, mesh=mesh(pipe=1), remat="except_last")
    losses, _ = pipe.forward_backward(X, criterion=squares, labels=(Y,))
    wanted = stack_of(blocks(1))
    shift = np.where(np.arange(16) < 12, 0, 1).astype(np.float32)[:, None]
    mean = lambda parameters: squares(plain(parameters, X) + shift, Y)
    value, gradients = jax.jit(jax.value_and_grad(mean))(wanted)
    assert_close(losses.mean(), value)
    assert_close(losses[:3].mean(), mean_of(wanted, squares, X[:12], (Y[:12],)))
    assert_close(pipe.canonical(pipe.gradients), gradients)


@pytest.mark.slow
def test_stages_that_update_by_themselves_keep_the_last_microbatch_too():
    schedule, after = hfjax.Schedule("2bw", 4), []
    layout = stack_layout(PIPE, {"pipe": 2}, optax.sgd(0.1), layers=2)
    for remat in ("none", "except_last"):
        step = hfjax.train_step(layout, of_rows, schedule=schedule, remat=remat)
        state, _ = step(hfjax.init(layout, 0, schedule), rows())
        after.append(hfjax.full_array(state.params))
    assert_close(*after)


@pytest.mark.slow
def test_what_is_kept_costs_memory():
    rngs = nnx.Rngs(0)
    parts = partition([Block(rngs=rngs, width=256) for _ in range(2)], 1)
    x = jax.ShapeDtypeStruct((128, 6), jnp.float32)

    def temporary(remat):
        pipe = GPipe(parts, 8, mesh=mesh(pipe=1), remat=remat)
        lowered = pipe.lower(x, criterion=squares, labels=(x,))
        used: Any = lowered.compile().memory_analysis()
        return used.temp_size_in_bytes

    stash = 2 * 16 * 256 * 4  # the hidden activations of a microbatch on a stage of two layers
    assert temporary("always") + stash <= temporary("except_last")
    assert temporary("except_last") + 6 * stash <= temporary("never")


def test_a_partition_balances_parameters_flops_or_what_is_given():
    rngs = nnx.Rngs(0)
    wide = [Block(rngs=rngs, width=w) for w in (8, 8, 8, 8, 32)]
    assert partition(wide, 2).counts == (4, 1)
    assert partition(wide, 2, "flops", example=X).counts == (4, 1)
    assert partition(wide, 2, [3, 2]).counts == (3, 2)
    assert partition(blocks(30), 4).counts == (8, 8, 7, 7)
    table = str(partition(wide, 2, chunks=2))
    assert table.splitlines()[0] == "5 layers on 2 stages x 2 chunks"
    assert table.splitlines()[-1].split() == ["3", "1", "1", "4", "1,688", "49.0%"]


class Wider(Block):
    """Hands on more than it is given."""

    def __call__(self, x):
        return jnp.concatenate([x, x], axis=1)


@functools.cache
def pipe_of(layer=Block):
    layers = [layer(rngs=nnx.Rngs(i)) for i in range(2)]
    return PipeDream(partition(layers, 2), 4, mesh=mesh(pipe=2, data=2))


def run(x=X, criterion=squares, labels=(Y,), layer=Block):
    return pipe_of(layer).forward_backward(x, criterion=criterion, labels=labels)


class ZeroBubble(PipeDream):
    schedule = "zb"


class Split(nnx.Module):
    """Its hidden dimension may lie on several devices."""

    def __init__(self, *, rngs):
        self.up = nnx.Param(jax.random.normal(rngs.params(), (6, 8)), axes=(None, "mlp"))
        self.down = nnx.Param(jax.random.normal(rngs.params(), (8, 6)), axes=("mlp", None))

    def __call__(self, x):
        return jnp.tanh(x @ self.up[...]) @ self.down[...]


def run_on(sizes, kind=PipeDream, **options):
    layers = [(Split if sizes.get("tensor") else Block)(rngs=nnx.Rngs(i)) for i in range(2)]
    pipe = kind(partition(layers, 2), 4, mesh=mesh(pipe=2, **sizes), remat="except_last", **options)
    return pipe.forward_backward(X, criterion=squares, labels=(Y,))


def block():
    return Block(rngs=nnx.Rngs(0))


def two():
    return partition(blocks(4), 2)


def wrong(value) -> Any:
    """A value of another type than the one asked for."""
    return value


WRONG_LAYERS = {
    r"4 layers for 6 parts \(stages x chunks\)": lambda: partition(blocks(4), 3, chunks=2),
    r"balance=\[3, 2\] has 2 parts of 5 layers": lambda: partition(blocks(4), 2, [3, 2]),
    r"balance=\[4, 0\] has .* at least one each": lambda: partition(blocks(4), 2, [4, 0]),
    r"balance=\[1.5, 2.5\]: one of parameters, fl": lambda: partition(
        blocks(4), 2, wrong([1.5, 2.5])
    ),
    r"balance='weight': one of parameters, flops": lambda: partition(blocks(4), 2, "weight"),
    r"give what enters the first layer": lambda: partition(blocks(4), 2, "flops"),
    r"stages=0: a positive whole number": lambda: partition(blocks(4), 0),
    r"chunks=1.5: a positive whole number": lambda: partition(blocks(4), 2, chunks=wrong(1.5)),
    r"layers is int: a list of modules": lambda: partition(3, 1),
    r"layer 1 is 'relu': a module or a function": lambda: partition([block(), "relu"], 2),
    r"layers 0 and 1 share a parameter": lambda: partition([block()] * 2, 2),
    r"one Block, whose arrays have \[6, 8\] rows": lambda: partition(block(), 2),
}
WRONG_PIPES = {
    r"PipeDream takes a partition, found list": lambda: PipeDream(wrong(blocks(2)), 2),
    r"chunks=2. Use Interleaved1F1B": lambda: GPipe(partition(blocks(4), 2, chunks=2), 2),
    r"the partition has one. Use": lambda: Interleaved1F1B(two(), 2),
    r"chunks=8: what haiscale calls": lambda: PipeDream(two(), chunks=8),
    r"microbatches is missing": lambda: PipeDream(two()),
    r"microbatches=0: a positive number": lambda: PipeDream(two(), 0),
    r"remat='sometimes': one of never": lambda: PipeDream(two(), 2, remat="sometimes"),
    r"clip: no option of a pipe": lambda: PipeDream(two(), 2, clip=1.0),
    r"keeps no loss scale for float16": lambda: PipeDream(two(), 2, precision="fp16"),
    r"has 4 stages \(pipe\), the partition 2": lambda: PipeDream(two(), 2, mesh=mesh(pipe=4)),
    r"mesh is 4: a mesh of hfjax.make_mesh": lambda: PipeDream(two(), 2, mesh=wrong(4)),
}
WRONG_BATCHES = {
    r"batch of 6 examples does not divide by 4 microbatches x 2": lambda: run(
        X[:6], labels=(Y[:6],)
    ),
    r"labels\[0\] has 8 examples, x has 16": lambda: run(labels=(Y[:8],)),
    r"labels\[0\] holds 3: arrays with a row": lambda: run(labels=(3,)),
    r"x has no examples": lambda: run(X[:0], labels=(Y[:0],)),
    r"labels is ndarray: a tuple is expected": lambda: run(labels=Y),
    r"criterion is int: a function": lambda: run(criterion=3),
    r"with 1 labels: missing a required argument: 'weight'": lambda: run(criterion=weighted),
    r"the criterion returns has shape \(4, 6\)": lambda: run(criterion=lambda o, y: o - y),
    r"the criterion returns is a tuple": lambda: run(criterion=lambda *given: given),
    r"given float32\[2,6\] and returns float32\[2,12\]: stacked": lambda: run(layer=Wider),
    r"layers/down/bias is nothing, expected is float32 \(2, 6\)": lambda: setattr(
        pipe_of(), "parameters", {"layers": {"up": {"bias": np.zeros((2, 8), np.float32)}}}
    ),
    r"load: a dictionary is expected": lambda: pipe_of().load(wrong([])),
}
SCATTERS: Any = {"strategy": PIPE | ZERO2.edit(replicate_below=0)}
EXCEPT_LAST = {
    r"the gradient of layers/down/bias .* split as .* gradients of layers are scattered": lambda: (
        run_on({"data": 2}, **SCATTERS)
    ),
    r"schedule zb: such a schedule splits backward passes in two": lambda: run_on(
        {}, kind=ZeroBubble
    ),
    r"with tensor=2: layers send over a tensor axis": lambda: run_on(
        {"tensor": 2}, strategy=PIPE | TENSOR
    ),
    r"and there is no schedule": lambda: hfjax.Execution(remat=hfjax.Remat("except_last")),
}
WRONG = WRONG_LAYERS | WRONG_PIPES | WRONG_BATCHES | EXCEPT_LAST


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_refused(message):
    with pytest.raises(ValueError, match=message):
        WRONG[message]()


def test_unlike_layers_go_through_the_same_entry():
    rngs = nnx.Rngs(0)
    layers = [Block(rngs=rngs), nnx.Linear(6, 9, rngs=rngs), jnp.tanh, nnx.Linear(9, 6, rngs=rngs)]
    pipe = PipeDream(partition(layers, 2, [2, 2]), 2, mesh=mesh(pipe=2))
    graph, parameters = nnx.split(nnx.List(layers))

    def forward(parameters):
        x = X
        for layer in nnx.merge(graph, parameters):
            x = layer(x)
        return squares(x, Y), x

    (loss, wanted), gradients = jax.jit(jax.value_and_grad(forward, has_aux=True))(parameters)
    losses, outputs = pipe.forward_backward(X, criterion=squares, labels=(Y,), return_outputs=True)
    assert_close(losses.mean(), loss)
    assert_close(outputs, wanted)
    found = pipe.canonical(pipe.gradients)["layers"]
    for i in (0, 1, 3):
        own = wrong(nnx.to_pure_dict(gradients))[i]
        assert_close(found[str(i)], own)
    assert pipe.layers()[2] is jnp.tanh
    np.testing.assert_array_equal(pipe.layers()[1].kernel[...], layers[1].kernel[...])


def test_outputs_may_be_a_part_of_ones_own_program():
    rngs = nnx.Rngs(0)
    parts = hfjax.compat.partition([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)], stages=2)
    mesh = hfjax.make_mesh(devices=jax.devices()[:2], pipe=2)
    pipe, x = hfjax.compat.PipeDream(parts, microbatches=2, mesh=mesh), np.ones((4, 8), np.float32)
    np.testing.assert_allclose(jax.jit(lambda x: pipe(x))(x), pipe(x), rtol=1e-6)
