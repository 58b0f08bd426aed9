"""Block-scaled quantisation: what 8 bits keep, what they lose, and what they must not hide."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from hfjax.pallas_kernels.compressed import quantize as room
from hfjax.pallas_kernels.compressed.quantize import (
    Tuning,
    compress,
    dequantize,
    quantize,
    reference as eager_reference,
)
from tests.h200 import h200s
from tests.kernels import assert_fits, figures, gaussian, interpreted, lowered  # noqa: F401

HOW = ("int8", "fp8")
SMALL = Tuning(tile=8, stages=2, blocks=2)

# One program each, in place of one for each operation.
reference = jax.jit(eager_reference, static_argnums=(1, 2))
reference_compress = jax.jit(room.reference_compress, static_argnums=2)
back = jax.jit(dequantize, static_argnums=2)


def round_trip(x, how, block=256):
    return np.asarray(back(*reference(x, how, block), block))


def test_half_a_step_of_the_block_is_the_most_that_int8_loses():
    x = gaussian(0, (3, 1000)) * jnp.array([[1e-6], [1.0], [1e6]])
    values, scales = reference(x, "int8")
    assert values.dtype == jnp.int8
    assert values.shape == x.shape
    assert scales.shape == (3, 4)
    step = jnp.repeat(scales, 256, axis=1)[:, :1000]
    assert (jnp.abs(round_trip(x, "int8") - x) <= 0.5001 * step).all()


def test_a_sixteenth_of_a_value_is_the_most_that_fp8_loses_unless_it_is_tiny():
    x = gaussian(0, (3, 1000)) * jnp.array([[1e-6], [1.0], [1e6]])
    values, scales = reference(x, "fp8")
    assert values.dtype == jnp.float8_e4m3fn
    least = jnp.repeat(scales, 256, axis=1)[:, :1000] * 2.0**-9  # the smallest code above zero
    assert (jnp.abs(round_trip(x, "fp8") - x) <= jnp.abs(x) / 16 * 1.001 + least / 2).all()


def test_ties_go_to_the_even_code():
    x = jnp.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5])
    assert reference(x, "int8")[0].tolist() == [127, 0, 2, 2, 0, -2, -126]


@pytest.mark.parametrize("how", HOW)
def test_largest_codes_are_symmetric_and_zeros_stay_zero(how):
    x = jnp.concatenate([jnp.zeros(256), jnp.full(256, -3.0), jnp.full(256, 1e-38)])
    values, scales = reference(x, how)
    largest = room.CODES[how].largest
    np.testing.assert_array_equal(values.astype(jnp.float32)[256:512], -largest)
    np.testing.assert_allclose(round_trip(x, how), x, rtol=1e-6, atol=1e-37)
    assert np.isfinite(scales).all()


def broken(bad):
    x = gaussian(1, (16, 256))
    return x.at[3, 7].set(bad)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_block_with_a_broken_value_comes_back_broken_as_a_whole(how, bad):
    finite = np.isfinite(round_trip(broken(bad), how))
    assert not finite[3].any()
    assert finite[np.arange(16) != 3].all()


@pytest.mark.parametrize("how", HOW)
def test_value_and_what_was_lost_are_what_was_meant(how):
    x, error = gaussian(2, (4, 300)), gaussian(3, (4, 300)) * 0.01
    values, scales, lost = reference_compress(x, error, how)
    assert 0 < np.abs(lost).max() < 0.3
    np.testing.assert_allclose(np.add(back(values, scales), lost), np.add(x, error), atol=1e-6)


def bits(x):
    return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("shape", "block", "dtype"),
    [
        ((19, 512), 256, jnp.float32),  # 38 blocks: the last tile is cut
        ((2, 3, 384), 128, jnp.bfloat16),
        ((1, 256), 256, jnp.float16),
    ],
    ids=str,
)
def test_the_kernel_gives_the_bits_of_the_plain_form(interpreted, how, shape, block, dtype):  # noqa: F811
    x, error = gaussian(4, shape, dtype), gaussian(5, shape) * 0.01
    plain = partial(room.reference_compress, how=how, block=block)
    kernel = partial(compress, how=how, block=block, tuning=SMALL)
    for found, expected in zip(kernel(x, error), plain(x, error), strict=True):
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(bits(found), bits(expected))
    alone = quantize(x, how, block, SMALL)
    for found, expected in zip(alone, eager_reference(x, how, block), strict=True):
        np.testing.assert_array_equal(bits(found), bits(expected))


@pytest.mark.parametrize("how", HOW)
def test_the_kernel_hides_no_broken_value(interpreted, how):  # noqa: F811
    for bad in (np.nan, np.inf):
        values, scales, lost = compress(broken(bad), jnp.zeros((16, 256)), how, tuning=SMALL)
        finite = np.isfinite(dequantize(values, scales))
        assert not finite[3].any()
        assert finite[np.arange(16) != 3].all()
        assert not np.isfinite(lost[3]).any()


@pytest.mark.parametrize(
    ("shape", "dtype", "how", "block", "said"),
    [
        ((8, 256), jnp.float32, "int4", 256, "how='int4': one of 'int8', 'fp8' is needed"),
        ((8, 256), jnp.float32, "int8", 64, r"block=64: one of \(128, 256\) is needed"),
        ((8, 256), jnp.int32, "int8", 256, r"x \(8, 256\) is int32: float32, .* Cast it"),
        ((256, 8), jnp.float32, "fp8", 256, r"x \(256, 8\): the last dimension must be a multiple"),
    ],
    ids=["how", "block", "dtype", "shape"],
)
def test_refusals_say_what_is_allowed(shape, dtype, how, block, said):
    with pytest.raises(ValueError, match=said):
        quantize(jnp.zeros(shape, dtype), how, block)
    assert room.refuses(jnp.zeros((8, 256)), "int8") is None


def test_the_error_is_float32_and_has_the_shape_of_x():
    with pytest.raises(ValueError, match=r"error \(8,\) float32: float32 \(8, 256\) is needed"):
        compress(jnp.zeros((8, 256)), jnp.zeros(8), "int8")


def test_the_kernels_lower_for_cuda():
    for how in HOW:
        for dtype in (jnp.float32, jnp.bfloat16):
            x, error = jnp.zeros((100, 512), dtype), jnp.zeros((100, 512))
            lowered(partial(compress, how=how), x, error)
            lowered(partial(quantize, how=how, block=128), x)


@pytest.mark.cuda
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("block", room.BLOCKS)
def test_the_kernels_fit_an_h200(capfd, how, block):
    place = NamedSharding(Mesh(np.array(h200s(1)), ("one",)), P())
    error = jax.ShapeDtypeStruct((8192, 1024), jnp.float32, sharding=place)
    for dtype in (jnp.float32, jnp.bfloat16):
        x = jax.ShapeDtypeStruct((8192, 1024), dtype, sharding=place)
        assert_fits(figures(capfd, partial(compress, how=how, block=block), x, error))
        assert_fits(figures(capfd, partial(quantize, how=how, block=block), x))


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU is here")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("shape", [(3, 256), (50257, 768), (4096, 4096)], ids=str)
def test_on_a_gpu_it_equals_the_plain_form(how, shape):
    x, error = gaussian(6, shape), gaussian(7, shape) * 0.01
    plain: Any = jax.jit(partial(room.reference_compress, how=how))(x, error)
    found: Any = jax.jit(partial(compress, how=how))(x, error)
    np.testing.assert_allclose(found[1], plain[1], rtol=1e-6)
    differ = np.mean(bits(found[0]) != bits(plain[0]))
    assert differ < 1e-4, "more than ties went another way"
    whole = dequantize(*found[:2]) + found[2]
    np.testing.assert_allclose(whole, x + error, atol=1e-5)
