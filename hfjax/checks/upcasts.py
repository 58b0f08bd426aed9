"""Precision by path: whether each matmul of a model is in the dtype that the paths ask for."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn
from jax.typing import DTypeLike

from hfjax.checks.probe import compute_shapes, trace_components
from hfjax.parallel.engine.step_context import StepContext
from hfjax.parallel.jaxprs.primitives import MATMULS, RAGGED_MATMULS
from hfjax.parallel.jaxprs.walk import bodies_of, interpret_jaxpr, match_operands
from hfjax.parallel.precision.by_path import ALL, PrecisionByPath, matches_path
from hfjax.parallel.precision.dtypes import Precision
from hfjax.utils.paths import Flat


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
        inputs = program.jaxpr.invars
        origins = [Origin(True, dtype(path)) for path in parameters]
        origins += [Origin(False)] * (len(inputs) - len(origins))
        _find_matmuls(matmuls, program.jaxpr, origins)
    return matmuls


def _find_matmuls(matmuls: list[Matmul], jaxpr: Jaxpr, origins: Sequence[Origin]) -> None:
    """Add the matmuls of a program to a list, in order; `origins` are those of its inputs."""

    def run(equation: JaxprEqn, operands: list[Origin]) -> list[Origin]:
        if equation.primitive.name in MATMULS | RAGGED_MATMULS:
            avals: Any = [v.aval for v in equation.invars[:2]]
            line = source_info_util.summarize(equation.source_info)
            matmuls.append(
                Matmul(line, _widest([aval.dtype for aval in avals]), _param_dtype(operands[:2]))
            )
        for body, _ in bodies_of(equation):
            _find_matmuls(matmuls, body, match_operands(body, operands, Origin(False)))
        is_parameter = bool(operands) and all(x.is_parameter for x in operands)
        out = Origin(True, _param_dtype(operands)) if is_parameter else Origin(False)
        return [out] * len(equation.outvars)

    constants = [Origin(True)] * len(jaxpr.constvars)
    interpret_jaxpr(jaxpr, constants, origins, run, constant=lambda _: Origin(True))


def _param_dtype(operands: Sequence[Origin]) -> Any:
    """Return the widest dtype of the named parameters among these; None if there is none."""
    dtypes = [x.param_dtype for x in operands if x.param_dtype is not None]
    return _widest(dtypes) if dtypes else None


def _widest(dtypes: Sequence[Any]) -> Any:
    return max(dtypes, key=lambda dtype: dtype.itemsize)
