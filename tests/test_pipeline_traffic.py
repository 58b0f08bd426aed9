"""What a pipeline sends is what its table says: one message a tick, one reduction a step."""

import math
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax import DDP, FSDP, PIPE, SEQUENCE, TENSOR, ZERO1, Schedule
from hfjax.models.gpt import next_token_loss
from hfjax.models.layers import stack_layers
from hfjax.parallel.pipeline.engine import waiting_bytes
from hfjax.parallel.schedules.cost import count_permutes, messages
from hfjax.parallel.schedules.named import SCHEDULES
from hfjax.utils.paths import flatten
from tests.h200 import OPTIMIZED, h200s
from tests.small_gpt import gpt_layout, mlp_layout, tokens

LAYERS, ROWS, WIDTH = 4, 24, 32
SUMS = 8  # total and weight of the loss


def lowered(strategy, sizes, schedule, rows=16, layers=LAYERS, **execution):
    layout = mlp_layout(strategy.edit(replicate_below=1024), sizes, layers=layers)
    step = hfjax.train_step(layout, next_token_loss, schedule=schedule, **execution)
    return layout, step.lower(tokens(rows))


def bytes_of(layout, layers):
    """Bytes of the parameters of all layers, or of what is outside of them."""
    inside = lambda path: path.startswith("layers/")
    placed = layout.param_specs.items()
    return sum(4 * math.prod(p.shape) for path, p in placed if inside(path) == layers)


def activation(rows):
    return 4 * rows * ROWS * WIDTH


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("microbatches", [4, 8])
def test_one_activation_goes_up_and_one_gradient_down_in_every_tick(stages, microbatches):
    _, program = lowered(PIPE, {"pipe": stages}, Schedule("1f1b", microbatches))
    found = hfjax.collectives(program)
    ticks = microbatches + stages - 1
    assert found.count("permute", "pipe") == 2 * ticks
    assert found.total("permute", "pipe") == 2 * ticks * activation(16 // microbatches)


class Tiny(nnx.Module):
    """Layers that cost nothing to trace: one array goes from each to the next."""

    def __init__(self, rngs):
        self.layers = stack_layers(
            8, lambda rngs: nnx.Linear(2, 2, use_bias=False, rngs=rngs), rngs
        )

    def embed(self, batch):
        return batch

    def head(self, x):
        return x


OWN = Schedule.from_text("0F0 0F1 0F2 0B0 0B1 0B2 \n 1F0 1B0 1F1 1F2 1B1 1B2")


@pytest.mark.parametrize("name", ["own", *SCHEDULES])
@pytest.mark.short("own", "zb-h1", "forward")
def test_a_schedule_reports_the_permutes_that_its_program_has(name):
    """Loops multiplied out; those needed are fewer, since a tick sends whatever it has to say."""
    schedule = OWN if name == "own" else Schedule(name, 8)
    stages = 2 if name == "own" else 4
    mesh = hfjax.make_mesh(pipe=stages, devices=jax.devices()[:stages])
    layout = hfjax.layout(Tiny, optax.sgd(0.1), mesh, PIPE)
    batch, loss = np.ones((24, 2), np.float32), lambda outputs, batch: outputs.mean()
    if name == "forward":
        step = hfjax.eval_step(layout, loss, schedule=schedule)
        state = hfjax.init(layout, schedule=schedule)
        program = jax.jit(step).lower(state, batch)
    else:
        program = hfjax.train_step(layout, loss, schedule=schedule).lower(batch)
    found = [row for row in hfjax.collectives(program) if row.kind == "permute"]
    table = schedule.table(stages)
    assert sum(row.count for row in found if row.shape) == count_permutes(table)
    needed = max(sum(n for (a, _), n in messages(table).items() if a == s) for s in range(stages))
    assert count_permutes(table) >= needed > 0


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "v", "zb", "zb-h1"])
@pytest.mark.short("v")
def test_gradients_are_reduced_once_a_step_whatever_the_number_of_microbatches(name):
    for microbatches in (2, 6):
        schedule = Schedule(name, microbatches)
        layout, program = lowered(PIPE | DDP, {"pipe": 2, "data": 2}, schedule, rows=12)
        found = hfjax.collectives(program)
        assert found.total("all-reduce", "data") == bytes_of(layout, layers=True) // 2
        assert found.total("all-reduce", ("pipe", "data")) == bytes_of(layout, layers=False) + SUMS


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb"])
@pytest.mark.short("interleaved")
def test_large_gradients_of_layers_are_summed_in_the_last_tick_each_by_itself(name):
    """What a tick adds to as soon as it is there, and the other chunk; small ones go together."""
    schedule, sizes = Schedule(name, 4), {"pipe": 2, "data": 2}
    layout, program = lowered(PIPE, sizes, schedule)
    large = [
        p for path, p in layout.param_specs.items() if path.startswith("layers/") and not p.small
    ]
    kernels = {p.shape[1:] for p in large}
    rows = [row for row in hfjax.collectives(program) if row.axes == ("data",)]
    assert sum(row.count for row in rows if row.shape in kernels) == len(large) * 4 // 2
    assert not any(row.shape in {p.shape for p in large} for row in rows)


def test_zero1_scatters_once_a_step_whatever_the_number_of_microbatches():
    sizes = {"pipe": 2, "data": 2}
    few = hfjax.collectives(lowered(PIPE | ZERO1, sizes, Schedule("interleaved", 2, 2))[1])
    many = hfjax.collectives(lowered(PIPE | ZERO1, sizes, Schedule("interleaved", 8, 2))[1])
    assert few.total("reduce-scatter") == many.total("reduce-scatter") > 0
    assert few.total("all-gather") == many.total("all-gather") > 0  # of new parameters, by layer
    assert all(row.kind in ("permute", "all-gather") for row in many if row.where)


@pytest.mark.parametrize("keep", [False, True])
def test_zero3_gathers_a_layer_in_both_slots_of_a_tick_or_once_a_step_if_kept(keep):
    fields = {"schedule": Schedule("1f1b", 4), "reshard_after_forward": not keep}
    layout, program = lowered(PIPE | FSDP, {"pipe": 2, "fsdp": 2}, **fields)
    found = hfjax.collectives(program)
    layers = [p for path, p in layout.param_specs.items() if path.startswith("layers/")]
    matrices = sum(4 * math.prod(p.shape) for p in layers if p.split_dims("parameter"))
    of_stage, ticks = matrices // 2, 4 + 1
    ends = sum(
        4 * math.prod(p.shape)
        for path, p in layout.param_specs.items()
        if not path.startswith("layers/") and p.split_dims("parameter")
    )
    assert found.total("all-gather", "fsdp") == ends + of_stage * (1 if keep else 2 * ticks)
    assert found.total("reduce-scatter", "fsdp") == ends + of_stage * ticks
    assert {row.kind for row in found if row.where} <= {"permute", "all-gather", "reduce-scatter"}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
def test_the_program_does_not_grow_with_the_number_of_microbatches(schedule):
    step = lambda m: lowered(PIPE, {"pipe": 2}, Schedule(schedule, m), rows=2 * m)[1]
    lines = [step(m).as_text().count("\n") for m in (4, 8, 32)]
    assert len(set(lines)) == 1


@pytest.mark.short("1f1b")
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_no_message_of_a_compiled_program_lies_in_a_branch(name):
    strategy, sizes = PIPE | TENSOR | SEQUENCE, {"pipe": 2, "data": 2, "tensor": 2}
    _, program = lowered(strategy, sizes, Schedule(name, 4))
    found = hfjax.collectives(program.compile())
    messages = [row for row in found if row.kind == "permute"]
    assert sum(row.count for row in messages) == count_permutes(Schedule(name, 4).table(2))
    assert all("branch" not in row.where for row in messages)
    assert all("pipe" in row.axes for row in messages)


def test_each_stage_holds_its_layers_gradients_and_moments():
    layout = gpt_layout(PIPE, {"pipe": 4}, layers=8)
    one = gpt_layout(DDP, {"data": 1}, layers=8)
    ends = bytes_of(one, layers=False)
    for name, whole in one.bytes_per_device().items():
        share, times = layout.bytes_per_device()[name], {"optimizer_state": 2}.get(name, 1)
        scalars = whole % 8 if name == "optimizer_state" else 0
        assert share - scalars == times * ends + (whole - scalars - times * ends) // 4, name


def test_the_rings_of_a_split_backward_take_what_is_told_of_them():
    """zb-h1 has the stash of 1f1b-published, and what W needs of B besides."""
    rows, mesh = 64, hfjax.make_mesh(pipe=4, devices=jax.devices()[:4])
    layout = hfjax.layout(Tiny, optax.sgd(0.1), mesh, PIPE)
    told, compiled = [], []
    for name in ("1f1b-published", "zb-h1"):
        schedule, batch = Schedule(name, 4), np.ones((4 * rows, 2), np.float32)
        step: Any = hfjax.train_step(layout, lambda y, _: y.mean(), schedule=schedule, unroll=1)
        state = step.layout.abstract_state()
        given = flatten(state.params), flatten(state.variables)
        told.append(waiting_bytes(step.engine, *given, batch, state.step)["activations"][0])
        compiled.append(step.lower(batch).compile().memory_analysis().temp_size_in_bytes)
    layers, x = 2, 4 * rows * 2
    assert told == [4 * layers * x, (4 + 4) * layers * x]  # a Linear keeps x, and dy crosses
    more = (compiled[1] - compiled[0]) - (told[1] - told[0])
    assert 0 <= more <= x  # what a layer's branch hands to the ring


@pytest.mark.cuda
def test_compiled_for_h200s_messages_are_those_of_the_table_and_in_no_branch():
    sizes = {"pipe": 2, "data": 2, "tensor": 2}
    strategy = PIPE | TENSOR | SEQUENCE
    layout = gpt_layout(strategy, sizes, devices=h200s(), length=64, embed=128, layers=4)
    step = hfjax.train_step(layout, next_token_loss, schedule=Schedule("1f1b", 4))
    found = hfjax.collectives(step.lower(tokens(length=64)).compile(OPTIMIZED))
    messages = [row for row in found if row.kind == "permute"]
    assert sum(row.count for row in messages) == 2 * (4 + 1)
    assert all("branch" not in row.where for row in messages)
