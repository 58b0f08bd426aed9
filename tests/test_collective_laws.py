"""What each strategy sends in one step is what theory says, byte by byte, and nothing else."""

import math

import optax
import pytest

import hfjax
from hfjax.models.gpt import next_token_loss
from hfjax.parallel.strategy import DDP, FSDP, HSDP, SEQUENCE, TENSOR, ZERO1, ZERO2
from tests.h200 import OPTIMIZED, h200s
from tests.small_gpt import gpt, gpt_layout, mlps, tokens
from tests.small_stack import of_stacks

LAYERS = 2
SUMS = 8  # total and weight of the loss, two float32 scalars


def lowered(strategy, sizes, optimizer=None, model=mlps, **execution):
    strategy = strategy.edit(replicate_below=1024)
    layout = gpt_layout(strategy, sizes, optimizer, model=model)
    return layout, hfjax.train_step(layout, next_token_loss, **execution).lower(tokens())


def on_h200s(strategy, sizes, **execution):
    layout = gpt_layout(strategy, sizes, devices=h200s(), length=64, embed=128)
    step = hfjax.train_step(layout, next_token_loss, **execution)
    return hfjax.collectives(step.lower(tokens(length=64)).compile(OPTIMIZED))


def elements(layout, *, split, layers=None):
    """Elements of the matrices (split) or of the small arrays (whole), of layers or others."""
    size = lambda p: math.prod(p.shape) // (LAYERS if p.path.startswith("layers/") else 1)
    return sum(
        math.prod(p.shape)
        for p in layout.param_specs.values()
        if (size(p) >= 1024) == split and layers in (None, p.path.startswith("layers/"))
    )


SLOW = pytest.mark.slow


@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=SLOW), 4])
def test_ddp_reduces_each_gradient_once_whatever_the_number_of_microbatches(accumulate):
    layout, program = lowered(DDP, {"data": 4}, gradient_accumulation_steps=accumulate)
    found = hfjax.collectives(program)
    whole = elements(layout, split=True) + elements(layout, split=False)
    assert found.total("all-reduce", "data") == 4 * whole + SUMS == found.total()
    assert {row.where for row in found} == {""}


def test_hierarchical_reduction_scatters_in_the_node_adds_across_and_gathers():
    layout, program = lowered(DDP, {"data": 2, "fsdp": 4}, gradient_reduction="hierarchical")
    found = hfjax.collectives(program)
    whole = elements(layout, split=True) + elements(layout, split=False)
    assert found.total("reduce-scatter", "fsdp") == 4 * whole == found.total("all-gather", "fsdp")
    assert found.total("all-reduce", "data") == 4 * whole // 4
    assert found.total("all-reduce", ("data", "fsdp")) == SUMS


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=SLOW), 2])
def test_zero1_scatters_once_a_step_and_gathers_the_new_parameters(accumulate):
    options = {"gradient_accumulation_steps": accumulate, "unroll": 1}
    layout, program = lowered(ZERO1, {"data": 2, "fsdp": 2}, **options)
    found, both = hfjax.collectives(program), ("data", "fsdp")
    large, small = elements(layout, split=True), elements(layout, split=False)
    assert found.total("reduce-scatter", both) == 4 * large
    assert found.total("all-reduce", both) == 4 * small + SUMS
    in_layers = elements(layout, split=True, layers=True)  # the others are left to the partitioner
    assert found.total("all-gather", both) == 4 * in_layers
    assert found.total() == 4 * (large + small + in_layers) + SUMS
    in_loops = any(row.where for row in found if row.kind == "reduce-scatter")
    assert in_loops == (accumulate == 1)  # at once, layer by layer, if nothing more is added
    compiled = hfjax.collectives(program.compile())
    assert compiled.total("all-gather") == 4 * large


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=SLOW), 2])
def test_zero2_scatters_in_every_microbatch(accumulate):
    layout, program = lowered(ZERO2, {"data": 4}, gradient_accumulation_steps=accumulate)
    found = hfjax.collectives(program)
    assert found.total("reduce-scatter", "data") == accumulate * 4 * elements(layout, split=True)
    assert found.total("all-reduce") == 4 * elements(layout, split=False) + SUMS
    assert found.total("all-gather") == 4 * elements(layout, split=True, layers=True)
    compiled = hfjax.collectives(program.compile())
    assert compiled.total("all-gather", "data") == 4 * elements(layout, split=True)


@pytest.mark.parametrize("remat", ["none", "full", "dots"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.short("2-full")
def test_fsdp_gathers_each_layer_twice_and_scatters_it_once_per_microbatch(accumulate, remat):
    layout, program = lowered(
        FSDP, {"fsdp": 4}, gradient_accumulation_steps=accumulate, remat=remat
    )
    found = hfjax.collectives(program)
    in_layers = elements(layout, split=True, layers=True)
    outside = elements(layout, split=True, layers=False)
    assert found.total("all-gather", "fsdp") == accumulate * 4 * (2 * in_layers + outside)
    assert found.total("reduce-scatter", "fsdp") == accumulate * 4 * (in_layers + outside)
    assert found.total("all-reduce", "fsdp") == 4 * elements(layout, split=False) + SUMS


@pytest.mark.parametrize("remat", ["none", "full", "dots"])
@pytest.mark.short("full")
def test_parameters_kept_after_the_forward_pass_are_gathered_once(remat):
    options = {"remat": remat, "reshard_after_forward": False}
    layout, program = lowered(FSDP, {"fsdp": 4}, **options)
    found = hfjax.collectives(program)
    assert found.total("all-gather", "fsdp") == 4 * elements(layout, split=True)


def test_gradients_accumulated_whole_are_gathered_and_scattered_once_a_step():
    once = FSDP.edit(gradients={"*": ()})
    layout, program = lowered(once, {"fsdp": 4}, gradient_accumulation_steps=2)
    found, large = hfjax.collectives(program), elements(layout, split=True)
    assert found.total("all-gather", "fsdp") == found.total("reduce-scatter", "fsdp") == 4 * large
    assert {row.where for row in found} == {""}


def test_hsdp_adds_only_shards_across_nodes_once_a_step():
    layout, program = lowered(HSDP, {"data": 2, "fsdp": 4}, gradient_accumulation_steps=2)
    found, large = hfjax.collectives(program), elements(layout, split=True)
    assert found.total("reduce-scatter", "fsdp") == 2 * 4 * large
    assert found.total("all-reduce", "data") == 4 * large // 4
    assert found.total("all-reduce", ("data", "fsdp")) == 4 * elements(layout, split=False) + SUMS


def test_bfloat16_arithmetic_gathers_bfloat16_and_reduces_float32():
    _, program = lowered(FSDP, {"fsdp": 4}, precision="bf16")
    rows = list(hfjax.collectives(program))
    assert {row.dtype for row in rows if row.kind == "all-gather"} == {"bfloat16"}
    assert {row.dtype for row in rows if row.kind != "all-gather"} == {"float32"}
    found, wide = hfjax.collectives(program), hfjax.collectives(lowered(FSDP, {"fsdp": 4})[1])
    assert 2 * found.total("all-gather") == wide.total("all-gather")


def test_gather_and_reduction_dtypes_are_entries_of_their_own():
    mixed = hfjax.Precision(compute="bfloat16", gather="float32", reduce="bfloat16")
    _, program = lowered(FSDP, {"fsdp": 4}, precision=mixed)
    rows = list(hfjax.collectives(program))
    assert {row.dtype for row in rows if row.kind == "all-gather"} == {"float32"}
    assert {row.dtype for row in rows if row.kind == "reduce-scatter"} == {"bfloat16"}


def test_beside_a_tensor_axis_only_tensor_shards_move():
    layout, program = lowered(FSDP | TENSOR, {"fsdp": 2, "tensor": 2})
    found, large = hfjax.collectives(program), elements(layout, split=True)
    outside = elements(layout, split=True, layers=False)
    assert found.total("reduce-scatter", "fsdp") == 4 * large // 2
    assert found.total("all-gather", "fsdp") == 4 * (2 * (large - outside) + outside) // 2
    layout, program = lowered(
        ZERO1 | TENSOR, {"data": 2, "tensor": 2}, gradient_accumulation_steps=2
    )
    large = elements(layout, split=True)
    assert hfjax.collectives(program).total("reduce-scatter", "data") == 4 * large // 2


@pytest.mark.parametrize(
    "strategy",
    [
        TENSOR | SEQUENCE,
        FSDP | TENSOR,
        TENSOR,
        ZERO2 | TENSOR,
    ],
)
@pytest.mark.short("strategy1")
def test_no_parameter_split_by_tensor_is_ever_gathered_over_it(strategy):
    layout, program = lowered(strategy, {"fsdp": 2, "tensor": 2}, model=gpt)
    split = [p for p in layout.param_specs.values() if "tensor" in p.parameter]
    largest = {math.prod(p.shape[-2:]) for p in split if len(p.shape) > 1}
    gathers = [r for r in hfjax.collectives(program.compile()) if r.kind == "all-gather"]
    over_tensor = [math.prod(r.shape) for r in gathers if "tensor" in r.axes]
    assert not largest & set(over_tensor)


@pytest.mark.slow  # Llama's, in test_llama.py, are counted every day
def test_tensor_parallel_layers_add_four_activations_a_layer():
    _, program = lowered(TENSOR, {"data": 2, "tensor": 2}, model=gpt)
    found = hfjax.collectives(program.compile())
    activation = (8, 24, 32)
    added = sum(row.count for row in found if row.shape == activation and row.kind == "all-reduce")
    assert added == 4 * LAYERS + 2  # the embedding, and the gradient that enters the head
    assert {row.kind for row in found if "tensor" in row.axes} == {"all-reduce"}


def test_what_an_optimizer_moves_by_itself_is_counted():
    muon, adam = (
        hfjax.collectives(lowered(FSDP, {"fsdp": 4}, optimizer)[1].compile())
        for optimizer in (
            optax.contrib.muon(1e-3, muon_weight_dimension_numbers=of_stacks),
            optax.adamw(1e-3),
        )
    )
    assert muon.total() > adam.total()


@pytest.mark.cuda
def test_on_h200s_sequence_parallel_layers_gather_and_scatter_four_times_a_layer():
    found = on_h200s(TENSOR | SEQUENCE, {"data": 4, "tensor": 2})
    stream = [row for row in found if row.axes == ("tensor",) and row.bytes == 4 * 64 * 128 * 4]
    counts = {
        kind: sum(r.count for r in stream if r.kind == kind)
        for kind in ("all-gather", "reduce-scatter")
    }
    assert counts["all-gather"] == 4 * LAYERS + 2
    assert counts["reduce-scatter"] == 4 * LAYERS + 2
    assert not [row for row in stream if row.kind == "all-reduce"]


@pytest.mark.cuda
def test_on_h200s_bfloat16_gathers_stay_bfloat16():
    rows = on_h200s(FSDP, {"fsdp": 8}, precision="bf16")
    assert {row.dtype for row in rows if row.kind == "all-gather"} == {"bfloat16"}
