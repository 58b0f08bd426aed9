"""What a step needs beside its state, read from the compiled program, does not grow unasked."""

import math

import jax
import optax
import pytest

import hfjax
from hfjax.models.gpt import next_token_loss
from hfjax.parallel.strategy import FSDP, ZERO1, ZERO2
from hfjax.utils.paths import flatten
from tests.h200 import OPTIMIZED, h200s
from tests.small_gpt import mlp_layout

EMBED, LENGTH = 256, 64
LAYER = 8 * EMBED * EMBED * 4  # bytes of the kernels of one layer, an MLP, gathered
CARRY = LENGTH * EMBED * 4  # bytes of one row's residual stream


def temporaries(layers, **execution):
    """Bytes beside the state and the gradients of FSDP on 8 devices, one row on each."""
    shape = {"layers": layers, "embed": EMBED, "length": LENGTH}
    layout = mlp_layout(FSDP, {"fsdp": 8}, optax.sgd(1e-3), **shape)
    batch = {"tokens": jax.ShapeDtypeStruct((8, LENGTH + 1), "int32")}
    step = hfjax.train_step(layout, next_token_loss, **execution)
    memory = step.lower(batch).compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes - layout.bytes_per_device()["gradients"]


def test_with_remat_fsdp_holds_one_or_two_gathered_layers_and_a_carry_per_layer():
    short, deep = temporaries(4, remat="full"), temporaries(32, remat="full")
    per_layer = (deep - short) / 28
    assert 0.9 * CARRY <= per_layer <= 1.5 * CARRY
    assert short <= 3 * LAYER
    assert deep <= 3 * LAYER + 1.5 * 32 * CARRY


@pytest.mark.parametrize("remat", ["none", pytest.param("dots", marks=pytest.mark.slow)])
def test_gathered_parameters_are_never_saved_for_the_backward_pass_unless_asked(remat):
    of = lambda layers, options: temporaries(layers, remat=remat, unroll=1, **options)
    growth = lambda **options: (of(12, options) - of(4, options)) / 8
    dropped = growth()
    kept = growth(reshard_after_forward=False)
    assert kept - dropped >= 0.9 * LAYER


def needed_by_gradients(step, batch):
    """Bytes beside the state until gradients are there, and they themselves."""

    def gradients(state, batch):
        return step.engine.gradients(flatten(state.params), {}, batch, state.step)[0]

    given = step.layout.abstract_state(), batch
    memory = jax.jit(gradients).lower(*given).compile(OPTIMIZED).memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes + memory.output_size_in_bytes


@pytest.mark.parametrize("strategy", [ZERO1, ZERO2], ids=["ZERO1", "ZERO2"])
@pytest.mark.cuda
def test_on_h200s_new_parameters_are_gathered_into_the_place_of_the_old_ones(strategy):
    shape = {"layers": 16, "embed": EMBED, "length": LENGTH}
    layout = mlp_layout(strategy, {"data": 8}, devices=h200s(), **shape)
    batch = {"tokens": jax.ShapeDtypeStruct((8, LENGTH + 1), "int32")}
    step = hfjax.train_step(layout, next_token_loss, remat="full", gradient_accumulation_steps=1)
    compiled = step.lower(batch).compile(OPTIMIZED)
    memory = compiled.memory_analysis()
    assert memory is not None
    largest = max(math.prod(p.shape) * 4 for p in layout.param_specs.values())
    assert memory.temp_size_in_bytes <= needed_by_gradients(step, batch) + largest // 8
    sent = hfjax.collectives(compiled)
    split = [p for p in layout.param_specs.values() if p.optimizer_state != p.parameter]
    assert sent.total("all-gather") == sum(math.prod(p.shape) * 4 for p in split)
