"""Reads from the trace what a step saves in its forward pass for its backward pass.

Everything that the forward pass computes and the backward pass reads is saved: a trace tells the
passes apart by the names that `jax.grad` leaves. A loop over layers saves stacks, with an entry for
each layer. It is what the program says: XLA may fuse, share or recompute what is outside of loops.
"""

import dataclasses
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from hfjax.analysis.memory_copies import is_on_host
from hfjax.parallel.jaxprs.walk import bodies_of, dependent_vars, equations_in, variables

BACKWARD = "transpose("


@dataclasses.dataclass(frozen=True)
class SavedResidual:
    """`count` arrays that wait for the backward pass, per device: one for each layer, or one."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int  # of one of them
    count: int
    layers: bool  # whether a loop over layers passes it on
    host: bool  # whether it waits in host memory

    @property
    def total(self) -> int:
        """The bytes of all of them."""
        return self.bytes * self.count


def saved_residuals(traced: jax.stages.Traced) -> tuple[SavedResidual, ...] | None:
    """Return the residuals, most bytes first; None if the trace has no backward pass by jax.grad.

    Of a step with several microbatches they are those of one: microbatches run in a loop.

    Args:
        traced: `jax.jit(f).trace(…)`; of a step, `step.trace(batch)`.

    Returns:
        Entries with `dtype`, `shape`, `bytes` of one, `count`, `layers` (whether a loop over layers
        passes it on), `host` (whether it waits in host memory) and `total` bytes.

    Example:
        >>> import hfjax, jax, jax.numpy as jnp
        >>> loss = lambda w, x: jnp.sin(x @ w).sum()
        >>> traced = jax.jit(jax.grad(loss)).trace(jnp.ones((4, 8)), jnp.ones((16, 4)))
        >>> [(kept.shape, kept.total) for kept in hfjax.analysis.saved_residuals(traced)]
        [((16, 8), 512)]
    """
    program = traced.jaxpr.jaxpr
    bodies = (body for equation, _ in equations_in(program) for body, _ in bodies_of(equation))
    for jaxpr in (program, *bodies):
        backward = [BACKWARD in str(equation.source_info.name_stack) for equation in jaxpr.eqns]
        if any(backward):
            return _find_residuals(jaxpr, backward)
    return None


def _find_residuals(jaxpr: Jaxpr, backward: list[bool]) -> tuple[SavedResidual, ...]:
    """Return what equations before the first of the backward pass save for it."""
    first = backward.index(True)
    producers = _find_producers(jaxpr, first)
    read: dict[Var, None] = {}
    for equation, after in zip(jaxpr.eqns[first:], backward[first:], strict=True):
        if after:
            read |= dict.fromkeys(v for v in variables(equation.invars) if v in producers)
    return tuple(
        sorted((_residual(v, producers[v]) for v in read), key=lambda residual: -residual.total)
    )


def _find_producers(jaxpr: Jaxpr, first: int) -> dict[Var, Any]:
    """Return variable -> its equation for the results of the first equations.

    Constants are not saved, and a reshaped input is that input.
    """
    equations, views, producers = jaxpr.eqns[:first], set(jaxpr.invars), {}
    known = dependent_vars(jaxpr.invars, equations)
    for equation in equations:
        if equation.primitive.name == "reshape" and views.issuperset(variables(equation.invars)):
            views.update(equation.outvars)
        else:
            producers |= {v: equation for v in equation.outvars if v in known}
    return producers


def _residual(value: Var, equation: JaxprEqn) -> SavedResidual:
    aval: Any = value.aval
    shape, count = tuple(aval.shape), 1
    if equation.primitive.name == "scan":
        number = equation.outvars.index(value)
        inner = equation.params["jaxpr"].jaxpr.outvars[number].aval
        if len(shape) > len(inner.shape):
            count, *rest = shape
            shape = tuple(rest)
    size = aval.size * aval.dtype.itemsize // count
    return SavedResidual(aval.dtype.name, shape, size, count, count > 1, is_on_host(value))
