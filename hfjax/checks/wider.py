"""Precision by path: whether what one parameter made wider makes products of others wider."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from jax.extend import source_info_util
from jax.extend.core import Literal

from hfjax.base.paths import Flat
from hfjax.checks.look import computed_shapes, outputs_of_a_look
from hfjax.parallel.autodiff.program import bodies_of
from hfjax.parallel.engine.blueprint import Blueprint
from hfjax.parallel.engine.step_context import StepContext
from hfjax.parallel.in_parts.interpreter import whole_shapes
from hfjax.parallel.in_parts.named_calls import recording
from hfjax.parallel.in_parts.scope import traced_whole
from hfjax.parallel.precision import Precision
from hfjax.parallel.precision_by_path import ALL, PrecisionByPath, named

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
# What hands a parameter on as it is, or in another form or dtype.
FORMS = frozenset(
    """broadcast_in_dim convert_element_type copy dynamic_slice gather reshape rev
    sharding_constraint slice squeeze transpose""".split()
)


class Product(NamedTuple):
    """A product in a program: where it is, its widest operand, whether a named one is in it."""

    line: str
    dtype: Any
    of_named: bool


def check_products(
    precision: PrecisionByPath,
    blueprint: Blueprint,
    context: StepContext,
    variables: Flat,
    batch: Any,
    mode: str,
) -> None:
    """Refuse a model in which a product is wider by path than without, and names no reason."""
    context = replace(context, blueprint=blueprint)
    alone = dict(precision.given)[ALL]
    look = partial(_products, partial(named, precision), context, variables, batch, mode)
    by_path, by_one = map(look, (precision, alone))
    if len(by_path) != len(by_one):  # the model asks for dtypes, and takes another way
        return
    for now, before in zip(by_path, by_one, strict=True):
        if now.dtype.itemsize > before.dtype.itemsize and not now.of_named:
            patterns = ", ".join(pattern for pattern, _ in precision.given if pattern != ALL)
            raise ValueError(
                f"{now.line}: a product in {now.dtype}, which is in {before.dtype} without "
                f"{patterns}: what these parameters make wider goes on so. Cast what leaves their "
                f"module to what entered it: y.astype(x.dtype)."
            )


def _products(
    is_named: Callable[[str], bool],
    context: StepContext,
    variables: Flat,
    batch: Any,
    mode: str,
    precision: Precision | PrecisionByPath,
) -> list[Product]:
    """Return the products of a model whose parameters have these dtypes, as they are written."""
    rows, blueprint = context.traced.rows, context.blueprint
    parameters = computed_shapes(context, precision)
    held = rows.of_variables(variables, blueprint.variables)
    whole = blueprint.prepared(batch)
    shapes = whole_shapes(rows.side, (held, rows.values(whole)))
    look = partial(outputs_of_a_look, context, "train" if mode == "train" else "eval")
    with recording():
        traced, _ = traced_whole(rows.side, look, parameters, *shapes)
    first = [is_named(path) for path in sorted(parameters)]
    known = dict(zip(traced.jaxpr.invars, first, strict=False))
    return list(_walk(traced.jaxpr, known))


def _walk(jaxpr: Any, known: Mapping[Any, bool]) -> Iterator[Product]:
    """Yield products in order; `known` says which inputs are of parameters that are named."""
    known = dict(known)
    of = lambda v: not isinstance(v, Literal) and known.get(v, False)
    for equation in jaxpr.eqns:
        name, given = equation.primitive.name, [of(v) for v in equation.invars]
        if name in PRODUCTS:
            dtypes = [v.aval.dtype for v in equation.invars[:2]]
            widest = max(dtypes, key=lambda dtype: dtype.itemsize)
            line = source_info_util.summarize(equation.source_info)
            yield Product(line, widest, any(given[:2]))
        for body, _ in bodies_of(equation):
            yield from _walk(body, dict(_entered(body.invars, given)))
        if name in FORMS and given[0]:
            known[equation.outvars[0]] = True


def _entered(inputs: Sequence[Any], given: Sequence[bool]) -> Iterator[tuple[Any, bool]]:
    """Yield what of a program's inputs is named, told from the end: branches take one less."""
    yield from zip(reversed(inputs), reversed(given), strict=False)
