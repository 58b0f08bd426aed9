"""SUMMA and Tesseract equal one device, with gradients, and send what their formula says."""

import json
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

from baselines.links import links
from baselines.summa import summa_linear
from baselines.tesseract import tesseract_linear
from hfjax.parallel.extensions.tensor_grid.costs import summa_comm_volume
from tests.workers import finished, start

AXES = ("depth", "row", "column")
BLOCKS, WEIGHTS = P(("depth", "row"), "column"), P("row", "column")
T, MAPS = 72, {"up": (12, 36), "down": (36, 12)}
random = np.random.default_rng(0)
X = random.normal(size=(T, 12))
UP, DOWN = random.normal(size=(12, 36)) / 3, random.normal(size=(36, 12)) / 6


def mlp(linear, x, up, down):
    return linear(jax.nn.gelu(linear(x, up)), down)


def one_map(linear, x, up):
    return linear(x, up)


def with_gradients(function):
    """Outputs and the gradients of all arguments, by weights that differ for each output."""

    def run(*arrays):
        outputs, backward = jax.vjp(function, *arrays)
        return outputs, *backward(jnp.sin(outputs))

    return run


def on_devices(function, mesh, weights, gradients):
    """The function of blocks, differentiated on each device, as one of whole arrays."""
    linear = partial(summa_linear, rows="row", columns="column")
    if mesh.shape["depth"] > 1:
        linear = partial(tesseract_linear, rows="row", columns="column", depth="depth")
    of_blocks = partial(function, lambda x, w: linear(x, w))
    specs = (BLOCKS, *[WEIGHTS] * len(weights))
    out = (BLOCKS, *specs) if gradients else BLOCKS
    run = with_gradients(of_blocks) if gradients else of_blocks
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)


def differences(depth, side):
    """Return the greatest difference of each array from one device's."""
    shape, types = (depth, side, side), (AxisType.Auto,) * 3
    mesh = jax.make_mesh(shape, AXES, types, devices=jax.devices()[: prod(shape)])
    found = []
    for function, weights in ((one_map, (UP,)), (mlp, (UP, DOWN))):
        there = on_devices(function, mesh, weights, gradients=True)
        here = with_gradients(partial(function, jnp.matmul))
        both = jax.jit(there)(X, *weights), jax.jit(here)(X, *weights)
        found += [float(abs(np.asarray(a) - b).max()) for a, b in zip(*both, strict=True)]
    return found


@pytest.mark.parametrize(
    ("depth", "side"), [pytest.param(1, 2, marks=pytest.mark.slow), (2, 2)]
)  # 1, 3 follows, on nine devices
def test_a_linear_map_and_an_mlp_with_gradients_equal_one_device_in_float64(depth, side):
    with jax.enable_x64(True):
        assert max(differences(depth, side)) < 1e-12


NINE = """
import json, sys, jax
sys.path.insert(0, "examples")
jax.config.update("jax_enable_x64", True)
from tests.test_summa import differences
print(json.dumps(differences(1, 3)))
"""


@pytest.mark.slow
def test_nine_devices_equal_one_in_float64():
    [(status, told, trouble)] = finished(start(NINE, JAX_NUM_CPU_DEVICES="9"))
    assert status == 0, trouble
    found = json.loads(told)
    assert len(found) == 7
    assert max(found) < 1e-12


# --- what each device sends -----------------------------------------------------------------------

SQUARES = [(1, 2), (2, 2), (1, 3), (1, 4), (4, 2), (2, 3)]  # on 4, 8, 9, 16, 16 and 18 devices


def lowered(function, weights, depth, side, gradients):
    mesh = AbstractMesh((depth, side, side), AXES, axis_types=(AxisType.Auto,) * 3)
    run = on_devices(function, mesh, weights, gradients)
    arrays = [jax.ShapeDtypeStruct(x.shape, "float32") for x in (X, *weights)]
    return jax.jit(run).trace(*arrays).lower(lowering_platforms=("cpu",))


@pytest.mark.parametrize(("depth", "side"), SQUARES)
@pytest.mark.parametrize(("function", "weights"), [(one_map, (UP,)), (mlp, (UP, DOWN))])
@pytest.mark.short("one_map-weights0-1-2", "mlp-weights1-2-3")
def test_each_device_sends_what_the_formula_says(function, weights, depth, side):
    maps = dict(list(MAPS.items())[: len(weights)])
    activations = sum(T * k for k, _ in maps.values())
    numbers = sum(k * n for k, n in maps.values())
    part = (side - 1) / side**2
    forward = links(lowered(function, weights, depth, side, gradients=False))
    both = links(lowered(function, weights, depth, side, gradients=True))
    once = 4 * part * (activations / depth + numbers)
    over_layers = 4 * 2 * (depth - 1) / depth * numbers / side**2
    assert sum(summa_comm_volume(maps, T, side, depth)) * 4 == 3 * once + over_layers
    for device in range(depth * side**2):
        assert forward.sent(device) == forward.received(device) == once
        assert both.sent(device) == both.received(device) == 3 * once + over_layers
    hops = 2 * side * (side - 1) * len(maps)
    assert (forward.steps, both.steps) == (hops, 3 * hops + 2 * (depth - 1) * len(maps))


def test_bfloat16_stays_bfloat16():
    mesh = AbstractMesh((2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 3)
    run = on_devices(mlp, mesh, (UP, DOWN), gradients=True)
    arrays = [jax.ShapeDtypeStruct(a.shape, "bfloat16") for a in (X, UP, DOWN)]
    assert {a.dtype for a in jax.eval_shape(run, *arrays)} == {jnp.dtype("bfloat16")}


def test_blocks_that_lie_on_no_square_are_refused():
    mesh = AbstractMesh((1, 2, 4), AXES, axis_types=(AxisType.Auto,) * 3)
    run = on_devices(one_map, mesh, (UP,), gradients=False)
    with pytest.raises(ValueError, match=r"SUMMA on 2 x 4 devices: .* Take 2 x 2 of them"):
        jax.eval_shape(run, X, UP)
