"""Runs programs in parts, on devices that `vmap` or `shard_map` makes, and on one device."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from hfjax.parallel.spmd.interpreter import run_partitioned
from hfjax.parallel.spmd.nested import InnerAxes, Nested
from hfjax.parallel.spmd.placements import AxisGroup, PartialValue, ShardedValue, Split
from tests.random_programs import CUTS, Program

ONE_AXIS = ("rows",)
RTOL, ATOL = 1e-9, 1e-11


@dataclasses.dataclass(frozen=True)
class Dealt:
    """What of a batch devices have parts of, and who has which: rows, unless said otherwise.

    Attributes:
        dims: The dimension of each array that is dealt; None: every device has the whole.
        folds: True: each device has an early piece and a late one (zigzag).
        name: That of the side.
        others: The dimension of what `dims` does not name.
    """

    dims: Any = dataclasses.field(default_factory=lambda: CUTS, hash=False)
    folds: bool = False
    name: str = "rows"
    others: int | None = 0

    def side(self, n: int, axes: Any = ONE_AXIS) -> AxisGroup:
        pairs = tuple((i, 2 * n - 1 - i) for i in range(n))
        return AxisGroup(tuple(axes), n, self.name, pairs if self.folds else None)

    def cut(self, name: str, batch: dict[str, Any]) -> Split | None:
        dim = self.dims.get(name, self.others)
        if dim is None:
            return None
        flat = self.name == "positions" and name == "flat"
        return Split(dim % batch[name].ndim, len(batch.get("z", EIGHT)) if flat else 1)


EIGHT = range(8)  # rows, where a batch does not say
ROWS = Dealt()
POSITIONS = {"z": 1, "tokens": 1, "mask": 1, "across": 0, "flat": 0, "shared": 0}
POSITIONS |= dict.fromkeys(("x", "y", "labels", "keep", "crops", "key", "raw", "count"))
WIDTHS: dict[str, int | None] = dict.fromkeys(CUTS)
WIDTHS |= dict.fromkeys(("x", "z", "crops", "shared"), -1)


def of_floats(tree: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in tree.items() if jnp.issubdtype(v.dtype, jnp.floating)}


def on_one(program: Program) -> Callable[[Any, Any], Any]:
    """Return what one device makes of weights and a batch: results and gradients."""

    def one(weights, batch):
        f = lambda weights, floats: program.function(weights, batch | floats)
        value_and_grad = jax.value_and_grad(f, (0, 1), has_aux=True)
        (loss, variables), grads = value_and_grad(weights, of_floats(batch))
        return {"loss": loss, "variable": variables, "weights": grads[0], "batch": grads[1]}

    return one


def of_device(
    program: Program, side: AxisGroup, told: list | None = None, dealt: Dealt = ROWS
) -> Callable[[Any, Any], Any]:
    """Return what a device makes of weights and its rows, as in `on_one`."""

    def given(name, v):
        cut = dealt.cut(name, program.batch)
        return v if cut is None else ShardedValue(v, cut)

    def objective(weights, floats, batch):
        batch = {name: given(name, v) for name, v in (batch | floats).items()}
        loss, variables = run_partitioned(side, program.function, weights, batch, comms=told)
        assert not isinstance(loss, ShardedValue), "a scalar has no rows"
        return loss.x if isinstance(loss, PartialValue) else loss / side.size, (loss, variables)

    def device(weights, batch):
        floats = of_floats(batch)
        grads = jax.value_and_grad(objective, (0, 1), has_aux=True)
        (_, (loss, variables)), (of_weights, of_batch) = grads(weights, floats, batch)
        of_weights = lax.psum(of_weights, side.axes)
        of_batch = {
            k: lax.psum(v, side.axes) if dealt.cut(k, program.batch) is None else given(k, v)
            for k, v in of_batch.items()
        }
        return {"loss": loss, "variable": variables, "weights": of_weights, "batch": of_batch}

    return device


def parts(batch: dict[str, Any], side: AxisGroup, dealt: Dealt = ROWS) -> dict[str, Any]:
    """Return the batch with its parts along a new first dimension."""
    cuts = {name: dealt.cut(name, batch) for name in batch}

    def stack(x, cut):
        pieces = in_pieces(x, cut, side)
        each = [np.take(pieces, held, cut.dim + 1) for held in side.device_chunks]
        shape = (*x.shape[: cut.dim], x.shape[cut.dim] // side.size, *x.shape[cut.dim + 1 :])
        return np.stack([part.reshape(shape) for part in each])

    return {k: x if cuts[k] is None else stack(x, cuts[k]) for k, x in batch.items()}


def in_pieces(x, cut: Split, side: AxisGroup):
    """Return an array with a dimension for the pieces of what is cut."""
    each = x.shape[cut.dim] // (cut.blocks * side.num_chunks)
    sizes = (cut.blocks, side.num_chunks, each)
    return np.asarray(x).reshape(*x.shape[: cut.dim], *sizes, *x.shape[cut.dim + 1 :])


def by_vmap(
    program: Program, n: int, told: list | None = None, dealt: Dealt = ROWS
) -> Callable[[Any, Any], Any]:
    """Return what n devices of `vmap` make of weights and the parts of a batch."""
    device = of_device(program, dealt.side(n), told, dealt)

    def devices(weights, batch):
        axes = {name: None if dealt.cut(name, program.batch) is None else 0 for name in batch}
        mapped = jax.vmap(device, in_axes=(None, axes), axis_name=ONE_AXIS[0], axis_size=n)
        return mapped(weights, batch)

    return devices


def by_shard_map(
    program: Program,
    n: int,
    told: list | None = None,
    dealt: Dealt = ROWS,
    axes: Any = ONE_AXIS,
) -> Any:
    """Return the same of n devices of a mesh, of one axis or of two."""
    sizes = (n,) if len(axes) == 1 else (2, n // 2)
    mesh = Mesh(np.array(jax.devices()[:n]).reshape(sizes), axes)
    of_one = of_device(program, dealt.side(n, axes), told, dealt)

    def devices(weights, batch):
        own = {name for name in batch if dealt.cut(name, program.batch) is not None}
        specs = {name: P(axes) if name in own else P() for name in batch}

        def device(weights, batch):
            batch = {name: v[0] if name in own else v for name, v in batch.items()}
            return jax.tree.map(lambda v: v[None], of_one(weights, batch))

        split = {"in_specs": (P(), specs), "out_specs": P(axes), "check_vma": False}
        return jax.shard_map(device, mesh=mesh, **split)(weights, batch)

    return devices


def whole(value, n: int, side: AxisGroup | None = None):
    """Return the whole of what n devices hold along a first dimension."""
    if isinstance(value, PartialValue):
        return np.sum(np.asarray(value.x), 0, dtype=value.x.dtype)
    if not isinstance(value, ShardedValue):
        return np.asarray(value)[0]
    x, cut, side = np.asarray(value.x), value.split, side or AxisGroup(ONE_AXIS, n)
    size, number = x.shape[1 + cut.dim], len(side.device_chunks[0])
    assert size % (cut.blocks * number) == 0, f"{cut} of {x.shape[1:]}"
    before, after = x.shape[1 : 1 + cut.dim], x.shape[2 + cut.dim :]
    each = size // cut.blocks // number
    x = x.reshape(n, *before, cut.blocks, number, each, *after)
    x = np.moveaxis(x, 0, len(before) + 1)
    x = x.reshape(*before, cut.blocks, side.num_chunks, each, *after)
    x = np.take(x, np.argsort([i for held in side.device_chunks for i in held]), len(before) + 1)
    return x.reshape(*before, n * size, *after)


def by_two_sides(
    program: Program, n: int, told: list | None = None, dealt: Dealt = ROWS
) -> Callable[[Any, Any], Any]:
    """Return what 2 x n devices make that have other rows, and other positions of them."""
    side, inner = (
        AxisGroup(("data",), 2),
        InnerAxes((dealt.side(n, ("context",)),), run_partitioned),
    )
    told = [] if told is None else told

    def value(name, v):
        dim, cut = CUTS.get(name, 0), dealt.cut(name, program.batch)
        if name == "flat":  # of rows and positions in one dimension: each device has all of it
            return v
        v = v if dim is None else ShardedValue(v, Split(dim))
        return v if cut is None else Nested(v, cut, dealt.name)

    def objective(weights, floats, batch):
        batch = {name: value(name, v) for name, v in (batch | floats).items()}
        function = inner.wrap(program.function, told)
        loss, variables = run_partitioned(side, function, weights, batch, comms=told)
        whole = jax.tree.map(
            side.replicate,
            inner.replicate(side, variables),
            is_leaf=lambda v: isinstance(v, ShardedValue | PartialValue),
        )
        share = side.as_partial_tree(inner.as_partial(side, loss))
        return share, (lax.psum(share, ("data", "context")), whole)

    def device(weights, batch):
        floats = of_floats(batch)
        grads = jax.value_and_grad(objective, (0, 1), has_aux=True)
        (_, (loss, variables)), (of_weights, of_batch) = grads(weights, floats, batch)
        of_batch = {k: whole_gradient(k, v) for k, v in of_batch.items()}
        of_weights = lax.psum(of_weights, ("data", "context"))
        return {"loss": loss, "variable": variables, "weights": of_weights, "batch": of_batch}

    def whole_gradient(name, v):
        dim, cut = CUTS.get(name, 0), dealt.cut(name, program.batch)
        if name == "flat":
            return lax.psum(v, ("data", "context"))
        v = lax.psum(v, "context") if cut is None else inner.groups[0].all_gather(v, cut)
        return lax.psum(v, "data") if dim is None else side.all_gather(v, Split(dim))

    def devices(weights, batch):
        dims = {k: None if k == "flat" else CUTS.get(k, 0) for k in batch}
        cuts = {k: None if k == "flat" else dealt.cut(k, program.batch) for k in batch}
        axes = lambda of: {k: None if of[k] is None else 0 for k in batch}
        along = {"axis_name": "context", "axis_size": n}
        inside = jax.vmap(device, in_axes=(None, axes(cuts)), **along)
        within = {k: None if dims[k] is None else 0 if cuts[k] is None else 1 for k in batch}
        rows = {"axis_name": "data", "axis_size": 2}
        found = jax.vmap(inside, in_axes=(None, within), **rows)(weights, batch)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)

    return devices


def parts_of_two(batch: dict[str, Any], side: AxisGroup, dealt: Dealt) -> dict[str, Any]:
    """Return the parts of a batch for `by_two_sides`: [positions, rows, ...]."""
    rows = AxisGroup(("data",), 2)

    def of(name, x):
        if name == "flat":
            return x
        dim, cut = CUTS.get(name, 0), dealt.cut(name, batch)
        pieces = [x] if dim is None else np.split(x, rows.size, dim)
        if cut is not None:
            each = [parts({name: piece}, side, dealt)[name] for piece in pieces]
            return each[0] if dim is None else np.stack(each, 1)
        return pieces[0] if dim is None else np.stack(pieces)

    return {name: of(name, x) for name, x in batch.items()}


def kind(value) -> str:
    return type(value).__name__ if isinstance(value, PartialValue | ShardedValue) else "whole"


def far(found, expected) -> str:
    """Return how two arrays differ, or nothing."""
    expected = np.asarray(expected)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{found.dtype}{found.shape} for {expected.dtype}{expected.shape}"
    if not np.issubdtype(expected.dtype, np.floating):
        return "" if np.array_equal(found, expected) else f"{found} for {expected}"
    finite = np.isfinite(expected)
    if not np.array_equal(finite, np.isfinite(found)):
        return f"{found} for {expected}"
    if not np.array_equal(found[~finite], expected[~finite], equal_nan=True):
        return f"{found} for {expected}"
    largest = np.max(np.abs(expected), where=finite, initial=0.0)
    gap = np.abs(np.where(finite, found, 0) - np.where(finite, expected, 0))
    if gap.max(initial=0.0) <= RTOL * largest + ATOL:
        return ""
    return f"off by {gap.max():.3g}: {found} for {expected}"


def differences(found, expected, n: int, side: AxisGroup | None = None) -> list[str]:
    """Return where what n devices hold is not what one has, or not the same on all."""
    is_value = lambda v: isinstance(v, PartialValue | ShardedValue)
    flat, tree = jax.tree_util.tree_flatten_with_path(found, is_leaf=is_value)
    right, expected_tree = jax.tree.flatten(expected)
    assert len(flat) == len(right), (tree, expected_tree)
    lines = []
    for (path, value), leaf in zip(flat, right, strict=True):
        at = f"{jax.tree_util.keystr(path)} ({kind(value)})"
        if kind(value) == "whole":
            every = np.asarray(value)
            if any(
                not np.array_equal(v, every[0], equal_nan=every.dtype.kind == "f") for v in every
            ):
                lines.append(f"{at} is not the same on every device: {every}")
                continue
        gap = far(whole(value, n, side), leaf)
        if gap:
            lines.append(f"{at} {gap}")
    return lines


@dataclasses.dataclass
class Found:
    """What is wrong with a program, and what was told of its run."""

    program: Program
    wrong: list[str]
    told: list

    @property
    def gathers(self) -> bool:
        return any(record.action == "gather" for record in self.told)


def compare(
    programs: Sequence[Program], n: int, *, devices=by_vmap, compiled=True, dealt: Dealt = ROWS
) -> list[Found]:
    """Run the programs on n devices and on one, all in one compilation."""
    tolds: list[list] = [[] for _ in programs]
    wrong: list[list[str]] = [[] for _ in programs]
    compiler = jax.jit if compiled else lambda f: f

    def all_of_one(given):
        return [on_one(p)(w, b) for p, (w, b) in zip(programs, given, strict=True)]

    def all_of_many(given):
        results = []
        for i, (program, (weights, batch)) in enumerate(zip(programs, given, strict=True)):
            tolds[i].clear()
            try:
                results.append(devices(program, n, tolds[i], dealt)(weights, batch))
            except Exception as error:  # of one program; the others are run
                wrong[i] = [f"{type(error).__name__}: {error}"]
                results.append(None)
        return results

    expected = compiler(all_of_one)([(p.weights, p.batch) for p in programs])
    side = dealt.side(n)
    deal = parts_of_two if devices is by_two_sides else parts
    given = [(p.weights, deal(p.batch, side, dealt)) for p in programs]
    found = compiler(all_of_many)(given)
    for i, result in enumerate(found):
        if result is not None:
            wrong[i] = differences(result, jax.device_get(expected[i]), n, side)
    return [Found(*each) for each in zip(programs, wrong, tolds, strict=True)]
