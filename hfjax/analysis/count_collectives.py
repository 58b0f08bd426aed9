"""Counts every collective that one call of a program performs, with loops multiplied out.

Use `jax.jit(f).lower(…)` for the collectives that you wrote yourself in shard_map, and `.compile()`
for the GPU, or for H200s without one, for those that the partitioner inserted (such as for the axis
tensor).

What the numbers mean, and where they mislead:

- A `Lowered` program has only what was written: the partitioner's collectives are not in it yet.
  Its arrays are local over the manual axes of a shard_map and still global over the automatic
  ones, so bytes are not divided by, say, a tensor axis.
- A `Compiled` program is what runs: XLA may have combined, split, moved out of a loop or dropped
  collectives. For the CPU it computes in float32 what was bfloat16, and sends it so. Beside an
  automatic axis it first gathers over that axis what a manual all_gather, psum_scatter or
  all_to_all sends, and sends the gathered array; a nested shard_map over that axis prevents it.
- A permute that XLA breaks into sends and receives (`xla_gpu_enable_pipelined_p2p`) counts once per
  direction of its ring.
- Device ids are positions in the row-major order of the mesh's devices.
- What a custom call or a Pallas kernel sends by itself is not seen, nor are ragged all-to-alls and
  `jax.lax.pbroadcast`.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np

from hfjax.analysis import hlo, stablehlo
from hfjax.analysis.hlo import KINDS, Groups, Transfer
from hfjax.utils.tables import Entries, align, human, sum_counts

Sizes = Mapping[str, int]  # of a mesh's axes


@dataclasses.dataclass(frozen=True)
class Collective:
    """One entry: `count` calls of one kind of collective with one payload, per device.

    `bytes` is the payload of one call on one device, of the larger side: an all-gather's output, a
    reduce-scatter's input, the buffer otherwise; `shape` and `dtype` are of that side. `axes` are
    the mesh axes along which devices communicate, ("?",) if none fit; `devices` is the size of a
    group. `where` names loops and branches, "" outside of any; "by its condition" marks a loop that
    XLA did not count, taken to count up from 0 by 1.
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    count: int
    where: str
    devices: int

    @property
    def moved(self) -> int:
        """Return the bytes that one device sends in all these calls, by a ring, rounded up."""
        if self.kind == "permute":
            return self.bytes * self.count
        rounds = (2 if self.kind == "all-reduce" else 1) * (self.devices - 1)
        return -(-self.bytes * self.count * rounds // self.devices)


class Collectives(Entries[Collective]):
    """The collectives of one call of a program, most bytes first; `print` shows a table.

    It iterates over its `rows`, which are `Collective`s; `source` says what was read.

    Example:
        >>> import hfjax, jax
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = hfjax.make_mesh(data=8)
        >>> add = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"),
        ...                     out_specs=P())
        >>> found = hfjax.collectives(jax.jit(add).lower(jax.ShapeDtypeStruct((64,), "float32")))
        >>> found.count("all-reduce"), found.total("all-reduce", "data"), found.moved
        (1, 32, 56)
    """

    def total(self, kind: str | None = None, axes: str | Sequence[str] | None = None) -> int:
        """Return the payload bytes of one device, of all entries or of one kind, along these axes.

        Args:
            kind: all-gather, reduce-scatter, all-reduce, permute or all-to-all. None: all of them.
            axes: The mesh axis, or axes, along which devices communicate; exactly those. None: any.

        Example:
            >>> import hfjax, jax, jax.numpy as jnp
            >>> found = hfjax.collectives(jax.jit(jnp.sin).lower(1.0))
            >>> found.total("all-reduce", axes=("data", "fsdp"))
            0
        """
        return sum(entry.bytes * entry.count for entry in self._select(kind, axes))

    def count(self, kind: str | None = None, axes: str | Sequence[str] | None = None) -> int:
        """Return how many collectives run, in all or of one kind, along exactly these axes.

        Args:
            kind: all-gather, reduce-scatter, all-reduce, permute or all-to-all. None: all of them.
            axes: The mesh axis, or axes, along which devices communicate; exactly those. None: any.
        """
        return sum(entry.count for entry in self._select(kind, axes))

    @property
    def moved(self) -> int:
        """The bytes that one device sends under ring algorithms, rounded up entry by entry."""
        return sum(entry.moved for entry in self.rows)

    def _select(self, kind, axes) -> list[Collective]:
        if kind is not None and kind not in KINDS.values():
            raise ValueError(f"kind is {kind!r}; allowed are {', '.join(KINDS.values())}")
        axis_set = None if axes is None else {axes} if isinstance(axes, str) else set(axes)
        return [r for r in self.rows if kind in (None, r.kind) and axis_set in (None, set(r.axes))]

    def __str__(self) -> str:
        title = f"collectives of one call, per device ({self.source})"
        if not self.rows:
            return f"{title}: none"
        head = ("kind", "axes", "payload", "bytes", "count", "total", "where")
        lines = align([head, *map(_cells, self.rows)], numbers=(3, 4, 5))
        sums = f"{self.count()} calls, payload {human(self.total())}, moved {human(self.moved)}"
        return "\n".join([title, *lines, sums])


def _cells(entry: Collective) -> tuple[str, ...]:
    payload = f"{entry.dtype}[{','.join(map(str, entry.shape))}]"
    sizes = human(entry.bytes), str(entry.count), human(entry.bytes * entry.count)
    return (entry.kind, ",".join(entry.axes), payload, *sizes, entry.where)


def collectives(program: jax.stages.Lowered | jax.stages.Compiled) -> Collectives:
    """Return the collectives of one call of `jax.jit(f).lower(…)` or of `….compile()`.

    See the module's docstring for how far to trust either.

    Args:
        program: The lowered program for the collectives that are written in the source, or the
            one compiled for the GPU for those that the partitioner inserted as well.

    Example:
        >>> import hfjax, jax.numpy as jnp, optax
        >>> model = lambda rngs: {"w": jnp.ones((64, 8))}
        >>> fsdp = hfjax.FSDP.edit(replicate_below=0)
        >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(fsdp=8), fsdp)
        >>> step = hfjax.train_step(layout, lambda params, x: ((x @ params["w"]) ** 2).mean())
        >>> found = hfjax.collectives(step.lower(jnp.ones((8, 64))))
        >>> found.total("all-gather", "fsdp"), found.total("reduce-scatter", "fsdp")
        (2048, 2048)
    """
    if isinstance(program, jax.stages.Lowered):
        module = stablehlo.Module(program.compiler_ir("stablehlo"))
        return Collectives(
            _merge_transfers(module.transfers(), module.meshes.values()), "stablehlo"
        )
    if isinstance(program, jax.stages.Compiled):
        transfers = hlo.transfers(program.as_text() or "")
        meshes, platform = _meshes_and_platform(program)
        return Collectives(_merge_transfers(transfers, meshes), f"compiled for {platform}")
    raise ValueError(
        f"program is a {type(program).__name__}; allowed are jax.stages.Lowered and "
        "jax.stages.Compiled: pass jax.jit(f).lower(*args), or that with .compile()"
    )


def _meshes_and_platform(program: jax.stages.Compiled) -> tuple[list[Sizes], str]:
    """Returns the first mesh of several devices among the shardings, and the platform's name."""
    shardings = jax.tree.leaves((program.input_shardings, program.output_shardings))
    platforms = [d.platform for s in shardings for d in list(s.device_set)[:1]]
    named = [s for s in shardings if isinstance(s, jax.sharding.NamedSharding)]
    several: list[Sizes] = [dict(s.mesh.shape) for s in named if s.mesh.size > 1]
    return several[:1], str((platforms or [jax.default_backend()])[0])


# --- from device groups to entries ----------------------------------------------------------------


def _merge_transfers(
    transfers: Iterable[Transfer], meshes: Iterable[Sizes]
) -> tuple[Collective, ...]:
    """Returns entries with equal ones merged, most bytes first."""
    meshes = list(meshes)
    name = functools.cache(lambda permute, groups: _mesh_axes(permute, groups, meshes))

    def to_collective(t: Transfer) -> Collective:
        axes, devices = name(t.kind == "permute", t.groups)
        return Collective(t.kind, axes, t.dtype, t.shape, t.bytes, t.count, t.where, devices)

    return sum_counts(map(to_collective, transfers))


def _mesh_axes(permute: bool, groups: Groups, meshes: list[Sizes]) -> tuple[tuple[str, ...], int]:
    """Returns the axes along which the members of each group differ, and the size of a group.

    A permute may leave devices out; of every other kind the groups are all of those that the axes
    form, or parts of those that one axis forms.
    """
    for mesh in meshes:
        if max(map(max, groups)) >= math.prod(mesh.values()):
            continue
        coordinates = dict(
            zip(mesh, np.unravel_index(_pad_groups(groups).T, tuple(mesh.values())), strict=True)
        )
        axes = tuple(axis for axis, coords in coordinates.items() if (coords != coords[:1]).any())
        axis_groups = hlo.mesh_groups(mesh, [(axis, 1, mesh[axis]) for axis in axes])
        group_sets = set(map(frozenset, groups))
        if permute or set(map(frozenset, axis_groups)) == group_sets:
            return axes, len(axis_groups[0])
        if len(axes) == 1 and all(
            any(subset <= set(group) for group in axis_groups) for subset in group_sets
        ):
            return axes, max(map(len, groups))  # parts of one axis
    return ("?",), len({d for g in groups for d in g}) if permute else max(map(len, groups))


def _pad_groups(groups: Groups) -> np.ndarray:
    """Returns the groups as one array, short ones padded with their first member."""
    longest = max(map(len, groups))
    return np.array([group + group[:1] * (longest - len(group)) for group in groups])
