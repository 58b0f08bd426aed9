"""The forms of the kernels change no result: the plain JAX beside each, under every strategy."""

import math

import jax
import numpy as np
import optax
import pytest

import hfjax
from hfjax.analysis.targets import GPUS
from hfjax.models import attention
from hfjax.models.gpt import next_token_loss
from hfjax.testing import assert_strategies_agree, strategies
from hfjax.trainer.sampling import generate
from tests.h200 import OPTIMIZED, h200s
from tests.small_gpt import gpt, gpt_layout, mlp_layout, tokens

MOMENTUM = optax.sgd(0.1, momentum=0.9)
KERNELS_HERE = ("flash_block", "cross_entropy", "all_gather", "reduce_scatter")


def cases(*names):
    known = strategies(8)
    return {name: (known[name][0].edit(replicate_below=0), known[name][1]) for name in names}


def trained(layout, batch, **options):
    state, step = hfjax.init(layout), hfjax.train_step(layout, next_token_loss, **options)
    state, _ = step(state, batch)
    state, metrics = step(state, batch)
    return step, [float(metrics[name]) for name in ("loss", "grad_norm")]


def forms(step):
    return {name: step.kernels.impls(name) for name in step.kernels.choices}


@pytest.mark.parametrize(
    "name", [pytest.param("HSDP+TENSOR+SEQUENCE", marks=pytest.mark.slow), "FSDP"]
)
def test_under_every_strategy_the_references_train_as_on_one_device(name):
    mask = np.random.default_rng(0).integers(0, 2, (16, 24)).astype(np.float32)
    chosen = cases(name)
    options = {
        "kernels": "reference",
        "gradient_accumulation_steps": 2,
        "unroll": 1,
        "optimizer": MOMENTUM,
    }
    assert_strategies_agree(
        gpt(vocab=60, pad_vocab_to=8), next_token_loss, padded(mask), chosen, **options
    )


def padded(mask):
    documents = np.sort(np.random.default_rng(1).integers(0, 3, (16, 25))).astype(np.int32)
    batch = tokens(mask=mask, documents=documents)
    return batch | {"tokens": batch["tokens"] % 60}


def both_layout():
    return gpt_layout(hfjax.FSDP | hfjax.TENSOR, {"fsdp": 4, "tensor": 2}, MOMENTUM)


def test_every_kernel_of_a_step_takes_the_reference_that_is_asked_for():
    step = hfjax.train_step(both_layout(), next_token_loss, kernels="reference")
    step.trace(tokens())
    assert forms(step) == {name: {"reference"} for name in KERNELS_HERE}


@pytest.mark.slow  # every day on one device, in test_under_every_strategy
def test_the_references_train_as_plain_jax_does():
    layout = both_layout()
    _, plain = trained(layout, tokens(), kernels="xla")
    _, found = trained(layout, tokens(), kernels="reference")
    np.testing.assert_allclose(found, plain, rtol=1e-5)


@pytest.mark.slow
def test_gradients_sent_in_bfloat16_are_added_in_float32():
    layout = mlp_layout(hfjax.FSDP, {"fsdp": 8})
    _, (_, exact) = trained(layout, tokens(), kernels="xla")
    halved = hfjax.Precision(reduce="bfloat16")
    sums = {"reduce_scatter": "reference", "*": "xla"}
    step, (_, found) = trained(layout, tokens(), kernels=sums, precision=halved)
    assert step.kernels.impls("reduce_scatter") == {"reference"}
    assert 0 < abs(found - exact) < 1e-4 * exact


ALONE = ("flash_block", "cross_entropy")


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("strategy", "sizes", "moving"),
    [
        (hfjax.FSDP, {"fsdp": 8}, ("all_gather", "reduce_scatter")),
        (
            hfjax.TENSOR | hfjax.SEQUENCE,
            {"data": 2, "tensor": 4},
            ("all_gather_matmul", "matmul_reduce_scatter"),
        ),
    ],
    ids=["FSDP", "TENSOR+SEQUENCE"],
)
def test_a_step_made_of_kernels_compiles_for_eight_h200s(strategy, sizes, moving):
    shape = {"length": 128, "embed": 256, "vocab": 512}
    layout = gpt_layout(strategy, sizes, optax.adamw(1e-3), devices=h200s(), **shape)
    halved = hfjax.Precision(compute="bfloat16", reduce="bfloat16")
    step = hfjax.train_step(layout, next_token_loss, kernels="pallas", precision=halved)
    program = step.lower(tokens(length=128)).compile(OPTIMIZED)
    found = forms(step)
    assert found.keys() == {*ALONE, *moving}
    assert all(found[name] == {"pallas"} for name in ALONE)
    assert all("pallas" in found[name] for name in moving)
    left = [
        row for row in hfjax.collectives(program) if row.kind in ("all-gather", "reduce-scatter")
    ]
    assert not [row for row in left if "tensor" in row.axes and "loop" in row.where]


RINGS = {"all_gather_matmul": "reference", "matmul_reduce_scatter": "reference", "*": "xla"}


@pytest.mark.parametrize(
    ("sizes", "schedule", "why"),
    [
        (
            {"pipe": 2, "tensor": 2},
            hfjax.Schedule("1f1b-published", 4),
            "in a pipeline",
        ),
        ({"tensor": 2}, None, "23 positions do not divide by a tensor axis of 2"),
    ],
    ids=["in branches", "length"],
)
def test_where_no_ring_can_go_round_a_product_is_xlas(sizes, schedule, why):
    strategy = hfjax.TENSOR | hfjax.SEQUENCE
    strategy = strategy | hfjax.PIPE if schedule else strategy
    devices = jax.devices()[: math.prod(sizes.values())]
    layout = gpt_layout(strategy, sizes, devices=devices)
    step = hfjax.train_step(layout, next_token_loss, kernels=RINGS, schedule=schedule)
    batch = {"tokens": tokens()["tokens"][:, : 25 if schedule else 24]}
    step.trace(batch)
    for name in ("all_gather_matmul", "matmul_reduce_scatter"):
        assert step.kernels.impls(name) == {"xla"}
        assert all(why in choice.why for choice in step.kernels.choices[name])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["xla", "reference"])
def test_tokens_of_any_integer_type_and_negative_ones_that_are_no_targets(form):
    layout = gpt_layout(hfjax.DDP, {"data": 1}, devices=jax.devices()[:1])
    batch = tokens()
    evaluate = hfjax.eval_step(layout, next_token_loss, kernels={"cross_entropy": form})
    state = hfjax.init(layout)
    small = evaluate(state, {"tokens": batch["tokens"].astype(np.uint16)})
    assert float(small["loss"]) == float(evaluate(state, batch)["loss"])
    masked = np.ones((16, 24), np.float32)
    masked[:, -1] = 0
    without = {"tokens": batch["tokens"].copy()}
    without["tokens"][:, -1] = -1
    wanted = evaluate(state, {**batch, "mask": masked})
    np.testing.assert_allclose(evaluate(state, without)["loss"], wanted["loss"], rtol=1e-6)
    without["tokens"][0, -1] = 64
    assert np.isnan(evaluate(state, without)["loss"])


def test_a_loss_that_takes_logits_is_told_of():
    layout = mlp_layout(hfjax.DDP, {"data": 1}, devices=jax.devices()[:1])
    loss = lambda logits, batch: logits.mean()
    step = hfjax.train_step(layout, loss, kernels="reference")
    step.trace(tokens())
    assert "the loss takes logits" in step.kernels.choices["cross_entropy"][0].why


# -- attention, by the devices of the mesh ------------------------------------------------


def test_on_a_mesh_of_cpus_attention_is_the_cpus_whatever_jax_runs_on(monkeypatch):
    monkeypatch.setattr(attention, "_gpu_attention", lambda *x: pytest.fail("attention of GPUs"))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    mesh = hfjax.make_mesh(devices=jax.devices()[:2], data=2)
    for forward in (None, lambda model, batch: model(batch)):  # in three parts, and as it is
        layout = hfjax.layout(gpt(), optax.sgd(1e-3), mesh, hfjax.DDP, forward=forward)
        hfjax.train_step(layout, next_token_loss, precision="bf16").trace(tokens())
    generate(layout, hfjax.init(layout), [1], 1, length=24, vocab=64)


def test_around_a_mesh_of_gpus_attention_is_cudnns_or_says_what_is_missing(monkeypatch):
    asked = []

    def dot_product(q, k, v, documents, implementation):
        asked.append(implementation)
        if implementation == "cudnn":
            raise RuntimeError("cuDNN not found.")
        return q

    monkeypatch.setattr(attention, "dot_product", dot_product)
    gpu = jax.sharding.AbstractMesh((1,), ("data",), abstract_device=GPUS["h200"])
    q = jax.ShapeDtypeStruct((1, 8, 2, 64), "bfloat16")
    with jax.sharding.use_abstract_mesh(gpu):
        with pytest.warns(UserWarning, match=r"cuDNN not found. This program .* holds XLA's"):
            jax.eval_shape(attention.causal_attention, q, q, q)
        jax.eval_shape(attention.causal_attention, *[q.update(dtype="float32")] * 3)
    assert asked == ["cudnn", "xla", "xla"]


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_program_for_h200s_holds_the_attention_of_gpus(monkeypatch, recwarn, precision):
    monkeypatch.setattr(attention, "block_attention", lambda *x: pytest.fail("attention of CPUs"))
    layout = gpt_layout(hfjax.DDP, {"data": 1}, devices=h200s(1))
    step = hfjax.train_step(layout, next_token_loss, precision=precision)
    program = step.lower(tokens()).as_text()
    missing = any("cuDNN's: it keeps" in str(warning.message) for warning in recwarn)
    assert ("__cudnn$fmha" in program) == (precision == "bf16" and not missing)
