"""The data plane: loss and gradients of one step, every collective over data and fsdp written here.

Inside, each device holds its own rows and its own shards. Microbatches run in a scan; what is
scattered in every microbatch is scattered by `fetch`, the rest is reduced once, after the scan.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from hfjax.mean import Mean, as_mean
from hfjax.parallel.blueprint import LAYERS, Blueprint
from hfjax.parallel.execution import Execution, Precision
from hfjax.parallel.fetch import Movement, Stored
from hfjax.parallel.kernels import Kernels
from hfjax.parallel.layers import Run, run_model
from hfjax.parallel.mesh import BATCH_AXES, MANUAL_AXES, PIPE_AXIS, TENSOR_AXES, in_use, platform_of
from hfjax.parallel.offloaded import Offloaded
from hfjax.parallel.placement import auto_part
from hfjax.parallel.randomness import is_random, keys_for
from hfjax.parallel.reduction import Flat, Placed, Reduction, levels
from hfjax.parallel.sending import AsChosen, Sending
from hfjax.parallel.strategy import Axes


@dataclass(frozen=True)
class DataPlane:
    """What runs on each device between the parameters at rest and the reduced gradients."""

    blueprint: Blueprint
    placed: Mapping[str, Placed]
    mesh: Mesh
    execution: Execution
    loss: Callable
    forward: Callable | None
    offloaded: Offloaded = field(default_factory=Offloaded, kw_only=True)  # told while tracing
    kernels: Kernels = field(kw_only=True)  # likewise

    def __post_init__(self):
        self.offloaded.offload = self.execution.offload
        if self._reads_once:
            placed = {path: _straight(p) for path, p in self.placed.items()}
            object.__setattr__(self, "placed", placed)

    def gradients(self, parameters: Flat, variables: Flat, batch: Any, step: jax.Array):
        """Return (gradients of the total, placed as the moments; Mean; variables written to).

        With `tells` there is a `Told` in place of the Mean.
        """

        def device(parameters, variables, batch, step):
            unread, written = set(self.placed), set[str]()
            parameters = self._gather_once(self._varying(parameters))
            random, statistics = self._sort(self._varying(variables))
            traced = (unread, written)
            microbatch = self._microbatch(parameters, random, rows_of(batch), step, traced)
            gradients, mean, statistics = self._accumulate(microbatch, statistics, batch)
            self._check_all_read(unread)
            self._check_kept()
            gradients = Reduction(self._precision, self._hierarchical, self._sending)(
                gradients, self.placed
            )
            changed = {path: x for path, x in statistics.items() if path in written}
            return gradients, self._sum(mean), self._average(changed)

        moments = self._specs("moment")
        gradients = {path: moments[path] for path in self._trained}
        out_specs = (gradients, self._told_specs, P())
        in_specs = (self._specs("parameter"), P(), P(self._batch_axes), P())
        return self._shard_map(device, in_specs, out_specs)(parameters, variables, batch, step)

    def evaluate(self, parameters: Flat, variables: Flat, batch: Any) -> Any:
        """Return the loss as a Mean, or what `tells` says; nothing is random, nothing changes."""

        def device(parameters, variables, batch):
            stored, held = self._varying(parameters), self._varying(variables)
            return self._sum(self._evaluated(stored, held, batch))

        in_specs = (self._specs("parameter"), P(), P(self._batch_axes))
        run = self._shard_map(device, in_specs, self._told_specs)
        return run(parameters, variables, batch)

    def _evaluated(self, stored: Flat, held: Flat, batch: Any) -> Any:
        model = self._model(stored, None, held, "eval", set())
        return self._varying(self._mean(model, batch))

    @property
    def _told_specs(self) -> Any:
        return P()

    @property
    def _reads_once(self) -> bool:
        """Whether a step reads each parameter for one microbatch only."""
        return self.execution.accumulate == 1

    def _specs(self, column: str) -> dict[str, P]:
        return {path: p.manual(column) for path, p in self.placed.items()}

    def _shard_map(self, device: Callable, in_specs: Any, out_specs: Any) -> Callable:
        names = set(MANUAL_AXES)
        specs = {"in_specs": in_specs, "out_specs": out_specs}
        return jax.shard_map(device, mesh=self.mesh, axis_names=names, **specs)

    # -- microbatches -------------------------------------------------------------------------

    def _accumulate(self, microbatch: Callable, statistics: Flat, batch: Any):
        """Return gradients, Mean and statistics after all microbatches of this device."""
        count = self.execution.accumulate
        if count == 1:
            return microbatch(statistics, batch, 0)

        def body(carry, xs):
            sums, statistics = carry
            gradients, mean, statistics = microbatch(statistics, *xs)
            return (jax.tree.map(jnp.add, sums, gradients), statistics), mean

        split = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
        xs = (split, lax.iota("int32", count))
        (gradients, statistics), means = lax.scan(body, (self._slots(), statistics), xs)
        return gradients, jax.tree.map(lambda x: x.sum(0), means), statistics

    def _microbatch(
        self, parameters: Flat, random: Flat, local_rows: int, step: Any, traced: tuple[set, set]
    ) -> Callable:
        """Return (statistics, batch, number) -> (gradients, Mean, statistics) of one microbatch.

        `traced` holds the paths not read yet and those written to: tracing fills them in.
        """
        unread, written = traced
        keys = self._keys(random, local_rows, step)

        def total(slots, statistics, batch, number):
            of_rows = keys(None, number, rows_of(batch))
            model = self._model(parameters, slots, {**statistics, **of_rows}, "train", unread)
            mean = self._mean(model, batch)
            changed = self.blueprint.variables_of(model)
            written.update(p for p, old in statistics.items() if changed[p] is not old)
            statistics = {path: changed[path] for path in statistics}
            mark = self._varying
            return mark(mean.total), (mark(mean), mark(statistics))

        def run(statistics, batch, number):
            """Nothing reads a slot: one that a model gets hold of makes its loss NaN."""
            gradient = jax.grad(total, has_aux=True)
            slots = self._pin(jax.tree.map(lambda zeros: zeros + jnp.nan, self._slots()))
            gradients, aux = gradient(slots, statistics, batch, number)
            return self._pin(gradients), *aux

        return run

    def _keys(self, random: Flat, local_rows: int, step: Any) -> Callable:
        """Return (layer or None, number of a microbatch, its rows) -> variables that hold keys."""
        template = self.blueprint.variables

        def keys(layer, number, rows):
            device = lax.axis_index(self._batch_axes) if self._batch_axes else 0
            first = device * local_rows + number * rows
            of_layer = variables_of(random, layer).items()
            return {p: keys_for(template[p], key, step, first, rows) for p, key in of_layer}

        return keys

    @property
    def _platform(self) -> str:
        return platform_of(self.mesh)

    def _mean(self, model: Any, batch: Any) -> Mean:
        inputs = cast_inputs(batch, self._precision.compute)
        if self.forward is not None:
            outputs = self.forward(model, inputs)
        elif self.blueprint.three_parts:
            outputs = run_model(model, inputs, self._run)
        else:
            outputs = model(inputs) if callable(model) else model
        return as_mean(self.loss(outputs, batch), rows_of(batch))

    @property
    def _run(self) -> Run:
        gathers = self._gathers_layers()
        return Run(self.execution, gathers, self._platform, self.offloaded)

    def _policy(self, views: bool = False) -> Callable | None:
        """Return what a layer may save whose parameters are fetched outside of it."""
        return self._run.remat.policy(0, views, keep=False, seen=self.offloaded.seen)

    def _check_kept(self) -> None:
        """Refuse an offload, or names, that the layers which were traced have no use for."""
        self.offloaded.check()
        self._run.remat.check(self.offloaded.seen)

    def _model(self, parameters: Flat, slots: Flat | None, variables: Flat, mode: str, unread: set):
        """Return the model on stored parameters; those outside the layers are gathered now."""
        stored: Flat = {}
        for path, value in parameters.items():
            move = self._movement(self.placed[path], unread, slots is not None)
            stored[path] = Stored(value, (slots or {}).get(path), move)
            if self.blueprint.three_parts and not path.startswith(LAYERS):
                stored[path] = stored[path].fetch()
        return self.blueprint.merge(stored, variables, mode)

    def _sort(self, variables: Flat) -> tuple[Flat, Flat]:
        """Return the variables that hold random keys, and the statistics."""
        random = {p: v for p, v in variables.items() if is_random(self.blueprint.variables[p])}
        return random, {p: v for p, v in variables.items() if p not in random}

    def _check_all_read(self, unread: set[str]) -> None:
        for path in sorted(unread):
            p = self.placed[path]
            if p.split("parameter"):
                raise ValueError(
                    f"{path} {p.shape}: {p.parameter} is split, and the step never read it through "
                    "its variable. Read it as `param[...]` (not through its raw value or "
                    "nnx.state), or, if the loss does not depend on it, keep it whole: "
                    f'layout.with_specs({{"{path}": P()}}).'
                )

    # -- moving -------------------------------------------------------------------------------

    @property
    def _precision(self) -> Precision:
        return self.execution.precision

    @property
    def _batch_axes(self) -> tuple[str, ...]:
        """The axes over which rows are split: all of them, so that a model may name them all.

        None where there is one group of tensor devices: XLA's partitioner refuses a collective
        over devices that are alone.
        """
        return BATCH_AXES if in_use(self.mesh, BATCH_AXES) else ()

    @property
    def _axes(self) -> tuple[str, ...]:
        """The axes over which what is computed differs: of rows, and of stages."""
        return (*in_use(self.mesh, (PIPE_AXIS,)), *self._batch_axes)

    def _varying(self, tree: Any, but: Axes = ()) -> Any:
        """Mark every leaf as differing between devices, so that nothing is reduced unasked."""
        axes = tuple(axis for axis in self._axes if axis not in but)

        def mark(x):
            x = jnp.asarray(x)
            varying = jax.typeof(x).manual_axis_type.varying
            missing = tuple(axis for axis in axes if axis not in varying)
            return lax.pcast(x, missing, to="varying") if missing else x

        return jax.tree.map(mark, tree)

    def _sum(self, tree: Any) -> Any:
        return lax.psum(tree, self._axes) if self._axes else tree

    def _average(self, statistics: Flat) -> Flat:
        """Return statistics averaged over the devices; whole numbers agree already."""
        if not self._axes:
            return statistics
        inexact = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
        average = lambda x: (lax.pmean if inexact(x) else lax.pmax)(x, self._axes)
        return jax.tree.map(average, statistics)

    def _slots(self) -> Flat:
        """Return zeros of the shape and place in which each gradient accumulates."""

        def zeros(p: Placed) -> jax.Array:
            zeros = jnp.zeros(p.local("gradient"), jnp.promote_types(p.dtype, jnp.float32))
            return self._varying(zeros, but=self._summed_at_once(p))

        return self._pin({path: zeros(self.placed[path]) for path in self._trained})

    @property
    def _trained(self) -> list[str]:
        """The parameters that have a gradient."""
        return [path for path, p in self.placed.items() if not p.frozen]

    def _summed_at_once(self, p: Placed) -> Axes:
        """Return the axes over which a gradient is summed as soon as its layer is done.

        That is when there is no further microbatch to wait for, each parameter is read once, and
        it is large: small ones go together at the end.
        """
        once = self.blueprint.three_parts and self._reads_once
        if p.small or self._hierarchical or not once:
            return ()
        split = {axis for _, axes in (*p.split("gradient"), *p.split("moment")) for axis in axes}
        return tuple(axis for axis in self._axes if axis not in split)

    def _pin(self, gradients: Flat) -> Flat:
        """Keep the tensor axes of accumulated gradients where the parameters have them."""
        if not in_use(self.mesh, TENSOR_AXES):
            return gradients
        pin = lax.with_sharding_constraint
        return {p: pin(g, auto_part(self.placed[p].gradient)) for p, g in gradients.items()}

    def _movement(self, p: Placed, unread: set[str], training: bool = True) -> Movement:
        compute, wire, reduce = self._precision.of(p.dtype)
        gather = () if training and self._gathered_once(p) else p.split("parameter")
        return Movement(
            path=p.path,
            shape=p.shape,
            gather=gather,
            scatter=levels(p.split("gradient"), self._hierarchical),
            sum=self._summed_at_once(p),
            tensor=p.tensor,
            compute=compute,
            wire=wire if gather else compute,
            reduce=reduce,
            read=unread.discard,
            sending=self._sending,
        )

    @property
    def _sending(self) -> Sending:
        return AsChosen(self.kernels.form_of_one)

    @property
    def _hierarchical(self) -> bool:
        return self.execution.reduction == "hierarchical"

    def _gather_once(self, parameters: Flat) -> Flat:
        """Return the parameters, some of them gathered for the whole step."""
        whole = {path for path, p in self.placed.items() if self._gathered_once(p)}
        moves = {path: self._movement(self.placed[path], set(), training=False) for path in whole}
        return {
            path: Stored(value, None, moves[path]).fetch() if path in whole else value
            for path, value in parameters.items()
        }

    def _gathered_once(self, p: Placed) -> bool:
        """Return whether a split parameter stays gathered, since its gradient accumulates whole."""
        return bool(p.split("parameter")) and not p.split("gradient")

    def _gathers_layers(self) -> bool:
        return any(
            p.split("parameter") for path, p in self.placed.items() if path.startswith(LAYERS)
        )


def _straight(p: Placed) -> Placed:
    """With one microbatch nothing accumulates: a gradient goes to its moments' place at once."""
    return replace(p, gradient=p.moment) if p.gradient == p.parameter else p


def variables_of(variables: Flat, layer: Any) -> Flat:
    """Return the variables of one of the stacked layers (None: all as they are)."""
    if layer is None:
        return variables
    pick = lambda x: lax.dynamic_index_in_dim(x, layer, 0, False)
    return {path: pick(x) for path, x in variables.items() if path.startswith(LAYERS)}


def rows_of(batch: Any) -> int:
    """Return the number of rows of a batch."""
    return jax.tree.leaves(batch)[0].shape[0]


def cast_inputs(batch: Any, dtype: Any) -> Any:
    """Return the batch with floating-point inputs in the compute dtype, if there is one."""
    cast = lambda x: dtype is not None and jnp.issubdtype(x.dtype, jnp.floating)
    return jax.tree.map(lambda x: x.astype(dtype) if cast(x) else x, batch)
