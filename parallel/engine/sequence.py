"""What a model does along its sequence, found by tracing it once with a length of its own.

Each device that shares a row computes with a part of its positions. That is right if positions meet
in `kernels.attention` only. So the model is traced with rows of a length that divides no other
dimension: what contracts, shifts, sums or counts along such a dimension is refused, with its line.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn, Literal

from hfjax.base.mean import as_mean
from hfjax.base.paths import Flat
from hfjax.parallel.autodiff.program import CALLS
from hfjax.parallel.autodiff.varying_state import bodies
from hfjax.parallel.engine.blueprint import TRAIN, asked_by, raw, variable_of
from hfjax.parallel.engine.layers import is_list, items_of
from hfjax.parallel.engine.step_context import StepContext, rows_of
from hfjax.parallel.for_models.shared_rows import SharedRows, dims_of


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
    own = a_length(real, sizes)  # None: nothing can be told apart
    length = own or real

    def of_length(n: int) -> Any:
        resize = lambda x, dim: x.shape if dim is None else _with(x.shape, dim, n)
        made = lambda dim, x: jax.ShapeDtypeStruct(resize(x, dim), x.dtype)
        return jax.tree.map(made, dims, batch, is_leaf=lambda x: x is None)

    compute = lambda x: context.execution.precision.of(x.dtype)[0]
    parameters = {
        path: jax.ShapeDtypeStruct(raw(x).shape, compute(raw(x))) for path, x in templates.items()
    }
    traced = jax.make_jaxpr(partial(_outputs, context, mode), return_shape=True)
    with rows.looked_at(real, length):
        try:
            model, outputs = traced(parameters, variables, of_length(length))
        except TypeError as error:
            raise ValueError(
                f"the model does not take rows of {length} positions in place of {real}. Dimension "
                "1 of each array of the batch is taken for the sequence; which it is can be said: "
                'hfjax.Context(sequence={"image": None}). JAX says: ' + str(error)[:300]
            ) from error
        loss = jax.make_jaxpr(context.loss)(outputs, of_length(length))
    rows.outputs = [_dimension(x.shape, length) for x in jax.tree.leaves(outputs)]
    if own is None or not rows.settings.check:
        return
    for jaxpr, part in ((model, "the model"), (loss, "the loss")):
        for shape in constants_along(jaxpr, length):
            raise ValueError(
                f"{part} holds an array {list(shape)} with a number for each position: {APART}. "
                f"{MEET_BY}"
            )
        for what, line in mixes(jaxpr.jaxpr, length, part == "the loss"):
            raise ValueError(f"{part} {what} positions of a row ({line}): {APART}. {MEET_BY}")
    if other := a_length(length - 1, sizes):
        with rows.looked_at(real, other, note=False):
            again, _ = traced(parameters, variables, of_length(other))
        one, two = (list(numbers_in(found.jaxpr)) for found in (model, again))
        if len(one) != len(two) or any(a != b and a == a for a, b in zip(one, two, strict=True)):
            raise ValueError(f"the model computes with the number of positions: {APART}. {MEET_BY}")
    _check_parts(context.loss, outputs, of_length, length)


def _check_parts(loss: Callable, outputs: Any, of_length: Callable, length: int) -> None:
    """Refuse a loss of whole rows that is not the mean of the losses of their parts."""
    draw = np.random.default_rng(0)

    def made(x: Any) -> np.ndarray:
        shape = tuple(6 if d and size == length else size for d, size in enumerate(x.shape))
        if jnp.issubdtype(x.dtype, jnp.floating):
            return (draw.uniform(0.2, 2, shape) ** 3).astype(np.float32)
        return draw.integers(0, 2, shape).astype(x.dtype)

    whole = jax.tree.map(made, (outputs, of_length(length)))
    like = (outputs, of_length(length))

    def part(first: int) -> Any:
        cut = lambda x, of: x[
            tuple(
                slice(first, first + 3) if d and size == length else slice(None)
                for d, size in enumerate(of.shape)
            )
        ]
        return jax.tree.map(cut, whole, like)

    @jax.jit  # one program instead of fifty small ones
    def means(*groups: Sequence[Any]) -> list[Any]:
        found = [[as_mean(loss(*p), rows_of(p[1])) for p in parts] for parts in groups]
        return [sum(m.total for m in parts) / sum(m.weight for m in parts) for parts in found]

    try:
        with jax.ensure_compile_time_eval():
            one, two = map(float, means([whole], [part(0), part(3)]))
    except Exception:  # it needs what is not there yet: a collective, keys, other tokens
        return
    if np.isfinite(one) and np.isfinite(two) and abs(one - two) > 3e-5 * max(abs(one), 1e-3):
        raise ValueError(
            f"the loss of whole rows is not that of their parts together ({one:.4g} and {two:.4g} "
            f"for random outputs): {APART}. Return sums over positions: hfjax.Mean((losses * mask)"
            ".sum(), mask.sum()), or the plain mean over all rows and positions."
        )


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
    """Return which dimension is the sequence, if one is; -1: it is part of one."""
    found = [dim for dim, size in enumerate(shape) if size and size % length == 0]
    plain = len(found) == 1 and found[0] > 0 and shape[found[0]] == length
    return None if not found else found[0] if plain else -1


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
    """Yield (what, where) of each equation that does not keep positions apart."""
    along = lambda size: isinstance(size, int) and size > 0 and size % length == 0
    for equation in jaxpr.eqns:
        line = source_info_util.summarize(equation.source_info) or place
        inner = list(bodies(equation))
        shapes = [_shape(v) for v in (*equation.invars, *equation.outvars)]
        if any(sum(map(along, _shape(v))) > 1 for v in equation.outvars):
            yield "pairs", line
        if any(along(size) for shape in shapes for size in shape) or equation.primitive.name in (
            "iota",
            "scan",
        ):
            what = _mixed(equation, along, in_loss)
            if what:
                yield what, line
        for body in inner:
            yield from mixes(body, length, in_loss, line)


def constants_along(jaxpr: Any, length: int) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of arrays that a program closes over and that have an entry per position."""
    for x in getattr(jaxpr, "consts", ()):
        shape = jnp.shape(x)
        varies = lambda x=x: not isinstance(x, np.ndarray | jax.Array) or len(np.unique(x)) > 1
        if any(n and n % length == 0 for n in shape) and (isinstance(x, Tracer) or varies()):
            yield shape


def numbers_in(jaxpr: Any) -> Iterator[Any]:
    """Yield every number that is written into a program."""
    for equation in jaxpr.eqns:
        yield from (v.val for v in equation.invars if isinstance(v, Literal) and not _shape(v))
        for body in bodies(equation):
            yield from numbers_in(body)


def _shape(v: Any) -> tuple[int, ...]:
    return getattr(v.aval, "shape", ())


def _mixed(equation: JaxprEqn, along: Callable[[Any], bool], in_loss: bool) -> str | None:
    """Return what an equation does along the sequence, None if it keeps positions apart."""
    name, params = equation.primitive.name, equation.params
    shapes, outs = map(_shape, equation.invars), [_shape(v) for v in equation.outvars]
    shapes = list(shapes)
    if name == "iota":
        return "counts" if along(params["shape"][params["dimension"]]) else None
    if name == "scan":
        return "runs a loop over" if along(params["length"]) else None
    if name in MOVES:
        out = shapes[1] if name == "dynamic_update_slice" else outs[0]
        pairs = [pair for pair in zip(shapes[0], out, strict=True) if pair[0] != pair[1]]
        return "cuts or joins" if any(along(a) or along(b) for a, b in pairs) else None
    if name == "reshape":
        return None if _keeps_order(shapes[0], outs[0], along) else "rearranges"
    if name in ALONG:
        verb, dims = ALONG[name]
        allowed = in_loss and name == "reduce_sum"
        found = any(along(shapes[0][d]) for d in dims(params, shapes))
        return verb if found and not allowed else None
    inside = name in (*CALLS, "cond", "while", "shard_map")  # what they run is looked at by itself
    drawn = name.startswith(("random_", "psum", "pmax", "pmin"))
    known = inside or drawn or name in ELEMENTWISE
    return None if known else f"does what hfjax does not know ({name}) with"


def _keeps_order(before: Sequence[int], after: Sequence[int], along: Callable) -> bool:
    """Return whether a reshape leaves positions in one dimension, perhaps beside other numbers."""
    for i, size in enumerate(before):
        if not along(size):
            continue
        stride = math.prod(before[i + 1 :])
        steps = [(math.prod(after[j + 1 :]), n) for j, n in enumerate(after) if along(n)]
        if not any(stride % s == 0 and (s * n) % (stride * size) == 0 for s, n in steps if s):
            return False
    return True


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
_last = lambda params, shapes: [-1]
REDUCE = ("sum", "max", "min", "prod", "and", "or", "xor")
WINDOWS = ("", "_sum", "_max", "_min")
# An operation -> what it does, and along which dimensions of its first operand.
ALONG: dict[str, tuple[str, Callable]] = {
    "dot_general": ("contracts", lambda params, shapes: params["dimension_numbers"][0][0]),
    **{f"reduce_{name}": ("reduces", _named("axes")) for name in REDUCE},
    "reduce": ("reduces", _named("dimensions")),
    **{name: ("picks one of", _named("axes")) for name in ("argmax", "argmin")},
    **{f"cum{name}": ("accumulates", _one("axis")) for name in ("sum", "prod", "max", "min")},
    "cumlogsumexp": ("accumulates", _one("axis")),
    "sort": ("sorts", _one("dimension")),
    "top_k": ("sorts", _last),
    "split": ("cuts or joins", _one("axis")),
    "rev": ("reverses", _named("dimensions")),
    "conv_general_dilated": ("convolves", _of_convolution),
    **{f"reduce_window{name}": ("pools", _of_window) for name in WINDOWS},
    "gather": ("picks from", _of_gather),
}
# Operations that leave each position where it is, by itself.
ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh axis_index bitcast_convert_type
    broadcast_in_dim cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh
    device_put digamma div eq erf erf_inv erfc exp exp2 expand_dims expm1 floor ge gt imag
    integer_pow is_finite le lgamma log log1p logistic lt max min mul name ne neg nextafter not
    optimization_barrier or polygamma population_count pow pvary real reduce_precision rem round
    mesh_cast reshard rsqrt select_n sharding_constraint shift_left shift_right_arithmetic
    shift_right_logical sign
    sin sinh sqrt square squeeze stop_gradient sub tan tanh threefry2x32 transpose xor
    """.split()
)
