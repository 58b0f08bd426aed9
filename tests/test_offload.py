"""Activations on the host: the bytes asked for, the same gradients, and no silence."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import hfjax
from hfjax.models.gpt import next_token_loss
from hfjax.models.layers import stack_layers
from hfjax.models.loss import token_losses
from hfjax.parallel.jaxprs.saved_tensor import Tensor
from hfjax.parallel.offload.activations import ToHost, select_tensors, share_of_range
from hfjax.parallel.strategy import DDP, FSDP, PIPE, SEQUENCE, TENSOR
from tests.h200 import OPTIMIZED, h200s
from tests.small_gpt import gpt, gpt_layout, mlp_layout, mlps, tokens
from tests.small_stack import Bent, Stack, rows, squared

Offload, Schedule = hfjax.Offload, hfjax.Schedule


def trained(strategy, sizes, offload=None, layers=2, model=mlps, **options):
    """Parameters and losses after two steps, and the step."""
    shape = {"dropout": 0.1, "layers": layers, "model": model}
    layout = gpt_layout(strategy, sizes, optax.adam(1e-3), **shape)
    return trained_by(layout, next_token_loss, tokens(), offload=offload, **options)


def trained_by(layout, loss, batch, **options):
    step = hfjax.train_step(layout, loss, **options)
    state, losses = hfjax.init(layout, schedule=options.get("schedule")), []
    for _ in range(2):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    state = hfjax.to_model_order(layout, state)  # layers of a V lie in another order
    return jax.tree.map(np.asarray, state.params), losses, step


def assert_bit_equal(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


CASES = {
    "one device, unrolled": (DDP, {"data": 1}, {}),
    "one device, in a scan": (DDP, {"data": 1}, {"unroll": 1}),
    "FSDP in bfloat16": (FSDP, {"fsdp": 4}, {"precision": "bf16"}),
    "FSDP, two microbatches": (FSDP, {"fsdp": 2}, {"gradient_accumulation_steps": 2}),
    "FSDP, full remat": (FSDP, {"fsdp": 2}, {"remat": "full"}),
    "DDP, dots": (DDP, {"data": 2}, {"remat": "dots"}),
    "every other layer": (DDP, {"data": 2}, {"remat": "every:2", "layers": 3}),
    "tensor": (FSDP | TENSOR | SEQUENCE, {"fsdp": 2, "tensor": 2}, {}),
    "1F1B": (PIPE, {"pipe": 2, "data": 2}, {"schedule": Schedule("1f1b", 4)}),
    "ZB-H1, which branches": (PIPE, {"pipe": 2}, {"schedule": Schedule("zb-h1", 4)}),
    "zero bubble in a scan": (
        PIPE | FSDP,
        {"pipe": 2, "fsdp": 2},
        {"schedule": Schedule("zb", 4), "unroll": 1, "layers": 4},
    ),
    "PipeDream": (PIPE, {"pipe": 2}, {"schedule": Schedule("pipedream", 4)}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.short("one device, in a scan")
def test_training_is_bit_equal_to_no_offload(case):
    strategy, sizes, options = CASES[case]
    wanted = trained(strategy, sizes, **options)
    found = trained(strategy, sizes, Offload(ratio=0.4), **options)
    assert found[2].offloaded.host_bytes > 0
    assert found[1] == wanted[1]
    assert_bit_equal(found[0], wanted[0])


def joining(outputs, batch):
    """A loss in which examples meet: on CPUs slots of a tick then follow one another."""
    of_row = token_losses(outputs, batch)[0].mean(1)
    return of_row.mean() + jnp.square(of_row - of_row.mean()).mean()


GRID = hfjax.GRID.edit(replicate_below=0)
IN_ORDER = {
    "1F1B": (PIPE, {"pipe": 2, "data": 2}, joining, "1f1b", {}),
    "ZB-V, bfloat16": (PIPE, {"pipe": 2, "data": 2}, joining, "zb-v", {"precision": "bf16"}),
    "a grid": (PIPE | GRID, {"pipe": 2, "row": 2, "tensor": 2}, next_token_loss, "1f1b", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", IN_ORDER)
def test_where_slots_of_a_pipeline_run_in_order_training_is_that_of_one_device(case):
    strategy, sizes, loss, name, options = IN_ORDER[case]

    def left(strategy, sizes, **more):
        layout = mlp_layout(strategy, sizes, optax.sgd(0.1), layers=4, dropout=0.1)
        return trained_by(layout, loss, tokens(), **options, **more)

    pipe = {"schedule": Schedule(name, 4)}
    wanted, found = (left(strategy, sizes, **pipe, offload=ratio) for ratio in (None, 0.5))
    assert found[2].offloaded.host_bytes > 0
    assert found[1] == wanted[1]
    assert_bit_equal(found[0], wanted[0])
    alone = left(DDP, {"data": 1}, gradient_accumulation_steps=4)
    rounding = 2e-2 if options else 1e-5
    np.testing.assert_allclose(found[1], alone[1], rtol=rounding)
    chex.assert_trees_all_close(found[0], alone[0], atol=rounding)


# -- how much -----------------------------------------------------------------------------------


def step_of(strategy=FSDP, sizes=None, model=mlps, **options):
    layout = gpt_layout(strategy, sizes or {"fsdp": 2}, optax.sgd(1e-3), model=model)
    return hfjax.train_step(layout, next_token_loss, **options)


@pytest.mark.parametrize("ratio", [0.05, 0.3, 0.5, 0.9, 1.0])
def test_the_ratio_is_reached_within_a_slice_and_what_is_reported_is_what_is_copied(ratio):
    step = step_of(offload=Offload(ratio=ratio))
    copied = hfjax.analysis.host_transfers(step.trace(tokens()))
    report = step.offloaded
    largest = max(row.tensor.bytes / max(row.tensor.shape) for row in report.entries.values())
    assert abs(report.host_bytes - ratio * report.total_bytes) <= largest * 2
    assert copied.to_host == copied.to_device == report.host_bytes
    assert f"on the host: {report.ratio:.1%}" in str(report)


def test_each_microbatch_copies_what_the_report_says():
    step = step_of(offload=Offload(ratio=0.5), gradient_accumulation_steps=2)
    copied = hfjax.analysis.host_transfers(step.trace(tokens()))
    assert copied.to_host == copied.to_device == 2 * step.offloaded.host_bytes > 0


def test_beside_a_tensor_axis_only_whole_tensors_go():
    step = step_of(FSDP | TENSOR, {"fsdp": 2, "tensor": 2}, offload=Offload(ratio=0.3))
    step.trace(tokens())
    report = step.offloaded
    assert {row.host_bytes for row in report.entries.values()} <= {
        0,
        *(row.tensor.bytes for row in report.entries.values()),
    }
    largest = max(row.tensor.bytes * row.times for row in report.entries.values())
    assert abs(report.host_bytes - 0.3 * report.total_bytes) <= largest


@pytest.mark.slow
def test_weights_are_never_kept_for_the_backward_pass_whatever_their_form():
    """Not the stored ones, nor gathered, cast, reshaped or transposed ones."""
    layout = gpt_layout(FSDP, {"fsdp": 2}, optax.sgd(1e-3), embed=48, length=20)
    step = hfjax.train_step(
        layout, next_token_loss, offload=Offload(ratio=1.0), precision="bf16", remat="none"
    )
    step.trace(tokens(rows=2, length=20))
    of_layers = [
        p.shape[1:] for path, p in layout.param_specs.items() if path.startswith("layers/")
    ]
    sizes = {int(np.prod(shape)) for shape in of_layers if len(shape) > 1}
    kept = {int(np.prod(row.tensor.shape)) for row in step.offloaded.entries.values()}
    assert not sizes & kept


@pytest.mark.parametrize(("ratio", "cut"), [(0.5, True), (0.5, False), (1.0, False), (0.0, True)])
def test_whole_tensors_go_first_and_at_most_one_is_cut(ratio, cut):
    kept = [Tensor("a", (n, 10), "float32", n * 40) for n in (7, 5, 3, 3)]
    chosen = select_tensors(Offload(ratio=ratio), kept, cut)
    assert sum(c.dim is not None for c in chosen.values()) <= cut
    moved = sum(c.bytes_of(kept[i]) for i, c in chosen.items())
    assert abs(moved - ratio * 18 * 40) <= (20 if cut else 3 * 40)


@pytest.mark.parametrize("cut", [True, False])
def test_an_empty_tensor_stays_where_it_is(cut):
    kept = [Tensor("a", (n, 10), "float32", n * 40) for n in (0, 7, 3)]
    assert 0 not in select_tensors(Offload(ratio=0.5), kept, cut)


def test_rings_that_share_tensors_are_told_each_its_own_by_its_own_numbers():
    chosen = {0: ToHost(), 2: ToHost(1, 3), 3: ToHost()}
    assert share_of_range(chosen, 0, 2) == {0: ToHost()}
    assert share_of_range(chosen, 2, None) == {0: ToHost(1, 3), 1: ToHost()}


# -- by name, by kind ---------------------------------------------------------------------------


class Named(Bent):
    """A layer that names three tensors, each of which its backward pass reads."""

    def __call__(self, x):
        bent = checkpoint_name(super().__call__(x), "bent")
        squared = checkpoint_name(bent * bent, "squared")
        return x + checkpoint_name(jnp.sin(squared), "waved") * squared


class OfNamed(Stack):
    def __init__(self, *, rngs):
        super().__init__(1, rngs=rngs)
        self.layers = stack_layers(3, lambda rngs: Named(rngs=rngs), rngs)


def names_trained(remat, offload=None):
    mesh = hfjax.make_mesh(devices=jax.devices()[:2], fsdp=2)
    small = FSDP.edit(replicate_below=0)
    layout = hfjax.layout(lambda rngs: OfNamed(rngs=rngs), optax.adam(1e-3), mesh, small)
    return trained_by(layout, squared, rows(), remat=remat, offload=offload)


def gpt_trained(remat, offload=None):
    return trained(FSDP, {"fsdp": 2}, offload, model=gpt, remat=remat)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "names", "remat"),
    [
        (names_trained, ("bent", "waved"), "full"),
        (names_trained, ("bent", "waved"), "none"),
        pytest.param(gpt_trained, ("mlp_up", "qkv"), "full", marks=pytest.mark.slow),
        pytest.param(gpt_trained, ("mlp_up", "qkv"), "none", marks=pytest.mark.slow),
    ],
    ids=["full", "none", "a GPT, full", "a GPT, none"],
)
def test_named_tensors_go_and_are_kept_even_if_all_else_is_computed_again(run, names, remat):
    wanted, found = run(remat), run(remat, Offload(names=names))
    assert_bit_equal(found[0], wanted[0])
    gone = [row for row in found[2].offloaded.entries.values() if row.moved]
    assert {name for row in gone for name in row.tensor.names} == {*names}


def test_matrix_products_go_alone():
    step = step_of(offload=Offload(dots=True), remat="dots")
    step.trace(tokens())
    rows = step.offloaded.entries.values()
    assert {row.tensor.operation for row in rows if row.host_bytes} == {"dot_general"}
    assert not any(row.host_bytes for row in rows if row.tensor.operation != "dot_general")


# -- around any block ---------------------------------------------------------------------------


def mlp(w, x):
    hidden = checkpoint_name(x @ w["up"], "up")
    return (hidden * hidden) @ w["down"]


def weights():
    rng = np.random.default_rng(0)
    return {"up": rng.normal(size=(16, 64)), "down": rng.normal(size=(64, 16))}


@pytest.mark.parametrize("asked", [{"ratio": 0.5}, {"ratio": 1.0}, {"names": "up"}, {"dots": True}])
def test_a_function_keeps_its_gradients(asked):
    w = jax.tree.map(jnp.float32, weights())
    x = jnp.ones((8, 16))
    block = hfjax.offload(mlp, **asked)
    gradient = lambda f: jax.jit(jax.grad(lambda w, x: (f(w, x) ** 2).sum(), argnums=(0, 1)))(w, x)
    assert_bit_equal(gradient(block), gradient(mlp))
    assert block.offloaded.host_bytes > 0


@pytest.mark.parametrize(
    ("given", "called", "message"),
    [
        ({"ratio": "0.3"}, None, r"ratio='0.3'.*a number from 0 to 1"),
        ({"ratio": 0.5, "weights": -1}, None, "numbers of arguments from 0 on"),
        ({"ratio": 0.5, "weights": 1}, {"w": 1, "x": 2}, "given 0 by position .by name: w, x"),
    ],
)
def test_weights_that_are_not_there_are_refused(given, called, message):
    with pytest.raises(ValueError, match=message):
        hfjax.offload(mlp, **given)(**called)


def test_what_a_function_closes_over_is_a_weight_of_it():
    w, x = jax.tree.map(jnp.float32, weights()), jnp.ones((8, 16))

    def gradient(wrap):
        block = lambda w, x: wrap(lambda x: mlp(w, x))(x)
        return jax.jit(jax.grad(lambda w: (block(w, x) ** 2).sum()))(w)

    wrap = lambda f: hfjax.offload(f, ratio=1.0, weights=())
    assert_bit_equal(gradient(wrap), gradient(lambda f: f))


def test_a_module_keeps_its_gradients_statistics_and_flags():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.norm = nnx.Linear(8, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)

        def __call__(self, x, flip=False):
            y = jnp.tanh(self.norm(self.linear(x)))
            return -y if flip else y

    def after(wrap):
        block = wrap(Block(nnx.Rngs(0)))
        loss = lambda block: (block(jnp.arange(32.0).reshape(4, 8), flip=True) ** 2).sum()
        gradient = nnx.jit(nnx.grad(loss))(block)
        found = [nnx.to_flat_state(nnx.state(m)) for m in (gradient, block)]
        return [np.asarray(v[...]) for flat in found for _, v in flat], block

    found, block = after(lambda b: hfjax.offload(b, 0.8, "mine"))
    wanted, _ = after(lambda b: b)
    assert_bit_equal(found, wanted)
    assert {row.tag for row in block.offloaded.entries.values()} == {"mine"}


def test_a_wrapped_block_inside_a_model_trains_as_without():
    from hfjax.models.layers import LayerNorm

    class Model(nnx.Module):
        def __init__(self, wrap, rngs):
            self.inner = wrap(nnx.Linear(8, 8, rngs=rngs))
            self.norm = LayerNorm(8)

        def __call__(self, batch):
            return self.norm(jnp.tanh(self.inner(jnp.tanh(batch))))

    def losses(wrap):
        mesh = hfjax.make_mesh(devices=jax.devices()[:2], fsdp=2)
        strategy = FSDP.edit(replicate_below=0)
        layout = hfjax.layout(lambda rngs: Model(wrap, rngs), optax.adam(1e-2), mesh, strategy)
        step = hfjax.train_step(layout, lambda y, batch: ((y - 1) ** 2).mean())
        state, batch, told = hfjax.init(layout), jnp.arange(32.0).reshape(4, 8), []
        for _ in range(3):
            state, metrics = step(state, batch)
            told.append(float(metrics["loss"]))
        return told

    assert losses(lambda b: hfjax.offload(b, 1.0)) == losses(lambda b: b)


# -- what is refused, and warned of --------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "give one of ratio"),
        ({"ratio": 0.5, "dots": True}, "give one of ratio"),
        ({"ratio": 1.5}, "from 0 to 1"),
        ({"ratio": "half"}, "from 0 to 1"),
        ({"ratio": (0.5, -1)}, "from 0 to 1"),
        ({"ratio": ()}, "from 0 to 1"),
        ({"ratio": True}, "from 0 to 1"),
    ],
)
def test_what_is_no_offload_is_refused(asked, message):
    with pytest.raises(ValueError, match=message):
        Offload(**asked)


@pytest.mark.parametrize("given", [(0.1, 0.5), [0.5, 0], "0.1,0.5", np.array([0.5, 0.25])])
def test_ratios_that_differ_between_stages_are_refused_with_the_one_to_give(given):
    one = r"offload=.*0\.5.*: one ratio is expected.*the largest.*offload=0\.5\."
    with pytest.raises(ValueError, match=one):
        Offload.of(given)
    with pytest.raises(ValueError, match=one):
        hfjax.Execution(offload=given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": "thick"}, r"a fraction of the bytes from 0 to 1"),
        (
            {"offload": Offload(ratio=0.5), "reshard_after_forward": False},
            "reshard_after_forward=False",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        step_of(**options)


def test_a_name_that_nothing_has_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"'mlp_uq'.*attended, mlp_up, qkv"):
        step_of(model=gpt, offload=Offload(names=("mlp_uq",))).trace(tokens())


def test_an_offload_that_moves_nothing_warns():
    with pytest.warns(UserWarning, match="moves nothing"):
        step_of(TENSOR, {"tensor": 2}, offload=Offload(ratio=1e-9)).trace(tokens())


def test_a_model_without_layers_is_told_to_wrap_its_blocks():
    layout = hfjax.layout(
        lambda rngs: nnx.Linear(4, 4, rngs=rngs), optax.sgd(1), hfjax.make_mesh(data=-1), DDP
    )
    with pytest.raises(ValueError, match=r"hfjax.offload\(block"):
        hfjax.train_step(layout, next_token_loss, offload=Offload(ratio=0.5))


def test_a_block_that_keeps_nothing_is_refused():
    double = hfjax.offload(lambda w, x: w * 2 + x, ratio=0.5)
    with pytest.raises(ValueError, match="keep nothing"):
        jax.grad(lambda x: double(1.0, x))(1.0)


def test_devices_without_host_memory_are_refused(monkeypatch):
    monkeypatch.setattr("hfjax.parallel.offload.host_memory._memory_kinds", lambda mesh: ["device"])
    with pytest.raises(ValueError, match="no pinned_host memory"):
        step_of(offload=Offload(ratio=0.5))


def test_what_a_gpu_would_copy_from_host_to_host_is_refused(monkeypatch):
    step = partial(step_of, PIPE, {"pipe": 2}, offload=0.5)
    step(schedule=Schedule("zb-h1", 4))
    monkeypatch.setattr("hfjax.checks.feature_conflicts.platform_of", lambda mesh: "gpu")
    with pytest.raises(ValueError, match=r"offload=0.5 with schedule zb-h1: .* does not branch"):
        step(schedule=Schedule("zb-h1", 4))
    step(schedule=Schedule("1f1b", 4))


def test_remat_of_several_layers_together_is_refused_in_a_pipeline():
    with pytest.raises(ValueError, match="in a pipeline each layer"):
        step_of(PIPE, {"pipe": 2}, remat="group:2", schedule=Schedule("1f1b", 4))


# -- compiled for GPUs that are not here -----------------------------------------------------------


def compiled(strategy, sizes, rows, **options):
    """The memory of a step compiled for H200s, and the step."""
    devices = h200s(int(np.prod(list(sizes.values()))))
    layout = gpt_layout(
        strategy, sizes, optax.sgd(1e-3), devices, embed=128, length=256, vocab=256, layers=4
    )
    step = hfjax.train_step(
        layout, next_token_loss, precision="bf16", compiler_options=OPTIMIZED, **options
    )
    batch = {"tokens": jax.ShapeDtypeStruct((rows, 257), "int32")}
    found = step.lower(batch).compile().memory_analysis()
    assert found is not None
    return found, step.offloaded


@pytest.mark.cuda
@pytest.mark.parametrize("unroll", [1, True])
def test_compiled_for_an_h200_the_host_holds_what_the_report_says_and_the_device_less(unroll):
    plain, _ = compiled(DDP, {"data": 1}, 16, unroll=unroll)
    found, report = compiled(DDP, {"data": 1}, 16, unroll=unroll, offload=Offload(ratio=1.0))
    if unroll is not True:
        assert found.host_temp_size_in_bytes == report.host_bytes == report.total_bytes
    else:  # equal tensors of one layer may be one
        assert 0.9 * report.host_bytes <= found.host_temp_size_in_bytes <= report.host_bytes
    less = 0 if unroll is True else 0.5 * report.host_bytes
    assert found.temp_size_in_bytes < plain.temp_size_in_bytes - less


@pytest.mark.cuda
def test_compiled_for_four_h200s_the_rings_of_a_pipeline_lie_on_the_host():
    options = {"schedule": Schedule("1f1b", 8), "unroll": 1}
    plain, _ = compiled(PIPE, {"pipe": 4}, 32, **options)
    found, report = compiled(PIPE, {"pipe": 4}, 32, offload=Offload(ratio=1.0), **options)
    in_flight = 7  # microbatches of 1F1B on the first of four stages
    assert found.host_temp_size_in_bytes == in_flight * report.host_bytes
    assert found.temp_size_in_bytes < plain.temp_size_in_bytes - 0.8 * in_flight * report.host_bytes


class Normed(nnx.Module):
    """A layer whose statistics are over the rows of all devices: a collective in the forward."""

    def __init__(self, rngs):
        self.map, self.norm = nnx.Linear(8, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x):
        return x + nnx.tanh(self.norm(self.map(x)))


class OfNormed(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Normed(rngs) for _ in range(2)])

    def embed(self, batch):
        return batch

    head = embed


@pytest.mark.slow
def test_layers_that_normalise_over_all_devices_offload_too():
    mesh, x = hfjax.make_mesh(data=2, fsdp=2), np.random.default_rng(0).normal(size=(8, 8))
    layout = hfjax.layout(OfNormed, optax.sgd(0.1), mesh, hfjax.DDP)

    def trained(**offload):
        step = hfjax.train_step(layout, lambda y, _: (y**2).mean(), **offload)
        state, metrics = step(hfjax.init(layout), x.astype(np.float32))
        return [metrics["loss"], hfjax.full_array((state.params, state.variables))]

    chex.assert_trees_all_close(trained(offload=0.5), trained(), rtol=1e-6)
