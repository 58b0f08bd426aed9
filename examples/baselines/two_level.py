"""Two levels, as hfreduce: add within the node, then across nodes, then back within the node.

hfreduce (An et al., 2024) adds the vectors of a node's g devices in the memory of its CPU, so only
their sum crosses the network, and copies the result back. Here the devices themselves do the CPU's
part, each for a piece: the first level is a reduce-scatter within the node, the last an all-gather.

Of P bytes, on m nodes of g devices: each device sends 2 (g - 1) / g · P within its node and
2 (m - 1) / m · P / g across, where all-reduces are rings; the link of a node to the others carries
2 (m - 1) / m · P. There are 2 (g - 1) + 2 (m - 1) steps; a ring of all devices has 2 (g m - 1).
"""

from collections.abc import Callable

import jax
from jax import lax

from baselines.pieces import in_pieces, joined
from baselines.ring import (
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)


def two_level_all_reduce(
    x: jax.Array,
    inside: str,
    across: str,
    all_reduce: Callable[[jax.Array, str], jax.Array] = ring_all_reduce,
) -> jax.Array:
    """Return the sum of all devices' arrays.

    Args:
        x: This device's array.
        inside: The mesh axis of the devices of a node.
        across: The mesh axis of the nodes.
        all_reduce: How each device adds its piece to those of the other nodes: a function of an
            array and a mesh axis.
    """
    piece = ring_reduce_scatter(in_pieces(x, lax.axis_size(inside)), inside)
    return joined(ring_all_gather(all_reduce(piece, across), inside), x)
