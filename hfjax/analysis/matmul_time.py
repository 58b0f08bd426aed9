"""Models how long a matmul or fused attention takes on a GPU, with the constants of a machine.

A matmul takes a fixed start-up, and then the time of

- whole waves of tiles, one tile on each multiprocessor, at the GPU's rate when all are busy;
- or, if that is longer, of its operands and its result through memory;
- with its inner dimension in 1, 2, 4, 8 or 16 parts, whichever is fastest (split-K): each part is a
  tile of its own, and partial sums in float32 are written and read.
"""

import math
from dataclasses import dataclass

from hfjax.analysis.overlap import Matmul
from hfjax.hardware.machine import Machine

SPLITS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class ProductModel:
    """The model's view of a GPU."""

    flops: float  # per second, all multiprocessors busy
    memory: float  # bytes per second
    sms: int
    start_up: float  # seconds, of each matmul
    tile: tuple[int, int]

    @classmethod
    def from_machine(cls, machine: Machine, float32: bool = False) -> "ProductModel":
        """Return the model of a machine's measured rates, for bfloat16 or float32 matmuls."""
        flops = machine.flops_fp32 if float32 else machine.flops
        return cls(flops, machine.stream, machine.sms, machine.start_up, machine.tile)


def matmul_seconds(p: Matmul, gpu: ProductModel) -> float:
    """Return the seconds of one run of a matmul."""
    return gpu.start_up + min(_split_k_seconds(p, splits, gpu) for splits in SPLITS)


def _split_k_seconds(p: Matmul, splits: int, gpu: ProductModel) -> float:
    """Return the seconds of a matmul whose inner dimension is split into `splits` parts."""
    high, wide = gpu.tile
    num_tiles = lambda a, b: math.ceil(p.m / a) * math.ceil(p.n / b)
    waves = math.ceil(
        p.batch * splits * min(num_tiles(high, wide), num_tiles(wide, high)) / gpu.sms
    )
    one_wave = 2 * high * wide * math.ceil(p.k / splits) * gpu.sms / gpu.flops
    partial_sums = 0 if splits == 1 else 2 * 4 * splits * p.batch * p.m * p.n
    return max(waves * one_wave, p.bytes / gpu.memory) + partial_sums / gpu.memory


FORWARD, BACKWARD = 4, 10  # operations per score and head dimension


@dataclass(frozen=True)
class FusedAttention:
    """The shape of one call of fused attention, with as many keys and values as queries."""

    batch_size: float
    length: int
    heads: int
    width: int  # of a head
    causal: bool = True
    itemsize: int = 2  # bytes of an element

    def forward(self, machine: Machine) -> float:
        """Return the seconds of the forward pass."""
        narrow = self.width <= 64
        rate = machine.attention_forward_64 if narrow else machine.attention_forward_128
        return self._seconds(machine, FORWARD / rate, machine.attention_forward_passes)

    def backward(self, machine: Machine) -> float:
        """Return the seconds of the backward pass, which recomputes the scores."""
        narrow = self.width <= 64
        rate = machine.attention_backward_64 if narrow else machine.attention_backward_128
        return self._seconds(machine, BACKWARD / rate, machine.attention_backward_passes)

    def _seconds(self, machine: Machine, each: float, passes: float) -> float:
        """Return the seconds of a pass; `each`: of one score and head dimension."""
        keys_per_query = (self.length + 1) / 2 if self.causal else self.length  # keys per query
        numbers = self.batch_size * self.length * self.heads * self.width
        return machine.start_up + numbers * (
            keys_per_query * each + passes * self.itemsize / machine.stream
        )
