"""all_gather_matmul and matmul_reduce_scatter: kernel, plain JAX and the plain product agree."""

import re
import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from hfjax.pallas_kernels.ring import all_gather_matmul, matmul_reduce_scatter
from hfjax.pallas_kernels.ring.gather import gather_matmul
from hfjax.pallas_kernels.ring.peers import VirtualRing
from hfjax.pallas_kernels.ring.scatter import matmul_scatter
from hfjax.pallas_kernels.ring.tiles import Tuning
from tests.h200 import h200s
from tests.kernels import (  # noqa: F401
    assert_fits,
    figures,
    gaussian,
    interpreted_ring,
    lowered,
    needs_interpreter,
    relative,
)

SMALL = Tuning(columns=128, stages=2, band=2, blocks=2)
SMALLER = replace(SMALL, blocks=1)  # as many warpgroups of 8 devices as can be interpreted
KERNELS = {
    "gather": all_gather_matmul.all_gather_matmul,
    "scatter": matmul_reduce_scatter.matmul_reduce_scatter,
}
KINDS = {"gather": all_gather_matmul, "scatter": matmul_reduce_scatter}


def mesh_of(*sizes, devices=None):
    names = ("tensor",) if len(sizes) == 1 else ("other", "tensor")
    devices = devices or jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, names, (AxisType.Auto,) * len(sizes), devices=devices)


def specs(kind, axis):
    """Return where x, w and the product lie."""
    if kind == "gather":
        return P(axis), P(None, axis), P(None, axis)
    return P(None, axis), P(axis), P(axis)


def mapped(function, kind, mesh, axis="tensor", **options):
    """Return `function` on global x [R, K] and w [K, N] split over `axis` of the mesh."""
    *operands, out = specs(kind, axis)
    local = partial(function, axis=axis)
    return jax.shard_map(local, mesh=mesh, in_specs=tuple(operands), out_specs=out, **options)


def operands(shape, dtype):
    rows, depth, columns = shape
    return gaussian(0, (rows, depth), dtype), gaussian(1, (depth, columns), dtype) / depth**0.5


def exact(x, w):
    return np.asarray(x, np.float64) @ np.asarray(w, np.float64)


def exact_gradients(x, w, dy):
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    return dy @ w.T, x.T @ dy


def gradients(function, x, w, dy):
    return jax.jit(lambda x, w, dy: jax.vjp(function, x, w)[1](dy))(x, w, dy)


@pytest.mark.parametrize(("size", "checked"), [(1, True), (2, False), (3, True), (8, True)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.short("gather-1-True", "scatter-8-True")
def test_the_reference_is_the_product_with_its_gradients(kind, size, checked):
    x, w = operands((6 * size, 5 * size, 7 * size), jnp.float32)
    f = mapped(KINDS[kind].reference, kind, mesh_of(size), check_vma=checked)
    with jax.default_matmul_precision("highest"):
        assert relative(jax.jit(f)(x, w), exact(x, w)) < 1e-5
        dy = gaussian(2, (6 * size, 7 * size))
        for found, expected in zip(gradients(f, x, w, dy), exact_gradients(x, w, dy), strict=True):
            assert relative(found, expected) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_another_axis_shares_get_its_summed_gradient(kind):
    mesh, (x, w) = mesh_of(2, 4), operands((16, 32, 24), jnp.float32)
    x_spec, w_spec, out_spec = specs(kind, "tensor")
    stacked = P("other", *x_spec), w_spec, P("other", *out_spec)
    f = jax.shard_map(
        lambda x, w: KINDS[kind].reference(x[0], w, "tensor")[None],
        mesh=mesh,
        in_specs=stacked[:2],
        out_specs=stacked[2],
    )
    two, dy = jnp.stack([x, 2 * x]), gaussian(2, (2, 16, 24))
    with jax.default_matmul_precision("highest"):
        _, dw = gradients(f, two, w, dy)
    expected = sum(exact_gradients(two[i], w, dy[i])[1] for i in range(2))
    assert relative(dw, expected) < 1e-5


# ranks, rows and the share of the axis that is split, of one rank: beyond and below a tile's size
RINGS = [
    (1, 136, 208),
    (2, 136, 80),
    pytest.param(3, 72, 144, marks=pytest.mark.slow),
    pytest.param(4, 8, 48, marks=pytest.mark.slow),
    (8, 8, 16),
]


def global_shape(kind, size, rows, split):
    if kind == "gather":
        return size * rows, 80, size * split
    return size * rows, size * split, 144


def on_mesh(function, kind, mesh, axis="tensor"):
    tuning = SMALL if mesh.size < 8 else SMALLER
    return mapped(partial(function, tuning=tuning), kind, mesh, axis, check_vma=False)


@pytest.mark.parametrize(("size", "rows", "split"), RINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_is_the_product_on_any_ring(interpreted_ring, kind, size, rows, split):  # noqa: F811
    x, w = operands(global_shape(kind, size, rows, split), jnp.bfloat16)
    found = jax.jit(on_mesh(KERNELS[kind], kind, mesh_of(size)))(x, w)
    assert relative(found, exact(x, w)) < 4e-3


MESHED = [
    ("gather", "other"),
    ("scatter", "tensor"),
    pytest.param("gather", "tensor", marks=pytest.mark.slow),
    pytest.param("scatter", "other", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "axis"), MESHED)
def test_the_ring_is_any_axis_of_a_larger_mesh(interpreted_ring, kind, axis):  # noqa: F811
    mesh = mesh_of(2, 4)
    x, w = operands(global_shape(kind, mesh.shape[axis], 16, 32), jnp.float16)
    found = jax.jit(on_mesh(KERNELS[kind], kind, mesh, axis))(x, w)
    assert relative(found, exact(x, w)) < 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_the_kernel_are_those_of_the_product(interpreted_ring, kind):  # noqa: F811
    x, w = operands(global_shape(kind, 2, 16, 48), jnp.bfloat16)
    f = on_mesh(KERNELS[kind], kind, mesh_of(2))
    dy = gaussian(2, (x.shape[0], w.shape[1]), jnp.bfloat16)
    for found, expected in zip(gradients(f, x, w, dy), exact_gradients(x, w, dy), strict=True):
        assert relative(found, expected) < 1e-2


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_virtual_ranks_compute_what_ranks_of_a_mesh_do(interpreted_ring, size):  # noqa: F811
    x, w = gaussian(0, (size, 16, 80), jnp.bfloat16), gaussian(1, (size, 80, 144), jnp.bfloat16)
    found = gather_matmul(VirtualRing(size), x, w, SMALL).reshape(size, size * 16, 144)
    meshed = on_mesh(KERNELS["gather"], "gather", mesh_of(size))
    expected = jax.jit(meshed)(x.reshape(-1, 80), jnp.concatenate(w, 1))
    np.testing.assert_array_equal(jnp.concatenate(found, 1), expected)

    x = gaussian(0, (size, size, 16, 80), jnp.bfloat16)
    found = matmul_scatter(VirtualRing(size), x, w, SMALL).reshape(size * 16, 144)
    meshed = on_mesh(KERNELS["scatter"], "scatter", mesh_of(size))
    expected = jax.jit(meshed)(jnp.concatenate(x.reshape(size, -1, 80), 1), jnp.concatenate(w, 0))
    np.testing.assert_array_equal(found, expected)


PLANTED = """
import conftest
import jax, jax.numpy as jnp, pytest
import tests.test_collective_matmul as t
from jax.experimental.pallas import mosaic_gpu as plgpu
from hfjax.pallas_kernels import mosaic
from hfjax.pallas_kernels.ring import peers
from tests import interpreter

patch = pytest.MonkeyPatch()
interpreter.install(patch, patience=10)
mosaic.interpreter = plgpu.InterpretGPUParams(detect_races=True)
{bug}
x, w = t.operands(t.global_shape("{kind}", 2, 16, 144), jnp.bfloat16)
jax.block_until_ready(jax.jit(t.on_mesh(t.KERNELS["{kind}"], "{kind}", t.mesh_of(2)))(x, w))
"""
NO_WAIT = 'patch.setattr(peers.MeshRing, "wait", lambda *_: None)'
LOST_SIGNAL = 'patch.setattr(peers.MeshRing, "signal", lambda *_: None)'
TOLD_TOO_EARLY = """
wait = plgpu.wait_smem_to_gmem
patch.setattr(plgpu, "wait_smem_to_gmem", lambda n, wait_read_only: wait(n, wait_read_only=True))
"""
FREED_TOO_EARLY = """
from hfjax.pallas_kernels.ring.tiles import Stages
patch.setattr(Stages, "claim", lambda stages, number: stages.slot(number))
"""


RACE = "RACE DETECTED"
BARRIER = "Barrier completed phase"  # where threads are late, it is seen there first


@needs_interpreter
@pytest.mark.parametrize(
    ("kind", "bug", "said"),
    [
        ("gather", NO_WAIT, RACE),
        ("scatter", TOLD_TOO_EARLY, RACE),
        ("gather", FREED_TOO_EARLY, RACE),
        pytest.param("scatter", NO_WAIT, RACE, marks=pytest.mark.slow),
        pytest.param("gather", TOLD_TOO_EARLY, RACE, marks=pytest.mark.slow),
        pytest.param("gather", LOST_SIGNAL, "DEADLOCK", marks=pytest.mark.slow),
        pytest.param("scatter", LOST_SIGNAL, "DEADLOCK", marks=pytest.mark.slow),
    ],
)
def test_a_bug_planted_in_a_kernel_is_seen(kind, bug, said):
    program = PLANTED.format(kind=kind, bug=bug)
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True)
    assert found.returncode != 0, "the planted bug was not seen"
    told = (found.stdout + found.stderr).decode()
    assert said in told or (said == RACE and BARRIER in told)


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.short("scatter-True")
def test_kernels_and_their_gradients_lower_for_cuda(kind, checked):
    x, w = operands((8 * 128, 8 * 128, 8 * 128), jnp.bfloat16)
    f = mapped(KERNELS[kind], kind, mesh_of(8), check_vma=checked)
    lowered(lambda x, w, dy: jax.vjp(f, x, w)[1](dy), x, w, x @ w)
    virtual = {"gather": gather_matmul, "scatter": matmul_scatter}[kind]
    x = gaussian(0, {"gather": (4, 128, 64), "scatter": (4, 4, 128, 64)}[kind], jnp.bfloat16)
    tuning = Tuning(blocks=33)
    lowered(lambda x, w: virtual(VirtualRing(4), x, w, tuning), x, w.reshape(4, 64, -1)[..., :256])


REFUSED = {
    "K": ((16, 24), (24, 32), jnp.bfloat16, "multiples of 16"),
    "rows": ((12, 32), (32, 32), jnp.bfloat16, "multiple of 8"),
    "float32": ((16, 32), (32, 32), jnp.float32, "bfloat16 or both float16"),
    "shapes": ((16, 32), (16, 32), jnp.float16, r"w is \[K, columns\]"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_says_why_it_refuses(kind, case):
    x, w, dtype, why = REFUSED[case]
    x, w = jax.ShapeDtypeStruct(x, dtype), jax.ShapeDtypeStruct(w, dtype)
    assert re.search(why, KINDS[kind].refuses(x, w, 1))


def test_rows_that_ranks_cannot_share_are_refused():
    x, w = operands((20, 48, 32), jnp.bfloat16)
    for function in (KERNELS["scatter"], matmul_reduce_scatter.reference):
        with pytest.raises(ValueError, match="3 ranks share its 20 rows evenly"):
            jax.eval_shape(mapped(function, "scatter", mesh_of(3)), x, w)


def test_a_tuning_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="columns are 128 or 256, stages 2 or more"):
        Tuning(columns=64)


# GPUs of the mesh, its axis, and one rank's rows, K and N
COMPILED = [
    ((1,), "tensor", (8192, 8192, 8192)),
    ((8,), "tensor", (1024, 8192, 1024)),
    ((2, 4), "other", (1000, 1008, 1040)),
]


@pytest.mark.cuda
@pytest.mark.parametrize(("sizes", "axis", "shape"), COMPILED)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_fit_a_hopper(capfd, kind, sizes, axis, shape):
    mesh = mesh_of(*sizes, devices=h200s(int(np.prod(sizes))))
    size, (rows, depth, columns) = mesh.shape[axis], shape
    if kind == "gather":
        shapes = (size * rows, depth), (depth, size * columns)
    else:
        shapes = (size * rows, size * depth), (size * depth, columns)
    placed = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs(kind, axis), strict=False)
    ]
    with capfd.disabled():
        print(f"\n{kind} {sizes} {shape}:")
    found = figures(capfd, mapped(KERNELS[kind], kind, mesh, axis), *placed)
    with capfd.disabled():
        assert_fits(found)


# -- on a GPU -------------------------------------------------------------------------------

on_a_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU is here")
REALISTIC = [(8192, 8192, 8192), (1000, 1008, 1040), (4096, 768, 3072)]


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("shape", REALISTIC, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_a_ring_of_one_is_the_product(kind, shape):
    x, w = operands(shape, jnp.bfloat16)
    found = jax.jit(mapped(KERNELS[kind], kind, mesh_of(1)))(x, w)
    expected = jnp.matmul(x, w, preferred_element_type=jnp.float32)
    assert relative(found, expected) < 4e-3


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("shape", [(1024, 1024, 1024), (1000, 1008, 1040), (8, 64, 256)], ids=str)
def test_on_a_gpu_virtual_ranks_gather_and_scatter(size, shape):
    rows, depth, columns = shape
    tuning = Tuning(blocks=132 // size)
    w = gaussian(1, (size, depth, columns), jnp.bfloat16) / depth**0.5
    for seed in range(3):  # in another order of events each time
        x = gaussian(seed, (size, rows, depth), jnp.bfloat16)
        found = gather_matmul(VirtualRing(size), x, w, tuning)
        expected = jnp.einsum("smk,rkn->rsmn", x, w, preferred_element_type=jnp.float32)
        assert relative(found, expected) < 4e-3
        x = gaussian(seed, (size, size, rows, depth), jnp.bfloat16)
        found = matmul_scatter(VirtualRing(size), x, w, tuning)
        expected = jnp.einsum("rsmk,rkn->smn", x, w, preferred_element_type=jnp.float32)
        assert relative(found, expected) < 6e-3
