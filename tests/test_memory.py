"""What a step needs beside its state, read from the compiled program, does not grow unasked."""

import jax
import optax
import pytest

import hfjax
from hfjax.models.gpt import next_token_loss
from hfjax.parallel.strategy import FSDP
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
