"""Muon by names: equal to plain optax on separate matrices, under every strategy; what it sends."""

import math
from functools import partial
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import hfjax
from hfjax import (
    CONTEXT,
    DDP,
    EXPERT,
    FSDP,
    GRID,
    HOST_OPTIMIZER,
    HSDP,
    PIPE,
    TENSOR,
    ZERO1,
    ZERO2,
)
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss
from hfjax.models.llama import Llama, LlamaConfig
from hfjax.models.moe import MoEConfig, MoELlama, Router, next_token_loss as moe_loss
from hfjax.models.vision.vit import ViT, ViTConfig
from hfjax.optimizer_step.update import constrain
from hfjax.optimizers import muon
from hfjax.optimizers.layout_axes import LayoutAxes, use_shardings
from hfjax.optimizers.matrix_axes import MatrixReader
from hfjax.parallel.param_specs import Array
from hfjax.trainer import RunComponents
from hfjax.trainer.config import ModelConfig, OptimizerConfig, TrainConfig
from hfjax.trainer.optimizer import build_optimizer, make_lr_schedule
from hfjax.utils.paths import flatten, nest
from tests import plain_muon
from tests.small_gpt import gpt, gpt_layout, mlps, tokens
from tests.small_stack import Stack
from tests.test_uneven_stages import short

SHAPE: Any = {"vocab": 64, "length": 16, "layers": 3, "embed": 32, "heads": 4}
EXPERTS: Any = {"experts": 4, "capacity": None, "router": Router(balance_loss=0.0)}
LLAMA = LlamaConfig.tiny(kv_heads=2, mlp=48, **SHAPE)
MODELS = {
    "gpt": (lambda rngs: GPT(GPTConfig.tiny(**SHAPE), rngs=rngs), next_token_loss),
    "llama": (lambda rngs: Llama(LLAMA, rngs=rngs), next_token_loss),
    "moe": (
        lambda rngs: MoELlama(MoEConfig(kv_heads=2, mlp=16, **SHAPE, **EXPERTS), rngs=rngs),
        moe_loss,
    ),
}
BATCH = {"tokens": np.random.default_rng(0).integers(0, 64, (8, 17)).astype(np.int32)}
OPTIONS: Any = {"adam_learning_rate": 1e-3, "weight_decay": 0.1, "adam_weight_decay": 0.01}
SLOW = pytest.mark.slow


def layout_of(model, strategy, sizes, optimizer=None, **options):
    mesh = hfjax.make_mesh(devices=jax.devices()[: math.prod(sizes.values())], **sizes)
    optimizer = optimizer or muon(0.02, **OPTIONS)
    return hfjax.layout(model, optimizer, mesh, strategy.edit(replicate_below=0), **options)


# -- who gets what ------------------------------------------------------------------------------

NAMES = {
    "up [D, mlp] in layers": ((2, 8, 24), ("layers", "embed", "mlp"), "2 x [8, 24]"),
    "down": ((24, 8), ("mlp", "embed"), "1 x [24, 8]"),
    "qkv of kv heads": (
        (2, 8, 2, 4, 3), ("layers", "embed", "heads", "qkv", None), "2 x q [8, 12], k and v [8, 6]",
    ),
    "out of heads": ((4, 3, 8), ("heads", None, "embed"), "1 x [12, 8]"),
    "heads with a named width": ((8, 4, 3), ("embed", "kv_heads", "head_dim"), "1 x [8, 12]"),
    "heads read by auto": ((8, 4, 3), (None, "heads", None), "1 x [8, 12]"),
    "out of heads read by auto": ((4, 3, 8), ("heads", None, None), "1 x [12, 8]"),
    "a flat out read by auto": ((12, 8), ("heads", None), "1 x [12, 8]"),
    "gate and up": ((2, 8, 24, 2), ("layers", "embed", "mlp", "gate_up"), "4 x [8, 24]"),
    "a choice": ((3, 8, 24), ("choice", "embed", "mlp"), "3 x [8, 24]"),
    "experts": (
        (2, 4, 8, 24, 2), ("layers", "experts", "embed", "mlp", "gate_up"), "16 x [8, 24]",
    ),
    "an embedding": ((64, 8), ("vocab", "embed"), "an embedding or a head"),
    "positions": ((16, 8), ("position", "embed"), "an embedding"),
    "classes": ((8, 10), ("embed", "class"), "a head"),
    "a router": ((2, 8, 4), ("layers", "embed", "router"), "a router"),
    "a router to experts": ((8, 4), ("embed", "experts"), "no matrix"),
    "a stack of biases": ((2, 8), ("layers", None), "no matrix"),
    "a bias of q, k and v": ((2, 4, 3, 3), ("layers", "heads", "qkv", None), "no matrix"),
    "a bias of heads": ((4, 3), ("heads", None), "no matrix"),
    "a bias of experts": ((4, 24), ("experts", "mlp"), "no matrix"),
    "a convolution": (
        (3, 3, 8, 8), ("height", "width", "channel_in", "channel_out"), "4 sides, no matrix",
    ),
}  # fmt: skip


def test_names_say_what_is_a_matrix_in_times_out():
    arrays = {n: Array(n, shape, names) for n, (shape, names, _) in NAMES.items()}
    reader = MatrixReader(LayoutAxes(arrays))
    found = {name: str(reader.find(name, shape)) for name, (shape, _, _) in NAMES.items()}
    assert found == {name: text for name, (_, _, text) in NAMES.items()}


def test_a_layout_prints_who_gets_what():
    text = str(layout_of(MODELS["moe"][0], FSDP, {"fsdp": 2}))
    notes = [line for line in text.splitlines() if line.startswith("note: ")]
    assert notes == [
        "note: muon: layers/attention/out/kernel 3 x [32, 32]",
        "note: muon: layers/attention/qkv/kernel 3 x q [32, 32], k and v [32, 16]",
        "note: muon: layers/mlp/each/down 12 x [16, 32]",
        "note: muon: layers/mlp/each/gate_up 24 x [32, 16]",
        "note: AdamW beside muon (a router): layers/mlp/router_kernel",
        "note: AdamW beside muon (no matrix): layers/norm1/scale, layers/norm2/scale, norm/scale",
        "note: AdamW beside muon (an embedding or a head): tokens, unembed/kernel",
    ]


def test_an_image_model_has_matrices_in_its_layers_only():
    config = ViTConfig(classes=10, image=16, patch=8, layers=2, heads=2, embed=16, mlp=32)
    notes = str(layout_of(lambda rngs: ViT(config, rngs=rngs), DDP, {"data": 1})).split("note: ")
    of_muon = [note.split()[1] for note in notes if note.startswith("muon")]
    assert of_muon
    assert all("/kernel" in path and "layers/" in path for path in of_muon)


# -- equal to plain optax -----------------------------------------------------------------------

MESHES = {
    "DDP": (DDP, {"data": 2}),
    "ZERO1": (ZERO1, {"data": 4}),
    "ZERO2": (ZERO2, {"data": 2, "fsdp": 2}),
    "FSDP": (FSDP, {"fsdp": 4}),  # 3 layers: one device has padding
    "HSDP": (HSDP, {"data": 2, "fsdp": 2}),
    "TENSOR": (DDP | TENSOR, {"tensor": 2}),
    "FSDP TENSOR": (FSDP | TENSOR, {"fsdp": 2, "tensor": 2}),
    "ZERO1 TENSOR": (ZERO1 | TENSOR, {"data": 2, "fsdp": 2, "tensor": 2}),
    "GRID": (DDP | GRID, {"row": 2, "tensor": 2}),
    "CONTEXT": (FSDP | CONTEXT, {"fsdp": 2, "context": 2}),
    "HOST": (FSDP | HOST_OPTIMIZER, {"fsdp": 2}),
    "PIPE": (FSDP | PIPE, {"pipe": 3, "fsdp": 2}),
    "EXPERT": (FSDP | EXPERT, {"expert": 2, "fsdp": 2}),
}
STEPS = 3


@pytest.fixture(scope="module")
def plain():
    """Return name of a model -> its parameters after steps of plain optax, made once."""
    known = {}

    def of(name):
        if name not in known:
            model, loss = MODELS[name]
            layout = layout_of(model, DDP, {"data": 1})
            one = hfjax.to_model(layout, hfjax.init(layout))
            known[name] = plain_muon.train(one, loss, BATCH, STEPS, 0.02, **OPTIONS)
        return known[name]

    return of


def trained(name, strategy, sizes, optimizer=None, **execution):
    model, loss = MODELS[name]
    layout = layout_of(model, strategy, sizes, optimizer)
    schedule = hfjax.Schedule("1f1b", 2) if "pipe" in sizes else None
    step = hfjax.train_step(layout, loss, schedule=schedule, **execution)
    state = hfjax.init(layout, 0, schedule)
    for _ in range(STEPS):
        state, _ = step(state, BATCH)
    state = hfjax.to_model_order(layout, state)
    return plain_muon.take_apart(flatten(hfjax.full_array(state.params)))


def assert_equal(found, wanted, tolerance=1e-5):
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        np.testing.assert_allclose(found[name], x, rtol=0, atol=tolerance, err_msg=name)


@SLOW
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_plain_optax_on_separate_matrices(name, mesh, plain):
    if (mesh == "EXPERT" and name != "moe") or (mesh == "CONTEXT" and name == "moe"):
        pytest.skip("a mixture alone has experts, and groups of whole sequences")
    assert_equal(trained(name, *MESHES[mesh]), plain(name))


@SLOW
@pytest.mark.parametrize("mesh", ["DDP", "TENSOR"])
def test_a_layer_in_its_backward_pass_is_updated_by_its_own_matrices(mesh, plain):
    assert_equal(trained("gpt", *MESHES[mesh], optimizer_in_backward=True), plain("gpt"))


@SLOW
def test_stages_that_update_by_themselves_have_whole_matrices():
    """With every=microbatches, 2bw has one update in a call, as a schedule that waits."""
    made = []
    for name in ("1f1b-published", "2bw"):
        layout = small(PIPE, {"pipe": 2})
        schedule = hfjax.Schedule(name, 2, every=2 if name == "2bw" else None)
        made.append(flatten(hfjax.full_array(steps(layout, schedule=schedule).params)))
    assert_equal(made[1], made[0])


def exchanged(layout, gradients, steps=2):
    """Return parameters after updates by these gradients, as a step makes them."""
    specs = layout.param_specs
    shardings = {p: jax.NamedSharding(x.mesh, x.optimizer_state) for p, x in specs.items()}
    place = lambda tree: nest(constrain(flatten(tree), specs))

    def update(params, state, gradients):
        with use_shardings(shardings):
            updates, state = layout.optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params = hfjax.init(layout).params
    state = layout.optimizer.init(params)
    run = jax.jit(lambda params, state: update(place(params), state, place(gradients)))
    for _ in range(steps):
        params, state = run(params, state)
    return params


def draw(layout):
    rng = np.random.default_rng(1)
    make = lambda p: rng.normal(size=p.shape).astype(np.float32)
    return {path: make(p) for path, p in sorted(layout.param_specs.items())}


def test_an_update_is_that_of_plain_optax_however_the_state_is_sharded(short_cases):
    """Two updates by given gradients, without a model: programs of the optimizer alone."""
    options = {**OPTIONS, "ns_steps": 1}
    wanted: dict[str, Any] = {}
    cases = {name: mesh for name, mesh in MESHES.items() if name not in ("PIPE", "HOST")}
    for case, (strategy, sizes) in short_cases(cases, "FSDP TENSOR").items():
        name = "moe" if case == "EXPERT" else "llama"
        layout = layout_of(MODELS[name][0], strategy, sizes, muon(0.02, **options))
        gradients = draw(layout)
        if name not in wanted:
            params = flatten(hfjax.full_array(hfjax.init(layout).params))
            optimizer = plain_muon.muon(params, 0.02, **options)
            wanted[name] = plain_updates(optimizer, params, gradients)
        found = hfjax.full_array(exchanged(layout, gradients))
        assert_equal(plain_muon.take_apart(flatten(found)), wanted[name])


def plain_updates(optimizer, params, gradients):
    """Return arrays after two updates by plain optax, as they are taken apart."""
    apart: Any = plain_muon.take_apart(params)
    gradients = plain_muon.take_apart(gradients)
    state, update = optimizer.init(apart), jax.jit(optimizer.update)
    for _ in range(2):
        updates, state = update(gradients, state, apart)
        apart = optax.apply_updates(apart, updates)
    return {name: np.asarray(x) for name, x in apart.items()}


# -- what it sends ------------------------------------------------------------------------------

SENT = {  # strategy, mesh, layers, axes
    "FSDP": (FSDP, {"fsdp": 2}, 2, "fsdp"),
    "FSDP, 3 layers": (FSDP, {"fsdp": 2}, 3, "fsdp"),
    "HSDP": (HSDP, {"data": 2, "fsdp": 2}, 2, "fsdp"),
    "ZERO1": (ZERO1, {"data": 2}, 2, "data"),
    "ZERO2": (ZERO2, {"data": 2, "fsdp": 2}, 4, ("data", "fsdp")),
    "TENSOR": (DDP | TENSOR, {"tensor": 2}, 2, "tensor"),
    "FSDP TENSOR": (FSDP | TENSOR, {"fsdp": 2, "tensor": 2}, 4, ("fsdp", "tensor")),
}


def stacked_matrices(layout):
    return [p for p in layout.param_specs.values() if p.path.endswith("kernel")]


def test_devices_exchange_matrices_by_one_all_to_all_there_and_one_back(short_cases):
    """2 (n - 1) / n of the shard in all, where n divides the layers; else of the padded shard."""
    short = ("FSDP, 3 layers", "ZERO2", "TENSOR")
    for strategy, sizes, layers, axes in short_cases(SENT, *short).values():
        layout = gpt_layout(strategy, sizes, muon(0.1, ns_steps=1), model=gpt, layers=layers)
        found = hfjax.collectives(jax.jit(partial(exchanged_once, layout)).lower(shapes(layout)))
        exchanges = [row for row in found if row.kind == "all-to-all"]
        matrices = stacked_matrices(layout)
        assert found.count("all-to-all") == found.count("all-to-all", axes) == 2 * len(matrices)
        devices = exchanges[0].devices
        padded = math.ceil(layers / devices) * devices
        shard = sum(4 * math.prod(p.shape) // devices for p in matrices)
        assert found.total("all-to-all") == 2 * shard * padded // layers
        moved = sum(row.moved for row in exchanges)
        assert moved == 2 * (devices - 1) * shard * padded // layers // devices


def test_the_compiled_program_exchanges_matrices_and_sends_nothing_else_for_them():
    def sent(optimizer):
        layout = gpt_layout(FSDP, {"fsdp": 2}, optimizer, model=mlps)
        step = hfjax.train_step(layout, next_token_loss)
        found = hfjax.collectives(step.lower(tokens()).compile())
        return layout, sorted((r.kind, r.axes, r.bytes, r.count, r.where) for r in found)

    layout, by_muon = sent(muon(0.1, ns_steps=1))
    _, by_adam = sent(optax.adamw(0.1))
    exchanges = [row for row in by_muon if row[0] == "all-to-all"]
    assert [row for row in by_muon if row not in exchanges] == by_adam
    shards = [4 * math.prod(p.shape) // 2 for p in stacked_matrices(layout)]
    assert sum(count for *_, count, _ in exchanges) == 2 * len(shards)
    assert sum(size * count for _, _, size, count, _ in exchanges) == 2 * sum(shards)


def matmul_flops(jaxpr):
    """Return the multiplications of all matmuls of a program, of one device in a shard_map."""
    total = 0
    for equation in jaxpr.eqns:
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            total += matmul_flops(inner)
        if equation.primitive.name == "dot_general":
            contracted = equation.params["dimension_numbers"][0][0]
            shape = equation.invars[0].aval.shape
            size = math.prod(shape[dim] for dim in contracted)
            total += size * math.prod(equation.outvars[0].aval.shape)
    return total


def test_no_matrix_is_orthogonalized_twice(short_cases):
    def flops(strategy, sizes, layers):
        layout = gpt_layout(strategy, sizes, muon(0.1, ns_steps=1), model=gpt, layers=layers)
        return matmul_flops(jax.make_jaxpr(partial(exchanged_once, layout))(shapes(layout)).jaxpr)

    one = flops(DDP, {"data": 1}, 4)
    full = {name: SENT[name] for name in ("FSDP", "ZERO1", "ZERO2", "TENSOR", "FSDP TENSOR")}
    for strategy, sizes, _, _ in short_cases(full, "ZERO2").values():
        assert flops(strategy, sizes, 4) * math.prod(sizes.values()) == one
    assert flops(FSDP, {"fsdp": 2}, 3) * 2 == one  # 3 layers: 2 on a device, one of them zeros


def shapes(layout):
    shape = lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype)
    return {path: shape(p) for path, p in layout.param_specs.items()}


def exchanged_once(layout, flat):
    specs, gradients = layout.param_specs, nest(flat)
    shardings = {p: jax.NamedSharding(x.mesh, x.optimizer_state) for p, x in specs.items()}
    with use_shardings(shardings):
        state = layout.optimizer.init(gradients)
        return layout.optimizer.update(gradients, state, gradients)[0]


def test_a_matrix_of_no_stack_is_gathered_once():
    named = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}
    model = lambda rngs: {"up": jnp.ones((8, 16)), "down": jnp.ones((16, 8))}
    layout = layout_of(model, FSDP, {"fsdp": 4}, axes=named)
    run = jax.jit(partial(exchanged_once, layout))
    found = hfjax.collectives(run.lower(shapes(layout)))
    assert found.count("all-gather", "fsdp") == 2 == found.count()
    assert found.total() == 2 * 4 * 8 * 16


# -- models of one's own ------------------------------------------------------------------------


class Flat(nnx.Module):
    """A user's model, its names as Flax has them; no stack."""

    def __init__(self, rngs, named=True):
        def linear(inputs, outputs, *names):
            init = nnx.initializers.lecun_normal()
            init = nnx.with_partitioning(init, names) if named else init
            return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=init, rngs=rngs)

        self.up, self.down = linear(8, 16, "embed", "mlp"), linear(16, 8, "mlp", "embed")
        self.head = linear(8, 4, "embed", "vocab")

    def __call__(self, x):
        return self.head(jax.nn.relu(x + self.down(jax.nn.relu(self.up(x)))))


class LinenFlat(linen.Module):
    @linen.compact
    def __call__(self, x):
        def linear(size, *names):
            init = linen.with_partitioning(linen.initializers.lecun_normal(), names)
            return linen.Dense(size, use_bias=False, kernel_init=init)

        up = jax.nn.relu(linear(16, "embed", "mlp")(x))
        return linear(4, "embed", "vocab")(jax.nn.relu(x + linear(8, "mlp", "embed")(up)))


INPUTS = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
UNNAMED = lambda rngs: Flat(rngs, named=False)
OWN = {
    "nnx": (Flat, {}),
    "linen": (
        lambda rngs: nnx.bridge.lazy_init(nnx.bridge.ToNNX(LinenFlat(), rngs=rngs), INPUTS),
        {},
    ),
    "axes": (
        UNNAMED,
        {"axes": {"up/*": ("embed", "mlp"), "down/*": ("mlp", None), "head/*": (None, "vocab")}},
    ),
    "auto": (UNNAMED, {"axes": "auto", "example": INPUTS}),
}


def squares(outputs, batch):
    return jnp.square(outputs).mean()


@pytest.mark.parametrize("name", OWN)
@pytest.mark.short("auto")
def test_a_model_of_ones_own_with_names_trains_as_plain_optax(name):
    model, options = OWN[name]
    optimizer = muon(0.02, ns_steps=1)
    if name == "auto":  # a head, being in the output, has no name
        adam = optax.adamw(0.02, weight_decay=0.0, nesterov=True)
        optimizer = hfjax.optimizers.by_path({"head/*": adam, "*": optimizer})
    layout = layout_of(model, FSDP, {"fsdp": 2}, optimizer, **options)
    step, state = hfjax.train_step(layout, squares), hfjax.init(layout)
    params: Any = flatten(hfjax.full_array(state.params))
    (head,) = (path for path, p in layout.param_specs.items() if p.shape == (8, 4))
    numbers = {path: None if path == head else plain_muon.MATRIX for path in params}
    plain: Any = optax.contrib.muon(
        0.02, ns_steps=1, muon_weight_dimension_numbers=lambda _: numbers
    )
    notes = f"AdamW beside muon (an embedding or a head): {head}"
    assert (notes in str(layout)) == (name != "auto")
    up, down = (next(x for x in params.values() if x.shape == s) for s in ((8, 16), (16, 8)))
    loss = lambda p: squares(
        jax.nn.relu(INPUTS + jax.nn.relu(INPUTS @ by_shape(p, up)) @ by_shape(p, down)) @ p[head],
        None,
    )
    by_shape = lambda p, like: next(x for x in p.values() if x.shape == like.shape)
    kept = plain.init(params)
    for _ in range(2):
        state, _ = step(state, INPUTS)
        updates, kept = plain.update(jax.grad(loss)(params), kept, params)
        params = optax.apply_updates(params, updates)
    assert_equal(flatten(hfjax.full_array(state.params)), params)


# -- with what else a run uses ------------------------------------------------------------------


def small(strategy, sizes, optimizer=None, **changes):
    return gpt_layout(strategy, sizes, optimizer or muon(0.02, ns_steps=1), model=mlps, **changes)


def steps(layout, count=2, **execution):
    schedule = execution.get("schedule")
    step, state = (
        hfjax.train_step(layout, next_token_loss, **execution),
        hfjax.init(layout, 0, schedule),
    )
    for _ in range(count):
        state, _ = step(state, tokens())
    return hfjax.to_model_order(layout, state)


@SLOW
def test_it_goes_together_with_other_optimizers_and_their_wrappers():
    adam, kernels = optax.adamw(1e-3), muon(0.02, ns_steps=1, ns_dtype="bfloat16")
    groups = hfjax.optimizers.by_path({"positions": adam, "*": kernels})
    optimizer = hfjax.optimizers.scaled(optax.chain(optax.clip(1.0), groups), {"layers/*": 0.5})
    optimizer = hfjax.optimizers.master_weights(hfjax.optimizers.ema(optimizer, 0.9))
    made = []
    for strategy, sizes in ((DDP, {"data": 1}), (FSDP, {"fsdp": 2})):
        layout = small(strategy, sizes, optimizer).freeze("norm/*").freeze("layers/*", first=1)
        state = steps(layout, gradient_accumulation_steps=2, precision="bf16")
        mastered = state.optimizer.inner_states["trained"].inner_state
        master = flatten(hfjax.full_array(mastered.master))
        made.append({path: x for path, x in master.items() if hasattr(x, "shape")})
    one, other = made
    begin = flatten(hfjax.full_array(hfjax.init(small(DDP, {"data": 1})).params))
    kernel = "layers/mlp/up/kernel"
    np.testing.assert_array_equal(one[kernel][0], begin[kernel][0])
    assert np.abs(one[kernel][1] - begin[kernel][1]).max() > 1e-3
    moved = np.abs(one[kernel] - begin[kernel]).max()
    for path in (
        kernel,
        "layers/mlp/down/kernel",
    ):  # AdamW's signs are noise
        np.testing.assert_allclose(other[path], one[path], atol=moved / 10, err_msg=path)


def test_its_state_is_one_momentum_of_matrices_and_two_moments_of_the_rest():
    layout = small(FSDP, {"fsdp": 2})
    matrices = sum(math.prod(p.shape) for p in stacked_matrices(layout))
    rest = sum(math.prod(p.shape) for p in layout.param_specs.values()) - matrices
    counts = 2 * 4  # of matrices, of AdamW
    assert layout.bytes_per_device()["optimizer_state"] == 4 * (matrices + 2 * rest) // 2 + counts


def test_its_state_is_restored_under_another_strategy(tmp_path):
    layouts = [small(FSDP, {"fsdp": 2}), small(ZERO1 | TENSOR, {"data": 2, "tensor": 2})]
    groups = lambda state: state.optimizer.groups.inner_states["matrices"].inner_state[0]
    drawn = {path: draw(layouts[0])[path] for path in layouts[0].param_specs}
    state = jax.tree_util.tree_map_with_path(
        lambda keys, x: drawn.get("/".join(str(getattr(k, "key", "")) for k in keys[-4:]), x),
        hfjax.init(layouts[0]),
    )
    state = jax.device_put(state, layouts[0].shardings())
    hfjax.save(tmp_path, layouts[0], state)
    restored = hfjax.restore(tmp_path, layouts[1]).state
    pairs = zip(*(jax.tree.leaves(hfjax.full_array(x)) for x in (state, restored)), strict=True)
    for before, after in pairs:
        np.testing.assert_array_equal(before, after)
    kernel = "layers/mlp/up/kernel"
    momentum = flatten(groups(restored).mu)[kernel]
    assert np.abs(momentum).max() > 1
    assert momentum.sharding.spec == layouts[1].param_specs[kernel].optimizer_state


def test_the_command_line_names_its_momentum_decay_and_both_rates():
    flags = OptimizerConfig("muon", learning_rate=0.1, adam_learning_rate=0.01, momentum=0.5)
    config = TrainConfig(optimizer=flags, steps=8)
    rate = make_lr_schedule(config)
    adam_rate = lambda count: 0.1 * rate(count)
    direct = muon(
        rate, beta=0.5, adam_learning_rate=adam_rate, weight_decay=0.1, adam_weight_decay=0.1
    )
    model = lambda _: {"up": jnp.ones((8, 16)), "tokens": jnp.ones((16, 8))}
    names = {"up": ("embed", "mlp"), "tokens": ("vocab", "embed")}
    made = []
    for optimizer in (build_optimizer(config, rate), direct):
        layout = layout_of(model, DDP, {"data": 1}, optimizer, axes=names)
        made.append(hfjax.full_array(exchanged(layout, draw(layout))))
    np.testing.assert_allclose(made[0]["up"], made[1]["up"], rtol=1e-6)
    np.testing.assert_allclose(made[0]["tokens"], made[1]["tokens"], rtol=1e-6)


def test_a_run_prints_which_parameters_muon_updates():
    model = ModelConfig(num_layers=1, hidden_size=32, num_heads=2, seq_len=16)
    options: Any = {"model": model, "devices": 1}
    config = TrainConfig(optimizer=OptimizerConfig("muon"), **options)
    notes = RunComponents(config).startup_notes()
    assert "muon: layers/attention/qkv/kernel 1 x q [32, 32], k and v [32, 32]" in notes
    assert "AdamW beside muon (an embedding): positions" in notes


# -- what is refused ----------------------------------------------------------------------------


def test_muon_on_a_model_without_names_is_refused():
    with pytest.raises(ValueError, match=r"muon: \S+ \[\d+, \d+\] has no names .*axes=.*by_path"):
        layout_of(UNNAMED, DDP, {"data": 1})
    stack = lambda rngs: Stack(3, rngs=rngs)
    with pytest.raises(ValueError, match=r"muon: layers/kernel \[3, 8, 8\] has no names .*by_path"):
        layout_of(stack, FSDP, {"fsdp": 2}, axes={"before": ("embed", "mlp")})


def test_a_bias_of_heads_is_no_matrix_whether_kernels_name_its_width_or_not():
    for width in ("head_dim", None):
        arrays = {
            "kernel": Array("kernel", (16, 4, 4), ("embed", "heads", width)),
            "bias": Array("bias", (4, 4), ("heads", None)),
        }
        assert MatrixReader(LayoutAxes(arrays)).find("bias", (4, 4)) == "no matrix"


def test_names_that_leave_open_what_is_a_matrix_are_refused():
    def of(shape, names):
        return layout_of(lambda _: {"w": jnp.ones(shape)}, DDP, {"data": 1}, axes={"w": names})

    with pytest.raises(ValueError, match=r"two sides of a matrix is not clear.*'qkv' for queries"):
        of((8, 4, 3, 2), ("embed", "heads", None, None))
    with pytest.raises(ValueError, match=r"not clear.*'choice' for what stacks matrices"):
        of((8, 16, 2), ("embed", "mlp", None))
    with pytest.raises(ValueError, match=r"named 'qkv', which holds queries.* at least 3, found 2"):
        of((8, 4, 2, 2), ("embed", "heads", "qkv", None))


def test_muon_without_a_layout_is_refused():
    params = {"w": jnp.ones((8, 8))}
    with pytest.raises(ValueError, match=r"reads the names of a model's dimensions from its layo"):
        muon(0.1).init(params)
    layout = small(DDP, {"data": 1})
    with pytest.raises(ValueError, match=r"muon: w \[8, 8\] is no parameter of the layout's mode"):
        layout.optimizer.init(params)


RATE: Any = {"learning_rate": 0.1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": -1.0}, r"muon: learning_rate=-1.0: a finite number"),
        ({"learning_rate": 0.1, "adam_learning_rate": "x"}, r"muon: adam_learning_rate='x': a fin"),
        ({"learning_rate": 0.1, "ns_dtype": "int8"}, r"muon: ns_dtype=int8: a floating-point type"),
        ({**RATE, "mu_dtype": "int8"}, r"muon: mu_dtype=int8: a floating-point type is expected"),
        ({**RATE, "mu_dtype": "foo"}, r"muon: mu_dtype='foo': a dtype"),
        ({**RATE, "beta": 1.0}, r"muon: beta=1\.0: a number from 0 to below 1"),
        ({**RATE, "adam_b1": -0.5}, r"muon: adam_b1=-0\.5: a number from 0 to below 1"),
        ({**RATE, "eps": -1}, r"muon: eps=-1: a number from 0 on"),
        ({**RATE, "weight_decay": "x"}, r"muon: weight_decay='x': a number from 0 on"),
        ({**RATE, "consistent_rms": 0}, r"muon: consistent_rms=0: no matrix would move"),
        ({**RATE, "ns_steps": 0}, r"muon: ns_steps=0: a positive number of iterations"),
        ({**RATE, "ns_steps": 2.5}, r"muon: ns_steps=2\.5: a positive number of iterations"),
        ({**RATE, "ns_coeffs": (1, 2)}, r"muon: ns_coeffs=\(1, 2\): three numbers, or rows"),
        ({**RATE, "ns_coeffs": "foo"}, r"muon: ns_coeffs='foo': one of standard, dion, or three"),
        (
            {**RATE, "preconditioning": "foo"},
            r"muon: preconditioning='foo': one of frobenius",
        ),
        ({**RATE, "nesterov": "no"}, r"muon: nesterov='no': True or False"),
        ({**RATE, "ns_coeffs": "muons"}, r"muon: ns_coeffs='muons': one of standard, dion"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        muon(**options)


def test_where_devices_update_pieces_of_matrices_or_lists_of_layers_it_is_refused():
    with pytest.raises(ValueError, match=r"an optimizer that .*, with optimizer_in_backward=True"):
        hfjax.train_step(small(FSDP, {"fsdp": 2}), next_token_loss, optimizer_in_backward=True)
    listed = layout_of(short, PIPE, {"pipe": 2}, axes={"*/kernel": ("embed", "mlp")})
    with pytest.raises(ValueError, match=r"optimizer that does not work element by element"):
        hfjax.train_step(listed, squares, schedule=hfjax.Schedule("1f1b", 2))


def test_a_wrapper_of_optax_is_looked_through():
    everything = lambda params: jax.tree.map(lambda _: True, params)
    for optimizer in (
        optax.MultiSteps(muon(0.02), 2),
        optax.inject_hyperparams(muon)(learning_rate=0.1),
        optax.apply_if_finite(muon(0.1), 3),
        optax.masked(muon(0.1), everything),
    ):
        text = str(small(DDP, {"data": 1}, optimizer))
        assert "note: muon: layers/mlp/up/kernel 2 x [32, 128]" in text
