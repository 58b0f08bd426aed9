"""The ring that kernels are written against: peers, signals, and the interpreter that plays it."""

import re
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, PartitionSpec as P

from hfjax.pallas_kernels.mosaic import kernel
from hfjax.pallas_kernels.ring.peers import MeshRing, VirtualRing, rank_ahead
from tests.kernels import interpreted_ring, lowered, needs_interpreter  # noqa: F401

CELLS, BLOCKS = 256, 2


def push(ring, x_ref, out_ref):
    """Give my part to the next rank, and wait for the one before to have given me its own."""
    part = part_of_block()
    arrived = ring.semaphores(1)
    ring.peer(out_ref, rank_ahead(ring, 1))[part] = ring.local(x_ref)[part]
    ring.signal(arrived, 0, rank_ahead(ring, 1))
    ring.wait(arrived, 0, BLOCKS)


def pull(ring, x_ref, out_ref):
    """Take the part of the rank before me; then nobody leaves before all have taken theirs."""
    part = part_of_block()
    taken = ring.semaphores(1)
    ring.local(out_ref)[part] = ring.peer(x_ref, rank_ahead(ring, ring.size - 1))[part]
    for rank in range(ring.size):
        ring.signal(taken, 0, jnp.int32(rank))
    ring.wait(taken, 0, ring.size * BLOCKS)


def part_of_block():
    return pl.ds(lax.axis_index("block") * (CELLS // BLOCKS), CELLS // BLOCKS)


def launched(body, ring, x):
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    grid, names = (*ring.ranks, BLOCKS), (*ring.rank_names, "block")
    return kernel(partial(body, ring), out, grid=grid, grid_names=names)(x)


def on_mesh(body, x, mesh, axis):
    """Return what `body` makes of the rows of `x`, one a device along `axis`."""
    ring = MeshRing(axis, mesh.shape[axis])
    rows = P(mesh.axis_names)
    local = partial(launched, body, ring)
    mapped = jax.shard_map(
        lambda x: local(x[0])[None], mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False
    )
    return jax.jit(mapped)(x)


SLOW = pytest.mark.slow


def mesh_of(*sizes):
    names = ("first", "second")[: len(sizes)]
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, names, (AxisType.Auto,) * len(sizes), devices=devices)


def rows(count):
    return jnp.arange(count * CELLS, dtype=jnp.float32).reshape(count, CELLS)


@pytest.mark.parametrize("body", [push, pull])
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=SLOW), 3, pytest.param(8, marks=SLOW)])
def test_each_rank_gets_what_the_one_before_it_had(interpreted_ring, body, size):  # noqa: F811
    found = on_mesh(body, rows(size), mesh_of(size), "first")
    np.testing.assert_array_equal(found, jnp.roll(rows(size), 1, axis=0))


@pytest.mark.parametrize(
    ("body", "axis"),
    [(push, 1), (pull, 0), pytest.param(push, 0, marks=SLOW), pytest.param(pull, 1, marks=SLOW)],
)
def test_a_ring_is_any_axis_of_a_larger_mesh(interpreted_ring, body, axis):  # noqa: F811
    x = rows(8).reshape(2, 4, CELLS)
    found = on_mesh(body, rows(8), mesh_of(2, 4), ("first", "second")[axis])
    np.testing.assert_array_equal(found.reshape(x.shape), jnp.roll(x, 1, axis=axis))


@pytest.mark.parametrize("body", [push, pull])
def test_a_virtual_ring_is_the_same_on_one_device(interpreted_ring, body):  # noqa: F811
    found = launched(body, VirtualRing(3), rows(3))
    np.testing.assert_array_equal(found, jnp.roll(rows(3), 1, axis=0))


def test_bodies_on_both_rings_lower_for_cuda():
    for body in (push, pull):
        lowered(partial(on_mesh, body, mesh=mesh_of(8), axis="first"), rows(8))
        lowered(partial(launched, body, VirtualRing(3)), rows(3))


PLANTED = """
from functools import partial
from unittest import mock
import jax
import pytest
import tests.test_ring as t
from jax.experimental.pallas import mosaic_gpu as plgpu
from hfjax.pallas_kernels import mosaic
from hfjax.pallas_kernels.ring.peers import MeshRing, rank_ahead
from tests import interpreter

interpreter.install(pytest.MonkeyPatch(), patience=5)
mosaic.interpreter = plgpu.InterpretGPUParams(detect_races=True)
jax.block_until_ready(t.on_mesh({body}, t.rows(2), t.mesh_of(2), "first"))
"""

NO_WAIT = """
def body(ring, x_ref, out_ref):
    with mock.patch.object(MeshRing, "wait", lambda *_: None):
        t.push(ring, x_ref, out_ref)
        out_ref[t.part_of_block()] = out_ref[t.part_of_block()] + 0
"""
EARLY_READ = """
def body(ring, x_ref, out_ref):
    arrived, part = ring.semaphores(1), t.part_of_block()
    ring.peer(out_ref, rank_ahead(ring, 1))[part] = x_ref[part]
    ring.signal(arrived, 0, rank_ahead(ring, 1))
    out_ref[part] = out_ref[part] + 0
    ring.wait(arrived, 0, t.BLOCKS)
"""
LOST_SIGNAL = """
def body(ring, x_ref, out_ref):
    with mock.patch.object(MeshRing, "signal", lambda *_: None):
        t.push(ring, x_ref, out_ref)
"""
# A signal that its rank does not wait for: it may come after the rank's kernel has ended.
LATE_SIGNAL = """
def body(ring, x_ref, out_ref):
    t.push(ring, x_ref, out_ref)
    ring.signal(ring.semaphores(1), 0, rank_ahead(ring, 1))
"""


def planted(body):
    """Return what a program says that runs `body` on two interpreted devices and should fail."""
    program = "import conftest\n" + PLANTED.replace("jax.block", f"{body}\njax.block")
    program = program.format(body="body")
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True)
    assert found.returncode != 0, "the planted bug was not seen"
    return (found.stdout + found.stderr).decode()


@needs_interpreter
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (NO_WAIT, "RACE DETECTED"),
        (EARLY_READ, "RACE DETECTED"),
        (LOST_SIGNAL, "DEADLOCK"),
        (LATE_SIGNAL, "UNAWAITED SIGNAL|LATE SIGNAL"),
    ],
    ids=["no wait", "early read", "lost signal", "late signal"],
)
def test_the_interpreter_sees_a_planted_bug(body, said):
    assert re.search(said, planted(body)), said
