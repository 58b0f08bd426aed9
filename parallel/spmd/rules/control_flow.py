"""Rules of equations that hold programs: calls, rematerialised functions, loops, branches.

Values enter an inner program as local arrays, and become values again inside, by their placements.
A loop's carry has one placement: the first that the body returns again, found by abstract tracing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import DropVar, Jaxpr, JaxprEqn, Literal

from hfjax.parallel.jaxprs.model_mesh import in_branch
from hfjax.parallel.jaxprs.primitives import PLAIN_CALLS, REMAT_CALLS
from hfjax.parallel.jaxprs.walk import (
    body_of,
    equations_in,
    name_of,
    needed_equations,
    params_of,
    scan_counts,
)
from hfjax.parallel.spmd.partition_context import CommEvent, PartitionContext, aval_of
from hfjax.parallel.spmd.placements import (
    PARTIAL,
    REPLICATED,
    LazyValue,
    PartialValue,
    Placement,
    ShardedValue,
    Split,
    Ungathered,
    from_local,
    local_array,
    loop_placements,
    placement_of,
)
from hfjax.parallel.spmd.rule_calls import call_of

Values = Sequence[Any]
Body = Callable[[PartitionContext, Values], Values]


def call(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values:
    """Run the body in place of the call."""
    outer_source, ctx.outer_source = ctx.outer_source, ctx.source_info
    outs = ctx.run(ctx, *_body(equation), values)
    ctx.outer_source = outer_source
    return outs


def _body(equation: JaxprEqn) -> tuple[Any, Sequence[Any]]:
    body = body_of(equation)
    assert body is not None
    return body


def make_body(jaxpr: Jaxpr, constants: Sequence[Any]) -> Body:
    """Return (context, values) -> values of a program."""
    return lambda ctx, values: ctx.run(ctx, jaxpr, constants, values)


def prepare_operands(ctx: PartitionContext, values: Values) -> list[Any]:
    """Return values that may enter an inner program: sums all-reduced, lazy values computed."""
    operands = (
        ctx.replicate(v) if isinstance(v, PartialValue) else ctx.evaluate_lazy(v) for v in values
    )
    return list(operands)


def values_from_local(arrays: Sequence[Any], placements: Sequence[Placement]) -> list[Any]:
    """Return values with these placements."""
    return [from_local(x, placement) for x, placement in zip(arrays, placements, strict=True)]


def infer_placements(
    ctx: PartitionContext,
    body: Body,
    arrays: Sequence[Any],
    placements: Sequence[Placement],
    extra: Any = (),
) -> tuple[list[Placement], list[CommEvent]]:
    """Return the placements of the outputs of a program, and its events.

    `body(context, values, *extra)` receives values with these placements, and trees of arrays.
    """
    comms: list[CommEvent] = []
    out_placements: list[Placement] = []

    def run(arrays: Sequence[Any], more: Any) -> list[Any]:
        inner = ctx.child(comms=comms)
        values = list(
            map(inner.materialize, body(inner, values_from_local(arrays, placements), *more))
        )
        out_placements[:] = map(placement_of, values)
        return list(map(local_array, values))

    jax.eval_shape(run, list(arrays), extra)
    return out_placements, comms


def common_placements(placement_lists: Sequence[Sequence[Placement]]) -> list[Placement]:
    """Return placements that suit the outputs of each of some programs."""
    return [_common_placement(set(placements)) for placements in zip(*placement_lists, strict=True)]


def _common_placement(placements: set[Placement]) -> Placement:
    splits = [placement for placement in placements if isinstance(placement, Split)]
    if splits:
        return splits[0] if len(splits) == 1 else REPLICATED
    return PARTIAL if PARTIAL in placements else REPLICATED


def remat(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values:
    """Rematerialise the body, by its policy: what is gathered inside is gathered again."""
    values = [v if isinstance(v, Ungathered) else prepare_operands(ctx, [v])[0] for v in values]
    ungathered_mask = [isinstance(v, Ungathered) for v in values]
    in_placements = [
        None if is_ungathered else placement_of(v)
        for v, is_ungathered in zip(values, ungathered_mask, strict=True)
    ]
    out_placements: list[Placement] = []
    body, constants = _body(equation)

    def run(*arrays: Any) -> list[Any]:
        inner = ctx.child()
        operands = [
            ctx.make_ungathered(x) if placement is None else from_local(x, placement)
            for x, placement in zip(arrays, in_placements, strict=True)
        ]
        outs = [inner.evaluate_lazy(v) for v in inner.run(inner, body, constants, operands)]
        outs = [inner.replicate(v) if isinstance(v, Ungathered) else v for v in outs]
        out_placements[:] = map(placement_of, outs)
        return list(map(local_array, outs))

    options = {name: params_of(equation)[name] for name in ("policy", "prevent_cse")}
    arrays = [v.param if isinstance(v, Ungathered) else local_array(v) for v in values]
    return values_from_local(jax.checkpoint(run, **options)(*arrays), out_placements)


def scan(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values | None:
    """Run a loop: each device its shard of the iterations, if only sums are carried; else all."""
    n_consts, n_carry = scan_counts(equation)
    jaxpr, constants = _body(equation)
    consts = prepare_operands(
        ctx, [ctx.replicate(v) if isinstance(v, Ungathered) else v for v in values[:n_consts]]
    )
    init, xs = values[n_consts : n_consts + n_carry], list(values[n_consts + n_carry :])
    init = [ctx.replicate(v) if isinstance(v, Ungathered) else v for v in init]
    if any(isinstance(v, ShardedValue) and v.split.dim == 0 for v in xs):
        outs = _scan_local(ctx, equation, consts, init, xs)
        if outs is not None:
            return outs
        ctx.has_rule = False  # a gather for want of a rule, as in the fallback
        xs = [_replicate_leading(ctx, v) for v in xs]
        ctx.has_rule = True
    ctx.on_sliced_params([v for v in xs if isinstance(v, Ungathered)])
    xs = [_scan_input(ctx, v) for v in xs]
    const_placements = list(map(placement_of, consts))
    slice_placements = [
        v
        if isinstance(v, Ungathered)
        else k.with_dim(k.dim - 1)
        if isinstance(k := placement_of(v), Split)
        else k
        for v in xs
    ]
    const_arrays = list(map(local_array, consts))

    def body(inner: PartitionContext, carry: Values, slices: Sequence[Any]) -> Values:
        slice_values = [
            inner.make_ungathered(x) if isinstance(k, Ungathered) else from_local(x, k)
            for x, k in zip(slices, slice_placements, strict=True)
        ]
        operands = [*values_from_local(const_arrays, const_placements), *carry, *slice_values]
        return inner.run(inner, jaxpr, constants, operands)

    slice_shape = lambda x: jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), x)
    x_arrays = [v.param if isinstance(v, Ungathered) else local_array(v) for v in xs]
    slices = list(map(slice_shape, x_arrays))
    run = lambda inner, carry, slices: body(inner, carry, slices)[:n_carry]
    carry_placements = _carry_placements(ctx, run, init, slices)
    y_placements: list[Placement] = []

    def step(carry: list, slices: list) -> tuple[list, list]:
        inner = ctx.child(times=equation.params["length"])
        out = body(inner, values_from_local(carry, carry_placements), slices)
        out = [inner.replicate(v) if isinstance(v, Ungathered) else v for v in out]
        new_carry = [
            inner.redistribute(v, k) for v, k in zip(out[:n_carry], carry_placements, strict=True)
        ]
        ys = [inner.evaluate_lazy(v) for v in out[n_carry:]]
        y_placements[:] = map(placement_of, ys)
        return new_carry, list(map(local_array, ys))

    options = {name: equation.params[name] for name in ("length", "reverse", "unroll")}
    init_arrays = [
        jnp.asarray(ctx.redistribute(v, k)) for v, k in zip(init, carry_placements, strict=True)
    ]
    final_carry, ys = lax.scan(step, init_arrays, x_arrays, **options)
    stacked_placements = [
        k.with_dim(k.dim + 1) if isinstance(k, Split) else k for k in y_placements
    ]
    return [
        *values_from_local(final_carry, carry_placements),
        *values_from_local(ys, stacked_placements),
    ]


def _replicate_leading(ctx: PartitionContext, value: Any) -> Any:
    is_split = isinstance(value, ShardedValue) and value.split.dim == 0
    return ctx.replicate(value) if is_split else value


def _scan_input(ctx: PartitionContext, value: Any) -> Any:
    """Return what a loop slices: a parameter to gather slice by slice, a shard or a full array."""
    if isinstance(value, Ungathered):
        return value if value.can_slice else ctx.replicate(value)
    if isinstance(value, PartialValue):
        return ctx.replicate(value)
    if isinstance(value, LazyValue):
        split = ctx.find_split(value.shape[1:])
        x_split = split and split.with_dim(split.dim + 1)
        return (
            ctx.replicate(value)
            if x_split is None
            else ShardedValue(ctx.shard(value, x_split), x_split)
        )
    return value


def _scan_local(
    ctx: PartitionContext, equation: JaxprEqn, consts: Values, init: Values, xs: Values
) -> Values | None:
    """Return the outputs of a loop that carries only sums: each device runs its own iterations.

    A carry may be added to, and is then a sum that no iteration reads; or it stays unchanged.
    """
    split = next(v.split for v in xs if isinstance(v, ShardedValue) and v.split.dim == 0)
    has_sharded_consts = any(isinstance(v, ShardedValue) for v in consts)
    if has_sharded_consts or any(isinstance(v, ShardedValue) and v.split != split for v in xs):
        return None
    jaxpr = equation.params["jaxpr"].jaxpr
    is_sum = _find_accumulators(jaxpr, jaxpr.invars[len(consts) : len(consts) + len(init)])
    if is_sum is None or _needs_other_devices(jaxpr, ctx.group.axes):
        return None
    local_xs = [ctx.shard(ctx.replicate(v) if isinstance(v, Ungathered) else v, split) for v in xs]
    length = equation.params["length"] // ctx.group.size
    init_arrays = [
        ctx.as_partial(v) if add else ctx.replicate(v) for v, add in zip(init, is_sum, strict=True)
    ]
    outs = ctx.bind(equation, [*map(ctx.replicate, consts), *init_arrays, *local_xs], length=length)
    final_carry = [PartialValue(x) if add else x for x, add in zip(outs, is_sum, strict=False)]
    return [*final_carry, *(ShardedValue(x, split) for x in outs[len(init) :])]


# How a value depends on the sums that are inputs of its program: None, if it does not; the number
# of a sum, if it is that sum and what was added to it; else MIXED.
Mark = int | None
MIXED = -1


def _find_accumulators(jaxpr: Jaxpr, carry_vars: Sequence[Any]) -> list[bool] | None:
    """Return which carries are sums, if all others stay unchanged and no iteration reads a sum."""
    unchanged = [v is out for v, out in zip(carry_vars, jaxpr.outvars, strict=False)]
    marks = {v: i for i, v in enumerate(carry_vars) if not unchanged[i]}
    int_vars = [v for v in marks if not jnp.issubdtype(v.aval.dtype, jnp.inexact)]
    if any(v.aval.dtype.itemsize < 4 for v in int_vars):
        return None
    out_marks = _propagate_marks(jaxpr, [marks.get(v) for v in jaxpr.invars])
    return (
        [not is_unchanged for is_unchanged in unchanged]
        if _are_accumulators(out_marks, unchanged)
        else None
    )


def _are_accumulators(out_sources: list[Mark], unchanged: list[bool]) -> bool:
    """Return whether each sum is returned in its place, and nothing else depends on one."""
    expected = [None if is_unchanged else number for number, is_unchanged in enumerate(unchanged)]
    return out_sources == [*expected, *[None] * (len(out_sources) - len(unchanged))]


def _propagate_marks(jaxpr: Jaxpr, marks: Sequence[Mark]) -> list[Mark]:
    """Return the marks of the outputs of a program, by those of its inputs."""
    known = {v: mark for v, mark in zip(jaxpr.invars, marks, strict=True) if mark is not None}
    read = lambda v: None if isinstance(v, Literal) else known.get(v)
    for equation in jaxpr.eqns:
        in_marks = list(map(read, equation.invars))
        if in_marks.count(None) == len(in_marks):
            continue
        if needed_equations([equation], []):  # it has effects
            return [MIXED] * len(jaxpr.outvars)
        rule = _MARK_RULES.get(name_of(equation))
        out_marks = rule(equation, in_marks) if rule else None
        known.update(
            zip(equation.outvars, out_marks or [MIXED] * len(equation.outvars), strict=True)
        )
    return list(map(read, jaxpr.outvars))


def _mark_add(equation: JaxprEqn, marks: list[Mark]) -> list[Mark] | None:
    a, b = marks
    return None if a is not None and b is not None else [b if a is None else a]


def _mark_sub(equation: JaxprEqn, marks: list[Mark]) -> list[Mark] | None:
    a, b = marks
    return [a] if b is None else None


def _mark_convert(equation: JaxprEqn, marks: list[Mark]) -> list[Mark] | None:
    (in_var,), (out_var,) = equation.invars, equation.outvars
    return marks if aval_of(in_var).dtype == aval_of(out_var).dtype else None


def _mark_body(equation: JaxprEqn, marks: list[Mark]) -> list[Mark] | None:
    jaxpr, _ = _body(equation)
    return _propagate_marks(jaxpr, marks) if len(jaxpr.invars) == len(marks) else None


_MARK_RULES: dict[str, Callable] = {
    "add": _mark_add,
    "add_any": _mark_add,
    "sub": _mark_sub,
    "convert_element_type": _mark_convert,  # of a weakly typed number
    **dict.fromkeys(PLAIN_CALLS | REMAT_CALLS, _mark_body),
}


def _needs_other_devices(jaxpr: Jaxpr, axes: Sequence[str]) -> bool:
    """Return whether a program has what a device may not run by itself.

    That is a collective over these axes, a callback whose value is used, or a placeholder call.
    """
    for equation, _ in equations_in(jaxpr):
        axis_names = equation.params.get("axes", equation.params.get("axis_name", ()))
        axis_names = axis_names if isinstance(axis_names, tuple | list) else (axis_names,)
        if any(isinstance(n, str) and n in axes for n in axis_names):
            return True
        has_uses = any(not isinstance(v, DropVar) for v in equation.outvars)
        if equation.primitive.name == "io_callback" and has_uses:
            return True
        if (call := call_of(equation)) is not None and call.is_placeholder:
            return True
    return False


def _carry_placements(
    ctx: PartitionContext, body: Callable, init: Values, slices: Sequence[Any]
) -> list[Placement]:
    """Return the placements of a carry that `body` keeps: (context, carry, slices) -> carry."""
    placements = [REPLICATED if isinstance(v, PartialValue) else placement_of(v) for v in init]

    def local_aval(value: Any, placement: Placement) -> jax.ShapeDtypeStruct:
        shape, x = ctx.shape(value), value if isinstance(value, LazyValue) else local_array(value)
        return jax.ShapeDtypeStruct(
            ctx.group.local_shape(shape, placement) if isinstance(placement, Split) else shape,
            x.dtype,
        )

    def next_placements(placements: list[Placement]) -> list[Placement]:
        arrays = [local_aval(v, k) for v, k in zip(init, placements, strict=True)]
        return infer_placements(ctx, body, arrays, placements, (list(slices),))[0]

    return loop_placements(placements, next_placements)


def while_loop(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values:
    """Run until the global condition is false, on all devices together."""
    p = equation.params
    n_cond, n_body = p["cond_nconsts"], p["body_nconsts"]
    values = [ctx.replicate(v) if isinstance(v, Ungathered) else v for v in values]
    cond_consts = prepare_operands(ctx, values[:n_cond])
    body_consts = prepare_operands(ctx, values[n_cond : n_cond + n_body])
    init = values[n_cond + n_body :]
    run_cond = make_body(p["cond_jaxpr"].jaxpr, p["cond_jaxpr"].consts)
    run_body = make_body(p["body_jaxpr"].jaxpr, p["body_jaxpr"].consts)
    is_per_entry = bool(
        p["cond_jaxpr"].out_avals[0].shape
    )  # a loop for each entry, as vmap makes it

    def body(inner: PartitionContext, carry: Values, _: Any) -> Values:
        out = run_body(inner, [*body_consts, *carry])
        active = (
            inner.materialize(run_cond(inner, [*cond_consts, *carry])[0]) if is_per_entry else None
        )
        return (
            [_ensure_sharded(inner, v, active.split) for v in out]
            if isinstance(active, ShardedValue)
            else out
        )

    placements = _carry_placements(ctx, body, init, [])
    init_arrays = [
        jnp.asarray(ctx.redistribute(v, k)) for v, k in zip(init, placements, strict=True)
    ]
    run_both = lambda inner, values: [
        *run_cond(inner, [*cond_consts, *values]),
        *run_body(inner, [*body_consts, *values]),
    ]
    _, comms = infer_placements(ctx, run_both, init_arrays, placements)
    is_independent = not comms and all(
        isinstance(placement, Split) for placement in placements
    )  # each device on its own
    if is_per_entry and not is_independent:
        ctx.record("greatest", jnp.zeros((), "int32"))

    def condition(arrays: list) -> Any:
        inner = ctx.child()
        (pred,) = run_cond(inner, [*cond_consts, *values_from_local(arrays, placements)])
        if is_per_entry:
            local_pred = local_array(inner.materialize(pred)).any()
            return (
                local_pred
                if is_independent or not isinstance(pred, ShardedValue)
                else ctx.group.all_reduce_max(local_pred)
            )
        pred = inner.replicate(pred)
        return ctx.group.broadcast_from_first(pred) if comms else pred

    def step(arrays: list) -> list:
        inner = ctx.child()
        values = values_from_local(arrays, placements)
        out = run_body(inner, [*body_consts, *values])
        new_carry = [inner.redistribute(v, k) for v, k in zip(out, placements, strict=True)]
        if not is_per_entry:
            return new_carry
        (active,) = run_cond(inner, [*cond_consts, *values])
        return [
            _select_active(inner, active, x, y, k)
            for x, y, k in zip(new_carry, arrays, placements, strict=True)
        ]

    return values_from_local(lax.while_loop(condition, step, init_arrays), placements)


def _ensure_sharded(ctx: PartitionContext, value: Any, split: Split) -> ShardedValue:
    """Return the carry of a loop for each entry with the split of its condition."""
    return (
        value if isinstance(value, ShardedValue) else ShardedValue(ctx.shard(value, split), split)
    )


def _select_active(
    ctx: PartitionContext, active: Any, new: Any, old: Any, placement: Placement
) -> jax.Array:
    """Return `new` where a loop for each entry is active (by leading dimensions), else `old`."""
    is_split = isinstance(placement, Split) and placement.dim < len(ctx.shape(active))
    mask = ctx.redistribute(active, placement if is_split else REPLICATED)
    return jnp.where(mask.reshape(*mask.shape, *[1] * (new.ndim - mask.ndim)), new, old)


def _branch_body(jaxpr: Jaxpr, constants: Sequence[Any]) -> Body:
    """Return (context, values) -> values of a branch, which makes no constraints."""
    run_branch = make_body(jaxpr, constants)

    def run(ctx: PartitionContext, values: Values) -> Values:
        with in_branch():
            return run_branch(ctx, values)

    return run


def cond(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values:
    """Take one branch, the same on all devices: by the global index."""
    index, *operands = (ctx.replicate(v) if isinstance(v, Ungathered) else v for v in values)
    operands, index = prepare_operands(ctx, operands), ctx.replicate(index)
    in_placements, arrays = list(map(placement_of, operands)), list(map(local_array, operands))
    bodies = [_branch_body(b.jaxpr, b.consts) for b in equation.params["branches"]]
    inferred = [infer_placements(ctx, body, arrays, in_placements) for body in bodies]
    out_placements = common_placements([placements for placements, _ in inferred])
    if any(comms for _, comms in inferred):
        index = ctx.group.broadcast_from_first(index)

    def branch(body: Body) -> Callable:
        def run(*arrays: Any) -> list[Any]:
            inner = ctx.child()
            outs = body(inner, values_from_local(arrays, in_placements))
            return [
                jnp.asarray(inner.redistribute(v, k))
                for v, k in zip(outs, out_placements, strict=True)
            ]

        return run

    return values_from_local(lax.switch(index, list(map(branch, bodies)), *arrays), out_placements)
