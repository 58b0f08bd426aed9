"""A synchronous parameter server: servers have the parameters, workers the rows of the batch.

In each step every worker pulls the parameters, computes the gradient of its rows and pushes it; the
servers wait for all, add and update. With s servers each has 1 / s of the parameters, cut as one
vector. Li et al., 2014 (Dean et al., 2012, had one without waiting).

Of P bytes, with w workers: a server sends w / s · P and receives as much, a worker P and P. A step
of training pulls in max(s, w) steps and pushes in as many: in each a device talks to one other. So
a single server's link carries w times the parameters. Where there are as many servers as workers
every link carries P each way, half of what it does in a ring, and half of the devices do not train.
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from baselines.pieces import in_pieces
from baselines.training import Step, Tree


def check_servers(servers: int, devices: int) -> None:
    """Refuse servers that leave no worker, or none."""
    if not 0 < servers < devices:
        fits = f"1 to {devices - 1} do" if devices > 1 else "take at least 2 devices"
        raise ValueError(
            f"{servers} servers on {devices} devices: a server and a worker are needed; {fits}."
        )


def turns(axis: str, servers: int) -> Iterator[list[tuple[int, int]]]:
    """Yield pairs of a server and a worker that talk at the same time; in all each meets each."""
    workers = lax.axis_size(axis) - servers
    most = max(servers, workers)
    for turn in range(most):
        meets = [(server, (server + turn) % most) for server in range(servers)]
        yield [(server, servers + worker) for server, worker in meets if worker < workers]


def _server_of_turn(axis: str, servers: int, turn: int) -> jax.Array:
    """Return which server this worker talks to; none, if the number is not below `servers`."""
    most = max(servers, lax.axis_size(axis) - servers)
    return (lax.axis_index(axis) - servers - turn) % most


def pull(shard: jax.Array, axis: str, servers: int) -> jax.Array:
    """Return, on each worker, the shards of all servers."""
    shards = jnp.zeros((servers, *shard.shape), shard.dtype)
    for turn, pairs in enumerate(turns(axis, servers)):
        received = lax.ppermute(shard, axis, pairs)
        shards = shards.at[_server_of_turn(axis, servers, turn)].set(received, mode="drop")
    return shards


def push(pieces: jax.Array, axis: str, servers: int) -> jax.Array:
    """Return, on each server, the sum of all workers' pieces of this number."""
    total = jnp.zeros_like(pieces[0])
    for turn, pairs in enumerate(turns(axis, servers)):
        piece = pieces[_server_of_turn(axis, servers, turn)]
        total += lax.ppermute(piece, axis, [(worker, server) for server, worker in pairs])
    return total


def parameter_server_step(
    loss: Callable[[Tree, Tree], jax.Array],
    optimizer: optax.GradientTransformation,
    like: Tree,
    axis: str,
    servers: int = 1,
) -> Step:
    """Return step(shard, state, rows) -> shard and state of a server, loss of a worker.

    A server's shard is its row of `in_pieces(vector, servers)`, its state that of the shard.

    Args:
        loss: Function of (parameters, rows): the mean over a worker's rows.
        optimizer: An optax transformation that treats each number by itself, as Adam does.
        like: A tree with the shapes of the parameters.
        axis: The mesh axis of the devices; the first are the servers.
        servers: How many they are.
    """

    def step(shard: jax.Array, state: Tree, rows: Tree) -> tuple[jax.Array, Tree, jax.Array]:
        check_servers(servers, lax.axis_size(axis))
        zeros, as_tree = ravel_pytree(jax.tree.map(lambda x: jnp.zeros(x.shape, shard.dtype), like))
        parameters = as_tree(pull(shard, axis, servers).ravel()[: zeros.size])
        value, gradients = jax.value_and_grad(loss)(parameters, rows)
        pieces = in_pieces(ravel_pytree(gradients)[0], servers)
        mean = push(pieces, axis, servers) / (lax.axis_size(axis) - servers)
        updates, state = optimizer.update(mean, state, shard)
        return jnp.asarray(optax.apply_updates(shard, updates)), state, value

    return step
