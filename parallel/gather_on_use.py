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
from typing import Any

import jax
from jax import lax
from jax.extend.core import Literal

from hfjax.parallel.fetch import Stored
from hfjax.parallel.program import bind, body_of
from hfjax.parallel.same_noise import warn_of_same_noise


def gather_on_use(
    function: Callable, parameters: Mapping[str, Stored], *arguments: Any, differs: Any = None
) -> Any:
    """Return `function({path: whole parameter}, *arguments)`, given stored parameters.

    `differs` says of each of the arguments' arrays whether it is another one on each device, to
    warn of random numbers that are the same on all (None: do not warn).
    """
    whole = {path: stored.whole for path, stored in parameters.items()}
    leaves, form = jax.tree.flatten((whole, arguments))
    result: Any = None

    def run(*leaves: Any) -> list[Any]:
        nonlocal result
        found, result = jax.tree.flatten(function(*_call(form, leaves)))
        return found

    traced = jax.make_jaxpr(run)(*leaves)
    if differs is not None:
        warn_of_same_noise(traced.jaxpr, [False] * len(whole) + jax.tree.leaves(differs))
    pending = {path: _Parameter(stored) for path, stored in parameters.items()}
    values = jax.tree.leaves((pending, arguments))
    return result.unflatten(map(_array, _run(traced.jaxpr, traced.consts, values)))


def _call(form: Any, leaves: Sequence[Any]) -> tuple:
    whole, arguments = form.unflatten(leaves)
    return whole, *arguments


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
        return all(dim != -ndim for dim, _ in (*move.gather, *move.scatter))


def _array(value: Any) -> Any:
    return value.whole() if isinstance(value, _Parameter) else value


def _run(jaxpr: Any, constants: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Return the outputs of a program; some of the values may be parameters yet to be gathered."""
    known = dict(zip(jaxpr.constvars, constants, strict=True))
    known |= zip(jaxpr.invars, values, strict=True)
    read = lambda v: v.val if isinstance(v, Literal) else known[v]
    for equation in jaxpr.eqns:
        given = [read(v) for v in equation.invars]
        with _named_as(equation):
            known.update(zip(equation.outvars, _results(equation, given), strict=True))
    return [read(v) for v in jaxpr.outvars]


def _named_as(equation: Any) -> Any:
    """Return the scope of an equation, so that profiles show the model's own names."""
    name = str(equation.source_info.name_stack)
    return jax.named_scope(name) if name and "(" not in name else nullcontext()


def _results(equation: Any, given: Sequence[Any]) -> Sequence[Any]:
    if any(isinstance(value, _Parameter) for value in given):
        enter = _ENTERED.get(equation.primitive.name)
        if enter is not None:
            return enter(equation, given)
    return bind(equation, [_array(value) for value in given])


def _enter_call(equation: Any, given: Sequence[Any]) -> Sequence[Any]:
    body = body_of(equation)
    assert body is not None
    return _run(*body, given)


def _enter_remat(equation: Any, given: Sequence[Any]) -> Sequence[Any]:
    """Gather inside: the backward pass then gathers again, and nothing whole is kept."""
    body = body_of(equation)
    assert body is not None
    run = lambda *values: list(map(_array, _run(*body, list(map(_pending, values)))))
    options = {name: equation.params[name] for name in ("policy", "prevent_cse")}
    return jax.checkpoint(run, **options)(*map(_stored, given))


def _enter_scan(equation: Any, given: Sequence[Any]) -> Sequence[Any]:
    """Gather what the scan slices layer by layer; what it only reads, once and before."""
    params = equation.params
    n_consts, n_carry = params["num_consts"], params["num_carry"]
    consts = list(map(_array, given[:n_consts]))
    first = list(map(_array, given[n_consts : n_consts + n_carry]))
    is_sliced = lambda value: isinstance(value, _Parameter) and value.slices
    slices = [v.stored if is_sliced(v) else _array(v) for v in given[n_consts + n_carry :]]
    _tell_split(v for v in given[n_consts + n_carry :] if isinstance(v, _Parameter))
    body = params["jaxpr"]

    def step(carry: list, slices: list) -> tuple[list, list]:
        values = [*consts, *carry, *map(_pending, slices)]
        out = list(map(_array, _run(body.jaxpr, body.consts, values)))
        return out[:n_carry], out[n_carry:]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    last, rows = lax.scan(step, first, slices, **options)
    return [*last, *rows]


def _tell_split(scanned: Iterable[_Parameter]) -> None:
    """Warn of stacks that have to be whole in a scan, since the layers themselves are split."""
    split = [p.stored.movement for p in scanned if not p.slices]
    if split:
        names = ", ".join(
            f'"{m.path}": ("layers", {", ".join(["None"] * (len(m.shape) - 1))})' for m in split
        )
        warnings.warn(
            f"{len(split)} stacked parameters are split along the dimension over which the model "
            "scans, so all layers are gathered before the scan. To gather them one by one, name "
            f"that dimension: hfjax.layout(…, axes={{{names}}}).",
            UserWarning,
            stacklevel=2,
        )


def _pending(value: Any) -> Any:
    return _Parameter(value) if isinstance(value, Stored) else value


def _stored(value: Any) -> Any:
    return value.stored if isinstance(value, _Parameter) else value


# Equations whose body may use a parameter; before any other it is gathered.
_ENTERED = {
    **dict.fromkeys(("jit", "pjit", "closed_call", "core_call"), _enter_call),
    **dict.fromkeys(("checkpoint", "remat", "remat2"), _enter_remat),
    "scan": _enter_scan,
}
