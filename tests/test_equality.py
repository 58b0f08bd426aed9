"""Every strategy trains as one device does: losses, gradients, parameters, and where they lie."""

import math
import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from hfjax.models.gpt import next_token_loss
from hfjax.parallel.make_mesh import make_mesh
from hfjax.parallel.strategy import DDP, FSDP, ZERO1
from hfjax.sharding.check_layout import check_splits
from hfjax.testing import assert_strategies_agree, strategies
from tests.small_gpt import gpt, mlps, tokens


def groups(devices, size=4):
    names = list(strategies(devices))
    return [names[i : i + size] for i in range(0, len(names), size)]


def values(case):
    return getattr(case, "values", case)


def cases(devices, names):
    known = strategies(devices)
    return {name: (known[name][0].edit(replicate_below=0), known[name][1]) for name in names}


MOMENTUM = optax.sgd(0.1, momentum=0.9)

BOTH = ["FSDP+TENSOR", "ZERO1+TENSOR+SEQUENCE", "HSDP+TENSOR+SEQUENCE", "ZERO2+TENSOR"]
GROUPS = [
    (mlps, 8, ["DDP", "ZERO1", "ZERO2"]),
    (mlps, 8, ["FSDP", "TENSOR", "TENSOR+SEQUENCE"]),
    (mlps, 8, ["HSDP", "ZERO2 on two axes"]),
    (mlps, 8, BOTH),
    *((gpt, devices, names) for devices in (2, 4, 8) for names in groups(devices)),
]


@pytest.mark.short("mlps-8-FSDP TENSOR TENSOR+SEQUENCE")
@pytest.mark.parametrize(
    ("model", "devices", "names"),
    GROUPS,
    ids=lambda x: " ".join(x) if isinstance(x, list) else getattr(x, "__name__", x),
)
def test_strategies_equal_one_device_with_dropout_masks_microbatches_and_clipping(
    model, devices, names
):
    mask = np.random.default_rng(0).integers(0, 2, (16, 24)).astype(np.float32)
    batch, options = tokens(mask=mask), {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    if model is mlps:
        options |= {"unroll": 1, "optimizer": MOMENTUM}
    assert_strategies_agree(
        model(dropout=0.1), next_token_loss, batch, cases(devices, names), **options
    )


QUICK = ("HSDP+TENSOR+SEQUENCE",)
IN_FLOAT64 = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in strategies(8)
]


@pytest.mark.parametrize("name", IN_FLOAT64)
def test_in_float64_parameters_agree_to_the_last_digits(name):
    with jax.enable_x64(True):
        found = assert_strategies_agree(
            mlps(),
            next_token_loss,
            tokens(),
            cases(8, [name]),
            optimizer=MOMENTUM,
            precision="fp64",
            max_grad_norm=1.0,
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
    ids=["full", "dots, unrolled", "kept", "a policy"],
)
@pytest.mark.short("dots, unrolled")
def test_no_option_of_the_layers_changes_the_result(options):
    chosen = cases(8, ["HSDP"])
    assert_strategies_agree(
        mlps(), next_token_loss, tokens(), chosen, optimizer=MOMENTUM, **options
    )


IN_TWO_LEVELS = {
    "DDP": DDP,
    "ZERO1": ZERO1,
    "FSDP": FSDP,
    "FSDP once": FSDP.edit(gradients={"*": ()}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ["ZERO1", "FSDP once"],
        pytest.param(["DDP", "FSDP"], marks=pytest.mark.slow),  # which send less at once
    ],
    ids=" ".join,
)
def test_hierarchical_reduction_and_whole_accumulation_change_no_result(names):
    chosen = {
        name: (IN_TWO_LEVELS[name].edit(replicate_below=0), {"data": 2, "fsdp": 4})
        for name in names
    }
    options = {
        "gradient_reduction": "hierarchical",
        "gradient_accumulation_steps": 2,
        "unroll": 1,
        "optimizer": MOMENTUM,
    }
    assert_strategies_agree(mlps(), next_token_loss, tokens(), chosen, **options)


def test_all_strategies_train_mlps():
    trained = [name for model, _, names in map(values, GROUPS) if model is mlps for name in names]
    assert sorted(trained) == sorted(strategies(8))


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6, 8])
def test_each_case_of_the_kit_splits_something(devices, recwarn):
    for strategy, sizes in strategies(devices).values():
        count = math.prod(sizes.values())
        check_splits(strategy, make_mesh(devices=jax.devices()[:count], **sizes))
    assert not recwarn.list


def test_the_kit_logs_each_strategy(caplog):
    caplog.set_level("INFO", "hfjax")
    init, batch = lambda rngs: nnx.Linear(8, 8, rngs=rngs), np.ones((8, 8), np.float32)
    one = {"FSDP": (FSDP.edit(replicate_below=0), {"data": 2, "fsdp": 4})}
    assert_strategies_agree(init, lambda y, batch: (y**2).mean(), batch, one, steps=1)
    told = [line for line in caplog.messages if "…" not in line]
    assert re.fullmatch(r"one device: trained, \d+ s", told[0])
    assert re.fullmatch(r"FSDP on data=2 x fsdp=4: equal, \d+ s", told[1])
