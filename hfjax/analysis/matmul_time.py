"""How long a matmul takes on a GPU, and fused attention: a model, with the constants of a machine.

A product takes a fixed start-up, and then the time of

- whole waves of tiles, one tile on each multiprocessor, at the GPU's rate when all are busy;
- or, if that is longer, of its operands and its result through memory;
- with its inner dimension in 1, 2, 4, 8 or 16 parts, whichever is fastest: each part is a tile of
  its own, and partial sums in float32 are written and read.
"""

import math
from dataclasses import dataclass

from hfjax.analysis.overlap import Matmul
from hfjax.hardware.machine import Machine

SPLITS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class ProductModel:
    """What the model takes a GPU to be."""

    flops: float  # per second, all multiprocessors busy
    memory: float  # bytes per second
    sms: int
    start_up: float  # seconds, of each product
    tile: tuple[int, int]

    @classmethod
    def reached(cls, machine: Machine, float32: bool = False) -> "ProductModel":
        """Return the model of what the machine reaches, of bfloat16 or float32 products."""
        flops = machine.flops_fp32 if float32 else machine.flops
        return cls(flops, machine.stream, machine.sms, machine.start_up, machine.tile)


def seconds(p: Matmul, on: ProductModel) -> float:
    """Return how long one run of a product takes."""
    return on.start_up + min(_in_parts(p, parts, on) for parts in SPLITS)


def _in_parts(p: Matmul, parts: int, on: ProductModel) -> float:
    """Return how long a product takes whose inner dimension is cut into so many parts."""
    high, wide = on.tile
    along = lambda a, b: math.ceil(p.m / a) * math.ceil(p.n / b)
    waves = math.ceil(p.batch * parts * min(along(high, wide), along(wide, high)) / on.sms)
    one_wave = 2 * high * wide * math.ceil(p.k / parts) * on.sms / on.flops
    partial_sums = 0 if parts == 1 else 2 * 4 * parts * p.batch * p.m * p.n
    return max(waves * one_wave, p.bytes / on.memory) + partial_sums / on.memory


FORWARD, BACKWARD = 4, 10  # operations for a score and a dimension of a head


@dataclass(frozen=True)
class FusedAttention:
    """The shape of one call of fused attention, as many keys and values as queries."""

    rows: float
    length: int
    heads: int
    width: int  # of a head
    causal: bool = True
    itemsize: int = 2  # bytes of a number

    def forward(self, machine: Machine) -> float:
        """Return the seconds of the forward pass."""
        narrow = self.width <= 64
        rate = machine.attention_forward_64 if narrow else machine.attention_forward_128
        return self._seconds(machine, FORWARD / rate, machine.attention_forward_passes)

    def backward(self, machine: Machine) -> float:
        """Return the seconds of the backward pass, which computes the scores again."""
        narrow = self.width <= 64
        rate = machine.attention_backward_64 if narrow else machine.attention_backward_128
        return self._seconds(machine, BACKWARD / rate, machine.attention_backward_passes)

    def _seconds(self, machine: Machine, each: float, passes: float) -> float:
        """Return the seconds of a pass; `each`: of a score and a dimension of a head."""
        seen = (self.length + 1) / 2 if self.causal else self.length  # keys, of a query
        numbers = self.rows * self.length * self.heads * self.width
        return machine.start_up + numbers * (seen * each + passes * self.itemsize / machine.stream)
