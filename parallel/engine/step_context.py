"""What every engine knows of a step, and what it does on each device with that.

`StepContext` is made once, when the step is built: the model without its arrays, the specs of each
parameter, the mesh, how the step runs. Its `trace` is what becomes known while the step is traced.
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

from hfjax.parallel.adapters.model_template import LAYERS, ModelTemplate
from hfjax.parallel.engine.comm_plan import (
    ChooseKernel,
    CommPlan,
    DimCollective,
    collectives,
    pin_tensor_axes,
    use_xla,
)
from hfjax.parallel.engine.example_keys import local_keys
from hfjax.parallel.engine.layer_remat import LayerOptions
from hfjax.parallel.engine.model_ops import TraceRecord
from hfjax.parallel.engine.reduce_gradients import Reduction, one_scatter_per_axis, reduce_gradient
from hfjax.parallel.engine.unshard import ShardedParam
from hfjax.parallel.execution import Execution
from hfjax.parallel.mesh import (
    AXES,
    PIPE_AXIS,
    SEQUENCE_AXES,
    active_batch_axes,
    auto_axes,
    grid_axes,
    in_use,
    manual_axes,
    meanings,
    platform_of,
    size_of,
)
from hfjax.parallel.param_specs import ParamSpecs
from hfjax.parallel.precision.dtypes import Dtypes
from hfjax.parallel.spmd.partition_context import PureFunction
from hfjax.parallel.spmd.placements import AxisGroup
from hfjax.parallel.spmd.report import check_gathers
from hfjax.parallel.strategy import Axes
from hfjax.utils.mean import Mean, as_mean
from hfjax.utils.paths import Flat, Tree


@dataclass(frozen=True, eq=False)
class StepContext:
    """A step on one device, between stored parameters and reduced gradients."""

    template: ModelTemplate
    param_specs: Mapping[str, ParamSpecs]
    mesh: Mesh
    execution: Execution
    loss: Callable
    forward: Callable | None
    trace: TraceRecord
    one_microbatch: bool  # no gradient has to wait for another (in a pipeline: never)
    gathered_for_step: frozenset[str]  # paths of parameters that are gathered once in a step

    @property
    def is_layer_stack(self) -> bool:
        """Whether the model is run as a layer stack (else as a whole model)."""
        return self.forward is None and self.template.is_layer_stack

    @property
    def platform(self) -> str:
        """What the devices are: cpu, gpu, tpu."""
        return platform_of(self.mesh)

    @property
    def trainable(self) -> list[str]:
        """The parameters that have a gradient."""
        return [path for path, p in self.param_specs.items() if not p.frozen]

    @cached_property
    def options(self) -> LayerOptions:
        """How layers run."""
        in_layers = (p for path, p in self.param_specs.items() if path.startswith(LAYERS))
        gathers = any(p.split_dims("parameter") for p in in_layers)
        mesh_axes = meanings(self.mesh).items()
        others = in_use(
            self.mesh, [a for a, meaning in mesh_axes if meaning.keeps_sharded or not meaning.batch]
        )
        return LayerOptions(self.execution, gathers, not others, self.platform, self.trace)

    def policy(self, views: bool = False) -> Callable | None:
        """Return the checkpoint policy of a layer whose parameters are unsharded outside of it."""
        return self.options.remat.policy(0, views, keep=False, seen_names=self.trace.names)

    # -- on devices ---------------------------------------------------------------------------

    @property
    def batch_axes(self) -> Axes:
        """The axes that shard the batch."""
        return active_batch_axes(self.mesh)

    @property
    def sequence_axes(self) -> Axes:
        """The axes that shard sequences."""
        return in_use(self.mesh, SEQUENCE_AXES)

    @property
    def data_axes(self) -> Axes:
        """The axes that shard the batch or sequences."""
        return (*self.batch_axes, *self.sequence_axes)

    @property
    def axes(self) -> Axes:
        """The axes over which computation differs: of stages, a grid, batch, sequence."""
        mesh_axes = meanings(self.mesh).items()
        model_axes = [
            axis for axis, meaning in mesh_axes if meaning.keeps_sharded and not meaning.batch
        ]
        return (*in_use(self.mesh, model_axes), *self.data_axes)

    def shard_map(self, device: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """Map over the manual axes.

        Every collective is written out and nothing is derived from what differs between devices,
        so JAX need not track that (check_vma): a model is free to begin a loop with a constant.
        A whole model may have callbacks, which run where all axes are manual: so are those that
        the partitioner does not use.
        """
        all_manual = not self.is_layer_stack and not auto_axes(self.mesh)
        names = set(AXES if all_manual else manual_axes(self.mesh))
        specs: dict[str, Any] = {"in_specs": in_specs, "out_specs": out_specs}
        return jax.shard_map(device, mesh=self.mesh, axis_names=names, check_vma=False, **specs)

    def specs(self, column: str) -> dict[str, P]:
        """Return each parameter's spec in a column, over the manual axes."""
        return {path: p.manual_spec(column) for path, p in self.param_specs.items()}

    @property
    def batch_spec(self) -> P:
        """The spec of a batch: devices along a sequence axis get the same examples."""
        return P(self.batch_axes)

    def in_specs(self, variables: Flat) -> tuple[dict[str, P], dict[str, P], P]:
        """Return the specs of parameters, variables and a batch."""
        return self.specs("parameter"), self.variable_specs(variables), self.batch_spec

    def variable_specs(self, variables: Flat) -> dict[str, P]:
        """Return the specs of variables: those with a batch dimension are sharded."""
        batched = self.batched_variables(variables)
        return {path: P(self.batch_axes) if path in batched else P() for path in variables}

    def sum(self, tree: Tree) -> Any:
        """Return the sum over all devices whose computations differ."""
        return lax.psum(tree, self.axes) if self.axes else tree

    def average(self, statistics: Flat) -> Flat:
        """Return statistics averaged over the devices; whole numbers agree already.

        Over examples and positions that the model sees they are reduced in its own program.
        """
        reduced_axes = (
            *self.sequence_axes,
            *grid_axes(self.mesh),
            *(self.batch_axes if self.sees_global_batch else ()),
        )
        axes = tuple(axis for axis in self.axes if axis not in reduced_axes)

        def average(x: jax.Array) -> jax.Array:
            if not axes:
                return x
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                return lax.pmax(x, axes)
            wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
            return lax.pmean(wide, axes).astype(x.dtype)

        batched = self.batched_variables(statistics)
        return {path: average(x) for path, x in statistics.items() if path not in batched}

    # -- variables and the loss ---------------------------------------------------------------

    def batched_variables(self, variables: Flat) -> Flat:
        """Return those variables that have a batch dimension."""
        return {path: x for path, x in variables.items() if self.template.is_batched(path)}

    def cast_inputs(self, batch: Any) -> Any:
        """Return the batch with floating-point inputs in the compute dtype, if there is one."""
        dtype = self.execution.precision.compute
        cast = lambda x: dtype is not None and jnp.issubdtype(x.dtype, jnp.floating)
        return jax.tree.map(lambda x: x.astype(dtype) if cast(x) else x, batch)

    def keys(
        self, variables: Flat, batch_size: int, step: jax.Array, redistributed: bool = False
    ) -> tuple:
        """Return `local_keys` of these variables, for a device's batch size."""
        key_args = self.template.variables, self.mesh, variables, batch_size, step
        return local_keys(*key_args, self.sees_global_batch, redistributed)

    def local_sequence_batch(self, batch: Any) -> Any:
        """Return this device's positions of a batch of full sequences."""
        return self.trace.ops.local_sequence_batch(self.template.prepare_batch, batch)

    @property
    def batch_group(self) -> AxisGroup:
        """The devices that have other examples."""
        return self.trace.global_batch.group

    @property
    def sees_global_batch(self) -> bool:
        """Whether the model sees the global batch, not its own device's only."""
        return self.execution.batch_view != "local"

    @property
    def num_local_losses(self) -> int:
        """How many devices have a loss of their own examples, of which the loss is the average."""
        return 1 if self.sees_global_batch else size_of(self.batch_axes, self.mesh)

    def check_gathers(self) -> None:
        """Warn of gathers for operations without a rule, or refuse them."""
        gradients = (
            math.prod(self.param_specs[path].gathered_shape) * 4 for path in self.trainable
        )
        global_batch, strict = self.trace.global_batch, self.execution.batch_view == "strict"
        sent_bytes = sum(gradients)
        check_gathers(global_batch.comms, strict, sent_bytes)
        self.trace.ops.check_positions(global_batch.inner_comms, sent_bytes)

    def mean(self, outputs: Any, batch: Any) -> Mean:
        """Return the loss of the global batch, as distributed values."""
        global_batch = self.trace.global_batch
        batch, extra = global_batch.as_sharded(batch), self.trace.extra
        return global_batch.run("the loss", LossCall(self.loss), outputs, batch, extra)

    def share(self, mean: Mean) -> Mean:
        """Return this device's share of a loss of distributed values.

        Where derivative rules may need it, the weight is that of all devices.
        """
        local_mean, global_batch = self.trace.global_batch.as_partial(mean), self.trace.global_batch
        if not self.trace.weighted:
            return local_mean
        if self.sees_global_batch and global_batch.is_replicated(mean.weight):
            return replace(local_mean, weight=jnp.asarray(mean.weight))
        axes = tuple(axis for axis in self.axes if axis != PIPE_AXIS)  # all stages compute it
        return replace(local_mean, weight=jnp.asarray(lax.psum(local_mean.weight, axes)))

    def reduce_loss(self, mean: Mean) -> Mean:
        """Return the loss of all devices, given the share of each."""
        if not self.trace.weighted:
            return self.sum(mean)
        loss_total, metrics = self.sum((mean.total, mean.metrics))
        return replace(mean, total=loss_total, metrics=metrics)

    def divisor(self, weight: jax.Array) -> Any:
        """Return by what the total of a microbatch is divided before its backward pass.

        It is the weight, so that a derivative rule (`jax.custom_vjp`) sees the cotangent that it
        sees in plain JAX. Devices that see only their own examples each have the average. Where all
        rules are linear it is 1: the result is the same, and nothing has to be sent first.
        """
        if not self.trace.weighted:
            return 1.0
        each = weight / self.num_local_losses if self.num_local_losses > 1 else weight
        return jnp.where(each == 0, jnp.ones_like(each), each)

    def loss_seed(self, scale: jax.Array, microbatches: int) -> jax.Array:
        """Return the cotangent of the loss of a microbatch under a loss scale.

        It is DeepSpeed's: devices with a loss of their own examples each scale their mean.
        """
        return scale * (size_of(self.batch_axes, self.mesh) / self.num_local_losses / microbatches)

    # -- moving parameters and gradients --------------------------------------------------------

    def comm_plan(self, spec: ParamSpecs, training: bool = True) -> CommPlan:
        """Return how a parameter is sent: gathered when it is read, its gradient scattered."""
        dtypes = self._dtypes(spec)
        gathers, scatters = self._collectives[spec.path]
        if training and spec.path in self.gathered_for_step:
            gathers = ()
        return CommPlan(
            path=spec.path,
            shape=spec.gathered_shape,
            gathers=gathers,
            scatters=scatters,
            psum_axes=self._psum_axes(spec),
            tensor_dims=spec.tensor_dims,
            compute_dtype=dtypes.compute,
            gather_dtype=dtypes.gather if gathers else dtypes.compute,
            reduce_dtype=dtypes.reduce,
            on_read=self.trace.unread.discard,
        )

    def _dtypes(self, spec: ParamSpecs) -> Dtypes:
        return self.execution.precision.at(spec.path).of(spec.dtype)

    @cached_property
    def _collectives(
        self,
    ) -> dict[str, tuple[tuple[DimCollective, ...], tuple[DimCollective, ...]]]:
        """How each parameter is gathered and its gradient scattered, with kernels chosen here."""
        return {path: (self._gathers(p), self._scatters(p)) for path, p in self.param_specs.items()}

    def _gathers(self, spec: ParamSpecs) -> tuple[DimCollective, ...]:
        dtype = self._dtypes(spec).gather
        x = self._collective_input(spec, spec.shard_shape("parameter"), spec.dtype)
        return collectives(
            "all_gather",
            spec.split_dims("parameter"),
            x,
            dtype,
            self.mesh,
            self._choose_kernel(spec),
        )

    def _scatters(self, spec: ParamSpecs) -> tuple[DimCollective, ...]:
        dtype, dims = self._dtypes(spec).reduce, spec.split_dims("gradient")
        dims = one_scatter_per_axis(dims) if self._hierarchical else dims
        x = self._collective_input(spec, spec.gathered_shape, dtype)
        return collectives("reduce_scatter", dims, x, dtype, self.mesh, self._choose_kernel(spec))

    def _collective_input(
        self, spec: ParamSpecs, shape: tuple[int, ...], dtype: DTypeLike
    ) -> jax.ShapeDtypeStruct:
        """Return a collective's input: one of stacked layers, unless gathered for a whole step."""
        one = spec.stacked and spec.path not in self.gathered_for_step
        return jax.ShapeDtypeStruct(shape[1:] if one else shape, dtype)

    def _choose_kernel(self, spec: ParamSpecs) -> ChooseKernel:
        return use_xla if spec.tensor_dims else self.trace.ops.choose_kernel

    def comm_plans(self, training: bool) -> dict[str, CommPlan]:
        """Return how each parameter is sent."""
        return {path: self.comm_plan(p, training) for path, p in self.param_specs.items()}

    def sharded_params(self, parameters: Flat, slots: Flat | None) -> dict[str, ShardedParam]:
        """Return this device's shard of each parameter, with the slot of its gradient."""
        plans = self.comm_plans(slots is not None)
        slot = lambda path: (slots or {}).get(path)
        return {path: ShardedParam(x, slot(path), plans[path]) for path, x in parameters.items()}

    def gather_once(self, parameters: Flat) -> Flat:
        """Return the parameters, some of them gathered for the whole step."""
        plan_of = lambda p: replace(
            self.comm_plan(self.param_specs[p], False), on_read=lambda _: None
        )
        unshard = lambda path, x: ShardedParam(x, None, plan_of(path)).unshard()
        once = self.gathered_for_step
        return {path: unshard(path, x) if path in once else x for path, x in parameters.items()}

    def slots(self) -> Flat:
        """Return zeros of the shape and placement in which each gradient accumulates.

        Sums begin with them. Each unshard also takes a zero array, the slot. The gradient with
        respect to the slot is the reduced gradient of the parameter.
        """

        def zeros(spec: ParamSpecs) -> jax.Array:
            return jnp.zeros(
                spec.shard_shape("gradient"), jnp.promote_types(spec.dtype, jnp.float32)
            )

        return self.pin({path: zeros(self.param_specs[path]) for path in self.trainable})

    def reduce_outside(self, gradients: Flat) -> Flat:
        """Return the gradients of parameters outside the layers, reduced."""
        wide = lambda p: jnp.promote_types(p.dtype, jnp.float32)
        pairs = ((self.param_specs[path], g) for path, g in gradients.items())
        trained = [(p, g) for p, g in pairs if not p.frozen]
        return {p.path: reduce_gradient(self.comm_plan(p), g, wide(p)) for p, g in trained}

    def pin(self, gradients: Flat) -> Flat:
        """Constrain the tensor axes of accumulated gradients to those of the parameters."""
        return pin_tensor_axes(gradients, self.param_specs, "gradient")

    @property
    def reduction(self) -> Reduction:
        """What sums gradients over the devices after the last microbatch."""
        summed_axes = {path: self._psum_axes(p) for path, p in self.param_specs.items()}
        summed_axes |= self.trace.summed
        precision = self.execution.precision
        choose_kernel = self.trace.ops.choose_kernel
        return Reduction(precision, self._hierarchical, choose_kernel, self.axes, summed_axes)

    @property
    def _hierarchical(self) -> bool:
        return self.execution.gradient_reduction == "hierarchical"

    def _psum_axes(self, spec: ParamSpecs) -> Axes:
        """Return the axes over which a gradient is summed as soon as its layer is done.

        That is when there is no further microbatch to wait for, each parameter is read once, and
        it is large: small ones go together at the end.
        """
        if spec.small or self._hierarchical or not (self.is_layer_stack and self.one_microbatch):
            return ()
        return self.grad_sum_axes(spec)

    def grad_sum_axes(self, spec: ParamSpecs) -> Axes:
        """Return the axes over which a gradient is summed, and not sharded."""
        split = spec.split_axes("gradient", "optimizer_state").union(spec.sharded_compute)
        return tuple(axis for axis in self.axes if axis not in split)

    # -- after a trace ------------------------------------------------------------------------

    def check_remat(self) -> None:
        """Refuse an offload, or names, that the traced layers have no use for."""
        self.trace.offloaded.check()
        self.options.remat.check(self.trace.names)

    def warn_of_unread(self) -> None:
        """Warn of parameters that the loss does not depend on: their gradients are zero."""
        idle = sorted(path for path in self.trace.unread if not self.param_specs[path].frozen)
        if idle:
            names = ", ".join(f'"{path}"' for path in idle)
            warnings.warn(
                f"the loss reads {len(idle)} of {len(self.param_specs)} parameters nowhere: "
                f"{names}. Their gradients are zero, and an optimizer may still change them "
                f"(weight decay). To leave them as they are: layout.freeze({names}).",
                UserWarning,
                stacklevel=2,
            )


@dataclass(frozen=True)
class LossCall(PureFunction):
    """Calls the loss: (outputs, batch, extra arrays) -> Mean."""

    loss: Callable

    def __call__(self, outputs: Any, batch: Any, extra: Any = None) -> Mean:
        loss = extra.give(self.loss) if extra else self.loss
        return as_mean(loss(outputs, batch), num_examples(batch))


def params_gathered_once(
    param_specs: Mapping[str, ParamSpecs],
    execution: Execution,
    include_kept_unsharded: bool = False,
    include_full_gradients: bool = False,
) -> frozenset[str]:
    """Return the paths of the sharded parameters that are gathered once in a step.

    Args:
        param_specs: All parameters.
        execution: How the step runs.
        include_kept_unsharded: Include those that stay gathered from forward to backward pass.
        include_full_gradients: Include those whose gradient accumulates unsharded.
    """
    split = {path: p for path, p in param_specs.items() if p.split_dims("parameter")}
    if include_kept_unsharded and not execution.reshard_after_forward:
        return frozenset(split)
    return frozenset(
        path for path, p in split.items() if include_full_gradients and not p.split_dims("gradient")
    )


def scatter_gradients_early(param_specs: Mapping[str, ParamSpecs]) -> dict[str, ParamSpecs]:
    """Return the specs for one microbatch: gradients go straight to optimizer state's placement."""
    early = lambda p: replace(p, gradient=p.optimizer_state) if p.gradient == p.parameter else p
    return {path: early(p) for path, p in param_specs.items()}


def num_examples(batch: Any) -> int:
    """Return the number of examples of a batch."""
    return jax.tree.leaves(batch)[0].shape[0]
