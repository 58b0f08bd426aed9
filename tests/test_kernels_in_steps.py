"""The forms of the kernels change no result: the plain JAX beside each, under every strategy."""

import numpy as np

import hfjax
from hfjax.models.gpt import next_token_loss
from hfjax.testing import assert_strategies_agree, strategies
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
