"""Meshes, and functions run on the rows of their devices, for tests of kernels that send."""

import re

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from tests.h200 import h200s

# The mesh's sizes, and the axis that the ring goes along.
RINGS = [((1,), "first"), ((2,), "first"), ((3,), "first"), ((2, 4), "second"), ((4, 2), "second")]
EVERY_DAY = [
    RINGS[0],
    RINGS[2],
    RINGS[4],
]  # what the interpreter runs: one, a ring, one of two axes
LONG = [((8,), "first"), ((4,), "first"), ((2, 4), "first")]


def mesh_of(*sizes, devices=None):
    names = ("first", "second")[: len(sizes)]
    devices = devices or jax.devices()
    devices = np.array(devices[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(sizes))


def mapped(function, mesh, check=False, out=None):
    """Return `function` of each device's rows; the rows go over all axes of the mesh."""
    rows = P(mesh.axis_names)
    out = rows if out is None else out
    return jax.shard_map(function, mesh=mesh, in_specs=rows, out_specs=out, check_vma=check)


def on_devices(function, mesh, *arrays, check=False, out=None):
    return jax.jit(mapped(function, mesh, check, out))(*arrays)


def on_h200s(count, *shapes):
    """Return a mesh of H200s, and shapes whose rows are shared by its devices."""
    mesh = mesh_of(count, devices=h200s(count))
    place = NamedSharding(mesh, P("first"))
    return mesh, [jax.ShapeDtypeStruct(*shape, sharding=place) for shape in shapes]


SENT = re.compile(r'"stablehlo\.(all_gather|all_to_all)".*?: \(tensor<([0-9x]*)x([a-zA-Z0-9]+)>\)')
SIZES = {"bf16": 2, "f16": 2, "f32": 4, "i8": 1, "ui8": 1}


def bytes_sent(text, size):
    """Return the bytes that a device sends to the others of its ring in a lowered program."""
    assert not re.search(r"stablehlo\.(all_reduce|reduce_scatter|collective_)", text)
    total = 0
    for what, shape, dtype in SENT.findall(text):
        held = int(np.prod([int(n) for n in shape.split("x")])) * SIZES[dtype]
        total += held * (size - 1) if what == "all_gather" else held * (size - 1) // size
    return total
