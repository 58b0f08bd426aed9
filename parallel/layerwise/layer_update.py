"""The update of one layer, on one device: reduce, make it that of the mean, apply, put back."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.parallel.engine.comm_plan import gather_from_moments, on_tensor_shards, pin_tensor_axes
from hfjax.parallel.engine.reduce_gradients import Reduction
from hfjax.parallel.execution import guard
from hfjax.parallel.mesh import size_of
from hfjax.parallel.offload.host_memory import is_on_host, to_device, to_host
from hfjax.parallel.param_specs import Placed
from hfjax.utils.mean import Mean
from hfjax.utils.paths import Flat, Index


class Carry(NamedTuple):
    """What the backward pass updates, layer by layer."""

    parameters: Flat  # stacks [L, ...], or the arrays of a list of layers
    moments: Flat
    squares: Flat  # path -> [L] or [1], of the gradient of the mean
    finite: Any  # whether all is: the loss, and the gradients of the layers that are done


@dataclass(frozen=True)
class LayerUpdate(ABC):
    """How a layer is updated."""

    placed: Mapping[str, Placed]  # of the layers' parameters that have a gradient, as stored
    reduction: Reduction
    apply: Callable  # (gradients, moments, parameters) -> (parameters, moments)
    belongs: Mapping[str, str]  # name of what the optimizer keeps -> path
    own_losses: int  # of how many devices each has a loss of its own
    nonfinite: str  # unless "apply": a layer stays if its gradient, or one before, is not finite

    @abstractmethod
    def one(self) -> Mapping[str, Placed]:
        """Return where the arrays of one layer lie."""

    @abstractmethod
    def rows(self, gradients: Flat) -> Flat:
        """Return gradients of a layer in the form of its arrays."""

    @abstractmethod
    def take(self, carry: Carry, i: Index, paths: list[str], stored: Flat) -> tuple[Flat, Flat]:
        """Return parameters and moments of layer i; stored ones are here if they come from afar."""

    @abstractmethod
    def put(self, carry: Carry, i: Index, new: Carry) -> Carry:
        """Return what is updated with what is new of layer i in its place."""

    def __call__(self, carry: Carry, i: Index, stored: Flat, gradients: Flat, mean: Mean) -> Carry:
        """Return what is updated after the backward pass of layer i.

        `stored` are its parameters on the device; what lies on the host passes through it.
        """
        of = self.one()
        summed = self.reduction(pin_tensor_axes(self.rows(gradients), of, "gradient"), of)
        gradients = averaged(summed, self.own_losses)
        squares = _squares(gradients, of)
        loss = mean.total / mean.weight
        finite = carry.finite & jnp.isfinite(loss) & jnp.isfinite(sum(squares.values()))
        parameters, moments = self.take(carry, i, list(gradients), stored)
        before = {path: _piece(of[path], x) for path, x in parameters.items()}, moments
        after = self.apply(gradients, moments, before[0])
        after = guard(self.nonfinite, finite, after, before)
        stored = {path: gather_from_moments(of[path], x) for path, x in after[0].items()}
        owner = {name: of[self.belongs[name]] for name in after[1]}
        new = pin_tensor_axes(stored, of, "parameter"), pin_tensor_axes(after[1], owner, "moment")
        return self.put(carry, i, Carry(*new, {p: x[None] for p, x in squares.items()}, finite))


@dataclass(frozen=True)
class StackedUpdate(LayerUpdate):
    """How a layer of a stack is updated. Rows keep their first dimension, so that specs fit."""

    def one(self) -> dict[str, Placed]:
        """Return where a row of each stack lies."""
        return {path: replace(p, shape=(1, *p.shape[1:])) for path, p in self.placed.items()}

    def rows(self, gradients: Flat) -> Flat:
        """Return gradients of a layer in the form of its arrays."""
        return {path: g[None] for path, g in gradients.items()}

    def take(self, carry: Carry, i: Index, paths: list[str], stored: Flat) -> tuple[Flat, Flat]:
        """Return parameters and moments of layer i."""
        row = lambda x: to_device(lax.dynamic_slice_in_dim(x, i, 1))
        far = {path: stored[path][None] for path, x in carry.parameters.items() if is_on_host(x)}
        near = {path: row(x) for path, x in carry.parameters.items() if path not in far}
        return near | far, jax.tree.map(row, carry.moments)

    def put(self, carry: Carry, i: Index, new: Carry) -> Carry:
        """Return the stacks with the rows of layer i replaced."""
        put = lambda x, row: lax.dynamic_update_slice_in_dim(x, _beside(x, row), i, 0)
        stacks = jax.tree.map(put, carry._replace(finite=None), new._replace(finite=None))
        return stacks._replace(finite=new.finite)


@dataclass(frozen=True)
class ListedUpdate(LayerUpdate):
    """How a layer of a list is updated: its arrays are its carry."""

    def one(self) -> Mapping[str, Placed]:
        """Return where the arrays of each layer lie."""
        return self.placed

    def rows(self, gradients: Flat) -> Flat:
        """Return gradients of a layer as they are."""
        return gradients

    def take(self, carry: Carry, i: Index, paths: list[str], stored: Flat) -> tuple[Flat, Flat]:
        """Return parameters and moments of layer i."""
        kept = {name: x for name, x in carry.moments.items() if self.belongs[name] in paths}
        return to_device(({path: carry.parameters[path] for path in paths}, kept))

    def put(self, carry: Carry, i: Index, new: Carry) -> Carry:
        """Return all arrays, those of layer i replaced."""
        there = lambda old, new: old | {name: _beside(old[name], x) for name, x in new.items()}
        parameters = there(carry.parameters, new.parameters)
        moments = there(carry.moments, new.moments)
        return Carry(parameters, moments, carry.squares | new.squares, new.finite)


def averaged(gradients: Flat, own_losses: int) -> Flat:
    """Return the gradients of the mean from the sums of those of each device's own loss."""
    return {path: g / own_losses if own_losses > 1 else g for path, g in gradients.items()}


def _beside(old: jax.Array, new: jax.Array) -> jax.Array:
    """Return the new array in the memory where the old one is."""
    return to_host(new) if is_on_host(old) else new


def _squares(gradients: Flat, placed: Mapping[str, Placed]) -> Flat:
    """Return the sum of the squares of each gradient, of all its pieces."""
    wide = lambda g: jnp.promote_types(g.dtype, jnp.float32)
    squares = {path: jnp.square(g).sum(dtype=wide(g)) for path, g in gradients.items()}
    groups: dict[tuple, Flat] = {}
    for path, square in squares.items():
        p = placed[path]
        axes = p.split_axes("moment").union(p.stays)
        groups.setdefault(tuple(sorted(axes)), {})[path] = square
    for axes, group in groups.items():
        if axes:
            sums = lax.psum(jnp.stack([*group.values()]), axes)
            squares |= dict(zip(group, sums, strict=True))
    return squares


def _piece(p: Placed, x: jax.Array) -> jax.Array:
    """Return this device's piece of a parameter, as its moments are split."""
    dims = p.moment_only_dims("parameter")

    def cut(x):
        for dim, axes in dims:
            length = x.shape[dim] // size_of(axes, p.mesh)
            start = lax.axis_index(axes) * length
            x = lax.dynamic_slice_in_dim(x, start, length, x.ndim + dim)
        return x

    return on_tensor_shards(cut, p.tensor_dims, x.ndim)(x) if dims else x
