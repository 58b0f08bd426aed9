"""Cross entropy without logits: its kernels interpreted, and both forms as programs for H200s."""

import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from hfjax.pallas_kernels.cross_entropy import loss as forms, tiles
from hfjax.pallas_kernels.cross_entropy.logits import Tuning
from tests.h200 import OPTIMIZED, h200s
from tests.kernels import (  # noqa: F401
    assert_fits,
    figures,
    interpreted,
    interpreted_ring,
    lowered,
    needs_interpreter,
    relative,
)
from tests.test_cross_entropy import Case, assert_equal, mesh_of, sharded, with_gradients

TINY = Tuning(columns=64, stages=2, group=1, blocks=2, num_parts=2, min_columns=8)
BOUNDS = (1e-5, 1e-2, 1e-2)


# -- interpreted ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "tuning"),
    [
        ((133, 150, 64), jnp.bfloat16, TINY),  # ragged rows, columns and tiles
        ((8, 64, 128), jnp.float16, TINY),
        ((140, 520, 64), jnp.bfloat16, replace(TINY, columns=256, stages=4)),  # as on a GPU
        pytest.param((260, 402, 192), jnp.float16, TINY, marks=pytest.mark.slow),
    ],
)
def test_the_kernel_equals_logits_without_races(interpreted, shape, dtype, tuning):  # noqa: F811
    case = Case.of(*shape, vocab=shape[1] - 7, dtype=dtype)
    run = with_gradients(forms.cross_entropy, vocab=case.vocab, tuning=tuning)
    found = jax.jit(run)(*case.operands)
    assert_equal(found, case, *BOUNDS)
    assert [a.dtype for a in found] == [jnp.float32, dtype, dtype]


@pytest.mark.parametrize(
    ("sizes", "axis"),
    [
        ({"tensor": 2}, "tensor"),
        pytest.param({"data": 2, "tensor": 2}, "tensor", marks=pytest.mark.slow),
        pytest.param({"data": 2, "tensor": 4}, ("data", "tensor"), marks=pytest.mark.slow),
    ],
)
def test_the_kernel_on_devices_that_split_the_vocabulary(interpreted_ring, sizes, axis):  # noqa: F811
    case = Case.of(16, 128, 64, vocab=60, dtype=jnp.bfloat16)  # the last devices have only padding
    run = sharded(forms.cross_entropy, mesh_of(**sizes), axis, vocab=60, tuning=TINY)
    assert_equal(jax.jit(run)(*case.operands), case, *BOUNDS)


def test_what_nobody_wrote_is_not_a_number(interpreted, monkeypatch):  # noqa: F811
    forgetful = lambda *_: None
    work = tiles._statistics

    def unwritten(*given):
        made = work(*given)
        return tiles.Work(made.start, made.tile, forgetful)

    monkeypatch.setattr(tiles, "_statistics", unwritten)
    case = Case.of(8, 64, 64, dtype=jnp.bfloat16)
    losses = forms.cross_entropy(case.x, case.w, case.labels, tuning=TINY)
    assert np.isnan(losses[np.asarray(case.labels) >= 0]).all()


EARLY = """
import os, conftest
from tests.test_cross_entropy_kernel import *
from hfjax.pallas_kernels.cross_entropy import tile_loop
from tests.kernels import mosaic, plgpu

mosaic.interpreter = plgpu.InterpretGPUParams(detect_races=True)
tile_loop.StageBuffers._wait_read = lambda *_: None
case = Case.of(8, 128, 256, dtype=jnp.bfloat16)
try:
    forms.cross_entropy(case.x, case.w, case.labels, tuning=TINY).block_until_ready()
except Exception as error:
    print(error, flush=True)
os._exit(0)
"""


@needs_interpreter
def test_a_stage_that_is_filled_before_it_was_read_is_caught():
    """The planted bug leaves jax's interpreter in pieces: it runs in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-c", EARLY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "RACE DETECTED" in done.stdout + done.stderr


# -- the program ----------------------------------------------------------------------------------


def largest(jaxpr):
    """Return the elements of the largest array that a program makes, at any depth."""
    sizes = [0]
    for equation in jaxpr.eqns:
        sizes += [int(np.prod(v.aval.shape)) for v in equation.outvars if hasattr(v.aval, "shape")]
        for leaf in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(leaf):
                sizes.append(largest(getattr(leaf, "jaxpr", leaf)))
    return max(sizes)


def _is_jaxpr(x):
    return isinstance(x, Jaxpr) or isinstance(getattr(x, "jaxpr", None), Jaxpr)


def shapes(rows, columns, width, dtype=jnp.bfloat16, place=lambda spec: None):
    make = lambda shape, dtype, spec: jax.ShapeDtypeStruct(shape, dtype, sharding=place(spec))
    return (
        make((rows, width), dtype, P("data")),
        make((columns, width), dtype, P("tensor")),
        make((rows,), jnp.int32, P("data")),
        make((rows,), jnp.float32, P("data")),
    )


@pytest.mark.parametrize("form", [forms.cross_entropy, forms.reference])
def test_no_array_has_the_size_of_the_logits(form):
    rows, columns = 2048, 16384
    traced = jax.jit(with_gradients(form)).trace(*shapes(rows, columns, 64))
    assert largest(traced.jaxpr.jaxpr) <= rows * columns // 8


def test_the_walk_finds_logits_where_they_are():
    plain = lambda x, w, labels, g: jax.nn.logsumexp(x @ w.T, axis=1)
    assert largest(jax.jit(plain).trace(*shapes(512, 4096, 64)).jaxpr.jaxpr) == 512 * 4096


@pytest.mark.parametrize("shape", [(16384, 50304, 768), (1000, 50257, 1024), (8, 256, 64)])
def test_it_lowers_for_cuda(shape):
    text = lowered(with_gradients(forms.cross_entropy), *shapes(*shape))
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == 2


def on_h200s(count):
    """Return (function of a form, x, w, labels, g on H200s that split the vocabulary)."""
    devices = np.array(h200s(count)).reshape(1, count)
    mesh = Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    place = lambda spec: NamedSharding(mesh, spec)
    given = shapes(16384, 50304, 768, place=place)
    return (lambda form: sharded(form, mesh, "tensor", vocab=50257)), given


@pytest.mark.cuda
@pytest.mark.parametrize("count", [1, 8])
def test_the_kernels_fit_h200s(capfd, count):
    on_mesh, given = on_h200s(count)
    found = figures(capfd, on_mesh(forms.cross_entropy), *given)
    assert len(found) == 2
    assert_fits(found)


@pytest.mark.cuda
@pytest.mark.parametrize("form", [forms.cross_entropy, forms.reference])
def test_on_an_h200_it_takes_a_fifth_of_the_memory_of_logits(form):
    on_mesh, given = on_h200s(1)
    compiled = jax.jit(on_mesh(form)).lower(*given).compile(compiler_options=OPTIMIZED)
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 2 * 16384 * 50304 / 5


@pytest.mark.cuda
@pytest.mark.parametrize("form", [forms.cross_entropy, forms.reference])
def test_on_h200s_only_statistics_of_rows_and_dx_cross_the_axis(form):
    on_mesh, given = on_h200s(8)
    compiled = jax.jit(on_mesh(form)).lower(*given).compile(compiler_options=OPTIMIZED)
    reduced = re.findall(r"= \(*(\w+\[[\d,]+\]).* all-reduce(?:-start)?\(", str(compiled.as_text()))
    assert sorted(reduced) == ["bf16[16384,768]", "f32[16384]", "f32[2,16384]"]


# -- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((4096, 50304, 768), jnp.bfloat16),
        ((1003, 50257, 1024), jnp.bfloat16),
        ((2048, 32000, 4096), jnp.float16),
        ((7, 100, 64), jnp.bfloat16),
    ],
)
def test_on_a_gpu_the_kernel_equals_the_reference(shape, dtype):
    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU")
    case = Case.of(*shape, vocab=shape[1] - 7, dtype=dtype)
    wide = (case.x.astype(jnp.float32), case.w.astype(jnp.float32), case.labels, case.g)
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(with_gradients(forms.reference, vocab=case.vocab))(*wide)
    run = jax.jit(with_gradients(forms.cross_entropy, vocab=case.vocab))
    for a, b, bound in zip(run(*case.operands), expected, (1e-4, 1e-2, 1e-2), strict=True):
        assert relative(a, b) < bound
    again = zip(run(*case.operands), run(*case.operands), strict=True)
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in again)
