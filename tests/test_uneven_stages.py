"""A list of unlike layers runs as a pipeline, as one device runs it; what it costs is stated."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import hfjax
from hfjax import DDP, FSDP, PIPE, TENSOR, ZERO1, Schedule
from hfjax.models.layers import Dropout
from hfjax.parallel.layer_costs import flop_costs, parameter_costs
from hfjax.parallel.packing import Packing
from hfjax.testing import assert_strategies_agree

RNG = np.random.default_rng(0)
IMAGES = {
    "x": RNG.normal(size=(16, 4, 4, 3)).astype(np.float32),
    "y": RNG.normal(size=(16, 5)).astype(np.float32),
}
ROWS = {"x": IMAGES["x"].reshape(16, 48)[:, :8], "y": IMAGES["y"]}


def squares(outputs, batch):
    return jnp.mean((outputs - batch["y"]) ** 2)


class Listed(nnx.Module):
    """A model in three parts whose layers are a list."""

    def __init__(self, layers, before, after):
        self.layers, self.before, self.after = nnx.List(layers), before, after

    def embed(self, batch):
        return self.before(batch["x"])

    def head(self, x):
        return self.after(x.reshape(len(x), -1))

    def __call__(self, batch):
        x = self.embed(batch)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Block(nnx.Module):
    """A residual block that may halve the image."""

    def __init__(self, inside, outside, stride, *, rngs):
        self.conv = nnx.Conv(inside, outside, (3, 3), strides=stride, rngs=rngs)
        self.norm = nnx.GroupNorm(outside, num_groups=2, rngs=rngs)
        self.skip = nnx.Conv(inside, outside, (1, 1), strides=stride, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.conv(x)) + self.skip(x)


def pool(x):
    return nnx.avg_pool(x, (2, 2))


def resnet(rngs):
    layers = [Block(4, 4, 1, rngs=rngs), nnx.relu, Block(4, 8, 2, rngs=rngs), pool]
    return Listed(layers, nnx.Conv(3, 4, (3, 3), rngs=rngs), nnx.Linear(8, 5, rngs=rngs))


def short_resnet(rngs):
    layers = [nnx.relu, Block(3, 8, 2, rngs=rngs), nnx.relu, pool]
    return Listed(layers, lambda x: x, nnx.Linear(8, 5, rngs=rngs))


def mlp(rngs, half=jnp.float32):
    """Layers of different widths and dtypes, functions between them."""
    up = nnx.Linear(8, 24, param_dtype=half, dtype=jnp.float32, rngs=rngs)
    down = nnx.Linear(24, 8, rngs=rngs)
    layers = [up, nnx.relu, Dropout(0.2, rngs=rngs), down, jnp.tanh, nnx.Linear(8, 6, rngs=rngs)]
    return Listed(layers, nnx.LayerNorm(8, rngs=rngs), nnx.Linear(6, 5, rngs=rngs))


def short(rngs, half=jnp.float32, beside=jnp.tanh):
    """The same in fewer layers, which compile in a third of the time."""
    up = nnx.Linear(8, 24, param_dtype=half, dtype=jnp.float32, rngs=rngs)
    layers = [up, nnx.relu, beside, nnx.Linear(24, 6, rngs=rngs)]
    head = nnx.Linear(6, 5, param_dtype=half, dtype=jnp.float32, rngs=rngs)
    return Listed(layers, lambda x: x, head)


def pipe(name="1f1b", microbatches=2, **fields):
    return {"schedule": Schedule(name, microbatches, **fields)}


CASES = {
    "1f1b": (PIPE, {"pipe": 4}, pipe(microbatches=4)),
    "interleaved, ZeRO-1": (PIPE | ZERO1, {"pipe": 2, "data": 2, "fsdp": 2}, pipe("interleaved")),
    "split backwards, ZeRO-3": (PIPE | FSDP, {"pipe": 2, "fsdp": 2}, pipe("zb", balance=(3, 1))),
    "branches, data": (PIPE | DDP, {"pipe": 2, "data": 2}, pipe("zb-h1", 4) | {"remat": "full"}),
}


def whole(names):
    """Return cases of CASES in which every array is split, however small."""
    return {name: (CASES[name][0].edit(replicate_below=0), *CASES[name][1:]) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("init", "names"),
    [(short_resnet, ["1f1b"]), pytest.param(resnet, list(CASES), marks=pytest.mark.slow)],
)
def test_a_resnet_equals_one_device(init, names):
    assert_strategies_agree(init, squares, IMAGES, whole(names), steps=2)


@pytest.mark.parametrize(
    ("init", "names"),
    [(short, ["interleaved, ZeRO-1"]), pytest.param(mlp, list(CASES), marks=pytest.mark.slow)],
)
def test_dense_layers_equal_one_device(init, names):
    cases = whole(CASES)
    strategy, sizes, _ = cases["split backwards, ZeRO-3"]
    cases["split backwards, ZeRO-3"] = strategy, sizes, pipe("zb", balance=(4, 2))
    chosen = {name: cases[name] for name in names}
    assert_strategies_agree(init, squares, ROWS, chosen, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "beside", [jnp.sin, pytest.param(partial(Dropout, 0.2), marks=pytest.mark.slow)]
)
def test_functions_dropout_and_two_dtypes_equal_one_device(beside):
    made = lambda rngs: beside if beside is jnp.sin else beside(rngs=rngs)
    init = lambda rngs: short(rngs, jnp.bfloat16, made(rngs))
    strategy, run = (
        PIPE.edit(replicate_below=0),
        {"gradient_accumulation_steps": 1, **pipe("v-zb", 4)},
    )
    cases = {"V": (strategy, {"pipe": 2}, run)}
    same = {
        "gradient_accumulation_steps": 4,
        "precision": "stored",
        "max_grad_norm": 0.1,
    }  # rounding of bfloat16 too
    assert_strategies_agree(init, squares, ROWS, cases, steps=2, **same)


class Masked(nnx.Module):
    """Hands on a mask and whole numbers beside the activations, of which it may drop some."""

    def __init__(self, rate=0.0, *, rngs):
        self.up, self.dropout = nnx.Linear(8, 8, rngs=rngs), Dropout(rate, rngs=rngs)

    def __call__(self, x):
        x, mask, turn = x
        return jnp.where(mask[:, None], self.dropout(self.up(x)), x), mask, turn + 1


@pytest.mark.slow
def test_masks_and_whole_numbers_go_from_stage_to_stage_and_dropout_is_that_of_one_device():
    def init(rngs):
        before = lambda x: (x, x[:, 0] > 0, jnp.zeros((len(x),), jnp.int32))
        layers = [Masked(rngs=rngs), Masked(0.2, rngs=rngs), lambda x: x[0] * x[2][:, None]]
        return Listed(layers, before, nnx.Linear(8, 5, rngs=rngs))

    case = {"1F1B": (PIPE, {"pipe": 2}, pipe())}
    assert_strategies_agree(init, squares, ROWS, case, steps=1)


def equal(stack):
    """Return a model of four equal layers, in a list or stacked."""

    def init(rngs):
        linear = lambda outputs: nnx.Linear(8, outputs, rngs=rngs)
        model: Any = Listed([linear(8) for _ in range(4)], lambda x: x, linear(5))
        if stack:
            graphs, states = zip(*map(nnx.split, model.layers), strict=True)
            model.layers = nnx.merge(graphs[0], jax.tree.map(lambda *x: jnp.stack(x), *states))
        return model

    return init


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "remat"),
    [("pipedream", "except_last"), pytest.param("2bw", "none", marks=pytest.mark.slow)],
)
def test_stages_of_a_list_update_by_themselves_as_those_of_a_stack(name, remat):
    losses = []
    for stack in (False, True):
        plan = layout({"pipe": 2}, init=equal(stack))
        step, state = hfjax.train_step(plan, squares, **pipe(name, 4), remat=remat), None
        for _ in range(3):
            state, metrics = step(state or hfjax.init(plan), ROWS)
            losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses[:3], losses[3:], rtol=1e-6)


# -- what is stored -----------------------------------------------------------------------


def layout(sizes, strategy=PIPE, init=mlp, optimizer=None, **options):
    mesh = hfjax.make_mesh(devices=jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)
    strategy = strategy.edit(replicate_below=0)
    return hfjax.layout(init, optimizer or optax.adamw(1e-2), mesh, strategy, **options)


def test_what_packed_layers_keep_may_wait_on_the_host():
    def trained(offload):
        plan = layout({"pipe": 2}, init=short)
        step = hfjax.train_step(plan, squares, offload=offload, **pipe())
        state, metrics = step(hfjax.init(plan, schedule=pipe()["schedule"]), ROWS)
        return hfjax.full_array(state.params), metrics["loss"], step

    found, wanted = trained(0.5), trained(None)
    jax.tree.map(np.testing.assert_array_equal, found[:2], wanted[:2])
    assert 0.4 < found[2].offloaded.ratio < 0.6


def test_a_device_holds_its_row_padded_to_the_largest_and_nothing_more():
    plan = layout({"pipe": 2, "fsdp": 2}, PIPE | ZERO1)
    step = hfjax.train_step(plan, squares, **pipe("interleaved", balance=(1, 2, 2, 1)))
    largest, ends = 1024, 2 * 8 + 6 * 5 + 5  # 8 x 24 + 24 elements of the first layer fill one row
    state = hfjax.init(step.layout)
    on_device = lambda tree: sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))
    assert step.layout.bytes_per_device()["parameters"] == (2 * largest + ends) * 4
    assert on_device(state.params) == (2 * largest + ends) * 4
    moments = state.optimizer[0].mu["layers"]
    assert on_device(moments) == 2 * largest * 4 // 2


def test_a_layout_states_what_padding_costs():
    wide = lambda rngs: Listed(
        [nnx.Linear(8, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs), jnp.tanh, jnp.tanh],
        lambda x: x,
        nnx.Linear(64, 5, rngs=rngs),
    )
    told = str(layout({"pipe": 2}, init=wide, example=ROWS))
    assert "stage 0: layers 0-1, 73.2 KiB of 76.0 KiB" in told
    assert "stage 1: layers 2-3, 0 B of 76.0 KiB" in told
    assert "each of the 2 parts of the layers takes 76.0 KiB, as the largest needs: 52% is" in told
    assert 'balance="parameters" makes it 68.0 KiB' in told
    assert "256 B a row go from stage to stage, as the largest needs: 32 B, 256 B, 256 B" in told


def test_packing_gives_back_what_was_packed():
    trees = [{"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(2, bool)}, [jnp.zeros(())]]
    packing = Packing(trees, multiple=4)
    assert packing.lengths == {"bool": 4, "float32": 8}
    for i, tree in enumerate(trees):
        found = packing.unpack(i, packing.pack(i, tree))
        jax.tree.map(np.testing.assert_array_equal, found, tree)


@pytest.mark.slow
def test_a_canonical_state_is_that_of_one_device_and_goes_on_under_any_layout(tmp_path):
    piped, other = layout({"pipe": 4}, init=short), layout({"fsdp": 2}, FSDP, init=short)
    steps = [
        hfjax.train_step(piped, squares, schedule=Schedule("1f1b", 2)),
        hfjax.train_step(other, squares),
        hfjax.train_step(layout({"pipe": 2}, init=short), squares, **pipe("interleaved")),
    ]
    state, _ = steps[0](hfjax.init(piped), ROWS)
    saved = hfjax.to_model_order(piped, state)
    one = hfjax.init(layout({"data": 1}, DDP, init=short))
    assert jax.tree.map(jnp.shape, saved) == jax.tree.map(jnp.shape, one)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        checkpointer.wait_until_finished()
        restore = lambda plan: checkpointer.restore(
            tmp_path / "state", plan.model_layout.abstract_state()
        )
        states = [restore(step.layout) for step in steps]
    losses = [float(step(old, ROWS)[1]["loss"]) for step, old in zip(steps, states, strict=True)]
    losses.append(float(steps[0](state, ROWS)[1]["loss"]))
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)
    assert not any(x.is_deleted() for x in jax.tree.leaves(saved))  # a step took only its own


@pytest.mark.slow
def test_an_evaluation_runs_forward_only_and_from_any_packing():
    plan = layout({"pipe": 2}, init=short)
    schedule = Schedule("interleaved", 2)
    state = hfjax.init(plan, schedule=schedule)
    steps = [hfjax.eval_step(plan, squares, schedule=how) for how in (schedule, None)]
    losses = [float(step(state, ROWS)["loss"]) for step in steps]
    one = layout({"data": 1}, DDP, init=short)
    wanted = hfjax.eval_step(one, squares)(hfjax.init(one), ROWS)["loss"]
    np.testing.assert_allclose(losses, float(wanted), rtol=1e-6)


def test_no_collective_lies_in_a_branch_and_a_row_is_gathered_once_a_pass():
    plan = layout({"pipe": 2, "fsdp": 2}, PIPE | FSDP)
    step = hfjax.train_step(plan, squares, **pipe("zb", 4))
    ticks = Schedule("zb", 4).table(2).cells
    slots = lambda kind: int((ticks[:, :, kind] >= 0).any(axis=1).sum())
    rows = [r for r in hfjax.collectives(step.lower(ROWS)) if r.shape == (1024,)]
    assert not [r for r in rows if "branch" in r.where]
    count = {kind: sum(r.count for r in rows if r.kind == kind) for kind in {r.kind for r in rows}}
    assert count == {"all-gather": slots(0) + slots(1), "reduce-scatter": slots(2)}


# -- balance ------------------------------------------------------------------------------


@pytest.mark.slow
def test_layers_are_dealt_by_number_by_parameters_by_work_or_by_hand():
    shapes = jax.ShapeDtypeStruct((1000, 8), jnp.float32)
    batch = {"x": shapes, "y": jax.ShapeDtypeStruct((1000, 5), jnp.float32)}
    plan = layout({"pipe": 2}, init=resized, example=batch)

    def parts(balance):
        step = hfjax.train_step(plan, squares, **pipe(balance=balance))
        assert step.layout.storage.arrangement is not None
        return step.layout.storage.arrangement.stage_layers

    assert parts("even") == [[0, 1, 2], [3, 4]]
    assert parts("parameters") == [[0, 1, 2, 3], [4]]
    assert parts("flops") == [[0], [1, 2, 3, 4]]
    assert parts((2, 3)) == [[0, 1], [2, 3, 4]]


class Repeated(nnx.Module):
    """Works twenty times with few parameters."""

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return jax.lax.fori_loop(0, 20, lambda _, x: jnp.tanh(self.linear(x)), x)


def resized(rngs):
    linear = lambda inside, outside: nnx.Linear(inside, outside, rngs=rngs)
    layers = [Repeated(rngs=rngs), linear(8, 8), jnp.tanh, linear(8, 8), linear(8, 24)]
    return Listed(layers, lambda x: x, linear(24, 5))


def test_costs_of_layers_are_their_bytes_and_operations():
    layers = nnx.eval_shape(lambda: resized(nnx.Rngs(0))).layers
    assert parameter_costs(list(layers)) == [288, 288, 0, 288, 864]
    costs = flop_costs(list(layers), jax.ShapeDtypeStruct((10, 8), jnp.float32))
    linear = 2 * 10 * 8 * 8 + 80
    assert costs == [20 * (linear + 80), linear, 80, linear, 3 * linear]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"balance": (1, 1, 1)}, r"balance=\[1, 1, 1\] has 3 parts of 3 layers"),
        ({"balance": "flops"}, r'balance="flops" counts .* hfjax.layout\(…, example=batch\)'),
        ({"name": "interleaved", "chunks": 4}, r"6 layers for 8 parts .* each needs at least one"),
    ],
)
def test_a_balance_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        hfjax.train_step(layout({"pipe": 2}), squares, **pipe(**fields))


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match=r"6 layers for 8 parts .*: each needs at least one"):
        layout({"pipe": 8})


# -- refused ------------------------------------------------------------------------------


def decayed_by_dimension():
    kernels = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
    return optax.adamw(1e-3, mask=kernels)


def frozen_by_path():
    keep = lambda keys, _: keys[0].key != "layers" or keys[1].key == "0"
    mask = lambda params: jax.tree_util.tree_map_with_path(keep, params)
    return optax.masked(optax.sgd(0.1), mask)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.lamb(1e-3),
        optax.lars(1e-3),
        optax.adafactor(1e-3),
        optax.contrib.muon(1e-3),
        optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
        decayed_by_dimension(),
        frozen_by_path(),
    ],
    ids=["lamb", "lars", "adafactor", "muon", "clipping by unit", "decay by dimension", "by path"],
)
def test_an_optimizer_that_tells_parameters_apart_is_refused(optimizer):
    plan = layout({"pipe": 2}, init=short, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"optimizer that does not work element by element .*LAMB"):
        hfjax.train_step(plan, squares, **pipe())


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(0.1, momentum=0.9),
        optax.lion(1e-3),
        optax.chain(optax.clip_by_global_norm(0.1), optax.adam(optax.cosine_decay_schedule(1, 9))),
        optax.multi_transform(
            {"fast": optax.adam(1e-2), "slow": optax.sgd(1e-3)},
            lambda params: {name: "fast" if name == "layers" else "slow" for name in params},
        ),
    ],
    ids=["momentum", "lion", "clipped adam", "other for the ends"],
)
def test_an_optimizer_that_works_element_by_element_is_taken(optimizer):
    hfjax.train_step(layout({"pipe": 2}, init=short, optimizer=optimizer), squares, **pipe())


def test_a_tensor_axis_is_refused():
    named = lambda rngs: Listed(
        [nnx.Linear(8, 8, kernel_metadata={"axes": ("embed", "mlp")}, rngs=rngs), jnp.tanh],
        lambda x: x,
        nnx.Linear(8, 5, rngs=rngs),
    )
    plan = layout({"pipe": 2, "tensor": 2}, PIPE | TENSOR, init=named)
    with pytest.raises(ValueError, match=r"a list of layers run different programs.*Use tensor=1"):
        hfjax.train_step(plan, squares, **pipe())


def test_a_parameter_that_two_layers_share_is_refused():
    def shared(rngs):
        linear = nnx.Linear(8, 8, rngs=rngs)
        return Listed([linear, jnp.tanh, linear], lambda x: x, nnx.Linear(8, 5, rngs=rngs))

    with pytest.raises(ValueError, match="layer 2 shares layers/0/bias with layer 0"):
        layout({"pipe": 2}, init=shared)


def test_a_head_that_reads_a_layer_is_refused():
    class Tied(Listed):
        def head(self, x):
            return self.after(x) + self.layers[0].bias[...].sum()

    tied = lambda rngs: Tied(
        [nnx.Linear(8, 8, rngs=rngs), jnp.tanh], lambda x: x, nnx.Linear(8, 5, rngs=rngs)
    )
    step = hfjax.train_step(layout({"pipe": 2}, init=tied), squares, **pipe())
    with pytest.raises(ValueError, match="layers/0/bias is used outside of its layer"):
        step.lower(ROWS)


def test_running_statistics_are_refused_by_their_paths():
    normed = lambda rngs: Listed(
        [nnx.Linear(8, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)],
        lambda x: x,
        nnx.Linear(8, 5, rngs=rngs),
    )
    step = hfjax.train_step(layout({"pipe": 2}, init=normed), squares, **pipe())
    with pytest.raises(ValueError, match=r"a layer writes to layers/1/mean, layers/1/var: in a pi"):
        step.lower(ROWS)
