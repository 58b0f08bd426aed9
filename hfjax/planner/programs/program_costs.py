"""The costs of a part of a program: its matmuls, its memory traffic and its live bytes.

XLA fuses elementwise operations into their consumers. So an array is in memory only if a matmul, a
sort or the like reads or makes it, if it is the result of a reduction, or if it leaves the part;
all else is recomputed wherever it is read. `Kernel`s follow from that: a matmul, or a fusion, which
reads arrays in memory and writes those that have to be. Fusions that read the same large arrays
are merged (a norm and what it scales).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hfjax.parallel.jaxprs.primitives import MATMULS, REDUCTIONS
from hfjax.planner.programs.placeholder_attention import BACKWARD, FORWARD, WINDOW
from hfjax.planner.programs.read_program import (
    UNFUSED,
    WRITE_NOTHING,
    Operand,
    Operation,
    Share,
    unique,
)

LARGE = 64  # a fusion's large operands: at least 1/64 of its largest
NEAR = 60  # operations between two fusions that are merged

Bytes = tuple[float, float]  # per example, and fixed
GemmShape = tuple[int, int, int, int]  # of a matmul: batch, m, n, k


@dataclass(frozen=True)
class GrowingProduct:
    """`batch` matmuls [m, k] x [k, n], for two and three examples, and which size is sharded."""

    two: GemmShape
    three: GemmShape
    dtype: str
    split_dim: int | None  # the size that a tensor axis divides; None: replicated
    times: float
    at: int = 0

    def gemm_shape(self, examples: float, tensor: int) -> tuple[float, float, float, float]:
        """Return batch, m, n and k for `examples` examples on one of `tensor` devices."""
        dims = [a + (b - a) * (examples - 2) for a, b in zip(self.two, self.three, strict=True)]
        if self.split_dim is not None:
            dims[self.split_dim] /= tensor
        return dims[0], dims[1], dims[2], dims[3]


@dataclass(frozen=True)
class FusedCall:
    """One attention call of one example, on a device without any axis."""

    heads: int
    key_heads: int
    seq_len: int
    width: int
    itemsize: int
    backward: bool
    split: bool
    times: float
    at: int = 0
    window: int | None = None  # how many positions a query sees; None: all before it

    @property
    def window_fraction(self) -> float:
        """The fraction of the pairs of causal attention that are in the window.

        >>> FusedCall(1, 1, 4, 8, 2, False, False, 1, window=2).window_fraction  # 7 of 10
        0.7
        """
        window = min(self.window or self.seq_len, self.seq_len)
        pairs = window * (window + 1) / 2 + (self.seq_len - window) * window
        return pairs / (self.seq_len * (self.seq_len + 1) / 2)

    @property
    def score_macs(self) -> float:
        """Multiplications for all scores, without causality: as models are compared."""
        keys = min(self.window or self.seq_len, self.seq_len)
        return self.times * self.heads * self.width * self.seq_len * keys


@dataclass(eq=False)
class Kernel:
    """One kernel that a GPU runs: what it reads and writes, and when."""

    reads: list[Operand]
    writes: list[Operand]
    at: int
    fusion: bool
    times: float = 1
    extra: list[Operand] = field(default_factory=list)  # live while it runs, unsharded


@dataclass
class Costs:
    """The costs of a list of operations."""

    products: list[GrowingProduct]
    attention: list[FusedCall]
    kernels: list[Kernel]
    results: list[Operand]
    product_outputs: list[Operand] = field(default_factory=list)  # of matmuls
    gathered: list[Operand] = field(default_factory=list)  # read unsharded by sharded matmuls

    def traffic(self, share: Share) -> Bytes:
        """Return memory traffic of all but matmuls and attention: bytes per example, and fixed."""
        per_example = fixed = 0.0
        for k in self.kernels:
            if k.fusion:
                for value in unique([*k.reads, *k.writes]):
                    a, b = value.size(share)
                    per_example, fixed = (
                        per_example + a * k.times,
                        fixed + (b * k.times if a else 0),
                    )
        return per_example, fixed

    def select(self, first: float, end: float) -> "Costs":
        """Return the costs of the operations from index `first` up to `end`."""
        in_range = lambda values: [v for v in values if first <= v.at < end]
        return Costs(
            in_range(self.products), in_range(self.attention), in_range(self.kernels), self.results
        )

    @property
    def launches(self) -> float:
        """The number of kernels that run."""
        return sum(k.times for k in self.kernels)


def costs_of(
    operations: Sequence[Operation], results: Iterable[Operand], border: int | None = None
) -> Costs:
    """Return the costs of operations; `results` are the values that are kept.

    Fusions before and after the operation of index `border` are never merged.
    """
    return _FusionPass(operations, list(results), border).costs()


def live_across(costs: Costs, border: int) -> list[Operand]:
    """Return what is read from operation `border` on, and was live before it."""
    written = {id(v) for k in costs.kernels if k.at >= border for v in k.writes}
    read = unique(v for k in costs.kernels if k.at >= border for v in k.reads)
    return [v for v in read if id(v) not in written]


def peak_sizes(costs: Costs, share: Share, keep_results: bool = True) -> list[Bytes]:
    """Return the points at which most bytes are live.

    Args:
        costs: The costs of what runs.
        share: Among how many devices values are sharded.
        keep_results: Whether results stay until the end, or are freed after their last read.
    """
    last_read: dict[int, int] = {}
    for n, k in enumerate(costs.kernels):
        last_read |= dict.fromkeys(map(id, k.reads), n)
    if keep_results:
        last_read |= dict.fromkeys(map(id, costs.results), len(costs.kernels))
    full_sequence = Share(share.tensor, False, share.expert)
    live: dict[int, Operand] = {}
    size, sizes = (0.0, 0.0), []
    for n, k in enumerate(costs.kernels):
        outputs = [v for v in unique(k.writes) if id(v) not in live]
        last_inputs = [v for v in unique(k.reads) if last_read.get(id(v)) == n and id(v) in live]
        live |= {id(v): v for v in outputs}
        size = plus(size, total_of(outputs, share))
        temporaries = total_of(k.extra, full_sequence)
        if k.fusion:  # its output reuses the buffers of operands that it reads last
            temporaries = plus(
                temporaries, total_of(_reused_outputs(outputs, last_inputs), share), -1
            )
        sizes.append(plus(size, temporaries))
        freed = [*last_inputs, *(v for v in outputs if last_read.get(id(v), -1) <= n)]
        size = plus(size, total_of(freed, share), -1)
        for v in freed:
            del live[id(v)]
    return hull(sizes)


def total_of(values: Iterable[Operand], share: Share) -> Bytes:
    """Return the bytes of several values on a device."""
    pairs = [v.size(share) for v in values]
    return sum(a for a, _ in pairs), sum(b for _, b in pairs)


def plus(one: Bytes, other: Bytes, sign: int = 1) -> Bytes:
    """Return the sum of two pairs, or their difference."""
    return one[0] + sign * other[0], one[1] + sign * other[1]


def _reused_outputs(outputs: Sequence[Operand], last_inputs: Sequence[Operand]) -> list[Operand]:
    """Return the results that can reuse the buffer of an operand of their size."""
    free, reused = list(map(_bytes, last_inputs)), []
    for value in outputs:
        if _bytes(value) in free:
            free.remove(_bytes(value))
            reused.append(value)
    return reused


def hull(pairs: Sequence[Bytes]) -> list[Bytes]:
    """Return the points that are the largest for some number of examples.

    >>> hull([(1, 5), (2, 1), (1, 4)])
    [(1, 5), (2, 1)]
    """
    batch_sizes = (0.0, 0.25, 1.0, 2.0, 4.0, 8.0, 32.0, 1e6)
    best = [max(pairs, key=lambda m: m[0] * r + m[1]) for r in batch_sizes] if pairs else []
    return sorted(set(best))


def max_bytes(pairs: Iterable[Bytes], examples: float) -> float:
    """Return the bytes of the largest point, for so many examples."""
    return max((a * examples + b for a, b in pairs), default=0.0)


def _bytes(value: Operand) -> int:
    return math.prod(value.two) * value.itemsize


class _FusionPass:
    """Finds the kernels of operations in program order."""

    def __init__(
        self, operations: Sequence[Operation], results: list[Operand], border: int | None
    ) -> None:
        self.operations, self.results, self.border = operations, results, border
        self.producer: dict[int, Operation] = {}
        self.aliases: dict[int, Operand] = {}  # a view -> the operand that it views
        self.in_memory: set[int] = set()  # ids of operands in memory
        self.kernels: list[Kernel] = []
        self.products: list[GrowingProduct] = []
        self.attention: list[FusedCall] = []
        self.cones: dict[int, list[Operand]] = {}
        self.product_outputs: list[Operand] = []
        self.gathered: list[Operand] = []

    def costs(self) -> Costs:
        for at, op in enumerate(self.operations):
            self._add_operation(at, op)
        end = len(self.operations)
        for value in self.results:
            self._to_memory(self._root(value), end)
        results = unique(self._root(v) for v in self.results)
        results = [v for v in results if id(v) in self.in_memory]
        kernels = _merge_fusions(self.kernels, self.border or 0)
        return Costs(
            self.products, self.attention, kernels, results, self.product_outputs, self.gathered
        )

    def _add_operation(self, at: int, op: Operation) -> None:
        name = op.name
        if name in WRITE_NOTHING:
            for a, b in zip(op.reads, op.makes, strict=False):
                if _bytes(a) == _bytes(b):
                    self.aliases[id(b)] = self._root(a)
                else:
                    self.producer[id(b)] = op
            return
        if name in MATMULS or name in UNFUSED or name in (FORWARD, BACKWARD):
            self._add_kernel(at, op)
            return
        for output in op.makes:
            self.producer[id(output)] = op
        if name in REDUCTIONS:
            for output in op.makes:
                self._fusion(output, at, op.times)

    def _add_kernel(self, at: int, op: Operation) -> None:
        operands = [self._root(v) for v in op.reads]
        for value in operands:
            self._to_memory(value, at)
        reads = [v for v in operands if id(v) in self.in_memory or v.is_input or self._is_given(v)]
        kernel = Kernel(unique(reads), list(op.makes), at, False, op.times)
        self.in_memory |= {id(v) for v in op.makes}
        self.kernels.append(kernel)
        self._add_product(op, kernel, at)
        for inner in op.body:
            self._add_nested_products(inner, at)

    def _add_nested_products(self, op: Operation, at: int) -> None:
        if op.name in MATMULS:
            self.products.append(product_of(op, at))
        elif op.name in (FORWARD, BACKWARD):
            self.attention.append(_fused_call(op, at))
        for inner in op.body:
            self._add_nested_products(inner, at)

    def _add_product(self, op: Operation, kernel: Kernel, at: int) -> None:
        if op.name in MATMULS:
            self.products.append(product_of(op, at))
            self.product_outputs += op.makes
            if op.is_partial:  # the full result, before its partial sums are reduce-scattered
                kernel.extra = [_full_operand(v) for v in op.makes]
            else:  # an operand that is gathered along the sequence
                unsplit = [v for v in op.reads if not v.split and v.per_example and not v.is_input]
                if any(m.split for m in op.makes):
                    kernel.extra = [_full_operand(v) for v in unsplit]
                    self.gathered += [self._root(v) for v in unsplit]
        elif op.name in (FORWARD, BACKWARD):
            self.attention.append(_fused_call(op, at))

    def _to_memory(self, value: Operand, at: int) -> None:
        """Write a value into memory, if a fusion makes it."""
        if id(value) in self.in_memory or id(value) not in self.producer:
            return
        self._fusion(value, at, self.producer[id(value)].times)

    def _fusion(self, value: Operand, at: int, times: float) -> None:
        reads = self._cone(value)
        self.kernels.append(Kernel(reads, [value], at, True, times))
        self.in_memory.add(id(value))

    def _cone(self, value: Operand) -> list[Operand]:
        """Return the operands in memory from which a value is computed."""
        if id(value) in self.cones:
            known = self.cones[id(value)]
            if not any(id(v) not in self.in_memory and not self._is_given(v) for v in known):
                return known
        inputs: dict[int, Operand] = {}
        visited, todo = set(), [self._root(v) for v in self.producer[id(value)].reads]
        while todo:
            v = todo.pop()
            if id(v) in visited:
                continue
            visited.add(id(v))
            if id(v) in self.in_memory or self._is_given(v):
                inputs[id(v)] = v
            elif id(v) in self.producer:
                todo += [self._root(x) for x in self.producer[id(v)].reads]
        self.cones[id(value)] = list(inputs.values())
        return self.cones[id(value)]

    def _is_given(self, value: Operand) -> bool:
        """Return whether no operation here makes it."""
        return id(value) not in self.producer and id(value) not in self.in_memory

    def _root(self, value: Operand) -> Operand:
        while id(value) in self.aliases:
            value = self.aliases[id(value)]
        return value


def _fused_call(op: Operation, at: int) -> FusedCall:
    q, k = op.reads[0], op.reads[1]
    _, length, heads, width = q.two
    back, split = op.name == BACKWARD, bool(q.split)
    window = dict(op.params["attributes"]).get(WINDOW)
    shape = (heads, k.two[2], length, width, q.itemsize)
    return FusedCall(*shape, back, split, op.times, at, window and int(window))


def _full_operand(value: Operand) -> Operand:
    return Operand(value.two, value.three, value.itemsize, value.dtype)


def _merge_fusions(kernels: list[Kernel], border: int) -> list[Kernel]:
    """Return the kernels, fusions of the same large arrays merged in place of the first."""
    merged: list[Kernel] = []
    fusions: dict[tuple[bool, frozenset[int]], Kernel] = {}
    for k in kernels:
        if not k.fusion:
            merged.append(k)
            continue
        largest = max((_bytes(v) for v in k.reads), default=0)
        large = frozenset(id(v) for v in k.reads if _bytes(v) * LARGE > largest and v.per_example)
        key = k.at < border, large
        first = fusions.get(key) if large else None
        if first is not None and first.times == k.times and k.at - first.at < NEAR:
            first.reads = unique([*first.reads, *[v for v in k.reads if v not in first.writes]])
            first.writes = unique([*first.writes, *k.writes])
            continue
        fusions[key] = k
        merged.append(k)
    return merged


def product_of(op: Operation, at: int = 0) -> GrowingProduct:
    """Return an operation's matmul."""
    if op.name == "conv_general_dilated":
        return _convolution(op, at)
    (a_in, b_in), (a_batch, _) = op.params["dimension_numbers"]
    a, b = op.reads

    def gemm_shape(x: tuple[int, ...], y: tuple[int, ...]) -> GemmShape:
        batch, k = math.prod(x[d] for d in a_batch), math.prod(x[d] for d in a_in)
        m, n = (math.prod(shape) // max(batch * k, 1) for shape in (x, y))
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
    two, three = gemm_shape(a.two, b.two), gemm_shape(a.three, b.three)
    two, three = _repeat_batch(two, op.trips[0]), _repeat_batch(three, op.trips[1])
    return GrowingProduct(two, three, a.dtype, divided, op.times, at)


def _repeat_batch(shape: GemmShape, trips: float) -> GemmShape:
    """Return the sizes over all iterations of a loop, as a batch: each has its own operands."""
    batch, m, n, k = shape
    return round(batch * trips), m, n, k


def _convolution(op: Operation, at: int) -> GrowingProduct:
    numbers = op.params["dimension_numbers"]
    kernel, result = op.reads[1], op.makes[0]

    def gemm_shape(kernel: tuple[int, ...], result: tuple[int, ...]) -> GemmShape:
        n = kernel[numbers.rhs_spec[0]]
        groups = op.params["feature_group_count"]
        return groups, math.prod(result) // n, max(n // groups, 1), math.prod(kernel) // n

    return GrowingProduct(
        gemm_shape(kernel.two, result.two),
        gemm_shape(kernel.three, result.three),
        kernel.dtype,
        None,
        op.times,
        at,
    )
