"""Counts what each link carries where a program sends by permutes: from which device to which."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from hfjax.analysis import stablehlo


@dataclass(frozen=True)
class Links:
    """What the permutes of one call of a program send.

    Attributes:
        between: Bytes by (source, target), positions in the row-major order of the mesh's devices.
        steps: How many permutes run: so many steps, if they run one after another.

    Example:
        >>> import hfjax, jax, jax.numpy as jnp
        >>> from baselines.links import links
        >>> from jax.sharding import PartitionSpec as P
        >>> send = jax.shard_map(lambda x: jax.lax.ppermute(x, "data", [(0, 1), (1, 2)]),
        ...     mesh=hfjax.make_mesh(data=8), in_specs=P("data"), out_specs=P("data"))
        >>> found = links(jax.jit(send).lower(jnp.zeros(8)))
        >>> found.between, found.sent(0), found.busiest(), found.busiest(node=2), found.steps
        ({(0, 1): 4, (1, 2): 4}, 4, 4, 4, 1)
    """

    between: Mapping[tuple[int, int], int]
    steps: int

    def sent(self, device: int) -> int:
        """Return the bytes that one device sends."""
        return sum(size for (source, _), size in self.between.items() if source == device)

    def received(self, device: int) -> int:
        """Return the bytes that one device receives."""
        return sum(size for (_, target), size in self.between.items() if target == device)

    def busiest(self, node: int = 1) -> int:
        """Return the bytes through the busiest link, in its busier direction.

        Args:
            node: How many neighbouring devices share one link to all others. 1: each has its own.
        """
        carried: Counter[tuple[str, int]] = Counter()
        for (source, target), size in self.between.items():
            if source // node != target // node:
                carried["out of", source // node] += size
                carried["into", target // node] += size
        return max(carried.values(), default=0)


def links(program: jax.stages.Lowered) -> Links:
    """Return what `jax.jit(f).lower(…)` sends by permutes, loops multiplied out.

    As in `hfjax.collectives`, a loop of unknown length counts once, and of branches the heaviest.

    Args:
        program: A program that sends in no other way: the links of an all-reduce are its library's
            choice.
    """
    if not isinstance(program, jax.stages.Lowered):
        raise ValueError(
            f"program is a {type(program).__name__}; a jax.stages.Lowered is expected: pass "
            "jax.jit(f).lower(*args)"
        )
    found = stablehlo.Module(program.compiler_ir("stablehlo")).transfers()
    others = sorted({transfer.kind for transfer in found if transfer.kind != "permute"})
    if others:
        raise ValueError(
            f"the program has {', '.join(others)} beside permutes: which links those take is not "
            "in the program. Count them with hfjax.collectives, or write them with "
            "jax.lax.ppermute (examples/baselines has some)."
        )
    between: Counter[tuple[int, int]] = Counter()
    for transfer in found:
        for source, target in transfer.groups:
            between[source, target] += transfer.bytes * transfer.count
    return Links(dict(between), sum(transfer.count for transfer in found))
