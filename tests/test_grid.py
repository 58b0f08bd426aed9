"""A grid of tensor parallelism trains as one device does, and sends what its formula says."""

import json
import math
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import hfjax
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss
from hfjax.models.layers import Linear, RMSNorm, stack_layers
from hfjax.models.llama import Llama, LlamaConfig
from hfjax.parallel.jaxprs.walk import equations_in
from hfjax.testing import assert_strategies_agree
from tests import grid_bytes, small_gpt
from tests.grid_bytes import LAYERS, LENGTH, ROWS, VOCAB, WIDE, WIDTH, batch, layout, step

# fsdp, row, tensor. With row=1 it is what TENSOR | SEQUENCE has always been.
SIDES = [(1, 2, 2), (2, 2, 2), (1, 2, 3), (2, 1, 3), (1, 4, 2), (1, 2, 4)]


def gpt(**changes):
    shape = {"vocab": 22, "pad_vocab_to": 12, "length": 12, "layers": 2, "embed": 24, "heads": 12}
    return lambda rngs: GPT(GPTConfig.tiny(**shape | changes), rngs=rngs)


def llama(**changes):
    shape = {"vocab": 24, "length": 12, "layers": 2, "embed": 48, "heads": 24, "kv_heads": 12}
    return lambda rngs: Llama(LlamaConfig.tiny(**shape | {"mlp": 36} | changes), rngs=rngs)


def tokens(rows=16, length=12):
    rng = np.random.default_rng(0)
    mask = rng.integers(0, 2, (rows, length)).astype(np.float32)
    return {"tokens": rng.integers(0, 22, (rows, length + 1)).astype(np.int32), "mask": mask}


DOCUMENTS = {
    "documents": np.sort(np.random.default_rng(1).integers(0, 3, (16, 13))).astype(np.int32)
}


def of_sides(a, r, c, **others):
    grid = hfjax.GRID if r > 1 else hfjax.TENSOR | hfjax.SEQUENCE
    strategy = hfjax.FSDP | grid if a > 1 else grid
    sizes = {axis: n for axis, n in (("fsdp", a), ("row", r), ("tensor", c)) if n > 1}
    return strategy.edit(replicate_below=0), sizes | others


def agree(model, cases, given=None, loss=next_token_loss, **options):
    options = {"precision": "fp64", "unroll": 1, "steps": 2} | options
    with jax.enable_x64(True):
        found = assert_strategies_agree(model, loss, given or tokens(), cases, **options)
    assert max(found.values()) < 1e-9, found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "every", "more"),
    [
        pytest.param(gpt(dropout=0.1), [(1, 2, 3)], DOCUMENTS, id="gpt, documents"),
        pytest.param(llama(), [(2, 2, 2)], DOCUMENTS, id="llama, documents"),
        pytest.param(gpt(dropout=0.1), [(1, 4, 2)], {}, id="gpt"),
        pytest.param(gpt(dropout=0.1), SIDES, {}, id="gpt, all sides", marks=pytest.mark.slow),
        pytest.param(llama(), SIDES, {}, id="llama, all sides", marks=pytest.mark.slow),
    ],
)
def test_whole_models_equal_one_device_on_all_sides_masks_and_microbatches_too(model, every, more):
    cases = {str(sides): of_sides(*sides) for sides in every}
    agree(model, cases, tokens() | more, gradient_accumulation_steps=2, max_grad_norm=0.5)


TWO: Any = {"row": 2, "tensor": 2}


def beside(strategy):
    return (strategy | hfjax.GRID).edit(replicate_below=0)


BESIDE = {
    "ZERO2": (beside(hfjax.ZERO2), {"data": 2, **TWO}, {"remat": "full"}),
    "1F1B": (beside(hfjax.PIPE), {"pipe": 2, **TWO}, {"schedule": hfjax.Schedule("1f1b", 2)}),
    "ZB": (beside(hfjax.PIPE), {"pipe": 2, **TWO}, {"schedule": hfjax.Schedule("zb", 2)}),
    "data": (beside(hfjax.DDP), {"data": 2, **TWO}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*list(BESIDE)[:3], pytest.param("data", marks=pytest.mark.slow)])
def test_a_grid_goes_beside_data_zero_and_stages(name):
    cases = {name: BESIDE[name]}
    agree(small_gpt.mlps(dropout=0.1), cases, small_gpt.tokens(), gradient_accumulation_steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("model", [gpt(dropout=0.1), llama()], ids=["gpt", "llama"])
def test_as_many_rows_as_positions_stay_where_they_are(model):
    """What is made for positions along tensor is no part of the rows, though sizes are alike."""
    mesh, given = hfjax.make_mesh(data=2, **TWO), tokens(rows=24)  # 12 in a microbatch, of 12
    del given["mask"]  # what the loss then makes is made for positions
    plan = hfjax.layout(model, optax.sgd(0.1), mesh, beside(hfjax.DDP))
    step = hfjax.train_step(
        plan, next_token_loss, gradient_accumulation_steps=2, batch_view="strict"
    )
    sent = hfjax.collectives(step.lower(given))
    assert {row.kind for row in sent if "data" in row.axes} == {"all-reduce"}
    assert str(step.batch_comms) == "no examples meet"
    agree(model, {"data": BESIDE["data"]}, given, gradient_accumulation_steps=2, steps=1)


def by_logits(logits, batch):
    """A loss that knows nothing of a grid: it takes whole logits."""
    chosen = jnp.take_along_axis(logits, batch["tokens"][:, 1:, None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - chosen
    return hfjax.Mean((losses * batch["mask"]).sum(), batch["mask"].sum(), {"most": losses.max()})


@pytest.mark.slow  # each by itself: above, and with a norm of heads
@pytest.mark.parametrize("model", [gpt(), llama(tied=True)], ids=["gpt", "llama"])
def test_documents_and_losses_of_logits_are_as_on_one_device(model):
    agree(model, {"grid": of_sides(2, 2, 2)}, tokens() | DOCUMENTS, by_logits)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(small_gpt.mlps(vocab=22, pad_vocab_to=12, length=12), id="mlps"),
        pytest.param(gpt(), id="gpt", marks=pytest.mark.slow),
    ],
)
def test_evaluations_and_outputs_are_as_on_one_device(model):
    found = {}
    for name, strategy, sizes in (("grid", hfjax.GRID, TWO), ("one", hfjax.DDP, {"data": 1})):
        mesh = hfjax.make_mesh(devices=jax.devices()[: math.prod(sizes.values())], **sizes)
        plan = hfjax.layout(model, optax.sgd(0.1), mesh, strategy)
        state, given = hfjax.init(plan), tokens()
        told = hfjax.eval_step(plan, next_token_loss)(state, given)
        outputs = hfjax.predict_step(plan)(state, given)
        found[name] = told["loss"], told["weight"], outputs
    for grid, one in zip(*found.values(), strict=True):
        np.testing.assert_allclose(grid, one, rtol=1e-5, atol=1e-6)


def in_parts(model, batch):
    """What is in the stream, and inside of a layer: of [B, S, D], of heads, of what is joined."""
    stream = model.embed(batch)
    up = jax.tree.map(lambda x: x[0], nnx.state(model.layers.mlp.up, nnx.Param))
    inside = nnx.merge(nnx.graphdef(model.layers.mlp.up), up)(stream)
    by_head = inside.reshape(*inside.shape[:2], -1, 8)
    return {"stream": stream, "inside": by_head.swapaxes(1, 2), "logits": model.head(stream)}


def test_outputs_that_devices_have_parts_of_are_as_on_one_device():
    found = []
    model = small_gpt.mlps(vocab=22, pad_vocab_to=12, length=12)
    for strategy, sizes in ((hfjax.GRID, TWO), (hfjax.DDP, {"data": 1})):
        mesh = hfjax.make_mesh(devices=jax.devices()[: math.prod(sizes.values())], **sizes)
        plan = hfjax.layout(model, optax.sgd(0.1), mesh, strategy)
        found.append(hfjax.predict_step(plan, in_parts)(hfjax.init(plan), tokens()))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), *found)


# -- what is sent -------------------------------------------------------------------------------

HERE = ["1,2,2", "2,2,2", "1,2,3", "1,3,2", "1,2,4", "1,4,2"]
FAR = ["4,2,2", "2,4,2", "3,3,3", "4,4,4", "2,4,8", "8,2,4"]  # 16, 16, 27 and three of 64 devices


def formula(a, r, c):
    """The general formula for a whole Llama, in elements that a device sends (ring collectives).

    A linear map from k (split over row) to n (over tensor): forward and backward, the stream is
    gathered over tensor, what comes out is scattered over row; the way back with both swapped.
    """
    tokens, layers, wide = ROWS * LENGTH, LAYERS, WIDE
    over_row = [(WIDTH, 3 * WIDTH), (WIDTH, 2 * wide)] * layers + [(WIDTH, VOCAB)]
    back = [(WIDTH, WIDTH), (wide, WIDTH)] * layers
    streams = sum(k for k, _ in over_row) + sum(n for _, n in back) + WIDTH  # the embedding
    insides = sum(n for _, n in over_row) + sum(k for k, _ in back)
    in_layers = layers * (4 * WIDTH**2 + 3 * WIDTH * wide)
    fixed = 2 * WIDTH * VOCAB  # embedding and head: gathered once, layers twice
    return {
        "tensor": 2 * tokens * streams * (c - 1) / (a * r * c),
        "row": 2 * tokens * insides * (r - 1) / (a * r * c),
        "fsdp": (3 * in_layers + 2 * fixed) * (a - 1) / (a * r * c),
        # forward and backward, one number for each token and norm: all-reduce
        "sums over row": (2 * layers + 1) * 2 * tokens * (r - 1) / (a * c * r),
    }


def agrees(sides, sent):
    wanted = formula(*map(int, sides.split(",")))
    assert {axis: sent[axis] for axis in wanted} == pytest.approx(wanted, rel=1e-12), sides


@pytest.mark.short("1,2,2")
@pytest.mark.parametrize("sides", HERE)
def test_activations_and_weights_send_exactly_what_the_general_formula_says(sides):
    agrees(sides, grid_bytes.sent(tuple(map(int, sides.split(",")))))


def counted(every):
    command = [sys.executable, "-W", "ignore", "-m", "tests.grid_bytes", *every]
    environment = os.environ | {"PYTHONPATH": str(Path(hfjax.__file__).parents[1])}
    folder = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_16_27_and_64_devices_send_what_the_general_formula_says():
    found = counted(FAR)
    assert list(found) == FAR
    for sides, sent in found.items():
        agrees(sides, sent)


@pytest.mark.slow
def test_what_is_compiled_sends_the_same():
    lowered = step((2, 2, 2), unroll=1).lower(batch())
    written, compiled = hfjax.collectives(lowered), hfjax.collectives(lowered.compile())
    for axis in ("fsdp", "row", "tensor"):
        for kind in ("all-gather", "reduce-scatter"):
            assert written.total(kind, axis) == compiled.total(kind, axis) > 0


# -- what lies where ----------------------------------------------------------------------------


def test_a_device_holds_its_share_of_each_matrix_and_of_the_residual_stream():
    a, r, c = sides = (2, 2, 2)
    made = step(sides, remat="full", unroll=1)
    for path, p in made.layout.param_specs.items():
        held = NamedSharding(p.mesh, p.parameter).shard_shape(p.shape)
        shares = a * r * c if "scale" not in path else r  # norms are small: whole but for row
        assert math.prod(held) * shares == math.prod(p.shape), path
    kept = [out for scan in loops(made.trace(batch()).jaxpr) for out in saved(scan)]
    assert [x.shape for x in kept] == [(LAYERS, ROWS // a, LENGTH // c, WIDTH // r)]


def loops(jaxpr):
    """The loops over layers of a program, wherever they are."""
    found = (e for e, _ in equations_in(jaxpr.jaxpr) if e.primitive.name == "scan")
    return [loop for loop in found if loop.params["length"] == LAYERS]


def saved(scan):
    """What of activations the loop stacks, layer by layer, for the backward pass."""
    outs = [v.aval for v in scan.outvars[scan.params["num_carry"] :]]
    return [
        x
        for x in outs
        if x.ndim == 4 and x.shape[1] in (ROWS, ROWS // 2, ROWS // 4) and x.shape[2] <= LENGTH
    ]


def test_fsdp_joins_what_the_grid_splits_as_its_minor_part():
    """So that the pieces that a device gathers over fsdp are next to each other, in order."""
    specs = layout((2, 2, 2)).specs
    assert specs["layers/mlp/gate_up/kernel"] == P(None, ("row", "fsdp"), "tensor")
    assert specs["layers/mlp/down/kernel"] == P(None, ("tensor", "fsdp"), "row")


def test_the_page_shows_which_device_holds_which_block():
    mesh = hfjax.make_mesh(**hfjax.cube(2))
    specs = [
        P(("fsdp", "tensor"), "row"),
        P(("row", "fsdp"), "tensor"),
        P(("tensor", "fsdp"), "row"),
    ]
    page = (Path(__file__).parents[1] / "docs/tensor_grids.md").read_text(encoding="utf-8")
    lines = [re.findall(r"│ +(\d) +│ +(\d) +│", line) for line in page.splitlines()]
    drawn = np.array([line for line in lines if line], int)  # [lines, pictures, columns]
    for number, spec in enumerate(specs):
        held = NamedSharding(mesh, spec).devices_indices_map((4, 2))
        blocks = {(x.start, y.start or 0): device.id for device, (x, y) in held.items()}
        wanted = [[blocks[line, column] for column in range(2)] for line in range(4)]
        assert drawn[:, number].tolist() == wanted


def test_the_known_forms_have_names():
    assert hfjax.make_mesh(**hfjax.cube(2)).shape == hfjax.make_mesh(fsdp=2, row=2, tensor=2).shape
    assert hfjax.make_mesh(data=2, **hfjax.grid_2d(2, 2)).shape["fsdp"] == 1
    assert hfjax.make_mesh(**hfjax.grid_2d(2, -1)).shape["tensor"] == 4  # what is left


@pytest.mark.parametrize(
    ("sizes", "given", "said"),
    [
        (hfjax.cube, (0,), "hfjax.cube(0): its side is a positive integer, of which the third"),
        (hfjax.cube, (-1,), "hfjax.cube(-1): its side"),
        (hfjax.cube, ("2",), "hfjax.cube('2'): its side"),
        (hfjax.cube, (True,), "hfjax.cube(True): its side"),
        (hfjax.grid_2d, (0, 2), "hfjax.grid_2d(0, 2): row and tensor are positive integers"),
        (hfjax.grid_2d, (2, 1.0), "hfjax.grid_2d(2, 1.0): row and tensor"),
        (hfjax.grid_2d, (None, 2), "hfjax.grid_2d(None, 2): row and tensor"),
        (hfjax.grid_2d, (-1, -1), "hfjax.grid_2d(-1, -1): row and tensor"),
    ],
)
def test_sizes_of_grids_that_make_no_sense_are_refused(sizes, given, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        sizes(*given)


# -- what is refused ----------------------------------------------------------------------------


def of(strategy, model=None, own=None, **sizes):
    devices = jax.devices()[: math.prod(sizes.values())]
    mesh = hfjax.make_mesh(devices=devices, **sizes)
    plan = hfjax.layout(model or gpt(), optax.sgd(0.1), mesh, strategy)
    return hfjax.train_step(plan, next_token_loss, **(own or {}))


GRID, BOTH = hfjax.GRID, hfjax.FSDP | hfjax.GRID
HALF = hfjax.Strategy("half", parameters={"embed": "row"})
REFUSED = {
    "no rows": (BOTH, {"fsdp": 4, "tensor": 2}, r"here is row=1. Write make_mesh\(fsdp=2, row=2"),
    "no sides": (GRID, {"data": 8}, r"row=1 and tensor=1. Write make_mesh\(data=2, row=2, tensor"),
    "two devices": (GRID, {"tensor": 2}, "2 devices form no grid: take 4, 6, 8"),
    "other": (hfjax.TENSOR, TWO, "row splits neither .* hfjax.GRID row and tensor"),
    "more than devices": (BOTH | hfjax.PIPE, {"pipe": 2, **TWO}, "8 devices are too few for all"),
    "a part of its rows": (HALF, TWO, r"without the other rows of hfjax.GRID \(vocab, heads, mlp"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_grid_is_refused_with_the_mesh_to_write(case):
    strategy, sizes, said = REFUSED[case]
    with pytest.raises(ValueError, match=said):
        of(strategy, **sizes)


SHAPES = {
    "heads": ({"heads": 3}, (2, 2), r"3 heads need a tensor axis that divides them: only 1 fit"),
    "vocabulary": ({"pad_vocab_to": 1}, (2, 4), "Pad the vocabulary .* vocab=24"),
    "width": ({"embed": 30, "heads": 6}, (4, 2), r"needs a row that divides it: \[3, 2\] would do"),
}


@pytest.mark.parametrize("case", SHAPES)
def test_sides_that_do_not_divide_the_model_are_refused_with_those_that_would(case):
    changes, (row, tensor), said = SHAPES[case]
    with pytest.raises(ValueError, match=said):
        of(GRID, gpt(**changes), row=row, tensor=tensor)


def test_rows_and_lengths_that_do_not_divide_are_refused_with_sides_that_would():
    made = of(GRID, row=4, tensor=2, own={"gradient_accumulation_steps": 2})
    with pytest.raises(
        ValueError, match=r"microbatches x 1 devices x row=4 .*: row of \[3, 2\] would do"
    ):
        made.lower(tokens(rows=12))
    with pytest.raises(
        ValueError, match=r"sequences of 9 tokens: on a grid tensor=2 .*: only 1 would"
    ):
        made.lower(tokens(rows=8, length=9))


class Unlike(GPT):
    """A GPT with something in its layers that is made for whole streams."""

    def __init__(self, block, *, rngs):
        super().__init__(gpt()(rngs).config, rngs=rngs)
        self.layers = stack_layers(2, block, rngs)


class WithNormedHeads(nnx.Module):
    """Attention's norm of queries and keys: a norm over what no device has a part of."""

    def __init__(self, rngs):
        self.up = Linear((24, 12, 2), ("embed", "heads", None), 2, 0.1, rngs=rngs)
        self.norm = RMSNorm(2, axis=None)
        self.down = Linear((12, 2, 24), ("heads", None, "embed"), 1, 0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.down(self.norm(self.up(x)))


@pytest.mark.slow
def test_a_norm_of_heads_is_of_each_device_alone_and_a_loss_of_logits_that_of_one_device():
    model = lambda rngs: Unlike(WithNormedHeads, rngs=rngs)
    agree(model, {"grid": of_sides(1, 2, 2)}, loss=by_logits, steps=1)


def by_head(q, k, v):
    """Attention that weighs heads by their number."""
    return v * jnp.arange(v.shape[2])[None, None, :, None]


@pytest.mark.slow
def test_attention_that_tells_heads_apart_is_that_of_one_device():
    agree(gpt(attention=by_head), {"grid": of_sides(1, 2, 2)}, steps=1)


def test_a_model_without_names_specs_of_the_users_own_and_kernels_are_refused():
    bare = lambda rngs: {"w": jnp.ones((8, 8))}
    with pytest.raises(ValueError, match="no parameter has an axis named embed, heads"):
        of(GRID, bare, **TWO)
    plan = hfjax.layout(gpt(), optax.sgd(0.1), hfjax.make_mesh(data=2, **TWO), GRID)
    for spec in (P(), P("tensor"), P(("data", "row"))):
        own = plan.with_specs({"norm/scale": spec})
        with pytest.raises(ValueError, match=r"norm/scale .* row and tensor split what hfjax.GRID"):
            hfjax.train_step(own, next_token_loss)
    with pytest.raises(ValueError, match='kernels="reference" with a grid of row=2 x tensor=2: '):
        of(GRID, own={"kernels": "reference"}, **TWO)
