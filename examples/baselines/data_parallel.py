"""torch's DataParallel: a master device has everything and lends the others what they work on.

In each step the master (device 0) scatters the rows of the batch, replicates the parameters and
gathers the outputs. It computes the loss alone, scatters the gradient of the outputs, adds up the
gradients of all replicas and updates. (`torch.nn.DataParallel`: scatter, replicate,
parallel_apply, gather. torch lets NCCL broadcast within a node; here the master sends to each.)

P bytes of parameters, X of what `forward` reads of a batch, Y of its outputs, n devices: the master
sends (n - 1) P + (n - 1) / n · (X + Y) and receives (n - 1) P + (n - 1) / n · Y; another device
sends P + Y / n. With b arrays in X there are (4 + b) (n - 1) steps, since the master sends to one
device at a time. So its link carries n - 1 times the parameters, each way.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from baselines.training import Step, Tree


def scatter(x: jax.Array, axis: str) -> jax.Array:
    """Return this device's rows of the master's array."""
    n, me = lax.axis_size(axis), lax.axis_index(axis)
    if x.shape[0] % n:
        raise ValueError(
            f"scatter: {x.shape[0]} rows do not divide among {n} devices; pass a multiple of {n}."
        )
    rows = x.reshape(n, -1, *x.shape[1:])
    mine = rows[0]
    for device in range(1, n):
        mine = jnp.where(me == device, lax.ppermute(rows[device], axis, [(0, device)]), mine)
    return mine


def replicate(x: jax.Array, axis: str) -> jax.Array:
    """Return the master's array."""
    copy = x
    for device in range(1, lax.axis_size(axis)):
        received = lax.ppermute(x, axis, [(0, device)])
        copy = jnp.where(lax.axis_index(axis) == device, received, copy)
    return copy


def gather(mine: jax.Array, axis: str) -> jax.Array:
    """Return, on the master, the rows of all devices."""
    others = range(1, lax.axis_size(axis))
    return jnp.concatenate([mine, *(lax.ppermute(mine, axis, [(d, 0)]) for d in others)])


def data_parallel_step(
    forward: Callable[[Tree, Tree], jax.Array],
    loss: Callable[[jax.Array, Tree], jax.Array],
    optimizer: optax.GradientTransformation,
    axis: str,
) -> Step:
    """Return step(parameters, state, batch) -> parameters, state, loss: those of the master count.

    Args:
        forward: Function of (parameters, batch): the outputs, an array with the batch's rows.
        loss: Function of (outputs, batch): a number.
        optimizer: Any optax transformation.
        axis: The mesh axis of the devices; the first is the master.
    """

    def step(parameters: Tree, state: Tree, batch: Tree) -> tuple[Tree, Tree, jax.Array]:
        rows = jax.tree.map(lambda x: scatter(x, axis), batch)
        vector, as_tree = ravel_pytree(parameters)
        parallel_apply = lambda vector: forward(as_tree(replicate(vector, axis)), rows)
        outputs, backward = jax.vjp(lambda vector: gather(parallel_apply(vector), axis), vector)
        value, slope = jax.value_and_grad(loss)(outputs, batch)
        on_master = lax.axis_index(axis) == 0
        (gradient,) = backward(jnp.where(on_master, slope, 0))  # scatters, and adds up replicas
        updates, state = optimizer.update(as_tree(gradient), state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    return step
