"""What a model does along its sequence, found by tracing it once with a length of its own.

Each device that shares a row computes with a part of its positions. That is right if positions meet
in `kernels.attention` only. So the model is traced with rows of a length that divides no other
dimension: what contracts, shifts, sums or counts along such a dimension is refused, with its line.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn

from hfjax.base.paths import Flat
from hfjax.parallel.autodiff.varying_state import bodies
from hfjax.parallel.engine.blueprint import TRAIN, asked_by, raw, variable_of
from hfjax.parallel.engine.layers import is_list, items_of
from hfjax.parallel.engine.shared_rows import SharedRows, dims_of
from hfjax.parallel.engine.step_context import StepContext, rows_of


def dealt(context: StepContext, variables: Flat, keys: Callable | None, batch: Any) -> Any:
    """Return the part of a batch of whole rows that this device computes with.

    Where no devices share rows, that is the batch.

    Args:
        context: What is known of the step.
        variables: Those of the model that hold no random keys; in an evaluation all.
        keys: As `StepContext.keys` returns it; None: it is an evaluation.
        batch: With whole rows.
    """
    rows = context.traced.kernels.rows
    if rows is None:
        return batch
    whole = context.blueprint.prepared(batch)
    dims = dims_of(whole, rows.settings.sequence)
    length = _length(whole, dims)
    random = {} if keys is None else keys(None, 0, rows_of(batch))
    look(context, rows, {**variables, **random}, whole, dims, "eval" if keys is None else "train")
    rows.choose(length)
    return rows.dealt(whole, dims)


def undealt(context: StepContext, outputs: Any) -> Any:
    """Return what the model made of its part of the rows, for whole rows."""
    rows = context.traced.kernels.rows
    return outputs if rows is None else rows.undealt(outputs)


def _length(batch: Any, dims: Any) -> int:
    """Return the number of positions of the rows of a batch."""
    found = {
        jax.tree_util.keystr(keys, simple=True, separator="/"): x.shape[dim]
        for (keys, x), dim in zip(
            jax.tree_util.tree_leaves_with_path(batch),
            jax.tree.leaves(dims, is_leaf=lambda x: x is None),
            strict=True,
        )
        if dim is not None
    }
    if len(set(found.values())) != 1:
        shown = ", ".join(f"{path} {size}" for path, size in found.items()) or "none"
        raise ValueError(
            f"the devices of context share rows, so that the arrays of a batch have one number of "
            f"positions; found {shown} (dimension 1). Which dimension is the sequence can be said: "
            'hfjax.Context(sequence={"tokens": 1, "image": None}).'
        )
    return next(iter(found.values()))


def look(
    context: StepContext, rows: SharedRows, variables: Flat, batch: Any, dims: Any, mode: str
) -> None:
    """Tell `rows` which attentions the model asks for; refuse what else mixes positions."""
    templates = context.blueprint.parameters
    sizes = {n for x in templates.values() for n in raw(x).shape} | {rows_of(batch)}
    real = _length(batch, dims)
    length = a_length(real, sizes) or real
    resize = lambda x, dim: x.shape if dim is None else _with(x.shape, dim, length)
    shorter = jax.tree.map(
        lambda dim, x: jax.ShapeDtypeStruct(resize(x, dim), x.dtype),
        dims,
        batch,
        is_leaf=lambda x: x is None,
    )
    compute = lambda x: context.execution.precision.of(x.dtype)[0]
    parameters = {
        path: jax.ShapeDtypeStruct(raw(x).shape, compute(raw(x))) for path, x in templates.items()
    }
    with rows.looked_at(real):
        model, outputs = jax.make_jaxpr(partial(_outputs, context, mode), return_shape=True)(
            parameters, variables, shorter
        )
        loss = jax.make_jaxpr(context.loss)(outputs, shorter)
    rows.outputs = [_dimension(x.shape, length) for x in jax.tree.leaves(outputs)]
    if length == real:  # no length is its own: nothing can be told apart
        return
    for jaxpr, part in ((model, "the model"), (loss, "the loss")):
        for what, line in mixes(jaxpr.jaxpr, length, part == "the loss"):
            raise ValueError(f"{part} {what} positions of a row ({line}): {APART}. {MEET_BY}")


APART = "the devices of the mesh axis context share each row, and each has only some positions"
MEET_BY = (
    "Let positions meet in attention alone: attend through the step's kernels (self.kernels = "
    "hfjax.models.parts.plain; self.kernels.attention(attend)(q, k, v)), number positions by "
    "self.kernels.positions(length), and shift targets in a method prepare(batch) of the model, "
    "which is given whole rows (docs/long_sequences.md)."
)


def called(context: StepContext, model: Any, variables: Flat, inputs: Any, mode: str) -> Any:
    """Return the outputs of a model that is called as it is, or by the layout's `forward`."""
    if context.forward is None:
        return model(inputs) if callable(model) else model
    training = mode == "train"
    key = lambda name: variables[variable_of(name)] if training else None
    asked = {n: training if n == TRAIN else key(n) for n in asked_by(context.forward)}
    return context.forward(model, inputs, **asked)


def _dimension(shape: tuple[int, ...], length: int) -> int | None:
    """Return which dimension is the sequence, if one is."""
    return next((dim for dim, size in enumerate(shape) if size == length and dim), None)


def _with(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _outputs(context: StepContext, mode: str, parameters: Flat, variables: Flat, batch: Any) -> Any:
    """Return what the model makes of a batch, of stacked layers only the first being run."""
    model = context.blueprint.merge(parameters, variables, mode)
    inputs = context.inputs(batch)
    if not context.in_parts:
        return called(context, model, variables, inputs, mode)
    x = model.embed(inputs)
    if is_list(model.layers):
        for layer in items_of(model.layers):
            x = layer(x)
        return model.head(x)
    graph, *arrays = nnx.split(model.layers, nnx.Param, ...)
    count = jax.tree.leaves(arrays)[0].shape[0]
    rows = context.traced.kernels.rows
    assert rows is not None
    before = len(rows.calls)
    x = nnx.merge(graph, *jax.tree.map(lambda a: a[0], arrays))(x)
    rows.calls[before:] = [replace(call, times=count) for call in rows.calls[before:]]
    return model.head(x)


def a_length(longest: int, sizes: set[int]) -> int | None:
    """Return the greatest prime up to `longest` that divides none of these sizes.

    >>> a_length(16, {13, 22, 64})
    7
    """
    for n in range(longest, 2, -1):
        prime = all(n % d for d in range(2, int(n**0.5) + 1))
        if prime and all(size % n for size in sizes):
            return n
    return None


def mixes(jaxpr: Any, length: int, in_loss: bool, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield (what, where) of each equation along a dimension that `length` divides."""
    along = lambda size: isinstance(size, int) and size > 0 and size % length == 0
    for equation in jaxpr.eqns:
        line = source_info_util.summarize(equation.source_info) or place
        what = _mixed(equation, along, in_loss)
        if what:
            yield what, line
        for body in bodies(equation):
            yield from mixes(body, length, in_loss, line)


def _mixed(equation: JaxprEqn, along: Callable[[Any], bool], in_loss: bool) -> str | None:
    """Return what an equation does along the sequence, None if it keeps positions apart."""
    name, params = equation.primitive.name, equation.params
    shapes = [getattr(v.aval, "shape", ()) for v in equation.invars]
    if name == "iota":
        return "counts" if along(params["shape"][params["dimension"]]) else None
    if name == "scan":
        return "runs a loop over" if along(params["length"]) else None
    if name in MOVES:
        result = getattr(equation.outvars[0].aval, "shape", ())
        out = shapes[1] if name == "dynamic_update_slice" else result
        pairs = [pair for pair in zip(shapes[0], out, strict=True) if pair[0] != pair[1]]
        return "cuts or joins" if any(along(a) or along(b) for a, b in pairs) else None
    if name not in ALONG or (in_loss and name == "reduce_sum"):
        return None
    verb, dims = ALONG[name]
    return verb if any(along(shapes[0][d]) for d in dims(params, shapes)) else None


def _of_convolution(params: Any, shapes: Sequence[Any]) -> list[int]:
    """Return the dimensions of the operand along which a kernel is wider than 1."""
    numbers = params["dimension_numbers"]
    pairs = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], strict=True)
    return [of_operand for of_operand, of_kernel in pairs if shapes[1][of_kernel] > 1]


def _of_window(params: Any, shapes: Sequence[Any]) -> list[int]:
    return [d for d, size in enumerate(params["window_dimensions"]) if size > 1]


def _of_gather(params: Any, shapes: Sequence[Any]) -> list[int]:
    """Return the dimensions of the operand from which parts are picked."""
    apart = getattr(params["dimension_numbers"], "operand_batching_dims", ())
    sizes = enumerate(zip(params["slice_sizes"], shapes[0], strict=True))
    return [d for d, (size, whole) in sizes if size != whole and d not in apart]


MOVES = ("slice", "dynamic_slice", "pad", "concatenate", "dynamic_update_slice")
_named = lambda name: lambda params, shapes: params[name]
_one = lambda name: lambda params, shapes: [params[name]]
REDUCE = ("sum", "max", "min", "prod", "and", "or")
WINDOWS = ("", "_sum", "_max", "_min")
# An operation -> what it does, and along which dimensions of its first operand.
ALONG: dict[str, tuple[str, Callable]] = {
    "dot_general": ("contracts", lambda params, shapes: params["dimension_numbers"][0][0]),
    **{f"reduce_{name}": ("reduces", _named("axes")) for name in REDUCE},
    **{name: ("picks one of", _named("axes")) for name in ("argmax", "argmin")},
    **{f"cum{name}": ("accumulates", _one("axis")) for name in ("sum", "prod", "max", "min")},
    "cumlogsumexp": ("accumulates", _one("axis")),
    "sort": ("sorts", _one("dimension")),
    "rev": ("reverses", _named("dimensions")),
    "conv_general_dilated": ("convolves", _of_convolution),
    **{f"reduce_window{name}": ("pools", _of_window) for name in WINDOWS},
    "gather": ("picks from", _of_gather),
}
