"""A model that is called as it is, as a step runs it: on the rows of all devices."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hfjax.parallel.adapters.forward_signature import TRAIN, asked_by, variable_of
from hfjax.parallel.engine.step_context import StepContext
from hfjax.parallel.engine.unshard import Stored
from hfjax.parallel.whole_model.unshard_on_use import gather_on_use
from hfjax.utils.paths import Flat


@dataclass(frozen=True)
class CalledAsItIs:
    """A model whose own program is run, in parts: it and the loss see all rows."""

    context: StepContext

    def run(
        self, stored: dict[str, Stored], variables: Flat, batch: Any, mode: str, wants: str = "loss"
    ) -> tuple[Any, Flat]:
        """Return the loss, or the outputs, as values, and the variables after it."""
        context = self.context

        def call(parameters: Flat, variables: Flat, batch: Any) -> tuple[Any, Flat]:
            model = context.blueprint.merge(parameters, variables, mode)
            outputs = called(context.forward, model, variables, context.inputs(batch), mode)
            value = outputs if wants == "outputs" else context.mean_of_rows(outputs, batch)
            return value, variables | context.blueprint.variables_of(model)

        rows, templates = context.traced.rows, context.blueprint.variables
        given, told = rows.of_variables(variables, templates), rows.telling("the model")
        side, with_rows = context.side, rows.values(batch)
        whole, parameters = rows.within("the model", call), context.blueprint.parameters
        here = lambda held, *more: whole(rows.of_parameters(held, parameters), *more)
        found, changed = gather_on_use(here, stored, given, with_rows, side=side, told=told)
        return found, rows.written(given, changed, "the model")


def called(forward: Callable | None, model: Any, variables: Flat, inputs: Any, mode: str) -> Any:
    """Return the outputs of a model that is called as it is, or by the layout's `forward`."""
    if forward is None:
        return model(inputs) if callable(model) else model
    training = mode == "train"
    key = lambda name: variables[variable_of(name)] if training else None
    asked = {n: training if n == TRAIN else key(n) for n in asked_by(forward)}
    return forward(model, inputs, **asked)
