"""What a part of a program costs: its products, what passes through memory, what is there at once.

XLA fuses what is computed element by element into what needs it. So an array is in memory only if
a product, a sort or the like reads it or makes it, if it is the result of a sum, or if it leaves
the part; all else is made again wherever it is read. `Kernel`s follow from that: a product, or a
fusion, which reads what is in memory and writes what is to be. Fusions that read the same large
arrays are one (a norm and what it scales).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hfjax.planner.programs.placeholder_attention import BACKWARD, FORWARD, WINDOW
from hfjax.planner.programs.read_program import (
    ALONE,
    PRODUCTS,
    REDUCES,
    VIEWS,
    Operand,
    Operation,
    Share,
    unique,
)

LARGE = 64  # a fusion's large operands: at least such a part of its largest
NEAR = 60  # operations between two fusions that are made one

Bytes = tuple[float, float]  # of each row, and fixed
Sides = tuple[int, int, int, int]  # of a product: batch, m, n, k


@dataclass(frozen=True)
class GrowingProduct:
    """`batch` products [m, k] x [k, n]: each side for two rows and for three, and what is split."""

    two: Sides
    three: Sides
    dtype: str
    divided: int | None  # the side that a tensor axis divides; None: each device has all
    times: float
    at: int = 0

    def sides(self, rows: float, tensor: int) -> tuple[float, float, float, float]:
        """Return batch, m, n and k of so many rows on one of `tensor` devices."""
        found = [a + (b - a) * (rows - 2) for a, b in zip(self.two, self.three, strict=True)]
        if self.divided is not None:
            found[self.divided] /= tensor
        return found[0], found[1], found[2], found[3]


@dataclass(frozen=True)
class FusedCall:
    """One attention, of one row: what a device does without any axis."""

    heads: int
    key_heads: int
    positions: int
    width: int
    itemsize: int
    backward: bool
    split: bool
    times: float
    at: int = 0
    window: int | None = None  # how many positions a query sees; None: all before it

    @property
    def part(self) -> float:
        """Which part of the pairs of causal attention are in the window.

        >>> FusedCall(1, 1, 4, 8, 2, False, False, 1, window=2).part  # 7 of 10
        0.7
        """
        seen = min(self.window or self.positions, self.positions)
        pairs = seen * (seen + 1) / 2 + (self.positions - seen) * seen
        return pairs / (self.positions * (self.positions + 1) / 2)

    @property
    def seen(self) -> float:
        """The numbers that a row of queries meets, had it no order: as models are compared."""
        positions = min(self.window or self.positions, self.positions)
        return self.times * self.heads * self.width * self.positions * positions


@dataclass(eq=False)
class Kernel:
    """One thing that a GPU is told to do: what it reads and writes, and when."""

    reads: list[Operand]
    writes: list[Operand]
    at: int
    fusion: bool
    times: float = 1
    extra: list[Operand] = field(default_factory=list)  # there while it runs, whole


@dataclass
class Costs:
    """What a list of operations costs."""

    products: list[GrowingProduct]
    attention: list[FusedCall]
    kernels: list[Kernel]
    results: list[Operand]
    made: list[Operand] = field(default_factory=list)  # by products
    gathered: list[Operand] = field(default_factory=list)  # read whole by products that are split

    def traffic(self, share: Share) -> Bytes:
        """Return bytes through memory of all but products and attention: a row's, and fixed."""
        rows = fixed = 0.0
        for k in self.kernels:
            if k.fusion:
                for value in unique([*k.reads, *k.writes]):
                    a, b = value.size(share)
                    rows, fixed = rows + a * k.times, fixed + (b * k.times if a else 0)
        return rows, fixed

    def part(self, first: float, end: float) -> "Costs":
        """Return the costs of the operations from one number to another."""
        here = lambda values: [v for v in values if first <= v.at < end]
        return Costs(here(self.products), here(self.attention), here(self.kernels), self.results)

    @property
    def launches(self) -> float:
        """How many kernels there are."""
        return sum(k.times for k in self.kernels)


def costs_of(
    operations: Sequence[Operation], results: Iterable[Operand], border: int | None = None
) -> Costs:
    """Return what operations cost of which these results are kept.

    Fusions before and after the operation of the number `border` are never one.
    """
    return _Fusing(operations, list(results), border).costs()


def kept(costs: Costs, border: int) -> list[Operand]:
    """Return what is read from the operation `border` on, and was there before it."""
    written = {id(v) for k in costs.kernels if k.at >= border for v in k.writes}
    read = unique(v for k in costs.kernels if k.at >= border for v in k.reads)
    return [v for v in read if id(v) not in written]


def at_once(costs: Costs, share: Share, results_stay: bool = True) -> list[Bytes]:
    """Return the moments at which most is there.

    Args:
        costs: What is run.
        share: Among how many devices values are split.
        results_stay: Until the end; or they go when they were last read.
    """
    last: dict[int, int] = {}
    for n, k in enumerate(costs.kernels):
        last |= dict.fromkeys(map(id, k.reads), n)
    if results_stay:
        last |= dict.fromkeys(map(id, costs.results), len(costs.kernels))
    whole = Share(share.tensor, False, share.expert)
    alive: dict[int, Operand] = {}
    now, found = (0.0, 0.0), []
    for n, k in enumerate(costs.kernels):
        made = [v for v in unique(k.writes) if id(v) not in alive]
        dying = [v for v in unique(k.reads) if last.get(id(v)) == n and id(v) in alive]
        alive |= {id(v): v for v in made}
        now = plus(now, total_of(made, share))
        beside = total_of(k.extra, whole)
        if k.fusion:  # what it makes takes the place of what it reads last
            beside = plus(beside, total_of(_in_place(made, dying), share), -1)
        found.append(plus(now, beside))
        gone = [*dying, *(v for v in made if last.get(id(v), -1) <= n)]
        now = plus(now, total_of(gone, share), -1)
        for v in gone:
            del alive[id(v)]
    return hull(found)


def total_of(values: Iterable[Operand], share: Share) -> Bytes:
    """Return the bytes of several values on a device."""
    pairs = [v.size(share) for v in values]
    return sum(a for a, _ in pairs), sum(b for _, b in pairs)


def plus(one: Bytes, other: Bytes, sign: int = 1) -> Bytes:
    """Return two pairs added, or subtracted."""
    return one[0] + sign * other[0], one[1] + sign * other[1]


def _in_place(made: Sequence[Operand], dying: Sequence[Operand]) -> list[Operand]:
    """Return what of the results may lie where an operand of its size lay."""
    free, found = list(map(_bytes, dying)), []
    for value in made:
        if _bytes(value) in free:
            free.remove(_bytes(value))
            found.append(value)
    return found


def hull(moments: Sequence[Bytes]) -> list[Bytes]:
    """Return the moments that are the largest for some number of rows.

    >>> hull([(1, 5), (2, 1), (1, 4)])
    [(1, 5), (2, 1)]
    """
    rows = (0.0, 0.25, 1.0, 2.0, 4.0, 8.0, 32.0, 1e6)
    best = [max(moments, key=lambda m: m[0] * r + m[1]) for r in rows] if moments else []
    return sorted(set(best))


def most(moments: Iterable[Bytes], rows: float) -> float:
    """Return the bytes of the largest moment, of so many rows."""
    return max((a * rows + b for a, b in moments), default=0.0)


def _bytes(value: Operand) -> int:
    return math.prod(value.two) * value.itemsize


class _Fusing:
    """Finds the kernels of operations in their order."""

    def __init__(
        self, operations: Sequence[Operation], results: list[Operand], border: int | None
    ) -> None:
        self.operations, self.results, self.border = operations, results, border
        self.maker: dict[int, Operation] = {}
        self.same: dict[int, Operand] = {}  # a view -> what it looks at
        self.there: set[int] = set()  # in memory
        self.kernels: list[Kernel] = []
        self.products: list[GrowingProduct] = []
        self.attention: list[FusedCall] = []
        self.cones: dict[int, list[Operand]] = {}
        self.made: list[Operand] = []
        self.gathered: list[Operand] = []

    def costs(self) -> Costs:
        for at, done in enumerate(self.operations):
            self._operation(at, done)
        end = len(self.operations)
        for value in self.results:
            self._to_memory(self._root(value), end)
        results = unique(self._root(v) for v in self.results)
        results = [v for v in results if id(v) in self.there]
        kernels = _joined(self.kernels, self.border or 0)
        return Costs(self.products, self.attention, kernels, results, self.made, self.gathered)

    def _operation(self, at: int, done: Operation) -> None:
        name = done.name
        if name in VIEWS:
            for a, b in zip(done.reads, done.makes, strict=False):
                if _bytes(a) == _bytes(b):
                    self.same[id(b)] = self._root(a)
                else:
                    self.maker[id(b)] = done
            return
        if name in PRODUCTS or name in ALONE or name in (FORWARD, BACKWARD):
            self._alone(at, done)
            return
        for made in done.makes:
            self.maker[id(made)] = done
        if name in REDUCES:
            for made in done.makes:
                self._fusion(made, at, done.times)

    def _alone(self, at: int, done: Operation) -> None:
        operands = [self._root(v) for v in done.reads]
        for value in operands:
            self._to_memory(value, at)
        reads = [v for v in operands if id(v) in self.there or v.given or self._is_given(v)]
        kernel = Kernel(unique(reads), list(done.makes), at, False, done.times)
        self.there |= {id(v) for v in done.makes}
        self.kernels.append(kernel)
        self._count(done, kernel, at)
        for inner in done.inside:
            self._inside(inner, at)

    def _inside(self, done: Operation, at: int) -> None:
        if done.name in PRODUCTS:
            self.products.append(product_of(done, at))
        elif done.name in (FORWARD, BACKWARD):
            self.attention.append(_fused(done, at))
        for inner in done.inside:
            self._inside(inner, at)

    def _count(self, done: Operation, kernel: Kernel, at: int) -> None:
        if done.name in PRODUCTS:
            self.products.append(product_of(done, at))
            self.made += done.makes
            if done.summed:  # the whole result, before its parts are summed and scattered
                kernel.extra = [_whole_of(v) for v in done.makes]
            else:  # an operand that is gathered along the sequence
                whole = [v for v in done.reads if not v.split and v.of_rows and not v.given]
                if any(m.split for m in done.makes):
                    kernel.extra = [_whole_of(v) for v in whole]
                    self.gathered += [self._root(v) for v in whole]
        elif done.name in (FORWARD, BACKWARD):
            self.attention.append(_fused(done, at))

    def _to_memory(self, value: Operand, at: int) -> None:
        """Write a value into memory, if it is made by what is fused."""
        if id(value) in self.there or id(value) not in self.maker:
            return
        self._fusion(value, at, self.maker[id(value)].times)

    def _fusion(self, value: Operand, at: int, times: float) -> None:
        reads = self._cone(value)
        self.kernels.append(Kernel(reads, [value], at, True, times))
        self.there.add(id(value))

    def _cone(self, value: Operand) -> list[Operand]:
        """Return what is in memory of which a value is made."""
        if id(value) in self.cones:
            known = self.cones[id(value)]
            if not any(id(v) not in self.there and not self._is_given(v) for v in known):
                return known
        found: dict[int, Operand] = {}
        seen, todo = set(), [self._root(v) for v in self.maker[id(value)].reads]
        while todo:
            v = todo.pop()
            if id(v) in seen:
                continue
            seen.add(id(v))
            if id(v) in self.there or self._is_given(v):
                found[id(v)] = v
            elif id(v) in self.maker:
                todo += [self._root(x) for x in self.maker[id(v)].reads]
        self.cones[id(value)] = list(found.values())
        return self.cones[id(value)]

    def _is_given(self, value: Operand) -> bool:
        """Return whether nothing here makes it."""
        return id(value) not in self.maker and id(value) not in self.there

    def _root(self, value: Operand) -> Operand:
        while id(value) in self.same:
            value = self.same[id(value)]
        return value


def _fused(done: Operation, at: int) -> FusedCall:
    q, k = done.reads[0], done.reads[1]
    _, length, heads, width = q.two
    back, split = done.name == BACKWARD, bool(q.split)
    window = dict(done.params["attributes"]).get(WINDOW)
    shape = (heads, k.two[2], length, width, q.itemsize)
    return FusedCall(*shape, back, split, done.times, at, window and int(window))


def _whole_of(value: Operand) -> Operand:
    return Operand(value.two, value.three, value.itemsize, value.dtype)


def _joined(kernels: list[Kernel], border: int) -> list[Kernel]:
    """Return the kernels, fusions of the same large arrays made one, at the place of the first."""
    found: list[Kernel] = []
    places: dict[tuple[bool, frozenset[int]], Kernel] = {}
    for k in kernels:
        if not k.fusion:
            found.append(k)
            continue
        largest = max((_bytes(v) for v in k.reads), default=0)
        large = frozenset(id(v) for v in k.reads if _bytes(v) * LARGE > largest and v.of_rows)
        main = k.at < border, large
        first = places.get(main) if large else None
        if first is not None and first.times == k.times and k.at - first.at < NEAR:
            first.reads = unique([*first.reads, *[v for v in k.reads if v not in first.writes]])
            first.writes = unique([*first.writes, *k.writes])
            continue
        places[main] = k
        found.append(k)
    return found


def product_of(done: Operation, at: int = 0) -> GrowingProduct:
    """Return an operation's product."""
    if done.name == "conv_general_dilated":
        return _convolution(done, at)
    (a_in, b_in), (a_batch, _) = done.params["dimension_numbers"]
    a, b = done.reads

    def sides(x: tuple[int, ...], y: tuple[int, ...]) -> Sides:
        batch, k = math.prod(x[d] for d in a_batch), math.prod(x[d] for d in a_in)
        m, n = (math.prod(side) // max(batch * k, 1) for side in (x, y))
        return batch, m, n, k

    divided = None
    if any(d in a.split for d in a_batch):
        divided = 0
    elif any(d in a.split for d in a_in) or any(d in b.split for d in b_in):
        divided = 3
    elif a.split:
        divided = 1
    elif b.split:
        divided = 2
    two, three = sides(a.two, b.two), sides(a.three, b.three)
    two, three = _each_turn(two, done.turns[0]), _each_turn(three, done.turns[1])
    return GrowingProduct(two, three, a.dtype, divided, done.times, at)


def _each_turn(sides: Sides, turns: float) -> Sides:
    """Return the sides of all turns of a loop: each has its own factors, as those of a batch."""
    batch, m, n, k = sides
    return round(batch * turns), m, n, k


def _convolution(done: Operation, at: int) -> GrowingProduct:
    numbers = done.params["dimension_numbers"]
    kernel, result = done.reads[1], done.makes[0]

    def sides(kernel: tuple[int, ...], result: tuple[int, ...]) -> Sides:
        n = kernel[numbers.rhs_spec[0]]
        groups = done.params["feature_group_count"]
        return groups, math.prod(result) // n, max(n // groups, 1), math.prod(kernel) // n

    return GrowingProduct(
        sides(kernel.two, result.two),
        sides(kernel.three, result.three),
        kernel.dtype,
        None,
        done.times,
        at,
    )
