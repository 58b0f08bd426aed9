"""Rows that several devices share: as on one device, and the bytes of their formulas."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax import CONTEXT, DDP, FSDP, PIPE, SEQUENCE, TENSOR, ZERO1, ContextParallel, Schedule
from hfjax.models.attention import windowed
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss
from hfjax.models.llama import Llama, LlamaConfig
from hfjax.parallel.extensions.context_parallel.comm_kinds import ContextChoice
from hfjax.parallel.jaxprs.walk import equations_in
from tests.lower_for_64_devices import printed

LENGTH = 32
RNG = np.random.default_rng(0)
TOKENS = {"tokens": RNG.integers(0, 64, (8, LENGTH + 1), np.int32)}
DOCUMENTS = TOKENS | {"documents": np.sort(RNG.integers(0, 4, (8, LENGTH + 1), np.int32), 1)}


def doubled(model: nnx.Module) -> nnx.Module:
    graph, state = nnx.split(model)
    wide = lambda x: x.astype("float64") if x.dtype == np.float32 else x
    return nnx.merge(graph, jax.tree.map(wide, state))


def gpt(rngs: nnx.Rngs) -> nnx.Module:
    config = GPTConfig.tiny(vocab=64, length=LENGTH, layers=2, embed=32, heads=4, dropout=0.1)
    return doubled(GPT(config, rngs=rngs))


def llama(rngs: nnx.Rngs) -> nnx.Module:
    config = LlamaConfig.tiny(
        vocab=64, length=LENGTH, layers=2, embed=32, heads=4, kv_heads=2, mlp=48
    )
    return doubled(Llama(config, rngs=rngs))


def windowed_llama(rngs: nnx.Rngs) -> nnx.Module:
    shape = {"embed": 32, "heads": 4, "kv_heads": 2, "mlp": 48}
    config = LlamaConfig.tiny(vocab=64, length=LENGTH, layers=2, attention=windowed(9), **shape)
    return doubled(Llama(config, rngs=rngs))


def made(model, strategy, sizes, **execution):
    """Return a layout and its step."""
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = hfjax.make_mesh(devices=devices, **sizes)
    layout = hfjax.layout(model, optax.adamw(1e-2), mesh, strategy.edit(replicate_below=0))
    return layout, hfjax.train_step(layout, next_token_loss, **{"unroll": 1} | execution)


def trained(model, strategy, sizes, batch, steps=2, **execution):
    """Return losses, norms and parameters after some steps."""
    layout, step = made(model, strategy, sizes, **execution)
    state, told = hfjax.init(layout, 0, execution.get("schedule")), []
    for _ in range(steps):
        state, metrics = step(state, batch)
        told += [float(metrics["loss"]), float(metrics["grad_norm"])]
    return told, hfjax.full_array(hfjax.to_model_order(layout, state).params)


SAME = (
    "gradient_accumulation_steps",
    "max_grad_norm",
    "precision",
)  # what changes the numbers of one device as well


@pytest.fixture(scope="module")
def alone():
    """Return (model, batch, execution) -> what one device has, made once."""
    known = {}

    def of(model, batch, execution):
        same = {name: execution[name] for name in SAME if name in execution}
        key = (model.__name__, "documents" in batch, batch["tokens"].shape, str(same))
        if key not in known:
            known[key] = trained(model, DDP, {"data": 1}, batch, **same)
        return known[key]

    return of


def apart(found, wanted) -> float:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


by = lambda *given, **fields: {"context": ContextParallel(*given, **fields)}

CASES = {
    "ring": (gpt, TOKENS, DDP, {"context": 4}, {"context": "ring"}),
    "all-gather": (llama, TOKENS, FSDP, {"context": 4}, {"context": "allgather"}),
    "Ulysses": (gpt, TOKENS, FSDP, {"context": 4, "data": 2}, {"context": "ulysses"}),
    "Ulysses repeats heads of keys": (llama, TOKENS, DDP, {"context": 4}, {"context": "ulysses"}),
    "crossed": (llama, TOKENS, FSDP, {"context": 4}, by("ring", 2)),
    "crossed, all-gather": (gpt, TOKENS, DDP, {"context": 8}, by("allgather", 4)),
    "one after the other": (
        llama, TOKENS, DDP, {"context": 4}, by("ring", order="contiguous"),
    ),
    "documents": (gpt, DOCUMENTS, FSDP, {"context": 2, "fsdp": 2}, {"context": "allgather"}),
    "documents in a ring": (llama, DOCUMENTS, DDP, {"context": 2}, {"context": "ring"}),
    "documents, Ulysses": (llama, DOCUMENTS, DDP, {"context": 2}, {"context": "ulysses"}),
    "documents, crossed": (gpt, DOCUMENTS, DDP, {"context": 4}, by("ring", 2)),
    "tensor": (gpt, TOKENS, TENSOR, {"context": 4, "tensor": 2}, {"context": "ring"}),
    "tensor, Ulysses": (
        llama, TOKENS, TENSOR | FSDP, {"context": 2, "tensor": 2, "fsdp": 2},
        {"context": "ulysses"},
    ),
    "both of one dimension": (
        gpt, TOKENS, TENSOR | SEQUENCE, {"context": 2, "tensor": 2, "data": 2}, {"context": "ring"},
    ),
    "ZERO1": (
        *(gpt, TOKENS, ZERO1, {"context": 4, "data": 2}),
        {"context": "ring", "max_grad_norm": 0.1},
    ),
    "microbatches, recomputed": (
        gpt, TOKENS, FSDP, {"context": 4, "data": 2},
        {"context": "ring", "gradient_accumulation_steps": 2, "remat": "full"},
    ),
    "1F1B": (
        gpt, TOKENS, PIPE, {"context": 2, "pipe": 2},
        {"context": "ring", "schedule": Schedule("1f1b", 2)},
    ),
    "1F1B, FSDP": (
        gpt, TOKENS, PIPE | FSDP, {"context": 2, "pipe": 2, "fsdp": 2},
        {"context": "ring", "schedule": Schedule("1f1b", 4)},
    ),
    "split backward passes": (
        llama, TOKENS, PIPE, {"context": 4, "pipe": 2},
        {"context": "allgather", "schedule": Schedule("zb", 4)},
    ),
    "a schedule with branches": (
        llama, TOKENS, PIPE, {"context": 2, "pipe": 2}, {"schedule": Schedule("zb-h1", 4)},
    ),
    "moments on the host": (
        gpt, TOKENS, FSDP | hfjax.HOST_OPTIMIZER, {"context": 4}, {"context": "ring"},
    ),
    "in the backward pass": (
        gpt, TOKENS, FSDP, {"context": 4, "fsdp": 2},
        {"context": "ring", "optimizer_in_backward": True},
    ),
    "offload": (gpt, TOKENS, DDP, {"context": 4}, {"context": "ring", "offload": 0.5}),
    "a window": (windowed_llama, TOKENS, FSDP, {"context": 4}, {"context": "ring"}),
    "a window, zigzag": (
        windowed_llama, TOKENS, DDP, {"context": 4},
        by("allgather", order="zigzag"),
    ),
    "a window, documents, crossed": (
        windowed_llama, DOCUMENTS, DDP, {"context": 4}, by("ring", 2),
    ),
    "three": (llama, TOKENS, DDP, {"context": 3}, by("ring", order="contiguous")),
}  # fmt: skip


# The ring trains in the pipeline.
DAILY = ("Ulysses repeats heads of keys", "documents", "1F1B")
SOME = [
    pytest.param(name, marks=() if name in DAILY else pytest.mark.slow, id=name) for name in CASES
]


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_rows_on_several_devices_train_as_on_one(name, alone):
    model, batch, strategy, sizes, execution = CASES[name]
    if 3 in sizes.values():
        batch = {path: x[:, :31] for path, x in batch.items()}
    with jax.enable_x64(True):
        found = trained(model, strategy | CONTEXT, sizes, batch, **execution)
        assert apart(found, alone(model, batch, execution)) < 1e-9


def test_evaluations_and_predictions_are_those_of_one_device():
    def predicted(strategy, sizes, context: Any = "auto"):
        devices = jax.devices()[: int(np.prod(list(sizes.values())))]
        mesh = hfjax.make_mesh(devices=devices, **sizes)
        layout = hfjax.layout(windowed_llama, optax.sgd(0.1), mesh, strategy)
        step, state = hfjax.predict_step(layout, context=context), hfjax.init(layout)
        return layout, state, hfjax.full_array(step(state, DOCUMENTS))

    outputs = predicted(DDP, {"data": 1})[-1]
    wanted = jax.jit(next_token_loss)(outputs, DOCUMENTS)
    split = (FSDP | CONTEXT).edit(replicate_below=0)
    zigzag = ContextParallel("ring", order="zigzag")  # positions come back in another order
    layout, state, found = predicted(split, {"context": 2}, zigzag)
    np.testing.assert_allclose(found, outputs, atol=1e-5)
    loss = hfjax.eval_step(layout, next_token_loss)(state, DOCUMENTS)["loss"]
    assert abs(float(wanted.total / wanted.weight) - float(loss)) < 1e-6


# -- what is sent -------------------------------------------------------------------------------

SENT = ("permute", "all-gather", "reduce-scatter", "all-to-all")


def sent_by(step, batch) -> int:
    """The bytes that a device sends for attention: under DDP gradients are all-reduced."""
    rows = hfjax.collectives(step.lower(batch))
    return sum(row.moved for row in rows if row.kind in SENT)


def expected(form, n, u, heads, groups, width, tokens, layers, size=4, gradient=4) -> int:
    """docs/long_sequences.md; `tokens` are those of a device, of all its rows."""
    ring, sent_groups = n // u, max(groups, np.lcm(groups, u))
    exchange = (u - 1) * tokens * width * 2 * (heads + sent_groups) // u
    keys = (ring - 1) * 2 * tokens * sent_groups * width
    return layers * (exchange * 2 * size + keys * (size + size + gradient))


def chosen(step) -> ContextChoice:
    assert step.context is not None
    return step.context


def plan(n, context, precision="stored", kv_heads=2, length=64, tensor=1, **execution):
    config = LlamaConfig.tiny(
        vocab=64, length=length, layers=2, embed=64, heads=8, kv_heads=kv_heads, mlp=48
    )
    mesh = hfjax.make_mesh(devices=jax.devices()[: n * tensor], context=n, tensor=tensor)
    strategy = CONTEXT | TENSOR if tensor > 1 else DDP | CONTEXT
    layout = hfjax.layout(lambda rngs: Llama(config, rngs=rngs), optax.sgd(0.1), mesh, strategy)
    return hfjax.train_step(
        layout, next_token_loss, context=context, precision=precision, unroll=1, **execution
    )


ROWS = {"tokens": np.zeros((2, 65), np.int32)}


def sends_its_formula(n, form, u=1) -> int:
    """Return the bytes of a form, found in the program, told by the step, and of its formula."""
    step = plan(n, form if u in (1, n) else ContextParallel(form, u))
    wanted = expected(form, n, u, heads=8, groups=2, width=8, tokens=2 * 64 // n, layers=2)
    assert sent_by(step, ROWS) == wanted
    assert chosen(step).option.total_bytes(chosen(step).calls) == wanted
    return wanted


def test_each_form_sends_the_bytes_of_its_formula_and_auto_takes_the_least_and_tells_them():
    forms = [("ring", 1), ("allgather", 1), ("ulysses", 4), ("ring", 2), ("allgather", 2)]
    least = min(sends_its_formula(4, form, u) for form, u in forms)
    step = plan(4, "auto")
    step.trace(ROWS)
    assert chosen(step).option.total_bytes(chosen(step).calls) == least
    shown = str(step.context)
    assert "4 devices share a sequence, zigzag order" in shown
    assert shown.count("chosen") == 1


@pytest.mark.short("ring")
@pytest.mark.parametrize("form", ["ring", "ulysses"])
def test_beside_a_tensor_axis_only_heads_of_a_shard_are_sent(form):
    """A shard has one head of keys: that is sent twice, however many the model has."""
    u, shard = 2 if form == "ulysses" else 1, {"heads": 4, "groups": 1, "width": 8}
    wanted = expected(form, 2, u, **shard, tokens=2 * 64 // 2, layers=2)
    step = plan(2, form, tensor=2)
    assert sent_by(step, ROWS) == chosen(step).option.total_bytes(chosen(step).calls) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 8])
@pytest.mark.parametrize("form", ["ring", "allgather", "ulysses"])
def test_on_2_and_8_devices_the_formula_holds_as_well(form, n):
    sends_its_formula(n, form, n if form == "ulysses" else 1)


@pytest.mark.slow
def test_on_8_devices_crossed_forms_send_the_bytes_of_both():
    for form in ("ring", "allgather"):
        sends_its_formula(8, form, 2)


FAR = """
import numpy as np
from tests.test_context_parallel import ContextParallel, plan, sent_by
rows = {"tokens": np.zeros((1, 257), np.int32)}
crossed = ContextParallel("ring", 8)
for n, context in ((16, "ring"), (64, "allgather"), (64, crossed), (8, "ulysses")):
    print(sent_by(plan(n, context, length=256), rows))
"""


@pytest.mark.slow
def test_on_16_and_64_devices_the_formula_holds_as_well():
    tokens = lambda n: 256 // n
    wanted = [
        expected("ring", 16, 1, 8, 2, 8, tokens(16), layers=2),
        expected("allgather", 64, 1, 8, 2, 8, tokens(64), layers=2),
        expected("ring", 64, 8, 8, 2, 8, tokens(64), layers=2),
        expected("ulysses", 8, 8, 8, 2, 8, tokens(8), layers=2),
    ]
    assert printed(FAR) == wanted


def test_repeated_heads_of_keys_are_said():
    step = plan(4, "ulysses")
    step.trace(ROWS)
    assert "heads of keys are sent 2 times" in str(step.context)


@pytest.mark.slow
def test_gradients_of_keys_travel_in_float32_and_what_is_recomputed_travels_again():
    half = plan(4, "ring", precision="bf16")
    once = expected("ring", 4, 1, 8, 2, 8, tokens=32, layers=2, size=2)
    # XLA's CPU lowers bfloat16 as such: what is counted is the program before it compiles.
    assert sent_by(half, ROWS) == once
    again = plan(4, "ring", precision="bf16", remat="full")
    forward = 2 * 3 * 2 * 32 * 2 * 8 * 2
    assert sent_by(again, ROWS) == once + forward


def test_grouped_heads_on_few_devices_go_around_a_ring():
    """With few heads of keys a ring sends less than Ulysses (N < 2 (G + 1) / 3 and about)."""
    step = plan(2, "auto", kv_heads=1)
    step.trace(ROWS)
    assert chosen(step).option.kind == "ring"
    assert chosen(step).option.ulysses == 1


# -- what is refused ----------------------------------------------------------------------------


def test_rows_that_do_not_divide_are_refused_with_the_length_that_does():
    with pytest.raises(
        ValueError, match=r"30 positions do not divide by 8 .*sequences of 32 positions"
    ):
        plan(4, "ring").lower({"tokens": np.zeros((2, 31), np.int32)})
    with pytest.raises(ValueError, match=r'or choose hfjax.ContextParallel\(order="contiguous"\)'):
        plan(4, "ring").lower({"tokens": np.zeros((2, 37), np.int32)})


def test_heads_that_do_not_divide_are_refused_with_the_groups_that_do():
    step = plan(3, "ulysses")
    with pytest.raises(ValueError, match=r"8 heads that a device has do not divide.*ulysses=1\."):
        step.lower({"tokens": np.zeros((2, 61), np.int32)})


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ("rings", "form='rings'.*auto, ring, allgather, ulysses"),
        (ContextParallel, "a hfjax.ContextParallel is expected"),
        ({"ulysses": 0}, "ulysses=0"),
        ({"order": "snake"}, "zigzag, contiguous"),
    ],
)
def test_settings_that_mean_nothing_are_refused(given, match):
    with pytest.raises(ValueError, match=match):
        hfjax.Execution(context=given)


def test_groups_that_do_not_divide_the_devices_are_refused():
    with pytest.raises(ValueError, match=r"groups of 3 do not divide them\. These do: 1, 2, 4"):
        plan(4, ContextParallel("ring", 3)).lower(ROWS)
    with pytest.raises(ValueError, match="need something that joins them"):
        plan(4, ContextParallel("ulysses", 2)).lower(ROWS)


@pytest.mark.slow
def test_what_is_recomputed_keeps_no_array_as_large_as_the_scores(monkeypatch):
    monkeypatch.setattr("hfjax.pallas_kernels.attention.reference.BLOCK", 4)
    traced = plan(4, "ring", remat="full", length=128).trace({"tokens": np.zeros((1, 129), int)})
    made = [v for equation, _ in equations_in(traced.jaxpr.jaxpr) for v in equation.outvars]
    largest = max(
        (v.aval.shape for v in made if hasattr(v.aval, "shape")),
        key=lambda shape: shape.count(4),
    )
    assert largest.count(4) < 4, largest  # blocks of queries and of keys, 4 x 4 scores each


def test_a_row_longer_than_the_model_has_positions_is_refused():
    with pytest.raises(ValueError, match="64 tokens a row, the model has 32 positions"):
        made(gpt, DDP | CONTEXT, {"context": 4})[1].lower({"tokens": np.zeros((2, 65), np.int32)})
