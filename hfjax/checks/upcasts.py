"""Precision by path: whether each product of a model is in the dtype that the paths ask for."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import Literal
from jax.typing import DTypeLike

from hfjax.checks.probe import computed_shapes, traced_look
from hfjax.parallel.adapters.model_template import Blueprint
from hfjax.parallel.engine.step_context import StepContext
from hfjax.parallel.jaxprs.program import bodies_of
from hfjax.parallel.precision.by_path import ALL, PrecisionByPath, named
from hfjax.parallel.precision.dtypes import Precision
from hfjax.utils.paths import Flat

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


class Of(NamedTuple):
    """What a value is made of: of parameters alone or not, and in which dtype a named one is."""

    parameters: bool
    named: Any = None


class Product(NamedTuple):
    """A product in a program: where it is, its widest operand, the dtype of a named parameter."""

    line: str
    dtype: Any
    named: Any


def check_products(
    precision: PrecisionByPath,
    blueprint: Blueprint,
    context: StepContext,
    variables: Flat,
    batch: Any,
    mode: str,
) -> None:
    """Refuse a product that is wider than it was asked to be.

    It is so if it is wider than with `"*"` alone and multiplies by no parameter that is named, or
    not in the dtype of the named one that it multiplies by.
    """
    context = replace(context, blueprint=blueprint)
    look = partial(_products, precision, context, variables, batch, mode)
    by_path, by_one = look(precision), look(dict(precision.given)[ALL])
    in_one = {x.named: look(_uniform(x.named, precision)) for x in by_path if x.named is not None}
    if any(len(found) != len(by_path) for found in (by_one, *in_one.values())):
        return  # the model asks for dtypes, and takes another way
    patterns = ", ".join(pattern for pattern, _ in precision.given if pattern != ALL)
    for number, (now, before) in enumerate(zip(by_path, by_one, strict=True)):
        if now.named is None and now.dtype.itemsize > before.dtype.itemsize:
            raise ValueError(
                f"{now.line}: a product in {now.dtype}, which is in {before.dtype} without "
                f"{patterns}: what these parameters make wider goes on so. Cast what leaves their "
                f"module to what entered it: y.astype(x.dtype)."
            )
        if now.named is not None and now.dtype != in_one[now.named][number].dtype:
            raise ValueError(
                f"{now.line}: a product in {now.dtype} of a parameter that {patterns} has in "
                f"{now.named}: what enters is wider. Cast it: x.astype(kernel.dtype)."
            )


def _uniform(dtype: DTypeLike, precision: PrecisionByPath) -> Precision:
    return Precision(dtype, scale=precision.scale if dtype == jnp.float16 else None)


def _products(
    by_path: PrecisionByPath,
    context: StepContext,
    variables: Flat,
    batch: Any,
    mode: str,
    precision: Precision | PrecisionByPath,
) -> list[Product]:
    """Return the products of a model whose parameters have these dtypes, as they are written."""
    seen = replace(context, execution=replace(context.execution, precision=precision))
    whole = context.blueprint.prepared(batch)
    traced = traced_look(seen, variables, whole, mode, context.side)
    first = [
        Of(True, x.dtype if named(by_path, path) else None)
        for path, x in sorted(computed_shapes(seen).items())
    ]
    known = dict(zip(traced.jaxpr.invars, first, strict=False))
    return list(_walk(traced.jaxpr, known))


def _walk(jaxpr: Any, known: dict[Any, Of]) -> Iterator[Product]:
    """Yield products in order; take note of what is made of parameters alone."""
    of = lambda v: Of(True) if isinstance(v, Literal) else known.get(v, Of(False))
    known |= dict.fromkeys(jaxpr.constvars, Of(True))
    for equation in jaxpr.eqns:
        name, given = equation.primitive.name, list(map(of, equation.invars))
        if name in PRODUCTS:
            dtypes = [v.aval.dtype for v in equation.invars[:2]]
            line = source_info_util.summarize(equation.source_info)
            named = [x.named for x in given[:2] if x.named is not None]
            yield Product(line, _widest(dtypes), _widest(named) if named else None)
        for body, _ in bodies_of(equation):
            inner = dict(_entered(body.invars, given))
            yield from _walk(body, inner)
        if given and all(x.parameters for x in given):
            named = [x.named for x in given if x.named is not None]
            known |= dict.fromkeys(equation.outvars, Of(True, _widest(named) if named else None))


def _widest(dtypes: Sequence[Any]) -> Any:
    return max(dtypes, key=lambda dtype: dtype.itemsize)


def _entered(inputs: Sequence[Any], given: Sequence[Of]) -> Iterator[tuple[Any, Of]]:
    """Yield what a program's inputs are made of, told from the end: branches take one less."""
    yield from zip(reversed(inputs), reversed(given), strict=False)
