"""The ends of a layer-stack model: `embed` and `head`, on a device's examples."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from hfjax.parallel.adapters.model_template import LAYERS, ModelTemplate, Placeholder
from hfjax.parallel.layer_stack.batch_split import chunk_value, slice_chunk
from hfjax.parallel.spmd.global_batch import GlobalBatch
from hfjax.parallel.spmd.partition_context import PureFunction
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
        return _merge_outside(self.template, self.mode, outside, variables)

    def run(self, name: str, outside: Flat, variables: Flat, x: Any) -> tuple[Any, Flat]:
        """Return the distributed output of `embed` or `head`, and the variables after it."""
        call = MethodCall(self.template, self.mode, name, self.global_batch.input_dtype)
        before = self.global_batch.variable_values(variables, self.template.variables)
        outer_params = self.global_batch.parameter_values(outside, self.template.parameters)
        y, after = self.global_batch.run(name, call, outer_params, before, x)
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


@dataclass(frozen=True)
class MethodCall(PureFunction):
    """Calls `embed` or `head`: (outside, variables, x) -> (output, variables after it)."""

    template: ModelTemplate
    mode: str
    method: str
    input_dtype: Any  # of the first layer; None: as it is

    def __call__(self, outside: Flat, variables: Flat, x: Any) -> tuple[Any, Flat]:
        merge = partial(_merge_outside, self.template, self.mode)
        model = merge(outside, variables)
        y = getattr(model, self.method)(x)
        if self.method == "embed":
            embed = lambda outside: merge(outside, variables).embed(x)
            y = cast_entry(y, embed, outside, self.input_dtype)
        return y, variables | self.template.model_variables(model)


def _merge_outside(template: ModelTemplate, mode: str, outside: Flat, variables: Flat) -> Any:
    """Return the model with the arrays outside of its layers."""
    layers = [path for path in template.parameters if path.startswith(LAYERS)]
    parameters = outside | {path: Placeholder(path) for path in layers}
    return template.merge(parameters, variables, mode)


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
