"""Redistribution of examples so that microbatches are those of a single device.

The batch is sharded over the devices in order, while a microbatch of a single device is a run of
consecutive examples. So each device's examples are cut into chunks, one for each microbatch, and
chunks change devices: in each round every device sends one and receives one.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.parallel.spmd.placements import AxisGroup


class ChunkTransfer(NamedTuple):
    """The transfer of one chunk: its device and number before, and after."""

    device: int
    chunk: int
    to_device: int
    to_chunk: int

    @property
    def inverse(self) -> "ChunkTransfer":
        """The transfer back."""
        return ChunkTransfer(self.to_device, self.to_chunk, self.device, self.chunk)


def redistribute_examples(
    group: AxisGroup, num_microbatches: int, x: jax.Array, inverse: bool = False
) -> jax.Array:
    """Return this device's examples as shards of a single device's microbatches, or back again."""
    chunks = x.reshape(num_microbatches, len(x) // num_microbatches, *x.shape[1:])
    out = jnp.zeros_like(chunks)
    for transfer_round in transfer_rounds(group.size, num_microbatches):
        transfers = sorted(transfer.inverse if inverse else transfer for transfer in transfer_round)
        target_chunks = {transfer.to_device: transfer.to_chunk for transfer in transfers}
        message = lax.dynamic_index_in_dim(
            chunks, _own_number(group, [transfer.chunk for transfer in transfers]), 0, False
        )
        message = lax.ppermute(
            message, group.axes, [(transfer.device, transfer.to_device) for transfer in transfers]
        )
        target_chunk = _own_number(group, [target_chunks[device] for device in range(group.size)])
        out = lax.dynamic_update_index_in_dim(out, message, target_chunk, 0)
    return out.reshape(x.shape)


def _own_number(group: AxisGroup, numbers: list[int]) -> jax.Array:
    """Return this device's entry of a list."""
    return jnp.asarray(numbers)[group.axis_index]


def transfer_rounds(devices: int, num_microbatches: int) -> list[list[ChunkTransfer]]:
    """Return which chunk each device sends where, round by round.

    Chunk j of device d is number d * num_microbatches + j of all. Microbatch m of a single device
    has the numbers from m * devices on, one for each device.

    Example:
        >>> transfer_rounds(2, 2)[0]  # doctest: +NORMALIZE_WHITESPACE
        [ChunkTransfer(device=0, chunk=1, to_device=1, to_chunk=0),
         ChunkTransfer(device=1, chunk=0, to_device=0, to_chunk=1)]
    """
    pending = [set() for _ in range(devices)]
    for number in range(devices * num_microbatches):
        transfer = ChunkTransfer(
            number // num_microbatches,
            number % num_microbatches,
            number % devices,
            number // devices,
        )
        pending[transfer.device].add(transfer)
    rounds = []
    for _ in range(num_microbatches):
        transfers = _match_devices(pending)
        for transfer in transfers:
            pending[transfer.device].remove(transfer)
        rounds.append(transfers)
    return rounds


def _match_devices(pending: list[set[ChunkTransfer]]) -> list[ChunkTransfer]:
    """Return one transfer from each device and to each: as many are left from and to all."""
    by_receiver: dict[int, ChunkTransfer] = {}  # by receiver

    def assign(device: int, visited_receivers: set[int]) -> bool:
        for transfer in sorted(pending[device]):
            if transfer.to_device not in visited_receivers:
                visited_receivers.add(transfer.to_device)
                if transfer.to_device not in by_receiver or assign(
                    by_receiver[transfer.to_device].device, visited_receivers
                ):
                    by_receiver[transfer.to_device] = transfer
                    return True
        return False

    for device in range(len(pending)):
        is_assigned = assign(device, set())
        assert is_assigned
    return sorted(by_receiver.values())
