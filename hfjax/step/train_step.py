"""The training step: one jitted function, or its two halves.

A batch goes through these files, in this order (a model that is called as it is):

`step/train_step.py` jits, donates, waits; `step/batches.py` checks the batch and places it.
`step/step_program.py` is the program; `spmd/partition_context.py` keeps what it traces meanwhile.
`checks/probe_model.py` reads the model before it runs, where something depends on it.
`optimizer_step/update.py` and `optimizer_step/gradients.py` are the two halves of a step.
`engine/gradient_engine.py` is what runs on each device: microbatches, forward, backward.
`engine/step_context.py` knows how each parameter is sent, `engine/comm_plan.py` sends it.
`whole_model/model.py` calls the model; `whole_model/unshard_on_use.py` traces it at global shapes.
`spmd/interpreter.py` runs this program on a device's shards, by a rule for each primitive.
`engine/reduce_gradients.py` adds gradients up; `optimizer_step/sharded.py` updates the shards.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from hfjax.checks.check_step import check_state_shardings
from hfjax.checks.deadlock import check_deadlock
from hfjax.optimizer_step.gradients import Gradients
from hfjax.optimizer_step.loss_scale import initial_scale
from hfjax.optimizer_step.master_sync import MasterSync
from hfjax.parallel.engine.gradient_engine import AutodiffEngine, GradientEngine
from hfjax.parallel.execution import Execution
from hfjax.parallel.extensions.kernel_dispatch.ops import Kernels
from hfjax.parallel.jaxprs.model_mesh import ShardingReport, without_mesh
from hfjax.parallel.layer_stack.unrolled_layers import describe_unroll
from hfjax.parallel.mesh import describe_mesh
from hfjax.parallel.offload.activations import OffloadReport
from hfjax.parallel.offload.host_memory import is_host_sharding, result_shardings
from hfjax.parallel.precision.by_path import DtypesByPath
from hfjax.parallel.precision.dtypes import AUTO, LossScale
from hfjax.parallel.spmd.report import CommReport
from hfjax.sharding.check_state import (
    check_alive,
    check_is_state,
    check_stored_shapes,
    is_traced,
)
from hfjax.sharding.layout import Layout, State
from hfjax.sharding.reorder_layers import check_order, rearrange
from hfjax.step.batches import (
    batch_sharding,
    check_batch,
    num_microbatches,
    place_batch,
)
from hfjax.step.extra_arrays import ExtraSpecs
from hfjax.step.nonfinite import NonfiniteMonitor
from hfjax.step.step_program import Metrics, StepProgram
from hfjax.step.step_spec import precision_for
from hfjax.utils.keywords import attribute_docs, check_keywords
from hfjax.utils.paths import Flat


def train_step(layout: Layout, loss: Callable, **execution: Any) -> "TrainStep":
    """Return the step: (state, batch) -> (state, metrics), one jitted function.

    The state passed to a call is donated: continue with the one that it returns.

    Args:
        layout: The layout of the state, as `hfjax.layout` returns it.
        loss: Function of (outputs, batch). It returns the mean over the examples that it is given,
            or `hfjax.Mean(total, weight)` for a weighted mean or for further metrics.
        execution: Fields of `hfjax.Execution` as keywords, for instance `max_grad_norm=1.0`,
            `precision="bf16"`, `remat="full"`, `schedule=hfjax.Schedule("1f1b", 8)`:

            {fields}

    Returns:
        A `TrainStep`. Its metrics are arrays on the device: loss, grad_norm, weight, finite, step,
        and those of the loss by name.

    Example:
        >>> import hfjax, jax, numpy as np, optax
        >>> from flax import nnx
        >>> model = lambda rngs: nnx.Linear(8, 4, rngs=rngs)
        >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP)
        >>> step = hfjax.train_step(layout, lambda outputs, batch: (outputs**2).mean())
        >>> state, metrics = step(hfjax.init(layout), np.ones((8, 8), np.float32))
        >>> sorted(metrics), int(state.step)
        (['finite', 'grad_norm', 'loss', 'step', 'weight'], 1)
    """
    check_keywords("train_step", execution, [f.name for f in fields(Execution)])
    precision = precision_for(layout, execution.pop("precision", AUTO))
    return TrainStep(layout, loss, Execution(precision=precision, **execution))


train_step.__doc__ = (train_step.__doc__ or "").replace(
    "{fields}", attribute_docs(Execution, 12).lstrip()
)


class TrainStep:
    """A jitted training step. Call it; `lower(batch)` gives the program without running it.

    `hfjax.train_step` makes one. `layout` and `execution` are what it was built from; `offloaded`
    and `kernels` are reports to print.

    Args:
        layout: The layout of the state, as `hfjax.layout` returns it.
        loss: Function of (outputs, batch), as `train_step` takes it.
        execution: How it runs.

    Example:
        >>> import hfjax, numpy as np, optax
        >>> from flax import nnx
        >>> model = lambda rngs: nnx.Linear(8, 4, rngs=rngs)
        >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP)
        >>> step = hfjax.train_step(layout, lambda outputs, batch: (outputs**2).mean())
        >>> state = hfjax.init(layout)
        >>> for batch in 3 * [np.ones((16, 8), np.float32)]:
        ...     state, metrics = step(state, batch)
        >>> step.check(state)  # FloatingPointError if a step was not finite
        >>> int(state.step), int(metrics["step"])  # steps taken; the number of the last, from 0
        (3, 2)
    """

    def __init__(self, layout: Layout, loss: Callable, execution: Execution) -> None:
        self._program = program = StepProgram(layout, loss, execution)
        self.layout, self.execution = layout, execution = program.layout, execution
        self._loss_scale = execution.precision.scale
        self._replicated = NamedSharding(layout.mesh, P())
        scale = self._replicated if self._loss_scale else None
        self._shardings = replace(layout.shardings(), order=None, scale=scale)
        self._batch_sharding = batch_sharding(layout.mesh)
        self._monitor = NonfiniteMonitor(layout, execution.on_nonfinite, execution.max_skipped)
        self._master_sync = MasterSync(layout.state_shapes.optimizer)
        options: Any = {"donate_argnums": 0, "compiler_options": program.compiler_options}
        self._jitted = check_deadlock(self._jit(program.step, **options), layout.mesh)

    def _jit(self, step: Callable, *more: NamedSharding, **options: Any) -> jax.stages.Wrapped:
        """Return a step jitted; `more` are the shardings of its arguments after state and batch."""
        in_shardings = (self._shardings, self._batch_sharding, *more)
        return jax.jit(
            step, in_shardings=in_shardings, out_shardings=self._out_shardings, **options
        )

    @property
    def _out_shardings(self) -> tuple:
        """The shardings of the next state, the metrics, the squares of gradients."""
        return result_shardings(self._shardings), self._replicated, self._replicated

    @without_mesh
    def __call__(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """Return the next state and the metrics of this step (on the device, without waiting).

        Inside a program of your own (jax.jit, lax.scan) it is a pure function: nothing is donated,
        and a step that is not finite is reported by metrics["finite"] alone.

        Args:
            state: The state from `hfjax.init`, `hfjax.restore` or the call before. It is donated.
                Layers that another schedule has stored are reordered first.
            batch: Pytree of arrays with the same number of examples, which has to be divisible by
                devices times microbatches. With several processes, each passes its own examples.

        Raises:
            FloatingPointError: An earlier step, the last two excepted, was not finite, and
                `nonfinite` of the execution does not skip it.
        """
        if is_traced((state, batch)):
            return self._call_inside_trace(state, batch)
        check_alive(state)
        self._monitor.check(state)
        batch = place_batch(self.layout, batch, num_microbatches(self.execution))
        return self._run(self._jitted, state, batch)

    def _run(self, jitted: Callable, state: State, argument: Any) -> tuple[State, Metrics]:
        """Return the next state and the metrics of a function of (state, argument)."""
        with self._explain_state(state):
            inputs = self._with_scale(self._master_sync(self._reorder(state)))
            state, metrics, squares = jitted(inputs, argument)
        self._monitor.add(metrics, squares)
        return self._master_sync.remember_params(replace(state, order=self._order)), metrics

    @contextmanager
    def _explain_state(self, state: State) -> Iterator[None]:
        """Where something fails, say first what is wrong with the state, if anything is."""
        try:
            yield
        except (TypeError, ValueError):
            check_stored_shapes(self.layout, state)
            self._check_memory(state)
            check_state_shardings(self.layout, state)
            raise

    # -- the halves of a step -------------------------------------------------------------------

    @without_mesh
    def gradients(
        self,
        state: State,
        batch: Any,
        *,
        fold: Any = 0,
        extra: Any = None,
        returns: Sequence[str] = (),
    ) -> tuple[Gradients, Metrics]:
        """Return the gradients of a batch and the metrics of its loss; nothing is donated.

        `apply` is the other half of a step: `step.apply(state, step.gradients(state, batch)[0])` is
        `step(state, batch)`. Between the two you can add gradients of several batches, change them,
        or pass them to another optimizer.

        Args:
            state: The state, as a call takes it; it stays as it is.
            batch: As a call takes it.
            fold: A number that changes the random numbers (dropout), so that several losses of one
                state draw different ones. 0 draws those of a call; it may be traced.
            extra: A tree of arrays without examples, which have no gradient: a teacher's
                parameters, a coefficient. `forward` and the loss ask for `extra` by name. Arrays
                of another layout are taken as they lie where this mesh can express it, else they
                are copied to all devices. Copy parameters that a step would donate.
            returns: More metrics, of "losses" (an array with the loss of each microbatch) and
                "outputs" (what the model returned in this pass, sharded as the batch).

        Raises:
            ValueError: This step has no such moment, since layers are updated during the backward
                pass (optimizer_in_backward, the schedules pipedream and 2bw); or the state stores
                its layers for another schedule (`hfjax.init(layout, schedule=…)` does for this).

        Example:
            >>> import hfjax, jax, numpy as np, optax
            >>> from flax import nnx
            >>> model = lambda rngs: nnx.Linear(8, 4, rngs=rngs)
            >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(fsdp=8), hfjax.FSDP)
            >>> step = hfjax.train_step(layout, lambda outputs, batch: (outputs**2).mean())
            >>> state = hfjax.init(layout)
            >>> first, metrics = step.gradients(state, np.ones((8, 8), np.float32))
            >>> second, _ = step.gradients(state, np.zeros((8, 8), np.float32))
            >>> both = first + second
            >>> clipped = both.with_tree(jax.tree.map(lambda g: g.clip(-1, 1), both.tree()))
            >>> state, metrics = step.apply(state, clipped)
            >>> int(state.step)
            1
        """
        self._program.check_fold(fold)
        names = self._program.check_returns(returns)
        check_alive(state)
        specs = self._program.extra_specs(extra)
        extra = specs and specs.place(extra)
        is_nested = is_traced((state, batch, fold, extra))
        jitted, more = self._gradients_of(specs, is_nested, names), (jnp.int32(fold), extra)
        if is_nested:
            check_batch(self.layout, batch, num_microbatches(self.execution))
            return jitted(self._with_scale(replace(state, order=None)), batch, state.order, *more)
        self._monitor.check(state)
        batch = place_batch(self.layout, batch, num_microbatches(self.execution))
        with self._explain_state(state):
            check_order(self.layout, state)
            return jitted(self._with_scale(replace(state, order=None)), batch, None, *more)

    @without_mesh
    def apply(self, state: State, gradients: Gradients) -> tuple[State, Metrics]:
        """Return the next state and the metrics of this step, as a call does.

        Both arguments are donated: copy gradients that you need again.

        Args:
            state: The state from which `gradients` were computed.
            gradients: What `gradients` returned, or a sum of several, or `with_tree` of it.

        Example:
            >>> import hfjax, numpy as np, optax
            >>> from flax import nnx
            >>> model = lambda rngs: nnx.Linear(8, 4, rngs=rngs)
            >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP)
            >>> step = hfjax.train_step(layout, lambda outputs, batch: (outputs**2).mean())
            >>> state = hfjax.init(layout)
            >>> gradients, _ = step.gradients(state, np.ones((8, 8), np.float32))
            >>> state, metrics = step.apply(state, gradients)
            >>> sorted(metrics), int(state.step)
            (['finite', 'grad_norm', 'loss', 'step', 'weight'], 1)
        """
        self._program.check_gradients(gradients)
        check_alive(state)
        if is_traced((state, gradients)):
            inputs = self._with_scale(replace(state, order=None))
            new = self._nested_apply(inputs, gradients, state.order)
            return self._restore_order(state, *new)
        self._monitor.check(state)
        result = self._run(self._jitted_apply, state, gradients)
        for x in gradients.sums.values():
            x.delete()  # donated, they would be buffers that no output can use: JAX warns of those
        return result

    @cached_property
    def _gradients_of(self) -> Callable[..., Callable]:
        """Return the function (state, batch, order, fold, extra) -> gradients, metrics; jitted."""

        def jitted(
            specs: ExtraSpecs | None, is_nested: bool, returns: tuple[str, ...] = ()
        ) -> Callable:
            compute = partial(self._program.gradients, specs, returns)
            in_shardings = self._shardings, self._batch_sharding, None, None
            shardings: Any = (*in_shardings, specs and specs.in_shardings())
            if is_nested:  # only the outermost function has compiler options
                return jax.jit(compute, in_shardings=shardings)
            options = self._program.compiler_options
            program = jax.jit(compute, in_shardings=shardings, compiler_options=options)
            return check_deadlock(program, self.layout.mesh)

        return cache(jitted)

    @cached_property
    def _jitted_apply(self) -> jax.stages.Wrapped:
        """The jitted function (state, gradients) -> next state, metrics, squares of gradients."""
        options: Any = {"donate_argnums": 0, "compiler_options": self._program.compiler_options}
        options["in_shardings"] = (self._shardings, None)
        return jax.jit(self._program.apply, out_shardings=self._out_shardings, **options)

    # -- inside another program -----------------------------------------------------------------

    def _call_inside_trace(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """Return what a step returns, within a program that is being traced."""
        check_alive(state)
        check_batch(self.layout, batch, num_microbatches(self.execution))
        inputs = self._with_scale(replace(state, order=None))
        return self._restore_order(state, *self._nested(inputs, batch, state.order))

    def _restore_order(
        self, before: State, after: State, metrics: Metrics, _: Flat
    ) -> tuple[State, Metrics]:
        """Return the next state with the order of layers, and an unused loss scale, of the last."""
        scale = after.scale if self._loss_scale else before.scale
        return replace(after, order=before.order, scale=scale), metrics

    @cached_property
    def _nested(self) -> jax.stages.Wrapped:
        """The program that runs within others: it takes the order in which layers are stored.

        The order cannot be read while it is traced. A state that another schedule has arranged
        counts as one that is not finite: its loss is NaN, and it stays unchanged.
        """

        def step(state: State, batch: Any, order: Any) -> tuple:
            state = self._master_sync.sync_traced(state)
            return self._program.step(state, batch, self._program.fits_order(order))

        return self._jit(step, self._replicated)

    @cached_property
    def _nested_apply(self) -> jax.stages.Wrapped:
        """The other half of a step, within another program."""

        def apply(state: State, gradients: Gradients, order: Any) -> tuple:
            state = self._master_sync.sync_traced(state)
            return self._program.apply(state, gradients, self._program.fits_order(order))

        shardings: Any = {"in_shardings": (self._shardings, None, None)}
        return jax.jit(apply, out_shardings=self._out_shardings, **shardings)

    def _with_scale(self, state: State) -> State:
        """Return the state with the loss scale that this step needs, or without one."""
        if (settings := self._loss_scale) is None:
            return replace(state, scale=None)
        return state if state.scale is not None else self._with_new_scale(state, settings)

    def _with_new_scale(self, state: State, settings: LossScale) -> State:
        """Return the state with an initial loss scale; warn if the run has taken steps."""
        if not is_traced(state) and int(state.step) > 0:
            warnings.warn(
                f"this state of step {int(state.step)} has no loss scale: it begins at "
                f"{settings.initial:g}.",
                UserWarning,
                stacklevel=4,
            )
        put = lambda x: jnp.asarray(x) if is_traced(state) else jax.device_put(x, self._replicated)
        return replace(state, scale=jax.tree.map(put, initial_scale(settings)))

    def _check_memory(self, state: State) -> None:
        """Refuse a state in another memory than the layout says."""
        shardings = jax.tree.leaves((self._shardings.params, self._shardings.optimizer))
        arrays = jax.tree.leaves((state.params, state.optimizer))
        for x, sharding in zip(arrays, shardings, strict=True):
            if is_host_sharding(x.sharding) != is_host_sharding(sharding):
                raise ValueError(
                    f"this state lies in {x.sharding.memory_kind} memory where the layout "
                    f"({self.layout.strategy.name}) has {sharding.memory_kind}. Move it: "
                    "jax.device_put(state, layout.shardings()), or restore it with this layout."
                )

    @cached_property
    def _order(self) -> jax.Array | None:
        """The order in which this step stores layers, on its devices."""
        order = self.layout.order
        return None if order is None else jax.device_put(order, self._replicated)

    def _reorder(self, state: State) -> State:
        """Return the state as this step stores layers (reordered if necessary)."""
        if state.order is not self._order:
            state = rearrange(self.layout, state)
        return replace(state, order=None)

    @without_mesh
    def lower(self, batch: Any) -> jax.stages.Lowered:
        """Return the lowered step for a batch of arrays or shapes; allocates nothing.

        Args:
            batch: Pytree of arrays, or of `jax.ShapeDtypeStruct`, of a global batch.

        Example:
            >>> import hfjax, jax, optax
            >>> from flax import nnx
            >>> model = lambda rngs: nnx.Linear(8, 4, rngs=rngs)
            >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP)
            >>> step = hfjax.train_step(layout, lambda outputs, batch: (outputs**2).mean())
            >>> lowered = step.lower(jax.ShapeDtypeStruct((8, 8), "float32"))
            >>> hfjax.collectives(lowered).total("all-reduce", "data") >= 4 * (8 * 4 + 4)
            True
        """
        return self.trace(batch).lower()

    @without_mesh
    def trace(self, batch: Any) -> jax.stages.Traced:
        """Return the traced step for a batch of arrays or shapes: its `jaxpr` is the program.

        Args:
            batch: Pytree of arrays, or of `jax.ShapeDtypeStruct`, of a global batch.

        Example:
            >>> import hfjax, jax, optax
            >>> from flax import nnx
            >>> model = lambda rngs: nnx.Linear(8, 4, rngs=rngs)
            >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP)
            >>> step = hfjax.train_step(layout, lambda outputs, batch: (outputs**2).mean())
            >>> traced = step.trace(jax.ShapeDtypeStruct((8, 8), "float32"))
            >>> hfjax.analysis.host_transfers(traced).total()  # nothing goes to the host
            0
        """
        check_batch(self.layout, batch, num_microbatches(self.execution))
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._batch_sharding)
        settings = self._loss_scale
        scale = settings and jax.eval_shape(
            lambda: jax.tree.map(jnp.asarray, initial_scale(settings))
        )
        state = replace(self.layout.abstract_state(), order=None, scale=scale)
        return self._jitted.trace(state, jax.tree.map(shape, batch))

    @property
    def engine(self) -> GradientEngine:
        """The engine that runs the model forward and backward on each device."""
        return self._program.update.engine

    @property
    def offloaded(self) -> OffloadReport:
        """What layers save for the backward pass and what of it goes to host memory: print it.

        Known once the step is traced: after `trace`, `lower` or the first call.
        """
        return self.engine.context.trace.offloaded

    @property
    def kernels(self) -> Kernels:
        """Which implementation each kernel of the step has, and why: print it once it is traced."""
        return self._program.spec.kernels

    @property
    def context(self) -> Any:
        """How devices that share sequences work together, and what each way sends: print it.

        Known once the step is traced; None where no devices share sequences.
        """
        return self.engine.context.trace.ops.context_choice()

    @property
    def dtypes(self) -> DtypesByPath:
        """The dtypes in which each parameter is computed with, gathered and reduced: print it."""
        at, param_specs = self.execution.precision.at, self.layout.param_specs
        return DtypesByPath({path: at(path).of(p.dtype) for path, p in param_specs.items()})

    @property
    def experts(self) -> Any:
        """How tokens get to experts on other devices, and what each way sends: print it.

        Known once the step is traced; None where no experts are sharded.
        """
        return self._program.spec.experts.choice

    @property
    def batch_comms(self) -> CommReport:
        """The cross-example operations of model and loss, where, and what each sends: print it.

        Known once the step is traced.
        """
        return CommReport(tuple(self.engine.context.trace.global_batch.comms))

    @property
    def sequence_comms(self) -> CommReport:
        """Operations across the positions of sequences that devices share, beside attention.

        Print it. Known once the step is traced.
        """
        return CommReport(tuple(self.engine.context.trace.global_batch.inner_comms), "positions")

    @property
    def shardings(self) -> ShardingReport:
        """The specs that model and loss ask for (`out_sharding=`, `reshard`): print it.

        Over the axis tensor each is a constraint; over others the strategy decides. Known once the
        step is traced.
        """
        return ShardingReport(tuple(self._program.model_mesh.requests))

    @without_mesh
    def check(self, state: State) -> None:
        """Wait for the steps called so far; raise FloatingPointError if one was not finite.

        Under `on_nonfinite="skip"` it warns instead, up to `max_skipped` in a row.

        Args:
            state: The state that the last call returned: the message says whether its parameters
                are finite.
        """
        check_is_state(state)
        self._monitor.check(state, lag=0)

    def __repr__(self) -> str:
        title = f"{self.layout.strategy.name} on {describe_mesh(self.layout.mesh)}"
        context = self.engine.context
        layers = ""
        if isinstance(self.engine, AutodiffEngine) and context.is_layer_stack:
            template = context.template
            loop_kind = describe_unroll(
                context.options, template.num_layers, template.is_layer_list
            )
            layers = f", layers {loop_kind}"
        return f"TrainStep({title}{layers}, {self.execution})"
