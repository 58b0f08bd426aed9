"""Runs programs in parts, on devices that `vmap` or `shard_map` makes, and on one device."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from hfjax.parallel.in_parts.interpreter import in_parts
from hfjax.parallel.in_parts.kinds import Cut, Part, Side, Sum
from tests.generated_rows import CUTS, Program

ONE_AXIS = ("rows",)
RTOL, ATOL = 1e-9, 1e-11


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


def of_device(program: Program, side: Side, told: list | None = None) -> Callable[[Any, Any], Any]:
    """Return what a device makes of weights and its rows, as in `on_one`."""

    def given(name, v):
        dim = CUTS.get(name, 0)
        return v if dim is None else Part(v, Cut(dim))

    def objective(weights, floats, batch):
        batch = {name: given(name, v) for name, v in (batch | floats).items()}
        loss, variables = in_parts(side, program.function, weights, batch, told=told)
        assert not isinstance(loss, Part), "a scalar has no rows"
        return loss.x if isinstance(loss, Sum) else loss / side.size, (loss, variables)

    def device(weights, batch):
        floats = of_floats(batch)
        grads = jax.value_and_grad(objective, (0, 1), has_aux=True)
        (_, (loss, variables)), (of_weights, of_batch) = grads(weights, floats, batch)
        of_weights = lax.psum(of_weights, side.axes)
        of_batch = {
            k: lax.psum(v, side.axes) if CUTS.get(k, 0) is None else given(k, v)
            for k, v in of_batch.items()
        }
        return {"loss": loss, "variable": variables, "weights": of_weights, "batch": of_batch}

    return device


def parts(batch: dict[str, Any], n: int) -> dict[str, Any]:
    """Return the batch with its parts along a new first dimension."""
    cuts = {name: CUTS.get(name, 0) for name in batch}
    stack = lambda x, dim: np.stack(np.split(x, n, dim))
    return {k: x if cuts[k] is None else stack(x, cuts[k]) for k, x in batch.items()}


def by_vmap(program: Program, n: int, told: list | None = None) -> Callable[[Any, Any], Any]:
    """Return what n devices of `vmap` make of weights and the parts of a batch."""
    device = of_device(program, Side(ONE_AXIS, n), told)

    def devices(weights, batch):
        axes = {name: None if CUTS.get(name, 0) is None else 0 for name in batch}
        mapped = jax.vmap(device, in_axes=(None, axes), axis_name=ONE_AXIS[0], axis_size=n)
        return mapped(weights, batch)

    return devices


def by_shard_map(program: Program, n: int, told: list | None = None, axes: Any = ONE_AXIS) -> Any:
    """Return the same of n devices of a mesh, of one axis or of two."""
    sizes = (n,) if len(axes) == 1 else (2, n // 2)
    mesh = Mesh(np.array(jax.devices()[:n]).reshape(sizes), axes)
    of_one = of_device(program, Side(axes, n), told)

    def devices(weights, batch):
        specs = {name: P() if CUTS.get(name, 0) is None else P(axes) for name in batch}
        own = {name for name in batch if CUTS.get(name, 0) is not None}

        def device(weights, batch):
            batch = {name: v[0] if name in own else v for name, v in batch.items()}
            return jax.tree.map(lambda v: v[None], of_one(weights, batch))

        split = {"in_specs": (P(), specs), "out_specs": P(axes), "check_vma": False}
        return jax.shard_map(device, mesh=mesh, **split)(weights, batch)

    return devices


def whole(value, n: int):
    """Return the whole of what n devices hold along a first dimension."""
    if isinstance(value, Sum):
        return np.sum(np.asarray(value.x), 0, dtype=value.x.dtype)
    if not isinstance(value, Part):
        return np.asarray(value)[0]
    x, cut = np.asarray(value.x), value.cut
    size = x.shape[1 + cut.dim]
    assert size % cut.outer == 0, f"{cut} of {x.shape[1:]}"
    before, after = x.shape[1 : 1 + cut.dim], x.shape[2 + cut.dim :]
    x = x.reshape(n, *before, cut.outer, size // cut.outer, *after)
    x = np.moveaxis(x, 0, len(before) + 1)
    return x.reshape(*before, n * size, *after)


def kind(value) -> str:
    return type(value).__name__ if isinstance(value, Sum | Part) else "whole"


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


def differences(found, expected, n: int) -> list[str]:
    """Return where what n devices hold is not what one has, or not the same on all."""
    is_value = lambda v: isinstance(v, Sum | Part)
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
        gap = far(whole(value, n), leaf)
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
        return any(record.how == "gather" for record in self.told)


def compare(programs: Sequence[Program], n: int, *, devices=by_vmap, compiled=True) -> list[Found]:
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
                results.append(devices(program, n, tolds[i])(weights, batch))
            except Exception as error:  # of one program; the others are run
                wrong[i] = [f"{type(error).__name__}: {error}"]
                results.append(None)
        return results

    expected = compiler(all_of_one)([(p.weights, p.batch) for p in programs])
    found = compiler(all_of_many)([(p.weights, parts(p.batch, n)) for p in programs])
    for i, result in enumerate(found):
        if result is not None:
            wrong[i] = differences(result, jax.device_get(expected[i]), n)
    return [Found(*each) for each in zip(programs, wrong, tolds, strict=True)]
