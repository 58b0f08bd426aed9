"""Each rule alone gives, of operands of all kinds, what one device gives.

A sample of the operation (rule_samples.py) is run with each combination of kinds of its operands.
"""

import functools
import itertools
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfjax.parallel.jaxprs.walk import equations_in, name_of
from hfjax.parallel.spmd.interpreter import RULES, run_partitioned
from hfjax.parallel.spmd.placements import (
    BATCH_SPLIT,
    PARTIAL,
    REPLICATED,
    AxisGroup,
    Placement,
    ShardedValue,
    Split,
    cotangent_placement,
    from_local,
    local_array,
    placement_of,
)
from hfjax.parallel.spmd.rules.user_collectives import COLLECTIVES
from tests.compare_programs import differences, in_pieces
from tests.rule_samples import AXIS, NO_ROWS, SAMPLES, UNKNOWN, Sample, on_grid

# Names that other versions of jax have for what this one calls otherwise.
OTHER_NAMES = {
    "checkpoint": "remat2",
    "remat": "remat2",
    "copy_p": "copy",
    "core_call": "jit",
    "custom_vjp_call_jaxpr": "custom_vjp_call",
    "eval_jaxpr": "jit",
    "pjit": "jit",
}
NOT_ALONE = {
    "custom_jvp_call_jaxpr": "a stub in this jax: nothing makes it",
    "log2": "this jax divides logarithms",
    "one_minus_square": "not in this jax",
    "random_gamma_grad": "this jax makes it of other operations",
    "pvary": "made only inside a shard_map that checks what varies",
    "psum_invariant": "made only inside a shard_map that checks what varies",
}
FEW, SOME = 4, 24  # combinations of a name in `make test`; on 3 and 4 devices
AT_ONCE = 12  # of one compilation
SLOW = pytest.mark.slow


MADE = "made"  # of its first row, when it is asked for
LENGTHS = ((24,), (12,))  # of dimensions that are made in parts


class Ring(NamedTuple):
    """How many devices there are, and whether each has an early piece and a late one."""

    size: int
    folds: bool

    def __str__(self) -> str:
        return f"{self.size}{' folded' * self.folds}"

    @property
    def side(self) -> AxisGroup:
        pairs = tuple((i, 2 * self.size - 1 - i) for i in range(self.size))
        return AxisGroup((AXIS,), self.size, AXIS, pairs if self.folds else None)


RINGS = [Ring(size, folds) for size in (2, 3, 4) for folds in (False, True)]


class Case(NamedTuple):
    """A sample, the kinds of its operands, and the devices."""

    name: str
    number: int
    kinds: tuple[Placement, ...]  # or MADE
    ring: Ring

    @property
    def of_one(self) -> tuple[str, int, int | None]:
        """What tells what one device makes: the sample, and which operand is made in it."""
        return self.name, self.number, self.kinds.index(MADE) if MADE in self.kinds else None

    @property
    def given(self) -> list[Placement]:
        """The kinds of what devices are given."""
        return [REPLICATED if kind == MADE else kind for kind in self.kinds]

    @property
    def refusal(self) -> str:
        """What it is told, if it is refused."""
        refuses = samples_of(self.name)[self.number].refuses
        some = any(isinstance(kind, Split) for kind in self.kinds)
        return "" if some and refuses == NO_ROWS else refuses

    def __str__(self) -> str:
        kinds = ", ".join(f"{k[0]}/{k[1]}" if isinstance(k, Split) else k for k in self.kinds)
        return f"{self.name} {self.number} ({kinds}) on {self.ring}"


def samples_of(name: str) -> list[Sample]:
    return SAMPLES[name] if name in SAMPLES else UNKNOWN[name]


def is_real(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


@functools.cache
def operands(name: str, number: int, made: int | None = None) -> list[np.ndarray]:
    rng = np.random.default_rng(zlib.crc32(f"{name} {number}".encode()))
    drawn = [draw(rng) for draw in samples_of(name)[number].draws]
    return [x[:1] if i == made else x for i, x in enumerate(drawn)]


def function_of(name: str, number: int, made: int | None = None) -> Callable:
    """Return the sample's function, which makes one operand of its first row; it returns a list."""
    shapes = [x.shape for x in operands(name, number)]

    def run(*arrays: Any) -> list:
        pairs = enumerate(zip(arrays, shapes, strict=True))
        whole = [jnp.broadcast_to(x, to) if i == made else x for i, (x, to) in pairs]
        return jax.tree.leaves(samples_of(name)[number].function(*whole))

    return run


def kinds_of(x: np.ndarray, side: AxisGroup) -> list[Placement]:
    """Return all kinds of which a value may be."""
    cuts = [Split(dim, outer) for dim in range(x.ndim) for outer in (1, 2)]
    sums = [PARTIAL] if is_real(x) or x.dtype == np.int32 else []
    made = [MADE] if x.shape[:1] in LENGTHS else []
    return [REPLICATED, *sums, *made, *(cut for cut in cuts if side.divides(x.shape, cut))]


def cases(name: str, ring: Ring) -> list[Case]:
    return [
        Case(name, number, kinds, ring)
        for number, sample in enumerate(samples_of(name))
        for kinds in itertools.product(*(kinds_of(x, ring.side) for x in operands(name, number)))
        if kinds.count(MADE) <= sample.makes
    ]


# -- one device -----------------------------------------------------------------------------------


def pulled(function: Any, arrays: Sequence[Any], cotangents: Any) -> Any:
    """Return results, and gradients of real operands for `cotangents(real results)`."""
    real = [i for i, x in enumerate(arrays) if is_real(x)]

    def run(*some: Any) -> Any:
        put = dict(zip(real, some, strict=True))
        ys = function(*(put.get(i, x) for i, x in enumerate(arrays)))
        return [y for y in ys if is_real(y)], ys

    if not real:
        return function(*arrays), []
    _, pull, ys = jax.vjp(run, *(arrays[i] for i in real), has_aux=True)
    return ys, pull(cotangents())


def of_axis(name: str, function: Callable) -> Callable:
    """Return a function of trees, for a collective as on an axis of one device."""
    if name not in COLLECTIVES:
        return function
    first, along = lambda x: x[0], jax.vmap(function, axis_name=AXIS)
    return lambda *trees: jax.tree.map(first, along(*jax.tree.map(lambda x: x[None], trees)))


@functools.cache
def on_one(name: str, number: int, made: int | None) -> tuple[list, list | None, list | None]:
    """Return results, cotangents, and gradients, if there are any, of the whole operands."""
    function, arrays = function_of(name, number, made), operands(name, number, made)
    only = lambda arrays: function(*arrays)
    rng, shapes = np.random.default_rng(0), jax.eval_shape(of_axis(name, only), arrays)
    dys = [on_grid(rng.normal(size=y.shape)).astype(y.dtype) for y in shapes if is_real(y)]
    dys = [dy * (1 + 2j) if np.iscomplexobj(dy) else dy for dy in dys]
    try:
        pull = lambda arrays, dys: pulled(function, arrays, lambda: dys)
        ys, grads = jax.jit(of_axis(name, pull))(arrays, dys)
    except (NotImplementedError, ValueError) as error:  # JAX has no derivative of it
        if not re.search("ifferenti|JVP|Derivative", str(error)):
            raise
        return jax.jit(of_axis(name, only))(arrays), None, None
    assert all(np.isfinite(y).any() for y in ys if is_real(y) and y.size), "says nothing"
    return ys, dys, grads


# -- several devices ------------------------------------------------------------------------------


def dealt(x: np.ndarray, kind: Placement, side: AxisGroup) -> np.ndarray:
    """Return what devices hold of an operand, along a new first dimension; or the operand."""
    if isinstance(kind, Split):
        pieces = in_pieces(x, kind, side)
        each = [np.take(pieces, pieces_here, kind.dim + 1) for pieces_here in side.device_chunks]
        return np.stack([part.reshape(side.local_shape(x.shape, kind)) for part in each])
    if kind == REPLICATED:
        return x
    rng, shape = np.random.default_rng(1), (side.size - 1, *x.shape)
    if not is_real(x):
        shares = rng.integers(-9, 9, shape).astype(x.dtype)
    else:
        shares = on_grid(rng.uniform(-2, 2, shape)).astype(x.dtype)
    return np.concatenate([shares, x[None] - shares.sum(0, keepdims=True, dtype=x.dtype)])


def on_device(case: Case, dys: list | None, arrays: Sequence[Any]) -> Any:
    """Return what a device makes of what it has: results and gradients, as values."""
    side, kinds = case.ring.side, list[Placement]()
    share = jnp.asarray([0.5**i for i in range(1, side.size)] + [0.5 ** (side.size - 1)])

    def function(*arrays: Any) -> Any:
        values = list(map(from_local, arrays, case.given))
        rows = [
            ShardedValue(jnp.zeros(n // side.size))
            for (n,) in LENGTHS
            if side.divides((n,), BATCH_SPLIT)
        ]
        rows = rows if MADE in case.kinds else []  # by which it is known what may be a part
        found = run_partitioned(side, lambda _, *x: function_of(*case.of_one)(*x), rows, *values)
        kinds[:] = map(placement_of, found)
        return list(map(local_array, found))

    def cotangent(dy: Any, kind: Placement) -> Any:
        if kind == REPLICATED:  # devices have unlike shares of it
            return dy * share[side.axis_index].astype(dy.dtype)
        return side.slice_local(dy, kind) if isinstance(kind, Split) else dy

    def cotangents() -> list:
        ys = on_one(*case.of_one)[0]
        of_real = [k for k, y in zip(kinds, ys, strict=True) if is_real(y)]
        return list(map(cotangent, dys or [], of_real))

    of_operands = [
        cotangent_placement(k) for k, x in zip(case.given, arrays, strict=True) if is_real(x)
    ]
    if dys is None:
        ys, grads = function(*arrays), []
    else:
        ys, grads = pulled(function, arrays, cotangents)
    return list(map(from_local, ys, kinds)), list(map(from_local, grads, of_operands))


def shown(tree: Any) -> Any:
    """Return a tree with complex numbers as pairs."""
    pair = lambda x: jnp.stack([x.real, x.imag], -1) if jnp.iscomplexobj(x) else x
    return jax.tree.map(pair, tree)


def on_many(case: Case, dys: list | None, given: Sequence[Any]) -> Any:
    axes = tuple(None if kind == REPLICATED else 0 for kind in case.given)
    run = lambda dys, arrays: shown(on_device(case, dys, arrays))
    size = case.ring.size
    return jax.vmap(run, in_axes=(None, axes), axis_name=AXIS, axis_size=size)(dys, tuple(given))


def wrong(some: Sequence[Case]) -> list[str]:
    """Return what differs from one device, all run in one compilation."""
    lines = []
    expected = [on_one(*case.of_one) for case in some]
    deal = lambda case: lambda x, kind: jnp.asarray(dealt(x, kind, case.ring.side))
    given = [list(map(deal(case), operands(*case.of_one), case.given)) for case in some]

    def all_of_them(given: Any, dys: Any) -> list:
        found = []
        for case, one, cotangents in zip(some, given, dys, strict=True):
            refusal = case.refusal
            try:
                found.append(on_many(case, cotangents, one))
                if refusal:
                    lines.append(f"{case}: is not refused")
            except Exception as error:  # of one case; the others are run
                found.append(None)
                told = isinstance(error, ValueError) and refusal
                if not (told and re.search(refusal, str(error))):
                    lines.append(f"{case}: {type(error).__name__}: {error}")
        return found

    found = jax.jit(all_of_them)(given, [dys for _, dys, _ in expected])
    for case, result, (ys, _, grads) in zip(some, found, expected, strict=True):
        if result is not None:
            one = shown((ys, list(grads or [])))
            gaps = differences(result, jax.device_get(one), case.ring.size, case.ring.side)
            lines += [f"{case}: {gap}" for gap in gaps]
    return lines


# -- the tests ------------------------------------------------------------------------------------


def operations(jaxpr: Any) -> set[str]:
    """Return the names of what a program holds, also within its equations."""
    return {name_of(equation) for equation, _ in equations_in(jaxpr)}


def drawn(every: Sequence[Case], count: int) -> list[Case]:
    """Return some cases, of all samples alike; the first of each has rows."""
    order = np.random.default_rng(len(every)).permutation(len(every))
    turns: dict[int, list[Case]] = {}
    for case in (every[i] for i in order):
        turn = turns.setdefault(case.number, [])
        first = BATCH_SPLIT in case.kinds and not (turn and BATCH_SPLIT in turn[0].kinds)
        turn.insert(0 if first else len(turn), case)
    in_turn = itertools.zip_longest(*(turns[number] for number in sorted(turns)))
    return [case for turn in in_turn for case in turn if case is not None][:count]


def check(some: Sequence[Case]) -> None:
    lines = []
    with jax.enable_x64(True):
        for first in range(0, len(some), AT_ONCE):
            lines += wrong(some[first : first + AT_ONCE])
    assert not lines, "\n".join(lines)


ALONE = sorted(RULES.keys() - NOT_ALONE.keys() - OTHER_NAMES.keys())


def test_each_rule_has_samples_or_a_reason():
    assert SAMPLES.keys() == set(ALONE)
    assert not UNKNOWN.keys() & RULES.keys()


@pytest.mark.parametrize("name", [*ALONE, *UNKNOWN])
@pytest.mark.short(
    "abs",
    "all_to_all",
    "atan",
    "bitcast_convert_type",
    "jit",
    "conv_general_dilated",
    "cummax",
    "custom_vjp_call",
    "dynamic_slice",
    "erf",
    "fft",
    "householder_product",
    "io_callback",
    "lgamma",
    "lt_to",
    "ne",
    "pad",
    "ppermute",
    "random_fold_in",
    "reduce_and",
    "reduce_scatter",
    "reduce_xor",
    "rev",
    "scatter-max",
    "select_and_scatter_add",
    "sin",
    "square",
    "tan",
    "triangular_solve",
    "reduce",
)
def test_a_rule_alone_is_as_on_one_device(name):
    others = {other for other, ours in OTHER_NAMES.items() if ours == name}
    with jax.enable_x64(True):
        for number, sample in enumerate(samples_of(name)):
            trace = jax.make_jaxpr(sample.function, axis_env=[(AXIS, 1)])
            found = operations(trace(*operands(name, number)).jaxpr)
            assert found & {name, *others}, f"sample {number} of {name} has {found}"
    every = [
        case for ring in RINGS for case in cases(name, ring) if set(case.kinds) != {REPLICATED}
    ]
    check(drawn(every, max(FEW, len(samples_of(name)))))


@SLOW
@pytest.mark.parametrize("ring", RINGS, ids=str)
@pytest.mark.parametrize("name", [*ALONE, *UNKNOWN])
def test_and_of_operands_of_all_kinds(name, ring):
    every = cases(name, ring)
    check(every if ring.size == 2 else drawn(every, SOME))
