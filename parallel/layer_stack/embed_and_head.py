"""The ends of a layer-stack model: `embed` and `head`, on a device's examples."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from hfjax.parallel.adapters.model_template import LAYERS, ModelTemplate, Placeholder
from hfjax.parallel.layer_stack.batch_split import chunk_value, slice_chunk
from hfjax.parallel.spmd.global_batch import GlobalBatch
from hfjax.utils.paths import Flat


@dataclass(frozen=True)
class EmbedAndHead:
    """Runs `embed` and `head` of a model, whose layers are elsewhere.

    What they read, `outside`, is unsharded by the caller.
    """

    template: ModelTemplate
    mode: str
    global_batch: GlobalBatch

    def model(self, outside: Flat, variables: Flat) -> Any:
        """Return the model with the arrays outside of its layers."""
        layers = [path for path in self.template.parameters if path.startswith(LAYERS)]
        parameters = outside | {path: Placeholder(path) for path in layers}
        return self.template.merge(parameters, variables, self.mode)

    def run(self, name: str, outside: Flat, variables: Flat, x: Any) -> tuple[Any, Flat]:
        """Return the distributed output of `embed` or `head`, and the variables after it."""

        def run(outside: Flat, variables: Flat, x: Any) -> tuple[Any, Flat]:
            model = self.model(outside, variables)
            y = getattr(model, name)(x)
            if name == "embed":
                y = cast_entry(
                    y,
                    lambda outside: self.model(outside, variables).embed(x),
                    outside,
                    self.global_batch.input_dtype,
                )
            return y, variables | self.template.model_variables(model)

        before = self.global_batch.variable_values(variables, self.template.variables)
        outer_params = self.global_batch.parameter_values(outside, self.template.parameters)
        y, after = self.global_batch.run(name, run, outer_params, before, x)
        return y, self.global_batch.local_variables(before, after, name)

    def embed_chunk(self, outside: Flat, variables: Flat, batch: Any, count: int) -> Any:
        """Return the output of `embed` for the first of `count` chunks of this device's batch."""
        templates = self.template.variables
        chunk_variables = {
            path: chunk_value(templates[path], x, 0, count) for path, x in variables.items()
        }
        inputs = jax.tree.map(lambda x: slice_chunk(x, 0, count), batch)
        fresh = replace(
            self,
            global_batch=replace(self.global_batch, component_comms={}, inner_component_comms={}),
        )
        return fresh.run("embed", outside, chunk_variables, fresh.global_batch.as_sharded(inputs))[
            0
        ]


def cast_entry(x: Any, embed: Callable, parameters: Flat, dtype: DTypeLike | None) -> Any:
    """Return the first layer's input in the dtype it has if all parameters have `dtype`.

    Args:
        x: What `embed(parameters)` returned.
        embed: Function of the parameters.
        parameters: In the dtypes of a precision by path.
        dtype: That of paths that it does not name; None: there is no such precision.
    """
    if dtype is None:
        return x
    is_float = lambda a: jnp.issubdtype(a.dtype, jnp.floating)
    uniform = lambda a: jax.ShapeDtypeStruct(a.shape, dtype if is_float(a) else a.dtype)
    like = jax.eval_shape(embed, jax.tree.map(uniform, parameters))
    return jax.tree.map(lambda x, like: x.astype(like.dtype), x, like)
