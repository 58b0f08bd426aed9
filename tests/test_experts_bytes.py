"""What mixtures of experts send and multiply: as much as the formulas say, counted in programs."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax import DDP, EXPERT, FSDP, TENSOR
from hfjax.models.moe import MoE, MoEConfig, MoELlama, Router, next_token_loss
from hfjax.models.moe.grouped import plan_blocks, run_grouped
from hfjax.parallel.jaxprs.walk import equations_in
from hfjax.utils.paths import flatten
from hfjax.utils.tables import human
from tests.lower_for_64_devices import printed

SLOW = pytest.mark.slow
LENGTH, WIDTH, MLP, LAYERS, EXPERTS, K = 16, 32, 14, 2, 8, 2
CONFIG = MoEConfig(
    vocab=64, length=LENGTH, layers=LAYERS, heads=4, kv_heads=2, embed=WIDTH, mlp=MLP
)
PLACES = 40  # of a group of 16 tokens: 8 experts take 16 / 8 * 2 * 1.25 each
DROPLESS = replace(CONFIG, capacity=None)
WAYS = {
    "all_to_all": (CONFIG, {"dispatch": "all_to_all"}),
    "gather": (CONFIG, {"dispatch": "gather"}),
    "dropless": (DROPLESS, {}),
}


def plan(config, sizes, strategy=DDP | EXPERT, **execution):
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = hfjax.make_mesh(devices=devices, **sizes)
    model = lambda rngs: MoELlama(config, rngs=rngs)
    layout = hfjax.layout(model, optax.sgd(0.1), mesh, strategy.edit(replicate_below=0))
    return hfjax.train_step(layout, next_token_loss, **execution)


def rows_of(count, length=LENGTH):
    return {"tokens": np.zeros((count, length + 1), np.int32)}


def sent_by(step, batch):
    """The bytes that a device sends to experts and back: under DDP gradients are all-reduced."""
    kinds = ("all-to-all", "all-gather", "reduce-scatter")
    found = hfjax.collectives(step.lower(batch))
    return sum(r.moved for r in found if r.axes == ("expert",) and r.kind in kinds)


@functools.cache
def lowered(n, config=CONFIG, **execution):
    """Return a plan over n devices that was lowered for 16 rows, and what it sends."""
    step = plan(config, {"expert": n}, **execution)
    return step, sent_by(step, rows_of(16))


def choice_of(step):
    """The one call that equal layers make, and the dispatch that it took."""
    assert step.experts is not None
    ((call, chosen),) = step.experts.calls
    return call, chosen


def expected(way, n, groups, places=PLACES, tokens=LENGTH, k=K, size=4, again=0):
    """The formulas of expert_parallel/dispatch_kinds.py, told again: one layer, both directions."""
    if way == "all_to_all":
        return (2 + again) * 2 * (n - 1) * groups * places * WIDTH * size // n
    x, numbers, weights = tokens * WIDTH * size, 4 * tokens * k, 4 * tokens * k
    there, back = x + numbers + weights, x
    return (n - 1) * groups * ((1 + again) * there + back + (x + x + weights))


@pytest.mark.parametrize("n", [4, 2, 8])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.short("gather-4")
def test_each_dispatch_sends_the_bytes_of_its_formula(way, n):
    config, execution = WAYS[way]
    step, sent = lowered(n, config, **execution)
    assert sent == LAYERS * expected(way, n, groups=16 // n)
    call, chosen = choice_of(step)
    assert LAYERS * sum(call.bytes(chosen)) == sent


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.short("gather")
def test_of_a_layer_that_is_computed_again_what_its_gradients_read_is_sent_again(way):
    config, execution = WAYS[way]
    step = plan(config, {"expert": 4}, remat="full", precision="bf16", **execution)
    wanted = LAYERS * expected(way, 4, groups=4, size=2, again=1)
    sent = sent_by(step, rows_of(16))
    call, chosen = choice_of(step)
    assert LAYERS * (sum(call.bytes(chosen)) + call.bytes_resent_by_remat(chosen)) == wanted
    # on CPUs sums over devices are of float32: of a gather the way back, and the one backward
    wide = 2 * 3 * 4 * LENGTH * WIDTH * 2 if chosen == "gather" else 0
    assert sent == wanted + LAYERS * wide


BESIDE = [  # every axis with one way, every way with one axis
    pytest.param(beside, way, marks=[] if "all_to_all" == way or beside == "data" else SLOW)
    for beside in ("data", "tensor", "gradient_accumulation_steps", "small groups")
    for way in WAYS
]


@pytest.mark.short("data-all_to_all")
@pytest.mark.parametrize(("beside", "way"), BESIDE)
def test_beside_other_axes_tokens_are_sent_to_experts_only(way, beside):
    config, execution = WAYS[way]
    sizes, strategy, groups, tokens, places = {"expert": 4}, DDP | EXPERT, 4, LENGTH, PLACES
    if beside == "data":
        sizes, groups = {"data": 2, "expert": 4}, 2
    elif beside == "tensor":
        sizes, strategy = {"expert": 4, "tensor": 2}, DDP | EXPERT | TENSOR
    elif beside == "gradient_accumulation_steps":
        execution = {**execution, "gradient_accumulation_steps": 2}
    else:
        config, groups, tokens, places = replace(config, group=4), 16, 4, 4 * EXPERTS
    step = plan(config, sizes, strategy, **execution)
    # every expert takes at least 4 of a small group; two microbatches send what one would
    wanted = LAYERS * expected(way, 4, groups, places, tokens)
    assert sent_by(step, rows_of(16)) == wanted


def test_arrays_of_experts_are_gathered_along_fsdp_only_and_others_along_expert_as_well():
    step = plan(CONFIG, {"fsdp": 2, "expert": 4}, FSDP | EXPERT, dispatch="all_to_all")
    found = hfjax.collectives(step.lower(rows_of(16)))
    arrays = flatten(step.layout.abstract_state().params)
    size = {path: 4 * x.size for path, x in arrays.items()}
    experts = sum(n for path, n in size.items() if "/each/" in path) // 4
    layers = sum(n for path, n in size.items() if "layers" in path and "/each/" not in path)
    ends = sum(n for path, n in size.items() if "layers" not in path)
    both = ("fsdp", "expert")
    assert found.total("all-gather", "fsdp") == 2 * experts  # forward, and again backward
    assert found.total("reduce-scatter", "fsdp") == experts
    assert found.total("all-gather", both) == 2 * layers + ends
    assert found.total("reduce-scatter", both) == layers + ends
    assert sent_by(step, rows_of(16)) == LAYERS * expected("all_to_all", 4, groups=2)


FAR = """
from tests.test_experts_bytes import WAYS, plan, replace, rows_of, sent_by
for n in (16, 64):
    for config, execution in WAYS.values():
        print(sent_by(plan(replace(config, experts=64), {"expert": n}, **execution), rows_of(64)))
"""


@SLOW
def test_on_16_and_64_devices_the_formulas_hold_as_well():
    wanted = [
        LAYERS * expected(way, n, groups=64 // n, places=4 * 64) for n in (16, 64) for way in WAYS
    ]
    assert printed(FAR) == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "wanted"),
    [(2, "gather"), (4, "all_to_all"), pytest.param(8, "all_to_all", marks=SLOW)],
)
def test_auto_takes_what_sends_least(n, wanted):
    """Fewer devices than choices: tokens travel; more: their places do."""
    ways = ("all_to_all", "gather")
    sends = {way: LAYERS * expected(way, n, groups=16 // n) for way in ways}
    step, sent = lowered(n)
    assert sent == min(sends.values())
    assert sends[wanted] == min(sends.values())
    assert choice_of(step)[1] == wanted


def test_a_step_tells_what_each_dispatch_sends_and_why_one_was_chosen():
    assert plan(CONFIG, {"expert": 4}).experts is None
    step, _ = lowered(4)
    head, names, *lines = str(step.experts).splitlines()
    assert head.startswith("experts on 4 devices")
    assert names.split("  ")[0] == "dispatch"
    for line, way in zip(lines, ("all_to_all", "gather"), strict=True):
        assert line.startswith(way)
        assert f"  {human(expected(way, 4, groups=4))}" in line
    assert lines[0].endswith("chosen: it sends least")
    step, _ = lowered(4, dispatch="gather")
    assert str(step.experts).endswith("chosen: asked for")
    step, _ = lowered(4, DROPLESS)
    assert "cannot: without a capacity no device knows" in str(step.experts)


# -- what is multiplied -------------------------------------------------------------------------


def flops_of_experts(jaxpr) -> int:
    """The flops of all products with an expert's hidden layer; nothing else is as wide."""
    total = 0
    for equation, times in equations_in(jaxpr):
        if equation.primitive.name != "dot_general":
            continue
        left, right = (x.aval.shape for x in equation.invars)
        if {MLP, 2 * MLP}.isdisjoint(left + right):
            continue
        ((contracted, _), _) = equation.params["dimension_numbers"]
        inner = int(np.prod([left[i] for i in contracted]))
        total += times * 2 * inner * int(np.prod(equation.outvars[0].aval.shape))
    return total


PRODUCTS = [  # recomputed on one device every day, and not recomputed on eight
    pytest.param(way, n, remat, marks=[] if (n, remat) in ((1, "full"), (8, "none")) else SLOW)
    for remat in ("none", "full")
    for way in ("all_to_all", "gather")
    for n in (1, 2, 8)
]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "n", "remat"), PRODUCTS)
def test_experts_multiply_their_places_and_no_more(way, n, remat):
    step = plan(CONFIG, {"expert": n}, dispatch=way, remat=remat)
    found = flops_of_experts(step.trace(rows_of(16)).jaxpr.jaxpr)
    places = 16 * PLACES // n  # of a device: those of its experts, of all groups
    forward = LAYERS * places * 2 * 3 * WIDTH * MLP
    assert found == forward * (3 if remat == "none" else 4)


def layer_and_gradient(**mixing):
    """Return the equations of a layer, and of its gradients."""
    layer = MoE(WIDTH, MLP, EXPERTS, rngs=nnx.Rngs(0), **mixing)
    graph, state = nnx.split(layer)

    def loss(state, x):
        y, told = nnx.merge(graph, state)(x)
        return (y**2).sum() + told.loss.sum()

    x = jnp.ones((4, LENGTH, WIDTH))
    made = jax.make_jaxpr(jax.value_and_grad(loss, argnums=(0, 1)))(state, x)
    return [equation for equation, _ in equations_in(made.jaxpr)]


@pytest.mark.parametrize("priority", ["position", "choice", "probability"])
def test_no_row_is_scattered_on_the_way_to_experts_and_back(priority):
    found = layer_and_gradient(router=Router(priority=priority))
    scattered = [e for e in found if e.primitive.name.startswith("scatter")]
    assert scattered  # the number of each place, by choice
    for equation in scattered:
        assert equation.outvars[0].aval.dtype == jnp.int32
        assert equation.outvars[0].aval.shape[1:] == (LENGTH * K,)


# -- products in blocks -------------------------------------------------------------------------

TOKENS = 37
DRAW = np.random.default_rng(0)
ROUTINGS = {
    "even": np.stack([np.arange(TOKENS) % EXPERTS, (np.arange(TOKENS) + 1) % EXPERTS], 1),
    "skewed": DRAW.geometric(0.5, (TOKENS, K)).clip(1, EXPERTS) - 1,
    "all to one": np.full((TOKENS, K), 5),
    "the first and the last": np.tile([0, EXPERTS - 1], (TOKENS, 1)),
    "some to none": DRAW.integers(0, 2 * EXPERTS, (TOKENS, K)) - 4,
    "all to none": np.full((TOKENS, K), EXPERTS),
    "one token": np.array([[3, 1]]),
    "three choices": np.argsort(DRAW.random((TOKENS, EXPERTS)), 1)[:, :3],
}


@pytest.mark.parametrize("size", [1, 7, 4, 128])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.short("even-1", "some to none-1", "three choices-7")
def test_blocks_are_as_many_as_choices_need_and_hold_each_choice_once(routing, size):
    experts = ROUTINGS[routing]
    most = -(-experts.size // size) + EXPERTS

    @jax.jit
    def blocks(experts):
        made = plan_blocks(experts, EXPERTS, size)
        numbers = jnp.arange(most, dtype=jnp.int32)
        return made.num_blocks, jax.vmap(lambda i: made.block(i, size, experts.shape[1]))(numbers)

    total, made = jax.device_get(blocks(experts.astype(np.int32)))
    counts = np.bincount(experts[(experts >= 0) & (experts < EXPERTS)], minlength=EXPERTS)
    assert total == np.ceil(counts / size).sum()
    assert total <= most
    held = []
    for expert, choices, tokens in zip(*(x[:total] for x in made), strict=True):
        real = choices[choices < experts.size]
        assert len(real)
        assert (experts.ravel()[real] == expert).all()
        assert (tokens[: len(real)] == real // experts.shape[1]).all()
        held += real.tolist()
    known = np.flatnonzero((experts.ravel() >= 0) & (experts.ravel() < EXPERTS))
    assert sorted(held) == known.tolist()


def gated(arrays, x):
    up, down = arrays
    return jax.nn.silu(x @ up) @ down


def densely(arrays, x, experts, weights):
    """What all experts make of all tokens, weighed: no choice, no block."""
    of_each = jax.vmap(gated, (0, None))(arrays, x)
    chosen = jax.nn.one_hot(experts, EXPERTS, dtype=x.dtype) * weights[..., None]
    return jnp.einsum("tke,etd->td", chosen, of_each)


@pytest.mark.parametrize("size", [4, 7, 128])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.short("even-4", "three choices-4")
def test_products_in_blocks_equal_the_dense_answer_and_its_gradients(routing, size):
    experts = ROUTINGS[routing]
    with jax.enable_x64(True):
        draw = np.random.default_rng(1)
        arrays = draw.normal(size=(EXPERTS, 6, 10)), draw.normal(size=(EXPERTS, 10, 6))
        x, weights = draw.normal(size=(len(experts), 6)), draw.random(experts.shape)
        towards, choices = draw.normal(size=x.shape), experts.astype(np.int32)
        blocks = lambda a, x, w: jnp.vdot(run_grouped(gated, size, a, x, choices, w), towards)
        dense = lambda a, x, w: (densely(a, x, choices, w) * towards).sum()
        both = lambda *given: [jax.value_and_grad(f, (0, 1, 2))(*given) for f in (blocks, dense)]
        found, wanted = jax.jit(both)(arrays, x, weights)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-11), found, wanted)


def test_a_product_of_a_block_has_the_rows_of_a_block():
    found = layer_and_gradient(capacity=None, block=5)
    hidden = [e for e in found if e.primitive.name == "dot_general"]
    shapes = [x.aval.shape for e in hidden for x in e.invars]
    rows = {shape[0] for shape in shapes if shape[1:] in ((MLP,), (2 * MLP,))}
    assert rows <= {5, WIDTH, MLP}
    assert 5 in rows
