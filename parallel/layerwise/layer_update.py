"""The update of one layer, on one device: reduce and average gradients, apply, put back."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.parallel.engine.comm_plan import (
    gather_from_optimizer_state,
    map_tensor_shards,
    pin_tensor_axes,
)
from hfjax.parallel.engine.reduce_gradients import Reduction
from hfjax.parallel.execution import guard
from hfjax.parallel.mesh import size_of
from hfjax.parallel.offload.host_memory import is_on_host, match_memory, to_device
from hfjax.parallel.param_specs import ParamSpecs
from hfjax.utils.mean import Mean
from hfjax.utils.paths import Flat, Index


class Carry(NamedTuple):
    """What the backward pass updates, layer by layer."""

    parameters: Flat  # stacks [L, ...], or the arrays of a list of layers
    optimizer_state: Flat
    squares: Flat  # path -> [L] or [1], of the gradient of the mean
    finite: Any  # whether all is: the loss, and the gradients of the layers that are done


@dataclass(frozen=True)
class LayerUpdate(ABC):
    """How a layer is updated."""

    # Of the layers' parameters that have a gradient, as stored.
    param_specs: Mapping[str, ParamSpecs]
    reduction: Reduction
    apply: Callable  # (gradients, optimizer state, parameters) -> (parameters, optimizer state)
    owner_paths: Mapping[str, str]  # name of an optimizer array -> path
    num_local_losses: int  # how many devices have a loss of their own
    on_nonfinite: str  # unless "apply": a layer stays if its gradient, or one before, is not finite

    @abstractmethod
    def layer_specs(self) -> Mapping[str, ParamSpecs]:
        """Return the specs of one layer's arrays."""

    @abstractmethod
    def match_shapes(self, gradients: Flat) -> Flat:
        """Return gradients of a layer in the shapes of its arrays."""

    @abstractmethod
    def take(
        self, carry: Carry, i: Index, paths: list[str], copied_params: Flat
    ) -> tuple[Flat, Flat]:
        """Return parameters and optimizer state of layer i; `copied_params` were on the host."""

    @abstractmethod
    def put(self, carry: Carry, i: Index, new: Carry) -> Carry:
        """Return the carry with layer i replaced by `new`."""

    def __call__(
        self, carry: Carry, i: Index, params: Flat, gradients: Flat, loss_mean: Mean
    ) -> Carry:
        """Return the carry after the backward pass of layer i.

        `params` are its parameters on the device; those on the host were copied to it.
        """
        specs = self.layer_specs()
        summed = self.reduction(
            pin_tensor_axes(self.match_shapes(gradients), specs, "gradient"), specs
        )
        gradients = average_gradients(summed, self.num_local_losses)
        squares = _squares(gradients, specs)
        loss = loss_mean.total / loss_mean.weight
        finite = carry.finite & jnp.isfinite(loss) & jnp.isfinite(sum(squares.values()))
        parameters, optimizer_state = self.take(carry, i, list(gradients), params)
        before = {path: _shard(specs[path], x) for path, x in parameters.items()}, optimizer_state
        after = self.apply(gradients, optimizer_state, before[0])
        after = guard(self.on_nonfinite, finite, after, before)
        params = {path: gather_from_optimizer_state(specs[path], x) for path, x in after[0].items()}
        owner = {name: specs[self.owner_paths[name]] for name in after[1]}
        new = (
            pin_tensor_axes(params, specs, "parameter"),
            pin_tensor_axes(after[1], owner, "optimizer_state"),
        )
        return self.put(carry, i, Carry(*new, {p: x[None] for p, x in squares.items()}, finite))


@dataclass(frozen=True)
class StackedUpdate(LayerUpdate):
    """How a layer of a stack is updated. It keeps its first dimension, so that specs fit."""

    def layer_specs(self) -> dict[str, ParamSpecs]:
        """Return the specs of one layer of each stack."""
        return {path: replace(p, shape=(1, *p.shape[1:])) for path, p in self.param_specs.items()}

    def match_shapes(self, gradients: Flat) -> Flat:
        """Return gradients of a layer in the shapes of its arrays."""
        return {path: g[None] for path, g in gradients.items()}

    def take(
        self, carry: Carry, i: Index, paths: list[str], copied_params: Flat
    ) -> tuple[Flat, Flat]:
        """Return parameters and optimizer state of layer i."""
        take_layer = lambda x: to_device(lax.dynamic_slice_in_dim(x, i, 1))
        far = {
            path: copied_params[path][None] for path, x in carry.parameters.items() if is_on_host(x)
        }
        near = {path: take_layer(x) for path, x in carry.parameters.items() if path not in far}
        return near | far, jax.tree.map(take_layer, carry.optimizer_state)

    def put(self, carry: Carry, i: Index, new: Carry) -> Carry:
        """Return the stacks with layer i replaced."""
        put = lambda x, layer: lax.dynamic_update_slice_in_dim(x, match_memory(x, layer), i, 0)
        stacks = jax.tree.map(put, carry._replace(finite=None), new._replace(finite=None))
        return stacks._replace(finite=new.finite)


@dataclass(frozen=True)
class ListedUpdate(LayerUpdate):
    """How a layer of a list is updated: its arrays are its carry."""

    def layer_specs(self) -> Mapping[str, ParamSpecs]:
        """Return the specs of each layer's arrays."""
        return self.param_specs

    def match_shapes(self, gradients: Flat) -> Flat:
        """Return gradients of a layer as they are."""
        return gradients

    def take(
        self, carry: Carry, i: Index, paths: list[str], copied_params: Flat
    ) -> tuple[Flat, Flat]:
        """Return parameters and optimizer state of layer i."""
        layer_state = {
            name: x for name, x in carry.optimizer_state.items() if self.owner_paths[name] in paths
        }
        return to_device(({path: carry.parameters[path] for path in paths}, layer_state))

    def put(self, carry: Carry, i: Index, new: Carry) -> Carry:
        """Return all arrays, those of layer i replaced."""
        update = lambda old, new: (
            old | {name: match_memory(old[name], x) for name, x in new.items()}
        )
        parameters = update(carry.parameters, new.parameters)
        optimizer_state = update(carry.optimizer_state, new.optimizer_state)
        return Carry(parameters, optimizer_state, carry.squares | new.squares, new.finite)


def average_gradients(gradients: Flat, num_local_losses: int) -> Flat:
    """Return the gradients of the mean from the sums of those of each device's own loss."""
    return {
        path: g / num_local_losses if num_local_losses > 1 else g for path, g in gradients.items()
    }


def _squares(gradients: Flat, param_specs: Mapping[str, ParamSpecs]) -> Flat:
    """Return the sum of the squares of each gradient, over all its shards."""
    wide = lambda g: jnp.promote_types(g.dtype, jnp.float32)
    squares = {path: jnp.square(g).sum(dtype=wide(g)) for path, g in gradients.items()}
    groups: dict[tuple, Flat] = {}
    for path, square in squares.items():
        p = param_specs[path]
        axes = p.split_axes("optimizer_state").union(p.sharded_compute)
        groups.setdefault(tuple(sorted(axes)), {})[path] = square
    for axes, group in groups.items():
        if axes:
            sums = lax.psum(jnp.stack([*group.values()]), axes)
            squares |= dict(zip(group, sums, strict=True))
    return squares


def _shard(p: ParamSpecs, x: jax.Array) -> jax.Array:
    """Return this device's shard of a parameter, sharded as its optimizer state."""
    dims = p.optimizer_only_dims("parameter")

    def slice_shard(x):
        for dim, axes in dims:
            length = x.shape[dim] // size_of(axes, p.mesh)
            start = lax.axis_index(axes) * length
            x = lax.dynamic_slice_in_dim(x, start, length, x.ndim + dim)
        return x

    return map_tensor_shards(slice_shard, p.tensor_dims, x.ndim)(x) if dims else x
