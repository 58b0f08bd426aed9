"""Calls that tracing keeps as one equation, since they run by a rule of their own.

`per_device` is one: it runs part of a model on each device's own examples.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.errors import TraceContextError
from jax.core import ShapedArray
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

from hfjax.parallel.jaxprs.model_mesh import call_or_trace
from hfjax.parallel.jaxprs.walk import bodies_of, body_of, equations_in, name_of
from hfjax.parallel.spmd.partition_context import (
    PartitionContext,
    is_recording,
    record_calls,
    trace_global,
)
from hfjax.parallel.spmd.placements import (
    BATCH_SPLIT,
    ONE_DEVICE,
    LazyValue,
    PartialValue,
    Placement,
    ShardedValue,
    Split,
    Ungathered,
    from_local,
    is_distributed,
    local_array,
    placement_of,
)

source_info_util.register_exclusion(__file__)  # the line of a kept call is the user's

BATCH_GROUP = ONE_DEVICE.name


class CallName(str):
    """The name of a call in a program; it holds the call, however often JAX reuses the program."""

    __slots__ = ("call",)
    call: "RuleCall"


def call_of(equation: JaxprEqn) -> "RuleCall | None":
    """Return the `RuleCall` that an equation is, if it is one."""
    name = equation.params.get("name")
    return name.call if isinstance(name, CallName) else None


@dataclass(frozen=True)
class RuleCall:
    """A call that was recorded.

    Attributes:
        rule: (call, context, its program, arguments) -> results: trees of values.
        function: The called function, of trees of arrays.
        reapply: The same, recorded again if it is called while another program is traced.
        in_tree: The structure of its arguments.
        out_tree: The structure of its results.
        program: The traced program.
        refusal: What it is, and what to do, where its program is not that of the global batch.
        is_placeholder: Whether the traced program has the right shapes only, and cannot run.
    """

    rule: Callable
    function: Callable
    reapply: Callable
    in_tree: Any
    out_tree: Any
    program: ClosedJaxpr
    refusal: str = ""
    is_placeholder: bool = False

    def _find_transform(self, equation: JaxprEqn) -> str:
        """Return how JAX has transformed the call, if it has: its derivative, or a `vmap`."""
        same_outputs = len(equation.outvars) == self.out_tree.num_leaves
        if same_outputs and len(equation.invars) > self.in_tree.num_leaves:
            return "an array that the function closes over (hand it in as an argument) is in"
        program = equation.params["jaxpr"]
        if same_outputs and (program is self.program or str(program) == str(self.program)):
            return ""
        pairs = zip(program.in_avals, self.program.in_avals, strict=False)
        added_dims = {now.ndim - before.ndim for now, before in pairs}
        return VMAP if same_outputs and added_dims in ({1}, {0, 1}) else GRAD

    def __call__(
        self, ctx: PartitionContext, equation: JaxprEqn, values: Sequence[Any]
    ) -> Sequence[Any]:
        """Return the outputs of the call."""
        body = body_of(equation)
        assert body is not None
        transform = self._find_transform(equation)
        if transform and ctx.group.size == 1 and not self.is_placeholder:
            return ctx.run(ctx, *body, values)
        if transform and self.refusal:
            raise ValueError(f"{ctx.line}: {transform} {self.refusal}")
        if transform:
            return ctx.run(ctx, *body, values)
        outs = self.rule(self, ctx, body, self.in_tree.unflatten(values))
        return jax.tree.leaves(outs, is_leaf=is_distributed)


VMAP = "jax.vmap is around"
GRAD = "the model differentiates, within its own program, with respect to something in"


def calls_in(equation: JaxprEqn) -> Iterator[RuleCall]:
    """Yield each `RuleCall` in the programs that an equation holds."""
    for jaxpr, _ in bodies_of(equation):
        yield from (call for inner, _ in equations_in(jaxpr) if (call := call_of(inner)))


def check_calls(ctx: PartitionContext, equation: JaxprEqn) -> None:
    """Refuse to run an equation as written if a call inside it cannot run so."""
    for call in calls_in(equation):
        if call.is_placeholder or (call.refusal and ctx.group.size > 1):
            name = name_of(equation)
            raise ValueError(
                f"{ctx.line}: {name}, which runs on all examples, is around {call.refusal}"
            )


# -- placeholders of calls that cannot be traced at global shapes ----------------------------------

_placeholder = Primitive("placeholder")  # shapes only: if it runs, a rule is missing
_placeholder.multiple_results = True
_placeholder.def_abstract_eval(lambda *_, results, **more: list(results))


def _make_placeholder(shapes: Callable, refusal: str) -> Callable:
    """Return a function with results like those of `shapes`, for a program that is never run."""
    line = source_info_util.summarize(source_info_util.current())

    def function(*arguments: Any) -> Any:
        out_shapes, out_tree = jax.tree.flatten(jax.eval_shape(shapes, *arguments))
        out_avals = tuple(ShapedArray(x.shape, x.dtype) for x in out_shapes)
        params = {"line": line, "refuses": refusal}
        leaves = jax.tree.leaves(arguments)
        return out_tree.unflatten(_placeholder.bind(*leaves, results=out_avals, **params))

    return function


def _refuse_with(reason: str) -> Callable:
    def refuse(*_: Any, line: str, refuses: str, **more: Any) -> Any:
        raise ValueError(f"{line}: {reason} {refuses}")

    return refuse


_placeholder.def_impl(_refuse_with("outside of a step there is"))
ad.primitive_jvps[_placeholder] = _refuse_with(GRAD)
batching.primitive_batchers[_placeholder] = _refuse_with(VMAP)
mlir.register_lowering(
    _placeholder, _refuse_with("a program is run as it is written (a fault of hfjax) with")
)


def keep_as_call(
    rule: Callable, function: Callable, shapes: Callable | None = None, refusal: str = ""
) -> Callable:
    """Return a function of trees of arrays that stays one call in the program being traced.

    `shapes` gives the shapes of its results, where it cannot be traced at global shapes.
    """

    def wrapper(*arguments: Any) -> Any:
        body_function = function if shapes is None else _make_placeholder(shapes, refusal)
        leaves, in_tree = jax.tree.flatten(arguments)
        out_tree: Any = None

        def flat(*leaves: Any) -> list[Any]:
            nonlocal out_tree
            out_leaves, out_tree = jax.tree.flatten(body_function(*in_tree.unflatten(leaves)))
            return out_leaves

        flat.__name__ = name = CallName("named")
        jitted = jax.jit(flat)
        program, is_placeholder = jitted.trace(*leaves).jaxpr, shapes is not None
        out_leaves = jitted(*leaves)
        call = RuleCall(
            rule, function, reapply, in_tree, out_tree, program, refusal, is_placeholder
        )
        name.call = call
        return out_tree.unflatten(out_leaves)

    def reapply(*arguments: Any) -> Any:
        return wrapper(*arguments) if is_recording() else function(*arguments)

    return wrapper


def per_device(function: Callable) -> Callable:
    """Return the function run on each device's own examples, where devices shard the batch.

    Results with one entry for each local example are sharded like the batch. Any other result is
    averaged over the devices (of integers the maximum is taken), so it depends on the mesh. Outside
    of a step it is the function itself.

    Args:
        function: Of trees of arrays; it closes over none.

    Example:
        >>> import hfjax, jax.numpy as jnp
        >>> centred = hfjax.per_device(lambda x: x - x.mean(0, keepdims=True))
        >>> centred(jnp.array([[1.0], [3.0]])).tolist()
        [[-1.0], [1.0]]
    """

    return _wrap_call(function, _run_per_device, refusal=PER_DEVICE)


PER_DEVICE = (
    "hfjax.per_device. Let own_rows be around: hfjax.per_device(jax.vmap(function)), "
    "hfjax.per_device(jax.grad(function))."
)
EXPERTS = (
    "a mixture of experts, whose tokens travel between devices. Call it on all tokens at once, and "
    "differentiate outside of the model."
)
WRITES = (
    "hfjax.per_device(function): the function writes to a module that was made outside of it. "
    "Split the module, hand its state in and out (nnx.split, nnx.merge), or let BatchNorm "
    "normalise over each device's examples with hfjax.layout(…, sync_batch_norm=False)."
)


def local_map(function: Callable) -> Callable:
    """Return the function, which mixes no examples, run on shards: its derivative is global."""
    return _wrap_call(function, _run_local)


def map_token_groups(function: Callable, with_dispatch: bool) -> Callable:
    """Return a function of (arrays, groups of tokens, …) -> groups, run on local groups.

    If it dispatches tokens to other devices, it cannot be traced at global shapes.
    """
    if not with_dispatch:
        return _wrap_call(function, _run_token_groups)
    return _wrap_call(function, _run_token_groups, lambda arrays, x, *more: x, EXPERTS)


def _wrap_call(
    function: Callable, rule: Callable, shapes: Callable | None = None, refusal: str = ""
) -> Callable:
    def run_unrecorded(*arguments: Any) -> Any:  # what it calls runs on the same shards
        with record_calls(False):
            return function(*arguments)

    def wrapper(*arguments: Any) -> Any:
        if not is_recording():
            return function(*arguments)
        try:
            return keep_as_call(rule, run_unrecorded, shapes, refusal)(*arguments)
        except TraceContextError as error:
            raise ValueError(WRITES) from error

    return wrapper


def _run_local(call: RuleCall, ctx: PartitionContext, body: tuple, arguments: tuple) -> list:
    """Run a function on the local arrays."""
    leaves, in_tree = jax.tree.flatten(arguments, is_leaf=_is_leaf)
    arrays = in_tree.unflatten([local_array(v) for v in _as_sharded_or_full(ctx, leaves)])
    outs = call_or_trace(call.reapply, partial(_run_traced, ctx, call.function), *arrays)
    jaxpr, _ = body
    pairs = zip(jax.tree.leaves(outs), jaxpr.outvars, strict=True)
    return [_as_sharded_or_mean(ctx, jnp.asarray(x), v.aval.shape) for x, v in pairs]


def _run_traced(ctx: PartitionContext, function: Callable, *arguments: Any) -> Any:
    """Return the results of a function of local arrays that asks for a mesh."""
    local_ctx = PartitionContext(ONE_DEVICE, [], {}, ctx.run)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), arguments)
    program, out_shapes = trace_global(ONE_DEVICE, function, *shapes)
    outs = ctx.run(local_ctx, program.jaxpr, program.consts, jax.tree.leaves(arguments))
    return jax.tree.unflatten(
        jax.tree.structure(out_shapes), list(map(local_ctx.materialize, outs))
    )


def _run_per_device(call: RuleCall, ctx: PartitionContext, body: tuple, arguments: tuple) -> list:
    """Run a function on this device's examples, of which it sees all positions."""
    if ctx.group.name == BATCH_GROUP:
        return _run_local(call, ctx, body, arguments)
    leaves, in_tree = jax.tree.flatten(arguments, is_leaf=_is_leaf)
    values = _as_sharded_or_full(ctx, leaves)
    in_placements, out_placements = list(map(placement_of, values)), list[Placement]()

    def function(*arrays: jax.Array) -> list[Any]:
        operands = [
            from_local(x, placement) for x, placement in zip(arrays, in_placements, strict=True)
        ]
        shapes = [jax.ShapeDtypeStruct(ctx.shape(v), local_array(v).dtype) for v in operands]
        flat = lambda *leaves: jax.tree.leaves(call.function(*in_tree.unflatten(leaves)))
        program, _ = trace_global(ctx.group, flat, *shapes)
        inner = ctx.child()
        outs = inner.run(inner, program.jaxpr, program.consts, operands)
        outs = list(map(inner.materialize, outs))
        out_placements[:] = map(placement_of, outs)
        return list(map(local_array, outs))

    outs = per_device(function)(*map(local_array, values))
    return [from_local(x, placement) for x, placement in zip(outs, out_placements, strict=True)]


def _as_sharded_or_full(ctx: PartitionContext, values: Sequence[Any]) -> list[Any]:
    """Return values as sharded values and full arrays."""
    return [ctx.replicate(v) if isinstance(v, PartialValue) else ctx.materialize(v) for v in values]


def _run_token_groups(call: RuleCall, ctx: PartitionContext, body: tuple, arguments: tuple) -> list:
    """Run a function on this device's groups of tokens, or on all where they do not divide."""
    arrays, *tokens = arguments
    leaves, in_tree = jax.tree.flatten(tokens, is_leaf=_is_leaf)
    is_split_by_group = isinstance(leaves[0], ShardedValue) and leaves[0].split.dim == 0
    split = leaves[0].split if is_split_by_group else BATCH_SPLIT
    divisible = (ctx.shape(v) and ctx.group.divides(ctx.shape(v), split) for v in leaves)
    divides = ctx.group.size > 1 and all(divisible)
    operands = [ctx.shard(v, split) if divides else ctx.replicate(v) for v in leaves]
    full_arrays = jax.tree.map(ctx.replicate, arrays, is_leaf=_is_leaf)
    outs = call.reapply(full_arrays, *in_tree.unflatten(operands))
    return [ShardedValue(x, split) if divides else x for x in jax.tree.leaves(outs)]


def _is_leaf(value: object) -> bool:
    return is_distributed(value) or isinstance(value, LazyValue | Ungathered)


def _as_sharded_or_mean(
    ctx: PartitionContext, x: jax.Array, global_shape: tuple[int, ...]
) -> ShardedValue | jax.Array:
    """Return a result of per-device computation as a value of the global program."""
    split_dims = [d for d, (n, m) in enumerate(zip(x.shape, global_shape, strict=True)) if n != m]
    if split_dims:
        return ShardedValue(x, Split(split_dims[0]))
    ctx.record("average", x)
    return ctx.group.all_reduce_mean(x)
