"""Precision by path: whether each matmul of a model is in the dtype that the paths ask for."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import Literal
from jax.typing import DTypeLike

from hfjax.checks.probe import compute_shapes, trace_components
from hfjax.parallel.engine.step_context import StepContext
from hfjax.parallel.jaxprs.program import bodies_of
from hfjax.parallel.precision.by_path import ALL, PrecisionByPath, matches_path
from hfjax.parallel.precision.dtypes import Precision
from hfjax.utils.paths import Flat

MATMULS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


class Origin(NamedTuple):
    """What a value depends on: on parameters alone or not, and the dtype of a named one."""

    is_parameter: bool
    param_dtype: Any = None


class Matmul(NamedTuple):
    """A matmul in a program: where it is, its widest operand, the dtype of a named parameter."""

    line: str
    dtype: Any
    param_dtype: Any


def check_matmuls(
    precision: PrecisionByPath,
    context: StepContext,
    variables: Flat,
    batch: Any,
    mode: str,
) -> None:
    """Refuse a matmul that is wider than requested.

    It is so if it is wider than with `"*"` alone and multiplies by no parameter that is named, or
    not in the dtype of the named one that it multiplies by. The model is traced with other dtypes
    only if some matmul is wider than its parameter, or than `"*"` itself.
    """
    matmuls_with = partial(_matmuls, precision, context, variables, batch, mode)
    by_path, default = matmuls_with(precision), dict(precision.given)[ALL]
    if all(_is_narrow(matmul, default) for matmul in by_path):
        return
    by_default = matmuls_with(default)
    by_dtype = {
        x.param_dtype: matmuls_with(_uniform_precision(x.param_dtype, precision))
        for x in by_path
        if x.param_dtype is not None
    }
    if any(len(matmuls) != len(by_path) for matmuls in (by_default, *by_dtype.values())):
        return  # the model branches on dtypes
    patterns = ", ".join(pattern for pattern, _ in precision.given if pattern != ALL)
    for number, (matmul, default_matmul) in enumerate(zip(by_path, by_default, strict=True)):
        if matmul.param_dtype is None and matmul.dtype.itemsize > default_matmul.dtype.itemsize:
            raise ValueError(
                f"{matmul.line}: a product in {matmul.dtype}, which is in {default_matmul.dtype} "
                f"without {patterns}: what these parameters make wider goes on so. Cast what "
                "leaves their module to what entered it: y.astype(x.dtype)."
            )
        if (
            matmul.param_dtype is not None
            and matmul.dtype != by_dtype[matmul.param_dtype][number].dtype
        ):
            raise ValueError(
                f"{matmul.line}: a product in {matmul.dtype} of a parameter that {patterns} has in "
                f"{matmul.param_dtype}: what enters is wider. Cast it: x.astype(kernel.dtype)."
            )


def _is_narrow(matmul: Matmul, default: Precision) -> bool:
    """Return whether a matmul is as narrow as its named parameter, or else as `"*"`."""
    if matmul.param_dtype is not None:
        return matmul.dtype == matmul.param_dtype
    widest = default.compute and jnp.dtype(default.compute).itemsize
    return widest is not None and matmul.dtype.itemsize <= widest


def _uniform_precision(dtype: DTypeLike, precision: PrecisionByPath) -> Precision:
    return Precision(dtype, scale=precision.scale if dtype == jnp.float16 else None)


def _matmuls(
    path_precision: PrecisionByPath,
    context: StepContext,
    variables: Flat,
    batch: Any,
    mode: str,
    precision: Precision | PrecisionByPath,
) -> list[Matmul]:
    """Return the matmuls of a model whose parameters have these dtypes, in program order."""
    if precision != context.execution.precision:
        context = replace(context, execution=replace(context.execution, precision=precision))
    shapes, batch = compute_shapes(context), context.template.prepare_batch(batch)
    dtype = lambda path: shapes[path].dtype if matches_path(path_precision, path) else None
    matmuls: list[Matmul] = []
    for program, parameters, _ in trace_components(
        context, variables, batch, mode, context.batch_group
    ):
        origins = [Origin(True, dtype(path)) for path in parameters]
        origin_of = dict(zip(program.jaxpr.invars, origins, strict=False))
        matmuls += _walk(program.jaxpr, origin_of)
    return matmuls


def _walk(jaxpr: Any, origin_of: dict[Any, Origin]) -> Iterator[Matmul]:
    """Yield matmuls in order, and record what depends on parameters alone."""
    find_origin = lambda v: (
        Origin(True) if isinstance(v, Literal) else origin_of.get(v, Origin(False))
    )
    origin_of |= dict.fromkeys(jaxpr.constvars, Origin(True))
    for equation in jaxpr.eqns:
        name, operands = equation.primitive.name, list(map(find_origin, equation.invars))
        if name in MATMULS:
            dtypes = [v.aval.dtype for v in equation.invars[:2]]
            line = source_info_util.summarize(equation.source_info)
            param_dtypes = [x.param_dtype for x in operands[:2] if x.param_dtype is not None]
            yield Matmul(line, _widest(dtypes), _widest(param_dtypes) if param_dtypes else None)
        for body, _ in bodies_of(equation):
            body_origins = dict(_body_origins(body.invars, operands))
            yield from _walk(body, body_origins)
        if operands and all(x.is_parameter for x in operands):
            param_dtypes = [x.param_dtype for x in operands if x.param_dtype is not None]
            origin_of |= dict.fromkeys(
                equation.outvars, Origin(True, _widest(param_dtypes) if param_dtypes else None)
            )


def _widest(dtypes: Sequence[Any]) -> Any:
    return max(dtypes, key=lambda dtype: dtype.itemsize)


def _body_origins(
    inputs: Sequence[Any], operands: Sequence[Origin]
) -> Iterator[tuple[Any, Origin]]:
    """Yield the origins of a program's inputs, matched from the end: branches take one less."""
    yield from zip(reversed(inputs), reversed(operands), strict=False)
