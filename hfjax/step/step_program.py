"""What a training step computes: all of it (`step`), or its halves (`gradients`, `apply`).

`TrainStep` jits these functions; here nothing is placed, donated or waited for.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from hfjax.checks.jax_errors import explain_errors
from hfjax.checks.probe_model import probe_model
from hfjax.optimizer_step.gradients import (
    Gradients,
    check_not_applied,
    check_same_arrays,
    compute_gradients,
)
from hfjax.optimizer_step.loss_scale import after_step, clip_scale
from hfjax.optimizer_step.update import (
    GradResult,
    UpdatableState,
    UpdateAfterGradients,
    constrain,
)
from hfjax.parallel.engine.example_keys import fold_number, is_random
from hfjax.parallel.engine.gradient_engine import GradientEngine
from hfjax.parallel.execution import Execution, guard
from hfjax.parallel.jaxprs.model_mesh import ModelMesh
from hfjax.sharding.check_state import check_state_shapes
from hfjax.sharding.layout import Layout, State
from hfjax.step import build
from hfjax.step.batches import check_batch, num_microbatches
from hfjax.step.extra_arrays import Extra, ExtraSpecs, check_extra
from hfjax.utils.keywords import is_int
from hfjax.utils.mean import Mean, mean_metrics
from hfjax.utils.paths import Flat, flatten, is_random_key, nest

Metrics = dict[str, Any]  # arrays, and outputs of the model where they are requested
RETURNS = ("losses", "outputs")  # what `gradients` returns among the metrics on request


class StepProgram:
    """The functions of a step, to be jitted."""

    def __init__(self, layout: Layout, loss: Callable, execution: Execution) -> None:
        self.spec, self.update, self.compiler_options = build.build_step(layout, loss, execution)
        self.layout, self.execution = self.spec.layout, self.spec.execution
        self.model_mesh = ModelMesh.of(self.layout.template.mesh_axes)

    def step(self, state: State, batch: Any, fits: Any = True) -> tuple[State, Metrics, Flat]:
        """Return next state, metrics and squares of gradients; the loss is NaN unless it `fits`."""
        self._check_extra(None)
        state = self._check(state, batch)
        with explain_errors(self.layout, batch, self.model_mesh):
            probe_model(self.update.engine, flatten(state.variables), batch, "train")
            grads = self.update(state, batch)
        return self._finish(state, grads, fits)

    def gradients(
        self,
        extra_specs: ExtraSpecs | None,
        returns: tuple[str, ...],
        state: State,
        batch: Any,
        order: Any,
        fold: Any,
        extra: Any,
    ) -> tuple[Gradients, Metrics]:
        """Return gradients, and metrics with what `returns` names.

        The loss is NaN if `order` is not that of this step.
        """
        state = self._check(state, batch)
        variables, templates = flatten(state.variables), self.layout.template.variables
        state = replace(state, variables=nest(_fold_keys(templates, variables, fold)))
        with explain_errors(self.layout, batch, self.model_mesh):
            full_extra = extra_specs and Extra(extra)
            engine = self._probe_engine(variables, batch, full_extra, returns)
            grads, returned = compute_gradients(engine, state, batch, extra, extra_specs)
        mean = grads.mean
        if (fits := self.fits_order(order)) is not True:
            mean = replace(mean, total=jnp.where(fits, mean.total, jnp.nan))
        metrics = _loss_metrics(mean, grads.norm)
        metrics["finite"] = jnp.isfinite(metrics["loss"]) & jnp.isfinite(grads.norm)
        _check_no_metric(metrics, returns)
        # The mean of a batch of weight 0 is not finite; its sums are, and may be added to others.
        squares: Any = grads.squares
        finite = jnp.isfinite(mean.total) & jnp.isfinite(sum(squares.values()))
        sums = constrain(grads.sums, self.layout.param_specs)
        grads = replace(grads, sums=sums, mean=mean, finite=finite, order=self.order)
        return grads, metrics | {"step": state.step} | returned

    def apply(
        self, state: State, gradients: Gradients, fits: Any = True
    ) -> tuple[State, Metrics, Flat]:
        """Return next state, metrics and squares of gradients; the loss is NaN unless it `fits`."""
        check_state_shapes(self.layout, state)
        update, state = self.update, self._clip_scale(state)
        assert isinstance(update, UpdateAfterGradients), "check_fold, check_gradients refuse it"
        sums = constrain(gradients.sums, self.layout.param_specs)
        return self._finish(state, update.result(replace(gradients, sums=sums), state), fits)

    # -- checks ---------------------------------------------------------------------------------

    def check_fold(self, fold: Any) -> None:
        """Refuse what is no number to fold into keys, and a step without gradients to return."""
        self._check_has_halves()
        is_scalar = isinstance(fold, jax.Array) and not fold.ndim
        if not (is_scalar and jnp.issubdtype(fold.dtype, jnp.integer)) and not is_int(
            fold, 0, 2**31 - 1
        ):
            raise ValueError(
                f"step.gradients: fold={fold!r}; a whole number from 0 on is expected."
            )

    def check_returns(self, returns: Any) -> tuple[str, ...]:
        """Return the names of results of `gradients`, each once; refuse others."""
        is_list = isinstance(returns, Collection) and not isinstance(returns, str)
        if not is_list or any(name not in RETURNS for name in returns):
            raise ValueError(
                f"step.gradients: returns={returns!r}; a tuple of {', '.join(RETURNS)} is "
                'expected, for instance returns=("losses",).'
            )
        return tuple(dict.fromkeys(returns))

    def extra_specs(self, extra: Any) -> ExtraSpecs | None:
        """Return the specs of extra arrays; refuse any that nothing asks for."""
        self._check_extra(extra)
        return None if extra is None else ExtraSpecs.of(extra, self.layout.mesh)

    def _check_extra(self, extra: Any) -> None:
        check_extra(extra, {"the loss": self.spec.loss, "forward": self.layout.forward})

    def check_gradients(self, gradients: object) -> None:
        """Refuse what are no gradients of this step."""
        self._check_has_halves()
        if not isinstance(gradients, Gradients):
            raise ValueError(
                f"step.apply: hfjax.Gradients are expected, found {type(gradients).__name__}. "
                "step.gradients(state, batch) returns (gradients, metrics)."
            )
        check_not_applied(gradients)
        if unknown := sorted(gradients.variables.keys() - self.layout.template.variables.keys()):
            raise ValueError(
                f"step.apply: these gradients are of another model, which writes to {unknown[0]!r}."
            )
        if gradients.order != self.order:
            raise ValueError(
                "step.apply: these gradients store layers in another order than this step. Take "
                "them from this step, or from one with the same schedule."
            )
        param_specs = self.layout.param_specs.items()
        trainable = {path: p for path, p in param_specs if not p.frozen}
        check_same_arrays("step.apply", trainable, gradients.sums)

    def _check_has_halves(self) -> None:
        """Refuse a step in which there is no moment between the gradients and the update."""
        if isinstance(self.update, UpdateAfterGradients):
            return
        in_backward, schedule = self.execution.optimizer_in_backward, self.execution.schedule
        name = "optimizer_in_backward" if in_backward else f"schedule {schedule and schedule.name}"
        raise ValueError(
            f"{name}: layers are updated during the backward pass, so there is no moment between "
            "the gradients and the update. Call the step itself, or leave this out."
        )

    def _check(self, state: State, batch: Any) -> State:
        """Check a state and a batch; return the state as a pass uses it."""
        check_state_shapes(self.layout, state)
        check_batch(self.layout, batch, num_microbatches(self.execution))
        return self._clip_scale(state)

    # -- parts of a step ------------------------------------------------------------------------

    @cached_property
    def order(self) -> tuple[int, ...] | None:
        """The order in which this step stores layers; None: none are stacked."""
        order = self.layout.order
        return None if order is None else tuple(order.tolist())

    def fits_order(self, order: Any) -> Any:
        """Return whether this is the order in which this step stores layers; None: it is."""
        own_order = self.layout.order
        return True if order is None or own_order is None else (order == own_order).all()

    def _clip_scale(self, state: State) -> State:
        """Return the state with its loss scale clipped to the limits of this step."""
        if (settings := self.execution.precision.scale) and state.scale:
            return replace(state, scale=clip_scale(settings, state.scale))
        return state

    def _probe_engine(
        self, variables: Flat, batch: Any, extra: Extra | None, returns: tuple[str, ...]
    ) -> GradientEngine:
        """Return the engine of a pass with these results; outputs are logits, never factors."""
        spec = self.spec
        if "outputs" in returns and spec.kernels.without_logits:
            spec = spec._replace(kernels=replace(spec.kernels, without_logits=False))
            engine = build.probe_engine(spec, variables, batch, "train", extra)
        else:
            engine = self.update.engine
            probe_model(engine, variables, batch, "train", extra)
        return replace(engine, returns=returns)

    def _finish(
        self, state: State, grads: GradResult, fits: Any = True
    ) -> tuple[State, Metrics, Flat]:
        """Return next state, metrics and squares of gradients, given the result of a pass."""
        params, variables = flatten(state.params), flatten(state.variables)
        metrics = _loss_metrics(grads.mean, grads.norm)
        if fits is not True:
            metrics["loss"] = jnp.where(fits, metrics["loss"], jnp.nan)
        metrics["finite"] = jnp.isfinite(metrics["loss"]) & jnp.isfinite(grads.norm)
        if grads.finite is not True:
            metrics["finite"] &= grads.finite
        metrics["step"] = state.step
        scale = None
        if (settings := self.execution.precision.scale) and state.scale:
            scale, scale_metrics = after_step(
                settings, state.scale, metrics["loss"], metrics["finite"]
            )
            metrics |= scale_metrics
        if not self.layout.host_memory.parameters:
            params = constrain(params, self.layout.param_specs)
        old_state = UpdatableState(
            params, state.optimizer, {path: variables[path] for path in grads.variables}
        )
        new = grads.update(old_state, metrics["finite"])
        variables |= new.variables
        changed, metrics = self.layout.template.after_step(variables, metrics)
        old = {path: variables[path] for path in changed}
        variables |= guard(self.execution.on_nonfinite, metrics["finite"], changed, old)
        params = nest(new.parameters)
        after = State(state.step + 1, params, new.optimizer, nest(variables), scale=scale)
        return after, metrics, grads.squares


def _fold_keys(templates: Mapping[str, Any], variables: Flat, number: Any) -> Flat:
    """Return the variables with a number folded into their random keys; 0 leaves them."""
    is_key = lambda path, x: is_random(templates[path]) and is_random_key(x)
    fold = lambda x: jnp.where(number == 0, x, fold_number(x, number))
    return {path: fold(x) if is_key(path, x) else x for path, x in variables.items()}


def _check_no_metric(metrics: Metrics, returns: tuple[str, ...]) -> None:
    """Refuse results of `gradients` that have the name of a metric of the loss."""
    if names := [name for name in returns if name in metrics]:
        raise ValueError(
            f"step.gradients: returns={returns!r}, and the loss has a metric {names[0]!r}. Choose "
            "another name for that metric."
        )


def _loss_metrics(mean: Mean, norm: Any) -> Metrics:
    """Return the metrics of the loss, and the norm of the gradient."""
    return {"loss": mean.total / mean.weight, "grad_norm": norm} | mean_metrics(mean)
