"""A step's program read from its trace: what each operation reads, makes, and splits over tensor.

The step of one device is traced for two rows and for three, its layers in a loop. Sizes that grow
are those of rows; all others belong to parameters. From the names of parameters' dimensions follows
which values a tensor axis would split: through products, elementwise operations and views, as the
partitioner goes. So two traces stand for every number of rows and every tensor axis.

Operations are in order, calls within calls written out. Those of the loops over layers are in parts
of their own: `layers` forward and backward, of one layer.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from hfjax.planner.programs.placeholder_attention import BACKWARD, FORWARD

Dims = frozenset[int]
WHOLE: Dims = frozenset()
# What writes nothing: another look at what is there; of products' operands also a transposition.
VIEWS = {
    *("reshape", "squeeze", "expand_dims", "transpose", "copy", "optimization_barrier", "name"),
    *("sharding_constraint", "pvary", "pcast", "reduce_precision", "stop_gradient"),
}
REDUCES = {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin"}
PRODUCTS = {"dot_general", "conv_general_dilated"}
# What XLA puts into no fusion: its operands and results are in memory.
ALONE = {
    *("sort", "top_k", "scatter", "scatter-add", "scatter_add", "cumsum", "cumlogsumexp", "fft"),
    *("while", "cond", "scan", "pallas_call", "ffi_call", "custom_call", "reduce_window_sum"),
    *("select_and_scatter_add", "reduce_window_max", "select_and_gather_add", "gather"),
}
CALLS = {
    *("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "shard_map"),
    *("custom_vjp_call", "custom_jvp_call", "custom_vjp_call_jaxpr", "custom_lin", "run_state"),
}
PARTS = ("before", "layers", "between", "backward", "after")


class Share(NamedTuple):
    """Among how many devices a layer's values are split, beside rows."""

    tensor: int = 1
    sequence: bool = False  # what tensor leaves whole is split along the sequence
    expert: int = 1


@dataclass(eq=False)
class Operand:
    """An array of the program: its shape for two rows and for three, and which dimensions split."""

    two: tuple[int, ...]
    three: tuple[int, ...]
    itemsize: int
    dtype: str
    split: Dims = WHOLE
    row: "Operand | None" = None  # of a stack that a loop makes: what one turn makes
    experts: bool = False  # its first dimension is that of experts, of their weights
    given: bool = False  # it is there before the program: a parameter, the batch

    @property
    def of_rows(self) -> int:
        """The bytes that each row adds."""
        return (math.prod(self.three) - math.prod(self.two)) * self.itemsize

    @property
    def fixed(self) -> int:
        """The bytes that do not depend on rows."""
        return max(math.prod(self.two) * self.itemsize - 2 * self.of_rows, 0)

    def size(self, share: Share) -> tuple[float, float]:
        """Return bytes a row and fixed bytes on a device."""
        parts = share.tensor if self.split else 1
        rows = share.tensor if self.split or share.sequence else 1
        return self.of_rows / rows, self.fixed / parts / (share.expert if self.experts else 1)


@dataclass(eq=False)
class Operation:
    """One equation, of which calls are written out; `times`: how often a loop around it runs it."""

    name: str
    reads: list[Operand]
    makes: list[Operand]
    params: Mapping[str, Any]
    times: float = 1
    summed: bool = False  # over what tensor splits: each device has a part of the sum
    inside: "list[Operation]" = field(default_factory=list)  # of a loop that is no loop of layers
    turns: tuple[float, float] = (1, 1)  # of a loop that data bounds, for two rows and for three


@dataclass
class StepProgram:
    """The operations of one microbatch, forward and backward, part by part."""

    parts: dict[str, list[Operation]]
    layers: int  # turns of the loops over layers; 0: there are none, all is in `before`
    stashed: list[Operand]  # what the forward loop hands to the backward one, of one layer
    carried: Operand | None  # what goes from layer to layer


def read_step(
    two: Any, three: Any, split: Sequence[Dims], layers: int, experts: int = 0
) -> StepProgram:
    """Return the program of a step traced for two rows and for three.

    Args:
        two: `step.trace(batch of two rows)`, on one device, layers in a loop.
        three: The same of three rows.
        split: For each argument of the program, the dimensions that a tensor axis would split.
        layers: How many equal layers are stacked; 0: no loop is one of layers.
        experts: How many experts a layer has.
    """
    reader = _Reader(layers, experts)
    given = [
        Operand(tuple(a.aval.shape), tuple(b.aval.shape), a.aval.dtype.itemsize, a.aval.dtype.name)
        for a, b in zip(two.jaxpr.jaxpr.invars, three.jaxpr.jaxpr.invars, strict=True)
    ]
    for value, dims in zip(given, split, strict=True):
        value.split, value.given = dims, True
        if dims:
            reader.placed[value.two] = dims
    reader.walk(two.jaxpr.jaxpr, three.jaxpr.jaxpr, given, reader.parts["before"])
    found = [v.row for v in reader.handed if v.row is not None]
    return StepProgram(reader.parts, reader.layers, unique(found), reader.carried)


def unique(values: Iterable[Operand]) -> list[Operand]:
    """Return each value once, in order."""
    return list({id(v): v for v in values}.values())


class _Reader:
    """Walks two traces of one program at once."""

    def __init__(self, layers: int, experts: int) -> None:
        self.stack, self.layers, self.experts = layers, 0, experts
        self.placed: dict[tuple[int, ...], Dims] = {}  # shape of a parameter -> how it is split
        self.parts: dict[str, list[Operation]] = {name: [] for name in PARTS}
        self.handed: list[Operand] = []
        self.carried: Operand | None = None
        self.now = "before"
        self.deep = 0

    def walk(
        self, one: Jaxpr, two: Jaxpr, given: Sequence[Operand], out: list[Operation]
    ) -> list[Operand]:
        """Read a program that is given these values; return what it makes."""
        known: dict[Any, Operand] = dict(zip(one.invars, given, strict=True))
        for a, b in zip(one.constvars, two.constvars, strict=True):
            known[a] = _fresh(a, b)
        get = lambda v, w: _literal(v, w) if isinstance(v, Literal) else known[v]
        for e, f in zip(one.eqns, two.eqns, strict=True):
            reads = [get(v, w) for v, w in zip(e.invars, f.invars, strict=True)]
            makes = self._equation(e, f, reads, out)
            known.update(zip(e.outvars, makes, strict=True))
            if not self.deep:
                out = self.parts[self.now]
        return [get(v, w) for v, w in zip(one.outvars, two.outvars, strict=True)]

    def _equation(
        self, e: JaxprEqn, f: JaxprEqn, reads: list[Operand], out: list[Operation]
    ) -> list[Operand]:
        name = e.primitive.name
        if name == "ffi_call" and e.params["target_name"] in (FORWARD, BACKWARD):
            return self._attention(e.params["target_name"], e, f, reads, out)
        if name in CALLS and (inner := _body(e)) is not None:
            return self._call(e, f, inner, reads, out)
        if name == "scan":
            return self._scan(e, f, reads, out)
        makes = [_fresh(v, w) for v, w in zip(e.outvars, f.outvars, strict=True)]
        done = Operation(name, reads, makes, e.params)
        if name in ("while", "cond"):
            done.inside = self._within(e, f)
        _split(done)
        for made in makes:
            if made.of_rows:
                continue
            made.experts = len(made.two) > 2 and made.two[0] == self.experts > 1
            if not made.split and made.two in self.placed and "scatter" in name:
                made.split = self.placed[made.two]  # the gradient of a table
        out.append(done)
        return makes

    def _call(
        self, e: JaxprEqn, f: JaxprEqn, inner: Jaxpr, reads: list, out: list
    ) -> list[Operand]:
        other = _body(f)
        assert other is not None
        reads = reads[len(reads) - len(inner.invars) :]
        step = e.primitive.name == "shard_map"
        self.deep += not step
        found = self.walk(inner, other, reads, out)
        self.deep -= not step
        if step:  # what follows is the optimizer's
            self.now, self.parts["optimizer"] = "optimizer", []
        return found

    def _attention(self, name: str, e: Any, f: Any, reads: list, out: list) -> list[Operand]:
        makes = [_fresh(v, w) for v, w in zip(e.outvars, f.outvars, strict=True)]
        if reads[0].split:
            for value in makes:
                value.split = frozenset({2 if len(value.two) == 4 else 1})
        out.append(Operation(name, reads, makes, e.params))
        return makes

    def _within(self, e: JaxprEqn, f: JaxprEqn) -> list[Operation]:
        """Return the operations of a loop or of branches, on values of their own."""
        found: list[Operation] = []
        names = ("body_jaxpr",) if e.primitive.name == "while" else ("branches",)
        bodies = [(_jaxprs(e.params[n]), _jaxprs(f.params[n])) for n in names]
        self.deep += 1
        for ones, twos in bodies:
            for one, two in zip(ones, twos, strict=True):
                given = [_fresh(v, w) for v, w in zip(one.invars, two.invars, strict=True)]
                self.walk(one, two, given, found)
        self.deep -= 1
        if e.primitive.name == "while":
            turns = self._blocks(e), self._blocks(f)
            for one in _all(found):
                one.turns = turns
        else:  # one branch runs: which, the data says
            _repeated(found, 1 / len(bodies[0][0]))
        return found

    def _blocks(self, e: JaxprEqn) -> float:
        """Return how often a loop over blocks of choices runs, as experts without a capacity have.

        The loop is given an array of all choices, and counts a block's own; about half a block of
        each expert stays empty. Other loops that data bounds are taken to run once.
        """
        body = _jaxprs(e.params["body_jaxpr"])[0]
        counts = [f.outvars[0].aval for f in _equations(body) if f.primitive.name == "iota"]
        choices, block = map(_most_whole, ([v.aval for v in e.invars], counts))
        if self.experts < 2 or not 1 < block < choices:
            return 1
        return choices / block + self.experts / 2

    def _scan(self, e: JaxprEqn, f: JaxprEqn, reads: list[Operand], out: list) -> list[Operand]:
        one, two = e.params["jaxpr"].jaxpr, f.params["jaxpr"].jaxpr
        consts, carry = _of_scan(e, one)
        length, deep = e.params["length"], self.deep
        of_layers = deep == 0 and length == self.stack > 0 and self.now in ("before", "between")
        given = list(reads[: consts + carry])
        for n, value in enumerate(reads[consts + carry :]):
            v, w = one.invars[consts + carry + n], two.invars[consts + carry + n]
            if value.row is not None:
                given.append(value.row)
                if of_layers:
                    self.handed.append(value)
                continue
            row = _fresh(v, w)
            row.split = frozenset(d - 1 for d in value.split if d > 0)
            row.given = value.given
            given.append(row)
        if of_layers:
            self.layers = length
            self.now = "layers" if self.now == "before" else "backward"
            inner = self.parts[self.now]
        else:
            inner = []
        self.deep += 1
        made = self.walk(one, two, given, inner)
        self.deep -= 1
        if of_layers and self.now == "layers":
            self.carried = max(made[:carry], key=lambda v: v.of_rows, default=None)
            self.now = "between"
        elif of_layers:
            self.now = "after"
        stacks = []
        for row, v, w in zip(made[carry:], e.outvars[carry:], f.outvars[carry:], strict=True):
            stack = _fresh(v, w)
            stack.split, stack.row = frozenset(d + 1 for d in row.split), row
            stacks.append(stack)
        if not of_layers:
            makes = [*made[:carry], *stacks]
            out.append(Operation("scan", reads, makes, e.params, inside=_repeated(inner, length)))
            return makes
        return [*made[:carry], *stacks]


def _of_scan(e: JaxprEqn, body: Jaxpr) -> tuple[int, int]:
    """Return how many constants a loop has, and how many values it carries: by their dimensions.

    What it takes rows of, and what it stacks, has one more outside; versions of JAX name the
    numbers otherwise.
    """
    same = lambda outside, inside: len(outside.aval.shape) == len(inside.aval.shape)
    carry = sum(same(v, w) for v, w in zip(e.outvars, body.outvars, strict=True))
    return sum(same(v, w) for v, w in zip(e.invars, body.invars, strict=True)) - carry, carry


def _repeated(operations: list[Operation], times: float) -> list[Operation]:
    for one in operations:
        one.times *= times
        _repeated(one.inside, times)
    return operations


def _all(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Yield operations, and those inside of them."""
    for one in operations:
        yield one
        yield from _all(one.inside)


def _most_whole(arrays: Iterable[Any]) -> int:
    """Return the size of the largest array of integers."""
    return max((a.size for a in arrays if jnp.issubdtype(a.dtype, jnp.integer)), default=0)


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yield the equations of a program, and those of the functions that it calls."""
    for e in jaxpr.eqns:
        yield e
        if (inner := _body(e)) is not None:
            yield from _equations(inner)


def _fresh(v: Any, w: Any) -> Operand:
    aval = v.aval
    dtype = getattr(aval, "dtype", None)
    size = getattr(dtype, "itemsize", 4)
    shape, other = getattr(aval, "shape", ()), getattr(w.aval, "shape", ())
    return Operand(tuple(shape), tuple(other), size, getattr(dtype, "name", "key"))


def _literal(v: Literal, w: Literal) -> Operand:
    value = _fresh(v, w)
    value.given = True
    return value


def _body(e: JaxprEqn) -> Jaxpr | None:
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in e.params:
            return _jaxprs(e.params[name])[0]
    return None


def _jaxprs(given: Any) -> list[Jaxpr]:
    several = given if isinstance(given, tuple | list) else [given]
    return [getattr(x, "jaxpr", x) for x in several]


# -- which dimensions a tensor axis splits --------------------------------------------------


def _split(done: Operation) -> None:
    """Say which dimensions of what an operation makes are split, of those of what it reads."""
    if not any(v.split for v in done.reads):
        return
    rule = _RULES.get(done.name)
    if rule is not None:
        rule(done)
        return
    for made in done.makes:
        alike = [v.split for v in done.reads if len(v.two) == len(made.two)]
        dims = frozenset().union(*alike)
        made.split = frozenset(d for d in dims if made.two[d] > 1)


def _of_product(done: Operation) -> None:
    (a_in, b_in), (a_batch, b_batch) = done.params["dimension_numbers"]
    a, b = done.reads
    free_a = [d for d in range(len(a.two)) if d not in (*a_in, *a_batch)]
    free_b = [d for d in range(len(b.two)) if d not in (*b_in, *b_batch)]
    places = [("a", d) for d in (*a_batch, *free_a)] + [("b", d) for d in free_b]
    inner = any(d in a.split for d in a_in) or any(d in b.split for d in b_in)
    done.summed = inner
    found = {n for n, (of, d) in enumerate(places) if d in (a if of == "a" else b).split}
    found |= {n for n, d in enumerate(b_batch) if d in b.split}
    done.makes[0].split = WHOLE if inner and not found else frozenset(found)


def _of_transpose(done: Operation) -> None:
    back = {d: n for n, d in enumerate(done.params["permutation"])}
    done.makes[0].split = frozenset(back[d] for d in done.reads[0].split)


def _of_reshape(done: Operation) -> None:
    """A split dimension stays so where its leading part begins a dimension of the result."""
    old, new = done.reads[0].two, done.makes[0].two
    before = lambda shape, d: math.prod(shape[:d])
    found = set()
    for d in done.reads[0].split:
        places = [n for n in range(len(new)) if new[n] > 1 and before(new, n) <= before(old, d)]
        if places and before(new, places[-1]) * new[places[-1]] > before(old, d):
            found.add(places[-1])
    done.makes[0].split = frozenset(found)


def _of_broadcast(done: Operation) -> None:
    where, given = done.params["broadcast_dimensions"], done.reads[0]
    done.makes[0].split = frozenset(where[d] for d in given.split if given.two[d] > 1)


def _of_reduction(done: Operation) -> None:
    axes = done.params["axes"]
    rest = [d for d in range(len(done.reads[0].two)) if d not in axes]
    done.summed = any(d in done.reads[0].split for d in axes)
    for made in done.makes:
        made.split = frozenset(n for n, d in enumerate(rest) if d in done.reads[0].split)


def _of_squeeze(done: Operation) -> None:
    gone = done.params["dimensions"]
    rest = [d for d in range(len(done.reads[0].two)) if d not in gone]
    done.makes[0].split = frozenset(n for n, d in enumerate(rest) if d in done.reads[0].split)


def _whole(done: Operation) -> None:
    done.summed = True


def _as_last(done: Operation) -> None:
    """A scatter adds to what has the shape of its first operand."""
    done.makes[0].split = done.reads[0].split


_RULES = {
    "dot_general": _of_product,
    "transpose": _of_transpose,
    "reshape": _of_reshape,
    "broadcast_in_dim": _of_broadcast,
    "squeeze": _of_squeeze,
    "gather": _whole,
    "conv_general_dilated": _whole,
    "scatter-add": _as_last,
    "scatter_add": _as_last,
    **dict.fromkeys(REDUCES, _of_reduction),
}
