"""What of a model in three parts lies around its layers: `embed` and `head`, on rows."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from hfjax.parallel.adapters.model_template import LAYERS, Blueprint, Placeholder
from hfjax.parallel.layer_stack.batch_split import of_part, part_of
from hfjax.parallel.spmd.global_batch import OnRows
from hfjax.utils.paths import Flat


@dataclass(frozen=True)
class Ends:
    """Runs `embed` and `head` of a model, whose layers are elsewhere.

    What they read, `outside`, is whole: whoever calls has fetched it.
    """

    blueprint: Blueprint
    mode: str
    rows: OnRows

    def model(self, outside: Flat, variables: Flat) -> Any:
        """Return the model with what lies outside of its layers."""
        layers = [path for path in self.blueprint.parameters if path.startswith(LAYERS)]
        parameters = outside | {path: Placeholder(path) for path in layers}
        return self.blueprint.merge(parameters, variables, self.mode)

    def run(self, name: str, outside: Flat, variables: Flat, x: Any) -> tuple[Any, Flat]:
        """Return the values that `embed` or `head` makes of values, and the variables after it."""

        def run(outside: Flat, variables: Flat, x: Any) -> tuple[Any, Flat]:
            model = self.model(outside, variables)
            y = getattr(model, name)(x)
            if name == "embed":
                y = entering(
                    y,
                    lambda outside: self.model(outside, variables).embed(x),
                    outside,
                    self.rows.enters,
                )
            return y, variables | self.blueprint.variables_of(model)

        before = self.rows.of_variables(variables, self.blueprint.variables)
        given = self.rows.of_parameters(outside, self.blueprint.parameters)
        y, after = self.rows.run(name, run, given, before, x)
        return y, self.rows.written(before, after, name)

    def embed_of_part(self, outside: Flat, variables: Flat, batch: Any, count: int) -> Any:
        """Return what `embed` makes of the first of so many parts of the rows here."""
        templates = self.blueprint.variables
        held = {path: of_part(templates[path], x, 0, count) for path, x in variables.items()}
        inputs = jax.tree.map(lambda x: part_of(x, 0, count), batch)
        again = replace(self, rows=replace(self.rows, told={}, told_inner={}))
        return again.run("embed", outside, held, again.rows.values(inputs))[0]


def entering(x: Any, embed: Callable, parameters: Flat, dtype: DTypeLike | None) -> Any:
    """Return what enters the first layer as it is where all parameters have this dtype.

    Args:
        x: What `embed(parameters)` returned.
        embed: Function of the parameters.
        parameters: In the dtypes that precision by path says.
        dtype: That of all that it does not name; None: there is no such precision.
    """
    if dtype is None:
        return x
    floats = lambda a: jnp.issubdtype(a.dtype, jnp.floating)
    alone = lambda a: jax.ShapeDtypeStruct(a.shape, dtype if floats(a) else a.dtype)
    like = jax.eval_shape(embed, jax.tree.map(alone, parameters))
    return jax.tree.map(lambda x, like: x.astype(like.dtype), x, like)
