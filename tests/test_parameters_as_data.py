"""What a model does with its parameters beside reading them is right: they are whole arrays."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax.parallel.strategy import DDP, FSDP, ZERO1
from hfjax.testing import assert_strategies_agree

# Small models shard nothing unless told to.
CASES = {
    "DDP": (DDP, {"data": 2}),
    "ZERO1": (ZERO1.edit(replicate_below=0), {"data": 4}),
    "FSDP": (FSDP.edit(replicate_below=0), {"fsdp": 4}),
}


@pytest.fixture(
    params=[("FSDP",), pytest.param(("DDP", "ZERO1"), marks=pytest.mark.slow)], ids=" ".join
)
def cases(request):
    """Some of CASES: every day FSDP, which gathers."""
    return {name: CASES[name] for name in request.param}


RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(16, 8)).astype(np.float32),
    "y": RNG.normal(size=(16, 8)).astype(np.float32),
}


def on_x(model, batch):
    return model(batch["x"])


def squares(outputs, batch):
    return jnp.mean((outputs - batch["y"]) ** 2)


class Learner(nnx.Module):
    """Adapts its parameters to each row before it answers: MAML, one inner problem per row."""

    def __init__(self, *, rngs):
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def answer(self, x):
        return self.down(nnx.tanh(self.up(x)))

    def __call__(self, x):
        graph, weights = nnx.split(self, nnx.Param)

        def of_row(row):
            inner = lambda w: jnp.mean((nnx.merge(graph, w).answer(row[None]) - row[None]) ** 2)
            adapted = weights
            for _ in range(2):
                adapted = jax.tree.map(lambda w, g: w - 0.3 * g, adapted, jax.grad(inner)(adapted))
            return nnx.merge(graph, adapted).answer(row[None])[0]

        return jax.vmap(of_row)(x)


class ByNnxGrad(Learner):
    """The same by nnx.grad of the module itself, one problem of all rows: DDP on one device."""

    def __call__(self, x):
        gradient = nnx.grad(lambda m: jnp.mean((m.answer(x) - x) ** 2))(self)
        graph, weights = nnx.split(self, nnx.Param)
        adapted = jax.tree.map(lambda w, g: w - 0.3 * g, weights, gradient)
        return nnx.merge(graph, adapted).answer(x)


class Penalised(Learner):
    """Adds up the squares of its raw arrays, and divides them by their norm."""

    def __call__(self, x):
        raw = jax.tree.leaves(nnx.state(self, nnx.Param))
        norm = jnp.sqrt(sum((leaf**2).sum() for leaf in raw))
        scaled = jax.tree.map(lambda leaf: leaf / jnp.linalg.norm(leaf + 1), nnx.state(self.up))
        return self.answer(x) * norm + x @ scaled["kernel"][...] @ self.down.kernel


class Smooth(Learner):
    """A gradient penalty: the norm of a gradient with respect to parameters is in the output."""

    def __call__(self, x):
        graph, weights = nnx.split(self.up, nnx.Param)
        energy = lambda w, row: nnx.tanh(nnx.merge(graph, w)(row)).sum()
        gradients = jax.vmap(jax.grad(energy), (None, 0))(weights, x)
        squared = [(g**2).reshape(len(x), -1) for g in jax.tree.leaves(gradients)]
        return self.answer(x) + jnp.concatenate(squared, 1).sum(1, keepdims=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Learner, Penalised, Smooth])
def test_gradients_through_what_a_model_does_with_its_parameters_equal_plain_jax(cases, kind):
    """The kit compares with plain `jax.grad` of the whole, so second-order gradients too."""
    assert_strategies_agree(lambda rngs: kind(rngs=rngs), squares, BATCH, cases, forward=on_x)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Learner, Penalised])
def test_an_evaluation_and_frozen_parameters_see_whole_parameters_too(cases, kind):
    found = []
    for strategy, sizes in ((DDP, {"data": 1}), *cases.values()):
        count = int(np.prod(list(sizes.values())))
        mesh = hfjax.make_mesh(devices=jax.devices()[:count], **sizes)
        init = lambda rngs: kind(rngs=rngs)
        layout = hfjax.layout(init, optax.sgd(0.1), mesh, strategy, forward=on_x).freeze("up/*")
        state = hfjax.init(layout)
        evaluate, step = hfjax.eval_step(layout, squares), hfjax.train_step(layout, squares)
        before = float(evaluate(state, BATCH)["loss"])
        state, _ = step(state, BATCH)
        found.append((before, float(evaluate(state, BATCH)["loss"])))
    np.testing.assert_allclose(found, [found[0]] * len(found), rtol=1e-5)
    assert found[0][0] != found[0][1]


@pytest.mark.slow
def test_an_inner_loss_over_all_rows_is_that_of_one_device_where_there_is_one():
    one = {"one": (DDP, {"data": 1})}
    assert_strategies_agree(lambda rngs: ByNnxGrad(rngs=rngs), squares, BATCH, one, forward=on_x)


class Scanned(nnx.Module):
    """Layers stacked by nnx.vmap and run by nnx.scan, rematerialised."""

    def __init__(self, layers, *, rngs):
        make = nnx.vmap(lambda rngs: Learner(rngs=rngs), in_axes=(0,), out_axes=0)
        self.blocks = nnx.split_rngs(splits=layers)(make)(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x, block):
            return x + block.answer(x)

        return run(x, self.blocks)


@pytest.mark.parametrize("layers", [4, 5])
@pytest.mark.short("FSDP-4")
def test_a_stack_of_layers_trains_whether_or_not_its_dimension_is_split(cases, layers):
    """FSDP splits the dimension of 4 layers by 4, and then gathers the stack before the scan."""
    init = lambda rngs: Scanned(layers, rngs=rngs)
    told = r'4 stacked parameters are split .*axes=\{"blocks/down/bias": \("layers", None\), '
    warned = pytest.warns(UserWarning, match=told) if layers == 4 else nullcontext()
    with warned:
        assert_strategies_agree(init, squares, BATCH, cases, forward=on_x)


def test_a_named_stack_is_gathered_layer_by_layer_and_again_in_the_backward_pass():
    mesh = hfjax.make_mesh(devices=jax.devices()[:4], fsdp=4)
    init = lambda rngs: Scanned(4, rngs=rngs)
    names = {
        f"blocks/{part}/{leaf}": ("layers", *dims)
        for part in ("up", "down")
        for leaf, dims in (("kernel", (None, None)), ("bias", (None,)))
    }
    layout = hfjax.layout(
        init, optax.sgd(0.1), mesh, FSDP.edit(replicate_below=0), forward=on_x, axes=names
    )
    found = hfjax.collectives(hfjax.train_step(layout, squares).lower(BATCH))
    gathered = [row for row in found if row.kind == "all-gather"]
    scattered = [row for row in found if row.kind == "reduce-scatter"]
    assert all("loop" in row.where for row in (*gathered, *scattered))
    assert sum(row.count for row in gathered) == 4 * (4 + 3)  # backward needs no last bias
    assert sum(row.count for row in scattered) == 4 * len(names)


def test_a_weight_that_a_loop_reads_is_gathered_once():
    class Looped(Learner):
        def __call__(self, x):
            return jax.lax.scan(lambda h, _: (self.answer(h), None), x, None, length=5)[0]

    mesh = hfjax.make_mesh(devices=jax.devices()[:4], fsdp=4)
    layout = hfjax.layout(
        lambda rngs: Looped(rngs=rngs),
        optax.sgd(0.1),
        mesh,
        FSDP.edit(replicate_below=0),
        forward=on_x,
    )
    found = hfjax.collectives(hfjax.train_step(layout, squares).lower(BATCH))
    counts = {
        kind: sum(row.count for row in found if row.kind == kind)
        for kind in ("all-gather", "reduce-scatter")
    }
    assert counts == {"all-gather": 4, "reduce-scatter": 4}


@pytest.mark.slow
def test_a_branch_on_data_reads_what_was_gathered_before_it(cases):
    class Branching(Learner):
        def __call__(self, x):
            of_row = lambda row: jax.lax.cond(
                row.sum() > 0, self.up, lambda r: r @ self.down.kernel.T, row
            )
            return self.down(jax.lax.map(of_row, x))

    assert_strategies_agree(lambda rngs: Branching(rngs=rngs), squares, BATCH, cases, forward=on_x)


@pytest.mark.slow
def test_parameters_that_the_loss_reads_nowhere_are_named_all_at_once():
    class Idle(Learner):
        def __init__(self, *, rngs):
            super().__init__(rngs=rngs)
            self.other = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            return self.answer(x)

    mesh = hfjax.make_mesh(devices=jax.devices()[:4], fsdp=4)
    init = lambda rngs: Idle(rngs=rngs)
    sharded = FSDP.edit(replicate_below=0)
    layout = hfjax.layout(init, optax.adamw(1e-2), mesh, sharded, forward=on_x)
    remedy = r'layout.freeze\("other/bias", "other/kernel"\)'
    with pytest.warns(UserWarning, match=f"reads 2 of 6 parameters nowhere: .*{remedy}"):
        hfjax.train_step(layout, squares)(hfjax.init(layout), BATCH)
    frozen = layout.freeze("other/bias", "other/kernel")
    _, metrics = hfjax.train_step(frozen, squares)(hfjax.init(frozen), BATCH)
    assert bool(metrics["finite"])


class Plain(Learner):
    """The same without an inner problem."""

    def __call__(self, x):
        return self.answer(x)


class Wrapped(nnx.Module):
    """Blocks that keep half of their activations on the host."""

    def __init__(self, *, rngs):
        blocks = [hfjax.offload(Plain(rngs=rngs), ratio=0.5) for _ in range(3)]
        self.blocks = nnx.List(blocks)

    def __call__(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.slow
def test_a_block_that_keeps_activations_on_the_host_gathers_again_in_its_backward_pass(cases):
    init = lambda rngs: Wrapped(rngs=rngs)
    assert_strategies_agree(init, squares, BATCH, cases, forward=on_x, steps=2)
    mesh = hfjax.make_mesh(devices=jax.devices()[:4], fsdp=4)
    layout = hfjax.layout(init, optax.sgd(0.1), mesh, FSDP.edit(replicate_below=0), forward=on_x)
    found = hfjax.collectives(hfjax.train_step(layout, squares).lower(BATCH))
    kernels = [row for row in found if row.kind == "all-gather" and len(row.shape) == 2]
    assert sum(row.count for row in kernels) == 2 * 3 + 2 * 3 - 1  # the first input has no gradient
