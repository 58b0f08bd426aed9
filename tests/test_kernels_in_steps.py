"""The forms of the kernels change no result: the plain JAX beside each, under every strategy."""

import numpy as np
import pytest

import hfjax
from hfjax.models.gpt import next_token_loss
from hfjax.testing import assert_strategies_agree, strategies
from tests.h200 import OPTIMIZED, h200s
from tests.small_gpt import gpt, gpt_layout, tokens

KERNELS_HERE = ("flash_block", "cross_entropy", "all_gather", "reduce_scatter")


def cases(*names):
    known = strategies(8)
    return {name: (known[name][0].edit(replicate_below=0), known[name][1]) for name in names}


def trained(layout, batch, **options):
    state, step = hfjax.init(layout), hfjax.train_step(layout, next_token_loss, **options)
    state, _ = step(state, batch)
    state, metrics = step(state, batch)
    return step, [float(metrics[name]) for name in ("loss", "grad_norm")]


def test_under_every_strategy_the_references_train_as_on_one_device():
    mask = np.random.default_rng(0).integers(0, 2, (16, 24)).astype(np.float32)
    chosen = cases("FSDP", "HSDP+TENSOR+SEQUENCE")
    options = {"kernels": "reference", "accumulate": 2}
    assert_strategies_agree(
        gpt(vocab=60, pad_vocab_to=8), next_token_loss, padded(mask), chosen, **options
    )


def padded(mask):
    batch = tokens(mask=mask)
    return batch | {"tokens": batch["tokens"] % 60}


def test_the_references_train_as_plain_jax_does():
    layout = gpt_layout(hfjax.FSDP | hfjax.TENSOR, {"fsdp": 4, "tensor": 2})
    _, plain = trained(layout, tokens(), kernels="xla")
    step, found = trained(layout, tokens(), kernels="reference")
    forms = {name: choice.form for name, choice in step.kernels.choices.items()}
    assert forms == dict.fromkeys(KERNELS_HERE, "reference")
    np.testing.assert_allclose(found, plain, rtol=1e-5)


def test_gradients_sent_in_bfloat16_are_added_in_float32():
    layout = gpt_layout(hfjax.FSDP, {"fsdp": 8})
    _, (_, exact) = trained(layout, tokens(), kernels="xla")
    halved = hfjax.Precision(reduce="bfloat16")
    sums = {"reduce_scatter": "reference", "*": "xla"}
    step, (_, found) = trained(layout, tokens(), kernels=sums, precision=halved)
    assert step.kernels.choices["reduce_scatter"].form == "reference"
    assert 0 < abs(found - exact) < 1e-4 * exact


ALONE = ("adamw_shard", "flash_block", "cross_entropy")


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
    layout = gpt_layout(strategy, sizes, hfjax.adamw(1e-3), devices=h200s(), **shape)
    halved = hfjax.Precision(compute="bfloat16", reduce="bfloat16")
    step = hfjax.train_step(layout, next_token_loss, kernels="pallas", precision=halved)
    program = step.lower(tokens(length=128)).compile(OPTIMIZED)
    forms = {name: choice.form for name, choice in step.kernels.choices.items()}
    assert forms == dict.fromkeys([*ALONE, *moving], "pallas")
    left = [
        row for row in hfjax.collectives(program) if row.kind in ("all-gather", "reduce-scatter")
    ]
    assert not [row for row in left if "tensor" in row.axes and "loop" in row.where]
