"""Costs of the layers of a list, so that stages can be given equal shares; FLOPs of a program."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Jaxpr

from hfjax.parallel.jaxprs.primitives import VIEWS
from hfjax.parallel.jaxprs.walk import bodies_of, name_of

# Equations that only move data.
_MOVES = VIEWS.union("broadcast_in_dim slice pad concatenate convert_element_type".split())


def parameter_costs(layers: Sequence[Any]) -> list[int]:
    """Return the bytes of each layer's parameters (modules of arrays or shapes; functions).

    >>> parameter_costs([nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.relu])
    [160, 0]
    """
    return [_bytes(layer) if isinstance(layer, nnx.Module) else 0 for layer in layers]


def _bytes(layer: nnx.Module) -> int:
    arrays = [v.get_raw_value() for _, v in nnx.to_flat_state(nnx.state(layer, nnx.Param))]
    return sum(math.prod(a.shape) * jnp.dtype(a.dtype).itemsize for a in arrays)


def flop_costs(layers: Sequence[Any], x: Any, give: str = "an example") -> list[int]:
    """Return the floating-point operations of each layer's forward pass; `x` enters the first.

    Shapes suffice; `give` says how to give them. Backward passes cost a multiple of that, the same
    for all but cheap layers. Counted in the jaxpr, without compiling: each loop iteration counts, a
    conditional costs its most expensive branch, and the inside of a custom call is not seen.

    >>> flop_costs([nnx.Linear(4, 8, use_bias=False, rngs=nnx.Rngs(0)), nnx.relu], jnp.ones((2, 4)))
    [128, 16]
    """
    if x is None:
        raise ValueError(
            f'balance="flops" counts what each layer computes: give {give}; shapes will do. Or use '
            'balance="parameters", or the number of layers of each part.'
        )
    return [jaxpr_flops(jaxpr) for jaxpr, _ in _trace_layers(layers, x)]


def output_shapes(layers: Sequence[Any], x: Any) -> list[Any]:
    """Return the shapes and dtypes of each layer's output; `x` enters the first."""
    return [shape for _, shape in _trace_layers(layers, x)]


def _trace_layers(layers: Sequence[Any], x: Any) -> Iterator[tuple[Jaxpr, Any]]:
    """Yield the jaxpr of each layer, and the shapes and dtypes of its output."""
    for layer in layers:
        function, arrays = _as_function(layer)
        traced, x = jax.make_jaxpr(function, return_shape=True)(arrays, x)
        yield traced.jaxpr, x


def _as_function(layer: Any) -> tuple[Any, Any]:
    if not isinstance(layer, nnx.Module):
        return lambda _, x: layer(x), ()
    graph, state = nnx.split(layer)
    return lambda state, x: nnx.merge(graph, state)(x), state


def jaxpr_flops(jaxpr: Jaxpr) -> int:
    """Return the floating-point operations of a program, counted as `flop_costs` does.

    >>> jaxpr_flops(jax.make_jaxpr(jnp.dot)(jnp.ones((2, 3)), jnp.ones((3, 4))).jaxpr)
    48
    """
    return sum(_equation_flops(equation) for equation in jaxpr.eqns)


def _equation_flops(equation: Any) -> int:
    name, params = name_of(equation), equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        depth = math.prod(equation.invars[0].aval.shape[i] for i in contracted)
        return 2 * depth * equation.outvars[0].aval.size
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval
        outputs = kernel.shape[params["dimension_numbers"].rhs_spec[0]]
        return 2 * equation.outvars[0].aval.size * (kernel.size // outputs)
    inner = [jaxpr_flops(body) for body, _ in bodies_of(equation)]
    if not inner:
        floats = (v.aval for v in equation.outvars if jnp.issubdtype(v.aval.dtype, jnp.inexact))
        return 0 if name in _MOVES else sum(x.size for x in floats)  # results of arithmetic
    if name == "cond":
        return max(inner)
    return sum(inner) * params.get("length", 1)
