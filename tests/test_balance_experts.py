"""Which experts get a second copy, and where each copy lies."""

import subprocess
import sys
from dataclasses import fields

import numpy as np
import pytest

import balance_experts as example
from balance_experts import balance_experts
from tests.workers import ROOT, environment

LOADS = np.array(example.LOADS)
EXAMPLE = {"replicas": 16, "groups": 4, "nodes": 2, "devices": 8}
# What it prints; the other arrays follow from it, but for the order of an expert's copies.
PUBLISHED = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def test_the_published_example():
    found = balance_experts(LOADS, **EXAMPLE)
    assert found.placement.tolist() == PUBLISHED
    for layer, placement in enumerate(PUBLISHED):
        places = [[i for i, e in enumerate(placement) if e == expert] for expert in range(12)]
        assert found.counts[layer].tolist() == [len(at) for at in places]
        padded = [[-1, *at] if len(at) == 1 else at for at in places]
        assert np.sort(found.replicas[layer]).tolist() == padded


def test_the_example_prints_what_each_device_has_to_do():
    run = [sys.executable, "examples/balance_experts.py"]
    told = subprocess.run(run, cwd=ROOT, env=environment(), capture_output=True, text=True)
    lines = told.stdout.splitlines()
    assert told.returncode == 0, told.stderr
    assert lines[:2] == ["layer 0", "  device 0: experts [5, 6], load 121.5"]
    assert lines[9:11] == ["layer 1", "  device 0: experts [7, 10], load 173"]


def test_one_copy_on_each_device_leaves_experts_in_their_order():
    found = balance_experts([range(8)], replicas=8, groups=1, nodes=1, devices=8)
    assert found.placement.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert found.replicas.tolist() == [[[expert] for expert in range(8)]]


def test_the_copies_of_an_expert_are_in_the_order_in_which_they_were_added():
    found = balance_experts([[6, 1, 1, 2]], replicas=6, groups=1, nodes=1, devices=2)
    assert found.replicas.tolist() == [[[0, 1, 4], [2, -1, -1], [5, -1, -1], [3, -1, -1]]]


def test_a_number_of_nodes_that_does_not_divide_the_groups_ignores_both():
    one = balance_experts(LOADS, replicas=16, groups=1, nodes=1, devices=8)
    two = balance_experts(LOADS, replicas=16, groups=3, nodes=2, devices=8)
    for field in fields(one):
        np.testing.assert_array_equal(getattr(one, field.name), getattr(two, field.name))


def uneven(rng, layers, experts):
    """Return loads in which a few experts have most."""
    return rng.zipf(1.5, (layers, experts)).clip(0, 1000) * 10.0


def of_devices(loads, found, devices):
    """Return what each device has to do [layers, devices]."""
    shares = np.take_along_axis(loads / found.counts, found.placement, 1)
    return shares.reshape(len(loads), devices, -1).sum(-1)


CASES = [  # experts, replicas, groups, nodes, devices
    (12, 16, 4, 2, 8),
    (16, 16, 4, 4, 8),
    (64, 80, 8, 2, 16),
    (256, 288, 8, 4, 32),
    (16, 24, 1, 2, 8),
    (8, 40, 1, 1, 8),
]


@pytest.mark.parametrize(("experts", "replicas", "groups", "nodes", "devices"), CASES)
def test_the_laws_of_a_placement(experts, replicas, groups, nodes, devices):
    loads = uneven(np.random.default_rng(experts), 3, experts)
    found = balance_experts(loads, replicas, groups, nodes, devices)
    assert found.placement.shape == (3, replicas)
    assert (found.counts >= 1).all()
    assert (found.counts.sum(-1) == replicas).all()
    for layer in range(3):
        for expert in range(experts):
            (at,) = np.nonzero(found.placement[layer] == expert)
            listed = found.replicas[layer, expert]
            assert sorted(listed[listed >= 0]) == at.tolist()
            assert len(at) == found.counts[layer, expert]
    if groups % nodes == 0:
        node = found.placement.reshape(3, nodes, -1) // (experts // groups)
        of_nodes = [[set(groups_there) for groups_there in layer] for layer in node.tolist()]
        for layer in of_nodes:
            assert [len(there) for there in layer] == [groups // nodes] * nodes
            assert set.union(*layer) == set(range(groups))


@pytest.mark.parametrize(("experts", "replicas", "groups", "nodes", "devices"), CASES)
def test_uneven_loads_become_more_even(experts, replicas, groups, nodes, devices):
    loads = uneven(np.random.default_rng(experts), 5, experts)
    found = balance_experts(loads, replicas, groups, nodes, devices)
    after = of_devices(loads, found, devices)
    neighbours = np.array_split(np.arange(experts), devices)
    before = np.stack([loads[:, there].sum(-1) for there in neighbours], -1)
    np.testing.assert_allclose(after.sum(-1), before.sum(-1))  # so the means are equal
    assert (after.max(-1) <= before.max(-1) * (1 + 1e-6)).all()
    assert after.max(-1).sum() < before.max(-1).sum()


def test_a_further_copy_goes_where_the_load_of_a_copy_is_highest():
    rng = np.random.default_rng(0)
    for copies in range(8, 40, 4):
        loads = uneven(rng, 1, 8)
        found = balance_experts(loads, copies, groups=1, nodes=1, devices=4)
        copied = found.counts > 1
        highest = (loads / found.counts).max()
        assert (highest <= (loads / (found.counts - copied))[copied] * (1 + 1e-6)).all()


@pytest.mark.parametrize(
    ("loads", "given", "message"),
    [
        (LOADS[0], {}, r"shape \(12,\): one row for each layer .* give \[loads\]"),
        (np.ones((0, 12)), {}, r"shape \(0, 12\)"),
        (-LOADS, {}, r"the load of expert 0 in layer 0 is -90.0. A load is .* 0 or more"),
        ([[1, 2], [1, np.nan]], {}, "the load of expert 1 in layer 1 is nan"),
        ([[1, 2], [1, np.inf]], {}, "the load of expert 1 in layer 1 is inf"),
        (LOADS, {"replicas": 8}, "replicas=8.* of 12 experts on 8 devices: every .* Take 16, or"),
        (LOADS, {"replicas": 20}, "Take 24, or another multiple of 8 that is at least 12"),
        (LOADS, {"replicas": 16.0}, "replicas=16.0.: an integer of at least 1"),
        (LOADS, {"groups": 0}, "groups=0.: an integer of at least 1"),
        (LOADS, {"nodes": True}, "nodes=True.: an integer of at least 1"),
        (LOADS, {"groups": 5}, "groups=5. does not divide 12 experts. These do: 1, 2, 3, 4, 6, 12"),
        (LOADS, {"nodes": 3}, "nodes=3. does not divide 8 devices. These do: 1, 2, 4, 8"),
    ],
)
def test_what_cannot_be_balanced_is_told(loads, given, message):
    with pytest.raises(ValueError, match=message):
        balance_experts(loads, **{**EXAMPLE, **given})


def test_loads_that_are_no_numbers_are_refused():
    for loads in ([["6", "1"]], [[True, False]], [[6, None]]):
        with pytest.raises(ValueError, match=r"loads=…\) of .*: numbers are expected"):
            balance_experts(loads, replicas=2, groups=1, nodes=1, devices=1)
