"""The data plane: loss and gradients of one step, every collective over data and fsdp written here.

Inside, each device holds its own rows and its own shards. Microbatches run in a scan; what is
scattered in every microbatch is scattered by `fetch`, the rest is reduced once, after the scan.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from hfjax.mean import Mean, as_mean
from hfjax.parallel.arrangement import Arrangement
from hfjax.parallel.blueprint import LAYERS, Blueprint
from hfjax.parallel.execution import Execution, Precision
from hfjax.parallel.fetch import Movement, Stored, scatter
from hfjax.parallel.layers import run_model, saving_policy
from hfjax.parallel.mesh import BATCH_AXES, MANUAL_AXES, PIPE_AXIS, TENSOR_AXES, in_use
from hfjax.parallel.packing import PackedLayers
from hfjax.parallel.pipeline import Pipeline
from hfjax.parallel.placement import auto_part
from hfjax.parallel.randomness import is_random, keys_for
from hfjax.parallel.reduction import Flat, Placed, Reduction, levels
from hfjax.parallel.remat import check_except_last
from hfjax.parallel.staged import Staged, Told
from hfjax.parallel.strategy import Axes
from hfjax.parallel.ticks import Ticks
from hfjax.parallel.unlike import Unlike


@dataclass(frozen=True)
class DataPlane:
    """What runs on each device between the parameters at rest and the reduced gradients."""

    blueprint: Blueprint
    placed: Mapping[str, Placed]
    mesh: Mesh
    execution: Execution
    loss: Callable
    forward: Callable | None
    arrangement: Arrangement | None = None  # of the layers on stages
    packed: PackedLayers | None = None  # how a list of layers is stored on them
    ticks: Ticks | None = None  # the schedule, if the step runs as a pipeline
    tells: str | None = None  # "losses" or "outputs": a pipeline gives `Told` in place of its Mean

    def __post_init__(self):
        if self.execution.remat == "except_last" and self.ticks is not None:
            check_except_last(self.ticks.table, self.placed, self.mesh)
        if self.execution.accumulate == 1 and self.ticks is None:
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
            microbatch = self._microbatch(parameters, random, _rows(batch), step, traced)
            gradients, mean, statistics = self._accumulate(microbatch, statistics, batch)
            self._check_all_read(unread)
            gradients = Reduction(self._precision, self._hierarchical)(gradients, self.placed)
            changed = {path: x for path, x in statistics.items() if path in written}
            return gradients, self._sum(mean), self._average(changed)

        out_specs = (self._specs("moment"), self._told_specs, P())
        in_specs = (self._specs("parameter"), P(), P(self._batch_axes), P())
        return self._shard_map(device, in_specs, out_specs)(parameters, variables, batch, step)

    def evaluate(self, parameters: Flat, variables: Flat, batch: Any) -> Any:
        """Return the loss as a Mean, or what `tells` says; nothing is random, nothing changes."""

        def device(parameters, variables, batch):
            stored, held = self._varying(parameters), self._varying(variables)
            if self.ticks is not None:
                staged = self._staged(stored, batch, lambda m, number: _of(held, number), "eval")
                return self._sum(self._pipeline(staged)[2])
            model = self._model(stored, None, held, "eval", set())
            return self._sum(self._varying(self._mean(model, batch)))

        in_specs = (self._specs("parameter"), P(), P(self._batch_axes))
        run = self._shard_map(device, in_specs, self._told_specs)
        return run(parameters, variables, batch)

    @property
    def _told_specs(self) -> Any:
        return P() if self.tells is None else Told(P(), P(self._batch_axes))

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

        def pipelined(statistics, batch, number):
            """A microbatch of the step is a batch of the pipeline, split again."""
            staged = self._training(parameters, statistics, batch, (keys, number), unread)
            gradients, ends, mean = self._pipeline(staged)
            ends = {path: self._give(self.placed[path], g) for path, g in ends.items()}
            return (
                self._pin({path: (gradients | ends)[path] for path in self.placed}),
                mean,
                statistics,
            )

        def total(slots, statistics, batch, number):
            of_rows = keys(None, number, _rows(batch))
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

        return run if self.ticks is None else pipelined

    def _keys(self, random: Flat, local_rows: int, step: Any) -> Callable:
        """Return (layer or None, number of a microbatch, its rows) -> variables that hold keys."""
        template = self.blueprint.variables

        def keys(layer, number, rows):
            device = lax.axis_index(self._batch_axes) if self._batch_axes else 0
            first = device * local_rows + number * rows
            of_layer = _of(random, layer).items()
            return {p: keys_for(template[p], key, step, first, rows) for p, key in of_layer}

        return keys

    # -- pipelines ----------------------------------------------------------------------------

    def _training(self, parameters, statistics, batch, keys_of, unread) -> Staged:
        """Return the model in three parts for a microbatch of the step, and its random keys."""
        assert self.ticks is not None
        count = self.ticks.table.microbatches
        rows, (keys, number) = _rows(batch) // count, keys_of

        def variables(m, layer):
            return {**_of(statistics, layer), **keys(layer, number * count + m, rows)}

        return self._staged(parameters, batch, variables, "train", unread)

    def _staged(self, parameters, batch, variables, mode, unread=None) -> Staged:
        """Return the model in three parts for one pass over the microbatches of `batch`."""
        assert self.ticks is not None
        assert self.arrangement is not None
        count = self.ticks.table.microbatches
        split = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
        at = lambda m: jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, m, 0, False), split)
        moves = {
            path: self._movement(p, set() if unread is None else unread, mode == "train")
            for path, p in self.placed.items()
        }
        kind = Staged if self.packed is None else partial(Unlike, packed=self.packed)
        return kind(
            blueprint=self.blueprint,
            arrangement=self.arrangement,
            parameters=parameters,
            movements=moves,
            slots=jax.eval_shape(self._slots),
            variables=variables,
            inputs=lambda m: _cast(at(m), self._precision.compute),
            mean=lambda outputs, m: as_mean(self.loss(outputs, at(m)), _rows(batch) // count),
            mode=mode,
            policy=saving_policy(self.execution, gathers=False),
            tells=self.tells,
            keeps_last=self.execution.remat == "except_last",
            mark=self._varying,
        )

    def _pipeline(self, staged: Staged) -> tuple[Any, Any, Any]:
        """Return the gradients of the layers, those of the rest, and the mean (or `Told`)."""
        assert self.ticks is not None
        pipeline = Pipeline(self.ticks, staged.model(), self._varying, self._unroll)
        layers, ends, told = pipeline.run()
        if self.tells is None:
            return layers, ends, jax.tree.map(lambda x: x.sum(0), told)
        by_row = lambda x: x.reshape(-1, *x.shape[2:])
        return layers, ends, Told(told.means, jax.tree.map(by_row, told.outputs))

    @property
    def _unroll(self) -> int | bool:
        """How many layers of a stage follow each other without a loop: on a CPU all."""
        unroll = self.execution.unroll
        return (self._platform == "cpu" or 1) if unroll is None else unroll

    def _give(self, p: Placed, gradient: jax.Array) -> jax.Array:
        """Return a gradient, summed over all microbatches, where it accumulates."""
        move = self._movement(p, set())
        wide = jnp.promote_types(p.dtype, jnp.float32)
        return scatter(gradient.astype(move.reduce), move.scatter, move.tensor).astype(wide)

    @property
    def _platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    def _mean(self, model: Any, batch: Any) -> Mean:
        inputs = _cast(batch, self._precision.compute)
        if self.forward is not None:
            outputs = self.forward(model, inputs)
        elif self.blueprint.three_parts:
            gathers = self._gathers_layers()
            outputs = run_model(model, inputs, self.execution, gathers, self._platform)
        else:
            outputs = model(inputs) if callable(model) else model
        return as_mean(self.loss(outputs, batch), _rows(batch))

    def _model(self, parameters: Flat, slots: Flat | None, variables: Flat, mode: str, unread: set):
        """Return the model on stored parameters; those outside the layers are gathered now."""
        stored: Flat = {}
        for path, value in parameters.items():
            move = self._movement(self.placed[path], unread, slots is not None)
            stored[path] = Stored(value, None if slots is None else slots[path], move)
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
        assert isinstance(self.execution.precision, Precision)
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
        if isinstance(tree, Told):
            return Told(self._sum(tree.means), self._from_last_stage(tree.outputs))
        return lax.psum(tree, self._axes) if self._axes else tree

    def _from_last_stage(self, outputs: Any) -> Any:
        """Return on every stage what is zero on all but the last.

        In float32 on a CPU: its compiler aborts on a sum in bfloat16.
        """
        if not in_use(self.mesh, (PIPE_AXIS,)):
            return outputs

        def send(x):
            narrow = self._platform == "cpu" and x.dtype == jnp.bfloat16
            return lax.psum(x.astype(jnp.float32) if narrow else x, PIPE_AXIS).astype(x.dtype)

        return jax.tree.map(send, outputs)

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

        return self._pin({path: zeros(p) for path, p in self.placed.items()})

    def _summed_at_once(self, p: Placed) -> Axes:
        """Return the axes over which a gradient is summed as soon as its layer is done.

        That is when there is no further microbatch to wait for, each parameter is read once, and
        it is large: small ones go together at the end.
        """
        one = self.execution.accumulate == 1 and self.ticks is None
        once = self.blueprint.three_parts and one
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
        )

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
        """Return whether a split parameter stays gathered from the first microbatch to the last.

        That is when its gradient accumulates whole; in a pipeline, also when asked for.
        """
        kept = self.ticks is not None and not self.execution.reshard_after_forward
        return bool(p.split("parameter")) and (kept or not p.split("gradient"))

    def _gathers_layers(self) -> bool:
        return any(
            p.split("parameter") for path, p in self.placed.items() if path.startswith(LAYERS)
        )


def _straight(p: Placed) -> Placed:
    """With one microbatch nothing accumulates: a gradient goes to its moments' place at once."""
    return replace(p, gradient=p.moment) if p.gradient == p.parameter else p


def _of(variables: Flat, layer: Any) -> Flat:
    """Return the variables of one of the stacked layers (None: all as they are)."""
    if layer is None:
        return variables
    pick = lambda x: lax.dynamic_index_in_dim(x, layer, 0, False)
    return {path: pick(x) for path, x in variables.items() if path.startswith(LAYERS)}


def _rows(batch: Any) -> int:
    return jax.tree.leaves(batch)[0].shape[0]


def _cast(batch: Any, dtype: Any) -> Any:
    """Return the batch with floating-point inputs in the compute dtype, if there is one."""
    cast = lambda x: dtype is not None and jnp.issubdtype(x.dtype, jnp.floating)
    return jax.tree.map(lambda x: x.astype(dtype) if cast(x) else x, batch)
