"""Rules of what reaches out of a program: collectives of the user's own, and callbacks."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import DropVar, JaxprEqn

from hfjax.parallel.spmd.partition_context import Join, Scope, aval_of
from hfjax.parallel.spmd.placements import Part, Sum, held

Values = Sequence[Any]


def axes_of(equation: JaxprEqn) -> tuple[Any, ...]:
    """Return the axes over which an equation communicates."""
    axes = equation.params.get("axes", equation.params.get("axis_name", ()))
    return tuple(axes) if isinstance(axes, tuple | list) else (axes,)


def collective(scope: Scope, equation: JaxprEqn, values: Values) -> Values | None:
    """Run a collective of the user's own: over an axis of rows it sees one device with all rows."""
    axes = axes_of(equation)
    named = tuple(axis for axis in axes if isinstance(axis, str))
    if len(named) == len(axes):
        return _over_names(scope, equation, values, named)
    dims = tuple(axis for axis in axes if not isinstance(axis, str))
    values = [_over_dimensions(scope, equation, v, dims) for v in values]
    return _over_names(scope, equation, values, named) if named else values


def _over_names(
    scope: Scope, equation: JaxprEqn, values: Values, axes: tuple[str, ...]
) -> Values | None:
    """Return what a collective over these axes of the mesh makes."""
    name = equation.primitive.name
    rest = tuple(a for a in axes if a not in scope.side.axes and lax.axis_size(a) > 1)
    if not any(axis in scope.side.axes for axis in axes):
        if name == "axis_index":
            return scope.bind(equation, values)
        kept = _keeps_rows(equation, values)
        sizes = {"axes": axes} if "axes" in equation.params else {}
        return _elsewhere(scope, equation, values, **sizes) if kept else None
    if name in _SUMS:
        scope.told.append(_alone(scope, equation))
        values = [scope.whole(v) if isinstance(v, Sum) else v for v in values]
        return _elsewhere(scope, equation, values, axes=rest) if rest else values
    return None if rest else _of_one_device(scope, equation, values)


def _over_dimensions(scope: Scope, equation: JaxprEqn, value: Any, dims: tuple[int, ...]) -> Any:
    """Return what a collective makes of dimensions: they are those of a `vmap` with a name."""
    bind = lambda x: scope.bind(equation, [x], axes=dims)[0]
    adds = equation.primitive.name == "psum"
    if isinstance(value, Part) and value.cut.dim not in dims:
        left = value.cut.dim - sum(d < value.cut.dim for d in dims)
        return Part(bind(value.x), value.cut.moved(left))
    if adds and isinstance(value, Part | Sum):
        return Sum(bind(value.x))
    return bind(scope.whole(value))


def _of_one_device(scope: Scope, equation: JaxprEqn, values: Values) -> Values:
    """Return what a collective other than a sum gives on one device."""
    name = equation.primitive.name
    scope.told.append(_alone(scope, equation))
    if values and not any(isinstance(v, Part) for v in values):
        raise ValueError(
            f"{scope.line}: lax.{name} over {', '.join(axes_of(equation))} of what has no rows: "
            "the model sees all rows, as on one device, so each device would be given the same. If "
            "devices hold something of their own there, run that part on each device's own rows: "
            "hfjax.own_rows(function)."
        )
    if name == "axis_index":
        return [jnp.zeros((), aval_of(equation.outvars[0]).dtype)]
    if name == "ppermute":
        return values
    if name == "all_gather":
        if equation.params["tiled"]:
            return values
        dim = equation.params["all_gather_dimension"]
        return [_with_dimension(scope, v, dim) for v in values]
    if equation.params.get("tiled", False):
        return values
    raise ValueError(
        f"{scope.line}: lax.{name} over {', '.join(axes_of(equation))}: the model and the loss see "
        "the rows of all devices, as on one device, so there is nothing to send. Leave it out, or "
        "run that part on each device's own rows: hfjax.own_rows(function)."
    )


_SUMS = ("psum", "pmax", "pmin", "pvary", "psum_invariant")
COLLECTIVES = (*_SUMS, "axis_index", "ppermute", "all_gather", "all_to_all", "reduce_scatter")


def _alone(scope: Scope, equation: JaxprEqn) -> Join:
    return Join(scope.line, equation.primitive.name, "alone", 0, scope.times)


def _elsewhere(scope: Scope, equation: JaxprEqn, values: Values, **sizes: Any) -> Values:
    linear = equation.primitive.name in ("psum", "pvary", "psum_invariant")
    given = [
        v if isinstance(v, Part) or (linear and isinstance(v, Sum)) else scope.whole(v)
        for v in values
    ]
    found = scope.bind(equation, list(map(held, given)), **sizes)

    def again(x: Any, value: Any) -> Any:
        if isinstance(value, Part):
            new = x.ndim > value.x.ndim and equation.params["all_gather_dimension"] <= value.cut.dim
            return Part(x, value.cut.moved(value.cut.dim + new))
        return Sum(x) if isinstance(value, Sum) else x

    return [again(x, v) for x, v in zip(found, given, strict=True)]


def _keeps_rows(equation: JaxprEqn, values: Values) -> bool:
    """Return whether a collective leaves the split dimension of its operands as it is."""
    p, names = equation.params, ("split_axis", "concat_axis", "all_gather_dimension")
    dims = [p[name] for name in (*names, "scatter_dimension") if name in p]
    parts = [v for v in values if isinstance(v, Part)]
    if equation.primitive.name == "all_gather" and not p["tiled"]:
        return True  # along a dimension of its own
    return not parts or (p.get("tiled", True) and all(v.cut.dim not in dims for v in parts))


def _with_dimension(scope: Scope, value: Any, dim: int) -> Part | jax.Array:
    if isinstance(value, Part):
        cut = value.cut
        return Part(jnp.expand_dims(value.x, dim), cut.moved(cut.dim + (dim <= cut.dim)))
    return jnp.expand_dims(scope.whole(value), dim)


def callback(scope: Scope, equation: JaxprEqn, values: Values) -> Values:
    """Call back once, with whole rows, where nothing comes of it."""
    given = list(map(scope.whole, values))
    if equation.primitive.name == "pure_callback":
        return scope.bind(equation, given)
    if any(not isinstance(v, DropVar) for v in equation.outvars):
        raise ValueError(
            f"{scope.line}: {equation.primitive.name} returns a value that the model uses. On "
            "several devices it would be called once on each, in any order. Use "
            "jax.pure_callback, or give the value with the batch."
        )
    nothing = lambda: [jnp.zeros(y.shape, y.dtype) for y in map(aval_of, equation.outvars)]
    called = lambda: list(scope.bind(equation, given))
    return lax.cond(scope.side.here == 0, called, nothing)


RULES: dict[str, Callable] = {
    **dict.fromkeys(COLLECTIVES, collective),
    **dict.fromkeys(("debug_callback", "debug_print", "pure_callback", "io_callback"), callback),
}
