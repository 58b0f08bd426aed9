"""What every data plane knows of a step, and what it does on each device with that.

`StepContext` is made once, when the step is built: the model without its arrays, where each
parameter lies, the mesh, how the step runs. Its `traced` is what becomes known while the step is
traced.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
from jax.typing import DTypeLike

from hfjax.parallel.adapters.model_template import LAYERS, Blueprint
from hfjax.parallel.engine.comm_plan import Choose, Leg, Movement, by_xla, legs, pin_tensor_axes
from hfjax.parallel.engine.example_keys import keys_here
from hfjax.parallel.engine.layer_remat import LayerOptions
from hfjax.parallel.engine.model_ops import Traced
from hfjax.parallel.engine.reduce_gradients import Reduction, one_scatter_per_axis, reduce_gradient
from hfjax.parallel.engine.unshard import Stored
from hfjax.parallel.execution import Execution
from hfjax.parallel.mesh import (
    AXES,
    PIPE_AXIS,
    SEQUENCE_AXES,
    in_use,
    manual_axes,
    meanings,
    partitioned,
    platform_of,
    row_axes,
    sides,
    size_of,
)
from hfjax.parallel.param_specs import Placed
from hfjax.parallel.precision.dtypes import Dtypes
from hfjax.parallel.spmd.placements import Side
from hfjax.parallel.spmd.report import check_gathers
from hfjax.parallel.strategy import Axes
from hfjax.utils.mean import Mean, as_mean
from hfjax.utils.paths import Flat, Tree


@dataclass(frozen=True)
class StepContext:
    """A step on one device, between the parameters at rest and the reduced gradients."""

    blueprint: Blueprint
    placed: Mapping[str, Placed]
    mesh: Mesh
    execution: Execution
    loss: Callable
    forward: Callable | None
    traced: Traced
    one_microbatch: bool  # no gradient has to wait for another (in a pipeline: never)
    gathered_for_step: frozenset[str]  # paths of parameters that are gathered once in a step

    @property
    def in_parts(self) -> bool:
        """Whether the model is run in three parts (else it is called as it is)."""
        return self.forward is None and self.blueprint.three_parts

    @property
    def platform(self) -> str:
        """What the devices are: cpu, gpu, tpu."""
        return platform_of(self.mesh)

    @property
    def trained(self) -> list[str]:
        """The parameters that have a gradient."""
        return [path for path, p in self.placed.items() if not p.frozen]

    @cached_property
    def options(self) -> LayerOptions:
        """How layers run."""
        in_layers = (p for path, p in self.placed.items() if path.startswith(LAYERS))
        gathers = any(p.split_dims("parameter") for p in in_layers)
        of_mesh = meanings(self.mesh).items()
        others = in_use(self.mesh, [a for a, what in of_mesh if what.stays or not what.rows])
        return LayerOptions(self.execution, gathers, not others, self.platform, self.traced)

    def policy(self, views: bool = False) -> Callable | None:
        """Return what a layer may save whose parameters are fetched outside of it."""
        return self.options.remat.policy(0, views, keep=False, seen=self.traced.names)

    # -- on devices ---------------------------------------------------------------------------

    @property
    def rows(self) -> Axes:
        """The axes over which rows are split."""
        return row_axes(self.mesh)

    @property
    def shares(self) -> Axes:
        """The axes whose devices have parts of the same rows."""
        return in_use(self.mesh, SEQUENCE_AXES)

    @property
    def samples(self) -> Axes:
        """The axes over which rows are split, and positions."""
        return (*self.rows, *self.shares)

    @property
    def axes(self) -> Axes:
        """The axes over which what is computed differs: of stages, a grid, rows, positions."""
        of_mesh = meanings(self.mesh).items()
        stays = [axis for axis, what in of_mesh if what.stays and not what.rows]
        return (*in_use(self.mesh, stays), *self.samples)

    def shard_map(self, device: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """Map over the manual axes.

        Every collective is written out and nothing is derived from what differs between devices,
        so JAX need not track that (check_vma): a model is free to begin a loop with a constant.
        A model that is called as it is may have callbacks, which run where all axes are manual: so
        are those that the partitioner has no use for.
        """
        alone = not self.in_parts and not partitioned(self.mesh)
        names = set(AXES if alone else manual_axes(self.mesh))
        specs: dict[str, Any] = {"in_specs": in_specs, "out_specs": out_specs}
        return jax.shard_map(device, mesh=self.mesh, axis_names=names, check_vma=False, **specs)

    def specs(self, column: str) -> dict[str, P]:
        """Return where a column has each parameter, along the manual axes."""
        return {path: p.manual(column) for path, p in self.placed.items()}

    @property
    def batch_spec(self) -> P:
        """How a batch is split: devices of an axis of the sequence are given the same rows."""
        return P(self.rows)

    def in_specs(self, variables: Flat) -> tuple[dict[str, P], dict[str, P], P]:
        """Return how parameters, variables and a batch are split."""
        return self.specs("parameter"), self.variable_specs(variables), self.batch_spec

    def variable_specs(self, variables: Flat) -> dict[str, P]:
        """Return how variables are split: those with a row for each row of the batch are."""
        rows = self.of_rows(variables)
        return {path: P(self.rows) if path in rows else P() for path in variables}

    def sum(self, tree: Tree) -> Any:
        """Return the sum over all devices that compute something of their own."""
        return lax.psum(tree, self.axes) if self.axes else tree

    def average(self, statistics: Flat) -> Flat:
        """Return statistics averaged over the devices; whole numbers agree already.

        Rows and positions that the model sees have been joined already, in its own program.
        """
        joined = (*self.shares, *sides(self.mesh), *(self.rows if self.sees_all_rows else ()))
        axes = tuple(axis for axis in self.axes if axis not in joined)

        def average(x: jax.Array) -> jax.Array:
            if not axes:
                return x
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                return lax.pmax(x, axes)
            wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
            return lax.pmean(wide, axes).astype(x.dtype)

        rows = self.of_rows(statistics)
        return {path: average(x) for path, x in statistics.items() if path not in rows}

    # -- variables and the loss ---------------------------------------------------------------

    def of_rows(self, variables: Flat) -> Flat:
        """Return those variables that have a row for each row of the batch."""
        return {path: x for path, x in variables.items() if self.blueprint.of_rows(path)}

    def inputs(self, batch: Any) -> Any:
        """Return the batch with floating-point inputs in the compute dtype, if there is one."""
        dtype = self.execution.precision.compute
        cast = lambda x: dtype is not None and jnp.issubdtype(x.dtype, jnp.floating)
        return jax.tree.map(lambda x: x.astype(dtype) if cast(x) else x, batch)

    def keys(self, variables: Flat, rows: int, step: jax.Array, dealt: bool = False) -> tuple:
        """Return `keys_here` of these variables, for so many rows of a device."""
        of = self.blueprint.variables, self.mesh, variables, rows, step
        return keys_here(*of, self.sees_all_rows, dealt)

    def dealt(self, batch: Any) -> Any:
        """Return the part of a batch of whole rows that this device computes with."""
        return self.traced.kernels.dealt(self.blueprint.prepared, batch)

    @property
    def side(self) -> Side:
        """The devices that have other rows."""
        return self.traced.rows.side

    @property
    def sees_all_rows(self) -> bool:
        """Whether the model sees the rows of all devices, not its own device's only."""
        return self.execution.rows != "own"

    @property
    def own_losses(self) -> int:
        """How many devices have a loss of their own rows, of which the loss is the average."""
        return 1 if self.sees_all_rows else size_of(self.rows, self.mesh)

    def check_gathers(self) -> None:
        """Tell what is gathered since no rule knows an operation, or refuse it."""
        gradients = (math.prod(self.placed[path].here) * 4 for path in self.trained)
        rows, strict = self.traced.rows, self.execution.rows == "strict"
        sent = sum(gradients)
        check_gathers(rows.joins, strict, sent)
        self.traced.kernels.check_positions(rows.joins_inner, sent)

    def mean(self, outputs: Any, batch: Any) -> Mean:
        """Return the loss of the rows of all devices, as values."""
        rows = self.traced.rows
        return rows.run("the loss", self.mean_of_rows, outputs, rows.values(batch))

    def mean_of_rows(self, outputs: Any, batch: Any) -> Mean:
        """Return the loss of a batch all of whose rows are given."""
        return as_mean(self.loss(outputs, batch), rows_of(batch))

    def share(self, mean: Mean) -> Mean:
        """Return this device's share of a loss that is given as values.

        Where rules of derivatives may ask for it, the weight is that of all devices.
        """
        mine, rows = self.traced.rows.shares(mean), self.traced.rows
        if not self.traced.weighed:
            return mine
        if self.sees_all_rows and rows.is_replicated(mean.weight):
            return replace(mine, weight=jnp.asarray(mean.weight))
        axes = tuple(axis for axis in self.axes if axis != PIPE_AXIS)  # all stages compute it
        return replace(mine, weight=jnp.asarray(lax.psum(mine.weight, axes)))

    def over_devices(self, mean: Mean) -> Mean:
        """Return the loss of all devices, given the share of each."""
        if not self.traced.weighed:
            return self.sum(mean)
        total, metrics = self.sum((mean.total, mean.metrics))
        return replace(mean, total=total, metrics=metrics)

    def divisor(self, weight: jax.Array) -> Any:
        """Return by what the total of a microbatch is divided before its backward pass.

        It is the weight, so that a rule of a derivative (`jax.custom_vjp`) sees the cotangent that
        it sees in plain JAX. Devices that see only their own rows each have the average. Where all
        rules are linear it is 1: the result is the same, and nothing has to be sent first.
        """
        if not self.traced.weighed:
            return 1.0
        each = weight / self.own_losses if self.own_losses > 1 else weight
        return jnp.where(each == 0, jnp.ones_like(each), each)

    def seed_of(self, scale: jax.Array, microbatches: int) -> jax.Array:
        """Return the cotangent of the loss of a microbatch under a loss scale.

        It is DeepSpeed's: devices that have rows of their own each scale the mean of theirs.
        """
        return scale * (size_of(self.rows, self.mesh) / self.own_losses / microbatches)

    # -- moving parameters and gradients --------------------------------------------------------

    def movement(self, p: Placed, training: bool = True) -> Movement:
        """Return how a parameter moves: gathered when it is read, its gradient scattered."""
        dtypes = self._dtypes(p)
        gathers, scatters = self._legs[p.path]
        if training and p.path in self.gathered_for_step:
            gathers = ()
        return Movement(
            path=p.path,
            shape=p.here,
            gathers=gathers,
            scatters=scatters,
            psum_at_once=self._psum_at_once(p),
            tensor_dims=p.tensor_dims,
            compute_dtype=dtypes.compute,
            gather_dtype=dtypes.gather if gathers else dtypes.compute,
            reduce_dtype=dtypes.reduce,
            read=self.traced.unread.discard,
        )

    def _dtypes(self, p: Placed) -> Dtypes:
        return self.execution.precision.at(p.path).of(p.dtype)

    @cached_property
    def _legs(self) -> dict[str, tuple[tuple[Leg, ...], tuple[Leg, ...]]]:
        """How each parameter is gathered and its gradient scattered, in forms chosen here."""
        return {path: (self._gathers(p), self._scatters(p)) for path, p in self.placed.items()}

    def _gathers(self, p: Placed) -> tuple[Leg, ...]:
        dtype = self._dtypes(p).gather
        x = self._read(p, p.local("parameter"), p.dtype)
        return legs("all_gather", p.split_dims("parameter"), x, dtype, self.mesh, self._choose(p))

    def _scatters(self, p: Placed) -> tuple[Leg, ...]:
        dtype, dims = self._dtypes(p).reduce, p.split_dims("gradient")
        dims = one_scatter_per_axis(dims) if self._hierarchical else dims
        x = self._read(p, p.here, dtype)
        return legs("reduce_scatter", dims, x, dtype, self.mesh, self._choose(p))

    def _read(self, p: Placed, shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        """Return what is moved at once: of stacked layers one, unless all are for a whole step."""
        one = p.stacked and p.path not in self.gathered_for_step
        return jax.ShapeDtypeStruct(shape[1:] if one else shape, dtype)

    def _choose(self, p: Placed) -> Choose:
        return by_xla if p.tensor_dims else self.traced.kernels.sender

    def movements(self, training: bool) -> dict[str, Movement]:
        """Return how each parameter moves."""
        return {path: self.movement(p, training) for path, p in self.placed.items()}

    def stored(self, parameters: Flat, slots: Flat | None) -> dict[str, Stored]:
        """Return what this device stores of each parameter, with the slot of its gradient."""
        moves = self.movements(slots is not None)
        slot = lambda path: (slots or {}).get(path)
        return {path: Stored(x, slot(path), moves[path]) for path, x in parameters.items()}

    def gather_once(self, parameters: Flat) -> Flat:
        """Return the parameters, some of them gathered for the whole step."""
        move = lambda p: replace(self.movement(self.placed[p], False), read=lambda _: None)
        fetch = lambda path, x: Stored(x, None, move(path)).fetch()
        now = self.gathered_for_step
        return {path: fetch(path, x) if path in now else x for path, x in parameters.items()}

    def slots(self) -> Flat:
        """Return zeros of the shape and place in which each gradient accumulates.

        Sums begin with them. Each fetch also takes a zero array, the slot. The gradient with
        respect to the slot is the reduced gradient of the parameter.
        """

        def zeros(p: Placed) -> jax.Array:
            return jnp.zeros(p.local("gradient"), jnp.promote_types(p.dtype, jnp.float32))

        return self.pin({path: zeros(self.placed[path]) for path in self.trained})

    def reduce_outside(self, gradients: Flat) -> Flat:
        """Return the gradients of what lies outside the layers, where they accumulate."""
        wide = lambda p: jnp.promote_types(p.dtype, jnp.float32)
        pairs = ((self.placed[path], g) for path, g in gradients.items())
        trained = [(p, g) for p, g in pairs if not p.frozen]
        return {p.path: reduce_gradient(self.movement(p), g, wide(p)) for p, g in trained}

    def pin(self, gradients: Flat) -> Flat:
        """Keep the tensor axes of accumulated gradients where the parameters have them."""
        return pin_tensor_axes(gradients, self.placed, "gradient")

    @property
    def reduction(self) -> Reduction:
        """What sums gradients over the devices after the last microbatch."""
        psum_at_once = {path: self._psum_at_once(p) for path, p in self.placed.items()}
        psum_at_once |= self.traced.summed
        precision = self.execution.precision
        choose = self.traced.kernels.sender
        return Reduction(precision, self._hierarchical, choose, self.axes, psum_at_once)

    @property
    def _hierarchical(self) -> bool:
        return self.execution.reduction == "hierarchical"

    def _psum_at_once(self, p: Placed) -> Axes:
        """Return the axes over which a gradient is summed as soon as its layer is done.

        That is when there is no further microbatch to wait for, each parameter is read once, and
        it is large: small ones go together at the end.
        """
        if p.small or self._hierarchical or not (self.in_parts and self.one_microbatch):
            return ()
        return self.summed_over(p)

    def summed_over(self, p: Placed) -> Axes:
        """Return the axes over which a gradient is summed, and not split."""
        split = p.split_axes("gradient", "moment").union(p.stays)
        return tuple(axis for axis in self.axes if axis not in split)

    # -- after a trace ------------------------------------------------------------------------

    def check_kept(self) -> None:
        """Refuse an offload, or names, that the layers which were traced have no use for."""
        self.traced.offloaded.check()
        self.options.remat.check(self.traced.names)

    def warn_of_unread(self) -> None:
        """Warn of parameters that the loss does not depend on: their gradients are zero."""
        idle = sorted(path for path in self.traced.unread if not self.placed[path].frozen)
        if idle:
            names = ", ".join(f'"{path}"' for path in idle)
            warnings.warn(
                f"the loss reads {len(idle)} of {len(self.placed)} parameters nowhere: {names}. "
                "Their gradients are zero, and an optimizer may still change them (weight decay). "
                f"To leave them as they are: layout.freeze({names}).",
                UserWarning,
                stacklevel=2,
            )


def gathered_once(
    placed: Mapping[str, Placed], run: Execution, kept: bool = False, whole: bool = False
) -> frozenset[str]:
    """Return the paths of the split parameters that are gathered once in a step.

    Args:
        placed: All parameters.
        run: How the step runs.
        kept: Those that stay gathered from their forward to their backward pass are.
        whole: Those whose gradient accumulates whole are.
    """
    split = {path: p for path, p in placed.items() if p.split_dims("parameter")}
    if kept and not run.reshard_after_forward:
        return frozenset(split)
    return frozenset(path for path, p in split.items() if whole and not p.split_dims("gradient"))


def gradients_at_moments(placed: Mapping[str, Placed]) -> dict[str, Placed]:
    """Return the placement for one microbatch: gradients go straight to where the moments are."""
    at_once = lambda p: replace(p, gradient=p.moment) if p.gradient == p.parameter else p
    return {path: at_once(p) for path, p in placed.items()}


def rows_of(batch: Any) -> int:
    """Return the number of rows of a batch."""
    return jax.tree.leaves(batch)[0].shape[0]
