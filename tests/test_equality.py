"""Every strategy trains as one device does: losses, gradients, parameters, and where they lie."""

import jax
import numpy as np
import pytest

from hfjax.models.gpt import next_token_loss
from hfjax.testing import assert_strategies_agree, strategies
from tests.small_gpt import gpt, tokens

CASES = [
    pytest.param(name, devices, id=f"{name} on {devices}", marks=[pytest.mark.slow] * slow)
    for devices in (2, 4, 8)
    for name in strategies(devices)
    for slow in [devices == 4 and name not in ("DDP", "FSDP")]
]


def case(name, devices):
    strategy, sizes = strategies(devices)[name]
    return {name: (strategy.edit(replicate_below=0), sizes)}


@pytest.mark.parametrize(("name", "devices"), CASES)
def test_a_strategy_equals_one_device_with_dropout_masks_microbatches_and_clipping(name, devices):
    mask = np.random.default_rng(0).integers(0, 2, (16, 24)).astype(np.float32)
    init = gpt(dropout=0.1)
    options = {"accumulate": 2, "clip": 0.5}
    assert_strategies_agree(
        init, next_token_loss, tokens(mask=mask), case(name, devices), **options
    )


@pytest.mark.parametrize("name", ["ZERO2 in two levels", "HSDP+TENSOR+SEQUENCE"])
def test_in_float64_parameters_agree_to_the_last_digits(name):
    with jax.enable_x64(True):
        found = assert_strategies_agree(
            gpt(), next_token_loss, tokens(), case(name, 8), precision="fp64", clip=1.0
        )
    assert found[name] < 1e-12


@pytest.mark.parametrize(
    "options",
    [
        {"remat": "full"},
        {"remat": "dots", "unroll": True},
        {"reshard_after_forward": False},
        {"remat": jax.checkpoint_policies.everything_saveable},
    ],
    ids=str,
)
def test_no_option_of_the_layers_changes_the_result(options):
    assert_strategies_agree(gpt(), next_token_loss, tokens(), case("HSDP", 8), **options)


def test_hierarchical_reduction_and_whole_accumulation_change_no_result():
    cases = {}
    for name in ("DDP", "ZERO1", "FSDP"):
        strategy = strategies(8)[name][0].edit(replicate_below=0)
        cases[name] = (strategy, {"data": 2, "fsdp": 4})
    cases["once"] = (cases["FSDP"][0].edit(gradients={"*": ()}), {"data": 2, "fsdp": 4})
    options = {"reduction": "hierarchical", "accumulate": 2}
    assert_strategies_agree(gpt(), next_token_loss, tokens(), cases, **options)
