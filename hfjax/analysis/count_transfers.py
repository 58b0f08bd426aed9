"""Counts the copies between device and host memory in one call of a program, loops multiplied out.

What the numbers mean:

- Bytes are of one device. In a shard_map over all axes, shapes are per device and are taken as
  they are. Outside of it, and along axes that it leaves to the partitioner (such as tensor), shapes
  are global: they are divided as the shardings of arguments, constraints and jits say. Where these
  do not say, the entry is marked `is_global`, with a * in the table.
- Of branches, the one that copies most is counted. The length of a scan and a fori_loop is known;
  a while_loop, whose length is not, counts once.
- It is what the trace says. A lowered program says the same, but not where a value was before it
  was sent, so it is not read; and XLA may move a copy out of a loop, or drop one to the host and
  back. Values that nothing reads are not counted.
"""

import dataclasses
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from hfjax.analysis.memory_copies import TO_DEVICE, TO_HOST, Copy, copies
from hfjax.utils.tables import Entries, align, human, sum_counts

DIRECTIONS = (TO_HOST, TO_DEVICE)
HEAD = ("direction", "array", "bytes", "count", "total", "where")


@dataclasses.dataclass(frozen=True)
class HostTransfer:
    """One entry: `count` copies of one array in one direction, per device."""

    direction: str  # "to host" or "to device"
    dtype: str
    shape: tuple[int, ...]
    bytes: int  # of one copy
    count: int
    where: str  # the loops and branches that it is in
    is_global: bool = False  # shape and bytes are global: the sharding is not known


class Transfers(Entries[HostTransfer]):
    """The copies between device and host of one call of a program, most bytes first.

    It prints as a table and iterates over its `rows`, which are `HostTransfer`s; `source` says
    what was read.

    Example:
        >>> import hfjax, jax.numpy as jnp, optax
        >>> model, host = lambda rngs: {"w": jnp.ones((64, 8))}, hfjax.DDP | hfjax.HOST_OPTIMIZER
        >>> optimizer = optax.sgd(0.1, momentum=0.9)
        >>> layout = hfjax.layout(model, optimizer, hfjax.make_mesh(data=8), host)
        >>> step = hfjax.train_step(layout, lambda params, x: ((x @ params["w"]) ** 2).mean())
        >>> found = hfjax.analysis.host_transfers(step.trace(jnp.ones((8, 64))))
        >>> found.to_host, found.to_device, found.count("to host")
        (2048, 2048, 1)
    """

    @property
    def to_host(self) -> int:
        """The bytes that one device sends to the host."""
        return self.total(TO_HOST)

    @property
    def to_device(self) -> int:
        """The bytes that one device receives from the host."""
        return self.total(TO_DEVICE)

    def total(self, direction: str | None = None) -> int:
        """Return the bytes of one device, of all entries or of one direction.

        Args:
            direction: "to host" or "to device". None: both.

        Example:
            >>> import hfjax, jax, jax.numpy as jnp
            >>> hfjax.analysis.host_transfers(jax.make_jaxpr(jnp.sin)(1.0)).total("to host")
            0
        """
        return sum(entry.bytes * entry.count for entry in self._select(direction))

    def count(self, direction: str | None = None) -> int:
        """Return the number of copies, in all or in one direction.

        Args:
            direction: "to host" or "to device". None: both.
        """
        return sum(entry.count for entry in self._select(direction))

    def _select(self, direction: str | None) -> list[HostTransfer]:
        if direction is not None and direction not in DIRECTIONS:
            raise ValueError(f"direction is {direction!r}; allowed are {', '.join(DIRECTIONS)}")
        return [entry for entry in self.rows if direction in (None, entry.direction)]

    def __str__(self) -> str:
        title = f"copies between device and host of one call, per device ({self.source})"
        if not self.rows:
            return f"{title}: none"
        lines = align([HEAD, *map(_cells, self.rows)], numbers=(2, 3, 4))
        both = (f"{d} {self.count(d)} x, {human(self.total(d))}" for d in DIRECTIONS)
        table = [title, *lines, "; ".join(both)]
        if any(entry.is_global for entry in self.rows):
            table.append(
                "* whole, along some axis at least: the program does not say how it is split"
            )
        return "\n".join(table)


def _cells(entry: HostTransfer) -> tuple[str, ...]:
    array = f"{entry.dtype}[{','.join(map(str, entry.shape))}]" + "*" * entry.is_global
    sizes = human(entry.bytes), str(entry.count), human(entry.bytes * entry.count)
    return (entry.direction, array, *sizes, entry.where)


def host_transfers(program: Any) -> Transfers:
    """Return the copies between device and host of one call of a traced program.

    Args:
        program: `jax.jit(f).trace(…)`, or a closed jaxpr; of a step, `step.trace(batch)`.

    Example:
        >>> import hfjax, jax, jax.numpy as jnp
        >>> from jax.sharding import SingleDeviceSharding
        >>> host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
        >>> program = jax.jit(lambda x: jax.device_put(2 * x, host)).trace(jnp.ones(256))
        >>> hfjax.analysis.host_transfers(program).total("to host")
        1024
    """
    if isinstance(program, jax.stages.Traced):
        return Transfers(_merge_copies(copies(program.jaxpr, *_shardings(program))), "jaxpr")
    if isinstance(program, ClosedJaxpr):
        unknown = [None] * len(program.in_avals), [None] * len(program.out_avals)
        return Transfers(_merge_copies(copies(program, *unknown)), "jaxpr")
    raise ValueError(
        f"program is a {type(program).__name__}; allowed are jax.stages.Traced and a jaxpr: pass "
        "jax.jit(f).trace(*args) (not lowered, not compiled), or jax.make_jaxpr(f)(*args)"
    )


def _shardings(program: Any) -> tuple[list[Any], list[Any]]:
    """Return the shardings of a trace's arguments and results; jax has no public name for them."""
    known_sharding = lambda sharding: (
        sharding if isinstance(sharding, jax.sharding.Sharding) else None
    )
    own = [argument.sharding for argument in program._meta_tys_flat]
    jit_shardings = map(known_sharding, program._params["in_shardings"])
    arguments = [
        of_jit or known_sharding(of_array)
        for of_jit, of_array in zip(jit_shardings, own, strict=True)
    ]
    return arguments, list(map(known_sharding, program._params["out_shardings"]))


def _merge_copies(copy_list: list[Copy]) -> tuple[HostTransfer, ...]:
    return sum_counts(
        HostTransfer(c.kind, c.dtype, c.shape, c.bytes, c.count, c.where, c.is_global)
        for c in copy_list
    )
