"""Ulysses: neighbours exchange heads for positions, so that each attends to full sequences.

An all-to-all turns [B, S / u, H, D] on each of u devices into [B, S, H / u, D], and another one
turns the output of attention back (DeepSpeed Ulysses, Jacobs et al., 2023). Heads of keys are
repeated where there are fewer of them than devices.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.parallel.extensions.context_parallel.sequence_layout import SequenceLayout
from hfjax.parallel.spmd.rule_calls import local_map

Axes = tuple[str, ...]
POSITIONS, HEADS = 1, 2  # dimensions


@dataclass(frozen=True)
class HeadAllToAll:
    """The exchange between neighbours that share a sequence, of arrays [B, S, H, D]."""

    seq_layout: SequenceLayout
    axes: Axes  # of the mesh: their devices share a sequence
    map_shards: Callable[[Callable], Callable]  # runs a function of [B, S, H, D] on tensor shards

    def to_heads(self, x: jax.Array) -> jax.Array:
        """Return the positions of all neighbours, for a part of the heads."""
        return self._run(True, x)

    def to_positions(self, x: jax.Array) -> jax.Array:
        """Return all heads, for the positions of this device."""
        return self._run(False, x)

    def _run(self, to_heads: bool, x: jax.Array) -> jax.Array:
        return local_map(partial(_all_to_all, self, to_heads))(x)

    def gather_documents(self, documents_BS: jax.Array) -> jax.Array:
        """Return the documents of all positions, by group: [ring, B, S / ring]."""
        gathered = lax.all_gather(documents_BS, self.axes)
        by_group = gathered.reshape(
            self.seq_layout.ring_size, self.seq_layout.ulysses, *documents_BS.shape
        )
        return jnp.concatenate([by_group[:, i] for i in range(self.seq_layout.ulysses)], axis=2)

    @property
    def groups(self) -> list[list[int]] | None:
        """The groups of devices that exchange."""
        size = self.seq_layout.ulysses
        if size == self.seq_layout.devices:
            return None
        return [
            list(range(first, first + size)) for first in range(0, self.seq_layout.devices, size)
        ]

    def repeat_heads(self, x_BSGD: jax.Array, shards: int) -> jax.Array:
        """Return keys or values with each head repeated so that every device gets one.

        `shards` is the number of devices of the tensor axes over which the heads are sharded.
        """
        times = num_repeats(x_BSGD.shape[HEADS] // shards, self.seq_layout.ulysses)
        return jnp.repeat(x_BSGD, times, axis=HEADS) if times > 1 else x_BSGD


def num_repeats(heads: int, devices: int) -> int:
    """Return how often heads of keys are repeated so that they divide over the devices.

    >>> num_repeats(8, 4), num_repeats(2, 8), num_repeats(4, 6)
    (1, 4, 3)
    """
    return devices // math.gcd(heads, devices)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _all_to_all(exchange: HeadAllToAll, to_heads: bool, x: jax.Array) -> jax.Array:
    split_axis, concat_axis = (HEADS, POSITIONS) if to_heads else (POSITIONS, HEADS)
    options: dict[str, Any] = {"tiled": True, "axis_index_groups": exchange.groups}
    return exchange.map_shards(
        lambda x: lax.all_to_all(x, exchange.axes, split_axis, concat_axis, **options)
    )(x)


def _forward(exchange: HeadAllToAll, to_heads: bool, x: jax.Array) -> tuple[jax.Array, None]:
    return _all_to_all(exchange, to_heads, x), None


def _backward(exchange: HeadAllToAll, to_heads: bool, _: None, dx: jax.Array) -> tuple[jax.Array]:
    return (_all_to_all(exchange, not to_heads, dx),)


_all_to_all.defvjp(_forward, _backward)
