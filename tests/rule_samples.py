"""Small functions of each of JAX's operations that the table of rules names, with their operands.

Operands are drawn, as (generator) -> array; of random keys they are the words. Real numbers are
multiples of 2**-20, so that shares of them add up exactly.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import linear_call
from jax.experimental import io_callback
from jax.extend.core import primitives
from jax.extend.random import threefry2x32_p
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Draw = Callable[[np.random.Generator], np.ndarray]
GRID = 2**20
AXIS = "rows"  # of the devices


class Sample(NamedTuple):
    """A function whose program has an operation, and what draws its operands.

    Attributes:
        function: Of arrays; returns arrays.
        draws: One for each operand.
        refuses: What the error says with which it is refused; `NO_ROWS`: with some operands.
        makes: Whether an operand may have its first row only.
    """

    function: Callable
    draws: tuple[Draw, ...]
    refuses: str = ""
    makes: bool = True


def of(function: Callable, *draws: Draw, refuses: str = "", makes: bool = True) -> Sample:
    return Sample(function, draws, refuses, makes)


def on_grid(x: Any) -> np.ndarray:
    return np.round(np.asarray(x) * GRID) / GRID


def real(*shape: int, low: float = -2.0, high: float = 2.0, dtype: Any = "float64") -> Draw:
    return lambda rng: on_grid(rng.uniform(low, high, shape)).astype(dtype)


def whole(*shape: int, low: int = -4, high: int = 9, dtype: Any = "int32") -> Draw:
    return lambda rng: rng.integers(low, high, shape).astype(dtype)


def truths(*shape: int) -> Draw:
    return lambda rng: np.asarray(rng.random(shape) < 0.6)


def words(*shape: int) -> Draw:
    return lambda rng: rng.integers(0, 2**32, (*shape, 2), dtype="uint32")


def order(n: int) -> Draw:
    return lambda rng: rng.permutation(n).astype("int32")


def complexes(*shape: int) -> Draw:
    return lambda rng: on_grid(rng.normal(size=shape)) + 1j * on_grid(rng.normal(size=shape))


def positive(batch: int, n: int) -> Draw:
    """Draw symmetric matrices with positive eigenvalues far from each other."""

    def draw(rng: np.random.Generator) -> np.ndarray:
        x = rng.normal(size=(batch, n, n)) / (4 * n)
        return on_grid(x + x.swapaxes(1, 2) + np.diag(2.0 * np.arange(1, n + 1)))

    return draw


A = (24, 12)  # divided by 2, 3 and 4 devices, also with two pieces each, and in two blocks
X, INTS, COUNTS, TRUE = real(*A), whole(*A), whole(*A, low=1), truths(*A)
POS, UNIT = real(*A, low=0.2, high=3), real(*A, low=-0.9, high=0.9)
LARGE = real(*A, low=1.1, high=3)
TIES = whole(*A, low=-1, high=2, dtype="float64")
WORD, SHIFT = whole(*A, high=2**31 - 1), whole(*A, low=0, high=32)
ONE, COLUMN, WIDTH, SQUARE = real(), real(24), real(12), real(12, 12)
IMAGE = real(12, 12, 8, 4)
MATRICES = real(12, 4, 4)
ORDERS = whole(*A, low=1, high=4, dtype="float64")
BITS = whole(24, low=0, high=2**32, dtype="uint32")
KEY, KEYS = words(), words(24)

keyed = jax.random.wrap_key_data
words_of = jax.random.key_data


def one_device(axis: AxisType) -> NamedSharding:
    return NamedSharding(jax.make_mesh((1,), ("one",), (axis,)), PartitionSpec())


def _named(names: str, *draws: Draw) -> dict[str, list[Sample]]:
    return {name: [of(getattr(lax, name), *draws)] for name in names.split()}


def _bound(names: str, *draws: Draw) -> dict[str, list[Sample]]:
    """Return samples of operations that have no function of their own."""
    one = lambda name: getattr(lax, f"{name}_p").bind
    return {name: [of(one(name), *draws)] for name in names.split()}


POINTWISE = {
    **_named("abs asinh atan bessel_i0e bessel_i1e cbrt ceil cos cosh erf erfc exp exp2 expm1", X),
    **_named("floor is_finite logistic neg round sign sin sinh square tan tanh", X),
    **_named("digamma lgamma log log1p rsqrt sqrt", POS),
    **_named("acos asin atanh erf_inv", UNIT),
    **_named("acosh", LARGE),
    **_named("clz population_count", INTS),
    **_named("conj real imag", complexes(*A)),
    **_named("complex", X, X),
    **_named("atan2 nextafter rem", X, POS),
    **_named("igamma_grad_a", POS, POS),
    "igamma": [of(lambda a, x: lax.igamma(lax.stop_gradient(a), x), POS, POS)],
    "igammac": [of(lambda a, x: lax.igammac(lax.stop_gradient(a), x), POS, POS)],
    **_named("zeta", LARGE, POS),
    **_named("pow", POS, X),
    **_named("eq ge gt le lt ne max min", TIES, TIES),
    **_named("mulhi", WORD, WORD),
    **_named("shift_left shift_right_arithmetic shift_right_logical", WORD, SHIFT),
    **_bound("eq_to le_to lt_to", TIES, TIES),
    "add": [of(lax.add, X, X), of(lax.add, INTS, INTS), of(lambda x, y: x + y, X, ONE)],
    "add_any": [of(jax.grad(lambda x: (jnp.sin(x) * x).sum()), X)],
    "and": [of(lax.bitwise_and, INTS, INTS), of(lax.bitwise_and, TRUE, TRUE)],
    "bitcast_convert_type": [
        of(lambda x: lax.bitcast_convert_type(x, "int64"), X),
        of(lambda x: lax.bitcast_convert_type(x, "uint16"), X),
        of(lambda x: lax.bitcast_convert_type(x, "uint32"), whole(24, 4, dtype="uint8")),
    ],
    "clamp": [
        of(lax.clamp, real(*A, high=0), X, real(*A, low=0)),
        of(
            lambda low, x, high: lax.clamp(lax.stop_gradient(low), x, lax.stop_gradient(high)),
            real(high=0),
            X,
            real(low=0),
        ),
    ],
    "convert_element_type": [
        of(lambda x: x.astype("float32"), X),
        of(lambda x: x.astype("float64"), real(*A, dtype="float32")),
        of(lambda x: x.astype("int32"), X),
        of(lambda x: x.astype("complex128"), X),
        of(lambda x: x.astype("int8"), whole(*A, low=-300, high=300)),
        of(lambda x: x.astype("int64"), INTS),
        of(lambda x: x.astype("float64"), INTS),
        of(lambda x: x.astype("float64"), TRUE),
        of(lambda x: x.astype(bool), INTS),
    ],
    "copy": [of(jnp.copy, X)],
    "div": [
        of(lax.div, X, POS),
        of(lax.div, INTS, COUNTS),
        of(lambda x, y: x / y, X, real(low=1)),
        of(lambda x, y: x / y, ONE, POS),
    ],
    "integer_pow": [of(lambda x: lax.integer_pow(x, 3), X)],
    "mul": [
        of(lax.mul, X, X),
        of(lax.mul, INTS, INTS),
        of(lambda x, y: x * y, X, ONE),
        of(lambda x, y: x * y[:, None], X, COLUMN),
        of(lambda x, y: x * y, X, real(24, 1)),
        of(lambda x: x * x, X),
    ],
    "name": [of(lambda x: checkpoint_name(x, "kept"), X)],
    "not": [of(lax.bitwise_not, INTS), of(lax.bitwise_not, TRUE)],
    "or": [of(lax.bitwise_or, INTS, INTS), of(lax.bitwise_or, TRUE, TRUE)],
    "random_fold_in": [
        of(
            lambda k, x: words_of(jax.vmap(jax.random.fold_in)(keyed(k), x)),
            KEYS,
            whole(24, low=0),
        ),
        of(lambda k, x: words_of(jax.random.fold_in(keyed(k), x)), KEY, whole(low=0)),
    ],
    "polygamma": [of(lambda m, x: lax.polygamma(lax.stop_gradient(m), x), ORDERS, POS)],
    "reduce_precision": [of(lambda x: lax.reduce_precision(x, 8, 7), X)],
    "regularized_incomplete_beta": [
        of(
            lambda a, b, x: lax.betainc(lax.stop_gradient(a), lax.stop_gradient(b), x),
            POS,
            POS,
            real(*A, low=0.1, high=0.9),
        )
    ],
    "reshard": [of(lambda x: jax.sharding.reshard(x, one_device(AxisType.Explicit)), X)],
    "select_n": [
        of(lax.select, TRUE, X, X),
        of(lax.select, truths(), X, X),
        of(lax.select_n, whole(24, low=0, high=3), COLUMN, COLUMN, COLUMN),
    ],
    "sharding_constraint": [
        of(lambda x: lax.with_sharding_constraint(x, one_device(AxisType.Auto)), X)
    ],
    "stop_gradient": [of(jax.jit(lambda x: lax.stop_gradient(x) * x), X)],
    "sub": [of(lax.sub, X, X), of(lax.sub, INTS, INTS), of(lambda x, y: y - x, X, ONE)],
    "threefry2x32": [
        of(threefry2x32_p.bind, *[BITS] * 4, makes=False),  # JAX's vmap takes them all or none
    ],
    "xor": [of(lax.bitwise_xor, INTS, INTS), of(lax.bitwise_xor, TRUE, TRUE)],
}

MOVES = {
    "broadcast_in_dim": [
        of(lambda x: jnp.broadcast_to(x, (2, *A)), X),
        of(lambda x: lax.broadcast_in_dim(x, (24, 12, 4), (0, 1)), X),
        of(lambda x: jnp.broadcast_to(x, A), real(24, 1)),
        of(lambda x, y: x * jnp.broadcast_to(y, A), X, ONE),
        of(lambda x, y: x - lax.broadcast_in_dim(y, A, (1,)), X, WIDTH),
        of(lambda x, y: x @ lax.broadcast_in_dim(y, (12, 24), (0,)), X, WIDTH),
    ],
    "reshape": [
        of(lambda x, to=to: x.reshape(to), X)
        for to in ((288,), (4, 6, 12), (12, 24), (24, 2, 6), (24, 1, 12), (2, 12, 4, 3), (8, 36))
    ]
    + [of(lambda x: x.reshape(24, 12), real(2, 12, 12)), of(lambda x: x.reshape(48, 6), X)],
    "transpose": [
        of(lambda x: x.T, X),
        of(lambda x: x.transpose(2, 0, 1), real(12, 24, 4)),
    ],
    "squeeze": [of(lambda x: lax.squeeze(x, (1, 3)), real(24, 1, 12, 1))],
    "rev": [of(lambda x: lax.rev(x, (0,)), X), of(lambda x: lax.rev(x, (0, 1)), X)],
    "slice": [
        of(lambda x, at=at: x[at], X)
        for at in (
            np.s_[:12],
            np.s_[12:],
            np.s_[6:18],
            np.s_[::2],
            np.s_[1::2],
            np.s_[1:23:3],
            np.s_[3:20:3],
            np.s_[5:6],
            np.s_[-1:],
            np.s_[0:0],
            np.s_[:, 2:8],
            np.s_[12:, 1::3],
        )
    ]
    + [of(lambda x: x[2:4], INTS), of(lambda x: x[1:3], TRUE)],
    "tile": [
        of(lambda x, by=by: lax.tile(x, by), X) for by in ((2, 1), (1, 3), (2, 2), (3, 1), (1, 1))
    ],
    "optimization_barrier": [of(lambda *x: lax.optimization_barrier(x), X, INTS)],
    "concatenate": [
        of(lambda x, y: jnp.concatenate([x, y]), X, X),
        of(lambda x, y: jnp.concatenate([x, y], 1), X, X),
        of(lambda x, y: jnp.concatenate([x, y]), X, SQUARE),
        of(lambda x, y: jnp.concatenate([x, y], 1), X, real(24, 3)),
        of(lambda x, y: jnp.concatenate([x, y, x]), X, real(0, 12)),
        of(lambda x, y: jnp.concatenate([x, y]), COLUMN, real(1)),
    ],
    "stack": [of(lambda x, y, to=to: lax.stack([x, y], to), X, X) for to in (0, 1, 2)],
    "unstack": [
        of(lambda x, along=along: jnp.unstack(x, axis=along), real(4, 12, 4)) for along in (0, 1, 2)
    ],
    "pad": [
        of(lambda x, y, how=how: lax.pad(x, y, how), X, ONE)
        for how in (
            [(0, 0, 0), (1, 2, 1)],
            [(1, 2, 0), (0, 0, 0)],
            [(0, 0, 1), (-1, 1, 0)],
            [(-2, 2, 0), (0, 0, 0)],
        )
    ],
    "split": [
        of(lambda x, how=how: lax.split(x, *how), X)
        for how in (((12, 12), 0), ((6, 12, 6), 0), ((4, 4, 4), 1), ((1, 11), 1), ((0, 24), 0))
    ],
}


def _reduced(name: str, *draws: Draw) -> list[Sample]:
    function = getattr(lax, name)
    return [
        of(lambda x, over=over: function(x, over), draw)
        for draw in draws
        for over in ((0,), (1,), (0, 1))
    ]


def _placed(name: str, *draws: Draw) -> list[Sample]:
    function = getattr(lax, name)
    return [
        of(lambda x, dim=dim: function(x, dim, "int32"), draw) for draw in draws for dim in (0, 1)
    ]


def _along(name: str, *draws: Draw) -> list[Sample]:
    function = getattr(lax, name)
    return [
        of(lambda x, dim=dim, back=back: function(x, dim, reverse=back), draw)
        for draw in draws
        for dim in (0, 1)
        for back in (False, True)
    ]


def _product(dims: Any, *draws: Draw) -> Sample:
    return of(lambda x, y: lax.dot_general(x, y, dims), *draws)


def _convolved(numbers: Any, *draws: Draw, strides: Any = (1, 1), **more: Any) -> Sample:
    more = {"padding": "SAME", "dimension_numbers": numbers, **more}
    return of(lambda x, k: lax.conv_general_dilated(x, k, strides, **more), *draws)


def _pool(first: float, by: Callable, how: tuple) -> Callable:
    return lambda x: lax.reduce_window(x, first, by, *how)


def _pooled(first: float, by: Callable, draw: Draw) -> list[Sample]:
    hows = ((*BESIDE, "VALID"), (*DOWN, "VALID"), ((3, 3), (1, 1), "SAME"))
    return [of(_pool(first, by, how), draw) for how in hows]


def _greatest(how: tuple) -> Callable:
    return _pool(-jnp.inf, lax.max, (*how, "VALID"))


BESIDE, DOWN = ((1, 2), (1, 2)), ((2, 1), (2, 1))
linalg = lax.linalg
HWC, CHW = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NHWC")

MEETING = {
    "reduce_sum": _reduced("reduce_sum", X, INTS),
    "reduce_max": _reduced("reduce_max", TIES, INTS),
    "reduce_min": _reduced("reduce_min", TIES, INTS),
    "reduce_prod": _reduced("reduce_prod", POS, INTS),
    "reduce_and": _reduced("reduce_and", TRUE, INTS),
    "reduce_or": _reduced("reduce_or", TRUE, INTS),
    "reduce_xor": _reduced("reduce_xor", TRUE, INTS),
    "argmax": _placed("argmax", TIES, INTS),
    "argmin": _placed("argmin", TIES, INTS),
    "cumsum": _along("cumsum", X, INTS),
    "cumprod": _along("cumprod", POS),
    "cummax": _along("cummax", TIES),
    "cummin": _along("cummin", TIES),
    "cumlogsumexp": _along("cumlogsumexp", X),
    "dot_general": [
        _product((((1,), (0,)), ((), ())), X, real(12, 24)),
        _product((((0,), (1,)), ((), ())), X, real(12, 24)),
        _product((((0, 1), (0, 1)), ((), ())), X, X),
        _product((((), ()), ((), ())), COLUMN, WIDTH),
        _product((((2,), (2,)), ((0,), (0,))), real(12, 4, 8), real(12, 24, 8)),
        _product((((1,), (0,)), ((2,), (1,))), real(12, 4, 8), real(4, 8, 12)),
        _product((((0,), (0,)), ((), ())), whole(24, 4), whole(24, 12)),
    ],
    "conv_general_dilated": [
        _convolved(HWC, IMAGE, real(3, 3, 4, 4)),
        _convolved(HWC, IMAGE, real(1, 3, 4, 4)),
        _convolved(HWC, IMAGE, real(3, 1, 4, 8), strides=(2, 1)),
        _convolved(HWC, IMAGE, real(1, 1, 4, 4), lhs_dilation=(1, 2), padding=((0, 0), (1, 0))),
        _convolved(HWC, IMAGE, real(3, 3, 1, 8), feature_group_count=4),
        _convolved(HWC, IMAGE, real(3, 1, 4, 4), batch_group_count=2),
        _convolved(CHW, real(12, 12, 4, 4), real(8, 12, 1, 3)),
    ],
    "sort": [
        of(lambda x: lax.sort(x, dimension=0), X),
        of(lambda x: lax.sort(x, dimension=1), X),
        of(lambda x, y: lax.sort((x, y), dimension=1, num_keys=2), TIES, X),
        of(lambda x, y: lax.sort((x, y), dimension=0, num_keys=1), TIES, X),
    ],
    "top_k": [of(lambda x, dim=dim: lax.top_k(x, 4, axis=dim), X) for dim in (1, 0)],
    "fft": [
        of(lambda x: jnp.fft.fft(x), X),
        of(lambda x: jnp.fft.rfft(x), X),
        of(lambda x: jnp.fft.irfft(x), complexes(*A)),
        of(lambda x: jnp.fft.fft2(x), real(12, 4, 12)),
        of(lambda x: jnp.fft.fft(x, axis=0), X),
    ],
    "cholesky": [of(linalg.cholesky, positive(12, 4))],
    "eigh": [of(lambda x: linalg.eigh(x), positive(12, 4))],
    "eig": [of(lambda x: linalg.eig(x), positive(12, 4))],
    "schur": [of(lambda x: linalg.schur(x), positive(12, 4))],
    "lu": [of(linalg.lu, MATRICES)],
    "qr": [of(lambda x: linalg.qr(x, full_matrices=False), positive(12, 4))],
    "geqrf": [of(lambda x: jnp.linalg.qr(x, mode="raw"), positive(12, 4))],
    "householder_product": [of(linalg.householder_product, MATRICES, real(12, 4))],
    "svd": [
        of(lambda x: linalg.svd(x, full_matrices=False), positive(12, 4)),
        of(lambda x: linalg.svd(x, compute_uv=False), positive(12, 4)),
    ],
    "triangular_solve": [
        of(
            lambda a, b: linalg.triangular_solve(a, b, left_side=True, lower=True),
            positive(12, 4),
            MATRICES,
        )
    ],
    "reduce_window": _pooled(1.0, lambda x, y: x * y, POS),
    "reduce_window_max": _pooled(-np.inf, lax.max, X),
    "reduce_window_min": _pooled(np.inf, lax.min, X),
    "reduce_window_sum": _pooled(0.0, lax.add, X),
    "select_and_gather_add": [
        of(lambda x, dx, how=how: jax.jvp(_greatest(how), (x,), (dx,))[1], X, X)
        for how in (BESIDE, DOWN)
    ],
    "select_and_scatter_add": [
        of(lambda x, dy: jax.vjp(_greatest(BESIDE), x)[1](dy)[0], X, real(24, 6)),
        of(lambda x, dy: jax.vjp(_greatest(DOWN), x)[1](dy)[0], X, SQUARE),
    ],
}


PLACE = whole(24, low=0, high=12)
FAR = whole(24, low=-30, high=40)  # some of them lie outside
SOME = whole(12, low=0, high=24)


def _written(how: str) -> list[Sample]:
    """Return samples that write at places of which no two are one."""
    at = lambda ref: functools.partial(getattr(ref, how), unique_indices=True)
    each = lambda x, i, y: at(x.at[i])(y)
    return [
        of(lambda x, i, y: at(x.at[i])(y), X, order(24), POS, makes=False),
        of(lambda x, i, y: at(x.at[i[:6]])(y), X, order(24), real(6, 12, low=0.5), makes=False),
        of(lambda x, i, y: at(x.at[:, i])(y), X, order(12), POS, makes=False),
        of(lambda x, i, y: at(x.at[jnp.arange(24), i])(y), X, PLACE, real(24, low=0.5)),
        of(jax.vmap(each), X, PLACE, real(24, low=0.5)),
        of(jax.vmap(each, (1, 0, 0)), X, SOME, real(12, low=0.5)),
        of(lambda x, y: at(x.at[3])(y), X, WIDTH),
        of(lambda x, y: at(x.at[:, 2])(y), X, COLUMN),
        of(lambda x, y: at(x.at[2:8, 3])(y), X, real(6)),
    ]


INDEXING = {
    "dynamic_slice": [
        of(lambda x, i: lax.dynamic_slice_in_dim(x, i, 24, 0), X, whole()),
        of(lambda x, i: lax.dynamic_slice_in_dim(x, i, 12, 0), X, whole(high=20)),
        of(lambda x, i, j: lax.dynamic_slice(x, (i, j), (24, 3)), X, whole(), whole()),
        of(lambda x, i: lax.dynamic_index_in_dim(x, i, 1), X, whole()),
    ],
    "dynamic_update_slice": [
        of(lambda x, y, i: lax.dynamic_update_slice_in_dim(x, y, i, 1), X, real(24, 3), whole()),
        of(lambda x, y, i: lax.dynamic_update_slice_in_dim(x, y, i, 0), X, SQUARE, whole()),
        of(lambda x, y, i, j: lax.dynamic_update_slice(x, y, (i, j)), X, X, whole(), whole()),
    ],
    "gather": [
        of(lambda x, i: x[i], X, FAR),
        of(lambda x, i: x[i], X, whole(12, 4, low=0, high=24)),
        of(lambda x, i: x[:, i], X, whole(24, low=-20, high=20)),
        of(lambda x, i: x.at[i].get(mode="fill", fill_value=-7), X, FAR),
        of(lambda x, i: x[jnp.arange(24), i], X, PLACE),
        of(lambda x, i: x[i, jnp.arange(12)], X, SOME),
        of(lambda x, i, j: x[i, j], X, FAR, PLACE),
        of(lambda x, i: jnp.take_along_axis(x, i, 1), X, whole(24, 4, low=0, high=12)),
        of(lambda x, i: jnp.take_along_axis(x, i, 0), X, whole(12, 12, low=0, high=24)),
        of(jax.vmap(lambda x, i: x[i]), X, PLACE),
        of(jax.vmap(lambda x, i: x[i], (1, 0)), X, SOME),
        of(jax.vmap(lambda x, i: lax.dynamic_slice(x, (i,), (3,))), X, FAR),
        of(lambda x, i: x[i], INTS, FAR),
    ],
    "scatter": _written("set"),
    "scatter-mul": _written("multiply")[2:4],
    "scatter-min": _written("min")[2:4],
    "scatter-max": _written("max")[2:4],
    "scatter-sub": _written("subtract")[2:4],
    "scatter-add": [
        *_written("add"),
        of(lambda x, i, y: x.at[i].add(y), SQUARE, PLACE, X),
        of(lambda x, i, y: x.at[i].add(y), X, FAR, X),
        of(lambda i, y: jnp.zeros(12).at[i].add(y), PLACE, COLUMN),
        of(lambda i: jnp.zeros(12, "int32").at[i].add(1), PLACE),
        of(jax.vmap(lambda x, i, y: x.at[i].add(y)), X, whole(24, 4, high=12), real(24, 4)),
    ],
}

uniform = lambda k, x: x * jax.random.uniform(keyed(k), x.shape, x.dtype)
of_each = jax.vmap(lambda k, x: jax.random.bits(k, x.shape) % 7 + x)
RANDOM = {
    "random_bits": [
        of(uniform, KEY, X),
        of(lambda k, x: jax.random.bernoulli(keyed(k), 0.3, x.shape) ^ x, KEY, TRUE),
        of(lambda k, x: jax.random.bits(keyed(k), x.shape, "uint8") + x.astype("uint8"), KEY, INTS),
        of(lambda k, x: jax.random.normal(keyed(k), (24,), "float32")[:, None] * x, KEY, X),
        of(lambda k, x: of_each(keyed(k), x), KEYS, whole(24, 6, dtype="uint32")),
    ],
    "random_split": [
        of(lambda k: words_of(jax.random.split(keyed(k), 12)), KEY),
        of(lambda k: words_of(jax.vmap(jax.random.split)(keyed(k))), KEYS),
    ],
    "random_unwrap": [of(lambda k: words_of(keyed(k)), KEYS)],
    "random_clone": [of(lambda k: words_of(jax.random.clone(keyed(k))), KEYS)],
    "random_seed": [of(lambda i: words_of(jax.vmap(jax.random.key)(i)), whole(24))],
    "random_wrap": [of(lambda k: words_of(keyed(k)), KEYS), of(lambda k: words_of(keyed(k)), KEY)],
    "iota": [
        of(lambda x: x + lax.broadcasted_iota("float64", A, 0), X),
        of(lambda x: x * lax.broadcasted_iota("float64", A, 1), X),
        of(lambda x: x + jnp.arange(24.0)[:, None] ** 2, X),
        of(lambda x: jnp.where(jnp.arange(12)[None] < jnp.arange(24)[:, None], x, 0), X),
        of(lambda x: (x, jnp.arange(24)), X),
    ],
}


def _in_vmap(name: str, **more: Any) -> Sample:
    """Return a sample of a collective over dimensions: those of a `vmap` with a name."""
    collective = getattr(lax, name)
    along = lambda dim: jax.vmap(lambda r: collective(r, "i", **more), dim, axis_name="i")
    return of(lambda x: (along(0)(x), along(1)(x)), TIES)


NO_ROWS = "of what has no examples"  # with operands of which none is a part
NOTHING_TO_SEND = r"hfjax\.per_device\(function\)"
nothing = lambda *_: None
OUTSIDE = {
    "psum": [
        of(lambda x: lax.psum(x, AXIS), X),
        of(lambda x: lax.psum(x, AXIS), INTS),
        _in_vmap("psum"),
    ],
    "pmax": [of(lambda x: lax.pmax(x, AXIS), X), _in_vmap("pmax")],
    "pmin": [of(lambda x: lax.pmin(x, AXIS), X), _in_vmap("pmin")],
    "axis_index": [of(lambda x: x + lax.axis_index(AXIS), X)],
    "ppermute": [of(lambda x: lax.ppermute(x, AXIS, [(0, 0)]), X, refuses=NO_ROWS)],
    "all_gather": [
        of(lambda x: lax.all_gather(x, AXIS), X, refuses=NO_ROWS),
        of(lambda x: lax.all_gather(x, AXIS, axis=1), X, refuses=NO_ROWS),
        of(lambda x: lax.all_gather(x, AXIS, axis=1, tiled=True), X, refuses=NO_ROWS),
    ],
    "all_to_all": [
        of(lambda x: lax.all_to_all(x, AXIS, 0, 1, tiled=True), X, refuses=NO_ROWS),
        of(lambda x: lax.all_to_all(x, AXIS, 0, 0), real(1, 24), refuses=NOTHING_TO_SEND),
    ],
    "reduce_scatter": [
        of(lambda x: lax.psum_scatter(x, AXIS, tiled=True), X, refuses=NO_ROWS),
        of(lambda x: lax.psum_scatter(x, AXIS), real(1, 24), refuses=NOTHING_TO_SEND),
    ],
    "debug_callback": [of(lambda x: (jax.debug.callback(nothing, x), x * 2)[1], X)],
    "debug_print": [of(lambda x: (jax.debug.print("{}", x.sum()), x * 2)[1], X)],
    "pure_callback": [
        of(lambda x: jax.pure_callback(np.sort, x, x, vmap_method="sequential"), TIES)
    ],
    "io_callback": [
        of(lambda x: io_callback(np.sort, x, x), X, refuses="Use jax.pure_callback"),
    ],
}


def _closed_call(f: Callable) -> Callable:
    primitive = primitives.closed_call_p

    def run(*x: Any) -> Any:
        made = primitive.get_bind_params({"call_jaxpr": jax.make_jaxpr(f)(*x)})
        functions, parameters = made if isinstance(made, tuple) else ((), made)
        return primitive.bind(*functions, *x, **parameters)

    return run


def joining(x: jax.Array, w: jax.Array) -> jax.Array:
    """Return what is made of all rows, and of each."""
    x = x @ w
    return jnp.sin(x - x.mean(0)[None]) * x.max(1)[:, None]


def _branches(p: jax.Array, x: jax.Array, y: jax.Array) -> Any:
    twice = lambda x, y: (x * 2, y.sum(0))
    return lax.cond(p, lambda x, y: (x - x.mean(), y[3]), twice, x, y)


def _until(x: jax.Array, w: jax.Array) -> Any:
    go = lambda c: (jnp.abs(c[0]).sum() > 1) & (c[1] < 9)
    return lax.while_loop(go, lambda c: (c[0] * w / 4, c[1] + 1), (x, jnp.int32(0)))


def _until_each(x: jax.Array) -> Any:
    one = lambda x: lax.while_loop(lambda x: x.sum() < 30, lambda x: x + jnp.abs(x) + 1, x)
    return jax.vmap(one)(x)


def _layers(x: jax.Array, w: jax.Array) -> Any:
    return lax.scan(lambda x, w: (jnp.tanh(joining(x, w)), x.sum(0)), x, w)


def _chunks(x: jax.Array, w: jax.Array, start: jax.Array) -> Any:
    return lax.scan(lambda c, r: (c + (r * w).sum(), r + w), start, x)


def _recurrence(x: jax.Array, first: jax.Array) -> Any:
    step = lambda c, r: (jnp.tanh(c + r), c * r)
    return lax.scan(step, first, x), lax.scan(step, first, x, reverse=True)


@jax.custom_jvp
def _with_tangents(x: jax.Array, w: jax.Array) -> Any:
    return joining(x, w), x.sum(0)


@_with_tangents.defjvp
def _tangents(primals: Any, tangents: Any) -> Any:
    (x, w), (dx, dw) = primals, tangents
    change = dx @ w * 3 + x * dw.sum() + dx.mean(0)[None]
    return _with_tangents(x, w), (change, dx.sum(0) * w[0])


@jax.custom_vjp
def _with_cotangents(x: jax.Array, w: jax.Array) -> Any:
    return joining(x, w), x.sum(0)


def _forward(x: jax.Array, w: jax.Array) -> Any:
    return _with_cotangents(x, w), (x, w)


def _backward(kept: Any, dys: Any) -> Any:
    (x, w), (dy, ds) = kept, dys
    dx = jnp.tanh(dy @ w.T) + ds[None] * x.max()
    return dx, x.T @ dy / (1 + jnp.abs(ds).max())


_with_cotangents.defvjp(_forward, _backward)


def _linear(w: jax.Array, x: jax.Array) -> jax.Array:
    """Return what is linear; its transpose is given as another one."""
    back = lambda w, y: y @ w.T * 3 + y.mean(0)[None]
    return linear_call(lambda w, x: x @ w, back, lax.stop_gradient(w), x)


def _solved(x: jax.Array, b: jax.Array) -> Any:
    """Return the solution of equations of each row, and of equations that join rows."""
    scale = jnp.abs(x) + 1
    each = lax.custom_linear_solve(
        lambda v: v * scale, b, lambda _, b: b / scale, lambda _, b: b / scale
    )
    less = lambda v: v + v.sum(0)[None]
    back = lambda _, b: b - b.sum(0)[None] / (1 + len(b))
    both = lambda mv, b: (back(mv, b), b.sum())  # what a solver tells besides has no derivative
    told = lax.custom_linear_solve(less, b, both, both, symmetric=True, has_aux=True)
    return each, lax.custom_linear_solve(less, b, back, back, symmetric=True), told[0]


@jax.custom_jvp
def _solving(x: jax.Array, y: jax.Array) -> Any:
    return jnp.sin(x) * y


@_solving.defjvp
def _solving_for_tangents(primals: Any, tangents: Any) -> Any:
    (x, y), (dx, dy) = primals, tangents
    changes = jnp.linalg.solve(lax.stop_gradient(x @ x.T + 24 * jnp.eye(len(x))), dx * y + dy)
    return _solving(x, y), changes


PROGRAMS = {
    "jit": [of(jax.jit(joining), X, SQUARE)],
    "closed_call": [of(_closed_call(joining), X, SQUARE)],
    "composite": [of(lax.composite(lambda x: jnp.sin(x.mean(0)), "hfjax.sample"), X)],
    "remat2": [
        of(jax.checkpoint(joining), X, SQUARE),
        of(jax.checkpoint(joining, policy=jax.checkpoint_policies.dots_saveable), X, SQUARE),
    ],
    "scan": [
        of(_layers, X, real(3, 12, 12)),
        of(_chunks, X, WIDTH, ONE),
        of(_recurrence, X, WIDTH),
        of(lambda x: lax.map(lambda r: jnp.sin(r) / r.sum(), x), POS),
        of(lambda x: lax.fori_loop(0, 3, lambda i, x: x + x.mean(0)[None] * i, x), X),
    ],
    "while": [*(of(_until, X, w) for w in (X, real(24, 1), ONE)), of(_until_each, X)],
    "cond": [
        of(_branches, truths(), X, X),
        of(lambda x, y: _branches(x.sum() > 0, x, y), X, X),
        of(
            lambda i, x, y: lax.switch(i, [lax.add, lax.sub, lambda x, y: x @ y.T @ x], x, y),
            whole(low=0, high=3),
            X,
            X,
        ),
    ],
    "custom_jvp_call": [
        of(_with_tangents, X, SQUARE),
        of(_solving, X, X),
        of(lambda x: jnp.linalg.slogdet(x @ x.T + 24 * jnp.eye(24))[1], X),
    ],
    "custom_vjp_call": [of(_with_cotangents, X, SQUARE)],
    "linear_call": [of(lambda x: _linear(jnp.eye(12) * 2, x), X), of(_linear, SQUARE, X)],
    "custom_linear_solve": [of(_solved, X, X)],
}

SAMPLES: dict[str, list[Sample]] = {
    **POINTWISE,
    **MOVES,
    **MEETING,
    **INDEXING,
    **RANDOM,
    **OUTSIDE,
    **PROGRAMS,
}

# Operations that no rule knows.
UNKNOWN = {
    "tridiagonal_solve": [
        of(
            lambda d, b: linalg.tridiagonal_solve(d / 9, d, d / 7, b),
            real(12, 4, low=3, high=4),
            MATRICES,
        )
    ],
    "reduce": [of(lambda x: lax.reduce(x, 1.0, lambda x, y: x * y + x + y, (0,)), X)],
}
