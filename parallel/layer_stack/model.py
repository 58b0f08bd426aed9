"""A model in three parts, run forward whole: JAX differentiates it."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from hfjax.parallel.adapters.model_template import LAYERS
from hfjax.parallel.engine.step_context import StepContext, rows_of
from hfjax.parallel.engine.unshard import Stored, fetched
from hfjax.parallel.layer_stack.batch_split import RowParts
from hfjax.parallel.layer_stack.embed_and_head import Ends
from hfjax.parallel.layer_stack.run_layers import run_layers
from hfjax.utils.paths import Flat


@dataclass(frozen=True)
class InThreeParts:
    """A model in three parts: rows go through embed, layers and head, each on those here."""

    context: StepContext

    def run(
        self, stored: dict[str, Stored], variables: Flat, batch: Any, mode: str, wants: str = "loss"
    ) -> tuple[Any, Flat]:
        """Return the loss, or the outputs, as values, and the variables after it."""
        context, options = self.context, self.context.options
        in_layers = {p: x for p, x in stored.items() if p.startswith(LAYERS)}
        outside = fetched({path: x for path, x in stored.items() if path not in in_layers})
        ends = Ends(context.blueprint, mode, context.traced.rows)
        inputs, parts = context.inputs(batch), options.execution.split_rows
        x, variables = ends.run("embed", outside, variables, context.traced.rows.values(inputs))
        if parts > 1:
            again = partial(ends.embed_of_part, outside, variables, inputs)
            # XLA runs what is independent in an order that differs by device, on CPUs, and
            # collectives of one part then meet those of another.
            in_order = options.platform == "cpu"
            x = RowParts.of(x, rows_of(batch), parts, again, in_order=in_order)
        model = ends.model(outside, variables)
        x = run_layers(model.layers, in_layers, x, options)
        variables = variables | context.blueprint.variables_of(model)
        x = x.whole() if isinstance(x, RowParts) else x
        outputs, variables = ends.run("head", outside, variables, x)
        value = outputs if wants == "outputs" else context.mean(outputs, batch)
        return value, variables
