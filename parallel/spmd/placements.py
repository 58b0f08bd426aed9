"""What a device holds of a value, where devices run one program on parts: of rows, of positions.

A program is traced at the sizes of the whole. When it is run, a value is

- an array: every device has the whole, the same one (`SAME`);
- `Part`: a dimension is split, and a device has its entries (its kind is the `Cut`);
- `Sum`: the sum over the devices is the value (`SUM`). What is linear leaves it so;
- `Made`: whole, and not made yet (an iota, a mask, random bits). A part can be made by itself;
- `Later`: whole, and not gathered yet (a parameter).

Derivatives are JAX's own, since all of this is a program that JAX differentiates. The cotangent of
a Part is its part, that of a Same value is a Sum, and that of a Sum is Same.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

Shape = tuple[int, ...]


class Cut(NamedTuple):
    """How a dimension is split: it has `outer` blocks, and a device its part of each of them.

    [B] -> [S * B] has S blocks, for instance, and so has `concatenate` of S arrays of B rows.
    """

    dim: int
    outer: int = 1

    def moved(self, dim: int) -> "Cut":
        """Return the same cut of another dimension."""
        return Cut(dim, self.outer)


SAME, SUM = "same", "sum"
Kind = Cut | str
ROWS = Cut(0)


@partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["cut"])
@dataclass(frozen=True, eq=False)
class Part:
    """A value of which a device has its entries along a dimension."""

    x: jax.Array
    cut: Cut = ROWS


@partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class Sum:
    """A value that is the sum over the devices of what they have."""

    x: jax.Array


@dataclass(frozen=True, eq=False)
class Made:
    """A value that no device has made yet.

    Attributes:
        shape: Of the whole.
        dtype: Its dtype.
        make: (scope, cut or None) -> this device's part of it, or the whole.
        fixed: Whether it follows from nothing but numbers that the program holds.
    """

    shape: Shape
    dtype: Any
    make: Callable[[Any, Cut | None], jax.Array]
    fixed: bool = False


class Later(ABC):
    """A parameter that is gathered when an equation uses it, once."""

    stored: Any  # a pytree, which may enter a loop or a rematerialised function

    @abstractmethod
    def whole(self) -> jax.Array:
        """Return the whole parameter."""

    @property
    @abstractmethod
    def slices(self) -> bool:
        """Whether a loop may slice it before it is gathered."""


def kind_of(value: object) -> Kind:
    """Return what a device holds of a value."""
    if isinstance(value, Part):
        return value.cut
    return SUM if isinstance(value, Sum) else SAME


def of_kind(x: jax.Array, kind: Kind) -> Part | Sum | jax.Array:
    """Return the value of which a device holds this."""
    if isinstance(kind, Cut):
        return Part(x, kind)
    return Sum(x) if kind == SUM else x


def dual(kind: Kind) -> Kind:
    """Return what a device holds of the cotangent of a value."""
    return kind if isinstance(kind, Cut) else SAME if kind == SUM else SUM


def _next_kind(kind: Kind, found: Kind, number: int, fixed: set[int]) -> Kind:
    """Return the kind to try next, of what a loop carries under this number.

    What is whole may become a part or a sum, once; `fixed` are those that came back the same.
    """
    if found == kind or (isinstance(kind, Cut) and not isinstance(found, Cut)):
        return kind
    if kind == SAME:
        return found
    fixed.add(number)
    return found if kind == SUM and isinstance(found, Cut) else SAME


def kept_kinds(kinds: list[Kind], run: Callable[[list[Kind]], list[Kind]]) -> list[Kind]:
    """Return the kinds that a loop keeps: the first that `run(kinds)`, one turn, returns again."""
    fixed: set[int] = set()
    while True:
        found = run(kinds)
        if len(found) != len(kinds):  # which JAX refuses
            return kinds
        new = [
            kind if i in fixed else _next_kind(kind, after, i, fixed)
            for i, (kind, after) in enumerate(zip(kinds, found, strict=True))
        ]
        if new == kinds:
            return kinds
        kinds = new


def is_value(x: object) -> bool:
    """Return whether this is a value of which devices do not have the whole."""
    return isinstance(x, Part | Sum)


def held(value: Any) -> jax.Array:
    """Return the array of which a value consists here."""
    return value.x if isinstance(value, Part | Sum) else jnp.asarray(value)


@dataclass(frozen=True)
class Side:
    """The devices that hold parts of something: of rows, of positions, of heads.

    Attributes:
        axes: The mesh axes along which they lie.
        size: How many they are.
        name: What they hold parts of.
        pieces: Which pieces, all of one size, each of them holds, in order; None: one each.
        blocks: Over how many devices rows are split besides: it deals parts of those of each.
    """

    axes: tuple[str, ...]
    size: int
    name: str = "rows"
    pieces: tuple[tuple[int, ...], ...] | None = None
    blocks: int = 1

    @property
    def here(self) -> jax.Array:
        """The number of this device."""
        return lax.axis_index(self.axes)

    @property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """The pieces that each device holds."""
        return self.pieces or tuple((i,) for i in range(self.size))

    @property
    def count(self) -> int:
        """How many pieces a dimension has."""
        return self.size * len(self.held[0])

    @property
    def held_here(self) -> jax.Array:
        """The numbers of the pieces that this device holds."""
        return jnp.asarray(self.held, "int32")[self.here] if self.pieces else self.here[None]

    def local(self, shape: Shape, cut: Cut) -> Shape:
        """Return the shape of a part."""
        return (*shape[: cut.dim], shape[cut.dim] // self.size, *shape[cut.dim + 1 :])

    def whole_shape(self, shape: Shape, cut: Cut) -> Shape:
        """Return the shape of the whole that has parts of this one."""
        return (*shape[: cut.dim], shape[cut.dim] * self.size, *shape[cut.dim + 1 :])

    def divides(self, shape: Shape, cut: Cut) -> bool:
        """Return whether an array can be split so."""
        return shape[cut.dim] > 0 and shape[cut.dim] % (self.count * cut.outer) == 0

    # -- what devices send each other --------------------------------------------------------

    def whole_of(self, value: Any) -> jax.Array:
        """Return the whole of a value, on every device."""
        if isinstance(value, Part):
            return self.joined(value.x, value.cut)
        return self.total(value.x) if isinstance(value, Sum) else value

    def total(self, x: jax.Array) -> jax.Array:
        """Return the sum over the devices, of at least float32."""
        return lax.psum(wide(x), self.axes).astype(x.dtype)

    def greatest(self, x: jax.Array) -> jax.Array:
        """Return the greatest over the devices; NaN where one has it."""
        return _by_order(lambda x: lax.pmax(x, self.axes), wide(x), "max").astype(x.dtype)

    def least(self, x: jax.Array) -> jax.Array:
        """Return the least over the devices; NaN where one has it."""
        return _by_order(lambda x: lax.pmin(x, self.axes), wide(x), "min").astype(x.dtype)

    def stacked(self, x: jax.Array) -> jax.Array:
        """Return what all devices have, [devices, ...]."""
        return self._gathered(x[None], 0)

    def joined(self, x: jax.Array, cut: Cut) -> jax.Array:
        """Return the whole of which the devices have parts."""
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = self.joined(jax.random.key_data(x), cut)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        if cut.outer == 1 and not self.pieces:
            return self._gathered(x, cut.dim)
        blocks = self._blocks(x, cut.dim, cut.outer, x.shape[cut.dim] // cut.outer)
        found = self._gathered(blocks, cut.dim + 1)
        if self.pieces:
            order = sorted(range(self.count), key=self._in_turn.__getitem__)
            found = self._reordered(found, cut.dim + 1, order)
        return found.reshape(self.whole_shape(x.shape, cut))

    @property
    def _in_turn(self) -> list[int]:
        """The pieces of all devices, one device after the other."""
        return [piece for pieces in self.held for piece in pieces]

    def _blocks(self, x: jax.Array, dim: int, *sizes: int) -> jax.Array:
        return x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])

    def _reordered(self, x: jax.Array, dim: int, order: list[int]) -> jax.Array:
        """Return an array whose pieces along a dimension are in this order."""
        pieces = self._blocks(x, dim, self.count, x.shape[dim] // self.count)
        at = lambda i: lax.index_in_dim(pieces, i, dim, keepdims=False)
        return lax.concatenate([at(i) for i in order], dim)

    def _gathered(self, x: jax.Array, dim: int) -> jax.Array:
        gather = partial(lax.all_gather, axis_name=self.axes, axis=dim, tiled=True)
        if x.dtype == jnp.bool_:
            return gather(x.astype("uint8")).astype(bool)
        if wide(x).dtype == x.dtype:
            return gather(x)
        narrow = jax.custom_jvp(gather)  # its derivative is a sum, of wide numbers
        narrow.defjvp(lambda xs, dxs: (gather(*xs), gather(wide(*dxs)).astype(x.dtype)))
        return narrow(x)

    def scattered(self, x: jax.Array, cut: Cut) -> jax.Array:
        """Return this device's part of the sum over the devices."""
        if cut.outer > 1:
            return self.cut(self.total(x), cut)
        in_turn = self._reordered(x, cut.dim, self._in_turn) if self.pieces else x
        return self._scatter(in_turn, cut.dim)

    def _scatter(self, x: jax.Array, dim: int) -> jax.Array:
        found = lax.psum_scatter(wide(x), self.axes, scatter_dimension=dim, tiled=True)
        return found.astype(x.dtype)

    def cut(self, x: jax.Array, cut: Cut) -> jax.Array:
        """Return this device's part of a whole array: nothing is sent."""
        each = x.shape[cut.dim] // (cut.outer * self.count)
        if cut.outer == 1:
            take = lambda i: lax.dynamic_slice_in_dim(x, i * each, each, cut.dim)
            return _concatenated([take(i) for i in self._each_here], cut.dim)
        blocks = self._blocks(x, cut.dim, cut.outer, self.count, each)
        index = lambda i: lax.dynamic_index_in_dim(blocks, i, cut.dim + 1, keepdims=False)
        mine = _concatenated([index(i) for i in self._each_here], cut.dim + 1)
        return mine.reshape(self.local(x.shape, cut))

    @property
    def _each_here(self) -> list[jax.Array]:
        """The number of each piece that this device holds."""
        return [self.held_here[i] for i in range(len(self.held[0]))] if self.pieces else [self.here]

    def numbers(self, size: int, outer: int, dtype: DTypeLike = "int32") -> jax.Array:
        """Return the numbers, in a dimension of this size, of the entries that are here."""
        each = size // outer // self.count
        first = self.held_here.astype(dtype) * each
        here = (first[:, None] + lax.iota(dtype, each)[None]).reshape(-1)
        blocks = lax.iota(dtype, outer) * (size // outer)
        return (blocks[:, None] + here[None]).reshape(-1)

    def average(self, x: jax.Array) -> jax.Array:
        """Return the average over the devices; of whole numbers the greatest."""
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return self.greatest(x)
        return (lax.psum(wide(x), self.axes) / self.size).astype(x.dtype)

    def shared(self, x: jax.Array) -> jax.Array:
        """Return this device's share of a whole array: the shares add up to it."""
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return x / self.size
        return jnp.where(self.here == 0, x, jnp.zeros_like(x))

    def shares(self, tree: Any) -> Any:
        """Return this device's share of each value of a tree; of a part there is none."""
        if self.size == 1:
            return tree
        share = lambda v: v.x if isinstance(v, Sum) else self.shared(jnp.asarray(self.whole_of(v)))
        return jax.tree.map(share, tree, is_leaf=is_value)

    def as_kind(self, value: Any, kind: Kind) -> jax.Array:
        """Return what a device holds of a value where it is of this kind."""
        if kind_of(value) == kind:
            return value.x if is_value(value) else jnp.asarray(value)
        whole = jnp.asarray(self.whole_of(value))
        if isinstance(kind, Cut):
            return self.cut(whole, kind)
        return self.shares(whole) if kind == SUM else whole

    def agreed(self, x: jax.Array) -> jax.Array:
        """Return what the first device decides, where rounding may differ between devices."""
        mine = jnp.where(self.here == 0, x.astype("int32"), 0)
        return lax.psum(mine, self.axes).astype(x.dtype)


def _concatenated(arrays: list[jax.Array], dim: int) -> jax.Array:
    return arrays[0] if len(arrays) == 1 else lax.concatenate(arrays, dim)


def _by_order(extreme: Callable, x: jax.Array, end: str) -> jax.Array:
    """Return an extreme by whole numbers in the order of x; XLA's own, on CPUs, drops NaN."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return extreme(x)
    whole = jnp.iinfo(f"int{8 * x.dtype.itemsize}")
    turned = lambda n: jnp.where(n < 0, n ^ whole.max, n)  # its own inverse
    found = extreme(jnp.where(jnp.isnan(x), getattr(whole, end), turned(x.view(whole.dtype))))
    return turned(found).view(x.dtype)


def wide(x: jax.Array) -> jax.Array:
    """Return an array of which sums are exact enough, and known to all of XLA's backends."""
    if x.dtype == jnp.bool_:
        return x.astype("int32")
    if jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return x
