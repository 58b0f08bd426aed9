"""Layers in no loop, compiled for 8 H200s: what moves, what is whole at once, what is kept."""

import jax
import jax.numpy as jnp
import optax
import pytest

import hfjax
from benchmarks.ahead_of_time import lean
from benchmarks.moved_bytes import Program, elements, size
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss
from tests.h200 import OPTIMIZED, h200s

LAYERS, EMBED, LENGTH = 4, 512, 512


@pytest.fixture(scope="module")
def compiled():
    """Compile a step under FSDP once for each form and remat."""
    kept = {}

    def of(remat, unroll):
        if (remat, unroll) not in kept:
            attention = lambda q, k, v: lean(q, k, v)
            config = GPTConfig(
                length=LENGTH, layers=LAYERS, embed=EMBED, heads=8, vocab=512, attention=attention
            )
            mesh = hfjax.make_mesh(devices=h200s(), fsdp=8)
            init = lambda rngs: GPT(config, rngs=rngs)
            plan = hfjax.layout(init, optax.adamw(1e-3), mesh, hfjax.FSDP)
            step = hfjax.train_step(
                plan,
                next_token_loss,
                precision="bf16",
                remat=remat,
                unroll=unroll,
                compiler_options=OPTIMIZED,
            )
            batch = {"tokens": jax.ShapeDtypeStruct((32, LENGTH + 1), jnp.int32)}
            kept[remat, unroll] = step.lower(batch).compile()
        return kept[remat, unroll]

    return of


@pytest.mark.cuda
@pytest.mark.short("dots")
@pytest.mark.parametrize("remat", ["none", "full", "dots"])
def test_two_layers_are_whole_at_once(compiled, remat):
    """Left alone, XLA would gather all of them, and once for both passes. None: as measured."""
    program = Program(compiled(remat, None))
    layer = 12 * EMBED**2 * 2  # bytes of its four matrices in bfloat16
    least = 1 << 20
    matrices = sum(parts * EMBED**2 * 2 >= least for parts in (3, 1, 4, 4))
    assert program.whole.gathers == 2 * LAYERS * matrices
    assert layer <= program.whole.bytes <= 2 * layer


@pytest.mark.cuda
@pytest.mark.short("dots")
@pytest.mark.parametrize("remat", ["none", "full", "dots"])
def test_no_loop_copies_less_and_keeps_no_more(compiled, remat):
    loop, tied = compiled(remat, 1), compiled(remat, None)
    assert " while(" in loop.as_text()
    assert " while(" not in tied.as_text()
    before, after = Program(loop).moved, Program(tied).moved
    assert after.total < before.total
    assert after.moved < before.moved
    assert "loop_dynamic_update_slice_fusion" not in after.by
    held = lambda program: program.memory_analysis().peak_memory_in_bytes
    assert held(tied) <= 1.05 * held(loop)


@pytest.mark.cuda
def test_a_loop_of_one_turn_for_each_layer_is_still_there_to_ask_for(compiled):
    assert (
        Program(compiled("none", 1)).whole.gathers == Program(compiled("none", None)).whole.gathers
    )


def test_bytes_of_arrays():
    assert size("(bf16[2,3]{1,0}, f32[4])") == 12 + 16
    assert elements("(bf16[2,3]{1,0}, f32[4])") == 6
