"""`best_grid`: the general formula is what a program sends, and its table is what it says."""

from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

import hfjax
from hfjax.models.gpt import GPT, GPTConfig
from hfjax.models.llama import Llama, LlamaConfig
from hfjax.parallel.extensions.tensor_grid.costs import grid_comm_volume, summa_comm_volume
from hfjax.parallel.strategy import DDP

LLAMA_70B = LlamaConfig.preset("llama3-70b")
GPT_175B = GPTConfig.preset("gpt3-175b")
MiB = 2**20


@dataclass(frozen=True)
class Layer:
    linear_maps: dict
    heads: int


def of_12_h_squared(h, heads=64):
    """The layer that papers count: h -> 3h, h -> h, h -> 4h, 4h -> h."""
    maps = {"qkv": (h, 3 * h), "out": (h, h), "up": (h, 4 * h), "down": (4 * h, h)}
    return Layer(maps, heads)


# --- the formula and a program --------------------------------------------------------------------

AXES = ("i", "r", "c")
SIDES = [(1, 1, 4), (4, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2), (1, 2, 4), (3, 2, 1), (2, 3, 1)]
LARGE = [(4, 2, 2), (3, 3, 3), (4, 4, 4), (2, 4, 8)]


def linear(x, w, gathered, scattered):
    """A map whose input features lie over `scattered` and whose output features over `gathered`."""
    whole = lax.all_gather(w, "i", axis=0, tiled=True)
    partial = lax.all_gather(x, gathered, axis=0, tiled=True) @ whole
    return lax.psum_scatter(partial, scattered, scatter_dimension=0, tiled=True)


@pytest.mark.parametrize("sides", SIDES + LARGE)
def test_two_maps_on_a_grid_send_what_the_formula_says(sides):
    """Of weights twice: here the gathered ones are kept."""
    maps, tokens = {"up": (144, 288), "down": (288, 144)}, 576
    mesh = AbstractMesh(sides, AXES, axis_types=(AxisType.Auto,) * 3)

    def layer(x, up, down):
        return linear(linear(x, up, "c", "r"), down, "r", "c")

    blocks = P(("i", "c"), "r"), P(("r", "i"), "c"), P(("c", "i"), "r")
    options = {"in_specs": blocks, "out_specs": blocks[0], "check_vma": False}
    mapped = jax.shard_map(layer, mesh=mesh, **options)
    shapes = [(tokens, 144), *maps.values()]
    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]

    def run(*arrays):
        outputs, backward = jax.vjp(mapped, *arrays)
        return outputs, backward(outputs)

    found = hfjax.collectives(jax.jit(run).trace(*arrays).lower(lowering_platforms=("cpu",)))
    wanted = grid_comm_volume(maps, tokens, sides, times=2)
    of_weights = sum(row.moved for row in found if row.axes == ("i",))
    assert (found.moved - of_weights, of_weights) == tuple(4 * n for n in wanted)


@pytest.mark.parametrize(
    ("model", "config"), [(GPT, GPTConfig.tiny()), (Llama, LlamaConfig.tiny())]
)
def test_the_maps_of_a_config_are_the_matrices_of_a_layer_of_its_model(model, config):
    layout = hfjax.layout(
        lambda rngs: model(config, rngs=rngs), hfjax.adamw(1e-3), hfjax.make_mesh(data=8), DDP
    )
    kernels = [
        a for path, a in layout.arrays.items() if path.startswith("layers/") and "kernel" in path
    ]
    found = sorted(prod(array.shape) // config.layers for array in kernels)
    assert found == sorted(k * n for k, n in config.linear_maps.values())


# --- known numbers --------------------------------------------------------------------------------


def mib(found, name):
    """What sends least, though hfjax's Llama may not divide its 8 heads of keys so."""
    return round(min(row.bytes for row in found if row.name == name) / MiB)


NAMES = ("FSDP | TENSOR", "SUMMA (2D)", "cube", "TENSOR")


@pytest.mark.parametrize(
    ("config", "tokens", "sides", "least", "others"),
    [
        (of_12_h_squared(8192), 8192, (2, 4, 8), 328, (456, 798, 408, 1008)),
        (LLAMA_70B, 8192, (2, 4, 8), 342, (470, 808, 430, 1008)),
        (of_12_h_squared(8192), 65536, (8, 2, 4), 1272, (1400, 2856, 1752, 8064)),
        (LLAMA_70B, 65536, (8, 2, 4), 1328, (1432, 2720, 1838, 8064)),
    ],
)
def test_a_layer_of_70_billion_on_64_devices(config, tokens, sides, least, others):
    found = hfjax.best_grid(config, 64, tokens)
    assert (found.least.shape, round(found.least.bytes / MiB)) == (sides, least)
    assert tuple(mib(found, name) for name in NAMES) == others


def test_a_name_stands_for_the_least_that_can_be():
    found = hfjax.best_grid(LLAMA_70B, 64, 8192)
    flat = found.named("FSDP | TENSOR")
    assert (flat.shape, round(flat.bytes / MiB)) == ((8, 1, 8), 648)
    assert found.named("TENSOR").refusal == "8 heads do not divide by 64"


@pytest.mark.parametrize(
    ("config", "tokens", "rows", "flat"),
    [(LLAMA_70B, 8192, 156, 258), (LLAMA_70B, 65536, 613, 767), (GPT_175B, 8192, 256, 470)],
)
def test_on_256_devices_rows_pay_more(config, tokens, rows, flat):
    found = hfjax.best_grid(config, 256, tokens)
    assert (mib(found, "FSDP | GRID"), mib(found, "FSDP | TENSOR")) == (rows, flat)


def test_with_many_tokens_a_device_rows_do_not_pay():
    for config in (of_12_h_squared(8192), LLAMA_70B):
        assert hfjax.best_grid(config, 64, 2**19).least.shape == (32, 1, 2)


def test_weights_that_are_kept_are_gathered_once():
    kept = hfjax.best_grid(LLAMA_70B, 64, 8192, reshard_after_forward=False)
    assert "gathered once and kept" in str(kept)
    fsdp, again = kept.named("FSDP"), hfjax.best_grid(LLAMA_70B, 64, 8192).named("FSDP")
    assert 3 * fsdp.bytes == 2 * again.bytes


@pytest.mark.parametrize("side", [2, 3, 4, 8, 16])
def test_fsdp_beside_tensor_on_the_same_square_always_sends_less_than_summa(side):
    """As much of the weights, and of the activations less than half."""
    for config in (of_12_h_squared(768), LLAMA_70B, GPT_175B):
        flat = grid_comm_volume(config.linear_maps, 4096, (side, 1, side))
        square = summa_comm_volume(config.linear_maps, 4096, side)
        assert flat[1] == square[1]
        assert flat[0] < square[0] / 2


@pytest.mark.parametrize("devices", [4, 8, 16, 36, 64, 256])
def test_neither_summa_nor_tesseract_is_the_least(devices):
    widths = of_12_h_squared(2304, heads=2304), of_12_h_squared(36864, heads=36864)
    for config in (*widths, *([LLAMA_70B, GPT_175B] if devices != 36 else [])):
        for tokens in (devices, 4 * devices, 64 * devices, 1024 * devices, 2**14 * devices):
            least = min(hfjax.best_grid(config, devices, tokens), key=lambda row: row.bytes)
            assert not least.name.startswith(("SUMMA", "Tesseract")), (devices, tokens)


# --- the table ------------------------------------------------------------------------------------


TABLE = """
8 devices, 64 tokens: bytes that each sends for one layer, forward and backward (sides: fsdp x \
row x tensor; weights gathered twice)
                  sides      activations    weights       both  longest row
GRID              1 x 2 x 4     93.0 KiB        0 B   93.0 KiB           32  least
TENSOR            1 x 1 x 8    112.0 KiB        0 B  112.0 KiB           64  \
4 heads do not divide by 8
GRID              1 x 4 x 2    151.0 KiB        0 B  151.0 KiB           16
FSDP | TENSOR     2 x 1 x 4     48.0 KiB  135.0 KiB  183.0 KiB           32
cube              2 x 2 x 2     61.0 KiB  135.0 KiB  196.0 KiB           16
FSDP | GRID       2 x 4 x 1    135.0 KiB  135.0 KiB  270.0 KiB            8  \\
a grid of rows needs tensor > 1 too
GRID              1 x 8 x 1    315.0 KiB        0 B  315.0 KiB            8  \\
a grid of rows needs tensor > 1 too
Tesseract (2.5D)  2 x 2 x 2     34.5 KiB  360.0 KiB  394.5 KiB           16
FSDP | TENSOR     4 x 1 x 2     16.0 KiB  405.0 KiB  421.0 KiB           16
FSDP | GRID       4 x 2 x 1     45.0 KiB  405.0 KiB  450.0 KiB            8  \\
a grid of rows needs tensor > 1 too
FSDP              8 x 1 x 1          0 B  945.0 KiB  945.0 KiB            8
"""


def test_the_table_has_all_sides_and_says_what_cannot_be():
    assert str(hfjax.best_grid(LlamaConfig.tiny(), 8, 64)) == TABLE.strip().replace("\\\n", "")


@pytest.mark.parametrize(
    ("tokens", "sides", "why"),
    [
        (64, (1, 1, 8), "4 heads do not divide by 8"),
        (64, (8, 1, 1), "qkv of 100 x 300 does not divide by fsdp=8, and stays whole"),
        (64, (1, 8, 1), "a grid of rows needs tensor > 1 too"),
        (12, (2, 1, 4), "tokens do not divide by 8"),
    ],
)
def test_a_row_says_what_does_not_divide(tokens, sides, why):
    found = hfjax.best_grid(GPTConfig(embed=100, heads=4), 8, tokens)
    assert {row.shape: row.refusal for row in found}[sides] == why


@pytest.mark.parametrize("devices", [0, -4, 2.0, True, "8"])
def test_devices_and_tokens_are_positive_integers(devices: Any):
    with pytest.raises(ValueError, match=r"devices=.*: a positive integer is expected"):
        hfjax.best_grid(GPTConfig.tiny(), devices, 64)
    with pytest.raises(ValueError, match=r"tokens=.*: a positive integer is expected"):
        hfjax.best_grid(GPTConfig.tiny(), 8, devices)
    with pytest.raises(ValueError, match=r"itemsize=.*: a positive integer is expected"):
        hfjax.best_grid(GPTConfig.tiny(), 8, 64, itemsize=devices)


def test_tokens_that_no_sides_divide_are_refused_with_those_that_would():
    with pytest.raises(ValueError, match=r"63 tokens on 8 devices: no sides .* A multiple of 8"):
        hfjax.best_grid(GPTConfig.tiny(), 8, 63)


def test_devices_that_do_not_divide_a_layer_are_refused_with_what_does_not_divide():
    message = r"5 devices: .* TENSOR of 1 x 1 x 5: 4 heads do not divide by 5\. Take other devices"
    with pytest.raises(ValueError, match=message):
        hfjax.best_grid(GPTConfig.tiny(), 5, 10)


@pytest.mark.parametrize("config", ["llama3-70b", None, {"embed": 8192}])
def test_a_config_that_is_none_is_refused(config: Any):
    with pytest.raises(
        ValueError, match=r"a GPTConfig or LlamaConfig of hfjax\.models is expected"
    ):
        hfjax.best_grid(config, 8, 64)


def test_a_row_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(ValueError, match=r"no row 'GRIDS'\. There are: FSDP, FSDP \| GRID"):
        hfjax.best_grid(GPTConfig.tiny(), 8, 64).named("GRIDS")
