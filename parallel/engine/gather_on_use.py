"""A model's own program, in which each parameter is gathered where it is first used.

A model that is called as it is (not in three parts) is traced as one device would run it: its
parameters are whole arrays, and whatever it does with them is right. It may differentiate with
respect to them, add up their squares, scan over them. Then its program is run equation by
equation. A parameter is gathered, once, by the first equation that uses it; inside of a scan or of
a rematerialised function it is gathered there, again for each layer and each pass.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from hfjax.parallel.autodiff.program import bind, body_of, needed, parts_of_scan
from hfjax.parallel.engine.fetch import Stored
from hfjax.parallel.mesh import EXPERT_AXES


def gather_on_use(
    function: Callable,
    parameters: Mapping[str, Stored],
    *arguments: Any,
    look: Callable[[Any, Any], None] | None = None,
) -> Any:
    """Return `function({path: whole parameter}, *arguments)`, given stored parameters.

    `look` is shown the program, and the shapes of its result.
    """
    whole = {path: stored.full_shape for path, stored in parameters.items()}
    wrapped: dict[str, _DeferredWrap] = {}
    before = _WRAPPED.set(wrapped)
    try:
        with _alone():
            traced, result = jax.make_jaxpr(function, return_shape=True)(whole, *_like(arguments))
    finally:
        _WRAPPED.reset(before)
    if look is not None:
        look(traced.jaxpr, result)
    pending = {path: _Parameter(stored) for path, stored in parameters.items()}
    values = jax.tree.leaves((pending, arguments))
    found = _Runner(wrapped).arrays(traced.jaxpr, traced.consts, values)
    return jax.tree.unflatten(jax.tree.structure(result), found)


def _like(arrays: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)


def _alone() -> Any:
    """Return the context in which a model sees no mesh, unless the partitioner has part of it.

    Collectives over named axes work all the same, and the kind of device stays known.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if set(getattr(mesh, "manual_axes", ())) != set(mesh.axis_names):
        return nullcontext()
    device = getattr(mesh, "abstract_device", None)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def in_a_model() -> bool:
    """Return whether a model is being traced by `gather_on_use`."""
    return _WRAPPED.get() is not None


class _Parameter:
    """A parameter that is gathered when an equation uses it, once."""

    def __init__(self, stored: Stored):
        self.stored, self._whole = stored, None

    def whole(self) -> jax.Array:
        if self._whole is None:
            self._whole = self.stored.fetch()
        return self._whole

    @property
    def slices(self) -> bool:
        """Whether its first dimension is whole on this device, so that a scan may slice it."""
        move, ndim = self.stored.movement, self.stored.value.ndim
        return all(leg.dim != -ndim for leg in (*move.gathers, *move.scatters))


def _array(value: Any) -> Any:
    return value.whole() if isinstance(value, _Parameter) else value


def _pending(value: Any) -> Any:
    return _Parameter(value) if isinstance(value, Stored) else value


def _stored(value: Any) -> Any:
    return value.stored if isinstance(value, _Parameter) else value


@dataclass(frozen=True)
class _Runner:
    """Runs programs some of whose values are parameters yet to be gathered."""

    wrapped: "Mapping[str, _DeferredWrap]"

    def arrays(self, jaxpr: Any, constants: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """Return the outputs of a program, given arrays and `Stored` or pending parameters."""
        outputs = self.run(jaxpr, constants, list(map(_pending, values)))
        return [jnp.asarray(_array(x)) for x in outputs]  # some may be Python numbers

    def run(self, jaxpr: Any, constants: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """Return the outputs of a program, which may be pending parameters as its inputs may."""
        known = dict(zip(jaxpr.constvars, constants, strict=True))
        known |= zip(jaxpr.invars, values, strict=True)
        read = lambda v: v.val if isinstance(v, Literal) else known[v]
        for number in sorted(needed(jaxpr.eqns, jaxpr.outvars)):
            equation = jaxpr.eqns[number]
            given = [read(v) for v in equation.invars]
            with _named_as(equation):
                known.update(zip(equation.outvars, self._results(equation, given), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _results(self, equation: JaxprEqn, given: Sequence[Any]) -> Sequence[Any]:
        kind = equation.primitive.name
        if kind in _CALLS and equation.params.get("name") in self.wrapped:
            return self._wrap(equation, given)
        if any(isinstance(value, _Parameter) for value in given):
            if kind in _CALLS:
                return self.run(*_body(equation), given)
            if kind in _REMATS:
                return self._remat(equation, given)
            if kind == "scan":
                return self._scan(equation, given)
        return bind(equation, list(map(_array, given)))

    def _wrap(self, equation: JaxprEqn, given: Sequence[Any]) -> Sequence[Any]:
        """Return what a wrapped call returns: it gathers by itself, as what wraps it wants."""
        call = self.wrapped[equation.params["name"]]
        if len(given) != call.arguments.num_leaves:  # that of its derivative
            return self.run(*_body(equation), given)
        is_stored = lambda x: isinstance(x, Stored)

        def run(*arguments: Any) -> Any:
            leaves = jax.tree.leaves(arguments, is_leaf=is_stored)
            return call.results.unflatten(self.arrays(*_body(equation), leaves))

        found = call.wrap(run)(*call.arguments.unflatten(map(_stored, given)))
        return jax.tree.leaves(found)

    def _remat(self, equation: JaxprEqn, given: Sequence[Any]) -> Sequence[Any]:
        """Gather inside: the backward pass then gathers again, and nothing whole is kept."""
        run = lambda *values: self.arrays(*_body(equation), values)
        options = {name: equation.params[name] for name in ("policy", "prevent_cse")}
        return jax.checkpoint(run, **options)(*map(_stored, given))

    def _scan(self, equation: JaxprEqn, given: Sequence[Any]) -> Sequence[Any]:
        """Gather what the scan slices layer by layer; what it only reads, once and before."""
        n_consts, n_carry = parts_of_scan(equation)
        consts = list(map(_array, given[:n_consts]))
        first = list(map(_array, given[n_consts : n_consts + n_carry]))
        sliced = given[n_consts + n_carry :]
        _tell_split(value for value in sliced if isinstance(value, _Parameter))
        is_kept = lambda value: isinstance(value, _Parameter) and value.slices
        slices = [value.stored if is_kept(value) else _array(value) for value in sliced]

        def step(carry: list, slices: list) -> tuple[list, list]:
            out = self.arrays(*_body(equation), [*consts, *carry, *slices])
            return out[:n_carry], out[n_carry:]

        options = {name: equation.params[name] for name in ("length", "reverse", "unroll")}
        last, rows = lax.scan(step, first, slices, **options)
        return [*last, *rows]


# Equations whose body may use a parameter, beside scans; before any other it is gathered.
_CALLS = ("jit", "pjit", "closed_call", "core_call")
_REMATS = ("checkpoint", "remat", "remat2")


def _body(equation: JaxprEqn) -> tuple[Any, Sequence[Any]]:
    body = body_of(equation)
    assert body is not None
    return body


def _named_as(equation: JaxprEqn) -> Any:
    """Return the scope of an equation, so that profiles show the model's own names."""
    name = str(equation.source_info.name_stack)
    return jax.named_scope(name) if name and "(" not in name else nullcontext()


def _tell_split(scanned: Iterable[_Parameter]) -> None:
    """Warn of stacks that have to be whole in a scan, since the layers themselves are split.

    A stack of experts is none of layers.
    """
    of_experts = lambda move: any(set(leg.axes) & set(EXPERT_AXES) for leg in move.gathers)
    moves = [p.stored.movement for p in scanned if not p.slices]
    split = [move for move in moves if not of_experts(move)]
    if split:
        rest = lambda move: ", ".join(["None"] * (len(move.shape) - 1))
        names = ", ".join(f'"{move.path}": ("layers", {rest(move)})' for move in split)
        warnings.warn(
            f"{len(split)} stacked parameters are split along the dimension over which the model "
            "scans, so all layers are gathered before the scan. To gather them one by one, name "
            f"that dimension: hfjax.layout(…, axes={{{names}}}).",
            UserWarning,
            stacklevel=2,
        )


# -- calls that are wrapped when the program runs -----------------------------------------------


@dataclass(frozen=True)
class _DeferredWrap:
    """A call recorded while tracing, replaced by `wrap(function)` when its program is run."""

    wrap: Callable
    arguments: Any
    results: Any


_WRAPPED: ContextVar[dict[str, _DeferredWrap] | None] = ContextVar("wrapped", default=None)


def wrapping(wrap: Callable, function: Callable) -> Callable:
    """Return `wrap(function)`, of a function of trees of arrays.

    In a model that is being traced it is wrapped only when the program runs: it is then given
    stored parameters, and gathers them when and as often as it wants.
    """
    calls = _WRAPPED.get()
    if calls is None:
        return wrap(function)

    def run(*arguments: Any) -> Any:
        leaves, form = jax.tree.flatten(arguments)
        results: Any = None

        def flat(*leaves: Any) -> list[Any]:
            nonlocal results
            found, results = jax.tree.flatten(function(*form.unflatten(leaves)))
            return found

        flat.__name__ = f"wrapped_{len(calls)}"
        found = jax.jit(flat)(*leaves)
        calls[flat.__name__] = _DeferredWrap(wrap, form, results)
        return results.unflatten(found)

    return run
