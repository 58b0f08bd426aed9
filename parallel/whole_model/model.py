"""A whole model as a step runs it: on the global batch."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from hfjax.parallel.adapters.forward_signature import call_model
from hfjax.parallel.engine.local_outputs import local_outputs
from hfjax.parallel.engine.step_context import LossCall, StepContext, num_examples
from hfjax.parallel.engine.unshard import ShardedParam
from hfjax.parallel.spmd.partition_context import PureFunction
from hfjax.parallel.whole_model.unshard_on_use import unshard_on_use
from hfjax.utils.paths import Flat


@dataclass(frozen=True)
class WholeModel:
    """A model whose own program is partitioned: it and the loss see the global batch."""

    context: StepContext

    def run(
        self,
        params: dict[str, ShardedParam],
        variables: Flat,
        batch: Any,
        mode: str,
        returns: Collection[str] = ("loss",),
    ) -> tuple[Any, Any, Flat]:
        """Return the loss, the outputs (each None unless requested), the variables after it."""
        context = self.context
        bound_extra = context.trace.extra
        sharded_extra, extra_arrays = bound_extra.split() if bound_extra else ({}, ())

        call = ModelCall(context, mode, "loss" in returns, "outputs" in returns, bound_extra)
        global_batch, templates = context.trace.global_batch, context.template.variables
        variable_values, comms = (
            global_batch.variable_values(variables, templates),
            global_batch.start_comms("the model"),
        )
        group, inputs = context.batch_group, global_batch.as_sharded(batch)
        run_global, parameters = (
            global_batch.wrap_inner("the model", call),
            context.template.parameters,
        )
        run_local: Callable = run_global
        if global_batch.inner:
            run_local = lambda local_params, *more: run_global(
                global_batch.parameter_values(local_params, parameters), *more
            )
        arguments = variable_values, inputs, extra_arrays
        (mean, outputs), changed = unshard_on_use(
            run_local, params | sharded_extra, *arguments, group=group, comms=comms
        )
        if mode == "train":
            outputs = local_outputs(global_batch, outputs, num_examples(batch))
        changed = global_batch.local_variables(variable_values, changed, "the model")
        return mean, outputs, changed


@dataclass(frozen=True)
class ModelCall(PureFunction):
    """Calls a whole model and the loss: ((Mean or None, outputs or None), variables after it)."""

    context: StepContext
    mode: str
    with_loss: bool
    with_outputs: bool
    bound_extra: Any  # as a device has it: which of its arrays are sharded

    def __call__(
        self, parameters: Flat, variables: Flat, batch: Any, extra_arrays: Any
    ) -> tuple[Any, Flat]:
        context, template = self.context, self.context.template
        extra = self.bound_extra and self.bound_extra.join(parameters, extra_arrays)
        own = {path: x for path, x in parameters.items() if path in template.parameters}
        model, inputs = template.merge(own, variables, self.mode), context.cast_inputs(batch)
        outputs = call_model(context.forward, model, variables, inputs, self.mode, extra)
        mean = LossCall(context.loss)(outputs, batch, extra) if self.with_loss else None
        requested = mean, outputs if self.with_outputs else None
        return requested, variables | template.model_variables(model)
