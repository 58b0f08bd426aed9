"""The model of how long products take by which schedules are compared."""

from dataclasses import replace

import pytest

from hfjax.analysis.matmul_time import ProductModel, matmul_seconds
from hfjax.analysis.overlap import Matmul
from hfjax.hardware.machine import H200


def product(m, n, k, batch=1, size=0):
    return Matmul(batch, m, n, k, size)


BARE = ProductModel(H200.scheduled_flops, H200.bandwidth, H200.sms, 0.0, H200.tile)
FLOPS, MEMORY, SMS = 500e12, 4_800_000_000_000, 132
WAVE = 2 * 128 * 256 * SMS / FLOPS  # seconds of a wave of tiles with an inner dimension of 1


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (product(128 * SMS, 256, 64), 64 * WAVE),  # one wave, as fast as the GPU is
        (product(256, 128 * SMS, 64), 64 * WAVE),  # tiles lie as they fit
        (product(128, 256, 64, batch=2 * SMS), 2 * 64 * WAVE),
        (product(128 * SMS, 256, 64, size=MEMORY), 1.0),  # a second for all that passes memory
        # One tile, in 16 parts: a wave of a sixteenth, and 16 partial sums, written and read.
        (product(128, 256, 1 << 20), (1 << 16) * WAVE + 2 * 4 * 16 * 128 * 256 / MEMORY),
    ],
    ids=["one wave", "turned", "two waves", "memory", "split"],
)
def test_seconds_of_a_product(p, expected):
    assert matmul_seconds(p, BARE) == pytest.approx(expected)
    assert matmul_seconds(p, replace(BARE, start_up=3e-6)) == pytest.approx(expected + 3e-6)


def test_a_tile_too_many_costs_a_whole_wave_unless_the_inner_dimension_is_long():
    p = product(128 * (SMS + 1), 256, 64)
    assert matmul_seconds(p, BARE) == pytest.approx(2 * 64 * WAVE)
    # In 16 parts 133 tiles are 17 waves of a sixteenth.
    long, sums = 1 << 20, 2 * 4 * 16 * 128 * (SMS + 1) * 256 / MEMORY
    p = product(128 * (SMS + 1), 256, long)
    assert matmul_seconds(p, BARE) == pytest.approx(17 / 16 * long * WAVE + sums)
