"""Small programs over a batch, drawn from a seed: what a run in parts has to agree with.

A program is a function `(weights, batch) -> (loss, variables)` of plain JAX. It is a chain of
steps, each drawn from `STEPS`; a step takes values that earlier ones made, whatever their shapes.
Which values it takes hangs on its seed and on shapes only, so that every trace is the same.

Rounding must not decide anything: what has ties, or compares, sees numbers that `coarse` made.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

# Along which dimension each entry of the batch is cut; None: every device has the whole.
CUTS: dict[str, int | None] = {
    "x": 0,  # [rows, width], in quarters: many ties
    "y": 0,  # [rows], any numbers
    "z": 0,  # [rows, length, width]
    "across": 1,  # [length, rows]
    "tokens": 0,  # [rows, length]
    "labels": 0,  # [rows]
    "mask": 0,  # [rows, length], of 0 and 1
    "keep": 0,  # [rows], bool
    "crops": 0,  # [2 * rows, width]
    "flat": 0,  # [rows * length]
    "shared": None,  # [length, width]
    "key": None,
    "raw": None,
    "count": None,  # a whole number
}
VOCABULARY = 7
LARGEST = 700  # elements of a value
# Steps that mostly need all rows at once are drawn less often than they are here.
RARE = ("order", "outer", "rows_by_index", "scatter", "cumulative", "shift", "join", "exchange")
SHALLOW = 300  # programs of the first seeds are short


class Skip(Exception):  # noqa: N818
    """A step finds nothing to work on."""


def coarse(x, fineness=4):
    """Return x in quarters, exactly, with the gradient of x; no rational x is at an edge."""
    steps = lax.stop_gradient(jnp.floor(x * fineness + 0.318309886) / fineness)
    return steps + (x - lax.stop_gradient(x))


def tame(x):
    """Return x, no larger than about ten."""
    return x / (1 + 0.1 * jnp.abs(x))


def floating(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


class Pool:
    """What the steps of a program have made so far, and the draws of the present step."""

    def __init__(self, weights, batch):
        self.batch = batch
        self.weights = weights
        self.values = [batch[name] for name in CUTS if name not in ("key", "raw")]
        self.rng = np.random.default_rng(0)
        self.asked = 0

    def pick(self, things):
        return things[int(self.rng.integers(len(things)))]

    def chance(self, p=0.5):
        return bool(self.rng.random() < p)

    def number(self, low, high):
        return int(self.rng.integers(low, high + 1))

    def take(self, test=lambda v: True, of=floating):
        """Return an earlier value, often one of the last, of which the test is true."""
        fits = [v for v in self.values if of(v) and test(v)]
        if not fits:
            raise Skip
        return self.pick(fits[-3:] if self.chance(0.6) else fits)

    def array(self, rank=1, most=4):
        return self.take(lambda v: rank <= v.ndim <= most)

    def axis(self, x, least=1):
        fits = [i for i, n in enumerate(x.shape) if n >= least]
        if not fits:
            raise Skip
        return self.pick(fits)

    def weight(self, *shape):
        """Return a weight of this shape."""
        self.asked += 1
        return self.weights(f"w{self.asked}", shape)

    def key(self):
        """Return a random key, typed or raw."""
        name = "key" if self.chance() else "raw"
        key = self.batch[name]
        return jax.random.fold_in(key, self.number(0, 9)) if self.chance() else key

    def beside(self, x):
        """Return a value that broadcasts to x, and has its rank."""
        draw = self.rng.random()
        if draw < 0.2 and x.ndim:
            return self.weight(*(1 if i < x.ndim - 1 else n for i, n in enumerate(x.shape)))
        if draw < 0.4:
            same = [v for v in self.values if floating(v) and v.shape == x.shape]
            return self.pick(same) if same else jnp.full((1,) * x.ndim, 0.5)
        y = self.take(lambda v: v.ndim <= x.ndim)
        return place(self.rng, y, x.shape)

    def indices(self, bound, rank=None):
        """Return whole numbers from 0 up to the bound."""
        ints = [
            v
            for v in self.values
            if jnp.issubdtype(v.dtype, jnp.integer) and v.ndim and rank in (None, v.ndim)
        ]
        if ints and self.chance(0.7):
            return self.pick(ints) % bound
        x = self.take(lambda v: v.ndim and rank in (None, v.ndim))
        return jnp.floor(coarse(x) * 4).astype(jnp.int32) % bound


def place(rng, y, shape):
    """Return y with its dimensions at some of equal size in this shape, or its mean."""
    where, at = [], 0
    for n in y.shape:
        fits = [i for i in range(at, len(shape)) if shape[i] == n]
        if not fits:
            return jnp.mean(y) * jnp.ones((1,) * len(shape))
        where.append(fits[int(rng.integers(len(fits)))])
        at = where[-1] + 1
    return lax.expand_dims(y, [i for i in range(len(shape)) if i not in where])


STEPS: dict[str, Callable[[Pool], Any]] = {}


def step(function):
    STEPS[function.__name__] = function
    return function


# --- number by number ---------------------------------------------------------------------------

UNARY = [
    jnp.tanh,
    jnp.sin,
    jax.nn.sigmoid,
    jax.nn.gelu,
    jax.nn.silu,
    jax.nn.softplus,
    lambda x: jax.nn.relu(coarse(x)),
    lambda x: jnp.clip(coarse(x), -0.6, 0.9),
    lambda x: jnp.abs(coarse(x)),
    lambda x: x * jnp.tanh(x),
    lambda x: jnp.exp(-x * x),
    lambda x: jnp.log1p(x * x),
    lambda x: jnp.sqrt(1 + x * x),
    lambda x: jnp.where(coarse(x) > 0.25, x, 0.1 * x),
    lambda x: jnp.where(jnp.isfinite(x), x, 0.0),
    lambda x: coarse(x) + 0.5 * jnp.sign(coarse(x)),
    lambda x: jnp.nan_to_num(x) * 0.5,
    lambda x: 1 / (1 + x * x),
    lambda x: lax.integer_pow(tame(x), 3),
    lambda x: lax.stop_gradient(x) + 0.3 * x,
    lambda x: jnp.square(x) * 0.1,
    lambda x: lax.erf(x),
    lambda x: coarse(x).astype(jnp.int32).astype(x.dtype) + x,
    lambda x: coarse(x).astype(bool) * x,
    lambda x: lax.rem(coarse(x), 1.5) + x,
    lambda x: jnp.floor(coarse(x)) - x,
]
BINARY = [
    jnp.add,
    jnp.subtract,
    jnp.multiply,
    lambda x, y: jnp.maximum(coarse(x), coarse(y)),
    lambda x, y: jnp.minimum(coarse(x), coarse(y)),
    lambda x, y: jnp.where(coarse(x) > coarse(y), x, y),
    lambda x, y: x / (1 + y * y),
    lambda x, y: jnp.hypot(x + 3, y),
    lambda x, y: jnp.logaddexp(x, y),
    lambda x, y: jnp.where(coarse(x) == coarse(y), x, 0.0),
    lambda x, y: jnp.arctan2(x, 2 + y * y),
]


@step
def pointwise(p):
    return p.pick(UNARY)(p.take())


@step
def two(p):
    x = p.take()
    return p.pick(BINARY)(x, p.beside(x))


@step
def choose(p):
    x = p.take()
    test = coarse(p.beside(x)) > 0.25
    if p.chance(0.3):
        test = ~test | (coarse(x) < 0)
    return jnp.where(test, x, p.beside(x))


@step
def along(p):
    """Softmax and the like, along any dimension."""
    x = p.array()
    axis = p.axis(x)
    kinds = [
        lambda: jax.nn.softmax(x, axis),
        lambda: jax.nn.log_softmax(x, axis),
        lambda: jax.nn.standardize(x, axis, epsilon=0.1),
        lambda: x - x.mean(axis, keepdims=True),
        lambda: x / jnp.sqrt(0.1 + jnp.sum(x * x, axis, keepdims=True)),
        lambda: (coarse(x) == coarse(x).max(axis, keepdims=True)) * x,
    ]
    return p.pick(kinds)()


# --- over a dimension ---------------------------------------------------------------------------

REDUCE = [
    jnp.sum,
    jnp.mean,
    jnp.mean,
    lambda x, **o: jnp.max(coarse(x), **o),
    lambda x, **o: jnp.min(coarse(x), **o),
    lambda x, **o: jnp.max(jnp.abs(coarse(x)), **o),
    lambda x, **o: jnp.prod(1 + 0.1 * jnp.tanh(x), **o),
    lambda x, **o: jnp.prod(coarse(x, 1) * 0.5, **o),  # with zeros
    lambda x, **o: jnp.any(coarse(x) > 1, **o),
    lambda x, **o: jnp.all(coarse(x) > -1, **o),
    lambda x, **o: jnp.sum(coarse(x) > 0, **o),
    jnp.var,
    lambda x, **o: jnp.var(x, ddof=1, **o) if x.size > 99 else jnp.var(x, **o),
    lambda x, **o: jnp.sqrt(0.1 + jnp.var(x, **o)),
    lambda x, **o: jnp.mean(x, where=coarse(x) > 0.25, **o) if x.size > 99 else jnp.mean(x, **o),
    lambda x, **o: jnp.max(coarse(x), initial=0.0, where=coarse(x) < 1, **o),
    lambda x, **o: jnp.average(x, weights=1 + jnp.tanh(x) ** 2, **o),
]
ONE_AXIS = [
    lambda x, axis: jnp.argmax(coarse(x), axis),
    lambda x, axis: jnp.argmin(coarse(x), axis),
    lambda x, axis: jnp.median(coarse(x), axis),
    lambda x, axis: jax.nn.logsumexp(x, axis),
    lambda x, axis: jnp.linalg.norm(x + 0.1, axis=axis),
    lambda x, axis: jnp.quantile(coarse(x), 0.3, axis),
    lambda x, axis: jnp.ptp(coarse(x), axis),
    lambda x, axis: jnp.count_nonzero(coarse(x), axis),
    lambda x, axis: lax.reduce_precision(coarse(x), 8, 7).sum(axis),
    lambda x, axis: lax.reduce(coarse(x), -np.inf, lax.max, (axis,)),
    lambda x, axis: lax.reduce(
        jnp.floor(coarse(x)).astype(jnp.int32), np.int32(0), lax.bitwise_xor, (axis,)
    ),
]


@step
def reduce(p):
    x = p.array()
    some = tuple(i for i in range(x.ndim) if p.chance())
    axis = None if p.chance(0.15) else some or p.axis(x)
    return p.pick(REDUCE)(x, axis=axis, keepdims=p.chance(0.3))


@step
def reduce_one(p):
    x = p.array()
    return p.pick(ONE_AXIS)(x, p.axis(x))


@step
def centre(p):
    """Statistics of a dimension or two, beside what they are of: norms of layers and batches."""
    x = p.array(rank=2)
    axis = tuple({p.axis(x), p.axis(x)})
    mean, spread = x.mean(axis, keepdims=True), x.var(axis, keepdims=True)
    normal = (x - mean) * lax.rsqrt(spread + 0.1)
    return [normal * p.weight(*(1,) * (x.ndim - 1), x.shape[-1]), mean + spread]


# --- products -----------------------------------------------------------------------------------


@step
def matmul(p):
    x = p.array()
    return jnp.tanh(x @ p.weight(x.shape[-1], p.number(2, 5)))


@step
def einsum(p):
    """Any two values, over dimensions of equal size, maybe along others."""
    x, y = p.array(most=3), p.array(most=3)
    if p.chance(0.2):
        y = x
    left, right = list("abc"[: x.ndim]), list("ijk"[: y.ndim])
    pairs = [(i, j) for i in range(x.ndim) for j in range(y.ndim) if x.shape[i] == y.shape[j]]
    if not pairs:
        raise Skip
    i, j = p.pick(pairs)
    right[j] = left[i]
    summed = [left[i]]
    more = [(a, b) for a, b in pairs if a != i and b != j]
    if more and p.chance(0.6):
        a, b = p.pick(more)
        right[b] = left[a]
    if p.chance(0.15):
        summed = []
    out = [c for c in dict.fromkeys(left + right) if c not in summed]
    p.rng.shuffle(out)
    sizes = dict(zip(left + right, x.shape + y.shape, strict=True))
    if math.prod(sizes[c] for c in out) > LARGEST:
        raise Skip
    spec = f"{''.join(left)},{''.join(right)}->{''.join(out)}"
    return tame(jnp.einsum(spec, x, y) / (x.shape[i] if summed else 1))


@step
def einsum_of_three(p):
    x = p.take(lambda v: v.ndim == 2)
    y = p.take(lambda v: v.ndim in (1, 2) and v.shape[0] == x.shape[0])
    w = p.weight(x.shape[1], 3)
    if y.ndim == 1:
        return jnp.einsum("bd,b,df->f", x, y, w) / len(x)
    return jnp.einsum("bd,be,df->ef", x, y, w) / len(x)


@step
def outer(p):
    """Every row with every row: distances, products."""
    x = p.take(lambda v: v.ndim == 2 and v.shape[0] <= 16)
    kinds = [
        lambda: x @ x.T / x.shape[1],
        lambda: x.T @ x / x.shape[0],
        lambda: ((x[:, None] - x[None]) ** 2).mean(-1),
        lambda: jnp.where(jnp.eye(x.shape[0], dtype=bool), 0.0, x @ x.T),
        lambda: jnp.triu(x @ x.T) * 0.3,
        lambda: jnp.vecdot(x, jnp.roll(x, 1, 0)),
        lambda: jnp.trace(x @ x.T) * 0.1,
        lambda: jnp.diag(x @ x.T),
        lambda: jnp.tensordot(x, x, axes=2) * 0.1,
    ]
    return tame(p.pick(kinds)())


@step
def attend(p):
    """Attention along the last dimension but one."""
    x = p.take(lambda v: v.ndim in (2, 3))
    q = x @ p.weight(x.shape[-1], x.shape[-1])
    scores = jnp.einsum("...qd,...kd->...qk", q, x)
    if p.chance():
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(jnp.broadcast_to(causal, scores.shape), scores, -1e9)
    return jnp.einsum("...qk,...kd->...qd", jax.nn.softmax(scores), x)


# --- shifts, running sums, order ----------------------------------------------------------------


@step
def shift(p):
    x = p.array()
    axis = p.axis(x, least=2)
    n = x.shape[axis]
    cut = functools.partial(lax.slice_in_dim, x, axis=axis)
    no = [(0, 0, 0)] * x.ndim
    pad = lambda *config: lax.pad(x, np.float64(0.5), [*no[:axis], config, *no[axis + 1 :]])
    kinds = [
        lambda: jnp.roll(x, p.number(-3, 3), axis),
        lambda: cut(1, n) - cut(0, n - 1),
        lambda: jnp.diff(x, axis=axis, prepend=0.0),
        lambda: pad(p.number(-1, 2), p.number(-1, 2), 0),
        lambda: pad(0, 0, 1),
        lambda: jnp.flip(x, axis),
        lambda: cut(0, n, 2),
        lambda: cut(1, n, 2),
        lambda: cut(n - 1, n),
        lambda: lax.index_in_dim(x, p.number(0, n - 1), axis, keepdims=False),
        lambda: cut(0, n // 2),
        lambda: cut(n // 2, n),
        lambda: cut(0, n // 2) - cut(n - n // 2, n),
        lambda: lax.dynamic_slice_in_dim(x, p.batch["count"] % 3, max(1, n - 2), axis),
        lambda: x + jnp.roll(jnp.flip(x, axis), 1, axis),
        lambda: jnp.roll(x, p.batch["count"], axis),
        lambda: lax.rev(x, tuple(range(x.ndim))),
        lambda: jnp.gradient(x, axis=axis),
    ]
    return p.pick(kinds)()


@step
def cumulative(p):
    x = p.array()
    axis, back = p.axis(x), p.chance(0.3)

    def affine(a, b):
        return a[0] * b[0], a[1] * b[0] + b[1]

    pair = (jax.nn.sigmoid(x), x)
    kinds = [
        lambda: lax.cumsum(x, axis, back),
        lambda: jnp.cumsum(x, axis) / x.shape[axis],
        lambda: lax.cummax(coarse(x), axis, back),
        lambda: lax.cummin(coarse(x), axis, back),
        lambda: lax.cumprod(1 + 0.1 * jnp.tanh(x), axis, back),
        lambda: lax.cumlogsumexp(x, axis, back),
        lambda: lax.associative_scan(jnp.add, x, back, axis),
        lambda: lax.associative_scan(affine, pair, back, axis)[1],
        lambda: jnp.cumsum(coarse(x) > 0, axis),
    ]
    return tame(p.pick(kinds)())


@step
def order(p):
    x = p.array()
    axis = p.axis(x)
    n = x.shape[axis]
    c = coarse(x)

    def of_two():
        return lax.sort((c, jnp.sin(x)), dimension=axis, num_keys=1)

    def by_row():
        line = jnp.moveaxis(x, axis, 0)
        return line[jnp.argsort(coarse(line.reshape(n, -1)[:, 0]))]

    kinds = [
        lambda: jnp.sort(c, axis),
        lambda: jnp.sort(c, axis, descending=True),
        lambda: jnp.argsort(c, axis),
        lambda: jnp.argsort(jnp.argsort(c, axis), axis),
        lambda: list(lax.top_k(jnp.moveaxis(c, axis, -1), min(2, n))),
        lambda: list(lax.top_k(c, min(2, c.shape[-1]))),
        of_two,
        by_row,
        lambda: lax.top_k(jnp.moveaxis(c, axis, -1), n)[0],
        lambda: jnp.searchsorted(jnp.sort(c.ravel()), c.ravel()[: n + 1]),
    ]
    return p.pick(kinds)()


# --- by index -----------------------------------------------------------------------------------


@step
def lookup(p):
    n = p.number(3, 6)
    at = p.indices(n)
    table = p.weight(n, p.number(2, 4))
    if at.size * 4 > LARGEST:
        raise Skip
    kinds = [
        lambda: table[at],
        lambda: jnp.take(table, at + 1, axis=0, mode="clip"),
        lambda: jnp.take(table, at + 1, axis=0, mode="fill", fill_value=0.25),
        lambda: jax.nn.one_hot(at, n) @ table,
        lambda: table[:, 0][at],
        lambda: table.T[:, at],
    ]
    return p.pick(kinds)()


@step
def rows_by_index(p):
    x = p.take(lambda v: v.ndim and v.size < 100)
    axis = p.axis(x)
    at = p.indices(x.shape[axis], rank=1)
    return jnp.take(x, at, axis)


@step
def one_of_each(p):
    """x[arange, labels] and take_along_axis."""
    x = p.array(rank=2)
    axis = p.axis(x)
    line = jnp.moveaxis(x, axis, -1)
    at = p.indices(line.shape[-1])
    if p.chance() and at.shape[:1] == line.shape[:1]:
        return line[jnp.arange(len(line)), ..., at.reshape(len(line), -1)[:, 0]]
    if at.shape == line.shape[:-1]:
        return jnp.take_along_axis(line, at[..., None], -1)[..., 0]
    order = jnp.argsort(coarse(x), axis)
    return jnp.take_along_axis(x, order, axis)


@step
def scatter(p):
    """Add, set or compare at indices, into zeros, a weight or rows."""
    x = p.take(lambda v: v.ndim in (1, 2))
    n = len(x)
    into = p.number(3, 9)
    at = p.indices(into).ravel()
    if len(at) < n:
        raise Skip
    at, zeros = at[:n], jnp.zeros((into, *x.shape[1:]))
    base = p.pick([zeros, zeros + 1, p.weight(into, *x.shape[1:])])
    c = coarse(x)
    order = jnp.argsort(c if x.ndim == 1 else c[:, 0])
    keep = c.reshape(n, -1)[:, 0] > 0
    kinds = [
        lambda: base.at[at].add(x),
        lambda: base.at[at].add(x, mode="drop"),
        lambda: base.at[jnp.where(keep, at, into)].add(x, mode="drop"),
        lambda: coarse(base).at[at].max(c),
        lambda: coarse(base).at[at].min(c),
        lambda: base[:1].at[at[:1] * 0].multiply(1 + 0.1 * x[:1], unique_indices=True),
        lambda: jnp.ones_like(x).at[order].multiply(1 + 0.1 * x, unique_indices=True),
        lambda: zeros.at[at, ...].add(1.0),
        lambda: jnp.zeros_like(x).at[order].set(x),
        lambda: jnp.zeros_like(x).at[order].add(x, unique_indices=True),
        lambda: x.at[p.number(0, n - 1)].set(0.25),
        lambda: x.at[: n // 2].add(1.0),
        lambda: x.at[::2].multiply(0.5),
        lambda: jnp.zeros((n, into)).at[jnp.arange(n), at].set(x.reshape(n, -1)[:, 0]),
        lambda: jax.ops.segment_sum(x, at, into),
        lambda: jax.ops.segment_max(c, at, into, indices_are_sorted=False).clip(-3, 3),
        lambda: jnp.bincount(at, length=into),
        lambda: lax.dynamic_update_slice_in_dim(x, x[:1] * 0 + 0.5, p.batch["count"] % n, 0),
        lambda: lax.dynamic_update_index_in_dim(x, x[0] * 2, p.batch["count"] % n, 0),
    ]
    return p.pick(kinds)()


@step
def whole_numbers(p):
    """Arithmetic, comparisons and one-hot of whole numbers."""
    at = p.indices(p.number(2, 5))
    if at.size * 5 > LARGEST:
        raise Skip
    kinds = [
        lambda: jax.nn.one_hot(at, 5) * 1.0,
        lambda: at[..., None] == jnp.arange(4).reshape((1,) * at.ndim + (4,)),
        lambda: (at * 7 + 3) % 5,
        lambda: jnp.cumsum(at, 0) - at,
        lambda: at.sum() - at,
        lambda: jnp.left_shift(at, 1) ^ at,
        lambda: at == at.max(),
        lambda: lax.population_count(at),
        lambda: jnp.bitwise_or.reduce(at, axis=0),
        lambda: (at.reshape(-1, 1) == at.reshape(1, -1)) if at.size <= 24 else at,
    ]
    return p.pick(kinds)()


@step
def of_truth(p):
    """Numbers of what is true or whole."""
    v = p.take(of=lambda v: not floating(v))
    return v.astype(jnp.float64) * p.pick([1.0, 0.1, -0.5])


# --- forms --------------------------------------------------------------------------------------


@step
def form(p):
    x = p.take(lambda v: 1 <= v.ndim <= 4, of=lambda v: True)
    axis, other = p.axis(x), p.axis(x)
    front = jnp.moveaxis(x, axis, 0)
    n = len(front)
    half = (n // 2, 2) if p.chance() else (2, n // 2)
    kinds = [
        lambda: x.ravel(),
        lambda: jnp.swapaxes(x, axis, other),
        lambda: front.reshape(-1, *front.shape[2:]) if x.ndim > 1 else x[:, None],
        lambda: x.reshape(-1, x.shape[-1]),
        lambda: x.reshape(x.shape[0], -1),
        lambda: x.reshape(-1, x.shape[0]),
        lambda: x.T.reshape(x.shape),
        lambda: front.reshape(*half, *front.shape[1:]) if n % 2 == 0 and x.ndim < 4 else x,
        lambda: jnp.expand_dims(x, axis) if x.ndim < 4 else x,
        lambda: jnp.repeat(x, 2, axis),
        lambda: jnp.tile(x, tuple(1 + (i == axis) for i in range(x.ndim))),
        lambda: jnp.broadcast_to(front[:1], front.shape),
        lambda: jnp.broadcast_to(x[None], (3, *x.shape)) if x.ndim < 4 else x,
        lambda: jnp.squeeze(x) if 1 in x.shape else x,
        lambda: lax.reshape(x, (x.size,), tuple(reversed(range(x.ndim)))),
        lambda: lax.expand_dims(x, (0, x.ndim + 1)) if x.ndim < 3 else x,
        lambda: jnp.split(front, 2)[p.number(0, 1)] if n % 2 == 0 else front,
        lambda: list(jnp.split(front, 2)) if n % 2 == 0 else front,
    ]
    found = p.pick(kinds)()
    if not isinstance(found, list) and found.size > LARGEST:
        raise Skip
    return found


@step
def join(p):
    x = p.array()
    axis = p.axis(x)
    fits = lambda v: (
        v.ndim == x.ndim
        and all(a == b for i, (a, b) in enumerate(zip(v.shape, x.shape, strict=True)) if i != axis)
    )
    y = p.take(fits)
    last = x.shape[-1]
    kinds = [
        lambda: jnp.concatenate([x, y], axis),
        lambda: jnp.concatenate([x, jnp.flip(x, axis)], axis),
        lambda: jnp.concatenate([x, jnp.sin(x), jnp.cos(x)], axis),
        lambda: jnp.stack([x, jnp.tanh(x)], axis),
        lambda: jnp.stack([x, jnp.tanh(x)], -1).reshape(*x.shape[:-1], -1),
        lambda: jnp.concatenate([jnp.zeros_like(x), y], axis),
        lambda: jnp.concatenate([x, p.weight(*x.shape[:-1], 2)], -1) if x.size < 60 else x,
        lambda: jnp.append(x.ravel(), p.weight(last)),
        lambda: jnp.concatenate([x, y], axis).reshape(2, -1) if fits(y) and x is y else x,
    ]
    found = p.pick(kinds)()
    if found.size > LARGEST or found.ndim > 4:
        raise Skip
    return found


@step
def pairs(p):
    """Neighbours, groups and halves of the first dimension."""
    x = p.take(lambda v: 1 <= v.ndim <= 3 and v.shape[0] % 2 == 0 and v.shape[0])
    n, rest = len(x), x.shape[1:]
    kinds = [
        lambda: x[::2] - x[1::2],
        lambda: x[: n // 2] * x[n // 2 :],
        lambda: x.reshape(n // 2, 2, *rest).mean(1),
        lambda: x.reshape(2, n // 2, *rest).mean(0),
        lambda: coarse(x).reshape(n // 2, 2, *rest).max(1),
        lambda: jnp.stack([x[1::2], x[::2]], 1).reshape(x.shape),
        lambda: x.reshape(n // 2, -1),
        lambda: jnp.repeat(x.reshape(n // 2, 2, *rest).sum(1), 2, axis=0),
        lambda: x.reshape(2, n // 2, *rest).swapaxes(0, 1).reshape(x.shape),
        lambda: x[jnp.arange(n) ^ 1],
    ]
    return p.pick(kinds)()


@step
def convolve(p):
    x = p.take(lambda v: v.ndim == 3)
    channels = x.shape[-1]
    dims, pick = ("NWC", "WIO", "NWC"), p.number(0, 5)
    w = lambda out, per=channels: p.weight(2, per, out)
    if pick == 0:
        return lax.conv_general_dilated(x, w(3), (1,), "SAME", dimension_numbers=dims)
    if pick == 1:
        return lax.conv_general_dilated(x, w(2), (2,), [(1, 1)], dimension_numbers=dims)
    if pick == 2:
        o = {"dimension_numbers": dims, "feature_group_count": channels}
        return lax.conv_general_dilated(x, w(channels, 1), (1,), "SAME", **o)
    if pick == 3:  # the second dimension holds the examples
        turned = ("WNC", "WIO", "WNC")
        return lax.conv_general_dilated(x, w(3), (1,), "SAME", dimension_numbers=turned)
    if pick == 4:
        return lax.reduce_window(x, 0.0, lax.add, (1, 2, 1), (1, 1, 1), "SAME")
    return lax.reduce_window(coarse(x), -np.inf, lax.max, (2, 1, 1), (1, 1, 1), "VALID")


# --- loops and branches -------------------------------------------------------------------------


@step
def scan(p):
    """Over any dimension: rows, positions, width; statistics and other values in the body."""
    x = p.take(lambda v: 1 <= v.ndim <= 3)
    xs = jnp.moveaxis(x, p.axis(x), 0)
    a, more = p.weight(*(1,) * (xs.ndim - 1)), p.take()
    start = p.pick([jnp.zeros(xs.shape[1:]), xs[0], xs.mean(0)])
    back, kind = p.chance(0.3), p.number(0, 7)

    def body(carry, x):
        state, total, i = carry
        state = jnp.tanh(a * state + x)
        if kind == 6:
            state = lax.cond(coarse(state.sum()) > i, lambda: state - state.mean(), lambda: state)
        if kind == 7:
            state = lax.fori_loop(0, 2, lambda j, s: jnp.tanh(s + s.mean() * j), state)
        if kind == 1:
            state = state - state.mean()
        if kind == 2:
            state = state + 0.1 * more.mean() * total
        if kind == 3:
            state = jnp.where(coarse(state) > 0.25, state, i * 0.1)
        if kind == 4:
            total = jnp.maximum(total, coarse(state).max())
        if kind == 5 and state.ndim:
            state = jnp.roll(state, 1, 0)
        return (state, total + x.sum() * 0.1, i + 1), state * total

    (state, total, _), out = lax.scan(body, (start, 0.0, 0), xs, reverse=back)
    return [state, tame(total), tame(out)]


@step
def layers(p):
    """A scan over stacked weights."""
    x = p.take(lambda v: v.ndim in (2, 3))
    d = x.shape[-1]
    stacked = (p.weight(2, d, d), p.weight(2, *(1,) * (x.ndim - 1), d))
    kind = p.number(0, 4)

    def layer(h, given):
        w, b = given
        if kind == 1:
            h = h - h.mean(0, keepdims=True)
        if kind == 2:
            h = jnp.roll(h, 1, 0)
        if kind == 3:
            h = h[::-1]
        h = h + jnp.tanh(h @ w + b)
        return h, (coarse(h).max() if kind == 4 else jnp.mean(h * h))

    layer = jax.checkpoint(layer) if p.chance(0.3) else layer
    h, found = lax.scan(layer, x, stacked, unroll=p.pick([1, 2]))
    return [tame(h), found]


@step
def loop(p):
    """fori_loop, map, vmap of functions, for a number of times that is known."""
    x = p.take(lambda v: 1 <= v.ndim <= 3)
    a, n = p.weight(*(1,) * x.ndim), len(x)
    each = lambda row: jnp.tanh(row) * (1 + row.mean())
    times = p.number(1, 4)

    def by_index(i, h):
        return h + lax.dynamic_index_in_dim(x, i % n, 0, keepdims=True) * 0.1

    kinds = [
        lambda: lax.map(each, x),
        lambda: jax.vmap(each)(x),
        lambda: lax.fori_loop(0, times, lambda i, h: jnp.tanh(a * h + i), x),
        lambda: lax.fori_loop(0, times, by_index, x),
        lambda: lax.fori_loop(0, times, lambda i, h: h - 0.1 * h.mean(0, keepdims=True), x),
        lambda: lax.fori_loop(0, n, lambda i, h: h.at[i].multiply(0.5), x),
        lambda: lax.fori_loop(0, n, lambda i, t: t + x[i].sum() * i, 0.0),
        lambda: lax.map(lambda i: x[i] * 0.5, jnp.arange(n)[::-1]),
        lambda: lax.map(each, x, batch_size=2),
        lambda: jax.vmap(lambda row: row - x.mean(), in_axes=x.ndim - 1, out_axes=0)(x),
    ]
    return tame(p.pick(kinds)())


@step
def exchange(p):
    """Loops whose carry changes what it is: halves change places, squares are transposed."""
    x = p.take(lambda v: v.ndim == 2 and v.shape[0] <= 16)
    square, times = tame(x @ x.T), p.number(1, 3)
    many = jnp.ones(x.shape)
    a, flag = p.weight(1, x.shape[1]), p.number(0, 4)

    def turn(i, carry):
        one, two, three = carry
        return two, three + one.mean(), tame(one * x)

    def of_keys(h, key):
        return h * jax.random.bernoulli(key, 0.7, h.shape), jax.random.uniform(key, h.shape[:1])

    kinds = [
        lambda: lax.fori_loop(0, times, lambda i, s: jnp.tanh(s.T @ s / len(s) + i), square),
        lambda: list(lax.fori_loop(0, times, lambda i, c: (c[1], c[0] * 0.5), (x, many))),
        lambda: list(lax.fori_loop(0, times, turn, (many, many * a, x))),
        lambda: lax.fori_loop(0, times, lambda i, s: s + x.sum(0, keepdims=True) * 0.1, many * a),
        lambda: list(lax.scan(of_keys, x, jax.random.split(p.batch["key"], 3))),
        lambda: lax.fori_loop(0, times, lambda i, s: jnp.where(i == 1, x, s), many * flag),
        lambda: lax.scan(lambda s, row: (s.at[0].set(row), s[-1]), x, x + 1)[0],
        lambda: lax.scan(lambda s, i: (jnp.roll(s, 1, 0).at[0].add(x[i]), i), x, jnp.arange(3))[0],
    ]
    return p.pick(kinds)()


def verdict(p):
    """A truth that follows from all rows, or from none."""
    x, kind = coarse(p.take()), p.number(0, 4)
    if kind == 0:
        return coarse(x.mean()) > 0
    if kind == 1:
        return x.max() > 1
    if kind == 2:
        return (x > 0).any()
    if kind == 3:
        return p.batch["count"] > 1
    return jnp.sum(x > 0) * 2 > x.size


@step
def branch(p):
    x, y = p.take(), p.take()
    pred = verdict(p)
    a = p.weight(*(1,) * x.ndim)
    kind = p.number(0, 6)
    if kind == 0:
        return lax.cond(pred, lambda: x * a, lambda: jnp.sin(x))
    if kind == 1:
        return lax.cond(pred, lambda x: x - x.mean(), lambda x: x + y.sum() * 0.1, x)
    if kind == 2:
        which = pred.astype(jnp.int32) + (coarse(y.mean()) > 0)
        return lax.switch(which, [jnp.tanh, lambda x: x * 0.5, lambda x: x + y.mean()], x)
    if kind == 3:
        first = lambda: (x.sum() * 0.1, x)
        return list(lax.cond(pred, first, lambda: (jnp.zeros(()), jnp.zeros_like(x))))
    if kind == 4:
        return list(lax.cond(pred, lambda: (x, x.mean()), lambda: (a * jnp.ones(x.shape), 0.0)))
    if kind == 5:
        return lax.cond(pred, lambda: x.sum(), lambda: coarse(x).max() + a.sum())
    return jnp.where(pred, x, jnp.mean(x))


@step
def until(p):
    """A while loop on data; nothing is derived from it."""
    x = lax.stop_gradient(p.take())
    kind = p.number(0, 3)
    if kind == 0:
        bound = lambda s: (jnp.abs(coarse(s[0])).max() > 1) & (s[1] < 6)
        return list(lax.while_loop(bound, lambda s: (s[0] * 0.7, s[1] + 1), (x, 0)))
    if kind == 1:
        bound = lambda s: (coarse(jnp.mean(s * s)) > 0.25) & (jnp.sum(s * s) > 1e-3)
        return lax.while_loop(bound, lambda s: s * 0.5, x)
    if kind == 2:
        return lax.fori_loop(0, p.batch["count"], lambda i, s: jnp.tanh(s + s.mean()), x)
    goal = jnp.mean(jnp.abs(x)) + 0.5
    bound = lambda s: (s[1] - s[0] > 0.01) & (s[2] < 20)

    def halve(s):
        low, high, i = s
        middle = (low + high) / 2
        over = coarse(jnp.mean(jnp.tanh(x + middle))) > 0
        return jnp.where(over, low, middle), jnp.where(over, middle, high), i + 1

    return lax.while_loop(bound, halve, (-goal, goal, 0))[0]


# --- random numbers -----------------------------------------------------------------------------


@step
def chance(p):
    x = p.take(lambda v: v.ndim <= 3)
    key, n = p.key(), len(x) if x.ndim else 1
    line = x.reshape(n, -1)
    kinds = [
        lambda: jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x / 0.7, 0),
        lambda: x + 0.1 * jax.random.normal(key, x.shape),
        lambda: x * jax.random.uniform(key, x.shape, minval=0.5, maxval=1.5),
        lambda: x * jax.random.uniform(key, x.shape[:1] + (1,) * (x.ndim - 1)),
        lambda: line[jax.random.permutation(key, n)],
        lambda: jax.random.permutation(key, line),
        lambda: jax.random.permutation(key, line, axis=1),
        lambda: jax.random.categorical(key, line),
        lambda: jax.vmap(lambda k, r: r + jax.random.normal(k, r.shape))(
            jax.random.split(key, n), line
        ),
        lambda: jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(key, i)))(jnp.arange(n)),
        lambda: coarse(line) * jax.random.randint(key, (n, 1), 0, 3),
        lambda: jax.nn.softmax(line + jax.random.gumbel(key, line.shape)),
        lambda: jax.random.choice(key, line.ravel(), (5,)),
        lambda: x + jax.random.normal(jax.random.split(key)[1], (1,) * x.ndim),
        lambda: x * (1 + jax.random.exponential(key, x.shape)),
    ]
    return p.pick(kinds)()


# --- masks and constants ------------------------------------------------------------------------


@step
def masks(p):
    x = p.take(lambda v: 1 <= v.ndim <= 3)
    n, last = x.shape[0], x.shape[-1]
    at = lax.broadcasted_iota(jnp.int32, x.shape, p.axis(x))
    table = np.random.default_rng(p.number(0, 99)).integers(-2, 3, x.shape) / 2
    line = table.reshape(n, -1)[:, 0].reshape((n,) + (1,) * (x.ndim - 1))
    kinds = [
        lambda: jnp.where(at < p.number(1, n), x, 0.0),
        lambda: jnp.where(at % 2 == 0, x, -x),
        lambda: x * at,
        lambda: x + table,
        lambda: x * line,
        lambda: x * jnp.asarray(table),
        lambda: x * jnp.linspace(0, 1, n).reshape((n,) + (1,) * (x.ndim - 1)),
        lambda: jnp.tril(x) if x.ndim > 1 else x * jnp.eye(n)[0],
        lambda: x + jnp.eye(n, last) if x.ndim == 2 else x,
        lambda: x * (jnp.arange(n) % 3).reshape((n,) + (1,) * (x.ndim - 1)),
        lambda: x + jnp.zeros(x.shape) + jnp.full_like(x, n),
        lambda: x[np.random.default_rng(1).permutation(n)],
        lambda: jnp.broadcast_to(jnp.arange(last, dtype=jnp.float64), x.shape[-1:]),
    ]
    return p.pick(kinds)()


# --- derivatives --------------------------------------------------------------------------------


@jax.custom_vjp
def straight(x):
    return jnp.round(x + 0.18)


straight.defvjp(lambda x: (straight(x), None), lambda _, g: (g,))


@jax.custom_vjp
def turned(x):
    return x


turned.defvjp(lambda x: (x, None), lambda _, g: (-0.3 * g,))


@jax.custom_vjp
def unit(x):
    return jnp.tanh(x)


unit.defvjp(
    lambda x: (jnp.tanh(x), x),
    lambda x, g: (g * (1 - jnp.tanh(x) ** 2) / jnp.sqrt(1e-6 + jnp.sum(g * g)),),
)


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(
    lambda x: (x, None), lambda _, g: (g * jnp.minimum(1, 0.05 / jnp.sqrt(1e-9 + jnp.sum(g * g))),)
)


@jax.custom_vjp
def by_rows(x):
    return x * 1.0


by_rows.defvjp(lambda x: (x * 1.0, None), lambda _, g: (g * (g.shape or (1,))[0],))


@jax.custom_vjp
def signs(x):
    return jnp.sin(x)


signs.defvjp(
    lambda x: (jnp.sin(x), (jnp.cos(x), x.size)), lambda r, g: (jnp.tanh(g * r[1] * r[0]) * 0.1,)
)


@jax.custom_vjp
def centred(x):
    return x


centred.defvjp(lambda x: (x, None), lambda _, g: (g - g.mean(),))


@jax.custom_vjp
def scaled_by(x, y):
    return x * jnp.mean(y)


scaled_by.defvjp(
    lambda x, y: (x * jnp.mean(y), (x, y)),
    lambda r, g: (g * jnp.mean(r[1]) + 0.01 * r[0], jnp.full_like(r[1], jnp.vdot(g, r[0]) / 7)),
)


@jax.custom_jvp
def soft(x):
    return jnp.maximum(coarse(x), 0.0)


soft.defjvp(lambda x, t: (soft(*x), t[0] * jax.nn.sigmoid(x[0])))


@jax.custom_jvp
def balanced(x):
    return x - x.mean()


balanced.defjvp(lambda x, t: (balanced(*x), t[0] - 0.5 * t[0].mean()))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scaled(factor, x):
    return x * factor


scaled.defvjp(lambda factor, x: (x * factor, None), lambda factor, _, g: (g * factor * 2,))

RULES = [
    straight,
    turned,
    unit,
    clipped,
    by_rows,
    signs,
    centred,
    soft,
    balanced,
    functools.partial(scaled, 0.5),
    lambda x: scaled_by(x, x),
    jax.jit(unit),
    lambda x: jax.vmap(clipped)(x) if x.ndim else clipped(x),
]


@step
def own_rule(p):
    return p.pick(RULES)(p.take())


@step
def own_rule_of_weights(p):
    x = p.take(lambda v: v.ndim in (1, 2))
    w = p.pick([straight, clipped, unit, by_rows, centred])(p.weight(x.shape[-1], 3))
    return tame(x @ w)


@step
def again(p):
    """Computed again in the backward pass."""
    x = p.take(lambda v: v.ndim in (1, 2))
    w = p.weight(x.shape[-1], 3)

    def block(x, w):
        h = checkpoint_name(jnp.tanh(x @ w), "h")
        return jnp.tanh(h - h.mean(0, keepdims=True)) + coarse(h).max(0, keepdims=True)

    policies = [
        None,
        jax.checkpoint_policies.dots_saveable,
        jax.checkpoint_policies.save_only_these_names("h"),
        jax.checkpoint_policies.everything_saveable,
    ]
    return jax.checkpoint(block, policy=p.pick(policies), prevent_cse=p.chance())(x, w)


@step
def derived(p):
    """Derivatives inside the program."""
    x = p.take(lambda v: 1 <= v.ndim <= 2 and v.size < 80)
    w = p.weight(x.shape[-1], 3)
    energy = lambda x: jnp.sum(jnp.tanh(x @ w) ** 2)
    kinds = [
        lambda: jax.grad(energy)(x),
        lambda: jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w),
        lambda: jnp.mean((jnp.sqrt(0.1 + jnp.sum(jax.grad(energy)(x) ** 2, -1)) - 1) ** 2),
        lambda: jax.jvp(lambda x: jnp.tanh(x @ w), (x,), (jnp.ones_like(x),))[1],
        lambda: jax.jvp(jax.grad(energy), (x,), (jnp.cos(x),))[1],
        lambda: jax.vjp(lambda x: jnp.sin(x).sum(0), x)[1](jnp.ones(x.shape[1:]))[0],
        lambda: jax.vmap(jax.grad(energy))(x) if x.ndim == 2 else x,
        lambda: jax.grad(lambda x: coarse(x).max() + energy(x))(x),
        lambda: jax.vjp(lambda x: x - x.mean(0, keepdims=True), x)[1](jnp.sin(x))[0],
    ]
    return tame(p.pick(kinds)())


@step
def called(p):
    """A function compiled on its own, also in a map."""
    x = p.take()
    kinds = [
        lambda: jax.jit(lambda v: v - coarse(v).max())(x),
        lambda: jax.jit(jax.jit(lambda v: jnp.cumsum(v, 0) if v.ndim else v))(x) * 0.1,
        lambda: jax.jit(lambda v: (v * 2, v.mean()))(x)[1],
        lambda: lax.optimization_barrier((x, x.sum()))[0],
        lambda: jax.named_call(jnp.tanh, name="here")(x),
        lambda: jax.lax.map(lambda i: x.mean() * i, jnp.arange(3.0)),
    ]
    return p.pick(kinds)()


@step
def losses(p):
    """Losses over classes, pairs and masks."""
    x = p.take(lambda v: v.ndim in (2, 3))
    at = p.indices(x.shape[-1])
    logs = jax.nn.log_softmax(x)
    if at.shape == x.shape[:-1]:
        nll = -jnp.take_along_axis(logs, at[..., None], -1)[..., 0]
    else:
        nll = -logs[..., 0]
    keep = (coarse(x[..., 0]) > 0) * 1.0
    own = -jnp.diagonal(jax.nn.log_softmax(x @ jnp.swapaxes(x, -1, -2)), axis1=-2, axis2=-1)
    kinds = [
        lambda: jnp.sum(nll * keep) / (1 + jnp.sum(keep)),
        lambda: jnp.sum(nll * keep, 0) / (1 + jnp.sum(keep, 0)),
        lambda: nll.mean(),
        lambda: nll,
        lambda: own if x.shape[-2] <= 16 else nll,
        lambda: jnp.mean(nll) * jnp.mean(keep),
        lambda: nll.sum() / x.shape[0],
    ]
    return p.pick(kinds)()


# --- programs -----------------------------------------------------------------------------------

ENDS = [
    jnp.mean,
    jnp.mean,
    jnp.sum,
    lambda x: jnp.mean(jnp.tanh(x) ** 2),
    lambda x: jax.nn.logsumexp(x),
    lambda x: jnp.sqrt(0.1 + jnp.sum(x * x)),
    lambda x: jnp.max(coarse(x)) + jnp.mean(x),
    lambda x: jnp.sum(x) / (x.shape or (1,))[0],
    lambda x: jnp.sum(x * (coarse(x) > 0)) / (1 + jnp.sum(coarse(x) > 0)),
    lambda x: jnp.mean(x) * jnp.mean(jnp.cos(x)),
]


@dataclasses.dataclass
class Program:
    """A function of weights and a batch, and arrays of both."""

    name: str
    function: Callable[[Any, Any], tuple[Any, dict[str, Any]]]
    weights: dict[str, Any]
    batch: dict[str, Any]
    steps: tuple[tuple[str, int], ...] = ()


def add(pool, found):
    """Keep what a step has made, if it is small."""
    for v in found if isinstance(found, list | tuple) else [found]:
        if v.size and v.size <= LARGEST and v.ndim <= 4:
            pool.values.append(v)


def run(weights, batch, steps, seed):
    """Return the loss and the variables of the program of these steps; `weights(name, shape)`."""
    pool = Pool(weights, batch)
    given = len(pool.values)
    for name, at in steps:
        pool.rng = np.random.default_rng([seed, at])
        pool.asked = 100 * at
        try:
            add(pool, STEPS[name](pool))
        except Skip:
            continue
    made = pool.values[given:]
    floats = [v for v in made if floating(v)] or [batch["x"]]
    rng = pool.rng = np.random.default_rng([seed, 1_000_000])
    ends = [floats[-1]] + [pool.pick(floats) for _ in range(pool.number(0, 2))]
    loss = sum((0.5 + rng.random()) * pool.pick(ENDS)(tame(v)) for v in ends)
    return loss, {f"v{i}": v for i, v in enumerate(made[-4:])}


Sizes = tuple[int, int, int] | None  # rows, length, width; None: drawn


def make_batch(rng, sizes: Sizes = None) -> dict[str, Any]:
    """Return a batch; its sizes may be alike, so that only rules can tell rows from others."""
    drawn = (int(rng.choice(of)) for of in ([8, 8, 16], [2, 3, 4, 5, 8], [2, 3, 4, 5]))
    rows, length, width = sizes or drawn
    seed = int(rng.integers(1000))
    batch = arrays(rng, rows, length, width, labels=width, seed=seed)
    return batch | {"count": np.int32(rng.integers(0, 4))}


def arrays(rng, rows, length, width, labels, seed) -> dict[str, Any]:
    """Return arrays of a batch: of every kind that programs read."""
    quarters = lambda *shape: rng.integers(-6, 7, shape) / 4
    return {
        "x": quarters(rows, width),
        "y": rng.normal(size=rows),
        "z": rng.normal(size=(rows, length, width)),
        "across": quarters(length, rows),
        "tokens": rng.integers(0, VOCABULARY, (rows, length)).astype(np.int32),
        "labels": rng.integers(0, labels, rows).astype(np.int32),
        "mask": rng.integers(0, 2, (rows, length)).astype(np.float64),
        "keep": rng.random(rows) < 0.6,
        "crops": quarters(2 * rows, width),
        "flat": quarters(rows * length),
        "shared": rng.normal(size=(length, width)),
        "key": jax.random.key(seed),
        "raw": jax.random.PRNGKey(seed + 1),
    }


class Asked(dict):
    """A dictionary that knows which of its entries were asked for."""

    def __init__(self, given):
        super().__init__(given)
        self.asked: set[str] = set()

    def __getitem__(self, name):
        self.asked.add(name)
        return super().__getitem__(name)


def make_weights(rng, shapes):
    return {n: rng.normal(size=s) / math.sqrt(max(1, *s, 1)) for n, s in sorted(shapes.items())}


def of_steps(seed: int, steps, sizes: Sizes = None) -> Program:
    """Return the program of these steps, with the batch and the draws of the seed."""
    batch = make_batch(np.random.default_rng([seed, 0]), sizes)
    shapes: dict[str, tuple[int, ...]] = {}

    def ask(name, shape):
        shapes[name] = shape
        return jnp.zeros(shape)

    jax.eval_shape(lambda batch: run(ask, batch, steps, seed), batch)
    weights = make_weights(np.random.default_rng([seed, 1]), shapes)
    program = lambda weights, batch: run(lambda n, _: weights[n], batch, steps, seed)
    return Program(f"seed {seed}", program, weights, batch, tuple(steps))


def generated(seed: int, sizes: Sizes = None) -> Program:
    """Return the program of this seed."""
    rng = np.random.default_rng(seed)
    chances = np.array([0.4 if name in RARE else 1.0 for name in STEPS])
    depth = int(rng.integers(2, 9 if seed < SHALLOW else 14))
    names = rng.choice(list(STEPS), depth, p=chances / chances.sum())
    return of_steps(seed, [(str(name), i) for i, name in enumerate(names)], sizes)


def smaller(program: Program, fails: Callable[[Program], bool]) -> Program:
    """Return a program of as few steps as possible that still fails."""
    seed = int(program.name.split()[1])
    sizes = program.batch["z"].shape
    again = True
    while again:
        again = False
        for i in range(len(program.steps)):
            less = of_steps(seed, program.steps[:i] + program.steps[i + 1 :], sizes)
            if fails(less):
                program, again = less, True
                break
    return program
