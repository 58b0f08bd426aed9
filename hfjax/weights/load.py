"""Stream weights from files into a layout: read rows, then reshard them on the devices.

Each process reads its rows of a tensor (`file_rows`). One compiled program per shape reorders and
casts them, and writes them into the stacked parameter, which is donated; meanwhile the next rows
are read.
"""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from hfjax.distributed.consensus import run_on_all
from hfjax.parallel.offload.host_memory import is_host_sharding, result_shardings, to_host
from hfjax.parallel.param_specs import entries_of
from hfjax.sharding.layout import Layout
from hfjax.utils.paths import Flat, flatten
from hfjax.weights.file_rows import FileRows
from hfjax.weights.redistribute_rows import RowPlan, row_plans
from hfjax.weights.tensor_files import FileTensor
from hfjax.weights.tensor_rules import Rule, Shape, TensorMapping

GROUP_BYTES = 32 << 20  # bytes of files in a group, per process


class TensorGroup(NamedTuple):
    """Tensors that move together: they share a block of a parameter, perhaps for several layers.

    Attributes:
        path: The path of the parameter.
        stack_index: The index of the group in the parameter's first dimensions.
        stack_shape: The sizes of the following dimensions, which number tensors.
        slots: For each rule, its tensors in order.
    """

    path: str
    stack_index: tuple[int, ...]
    stack_shape: tuple[int, ...]
    slots: tuple[tuple[TensorMapping, ...], ...]

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rule of each slot."""
        return tuple(mappings[0].rule for mappings in self.slots)

    @property
    def twins(self) -> tuple[bool, ...]:
        """Whether the files hold each slot's tensor twice."""
        return tuple(mappings[0].twin is not None for mappings in self.slots)


def group_mappings(mappings: Sequence[TensorMapping], max_bytes: int) -> list[TensorGroup]:
    """Return the groups of one parameter, each of at most `max_bytes` if it can be split so."""
    index_ndim = len(mappings[0].index)
    sizes = tuple(1 + max(p.index[i] for p in mappings) for i in range(index_ndim))
    num_bytes = sum(_num_bytes(mapping) for mapping in mappings)
    num_split_dims = (
        index_ndim if _has_mixed_dtypes(mappings) else 0
    )  # rows of one array have one dtype
    while num_split_dims < index_ndim and num_bytes > max_bytes:
        num_bytes //= sizes[num_split_dims]
        num_split_dims += 1
    by_index: dict[tuple[int, ...], dict[Rule, list[TensorMapping]]] = {}
    for mapping in sorted(mappings, key=lambda p: (p.index, p.rule.start)):
        by_index.setdefault(mapping.index[:num_split_dims], {}).setdefault(mapping.rule, []).append(
            mapping
        )
    return [
        TensorGroup(
            mappings[0].path, index, sizes[num_split_dims:], tuple(map(tuple, slots.values()))
        )
        for index, slots in by_index.items()
    ]


def _has_mixed_dtypes(mappings: Sequence[TensorMapping]) -> bool:
    """Return whether tensors of one rule differ in dtype."""
    dtypes = {
        (mapping.rule, mapping.tensor.dtype) for mapping in mappings if mapping.tensor is not None
    }
    return len(dtypes) > len({mapping.rule for mapping in mappings})


def _num_bytes(mapping: TensorMapping) -> int:
    return math.prod(mapping.rule.shape) * (mapping.tensor.dtype.itemsize if mapping.tensor else 4)


def group_by_path(mappings: Sequence[TensorMapping]) -> dict[str, list[TensorMapping]]:
    """Return the tensors of each parameter."""
    groups: dict[str, list[TensorMapping]] = {}
    for mapping in mappings:
        groups.setdefault(mapping.path, []).append(mapping)
    return groups


@dataclass(eq=False)
class WeightStream:
    """Reads tensors into the parameters of a layout; `parameters` runs it."""

    layout: Layout
    mappings: Sequence[TensorMapping]
    read: int = 0  # bytes read by this process

    def __post_init__(self) -> None:
        self.files = FileRows(self.layout.mesh)
        self._shardings = flatten(self.layout.shardings().params)

    @cached_property
    def groups(self) -> list[TensorGroup]:
        """The groups of tensors, in the order of the parameters."""
        max_bytes = GROUP_BYTES * jax.process_count()
        return [
            g
            for mappings in group_by_path(self.mappings).values()
            for g in group_mappings(mappings, max_bytes)
        ]

    def parameters(self) -> Flat:
        """Return all parameters, sharded as in the layout."""
        params: Flat = {}
        group_flags: list[tuple[TensorGroup, Any]] = []
        with ThreadPoolExecutor(1) as executor:
            try:
                future = executor.submit(self.read_local_rows, self.groups[0])
                for i, group in enumerate(self.groups):
                    local_rows, last = future.result(), i + 1 == len(self.groups)
                    if not last:
                        future = executor.submit(self.read_local_rows, self.groups[i + 1])
                    stack, flags = self.assemble(group, local_rows, params.get(group.path))
                    group_flags.append((group, jax.block_until_ready(flags)))
                    sharding = self._shardings[group.path]
                    is_complete = last or self.groups[i + 1].path != group.path
                    is_offloaded = is_complete and is_host_sharding(sharding)
                    params[group.path] = _to_host(stack, sharding) if is_offloaded else stack
            finally:
                self.files.close()
        self.read = run_on_all(self.files.finish)
        check_values(group_flags)
        return params

    def read_local_rows(self, group: TensorGroup) -> list[list[np.ndarray]]:
        """Read and return the local rows of each slot and of the twins."""
        plans = self._row_mover(group).plans
        return [self.files.read(tensors, plans[slot]) for slot, tensors in slot_tensors(group)]

    def assemble(
        self, group: TensorGroup, local_rows: Sequence[Sequence[np.ndarray]], stack: Any
    ) -> Any:
        """Return a parameter with the rows written into it, and the flags of `check_values`."""
        mover = self._row_mover(group)
        slots = [slot for slot, _ in slot_tensors(group)]
        row_arrays = [
            self.files.to_devices(device_rows, mover.plans[slot])
            for slot, device_rows in zip(slots, local_rows, strict=True)
        ]
        if stack is None and group.stack_index:
            stack = mover.zeros()
        stack_or_empty = () if stack is None else (stack,)
        return mover.program(stack_or_empty, np.array(group.stack_index, np.int32), row_arrays)

    def _row_mover(self, group: TensorGroup) -> "RowMover":
        spec = self._shardings[group.path].spec
        shape = tuple(self.layout.arrays[group.path].shape)
        dtype = np.dtype(self.layout.template.parameters[group.path].dtype)
        sharding = NamedSharding(self.layout.mesh, P(*spec))
        return row_mover(
            strip_names(group.rules), group.twins, group.stack_shape, shape, dtype, sharding
        )


def strip_names(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return rules without names, so that equal ones share a program."""
    blank = {"theirs": "", "ours": "", "layers": None, "twin": None, "transform": ""}
    return tuple(replace(rule, **blank) for rule in rules)


def slot_tensors(group: TensorGroup) -> Iterator[tuple[int, list[FileTensor]]]:
    """Yield the slot number and tensors of each slot, then those of the twins."""
    for slot, mappings in enumerate(group.slots):
        yield slot, [p.tensor for p in mappings if p.tensor is not None]
    for slot, mappings in enumerate(group.slots):
        if group.twins[slot]:
            yield slot, [p.twin for p in mappings if p.twin is not None]


def check_values(group_flags: Sequence[tuple[TensorGroup, Any]]) -> None:
    """Refuse weights that are not finite, and twin tensors that differ."""
    for group, flags in group_flags:
        finite, twins_equal = (np.asarray(x) for x in flags)
        for mappings, slot_finite in zip(group.slots, finite, strict=True):
            for mapping, ok in zip(mappings, slot_finite.reshape(-1), strict=True):
                if not ok:
                    raise ValueError(
                        f"{mapping.name} holds numbers that are not finite (NaN or infinite): "
                        "nothing can be trained from it. Get the file again, or mend the tensor."
                    )
        twins = [p[0] for p, twin in zip(group.slots, group.twins, strict=True) if twin]
        for mapping, is_equal in zip(twins, twins_equal, strict=True):
            if not is_equal:
                raise ValueError(
                    f"config.json says tie_word_embeddings, and {mapping.rule.twin} differs from "
                    f"{mapping.name}: which one is meant? Say tie_word_embeddings: false in "
                    f"config.json to train both, or take {mapping.rule.twin} out of the files."
                )


def _to_host(x: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    return jax.jit(to_host, out_shardings=result_shardings(sharding))(x)


@dataclass(frozen=True)
class RowMover:
    """The program that moves groups of one shape.

    Attributes:
        rules: The rules of its slots.
        twins: Which slots the files hold twice.
        stack_shape: The sizes of the dimensions that number tensors in a group.
        shape: The shape of the parameter.
        dtype: The dtype of the parameter.
        sharding: The sharding of the parameter.
    """

    rules: tuple[Rule, ...]
    twins: tuple[bool, ...]
    stack_shape: Shape
    shape: Shape
    dtype: np.dtype
    sharding: NamedSharding

    @property
    def index_ndim(self) -> int:
        """The number of dimensions of a group's index."""
        return len(self.shape) - len(self.stack_shape) - len(self.rules[0].order)

    @cached_property
    def plans(self) -> list[RowPlan]:
        """The row plan of each slot."""
        entries = entries_of(self.sharding.spec, len(self.shape))[self.index_ndim :]
        shape = self.shape[self.index_ndim + len(self.stack_shape) :]
        mesh = self.sharding.mesh
        assert isinstance(mesh, Mesh)
        return row_plans(mesh, self.rules, self.stack_shape, entries, shape)

    @cached_property
    def block_spec(self) -> P:
        """The partition spec of a block."""
        return P(
            *(e or None for e in entries_of(self.sharding.spec, len(self.shape))[self.index_ndim :])
        )

    def zeros(self) -> jax.Array:
        """Return a parameter of zeros, to write blocks into."""
        return jax.jit(lambda: jnp.zeros(self.shape, self.dtype), out_shardings=self.sharding)()

    @cached_property
    def program(self) -> jax.stages.Wrapped:
        """The program (stack or nothing, index, rows) -> (stack, flags of `check_values`)."""
        mesh, spec = self.sharding.mesh, self.sharding.spec
        slots = [*range(len(self.rules)), *(i for i, twin in enumerate(self.twins) if twin)]
        row_specs = [self.plans[slot].spec for slot in slots]

        def assemble(
            stack_or_empty: tuple, index: jax.Array, row_arrays: Sequence[jax.Array]
        ) -> Any:
            specs: Any = {
                "in_specs": ((spec,) * len(stack_or_empty), P(), row_specs),
                "out_specs": (spec if stack_or_empty else self.block_spec, (P(), P())),
            }
            return jax.shard_map(self._assemble_local, mesh=mesh, check_vma=False, **specs)(
                stack_or_empty, index, row_arrays
            )

        return jax.jit(assemble, donate_argnums=0)

    def _assemble_local(
        self, stack_or_empty: tuple, index: jax.Array, row_arrays: Sequence[jax.Array]
    ) -> Any:
        rows, twin_rows = row_arrays[: len(self.plans)], row_arrays[len(self.plans) :]
        finite = [self.reduce_all(jnp.isfinite(x), len(self.stack_shape)) for x in rows]
        twins = [x for x, twin in zip(rows, self.twins, strict=True) if twin]
        twins_equal = [self.reduce_all(x == y, 0) for x, y in zip(twins, twin_rows, strict=True)]
        block = self._concat_by_rule(
            [plan.rows_to_block(x) for plan, x in zip(self.plans, rows, strict=True)]
        )
        block = self.plans[0].slice_local(block).astype(self.dtype)
        flags = jnp.stack(finite), jnp.array(twins_equal)
        return (
            self._write_block(stack_or_empty[0], block, index) if stack_or_empty else block
        ), flags

    def reduce_all(self, flags: jax.Array, num_kept_dims: int) -> jax.Array:
        """Return whether all flags of each tensor are set, on all devices."""
        local_flags = flags.all(tuple(range(num_kept_dims, flags.ndim))).astype(jnp.int32)
        return lax.pmin(local_flags, self.sharding.mesh.axis_names) > 0

    def _concat_by_rule(self, blocks: Sequence[jax.Array]) -> jax.Array:
        """Return the blocks of several tensors as the one that they share."""
        concat_dim = self.rules[0].concat_dim
        return (
            blocks[0]
            if concat_dim is None
            else jnp.concatenate(blocks, len(self.stack_shape) + concat_dim)
        )

    def _write_block(self, stack: jax.Array, block: jax.Array, index: jax.Array) -> jax.Array:
        """Return a stack with a block at an index of its first dimensions, which may be sharded."""
        start_index, is_local = local_index(self.sharding, stack.shape[: self.index_ndim], index)
        start = [*start_index, *[0] * block.ndim]
        new = block.reshape(*[1] * self.index_ndim, *block.shape)
        if is_local is not None:
            new = jnp.where(is_local, new, lax.dynamic_slice(stack, start, new.shape))
        return lax.dynamic_update_slice(stack, new, start)


@cache
def row_mover(*fields: Any) -> RowMover:
    """Return a cached mover with these fields, so that each shape compiles once."""
    return RowMover(*fields)


def local_index(sharding: NamedSharding, sizes: Shape, index: jax.Array) -> tuple[list[Any], Any]:
    """Return an index within this device's shard of a stack, and whether it lies in it.

    The second is None if the first dimensions are not sharded.
    """
    indices, is_local = [], None
    for axes, size, i in zip(entries_of(sharding.spec, len(sizes)), sizes, index, strict=False):
        if math.prod(sharding.mesh.shape[a] for a in axes) > 1:
            i = i - lax.axis_index(axes) * size
            is_inside = (0 <= i) & (i < size)
            is_local = is_inside if is_local is None else is_local & is_inside
            i = jnp.clip(i, 0, size - 1)
        indices.append(i)
    return indices, is_local
