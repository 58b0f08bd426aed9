"""Rules of elementwise equations, and of those that are linear in partial sums."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import JaxprEqn

from hfjax.parallel.jaxprs.primitives import ADDS, LINEAR_MAPS
from hfjax.parallel.jaxprs.walk import name_of
from hfjax.parallel.spmd.partition_context import PartitionContext, aval_of
from hfjax.parallel.spmd.placements import (
    LazyValue,
    PartialValue,
    ShardedValue,
    Split,
    from_local,
    is_distributed,
    placement_of,
)

Values = Sequence[Any]


def pointwise(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values | None:
    """Run on shards, or defer lazy values; partial sums stay partial where that is linear."""
    sharded = [v for v in values if isinstance(v, ShardedValue)]
    name = name_of(equation)
    if not sharded and any(not ctx.is_replicated(v) for v in values if isinstance(v, PartialValue)):
        partials = _apply_to_partials(ctx, equation, name, values)
        if partials is not None:
            return partials
    if sharded:
        split = max(sharded, key=lambda v: v.x.size * v.x.dtype.itemsize).split
        if split.dim >= len(aval_of(equation.outvars[0]).shape):  # a bitcast merges it
            return None
        operands = [ctx.shard_for_broadcast(v, split) for v in values]
        return [ShardedValue(x, split) for x in ctx.bind(equation, operands)]
    if any(isinstance(v, LazyValue) for v in values):
        return _defer(
            ctx, equation, [ctx.replicate(v) if isinstance(v, PartialValue) else v for v in values]
        )
    return ctx.bind(equation, list(map(ctx.replicate, values)))


def barrier(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values:
    """Apply the barrier to the local arrays."""
    operands = list(map(ctx.materialize, values))
    outs = ctx.bind(equation, [v.x if is_distributed(v) else v for v in operands])
    return [from_local(x, placement_of(v)) for x, v in zip(outs, operands, strict=True)]


def _defer(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values:
    """Return lazy outputs; compute them now if an operand of the output's shape is not lazy."""
    shape = aval_of(equation.outvars[0]).shape
    has_full_operand = any(not isinstance(v, LazyValue) and jnp.shape(v) == shape for v in values)
    if has_full_operand or ctx.find_split(shape) is None:
        return ctx.bind(equation, list(map(ctx.replicate, values)))

    def make(number: int) -> Callable:
        def make_output(ctx: PartitionContext, split: Split | None) -> Any:
            convert = (
                ctx.replicate if split is None else lambda v: ctx.shard_for_broadcast(v, split)
            )
            return ctx.bind(equation, list(map(convert, values)))[number]

        return make_output

    all_constant = all(is_constant(v) for v in values)
    return [
        LazyValue(out.shape, out.dtype, make(i), all_constant)
        for i, out in enumerate(map(aval_of, equation.outvars))
    ]


def is_constant(value: Any) -> bool:
    """Return whether a value depends on nothing but constants of the program."""
    return (
        value.is_constant
        if isinstance(value, LazyValue)
        else jnp.ndim(value) == 0 and is_known(value)
    )


def is_known(x: Any) -> bool:
    """Return whether a number is known at trace time."""
    return not isinstance(x, Tracer) and not is_distributed(x)


def _apply_to_partials(
    ctx: PartitionContext, equation: JaxprEqn, name: str, values: Values
) -> Values | None:
    """Return partial sums where the equation is linear in them; None: all-reduce them first."""
    bind = lambda *arrays: [PartialValue(x) for x in ctx.bind(equation, arrays)]
    if name in LINEAR_MAPS or (name == "convert_element_type" and is_linear_conversion(equation)):
        return bind(values[0].x)
    if name in ADDS:
        return bind(*map(ctx.as_partial, values))
    if name == "mul":
        a, b = values
        factor_is_first = not isinstance(a, PartialValue) or (
            isinstance(b, PartialValue) and not ctx.is_replicated(b)
        )
        factor, partial_operand = (a, b) if factor_is_first else (b, a)
        factor = ctx.replicate(factor)
        is_nonfinite = (
            is_known(factor) and not np.isfinite(factor).all()
        )  # it makes NaN of a term of 0
        if is_nonfinite or ctx.is_replicated(partial_operand):  # both are all-reduced, or the same
            return None
        return (
            bind(factor, partial_operand.x) if factor_is_first else bind(partial_operand.x, factor)
        )
    is_real = jnp.issubdtype(aval_of(equation.outvars[0]).dtype, jnp.inexact)
    if (
        name == "div"
        and is_real
        and isinstance(values[0], PartialValue)
        and not ctx.is_replicated(values[0])
    ):
        return bind(values[0].x, ctx.replicate(values[1]))
    if name == "select_n" and not isinstance(values[0], PartialValue):
        return bind(ctx.replicate(values[0]), *map(ctx.as_partial, values[1:]))
    return None


def is_linear_conversion(equation: JaxprEqn) -> bool:
    """Return whether converting the terms of a sum converts the sum."""
    old, new = aval_of(equation.invars[0]).dtype, aval_of(equation.outvars[0]).dtype
    if not jnp.issubdtype(old, jnp.inexact):  # counts; small and unsigned ones wrap around
        is_wide_int = jnp.issubdtype(old, jnp.signedinteger) and old.itemsize >= 4
        return is_wide_int and (jnp.issubdtype(new, jnp.inexact) or new.itemsize >= old.itemsize)
    return jnp.issubdtype(new, jnp.inexact) and new.itemsize >= old.itemsize
