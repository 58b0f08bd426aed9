"""Rules of equations that read or write at indices."""

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn

from hfjax.parallel.spmd.partition_context import Scope, aval_of
from hfjax.parallel.spmd.placements import ROWS, Cut, Made, Part, Sum
from hfjax.parallel.spmd.rules.views import is_every_row

Values = Sequence[Any]


def dynamic_slice(scope: Scope, equation: JaxprEqn, values: Values) -> Values | None:
    """Slice other dimensions than the split one."""
    x, *starts = values
    sizes = equation.params["slice_sizes"]
    if not isinstance(x, Part) or sizes[x.cut.dim] != scope.shape(x)[x.cut.dim]:
        return None
    starts = _from_zero([scope.whole(s) for s in starts], x.cut.dim)
    local = scope.side.local(sizes, x.cut)
    return scope.parts(x.cut, equation, [x.x, *starts], slice_sizes=local)


def dynamic_update_slice(scope: Scope, equation: JaxprEqn, values: Values) -> Values | None:
    """Write whole lengths of the split dimension."""
    x, update, *starts = values
    cut = next((v.cut for v in (x, update) if isinstance(v, Part)), None)
    if cut is None or scope.shape(x)[cut.dim] != scope.shape(update)[cut.dim]:
        return None
    starts = _from_zero([scope.whole(s) for s in starts], cut.dim)
    here = [scope.part(x, cut), scope.part(update, cut), *starts]
    return scope.parts(cut, equation, here)


def _from_zero(starts: list, dim: int) -> list:
    """Return indices of which one has to be 0, since all of its dimension is taken."""
    return [*starts[:dim], starts[dim] * 0, *starts[dim + 1 :]]


def gather(scope: Scope, equation: JaxprEqn, values: Values) -> Values | None:
    """Read a table at indices of rows, whole rows of what is split, or its own row for each."""
    x, indices = values
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    picked = set(numbers.collapsed_slice_dims) | set(numbers.operand_batching_dims)
    kept = [d for d in range(len(sizes)) if d not in picked]
    out_dims = [
        d for d in range(len(aval_of(equation.outvars[0]).shape)) if d not in numbers.offset_dims
    ]
    if isinstance(x, Part):
        cut = x.cut
        if cut.dim in kept:
            if sizes[cut.dim] != scope.shape(x)[cut.dim] or isinstance(indices, Part):
                return None
            at = cut.moved(numbers.offset_dims[kept.index(cut.dim)])
            local = scope.side.local(sizes, cut)
            here = [x.x, scope.whole(indices)]
            return scope.parts(at, equation, here, slice_sizes=local)
        if cut.dim in numbers.operand_batching_dims:
            which = numbers.operand_batching_dims.index(cut.dim)
            at = cut.moved(numbers.start_indices_batching_dims[which])
            here = [x.x, scope.part(indices, at)]
            return scope.parts(at.moved(out_dims[at.dim]), equation, here)
        own = _own_row(scope, scope.shape(x)[cut.dim], cut, indices, numbers.start_index_map)
        if own is None:
            return None
        at = own.cut.moved(out_dims[own.cut.dim])
        return scope.parts(at, equation, [x.x, own.x])
    if not isinstance(indices, Part) or indices.cut.dim >= len(out_dims):
        return None
    cut = indices.cut
    table = scope.whole(x)
    if cut.dim in numbers.start_indices_batching_dims:
        which = numbers.start_indices_batching_dims.index(cut.dim)
        table = scope.part(x, cut.moved(numbers.operand_batching_dims[which]))
    return scope.parts(cut.moved(out_dims[cut.dim]), equation, [table, indices.x])


def _own_row(
    scope: Scope, rows: int, cut: Cut, indices: Any, index_map: Sequence[int]
) -> Part | None:
    """Return indices that count the rows that are here, if each row reads itself.

    `x[jnp.arange(rows), labels]` is: the first of the indices that it joins is 0, 1, 2 …
    """
    _, pieces = scope.pieces.get(id(indices), (None, ()))
    if isinstance(indices, Made) and scope.side.divides(indices.shape, ROWS):
        indices = Part(scope.part(indices, ROWS))
    if not isinstance(indices, Part) or len(pieces) != len(index_map) or cut.dim not in index_map:
        return None
    column = index_map.index(cut.dim)
    numbers = pieces[column]
    fits = cut.outer == indices.cut.outer == 1 and scope.shape(numbers)[0] == rows
    if not fits or indices.cut.dim != 0 or not is_every_row(scope, numbers):
        return None
    place = lax.broadcasted_iota(indices.x.dtype, indices.x.shape[:-1], 0)
    return Part(indices.x.at[..., column].set(place), indices.cut)


def scatter(scope: Scope, equation: JaxprEqn, values: Values) -> Values | None:
    """Write whole rows of what is split, each row its own, or add rows up."""
    x, indices, updates = values
    numbers = equation.params["dimension_numbers"]
    rows = [d for d in range(len(scope.shape(updates))) if d not in numbers.update_window_dims]
    written = _written_rows(scope, equation, values, rows)
    if written is not None or isinstance(x, Part) or equation.primitive.name != "scatter-add":
        return written
    inner = len(scope.shape(indices)) - 1  # of the indices, the dimension of an index
    cut = indices.cut if isinstance(indices, Part) else None
    if cut is None and isinstance(updates, Part) and updates.cut.dim in rows:
        cut = updates.cut.moved(rows.index(updates.cut.dim))
    if cut is None or cut.dim >= inner or cut.dim in numbers.scatter_indices_batching_dims:
        return None
    here = [scope.part(indices, cut), scope.part(updates, cut.moved(rows[cut.dim]))]
    return [Sum(x) for x in scope.bind(equation, [scope.sum(x), *here])]


def _written_rows(
    scope: Scope, equation: JaxprEqn, values: Values, rows: Sequence[int]
) -> Values | None:
    """Write to what is split, or what may be split as the updates are; `rows`: not of a window."""
    x, indices, updates = values
    numbers, shape = equation.params["dimension_numbers"], scope.shape(x)
    picked = set(numbers.inserted_window_dims) | set(numbers.operand_batching_dims)
    kept = [d for d in range(len(shape)) if d not in picked]

    def written(cut: Cut, at: Cut, of_indices: Any) -> Values:
        here = [scope.part(x, cut), of_indices, scope.part(updates, at)]
        return scope.parts(cut, equation, here)

    first = [x.cut] if isinstance(x, Part) else _beside(indices, numbers)
    for cut in first + _entered(scope, updates, numbers, kept, shape):
        if cut.dim in kept and not isinstance(indices, Part):
            at = numbers.update_window_dims[kept.index(cut.dim)]
            if scope.shape(updates)[at] == shape[cut.dim]:
                return written(cut, cut.moved(at), scope.whole(indices))
        if cut.dim in numbers.operand_batching_dims:
            which = numbers.operand_batching_dims.index(cut.dim)
            at = cut.moved(numbers.scatter_indices_batching_dims[which])
            return written(cut, at.moved(rows[at.dim]), scope.part(indices, at))
    dims = numbers.scatter_dims_to_operand_dims
    for cut in first or map(Cut, dims):
        own = _own_row(scope, shape[cut.dim], cut, indices, dims)
        if own is not None and scope.side.divides(shape, cut):
            return written(cut, own.cut.moved(rows[own.cut.dim]), own.x)
    return None


def _beside(indices: Any, numbers: Any) -> list[Cut]:
    """Return the cut that what is written to takes from indices, each of which has its own."""
    batching = numbers.scatter_indices_batching_dims
    if not isinstance(indices, Part) or indices.cut.dim not in batching:
        return []
    return [indices.cut.moved(numbers.operand_batching_dims[batching.index(indices.cut.dim)])]


def _entered(scope: Scope, updates: Any, numbers: Any, kept: list, shape: tuple) -> list[Cut]:
    """Return the cut that what is written to takes from what is written, if it is whole there."""
    if not isinstance(updates, Part) or updates.cut.dim not in numbers.update_window_dims:
        return []
    dim = kept[numbers.update_window_dims.index(updates.cut.dim)]
    return [updates.cut.moved(dim)] if scope.shape(updates)[updates.cut.dim] == shape[dim] else []


RULES: dict[str, Callable] = {
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "gather": gather,
    **dict.fromkeys(
        "scatter scatter-add scatter-mul scatter-min scatter-max scatter-sub".split(), scatter
    ),
}
