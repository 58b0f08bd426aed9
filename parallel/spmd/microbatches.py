"""Dealing rows so that microbatches are those of one device.

Rows lie on devices one after the other, while a microbatch of one device is so many rows that
follow each other. So each device's rows are cut into pieces, one for each microbatch, and pieces
change places: in each turn every device sends one and receives one.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.parallel.spmd.placements import Side


class Trip(NamedTuple):
    """One piece on its way: a device and its piece, and where it becomes which piece."""

    device: int
    piece: int
    to: int
    place: int

    @property
    def back(self) -> "Trip":
        """The way back."""
        return Trip(self.to, self.place, self.device, self.piece)


def deal_rows(side: Side, count: int, x: jax.Array, back: bool = False) -> jax.Array:
    """Return this device's rows as parts of the microbatches of one device, or back again."""
    pieces = x.reshape(count, -1, *x.shape[1:])
    found = jnp.zeros_like(pieces)
    for turn in turns(side.size, count):
        ways = sorted(way.back if back else way for way in turn)
        places = {way.to: way.place for way in ways}
        sent = lax.dynamic_index_in_dim(pieces, _of(side, [way.piece for way in ways]), 0, False)
        sent = lax.ppermute(sent, side.axes, [(way.device, way.to) for way in ways])
        place = _of(side, [places[device] for device in range(side.size)])
        found = lax.dynamic_update_index_in_dim(found, sent, place, 0)
    return found.reshape(x.shape)


def _of(side: Side, numbers: list[int]) -> jax.Array:
    """Return this device's number."""
    return jnp.asarray(numbers)[side.here]


def turns(devices: int, count: int) -> list[list[Trip]]:
    """Return which piece each device sends where, turn by turn.

    Piece j of device d is number d * count + j of all. Microbatch m of one device has the numbers
    from m * devices on, one for each device.

    Example:
        >>> turns(2, 2)[0]
        [Trip(device=0, piece=1, to=1, place=0), Trip(device=1, piece=0, to=0, place=1)]
    """
    left = [set() for _ in range(devices)]
    for number in range(devices * count):
        way = Trip(number // count, number % count, number % devices, number // devices)
        left[way.device].add(way)
    found = []
    for _ in range(count):
        turn = _one_for_each(left)
        for way in turn:
            left[way.device].remove(way)
        found.append(turn)
    return found


def _one_for_each(left: list[set[Trip]]) -> list[Trip]:
    """Return one way from each device, one to each: as many are left from and to all of them."""
    taken: dict[int, Trip] = {}  # by who receives it

    def send(device: int, seen: set[int]) -> bool:
        for way in sorted(left[device]):
            if way.to not in seen:
                seen.add(way.to)
                if way.to not in taken or send(taken[way.to].device, seen):
                    taken[way.to] = way
                    return True
        return False

    for device in range(len(left)):
        found = send(device, set())
        assert found
    return sorted(taken.values())
