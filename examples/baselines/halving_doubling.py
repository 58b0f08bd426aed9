"""Recursive halving and doubling: an all-reduce in as few steps as log2 of the devices allows.

Halving: a device exchanges half of its vector with the one n / 2 away and keeps the sum of one
half; then a quarter with the one n / 4 away, and so on: now each has one piece of the sum.
Doubling takes the same way back and gathers the pieces. Rabenseifner, 2004; Thakur, Rabenseifner
and Gropp, 2005. Where n is no power of two, c is the greatest below it, and of the first
2 (n - c) devices each even one hands its vector to the next, which returns the sum in the end.

Of P bytes a device sends 2 (c - 1) / c · P in 2 log2(c) steps. Where n is no power of two there are
2 steps more: in them an even device sends P and receives P, and so does the one after it, on top
of its share: its link, the busiest, carries P + 2 (c - 1) / c · P.
"""

import jax
import jax.numpy as jnp
from jax import lax

from baselines.pieces import in_pieces, joined


def halving_doubling_all_reduce(x: jax.Array, axis: str) -> jax.Array:
    """Return the sum of all devices' arrays.

    Args:
        x: This device's array; c pieces are cut from it, the last one filled up with zeros.
        axis: The mesh axis of the devices.
    """
    n, me = lax.axis_size(axis), lax.axis_index(axis)
    core = 2 ** (n.bit_length() - 1)
    beyond = range(0, 2 * (n - core), 2)  # they hand their vectors to the next
    members = [device for device in range(n) if device not in beyond]
    rank = jnp.searchsorted(jnp.array(members), me)
    distances = [core >> step for step in range(1, core.bit_length())]  # core / 2 … 1

    def exchange(sent: jax.Array, distance: int) -> jax.Array:
        pairs = [(members[i], members[i ^ distance]) for i in range(core)]
        return lax.ppermute(sent, axis, pairs)

    vector = in_pieces(x, core).ravel()
    if beyond:
        vector += lax.ppermute(vector, axis, [(device, device + 1) for device in beyond])
    for distance in distances:
        lower, upper = jnp.split(vector, 2)
        in_upper = rank & distance != 0
        received = exchange(jnp.where(in_upper, lower, upper), distance)
        vector = jnp.where(in_upper, upper, lower) + received
    for distance in reversed(distances):
        received, in_upper = exchange(vector, distance), rank & distance != 0
        lower = jnp.where(in_upper, received, vector)
        vector = jnp.concatenate([lower, jnp.where(in_upper, vector, received)])
    if beyond:
        received = lax.ppermute(vector, axis, [(device + 1, device) for device in beyond])
        vector = jnp.where(jnp.isin(me, jnp.array(beyond)), received, vector)
    return joined(vector, x)
