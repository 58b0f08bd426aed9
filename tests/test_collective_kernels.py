"""all_gather and reduce_scatter with the cast fused: kernels and their plain forms."""

import subprocess
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from hfjax.pallas_kernels.collectives import (
    casting as room,
    kernel as collectives_kernel,
    reference as plain,
)
from hfjax.pallas_kernels.ring.peers import VirtualRing
from tests.kernels import (  # noqa: F401
    assert_fits,
    figures,
    gaussian,
    interpreted_ring,
    lowered,
    needs_interpreter,
    relative,
)
from tests.rings import EVERY_DAY, LONG, RINGS, bytes_sent, mapped, mesh_of, on_devices, on_h200s

SMALL = room.Tuning(elements=1024, stages=2, blocks=2)
GATHER, SCATTER = room.make_collectives(SMALL)
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32

# Of 24 columns: 8 elements a row of a tile, 128 rows a tile, so 3 tiles of which the last is cut.
COLUMNS = 24


def rows_for(mesh, axis, each=100, dtype=F32, seed=0):
    """Return rows for every device that the devices of the axis can share."""
    return gaussian(seed, (each * mesh.shape[axis] * mesh.size, COLUMNS), dtype)


def exact_gather(x, axis):
    return lax.all_gather(x, axis, axis=0, tiled=True)


def exact_scatter(x, axis):
    return lax.psum_scatter(x.astype(F32), axis, scatter_dimension=0, tiled=True)


# -- the plain forms ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "axis", "check"),
    [
        *((*ring, True) for ring in RINGS),
        (*RINGS[2], False),
        *(pytest.param(*ring, True, marks=pytest.mark.slow) for ring in LONG),
        *(
            pytest.param(*ring, False, marks=pytest.mark.slow)
            for ring in RINGS + LONG
            if ring != RINGS[2]
        ),
    ],
    ids=str,
)
def test_the_plain_forms_are_the_sum_and_the_whole(sizes, axis, check):
    mesh = mesh_of(*sizes)
    x = rows_for(mesh, axis, 2)
    exact = lambda x: (exact_gather(x, axis), exact_scatter(x, axis))
    exact_whole, exact_shard = jax.device_get(on_devices(exact, mesh, x))
    for wire, bound in ((BF16, 1e-2), (F32, 1e-6)):
        both = lambda x, wire=wire: (
            plain.all_gather(x, axis, wire),
            plain.reduce_scatter(x, axis, wire),
        )
        whole, shard = jax.device_get(on_devices(both, mesh, x, check=check))
        np.testing.assert_array_equal(whole, exact_whole.astype(wire))
        assert shard.dtype == F32
        assert relative(shard, exact_shard) < bound


def test_several_axes_are_one_ring_of_their_product():
    mesh, axes = mesh_of(2, 4), ("first", "second")
    x = gaussian(1, (64 * 8, 3))
    shard = on_devices(lambda x: plain.reduce_scatter(x, axes, F32), mesh, x, check=True)
    np.testing.assert_allclose(shard, x.reshape(8, 64, 3).sum(axis=0), atol=1e-5)
    whole = on_devices(lambda x: plain.all_gather(x, axes, F32), mesh, x, out=P(None))
    np.testing.assert_array_equal(whole, x)


def test_a_device_adds_its_own_rows_unrounded_and_then_the_others_by_rank():
    mesh = mesh_of(3)
    x = gaussian(2, (3, 3, 5, 7))  # rank, owner, rows, columns
    found = on_devices(lambda x: plain.reduce_scatter(x[0], "first"), mesh, x)
    given, found = np.asarray(x), np.asarray(found).reshape(3, 5, 7)
    for owner in range(3):
        total = given[owner, owner]
        for other in [rank for rank in range(3) if rank != owner]:
            total = total + given[other, owner].astype(BF16).astype(F32)
        np.testing.assert_array_equal(found[owner], total)


def test_a_ring_of_one_rounds_nothing_that_it_need_not_send():
    mesh, x = mesh_of(1), gaussian(3, (8, 24))
    np.testing.assert_array_equal(
        on_devices(lambda x: plain.reduce_scatter(x, "first"), mesh, x), x
    )
    pull = jax.grad(
        lambda x: (mapped(lambda x: plain.reduce_scatter(x, "first"), mesh)(x) * x).sum()
    )
    np.testing.assert_array_equal(pull(x), 2 * x)


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("wire", [F32, BF16], ids=["float32", "bfloat16"])
def test_each_is_the_transpose_of_the_other(check, wire):
    mesh = mesh_of(4)
    x, given = gaussian(6, (32, 6)), gaussian(7, (128, 6))
    for f, exact, there, back in (
        (plain.all_gather, exact_gather, x, given),
        (plain.reduce_scatter, exact_scatter, given, x),
    ):
        run = mapped(lambda x, f=f: f(x, "first", wire).astype(F32), mesh, check)
        expected = mapped(lambda x, f=exact: f(x, "first"), mesh, check)
        pulled, wanted = (
            jax.jit(lambda x, y, g=g: jax.vjp(g, x)[1](y)[0])(there, back) for g in (run, expected)
        )
        assert pulled.dtype == there.dtype
        assert relative(pulled, wanted) < (1e-6 if wire == F32 else 1e-2)


def test_cotangents_are_added_in_float32():
    mesh = mesh_of(8)
    ones = jnp.full((64, 4), 1 + 2**-7, BF16)  # eight of these, added in bfloat16, are rounded
    pull = lambda x, y: jax.vjp(mapped(lambda x: plain.all_gather(x, "first"), mesh), x)[1](y)[0]
    found = jax.jit(pull)(jnp.zeros((64, 4)), jnp.concatenate([ones] * 8))
    np.testing.assert_array_equal(found, 8 * (1 + 2**-7))


@pytest.mark.parametrize("wire", [BF16, F16, F32], ids=["bfloat16", "float16", "float32"])
def test_the_plain_forms_send_what_the_docstring_says(wire):
    mesh, size = mesh_of(2, 4), 4
    x = jax.ShapeDtypeStruct((8 * 16, 10), F32)
    n, w = 16 * 10, jnp.dtype(wire).itemsize
    text = lambda f: jax.jit(mapped(lambda x: f(x, "second", wire), mesh)).lower(x).as_text()
    assert bytes_sent(text(plain.all_gather), size) == (size - 1) * n * w
    assert bytes_sent(text(plain.reduce_scatter), size) == (size - 1) * n // size * w


def test_the_plain_forms_refuse_rows_that_cannot_be_shared():
    mesh = mesh_of(4)
    with pytest.raises(ValueError, match=r"x \(3, 2\) over 'first' of size 4: the rows must be"):
        on_devices(lambda x: plain.reduce_scatter(x, "first"), mesh, jnp.zeros((12, 2)))


# -- the kernels, interpreted ---------------------------------------------------------------


def equal_on(sizes, axis, x, wire=BF16):
    mesh = mesh_of(*sizes)
    for kernel, form in ((GATHER, plain.all_gather), (SCATTER, plain.reduce_scatter)):
        found = on_devices(lambda x, f=kernel: f(x, axis, wire), mesh, x)
        expected = on_devices(lambda x, f=form: f(x, axis, wire), mesh, x)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("sizes", "axis"), EVERY_DAY, ids=str)
def test_the_kernels_give_the_bits_of_the_plain_forms(interpreted_ring, sizes, axis):  # noqa: F811
    equal_on(sizes, axis, rows_for(mesh_of(*sizes), axis, each=45))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "axis"), LONG + [ring for ring in RINGS if ring not in EVERY_DAY], ids=str
)
def test_the_kernels_give_the_bits_on_longer_rings(interpreted_ring, sizes, axis):  # noqa: F811
    equal_on(sizes, axis, rows_for(mesh_of(*sizes), axis, each=45))


@pytest.mark.parametrize(
    ("dtype", "wire"), [(BF16, BF16), (F32, F32), (F16, BF16), (F32, F16)], ids=str
)
def test_the_kernels_take_every_dtype(interpreted_ring, dtype, wire):  # noqa: F811
    equal_on((2,), "first", rows_for(mesh_of(2), "first", dtype=dtype, each=1), wire)


def test_gradients_of_the_kernels_are_those_of_the_plain_forms(interpreted_ring):  # noqa: F811
    mesh, x = mesh_of(2), gaussian(10, (8, 16))
    pairs = ((GATHER, plain.all_gather), (SCATTER, plain.reduce_scatter))
    for f, (kernel, form) in zip((2, 0.5), pairs, strict=True):
        given = gaussian(11, (int(8 * f), 16))
        found, expected = (
            jax.jit(
                lambda x, y, g=g: jax.vjp(
                    mapped(lambda x: g(x, "first", BF16).astype(F32), mesh), x
                )[1](y)[0]
            )(x, given)
            for g in (kernel, form)
        )
        np.testing.assert_array_equal(found, expected)


def test_virtual_ranks_on_one_device_give_the_same(interpreted_ring):  # noqa: F811
    ring, x = VirtualRing(3), gaussian(12, (3, 3, 40))
    total = collectives_kernel.scatter(ring, x, F32, SMALL)
    np.testing.assert_allclose(total, x.sum(axis=0), atol=1e-6)
    whole = collectives_kernel.gather(ring, x[:, 0], BF16, SMALL)
    np.testing.assert_array_equal(whole, jnp.stack([x[:, 0].astype(BF16)] * 3))


PLANTED = """
import conftest
from unittest import mock
import jax, pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from hfjax.pallas_kernels import mosaic
from hfjax.pallas_kernels.ring.peers import MeshRing
from tests import interpreter
from tests.kernels import gaussian
from tests.test_collective_kernels import {f}, BF16, mesh_of, on_devices

interpreter.install(pytest.MonkeyPatch(), patience=5)
mosaic.interpreter = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=5)
with mock.patch.object(MeshRing, "{lost}", lambda *_: None):
    jax.block_until_ready(
        on_devices(lambda x: {f}(x, "first", BF16), mesh_of(2), gaussian(0, (8, 64)))
    )
"""


@needs_interpreter
@pytest.mark.parametrize(
    ("f", "lost", "said"),
    [
        ("SCATTER", "wait", b"RACE"),
        ("SCATTER", "signal", b"DEADLOCK"),
        ("GATHER", "wait", b"SIGNAL"),
    ],
)
def test_a_lost_wait_or_signal_is_seen(f, lost, said):
    program = PLANTED.format(f=f, lost=lost)
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True)
    assert run.returncode != 0, "the planted bug was not seen"
    assert said in run.stdout + run.stderr


# -- refusals, lowering, compiling ----------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "shape", "dtype", "axis", "size", "wire", "said"),
    [
        ("all_gather", (8, 8), F32, ("a", "b"), 2, BF16, "one axis is needed"),
        ("all_gather", (8, 8), F32, "a", 16, BF16, "at most 8 GPUs reach each other"),
        ("all_gather", (8, 8), jnp.int32, "a", 2, BF16, "float32, bfloat16 or float16"),
        ("all_gather", (8, 8), F32, "a", 2, jnp.int8, "float32, bfloat16 or float16"),
        ("reduce_scatter", (9, 8), F32, "a", 2, BF16, "the rows must be a multiple of 2"),
        ("reduce_scatter", (8, 3), F32, "a", 4, BF16, "so x one of 32. Pad x"),
        ("all_gather", (9, 3), F32, "a", 2, BF16, "a piece must be a multiple of 8 elements"),
    ],
    ids=str,
)
def test_refusals_say_what_is_allowed(what, shape, dtype, axis, size, wire, said):
    x = jax.ShapeDtypeStruct(shape, dtype)
    reason = room.refuses(what, x, axis, size, wire)
    assert reason
    assert said in reason
    assert str(shape) in reason
    assert room.refuses(what, jax.ShapeDtypeStruct((8, 8), F32), "a", 2) is None


def test_gpus_of_another_process_are_not_reached(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    x = jax.ShapeDtypeStruct((8, 8), F32)
    assert "of their own process" in str(room.refuses("all_gather", x, "a", 2))
    assert room.refuses("all_gather", x, "a", 1) is None


def test_what_is_refused_raises():
    with pytest.raises(ValueError, match="Pad x, or use the reference"):
        on_devices(lambda x: room.all_gather(x, "first"), mesh_of(2), jnp.zeros((2, 3)))


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize(("sizes", "axis"), [((8,), "first"), ((2, 4), "first")], ids=str)
@pytest.mark.short("(2, 4)-first-checked", "(8,)-first-checked")
def test_the_kernels_and_their_gradients_lower_for_cuda(sizes, axis, check):
    mesh = mesh_of(*sizes)
    for f in (room.all_gather, room.reduce_scatter):
        run = mapped(lambda x, f=f: f(x, axis), mesh, check)
        pull = jax.grad(lambda x, run=run: (run(x).astype(F32) ** 2).sum())
        assert lowered(run, jnp.zeros((256, 64))).count("mosaic_gpu") >= 1
        lowered(pull, jnp.zeros((256, 64)))


def test_virtual_ranks_lower_for_cuda():
    for f in (collectives_kernel.gather, collectives_kernel.scatter):
        run = partial(f, VirtualRing(4), wire=BF16, tuning=room.Tuning(blocks=32))
        shape = (4, 1024) if f is collectives_kernel.gather else (4, 4, 1024)
        lowered(run, jnp.zeros(shape))


@pytest.mark.cuda
@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_the_kernels_fit_h200s(capfd, count, dtype):
    mesh, shapes = on_h200s(count, ((8192 * 8, 1024), dtype))
    for wire in (BF16, F32):
        for f in (room.all_gather, room.reduce_scatter):
            run = mapped(partial(f, axis="first", wire=wire), mesh)
            assert_fits(figures(capfd, run, *shapes))


# -- on a GPU -------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU is here")
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("n", [8 * 997, 1 << 22])
def test_on_a_gpu_virtual_ranks_equal_the_plain_sum(size, n):
    ring, tuning = VirtualRing(size), room.Tuning(blocks=16)  # all of them run at once
    x = gaussian(13, (size, size, n))
    total: Any = jax.jit(lambda x: collectives_kernel.scatter(ring, x, BF16, tuning))(x)
    assert relative(total, x.sum(axis=0)) < 1e-2
    again = jax.jit(lambda x: collectives_kernel.scatter(ring, x, BF16, tuning))(x)
    np.testing.assert_array_equal(total, again)
    whole: Any = jax.jit(lambda x: collectives_kernel.gather(ring, x, BF16, tuning))(x[:, 0])
    np.testing.assert_array_equal(whole, jnp.stack([x[:, 0].astype(BF16)] * size))


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU is here")
def test_on_all_gpus_of_a_host_the_kernels_equal_the_plain_forms():
    mesh = mesh_of(jax.device_count())
    x = gaussian(14, (mesh.size * mesh.size * 1024, 768))
    for f, form in (
        (room.all_gather, plain.all_gather),
        (room.reduce_scatter, plain.reduce_scatter),
    ):
        found, expected = (on_devices(lambda x, f=f: f(x, "first"), mesh, x) for f in (f, form))
        np.testing.assert_array_equal(found, expected)
