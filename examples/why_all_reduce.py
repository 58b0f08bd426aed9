"""Bytes through the busiest link, against the number of devices: why all-reduce won.

Six ways to train with many devices, each as its paper describes it (examples/baselines),
are lowered for as many devices as the table says, and counted. Nothing runs, so a laptop will do:

    python examples/why_all_reduce.py
"""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

from baselines.data_parallel import data_parallel_step
from baselines.halving_doubling import halving_doubling_all_reduce
from baselines.links import Links, links
from baselines.parameter_server import parameter_server_step
from baselines.pieces import in_pieces
from baselines.ring import ring_all_reduce
from baselines.training import Step, all_reduce_step
from baselines.two_level import two_level_all_reduce
from hfjax.utils.tables import align, human

DEVICES, NODE, ROWS = (2, 4, 8, 16, 32, 64), 8, 8  # in all; in a node; of a device
KERNEL = jax.ShapeDtypeStruct((4096, 8192), jnp.float32)  # 128 MiB: all that is trained
SGD = optax.sgd(0.1)


def forward(kernel: jax.Array, batch: jax.Array) -> jax.Array:
    return batch @ kernel


def of_outputs(outputs: jax.Array, batch: jax.Array) -> jax.Array:
    return jnp.mean(outputs**2)


def loss(kernel: jax.Array, rows: jax.Array) -> jax.Array:
    return of_outputs(forward(kernel, rows), rows)


def counted(
    step: Step, sizes: dict[str, int], parameters: jax.ShapeDtypeStruct, rows: int
) -> Links:
    """Return what one step sends, on devices that need not be here."""
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes))
    run = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    batch = jax.ShapeDtypeStruct((rows, KERNEL.shape[0]), jnp.float32)
    arrays = parameters, jax.eval_shape(SGD.init, parameters), batch
    return links(jax.jit(run).trace(*arrays).lower(lowering_platforms=("cpu",)))


def data_parallel(n: int) -> Links:
    step = data_parallel_step(forward, of_outputs, SGD, "device")
    return counted(step, {"device": n}, KERNEL, n * ROWS)


def server(n: int, servers: int) -> Links:
    step = parameter_server_step(loss, SGD, KERNEL, "device", servers)
    shard = jax.eval_shape(lambda kernel: in_pieces(kernel, servers)[0], KERNEL)
    return counted(step, {"device": n}, shard, ROWS)


def flat(n: int, method) -> Links:
    step = all_reduce_step(loss, SGD, partial(method, axis="device"), "device")
    return counted(step, {"device": n}, KERNEL, ROWS)


def two_level(n: int) -> Links:
    method = partial(two_level_all_reduce, inside="device", across="node")
    sizes = {"node": max(n // NODE, 1), "device": min(n, NODE)}
    return counted(all_reduce_step(loss, SGD, method, tuple(sizes)), sizes, KERNEL, ROWS)


WAYS = {
    "DataParallel": data_parallel,
    "one server": lambda n: server(n, 1),
    "a server for each worker": lambda n: server(n, n // 2),
    "ring": lambda n: flat(n, ring_all_reduce),
    "halving and doubling": lambda n: flat(n, halving_doubling_all_reduce),
    "two levels": two_level,
}


def main() -> None:
    found = {way: [count(n) for n in DEVICES] for way, count in WAYS.items()}
    tables = {
        "bytes through the busiest link of a device": lambda x: human(x.busiest()),
        f"bytes through the busiest link of a node of {NODE}": lambda x: human(x.busiest(NODE)),
        "steps, one after another": lambda x: str(x.steps),
    }
    print(f"one step of training with {human(4 * KERNEL.size)} of parameters")
    for title, cell in tables.items():
        head = ("devices", *map(str, DEVICES))
        lines = [(way, *map(cell, each)) for way, each in found.items()]
        print(f"\n{title}", *align([head, *lines], numbers=range(1, len(head))), sep="\n")
    print(
        "\nA master, or a server, carries the parameters once for each other device. An all-reduce "
        "never\ncarries them twice, however many devices there are, and all of them train. "
        "Servers carry half of\nthat where they are as many as the workers: then half of the "
        "devices do not train. Two levels take\nfewer steps than a ring, and leave the links of "
        "nodes as free as a ring does."
    )


if __name__ == "__main__":
    main()
