"""Reads a step's trace: what each operation reads, makes, and shards over tensor.

The step of one device is traced for two examples and for three, its layers in a loop. Sizes that
grow belong to examples; all others belong to parameters. The names of parameters' dimensions imply
which values a tensor axis would shard: through matmuls, elementwise operations and views, as the
partitioner propagates them. So two traces cover every batch size and every tensor axis.

Operations are in order, with nested calls inlined. Those of the loops over layers are parts of
their own: `layers` forward and backward, of one layer.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from hfjax.parallel.jaxprs.primitives import (
    ANNOTATIONS,
    CALLS,
    CONTROL_FLOW,
    CUMULATIVE,
    INDEXING,
    KERNELS,
    REDUCTIONS,
    VIEWS,
    WINDOWS,
)
from hfjax.parallel.jaxprs.walk import bodies_of, equations_in, match_operands, name_of, scan_counts
from hfjax.planner.programs.placeholder_attention import BACKWARD, FORWARD

Dims = frozenset[int]
UNSPLIT: Dims = frozenset()
# Operations that write nothing but a view; of operands of matmuls also a transpose.
WRITE_NOTHING = VIEWS.union(ANNOTATIONS, ["reduce_precision"])
# Operations that XLA does not fuse: their operands and results are in memory.
UNFUSED = frozenset(["sort", "top_k", "fft"]).union(
    CONTROL_FLOW, KERNELS, INDEXING, CUMULATIVE, WINDOWS
)
_INLINED = CALLS.union(["shard_map", "run_state"])
PARTS = ("before", "layers", "between", "backward", "after")


class Share(NamedTuple):
    """Among how many devices a layer's values are sharded, beside examples."""

    tensor: int = 1
    sequence: bool = False  # what tensor replicates is sharded along the sequence
    expert: int = 1


@dataclass(eq=False)
class Operand:
    """An array of the program: its shapes for two and three examples, its sharded dimensions."""

    two: tuple[int, ...]
    three: tuple[int, ...]
    itemsize: int
    dtype: str
    split: Dims = UNSPLIT
    element: "Operand | None" = None  # of a stack that a loop makes: what one iteration makes
    experts: bool = False  # its first dimension is that of experts, of their weights
    is_input: bool = False  # it is there before the program: a parameter, the batch

    @property
    def per_example(self) -> int:
        """The bytes that each example adds."""
        return (math.prod(self.three) - math.prod(self.two)) * self.itemsize

    @property
    def fixed(self) -> int:
        """The bytes that do not depend on the number of examples."""
        return max(math.prod(self.two) * self.itemsize - 2 * self.per_example, 0)

    def size(self, share: Share) -> tuple[float, float]:
        """Return bytes per example and fixed bytes on a device."""
        shards = share.tensor if self.split else 1
        example_shards = share.tensor if self.split or share.sequence else 1
        return self.per_example / example_shards, self.fixed / shards / (
            share.expert if self.experts else 1
        )


@dataclass(eq=False)
class Operation:
    """One equation, with calls inlined; `times`: how often a loop around it runs it."""

    name: str
    reads: list[Operand]
    makes: list[Operand]
    params: Mapping[str, Any]
    times: float = 1
    is_partial: bool = False  # over sharded dimensions: each device has a partial sum
    body: "list[Operation]" = field(default_factory=list)  # of a loop that is not over layers
    trips: tuple[float, float] = (1, 1)  # of a loop that data bounds, for both traces


@dataclass
class StepProgram:
    """The operations of one microbatch, forward and backward, part by part."""

    parts: dict[str, list[Operation]]
    layers: int  # iterations of the loops over layers; 0: no such loops, all is in `before`
    residuals: list[Operand]  # what the forward loop saves for the backward one, of one layer
    carry: Operand | None  # what one layer passes to the next


def read_step(
    two: Any, three: Any, split: Sequence[Dims], layers: int, experts: int = 0
) -> StepProgram:
    """Return the program of a step traced for two examples and for three.

    Args:
        two: `step.trace(batch of two examples)`, on one device, layers in a loop.
        three: The same for three examples.
        split: For each argument of the program, the dimensions that a tensor axis would shard.
        layers: Number of equal layers in the stack; 0: no loop is over layers.
        experts: Number of experts of a layer.
    """
    reader = _Reader(layers, experts)
    args = [
        Operand(tuple(a.aval.shape), tuple(b.aval.shape), a.aval.dtype.itemsize, a.aval.dtype.name)
        for a, b in zip(two.jaxpr.jaxpr.invars, three.jaxpr.jaxpr.invars, strict=True)
    ]
    for value, dims in zip(args, split, strict=True):
        value.split, value.is_input = dims, True
        if dims:
            reader.param_dims[value.two] = dims
    reader.walk(two.jaxpr.jaxpr, three.jaxpr.jaxpr, args, reader.parts["before"])
    residuals = [v.element for v in reader.loop_inputs if v.element is not None]
    return StepProgram(reader.parts, reader.layers, unique(residuals), reader.carry)


def unique(values: Iterable[Operand]) -> list[Operand]:
    """Return each value once, in order."""
    return list({id(v): v for v in values}.values())


class _Reader:
    """Walks two traces of one program in parallel."""

    def __init__(self, layers: int, experts: int) -> None:
        self.stack, self.layers, self.experts = layers, 0, experts
        self.param_dims: dict[tuple[int, ...], Dims] = {}  # shape of a parameter -> sharded
        self.parts: dict[str, list[Operation]] = {name: [] for name in PARTS}
        self.loop_inputs: list[Operand] = []
        self.carry: Operand | None = None
        self.part = "before"
        self.depth = 0

    def walk(
        self, one: Jaxpr, two: Jaxpr, args: Sequence[Operand], out: list[Operation]
    ) -> list[Operand]:
        """Read a program with these arguments; return its results."""
        known: dict[Any, Operand] = dict(zip(one.invars, args, strict=True))
        for a, b in zip(one.constvars, two.constvars, strict=True):
            known[a] = _new_operand(a, b)
        get = lambda v, w: _literal(v, w) if isinstance(v, Literal) else known[v]
        for e, f in zip(one.eqns, two.eqns, strict=True):
            reads = [get(v, w) for v, w in zip(e.invars, f.invars, strict=True)]
            makes = self._read_equation(e, f, reads, out)
            known.update(zip(e.outvars, makes, strict=True))
            if not self.depth:
                out = self.parts[self.part]
        return [get(v, w) for v, w in zip(one.outvars, two.outvars, strict=True)]

    def _read_equation(
        self, e: JaxprEqn, f: JaxprEqn, reads: list[Operand], out: list[Operation]
    ) -> list[Operand]:
        name = name_of(e)
        if name == "ffi_call" and e.params["target_name"] in (FORWARD, BACKWARD):
            return self._read_attention(e.params["target_name"], e, f, reads, out)
        if name in _INLINED:
            return self._read_call(e, f, reads, out)
        if name == "scan":
            return self._read_scan(e, f, reads, out)
        makes = [_new_operand(v, w) for v, w in zip(e.outvars, f.outvars, strict=True)]
        op = Operation(name, reads, makes, e.params)
        if name in ("while", "cond"):
            op.body = self._read_loop_or_branches(e, f)
        _propagate_split(op)
        for output in makes:
            if output.per_example:
                continue
            output.experts = len(output.two) > 2 and output.two[0] == self.experts > 1
            if not output.split and output.two in self.param_dims and "scatter" in name:
                output.split = self.param_dims[output.two]  # the gradient of an embedding table
        out.append(op)
        return makes

    def _read_call(self, e: JaxprEqn, f: JaxprEqn, reads: list, out: list) -> list[Operand]:
        (one, _), (two, _) = next(bodies_of(e)), next(bodies_of(f))
        is_step = e.primitive.name == "shard_map"
        self.depth += not is_step
        outputs = self.walk(one, two, match_operands(one, reads, None), out)
        self.depth -= not is_step
        if is_step:  # what follows belongs to the optimizer
            self.part, self.parts["optimizer"] = "optimizer", []
        return outputs

    def _read_attention(self, name: str, e: Any, f: Any, reads: list, out: list) -> list[Operand]:
        makes = [_new_operand(v, w) for v, w in zip(e.outvars, f.outvars, strict=True)]
        if reads[0].split:
            for value in makes:
                value.split = frozenset({2 if len(value.two) == 4 else 1})
        out.append(Operation(name, reads, makes, e.params))
        return makes

    def _read_loop_or_branches(self, e: JaxprEqn, f: JaxprEqn) -> list[Operation]:
        """Return the operations of a loop or of branches, on new operands."""
        operations: list[Operation] = []
        is_loop = e.primitive.name == "while"
        bodies = [e.params["body_jaxpr"]] if is_loop else e.params["branches"]
        others = [f.params["body_jaxpr"]] if is_loop else f.params["branches"]
        self.depth += 1
        for body, other in zip(bodies, others, strict=True):
            one, two = body.jaxpr, other.jaxpr
            args = [_new_operand(v, w) for v, w in zip(one.invars, two.invars, strict=True)]
            self.walk(one, two, args, operations)
        self.depth -= 1
        if is_loop:
            trips = self._block_count(e), self._block_count(f)
            for operation in _walk_operations(operations):
                operation.trips = trips
        else:  # one branch runs, depending on data
            _scale_times(operations, 1 / len(bodies))
        return operations

    def _block_count(self, e: JaxprEqn) -> float:
        """Return how often a loop over blocks of choices runs, as experts without a capacity have.

        The loop reads an array of all choices, and makes an iota of one block; about half a block
        of each expert stays empty. Other loops that data bounds are taken to run once.
        """
        body = e.params["body_jaxpr"].jaxpr
        counts = [f.outvars[0].aval for f, _ in equations_in(body) if f.primitive.name == "iota"]
        choices, block = map(_largest_int_array, ([v.aval for v in e.invars], counts))
        if self.experts < 2 or not 1 < block < choices:
            return 1
        return choices / block + self.experts / 2

    def _read_scan(
        self, e: JaxprEqn, f: JaxprEqn, reads: list[Operand], out: list
    ) -> list[Operand]:
        one, two = e.params["jaxpr"].jaxpr, f.params["jaxpr"].jaxpr
        consts, carry = scan_counts(e)
        length, depth = e.params["length"], self.depth
        of_layers = depth == 0 and length == self.stack > 0 and self.part in ("before", "between")
        args = list(reads[: consts + carry])
        for n, value in enumerate(reads[consts + carry :]):
            v, w = one.invars[consts + carry + n], two.invars[consts + carry + n]
            if value.element is not None:
                args.append(value.element)
                if of_layers:
                    self.loop_inputs.append(value)
                continue
            element = _new_operand(v, w)
            element.split = frozenset(d - 1 for d in value.split if d > 0)
            element.is_input = value.is_input
            args.append(element)
        if of_layers:
            self.layers = length
            self.part = "layers" if self.part == "before" else "backward"
            inner = self.parts[self.part]
        else:
            inner = []
        self.depth += 1
        outputs = self.walk(one, two, args, inner)
        self.depth -= 1
        if of_layers and self.part == "layers":
            self.carry = max(outputs[:carry], key=lambda v: v.per_example, default=None)
            self.part = "between"
        elif of_layers:
            self.part = "after"
        stacks = []
        for element, v, w in zip(
            outputs[carry:], e.outvars[carry:], f.outvars[carry:], strict=True
        ):
            stack = _new_operand(v, w)
            stack.split, stack.element = frozenset(d + 1 for d in element.split), element
            stacks.append(stack)
        if not of_layers:
            makes = [*outputs[:carry], *stacks]
            out.append(Operation("scan", reads, makes, e.params, body=_scale_times(inner, length)))
            return makes
        return [*outputs[:carry], *stacks]


def _scale_times(operations: list[Operation], times: float) -> list[Operation]:
    for one in operations:
        one.times *= times
        _scale_times(one.body, times)
    return operations


def _walk_operations(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Yield operations, and those inside of them."""
    for one in operations:
        yield one
        yield from _walk_operations(one.body)


def _largest_int_array(arrays: Iterable[Any]) -> int:
    """Return the size of the largest array of integers."""
    return max((a.size for a in arrays if jnp.issubdtype(a.dtype, jnp.integer)), default=0)


def _new_operand(v: Any, w: Any) -> Operand:
    aval = v.aval
    dtype = getattr(aval, "dtype", None)
    size = getattr(dtype, "itemsize", 4)
    shape, other = getattr(aval, "shape", ()), getattr(w.aval, "shape", ())
    return Operand(tuple(shape), tuple(other), size, getattr(dtype, "name", "key"))


def _literal(v: Literal, w: Literal) -> Operand:
    value = _new_operand(v, w)
    value.is_input = True
    return value


# -- which dimensions a tensor axis shards --------------------------------------------------


def _propagate_split(op: Operation) -> None:
    """Infer the sharded dimensions of an operation's results from those of its operands."""
    if not any(v.split for v in op.reads):
        return
    rule = _RULES.get(op.name)
    if rule is not None:
        rule(op)
        return
    for output in op.makes:
        splits = [v.split for v in op.reads if len(v.two) == len(output.two)]
        dims = frozenset().union(*splits)
        output.split = frozenset(d for d in dims if output.two[d] > 1)


def _split_product(op: Operation) -> None:
    (a_in, b_in), (a_batch, b_batch) = op.params["dimension_numbers"]
    a, b = op.reads
    free_a = [d for d in range(len(a.two)) if d not in (*a_in, *a_batch)]
    free_b = [d for d in range(len(b.two)) if d not in (*b_in, *b_batch)]
    dims = [("a", d) for d in (*a_batch, *free_a)] + [("b", d) for d in free_b]
    inner = any(d in a.split for d in a_in) or any(d in b.split for d in b_in)
    op.is_partial = inner
    split_dims = {n for n, (of, d) in enumerate(dims) if d in (a if of == "a" else b).split}
    split_dims |= {n for n, d in enumerate(b_batch) if d in b.split}
    op.makes[0].split = UNSPLIT if inner and not split_dims else frozenset(split_dims)


def _split_transpose(op: Operation) -> None:
    back = {d: n for n, d in enumerate(op.params["permutation"])}
    op.makes[0].split = frozenset(back[d] for d in op.reads[0].split)


def _split_reshape(op: Operation) -> None:
    """A sharded dimension stays so where its leading part begins a dimension of the result."""
    old, new = op.reads[0].two, op.makes[0].two
    before = lambda shape, d: math.prod(shape[:d])
    split_dims = set()
    for d in op.reads[0].split:
        new_dims = [n for n in range(len(new)) if new[n] > 1 and before(new, n) <= before(old, d)]
        if new_dims and before(new, new_dims[-1]) * new[new_dims[-1]] > before(old, d):
            split_dims.add(new_dims[-1])
    op.makes[0].split = frozenset(split_dims)


def _split_broadcast(op: Operation) -> None:
    dims, operand = op.params["broadcast_dimensions"], op.reads[0]
    op.makes[0].split = frozenset(dims[d] for d in operand.split if operand.two[d] > 1)


def _split_reduction(op: Operation) -> None:
    axes = op.params["axes"]
    rest = [d for d in range(len(op.reads[0].two)) if d not in axes]
    op.is_partial = any(d in op.reads[0].split for d in axes)
    for output in op.makes:
        output.split = frozenset(n for n, d in enumerate(rest) if d in op.reads[0].split)


def _split_squeeze(op: Operation) -> None:
    gone = op.params["dimensions"]
    rest = [d for d in range(len(op.reads[0].two)) if d not in gone]
    op.makes[0].split = frozenset(n for n, d in enumerate(rest) if d in op.reads[0].split)


def _mark_partial_sum(op: Operation) -> None:
    op.is_partial = True


def _split_like_first(op: Operation) -> None:
    """A scatter's result has the shape of its first operand, and is sharded like it."""
    op.makes[0].split = op.reads[0].split


_RULES = {
    "dot_general": _split_product,
    "transpose": _split_transpose,
    "reshape": _split_reshape,
    "broadcast_in_dim": _split_broadcast,
    "squeeze": _split_squeeze,
    "gather": _mark_partial_sum,
    "conv_general_dilated": _mark_partial_sum,
    "scatter-add": _split_like_first,
    "scatter_add": _split_like_first,
    **dict.fromkeys(REDUCTIONS, _split_reduction),
}
