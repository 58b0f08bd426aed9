"""Train: one jitted step; the model that it leaves."""

import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from hfjax.checks.check_step import check_place
from hfjax.checks.deadlock import checked
from hfjax.checks.jax_errors import calling
from hfjax.checks.probe_model import choice_along_rows, look
from hfjax.optimizer_step.loss_scale import after_step, fresh, within
from hfjax.optimizer_step.master_sync import Follow
from hfjax.optimizer_step.update import Held, Update, constrain
from hfjax.parallel.engine.gradient_engine import AutodiffPlane, Plane
from hfjax.parallel.execution import Execution, guard
from hfjax.parallel.extensions.context_parallel.comm_kinds import ContextChoice
from hfjax.parallel.layer_stack.ordered_layers import told
from hfjax.parallel.mesh import describe_mesh
from hfjax.parallel.offload.activations import Offloaded
from hfjax.parallel.offload.host_memory import is_host_sharding, of_results
from hfjax.parallel.precision.by_path import DtypesByPath, by_path
from hfjax.parallel.precision.dtypes import LossScale, Precision
from hfjax.parallel.spmd.report import Joins
from hfjax.sharding.check_state import (
    check_alive,
    check_form,
    check_is_state,
    check_stored,
    check_takes,
    is_traced,
)
from hfjax.sharding.layout import Layout, State
from hfjax.sharding.reorder_layers import rearrange
from hfjax.step import build
from hfjax.step.batches import batch_sharding, check_batch, full, microbatches_of, on_devices
from hfjax.step.nonfinite import Watch
from hfjax.utils.keywords import check_keywords, meanings
from hfjax.utils.mean import metrics_of
from hfjax.utils.paths import Flat, flatten, nest

Metrics = dict[str, jax.Array]


def train_step(layout: Layout, loss: Callable, **execution: Any) -> "TrainStep":
    """Return the step: (state, batch) -> (state, metrics), one jitted function.

    The state that a call is given is donated: go on with the one that it returns.

    Args:
        layout: Where everything lives, as `hfjax.layout` returns it.
        loss: Function of (outputs, batch). It returns the mean over the rows that it is given, or
            `hfjax.Mean(total, weight)` for a weighted mean or for further metrics.
        execution: Fields of `hfjax.Execution` as keywords, for instance `accumulate=4`,
            `clip=1.0`, `precision="bf16"`, `remat="full"`, `schedule=hfjax.Schedule("1f1b", 8)`:

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
    precision = by_path(execution.pop("precision", Precision()))
    return TrainStep(layout, loss, Execution(precision=precision, **execution))


train_step.__doc__ = (train_step.__doc__ or "").replace(
    "{fields}", meanings(Execution, 12).lstrip()
)


class TrainStep:
    """A jitted training step. Call it; `lower(batch)` gives the program without running it.

    `hfjax.train_step` makes one. `layout` and `execution` say what it was made of; `offloaded` and
    `kernels` are reports to print.

    Args:
        layout: Where everything lives, as `hfjax.layout` returns it.
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
        self._made_of, self._update, options = build.training(layout, loss, execution)
        self.layout, self.execution = layout, execution = self._made_of.layout, execution
        self._loss_scale = execution.precision.scale
        self._whole = NamedSharding(layout.mesh, P())
        scale = self._whole if self._loss_scale else None
        self._shardings = replace(layout.shardings(), order=None, scale=scale)
        self._batch = batch_sharding(layout.mesh)
        self._watch = Watch(layout, execution.nonfinite, execution.patience)
        self._follow = Follow(layout.state_shapes.optimizer)
        program = self._program(self._step, donate_argnums=0, compiler_options=options)
        self._jitted = checked(program, layout.mesh)

    def _program(self, step: Callable, *more: NamedSharding, **options: Any) -> jax.stages.Wrapped:
        """Return a step jitted; `more` says where what it is given beside state and batch lies."""
        return jax.jit(
            step,
            in_shardings=(self._shardings, self._batch, *more),
            out_shardings=(of_results(self._shardings), self._whole, self._whole),
            **options,
        )

    def __call__(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """Return the next state and the metrics of this step (on device: nothing is waited for).

        Inside a program of your own (jax.jit, lax.scan) it is a pure function: nothing is donated,
        and a step that is not finite is told by metrics["finite"] alone.

        Args:
            state: The state from `hfjax.init`, `hfjax.restore` or the call before. It is donated.
                Where another schedule has stored its layers, they are rearranged first.
            batch: Pytree of arrays with the same number of rows. Rows have to divide by devices
                times microbatches. With several processes, each gives its own rows.

        Raises:
            FloatingPointError: An earlier step, the last two aside, was not finite, and `nonfinite`
                of the execution does not skip it.
        """
        if is_traced((state, batch)):
            return self._within(state, batch)
        check_alive(state)
        self._watch.check(state)
        batch = on_devices(self.layout, batch, microbatches_of(self.execution))
        try:
            given = self._with_scale(self._follow(self._in_order(state)))
            state, metrics, squares = self._jitted(given, batch)
        except (TypeError, ValueError):
            check_stored(self.layout, state)
            self._check_memory(state)
            check_place(self.layout, state)
            raise
        self._watch.add(metrics, squares)
        return self._follow.made(replace(state, order=self._order)), metrics

    def _within(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """Return what a step returns, within a program that is being traced."""
        check_alive(state)
        check_batch(self.layout, batch, microbatches_of(self.execution))
        given = self._with_scale(replace(state, order=None))
        new, metrics, _ = self._nested(given, batch, state.order)
        scale = new.scale if self._loss_scale else state.scale
        return replace(new, order=state.order, scale=scale), metrics

    @cached_property
    def _nested(self) -> jax.stages.Wrapped:
        """The program that runs within others: it is given the order in which layers are stored.

        It cannot be looked at while it is traced. A state that another schedule has arranged counts
        as one that is not finite: its loss is NaN, and it stays as it is.
        """
        wanted = self.layout.order

        def step(state: State, batch: Any, order: Any) -> tuple:
            same = True if wanted is None else (order == wanted).all()
            return self._step(self._follow.within(state), batch, same)

        return self._program(step, self._whole)

    def _with_scale(self, state: State) -> State:
        """Return the state with the loss scale that this step needs, or without one."""
        if (settings := self._loss_scale) is None:
            return replace(state, scale=None)
        return state if state.scale is not None else self._begun(state, settings)

    def _begun(self, state: State, settings: LossScale) -> State:
        """Return the state with the scale of a run that begins; of one that goes on, tell it."""
        if not is_traced(state) and int(state.step) > 0:
            warnings.warn(
                f"this state of step {int(state.step)} has no loss scale: it begins at "
                f"{settings.initial:g}.",
                UserWarning,
                stacklevel=4,
            )
        put = lambda x: jnp.asarray(x) if is_traced(state) else jax.device_put(x, self._whole)
        return replace(state, scale=jax.tree.map(put, fresh(settings)))

    def _check_memory(self, state: State) -> None:
        """Refuse a state that lies in other memory than the layout says."""
        shardings = jax.tree.leaves((self._shardings.params, self._shardings.optimizer))
        held = jax.tree.leaves((state.params, state.optimizer))
        for x, where in zip(held, shardings, strict=True):
            if is_host_sharding(x.sharding) != is_host_sharding(where):
                raise ValueError(
                    f"this state lies in {x.sharding.memory_kind} memory where the layout "
                    f"({self.layout.strategy.name}) has {where.memory_kind}. Move it: "
                    "jax.device_put(state, layout.shardings()), or restore it with this layout."
                )

    @cached_property
    def _order(self) -> jax.Array | None:
        """The order in which this step stores layers, on the devices that it runs on."""
        order = self.layout.order
        return None if order is None else jax.device_put(order, self._whole)

    def _in_order(self, state: State) -> State:
        """Return the state as this step stores layers (rearranged if it came otherwise)."""
        if state.order is not self._order:
            state = rearrange(self.layout, state)
        return replace(state, order=None)

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
            >>> hfjax.transfers(traced).total()  # nothing goes to the host
            0
        """
        check_batch(self.layout, batch, microbatches_of(self.execution))
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._batch)
        settings = self._loss_scale
        scale = settings and jax.eval_shape(lambda: jax.tree.map(jnp.asarray, fresh(settings)))
        state = replace(self.layout.abstract_state(), order=None, scale=scale)
        return self._jitted.trace(state, jax.tree.map(shape, batch))

    @property
    def plane(self) -> Plane:
        """What runs the model forward and backward on each device."""
        return self._update.plane

    @property
    def offloaded(self) -> Offloaded:
        """What layers keep for the backward pass and what of it goes to the host: print it.

        Known once the step is traced: after `trace`, `lower` or the first call.
        """
        return self.plane.context.traced.offloaded

    @property
    def kernels(self) -> build.Kernels:
        """Which form each kernel of the step takes, and why: print it. Known once it is traced."""
        return self._made_of.kernels

    @property
    def context(self) -> ContextChoice | None:
        """How devices that share rows work together, and what each form sends: print it.

        Known once the step is traced; None where no devices share rows.
        """
        return choice_along_rows(self.plane.context.traced.kernels)

    @property
    def dtypes(self) -> DtypesByPath:
        """In which dtypes each parameter is computed with, gathered and reduced: print it."""
        at, placed = self.execution.precision.at, self.layout.placed
        return DtypesByPath({path: at(path).of(p.dtype) for path, p in placed.items()})

    @property
    def experts(self) -> Any:
        """How tokens get to experts on other devices, and what each way sends: print it.

        Known once the step is traced; None where no experts are spread.
        """
        return self._made_of.experts.choice

    @property
    def rows(self) -> Joins:
        """What joins rows in the model and the loss, where, and what is sent for it: print it.

        Known once the step is traced.
        """
        return Joins(tuple(self.plane.context.traced.rows.joins))

    @property
    def positions(self) -> Joins:
        """What joins positions of rows that devices share, beside attention: print it.

        Known once the step is traced.
        """
        return Joins(tuple(self.plane.context.traced.rows.joins_inner), "positions")

    def check(self, state: State) -> None:
        """Wait for the steps given so far; raise FloatingPointError if one was not finite.

        Under `nonfinite="skip"` it warns instead, unless it was one too many in a row (`patience`).

        Args:
            state: The state that the last call returned: the message says whether its parameters
                are finite.
        """
        check_is_state(state)
        self._watch.check(state, lag=0)

    def __repr__(self) -> str:
        where = f"{self.layout.strategy.name} on {describe_mesh(self.layout.mesh)}"
        context = self.plane.context
        layers = ""
        if isinstance(self.plane, AutodiffPlane) and context.in_parts:
            blueprint = context.blueprint
            how = told(context.options, blueprint.number_of_layers, blueprint.listed)
            layers = f", layers {how}"
        return f"TrainStep({where}{layers}, {self.execution})"

    # -- the program ----------------------------------------------------------------------

    def _seeing(self, variables: Flat, batch: Any) -> Update:
        """Return the way in which the state is updated, once a look at the model has told."""
        if seen := look(self.plane, self.layout.blueprint, variables, batch, "train"):
            self._update = build.update_of(self._made_of, seen)
        return self._update

    def _step(self, state: State, batch: Any, fits: Any = True) -> tuple[State, Metrics, Flat]:
        """Return the next state, metrics and the squares of gradients; none if it does not fit."""
        check_form(self.layout, state)
        check_batch(self.layout, batch, microbatches_of(self.execution))
        if (settings := self._loss_scale) and state.scale:
            state = replace(state, scale=within(settings, state.scale))
        params, variables = flatten(state.params), flatten(state.variables)
        with calling(self.layout, batch):
            found = self._seeing(variables, batch)(state, batch)
        metrics = {"loss": found.mean.total / found.mean.weight, "grad_norm": found.norm}
        metrics |= metrics_of(found.mean)
        if fits is not True:
            metrics["loss"] = jnp.where(fits, metrics["loss"], jnp.nan)
        metrics["finite"] = jnp.isfinite(metrics["loss"]) & jnp.isfinite(found.norm)
        metrics["step"] = state.step
        scale = None
        if (settings := self._loss_scale) and state.scale:
            scale, told = after_step(settings, state.scale, metrics["loss"], metrics["finite"])
            metrics |= told
        if not self.layout.hosted.parameters:
            params = constrain(params, self.layout.placed)
        held = Held(params, state.optimizer, {path: variables[path] for path in found.variables})
        new = found.update(held, metrics["finite"])
        variables |= new.variables
        changed, metrics = self.layout.blueprint.after_step(variables, metrics)
        old = {path: variables[path] for path in changed}
        variables |= guard(self.execution.nonfinite, metrics["finite"], changed, old)
        params = nest(new.parameters)
        after = State(state.step + 1, params, new.optimizer, nest(variables), scale=scale)
        return after, metrics, found.squares


def module(layout: Layout, state: State) -> Any:
    """Return the model as `model_init` makes it, with the parameters and variables of a state.

    It is whole, on one device, and knows nothing of the mesh: call it, save it, hand it on, train
    it in a loop of your own (`nnx.Optimizer`). A bare pytree comes back as its own tree.

    Args:
        layout: The layout under which the state was made, trained or restored.
        state: The state; it is not donated. Layers may be stored for any schedule.

    Example:
        >>> import hfjax, numpy as np, optax
        >>> from flax import nnx
        >>> model = lambda rngs: nnx.Linear(8, 4, rngs=rngs)
        >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(fsdp=8), hfjax.FSDP)
        >>> linear = hfjax.module(layout, hfjax.init(layout))
        >>> type(linear).__name__, linear(np.ones((2, 8), np.float32)).shape
        ('Linear', (2, 4))
    """
    check_takes("module", layout, state)
    state = rearrange(layout.as_the_model, state)
    check_form(layout.as_the_model, state, optimizer=False)
    whole = lambda tree: {path: jnp.asarray(x) for path, x in flatten(full(tree)).items()}
    return layout.blueprint.merge(whole(state.params), whole(state.variables), "model")
