"""Counts every copy between device and host memory in one call of a program, loops multiplied out.

What the numbers mean:

- Bytes are of one device. Within a shard_map over all axes the program is that of one device, and
  its shapes are taken as they are. Outside of it, and along axes that it leaves to the partitioner
  (such as tensor), shapes are of whole arrays: they are divided as shardings of arguments,
  constraints and jits say. Where they do not say, the row is marked `whole`, with a * in the table.
- Of branches, the one that copies most is counted. The length of a scan and a fori_loop is known;
  a while_loop, whose length is not, counts once.
- It is what the trace says. A program that is lowered says the same, but not where a value was
  before it was sent, so it is not read; and XLA may move a copy out of a loop, or drop one there
  and back. What nothing reads is not counted.
"""

import dataclasses
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from hfjax.analysis.memory_copies import TO_DEVICE, TO_HOST, Copy, copies
from hfjax.utils.tables import Rows, aligned, human, merged

DIRECTIONS = (TO_HOST, TO_DEVICE)
HEAD = ("direction", "array", "bytes", "count", "total", "where")


@dataclasses.dataclass(frozen=True)
class HostTransfer:
    """One row: `count` copies of one array in one direction, per device."""

    direction: str  # "to host" or "to device"
    dtype: str
    shape: tuple[int, ...]
    bytes: int  # of one copy
    count: int
    where: str  # the loops and branches that it is in
    whole: bool = False  # shape and bytes are of the whole array: how it is split is not said


class Transfers(Rows[HostTransfer]):
    """The copies between device and host of one call of a program, most bytes first.

    It prints as a table. `rows` are `HostTransfer`s, which it also iterates over; `source` says
    what was read.

    Example:
        >>> import hfjax, jax.numpy as jnp, optax
        >>> model, host = lambda rngs: {"w": jnp.ones((64, 8))}, hfjax.DDP | hfjax.HOST_OPTIMIZER
        >>> optimizer = optax.sgd(0.1, momentum=0.9)
        >>> layout = hfjax.layout(model, optimizer, hfjax.make_mesh(data=8), host)
        >>> step = hfjax.train_step(layout, lambda params, x: ((x @ params["w"]) ** 2).mean())
        >>> found = hfjax.transfers(step.trace(jnp.ones((8, 64))))
        >>> found.to_host, found.to_device, found.count("to host")
        (2048, 2048, 1)
    """

    @property
    def to_host(self) -> int:
        """The bytes that one device sends to the host."""
        return self.total(TO_HOST)

    @property
    def to_device(self) -> int:
        """The bytes that one device takes from the host."""
        return self.total(TO_DEVICE)

    def total(self, direction: str | None = None) -> int:
        """Return the bytes of one device, of all rows or of one direction.

        Args:
            direction: "to host" or "to device". None: both.

        Example:
            >>> import hfjax, jax, jax.numpy as jnp
            >>> hfjax.transfers(jax.make_jaxpr(jnp.sin)(1.0)).total("to host")
            0
        """
        return sum(row.bytes * row.count for row in self._of(direction))

    def count(self, direction: str | None = None) -> int:
        """Return how many copies there are, in all or in one direction.

        Args:
            direction: "to host" or "to device". None: both.
        """
        return sum(row.count for row in self._of(direction))

    def _of(self, direction: str | None) -> list[HostTransfer]:
        if direction is not None and direction not in DIRECTIONS:
            raise ValueError(f"direction is {direction!r}; allowed are {', '.join(DIRECTIONS)}")
        return [row for row in self.rows if direction in (None, row.direction)]

    def __str__(self) -> str:
        title = f"copies between device and host of one call, per device ({self.source})"
        if not self.rows:
            return f"{title}: none"
        lines = aligned([HEAD, *map(_cells, self.rows)], numbers=(2, 3, 4))
        both = (f"{d} {self.count(d)} x, {human(self.total(d))}" for d in DIRECTIONS)
        table = [title, *lines, "; ".join(both)]
        if any(row.whole for row in self.rows):
            table.append(
                "* whole, along some axis at least: the program does not say how it is split"
            )
        return "\n".join(table)


def _cells(row: HostTransfer) -> tuple[str, ...]:
    array = f"{row.dtype}[{','.join(map(str, row.shape))}]" + "*" * row.whole
    sizes = human(row.bytes), str(row.count), human(row.bytes * row.count)
    return (row.direction, array, *sizes, row.where)


def transfers(program: Any) -> Transfers:
    """Return the copies between device and host of one call of a traced program.

    Args:
        program: `jax.jit(f).trace(…)`, or a closed jaxpr; of a step, `step.trace(batch)`.

    Example:
        >>> import hfjax, jax, jax.numpy as jnp
        >>> from jax.sharding import SingleDeviceSharding
        >>> host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
        >>> program = jax.jit(lambda x: jax.device_put(2 * x, host)).trace(jnp.ones(256))
        >>> hfjax.transfers(program).total("to host")
        1024
    """
    if isinstance(program, jax.stages.Traced):
        return Transfers(_rows(copies(program.jaxpr, *_shardings(program))), "jaxpr")
    if isinstance(program, ClosedJaxpr):
        unknown = [None] * len(program.in_avals), [None] * len(program.out_avals)
        return Transfers(_rows(copies(program, *unknown)), "jaxpr")
    raise ValueError(
        f"program is a {type(program).__name__}; allowed are jax.stages.Traced and a jaxpr: pass "
        "jax.jit(f).trace(*args) (not lowered, not compiled), or jax.make_jaxpr(f)(*args)"
    )


def _shardings(program: Any) -> tuple[list[Any], list[Any]]:
    """Return the shardings of a trace's arguments and results, which jax has no public name for."""
    told = lambda sharding: sharding if isinstance(sharding, jax.sharding.Sharding) else None
    own = [argument.sharding for argument in program._meta_tys_flat]
    given = map(told, program._params["in_shardings"])
    arguments = [of_jit or told(of_array) for of_jit, of_array in zip(given, own, strict=True)]
    return arguments, list(map(told, program._params["out_shardings"]))


def _rows(found: list[Copy]) -> tuple[HostTransfer, ...]:
    return merged(
        HostTransfer(c.kind, c.dtype, c.shape, c.bytes, c.count, c.where, c.whole) for c in found
    )
