"""Which dimensions of a program's arrays are one and the same: read from equations, none is run.

Where a dimension of one array meets that of another (an addition, a contraction), both are joined.
A reshape divides a dimension into parts. An array that is split along a dimension can stay so
through all that is joined with it, unless an equation works along it: a norm, a slice, a softmax.

Only what is trained counts: any device can take its part of a mask, or of the batch.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from hfjax.parallel.jaxprs.primitives import (
    ANNOTATIONS,
    CALLS,
    COPIES,
    CUMULATIVE,
    POINTWISE,
    REDUCTIONS,
    RESHAPES,
)
from hfjax.parallel.jaxprs.walk import (
    bodies_of,
    called_body,
    interpret_jaxpr,
    match_operands,
    name_of,
    scan_counts,
)

Parts = tuple[int, ...]  # of a dimension, from major to minor; () has size 1
Dims = tuple[Parts, ...]

_SAME_RANK = CUMULATIVE.union(
    """concatenate cummax cummin cumprod dynamic_slice dynamic_update_slice pad reduce_window_max
    reduce_window_sum rev slice sort split tile top_k""".split()
)


@dataclass(frozen=True)
class Value:
    """What is known of an array.

    Attributes:
        dims: The parts of each dimension; None: no parameter has a gradient through it.
        of_batch: Whether it depends on the batch.
    """

    dims: Dims | None
    of_batch: bool

    @property
    def is_weight(self) -> bool:
        """Whether it is made of parameters alone."""
        return self.dims is not None and not self.of_batch


NUMBER = Value(None, False)  # one that is written in a program


@dataclass(frozen=True)
class Use:
    """A dimension in one equation.

    Attributes:
        parts: Those of the dimension.
        line: The equation, and its line in the user's program.
        cost: The number of elements that devices sum, if they split the dimension.
    """

    parts: Parts
    line: str
    cost: int = 0


@dataclass
class Dimensions:
    """The dimensions of a program, and what its equations do along them.

    Attributes:
        blocked: An equation works along it.
        produced: Outputs of a matmul with a parameter.
        consumed: What a matmul with a parameter sums over.
        batched: Kept by a matmul of two activations, as attention keeps heads.
        projections: The dimensions of a parameter that one matmul makes, or sums over.
        activation_matmuls: What each matmul of two activations keeps, and what it sums over.
        looked_up: Rows of a table, taken by integers of the batch.
        scanned: A loop takes its entries one by one.
    """

    sizes: list[int] = field(default_factory=list)
    blocked: list[Use] = field(default_factory=list)
    produced: list[Use] = field(default_factory=list)
    consumed: list[Use] = field(default_factory=list)
    batched: list[Use] = field(default_factory=list)
    projections: list[Dims] = field(default_factory=list)
    activation_matmuls: list[tuple[Dims, Dims]] = field(default_factory=list)
    looked_up: list[Use] = field(default_factory=list)
    scanned: list[Use] = field(default_factory=list)
    _became: dict[int, Parts] = field(default_factory=dict)  # joined, or divided
    _output_dims: set[Parts] = field(default_factory=set)
    _times: int = 1

    # -- dimensions --------------------------------------------------------------------------

    def new(self, size: int) -> Parts:
        """Return a new dimension."""
        if size == 1:
            return ()
        self.sizes.append(size)
        return (len(self.sizes) - 1,)

    def new_dims(self, shape: Sequence[int]) -> Dims:
        """Return new dimensions of these sizes."""
        return tuple(map(self.new, shape))

    def parts(self, dim: Parts) -> Parts:
        """Return the parts of a dimension as they are now known."""
        for part in dim:
            if part in self._became:
                self._became[part] = self.parts(self._became[part])
        return tuple(x for part in dim for x in self._became.get(part, (part,)))

    def join(self, a: Parts, b: Parts, line: str) -> None:
        """Let two dimensions be one; of two that are divided differently neither can be split."""
        left, right = list(a), list(b)
        while True:
            left, right = list(self.parts(tuple(left))), list(self.parts(tuple(right)))
            while left and right and left[0] == right[0]:
                left, right = left[1:], right[1:]
            if not left or not right:
                return
            x, y = sorted((left[0], right[0]), key=lambda part: self.sizes[part])
            if self.sizes[x] == self.sizes[y]:
                self._became[y] = (x,)
            elif self.sizes[y] % self.sizes[x] == 0:
                self._divide(y, self.sizes[x])
            else:
                self.block(tuple(left + right), line)
                return

    def _divide(self, part: int, major: int) -> None:
        """Divide a part into one of this size, and the rest."""
        self._became[part] = (*self.new(major), *self.new(self.sizes[part] // major))

    def block(self, dim: Parts, line: str) -> None:
        """Record that an equation works along a dimension."""
        self.blocked.append(Use(dim, line))

    def inner_parts(self) -> set[int]:
        """Return the parts that are not the first of a dimension: no even split is theirs."""
        return {part for dim in self._output_dims for part in self.parts(dim)[1:]}

    # -- programs ----------------------------------------------------------------------------

    def read(self, jaxpr: Jaxpr, constants: int, values: Sequence[Value]) -> list[Value]:
        """Return what is known of the outputs of a program."""
        known = [Value(None, False)] * constants
        return interpret_jaxpr(jaxpr, known, values, self._read, constant=lambda _: NUMBER)

    def _read(self, equation: JaxprEqn, values: Sequence[Value]) -> list[Value]:
        of_batch = any(v.of_batch for v in values)
        if all(v.dims is None for v in values):
            return [Value(None, of_batch) for _ in equation.outvars]
        name = name_of(equation)
        if name in _PROGRAMS:
            outs = _PROGRAMS[name](self, equation, values)
        else:
            dims = _RULES.get(name, _unknown)(self, equation, values)
            outs = [Value(x, of_batch) for x in dims]
        pairs = list(zip(outs, equation.outvars, strict=True))
        outs = [v if _has_gradient(out) else Value(None, v.of_batch) for v, out in pairs]
        self._output_dims.update(dim for v in outs for dim in v.dims or () if dim)
        return outs

    def dims_of(self, value: Value, variable: Var | Literal) -> Dims:
        """Return the dimensions of a value; new ones if it is not trained."""
        return self.new_dims(_shape(variable)) if value.dims is None else value.dims

    def repeated(self, times: int, run: Callable[[], list[Value]]) -> list[Value]:
        """Return what `run()` returns; what it reads happens so often."""
        self._times *= times
        outs = run()
        self._times //= times
        return outs

    def cost(self, variable: Var | Literal) -> int:
        """Return the number of elements of a variable, in all runs."""
        return math.prod(_shape(variable)) * self._times


def _aval(variable: Var | Literal) -> Any:
    return variable.aval


def _shape(variable: Var | Literal) -> tuple[int, ...]:
    return tuple(_aval(variable).shape)


def _has_gradient(variable: Var) -> bool:
    return jnp.issubdtype(_aval(variable).dtype, jnp.inexact)


def _line(equation: JaxprEqn) -> str:
    line = source_info_util.summarize(equation.source_info)
    return f"{name_of(equation)} at {line.rpartition('/')[2]}"


# -- equations: (dimensions, equation, values) -> the dimensions of each output ------------------


def _unknown(d: Dimensions, equation: JaxprEqn, values: Sequence[Value]) -> Iterator[Dims]:
    """Block all dimensions."""
    line = _line(equation)
    outs = [d.new_dims(_shape(out)) for out in equation.outvars]
    for dims in (*(v.dims or () for v in values), *outs):
        for dim in dims:
            d.block(dim, line)
    yield from outs


def _pointwise(d: Dimensions, equation: JaxprEqn, values: Sequence[Value]) -> Iterator[Dims]:
    """Join the dimensions; an operand of size 1 along one of them is repeated."""
    shape, line = _shape(equation.outvars[0]), _line(equation)
    same = [v.dims for v in values if v.dims is not None and len(v.dims) == len(shape)]
    dims: list[Parts] = []
    for i, size in enumerate(shape):
        equal = [operand[i] for operand in same if operand[i]]
        dims.append(equal[0] if equal else d.new(size))
        for other in equal[1:]:
            d.join(equal[0], other, line)
    yield from [tuple(dims)] * len(equation.outvars)


def _broadcast(d: Dimensions, equation: JaxprEqn, values: Sequence[Value]) -> Iterator[Dims]:
    dims, shape = list(d.new_dims(equation.params["shape"])), _shape(equation.invars[0])
    operand = d.dims_of(values[0], equation.invars[0])
    for i, dim in enumerate(equation.params["broadcast_dimensions"]):
        if shape[i] == equation.params["shape"][dim]:
            dims[dim] = operand[i]
    yield tuple(dims)


def _transpose(d: Dimensions, equation: JaxprEqn, values: Sequence[Value]) -> Iterator[Dims]:
    operand = d.dims_of(values[0], equation.invars[0])
    yield tuple(operand[i] for i in equation.params["permutation"])


def _reshape(d: Dimensions, equation: JaxprEqn, values: Sequence[Value]) -> Iterator[Dims]:
    """Divide dimensions, or put them together."""
    operand, shape = d.dims_of(values[0], equation.invars[0]), _shape(equation.outvars[0])
    rest, sizes = [part for dim in operand for part in d.parts(dim)], d.sizes
    dims: list[Parts] = []
    for size in shape:
        parts: list[int] = []
        while size > 1:
            if not rest or math.gcd(size, sizes[rest[0]]) not in (size, sizes[rest[0]]):
                yield from _unknown(d, equation, values)
                return
            if sizes[rest[0]] > size:
                d._divide(rest[0], size)
                rest = list(d.parts(tuple(rest)))
            size //= sizes[rest[0]]
            parts.append(rest.pop(0))
        dims.append(tuple(parts))
    yield tuple(dims)


def _dot_general(d: Dimensions, equation: JaxprEqn, values: Sequence[Value]) -> Iterator[Dims]:
    (contracted, batch), line = equation.params["dimension_numbers"], _line(equation)
    operands = [d.dims_of(*pair) for pair in zip(values, equation.invars, strict=True)]
    for pairs in (contracted, batch):
        for i, j in zip(*pairs, strict=True):
            d.join(operands[0][i], operands[1][j], line)
    weight = [v.is_weight for v in values]
    is_mixed = sum(weight) == 1 and any(v.of_batch for v in values)
    for i in contracted[0]:
        use = Use(operands[0][i], line, d.cost(equation.outvars[0]))
        (d.consumed if is_mixed else d.blocked).append(use)
    free = [
        [i for i in range(len(dims)) if i not in (*contracted[k], *batch[k])]
        for k, dims in enumerate(operands)
    ]
    if is_mixed:
        k = weight.index(True)
        cost = d.cost(equation.invars[1 - k]) if values[1 - k].dims is not None else 0
        d.produced += [Use(operands[k][i], line, cost) for i in free[k]]
        d.projections += [tuple(operands[k][i] for i in dims) for dims in (contracted[k], free[k])]
    outer = *(operands[0][i] for i in (*batch[0], *free[0])), *(operands[1][i] for i in free[1])
    if all(v.dims is not None and v.of_batch for v in values):
        d.batched += [Use(operands[0][i], line) for i in batch[0]]
        d.activation_matmuls.append((outer, tuple(operands[0][i] for i in contracted[0])))
    yield outer


def _reduce(d: Dimensions, equation: JaxprEqn, values: Sequence[Value]) -> Iterator[Dims]:
    operand, axes = d.dims_of(values[0], equation.invars[0]), equation.params["axes"]
    for axis in axes:
        d.block(operand[axis], _line(equation))
    yield tuple(dim for i, dim in enumerate(operand) if i not in axes)


def _same_rank(d: Dimensions, equation: JaxprEqn, values: Sequence[Value]) -> Iterator[Dims]:
    """Block the dimensions along which it works; all others of its operands are one."""
    line, rank = _line(equation), len(_shape(equation.outvars[0]))
    pairs = [p for p in zip(values, equation.invars, strict=True) if len(_shape(p[1])) == rank]
    trained = [value.dims for value, _ in pairs if value.dims is not None]
    shapes = [_shape(v) for v in (*(v for _, v in pairs), *equation.outvars)]
    resized = {i for i in range(rank) if len({shape[i] for shape in shapes}) > 1}
    changed = resized | _named_dims(equation)
    others = {i: trained[0][i] for i in range(rank) if i not in changed and trained}
    for dims in trained:
        for i, dim in enumerate(dims):
            d.block(dim, line) if i in changed else d.join(others[i], dim, line)
    for out in equation.outvars:
        new = d.new_dims(_shape(out))
        for i in changed:
            d.block(new[i], line)
        yield tuple(others.get(i, dim) for i, dim in enumerate(new))


def _stack(d: Dimensions, equation: JaxprEqn, values: Sequence[Value]) -> Iterator[Dims]:
    axis, line = equation.params["axis"], _line(equation)
    first, *rest = (v.dims for v in values if v.dims is not None)
    for other in rest:
        for a, b in zip(first, other, strict=True):
            d.join(a, b, line)
    new = d.new(len(values))
    d.block(new, line)
    yield (*first[:axis], new, *first[axis:])


def _unstack(d: Dimensions, equation: JaxprEqn, values: Sequence[Value]) -> Iterator[Dims]:
    axis, dims = equation.params["axis"], d.dims_of(values[0], equation.invars[0])
    d.block(dims[axis], _line(equation))
    yield from [(*dims[:axis], *dims[axis + 1 :])] * len(equation.outvars)


def _named_dims(equation: JaxprEqn) -> set[int]:
    """Return the dimensions that an equation names, of those that keep the number of dimensions."""
    params, rank = equation.params, len(_shape(equation.outvars[0]))
    if name_of(equation) == "top_k":
        return {rank - 1}
    named = {params[name] for name in ("axis", "dimension") if isinstance(params.get(name), int)}
    padded = enumerate(params.get("padding_config", ()))
    windows = enumerate(params.get("window_dimensions", ()))
    return named.union(
        params.get("dimensions") or (),
        (i for i, padding in padded if any(padding)),
        (i for i, size in windows if size > 1),
    )


def _gather(d: Dimensions, equation: JaxprEqn, values: Sequence[Value]) -> Iterator[Dims]:
    """Keep the dimensions that are taken whole; a table may be divided by its rows."""
    numbers, line = equation.params["dimension_numbers"], _line(equation)
    operand, shape = d.dims_of(values[0], equation.invars[0]), _shape(equation.invars[0])
    dims = list(d.new_dims(_shape(equation.outvars[0])))
    removed = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    offsets = iter(numbers.offset_dims)
    is_table = values[0].is_weight and values[1].of_batch
    for i, size in enumerate(equation.params["slice_sizes"]):
        if i in removed:
            is_row = is_table and numbers.start_index_map == (i,)
            (d.looked_up if is_row else d.blocked).append(Use(operand[i], line))
            continue
        offset = next(offsets)
        if size == shape[i]:
            dims[offset] = operand[i]
        else:
            d.block(operand[i], line)
            d.block(dims[offset], line)
    yield tuple(dims)


_RULES = {
    **dict.fromkeys(POINTWISE.union(COPIES), _pointwise),
    **dict.fromkeys(RESHAPES, _reshape),
    **dict.fromkeys(REDUCTIONS, _reduce),
    **dict.fromkeys(_SAME_RANK, _same_rank),
    "broadcast_in_dim": _broadcast,
    "dot_general": _dot_general,
    "gather": _gather,
    "stack": _stack,
    "transpose": _transpose,
    "unstack": _unstack,
}


# -- equations that hold programs: (dimensions, equation, values) -> values ----------------------


def _call(d: Dimensions, equation: JaxprEqn, values: Sequence[Value]) -> list[Value]:
    body = called_body(equation)
    return _opaque(d, equation, values) if body is None else d.read(body[0], len(body[1]), values)


def _opaque(d: Dimensions, equation: JaxprEqn, values: Sequence[Value]) -> list[Value]:
    return [Value(dims, True) for dims in _unknown(d, equation, values)]


def _scan(d: Dimensions, equation: JaxprEqn, values: Sequence[Value]) -> list[Value]:
    (body, constants), (first, count) = next(bodies_of(equation)), scan_counts(equation)
    line, end = _line(equation), first + count
    for value in values[end:]:
        if value.is_weight and value.dims:
            d.scanned.append(Use(value.dims[0], line))
    sliced = [v if v.dims is None else Value(v.dims[1:], v.of_batch) for v in values[end:]]
    carried = _carried(d, values[first:end], equation.invars[first:end])
    run = lambda: d.read(body, len(constants), (*values[:first], *carried, *sliced))
    outs = d.repeated(equation.params["length"], run)
    _join_all(d, carried, outs, line)
    stack = d.new(equation.params["length"])
    d.block(stack, line)
    stacked = (None if v.dims is None else (stack, *v.dims) for v in outs[count:])
    return carried + [Value(dims, True) for dims in stacked]


def _while(d: Dimensions, equation: JaxprEqn, values: Sequence[Value]) -> list[Value]:
    body = equation.params["body_jaxpr"]
    skipped, first = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    inputs, variables = values[skipped:], equation.invars[skipped:]
    carried = _carried(d, inputs[first:], variables[first:])
    outs = d.read(body.jaxpr, len(body.consts), (*inputs[:first], *carried))
    _join_all(d, carried, outs, _line(equation))
    return carried


def _carried(d: Dimensions, values: Sequence[Value], variables: Sequence[Any]) -> list[Value]:
    """Return what a loop carries: of numbers it is unknown whether they are trained later."""
    pairs = zip(values, variables, strict=True)
    return [Value(d.dims_of(v, x) if _has_gradient(x) else None, True) for v, x in pairs]


def _cond(d: Dimensions, equation: JaxprEqn, values: Sequence[Value]) -> list[Value]:
    outs: list[Value] | None = None
    for body, constants in bodies_of(equation):
        operands = match_operands(body, values, NUMBER)
        branch_outs = d.read(body, len(constants), operands)
        outs = outs or [Value(None, False)] * len(branch_outs)
        _join_all(d, outs, branch_outs, _line(equation))
        pairs = zip(outs, branch_outs, strict=True)
        outs = [Value(b.dims if a.dims is None else a.dims, True) for a, b in pairs]
    return outs or []


def _join_all(d: Dimensions, a: Sequence[Value], b: Sequence[Value], line: str) -> None:
    for x, y in zip(a, b, strict=False):
        for pair in zip(x.dims or (), y.dims or (), strict=False):
            d.join(*pair, line)


def _same(d: Dimensions, equation: JaxprEqn, values: Sequence[Value]) -> list[Value]:
    return list(values)


_PROGRAMS = {
    **dict.fromkeys(ANNOTATIONS, _same),
    **dict.fromkeys(CALLS, _call),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
