"""The data plane: loss and gradients of one step, every collective over data and fsdp written here.

Inside, each device holds its own rows and its own shards. Microbatches run in a scan. Gradients
that are scattered in every microbatch are scattered by `fetch`; all others are reduced once, after
the scan.

Random keys: a variable that holds a key and says `per_row=True` becomes one key per row of the
global batch, so that no mesh changes a mask. Any other key, those of `nnx.Rngs` among them, becomes
one per device and microbatch: as random, but other masks on another mesh.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
from jax.typing import DTypeLike

from hfjax.base.mean import Mean, as_mean
from hfjax.base.paths import Flat, Index, Tree
from hfjax.parallel.activation_offload import Offloaded
from hfjax.parallel.engine.blueprint import LAYERS, TRAIN, Blueprint, asked_by, variable_of
from hfjax.parallel.engine.fetch import AsChosen, Movement, Placeholder, Sending, Stored, fetched
from hfjax.parallel.engine.gather_on_use import gather_on_use
from hfjax.parallel.engine.kernels import Kernels
from hfjax.parallel.engine.layers import LayerOptions, run_model
from hfjax.parallel.engine.reduce import Reduction, levels
from hfjax.parallel.engine.varying_state import differing, warn_of_same_noise, warn_of_whole_numbers
from hfjax.parallel.execution import Execution, Precision
from hfjax.parallel.mesh import (
    AXES,
    BATCH_AXES,
    MANUAL_AXES,
    PIPE_AXIS,
    TENSOR_AXES,
    in_use,
    platform_of,
)
from hfjax.parallel.placement import Placed, auto_part
from hfjax.parallel.strategy import Axes


class StepInputs(NamedTuple):
    """What a step is given: arrays by name, or where they are."""

    parameters: Any
    variables: Any
    moments: Any  # what the optimizer keeps of the layers
    counts: Any  # numbers of the optimizer that belong to no parameter


def is_random(variable: Any) -> bool:
    """Return whether a variable is the state of a random generator: any typed key is."""
    if isinstance(variable, nnx.RngState) or _is_key(variable):
        return True
    return isinstance(variable, nnx.Variable) and bool(variable.get_metadata("per_row", False))


def _is_key(variable: Any) -> bool:
    return jnp.issubdtype(variable.dtype, jax.dtypes.prng_key)


def keys_for(variable: Any, key: jax.Array, step: Any, first_row: Any, rows: int) -> jax.Array:
    """Return what a variable holds while the rows from `first_row` (counted globally) run."""
    if isinstance(variable, nnx.Variable) and variable.get_metadata("per_row", False):
        ids = first_row + lax.iota("int32", rows)
        return jax.vmap(_fold, (None, 0), key.ndim)(_fold(key, step), ids)
    if isinstance(variable, nnx.RngKey) or _is_key(variable):
        return _fold(_fold(key, step), first_row)
    return key


def _fold(key: jax.Array, number: Index) -> jax.Array:
    """Return the key, or each of the stacked keys, with a number folded in."""
    fold = jax.random.fold_in
    for _ in range(key.ndim):
        fold = jax.vmap(fold, (0, None))
    return fold(key, number)


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
            placed = {path: _gradient_at_moments(p) for path, p in self.placed.items()}
            object.__setattr__(self, "placed", placed)

    def gradients(self, parameters: Flat, variables: Flat, batch: Any, step: jax.Array):
        """Return (gradients of the total, placed as the moments; Mean; variables written to).

        A pipeline whose plane has `wanted` returns `Extras` (engine/parts.py) in place of the Mean.
        """

        def device(parameters, variables, batch, step):
            unread, written = set(self.placed), set[str]()
            parameters = self._gather_once(parameters)
            random, statistics = self._sort(variables)
            traced = (unread, written)
            microbatch = self._microbatch(parameters, random, rows_of(batch), step, traced)
            gradients, mean, statistics = self._accumulate(microbatch, statistics, batch)
            self._tell_unread(unread)
            self._check_kept()
            gradients = self._reduction(gradients, self.placed)
            changed = {path: x for path, x in statistics.items() if path in written}
            return gradients, self._sum(mean), self._average(changed), self._of_rows(changed)

        moments, rows = self._specs("moment"), P(self._batch_axes)
        gradients = {path: moments[path] for path in self._trained}
        out_specs = (gradients, self._told_specs, P(), rows)
        in_specs = (self._specs("parameter"), self._variable_specs(variables), rows, P())
        run = self._shard_map(device, in_specs, out_specs)
        gradients, mean, changed, of_rows = run(parameters, variables, batch, step)
        return gradients, mean, changed | of_rows

    def evaluate(self, parameters: Flat, variables: Flat, batch: Any) -> Any:
        """Return the loss as a Mean (a pipeline: or Extras); nothing is random, nothing changes."""

        def device(parameters, variables, batch):
            return self._sum(self._evaluated(parameters, variables, batch))

        in_specs = (
            self._specs("parameter"),
            self._variable_specs(variables),
            P(self._batch_axes),
        )
        run = self._shard_map(device, in_specs, self._told_specs)
        return run(parameters, variables, batch)

    def _evaluated(self, stored: Flat, held: Flat, batch: Any) -> Any:
        return self._loss_of(self._as_stored(stored, None, set()), held, batch, "eval")[0]

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
        """Map over the manual axes.

        Every collective is written out and nothing is derived from what differs between devices,
        so JAX need not track that (check_vma): a model is free to begin a loop with a constant.
        A model that is called as it is may have callbacks, which run where all axes are manual: so
        are those that the partitioner has no use for.
        """
        alone = not self._in_parts and not in_use(self.mesh, TENSOR_AXES)
        names = set(AXES if alone else MANUAL_AXES)
        specs: dict[str, Any] = {"in_specs": in_specs, "out_specs": out_specs}
        return jax.shard_map(device, mesh=self.mesh, axis_names=names, check_vma=False, **specs)

    # -- microbatches -------------------------------------------------------------------------

    def _accumulate(self, microbatch: Callable, statistics: Flat, batch: Any):
        """Return gradients, Mean and statistics after all microbatches of this device."""
        count = self.execution.accumulate
        if count == 1:
            return microbatch(statistics, batch, 0)

        def body(carry, xs):
            sums, statistics = carry
            of_rows, batch, number = xs
            gradients, mean, held = microbatch(statistics | of_rows, batch, number)
            held, of_rows = ({path: held[path] for path in of} for of in (statistics, of_rows))
            return (jax.tree.map(jnp.add, sums, gradients), held), (mean, of_rows)

        split = lambda tree: jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), tree)
        of_rows = self._of_rows(statistics)
        held = {path: x for path, x in statistics.items() if path not in of_rows}
        xs = (split(of_rows), split(batch), lax.iota("int32", count))
        (gradients, held), (means, of_rows) = lax.scan(body, (self._slots(), held), xs)
        of_rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), of_rows)
        return gradients, jax.tree.map(lambda x: x.sum(0), means), held | of_rows

    def _microbatch(
        self, parameters: Flat, random: Flat, local_rows: int, step: Any, traced: tuple[set, set]
    ) -> Callable:
        """Return (statistics, batch, number) -> (gradients, Mean, statistics) of one microbatch.

        `traced` holds the paths not read yet and those written to: tracing fills them in.
        """
        unread, written = traced
        keys = self._keys(random, local_rows, step)

        def total(slots, statistics, batch, number):
            variables = {**statistics, **keys(None, number, rows_of(batch))}
            stored = self._as_stored(parameters, slots, unread)
            mean, changed = self._loss_of(stored, variables, batch, "train")
            written.update(p for p, old in statistics.items() if changed[p] is not old)
            return mean.total, (mean, {path: changed[path] for path in statistics})

        def run(statistics, batch, number):
            gradient = jax.grad(total, has_aux=True)
            gradients, aux = gradient(self._slots(), statistics, batch, number)
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

    def _loss_of(
        self, stored: dict[str, Stored], variables: Flat, batch: Any, mode: str
    ) -> tuple[Mean, Flat]:
        """Return the loss of a batch, and the variables after it."""
        in_layers = {p: x for p, x in stored.items() if self._in_parts and p.startswith(LAYERS)}
        outside = {path: x for path, x in stored.items() if path not in in_layers}

        def run(parameters: Flat, variables: Flat, batch: Any) -> tuple[Mean, Flat]:
            away = {path: Placeholder(path) for path in in_layers}
            model = self.blueprint.merge(parameters | away, variables, mode)
            outputs = self._outputs(model, in_layers, variables, batch, mode)
            mean = as_mean(self.loss(outputs, batch), rows_of(batch))
            return mean, variables | self.blueprint.variables_of(model)

        if self._in_parts:
            return run(fetched(outside), variables, batch)
        look = partial(self._look, variables, batch) if mode == "train" else None
        mean, changed = gather_on_use(run, stored, variables, batch, look=look)
        for path, old in variables.items():
            new = changed[path]
            if new is not old and (new.shape, new.dtype) != (old.shape, old.dtype):
                raise ValueError(
                    f"{path} {old.shape} {old.dtype}: the model writes {new.shape} {new.dtype} to "
                    "it. What a variable holds keeps its shape and dtype from step to step."
                )
        return mean, changed

    def _look(self, variables: Flat, batch: Any, jaxpr: Any, result: Any) -> None:
        """Warn of what is the same on all devices and should differ, and the other way round."""
        own = {path: self._is_own(path) for path in variables}  # of each device
        given = jax.tree.leaves((own, jax.tree.map(lambda _: True, batch)))
        found = differing(jaxpr, [False] * (len(jaxpr.invars) - len(given)) + given)
        warn_of_same_noise(found.lines)
        _, apart = jax.tree.unflatten(jax.tree.structure(result), found.outputs)
        whole = lambda x: not jnp.issubdtype(x.dtype, jnp.inexact)
        if in_use(self.mesh, BATCH_AXES):
            mixed = [p for p, x in variables.items() if apart[p] and not own[p] and whole(x)]
            warn_of_whole_numbers(mixed)

    def _is_own(self, path: str) -> bool:
        """Whether each device has a variable of its own: a key, or some rows."""
        return is_random(self.blueprint.variables[path]) or self.blueprint.of_rows(path)

    def _outputs(
        self, model: Any, layers: dict[str, Stored], variables: Flat, batch: Any, mode: str
    ) -> Any:
        inputs = cast_inputs(batch, self._precision.compute)
        if self._in_parts:
            return run_model(model, layers, inputs, self._run)
        if self.forward is None:
            return model(inputs) if callable(model) else model
        training = mode == "train"
        key = lambda name: variables[variable_of(name)] if training else None
        asked = {n: training if n == TRAIN else key(n) for n in asked_by(self.forward)}
        return self.forward(model, inputs, **asked)

    @property
    def _in_parts(self) -> bool:
        """Whether the model is run in three parts (else it is called as it is)."""
        return self.forward is None and self.blueprint.three_parts

    @property
    def _run(self) -> LayerOptions:
        gathers = self._gathers_layers()
        return LayerOptions(self.execution, gathers, self._platform, self.offloaded)

    def _policy(self, views: bool = False) -> Callable | None:
        """Return what a layer may save whose parameters are fetched outside of it."""
        return self._run.remat.policy(0, views, keep=False, seen=self.offloaded.seen)

    def _check_kept(self) -> None:
        """Refuse an offload, or names, that the layers which were traced have no use for."""
        self.offloaded.check()
        self._run.remat.check(self.offloaded.seen)

    def _as_stored(self, parameters: Flat, slots: Flat | None, unread: set) -> dict[str, Stored]:
        """Return what this device stores of each parameter, with the slot of its gradient."""
        move = lambda path: self._movement(self.placed[path], unread, slots is not None)
        slot = lambda path: (slots or {}).get(path)
        return {path: Stored(x, slot(path), move(path)) for path, x in parameters.items()}

    def _variable_specs(self, variables: Flat) -> dict[str, P]:
        rows = self._of_rows(variables)
        return {path: P(self._batch_axes) if path in rows else P() for path in variables}

    def _of_rows(self, variables: Flat) -> Flat:
        """Return those variables that have a row for each row of the batch."""
        return {path: x for path, x in variables.items() if self.blueprint.of_rows(path)}

    def _sort(self, variables: Flat) -> tuple[Flat, Flat]:
        """Return the variables that hold random keys, and the statistics."""
        random = {p: v for p, v in variables.items() if is_random(self.blueprint.variables[p])}
        return random, {p: v for p, v in variables.items() if p not in random}

    def _tell_unread(self, unread: set[str]) -> None:
        """Warn of parameters that the loss does not depend on: their gradients are zero."""
        if idle := sorted(path for path in unread if not self.placed[path].frozen):
            names = ", ".join(f'"{path}"' for path in idle)
            warnings.warn(
                f"the loss reads {len(idle)} of {len(self.placed)} parameters nowhere: {names}. "
                "Their gradients are zero, and an optimizer may still change them (weight decay). "
                f"To leave them as they are: layout.freeze({names}).",
                UserWarning,
                stacklevel=2,
            )

    # -- moving -------------------------------------------------------------------------------

    @property
    def _precision(self) -> Precision:
        return self.execution.precision

    @property
    def _batch_axes(self) -> tuple[str, ...]:
        """The axes over which rows are split: all of them, so that a model may name them all.

        Empty where all data axes have size 1: XLA's partitioner refuses a collective
        over devices that are alone.
        """
        return BATCH_AXES if in_use(self.mesh, BATCH_AXES) else ()

    @property
    def _axes(self) -> tuple[str, ...]:
        """The axes over which what is computed differs: of rows, and of stages."""
        return (*in_use(self.mesh, (PIPE_AXIS,)), *self._batch_axes)

    @property
    def _reduction(self) -> Reduction:
        summed = {path: self._summed_at_once(p) for path, p in self.placed.items()}
        return Reduction(self._precision, self._hierarchical, self._sending, self._axes, summed)

    def _sum(self, tree: Tree) -> Any:
        return lax.psum(tree, self._axes) if self._axes else tree

    def _average(self, statistics: Flat) -> Flat:
        """Return statistics averaged over the devices; whole numbers agree already."""

        def average(x: jax.Array) -> jax.Array:
            if not self._axes:
                return x
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                return lax.pmax(x, self._axes)
            wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
            return lax.pmean(wide, self._axes).astype(x.dtype)

        rows = self._of_rows(statistics)
        return {path: average(x) for path, x in statistics.items() if path not in rows}

    def _slots(self) -> Flat:
        """Return zeros of the shape and place in which each gradient accumulates."""

        def zeros(p: Placed) -> jax.Array:
            return jnp.zeros(p.local("gradient"), jnp.promote_types(p.dtype, jnp.float32))

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
        once = self._in_parts and self._reads_once
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
        compute, comm_dtype, reduce = self._precision.of(p.dtype)
        gather = () if training and self._gathered_once(p) else p.split("parameter")
        return Movement(
            path=p.path,
            shape=p.shape,
            gather=gather,
            scatter=levels(p.split("gradient"), self._hierarchical),
            sum=self._summed_at_once(p),
            tensor=p.tensor,
            compute=compute,
            comm_dtype=comm_dtype if gather else compute,
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


def _gradient_at_moments(p: Placed) -> Placed:
    """Return the placement for one microbatch: gradients go straight to where the moments are."""
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


def cast_inputs(batch: Any, dtype: DTypeLike) -> Any:
    """Return the batch with floating-point inputs in the compute dtype, if there is one."""
    cast = lambda x: dtype is not None and jnp.issubdtype(x.dtype, jnp.floating)
    return jax.tree.map(lambda x: x.astype(dtype) if cast(x) else x, batch)
