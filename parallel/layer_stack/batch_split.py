"""Layers that run on parts of the rows, one after the other (`split_rows`).

The collectives of a layer over tensor wait for its products, and its products for them. Those of
two parts of the rows do not wait for each other: while the sums of one part are under way, the
products of the other run (Domino, Wang et al., 2024). Between the layers the parts stay apart, so
that the end of a layer hides its collectives as well. The layer's parameters are gathered once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from hfjax.parallel.spmd.global_batch import OnRows, cut_of
from hfjax.parallel.spmd.partition_context import Join
from hfjax.parallel.spmd.placements import ROWS, Part, Side, is_value, kind_of
from hfjax.utils.paths import path_of


@partial(jax.tree_util.register_dataclass, data_fields=["parts"], meta_fields=["rows", "in_order"])
@dataclass(frozen=True)
class RowParts:
    """What goes from layer to layer, in parts of its rows."""

    parts: tuple[Any, ...]
    rows: int  # of each part
    in_order: bool  # nothing of a part may run before what the part before it has done

    @classmethod
    def of(cls, x: Any, rows: int, count: int, again: Callable, in_order: bool) -> "RowParts":
        """Return what `embed` makes of a batch of so many rows here, in parts of them.

        Refused is what does not begin with the rows, or does not divide. `again(count)` is what
        `embed` makes of the first part.
        """
        _check_begins(x, rows, f"split_rows={count}")
        if rows % count:
            fits = [n for n in range(2, rows + 1) if rows % n == 0]
            raise ValueError(
                f"split_rows={count}: a device has {rows} rows in a microbatch, which do not "
                f"divide: {f'{fits} would do' if fits else 'leave it out'}. Or take more rows."
            )
        _check_chance(again, x, rows, count)
        cut = lambda i: jax.tree.map(lambda x: part_of(x, i, count), x)
        return cls(tuple(map(cut, range(count))), rows // count, in_order)

    def whole(self) -> Any:
        """Return all rows together; refuse what the last layer returns otherwise."""
        who = f"split_rows={len(self.parts)}, after the last layer"
        _check_begins(self.parts[0], self.rows, who, "a part has")
        return jax.tree.map(lambda *x: jnp.concatenate(x), *self.parts)


def _check_begins(x: Any, rows: int, who: str, has: str = "a device has") -> None:
    """Refuse arrays whose first size is not the number of rows."""
    leaves = jax.tree.leaves(x, is_leaf=is_value)
    on_devices = any(map(is_value, leaves))  # which have rows each
    elsewhere = lambda v: on_devices and kind_of(v) != ROWS
    leaves = [(v.x if is_value(v) else v, elsewhere(v)) for v in leaves]
    if wrong := [leaf for leaf, off in leaves if off or jnp.shape(leaf)[:1] != (rows,)]:
        raise ValueError(
            f"{who}: what goes from layer to layer is not all of rows: {_shapes(wrong)} where "
            f"{has} {rows} rows in a microbatch. {ROWS_FIRST}"
        )


def _check_chance(embed: Callable, x: Any, rows: int, count: int) -> None:
    """Refuse an array that begins with something else, of which there are as many as rows.

    The size alone does not tell where an array has it twice, or a multiple of it (rows and heads in
    one). `embed` of the first part does: what begins with the rows has fewer of them.
    """
    again = lambda leaf: any(n and n % rows == 0 for n in jnp.shape(leaf)[1:])
    if not any(map(again, jax.tree.leaves(x))):
        return

    who = f"split_rows={count}, of {rows} rows in a microbatch"
    try:
        found = jax.eval_shape(partial(embed, count))
    except Exception as error:
        raise ValueError(
            f"{who}: arrays of {_shapes(jax.tree.leaves(x))} have this size, or a multiple, twice, "
            f"and embed of {rows // count} rows fails ({type(error).__name__}: {error}), so hfjax "
            "cannot tell which dimension has the rows. Take another number of rows, or leave "
            "split_rows out."
        ) from error
    _check_begins(found, rows // count, f"{who}, and of {rows // count} to tell which they are")


def _shapes(leaves: list) -> str:
    return ", ".join(str(list(jnp.shape(leaf))) for leaf in leaves)


ROWS_FIRST = "Let each array begin with the rows of the batch, or leave split_rows out."


def part_of(x: jax.Array, number: int, count: int) -> jax.Array:
    """Return one of so many parts of the rows with which an array begins."""
    rows = x.shape[0] // count
    return lax.slice_in_dim(x, number * rows, (number + 1) * rows)


def by_parts(
    run: Callable, rows: OnRows, name: str, x: Any, variables: nnx.State | None
) -> tuple[Any, Any]:
    """Return run(rows, x, variables), a pair of the result and of what was written; part by part.

    Args:
        run: The layer, on rows as the first argument says.
        rows: How a layer sees the rows of all devices.
        name: That of the layer.
        x: What enters it, all rows together or a `RowParts`.
        variables: A state; what has something for each row is cut as the rows are.
    """
    if not isinstance(x, RowParts):
        return run(rows, x, variables)
    done: list[Any] = []
    written: Any = None
    for number, part in enumerate(x.parts):
        if done and x.in_order:
            part, done[-1] = lax.optimization_barrier((part, done[-1]))
        y, written = run(rows, part, _of_part(variables, number, len(x.parts)))
        _check_unwritten(written, len(x.parts))
        done.append(y)
    if rows.side.size == 1:
        rows = _as_if_devices_had_the_parts(rows, len(x.parts))
        part = jax.tree.map(Part, x.parts[0])
        try_it = lambda: run(rows, part, _of_part(variables, 0, len(x.parts)))
        jax.make_jaxpr(try_it, axis_env=[("part", len(x.parts))])()
    _check_apart(rows.told.get(name, ()), len(x.parts))
    return replace(x, parts=tuple(done)), written


def _as_if_devices_had_the_parts(rows: OnRows, count: int) -> OnRows:
    side, inner = Side(("part",), count), rows.inner
    if inner is not None:
        inner = replace(inner, sides=tuple(replace(s, blocks=count) for s in inner.sides))
    return OnRows(side, rows.in_parts, inner)


def _check_apart(joins: Sequence[Join], count: int) -> None:
    """Refuse a layer in which rows meet, or are numbered: a part has not all of them."""
    if found := [join for join in joins if join.how != "draw"]:
        raise ValueError(
            f"split_rows={count}: {found[0].line}: {found[0].operation}: a layer joins rows of the "
            "batch, or counts them, and sees a part of them at a time. Leave split_rows out."
        )


def _of_part(variables: nnx.State | None, number: int, count: int) -> nnx.State | None:
    """Return what a part of the rows reads: its rows, and random keys of its own."""

    if variables is None:
        return None
    mine = lambda v: v.replace(of_part(v, v.get_raw_value(), number, count))
    return nnx.from_flat_state([(keys, mine(v)) for keys, v in nnx.to_flat_state(variables)])


def of_part(variable: Any, value: jax.Array, number: int, count: int) -> jax.Array:
    """Return what a variable that holds this value holds for a part of the rows."""
    if isinstance(variable, nnx.Variable) and cut_of(variable.replace(value)):
        return part_of(value, number, count)
    if number and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.fold_in(value, number)
    return value


def _check_unwritten(written: nnx.State | None, count: int) -> None:
    """Refuse to write what follows from some of the rows; counts of random numbers may be."""
    flat = [] if written is None else nnx.to_flat_state(written)
    if names := [path_of(keys) for keys, v in flat if not isinstance(v, nnx.RngState)]:
        raise ValueError(
            f"split_rows={count}: a layer writes to {', '.join(names)}: {SOME_ROWS}. "
            f"{NO_STATISTICS_OF_PARTS}"
        )


SOME_ROWS = "a layer sees only a part of the rows at a time"
NO_STATISTICS_OF_PARTS = "Leave split_rows out, or normalise without running statistics."
