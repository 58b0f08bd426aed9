"""A layer-stack model, run forward: JAX differentiates it."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from hfjax.parallel.adapters.model_template import LAYERS
from hfjax.parallel.engine.local_outputs import local_outputs
from hfjax.parallel.engine.step_context import StepContext, num_examples
from hfjax.parallel.engine.unshard import ShardedParam, unshard
from hfjax.parallel.layer_stack.batch_split import BatchChunks
from hfjax.parallel.layer_stack.embed_and_head import EmbedAndHead
from hfjax.parallel.layer_stack.run_layers import run_layers
from hfjax.utils.paths import Flat


@dataclass(frozen=True)
class LayerStackModel:
    """A layer-stack model: each device's examples go through embed, layers and head."""

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
        context, options = self.context, self.context.options
        layer_params = {p: x for p, x in params.items() if p.startswith(LAYERS)}
        outside = unshard({path: x for path, x in params.items() if path not in layer_params})
        ends = EmbedAndHead(context.template, mode, context.trace.global_batch)
        inputs, num_chunks = context.cast_inputs(batch), options.execution.tensor_overlap_chunks
        x, variables = ends.run(
            "embed", outside, variables, context.trace.global_batch.as_sharded(inputs)
        )
        if num_chunks > 1:
            embed_chunk = partial(ends.embed_chunk, outside, variables, inputs)
            # On CPUs XLA runs independent operations in an order that differs by device, and
            # collectives of one chunk are then matched with those of another.
            in_order = options.platform == "cpu"
            x = BatchChunks.of(x, num_examples(batch), num_chunks, embed_chunk, in_order=in_order)
        model = ends.model(outside, variables)
        x = run_layers(model.layers, layer_params, x, options)
        variables = variables | context.template.model_variables(model)
        x = x.concat() if isinstance(x, BatchChunks) else x
        outputs, variables = ends.run("head", outside, variables, x)
        mean = context.mean(outputs, batch) if "loss" in returns else None
        if "outputs" not in returns:
            return mean, None, variables
        if mode == "train":
            outputs = local_outputs(context.trace.global_batch, outputs, num_examples(batch))
        return mean, outputs, variables
