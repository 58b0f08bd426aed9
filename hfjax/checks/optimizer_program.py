"""What an optimizer computes, read from its own program: nothing is run.

`OptimizerProgram` gives every value that an optimizer computes a term: which operations make it,
of what. Arrays have no size in a term, and a parameter no name, so that terms of a parameter and of
a part of it are the same if the same is done with each. A reduction over arrays names the arrays
that it is over; one over arrays of the program's own, their shape.
`mixes_entries` asks the table of rules whether entries along a dimension interact.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var

from hfjax.checks.padding import (
    NUMBER,
    ZeroEffects,
    ZeroValue,
    other_choices,
    select_zero_value,
    zero_effects_unless,
    zero_value_of,
)
from hfjax.parallel.jaxprs.bind import inline_calls
from hfjax.parallel.jaxprs.primitives import POINTWISE, RESHAPES
from hfjax.parallel.jaxprs.program import FlatProgram, trace_flat
from hfjax.parallel.jaxprs.walk import bodies_of, interpret, interpret_jaxpr
from hfjax.parallel.spmd.interpreter import eval_partitioned, make_context
from hfjax.parallel.spmd.partition_context import CommEvent, aval_of
from hfjax.parallel.spmd.placements import AxisGroup, ShardedValue, Split
from hfjax.utils.paths import Flat, find_parameter, flatten, nest

Entries = frozenset[str]  # of which parameters, or parts of them
NONE: Entries = frozenset()
Terms = dict[Hashable, int]  # each has a number
GRADIENT, PARAMETER, ARRAY_OF = "gradient", "parameter", "row of "

# Reductions of all entries, what combines two of them, and the neutral entry.
_TOTALS = {
    "reduce_sum": (("add", "add_any"), 0),
    "reduce_and": (("and",), 1),
    "reduce_or": (("or",), 0),
    "reduce_max": (("max",), None),
    "reduce_min": (("min",), None),
}
_COMBINES = {name: reduction for reduction, (names, _) in _TOTALS.items() for name in names}
_RESHAPES = RESHAPES.union(["broadcast_in_dim"])
_SHAPES = ("shape", "sharding", "out_sharding", "new_sizes", "broadcast_dimensions", "weak_type")
_AXES = ("axes", "axis", "dimension", "dimensions")


class Value(NamedTuple):
    """What is known about a value.

    Attributes:
        term: The number of its term.
        entries: Whose entries it has; none if it is a number.
        is_dependent: Whether it depends on a gradient, a parameter or their optimizer state.
        zero_value: Its value where the arrays that it depends on are 0.
        totals: If it is a total: of what kind, of which terms, over whose entries. Of an array of
            totals, that of all.
        zero_effects: Where more zeros would change it: (a selecting number, its case), ALWAYS.
        is_number: Whether it is one number, of whatever shape.
        is_elementwise: Whether each entry is computed from the entries in its place and numbers.
    """

    term: int
    entries: Entries = NONE
    is_dependent: bool = False
    zero_value: ZeroValue = None
    totals: tuple[str, frozenset[tuple[int, tuple[str, ...]]]] | None = None
    zero_effects: ZeroEffects = frozenset()
    is_number: bool = False
    is_elementwise: bool = False


class OptimizerProgram:
    """An optimizer's update of parameters of these shapes.

    Args:
        optimizer: Any optax transformation.
        parameters: Path -> shape and dtype.
        entries: Path -> whose entries it has.
        terms: Those of the programs that it is compared with.
        padded: Of whose entries there may be more, which are 0.
    """

    def __init__(
        self,
        optimizer: Any,
        parameters: Flat,
        entries: Mapping[str, Entries],
        terms: Terms,
        padded: Entries = NONE,
    ) -> None:
        self._terms, self._entries, self._padded = terms, entries, padded
        shapes = {path: _at_least_float32(x) for path, x in parameters.items()}
        state = jax.eval_shape(optimizer.init, nest(shapes))
        pairs, treedef = jax.tree_util.tree_flatten_with_path(state)
        self.names = [jax.tree_util.keystr(keys) for keys, _ in pairs]

        def update(gradients: Flat, opt_state_leaves: list[Any], parameters: Flat) -> Any:
            inputs = (nest(gradients), treedef.unflatten(opt_state_leaves), nest(parameters))
            updates, state = optimizer.update(*inputs)
            initial_state = optimizer.init(nest(parameters))
            return (
                flatten(cast(dict, updates)),
                jax.tree.leaves(state),
                jax.tree.leaves(initial_state),
            )

        state_leaves = [leaf for _, leaf in pairs]
        self._piece: FlatProgram = trace_flat(update, shapes, state_leaves, shapes, run=_inline)
        self._shapes = {path: x.shape for path, x in shapes.items()}
        self._owners = [_leaf_owner(keys, leaf, self._shapes) for keys, leaf in pairs]
        self._paths, self._outputs = sorted(shapes), self._piece.outputs
        self._zeros = {PARAMETER, *(owner[1] for owner in self._owners if owner)}
        self._values = self._analyze()
        while not self._zeros <= (zeros := self._zero_after_update()):
            self._zeros &= zeros
            self._values = self._analyze()
        self._totals = {v: None for v, value in self._values.items() if value.totals}
        values = iter(map(self._value_of, self._outputs))
        self.updates = dict(zip(self._paths, values, strict=False))
        self.state = dict(zip(self.names, values, strict=False))
        self.initial_state = dict(zip(self.names, values, strict=True))

    # -- terms ------------------------------------------------------------------------------------

    def _term(self, *key: Hashable) -> int:
        return self._terms.setdefault(key, len(self._terms))

    def _analyze(self) -> dict[Var, Value]:
        """Return what is known about each value."""
        labels = [(path, GRADIENT) for path in self._paths]
        pairs = zip(self._owners, self.names, strict=True)
        labels += [owner or ("", name) for owner, name in pairs]
        labels += [(path, PARAMETER) for path in self._paths]
        known: dict[Var, Value] = {}
        for variable, (path, role) in zip(self._piece.inputs, labels, strict=True):
            number = aval_of(variable).shape == ()
            zero_value = 0.0 if role in (GRADIENT, *self._zeros) else None
            known[variable] = (
                Value(
                    self._term("own", role),
                    self._entries[path],
                    True,
                    zero_value,
                    is_elementwise=True,
                )
                if path
                else _number_value(self._term("kept", role), number)
            )
        for variable, constant in self._piece.constants.items():
            known[variable] = self._constant(constant)
        self._interpret(self._piece, known)
        return known

    def _constant(self, x: Any) -> Value:
        if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        array = np.asarray(x)
        term = self._term("constant", str(array.dtype), array.shape, array.tobytes())
        if array.shape != ():
            return Value(term)
        is_exact = array.dtype.kind in "biuf" and np.isfinite(array)
        return _number_value(term)._replace(zero_value=float(array) if is_exact else None)

    def _value_of(self, v: Any) -> Value:
        return self._constant(v.val) if isinstance(v, Literal) else self._values[v]

    def _interpret(self, program: FlatProgram, known: dict[Var, Value]) -> list[Value]:
        """Return the values of a program's outputs; all values are added to the known ones."""
        run, constant = self._eval_equation, self._constant
        return interpret(program.equations, known, program.outputs, run, constant)

    def _eval_equation(self, equation: Any, operands: list[Value]) -> list[Value]:
        name, variables = equation.primitive.name, equation.outvars
        if not variables:  # a print
            return []
        if (short_cut := self._reshape_or_total_value(equation, operands)) is not None:
            return [short_cut]
        shapes = [v.aval.shape for v in equation.invars]
        ndim, out = max(map(len, shapes), default=0), variables[0].aval
        key = (name, *_params_without_sizes(name, equation.params, ndim, out.ndim))
        bodies = list(self._body_values(equation, operands))
        key = (*key, *(tuple(v.term for v in body) for body in bodies))
        if out.ndim < ndim and not any(
            v.entries for v in operands
        ):  # of its own arrays, or of numbers
            key = (*key, *shapes)
        is_select = name == "select_n" and operands[0].is_number
        zeros = [NUMBER if v.is_number and v.zero_value is None else v.zero_value for v in operands]
        are_operands_same = len({v.term for v in operands}) == 1
        zero_value = zero_value_of(name, zeros, equation.params, are_operands_same)
        if is_select:
            zero_value = select_zero_value(operands[0].term, zeros[1:])
        value = self._op_value(key, operands)
        is_number = all(v.is_number for v in operands) and bool(operands)
        is_number &= name in POINTWISE or out.size == 1
        is_elementwise = name in POINTWISE and all(v.is_elementwise for v in operands)
        new_zero_value = None if is_number and not isinstance(zero_value, float) else zero_value
        value = value._replace(
            zero_value=new_zero_value,
            is_number=is_number,
            is_elementwise=is_elementwise or is_number,
        )
        value = value._replace(
            zero_effects=value.zero_effects.union(
                *(v.zero_effects for body in bodies for v in body)
            )
        )
        if is_select:
            cases = [
                v.zero_effects - other_choices(operands[0].term, i)
                for i, v in enumerate(operands[1:])
            ]
            value = value._replace(zero_effects=operands[0].zero_effects.union(*cases))
        return [value._replace(term=self._term(value.term, i)) for i in range(len(variables))]

    def _op_value(self, key: tuple, inputs: Sequence[Value]) -> Value:
        """Return the value of an operation; where entries of several meet, the term says whose."""
        is_mixed = len({v.entries for v in inputs if v.entries}) > 1
        terms = [(v.term, tuple(sorted(v.entries))) if is_mixed else v.term for v in inputs]
        entries, is_dependent = (
            NONE.union(*(v.entries for v in inputs)),
            any(v.is_dependent for v in inputs),
        )
        zero_effects = ZeroEffects().union(*(v.zero_effects for v in inputs))
        return Value(self._term(*key, *terms), entries, is_dependent, zero_effects=zero_effects)

    def _body_values(self, equation: JaxprEqn, operands: Sequence[Value]) -> Iterator[list[Value]]:
        """Yield the values that the bodies of a loop return for these operands."""
        entries = NONE.union(*(v.entries for v in operands))
        for body, constants in bodies_of(equation):
            arguments = [Value(self._term("in", i), entries, True) for i in range(len(body.invars))]
            constant_values, run = list(map(self._constant, constants)), self._eval_equation
            yield interpret_jaxpr(body, constant_values, arguments, run, constant=self._constant)

    def _reshape_or_total_value(self, equation: Any, operands: list[Value]) -> Value | None:
        """Return a reshaped number, or a total; None: neither."""
        name, out = equation.primitive.name, equation.outvars[0].aval
        if name in _RESHAPES and (
            operands[0].is_number or len(out.shape) == 1 < equation.invars[0].aval.ndim
        ):
            return operands[0]
        kinds = {v.totals and v.totals[0] for v in operands}
        if name in ("concatenate", "stack") and len(kinds) == 1 and (kind := kinds.pop()):
            array_value = self._op_value((ARRAY_OF,), operands)
            reduction = self._total_value(kind, operands)
            totals = (ARRAY_OF + kind, reduction.totals[1])  # type: ignore[index]
            return array_value._replace(totals=totals, zero_effects=reduction.zero_effects)
        if out.shape != ():
            return None
        reduction = _COMBINES.get(name, "")
        if reduction and any(v.totals for v in operands):
            pairs = zip(operands, equation.invars, strict=True)
            summands = [v for v, x in pairs if not (isinstance(x, Literal) and x.val == 0)]
            is_total = all(v.totals[0] == reduction if v.totals else v.entries for v in summands)
            return self._total_value(reduction, summands) if is_total else None
        if name in _TOTALS and kinds == {ARRAY_OF + name}:
            return self._total_value(name, operands)
        is_of_entries = all(v.entries and v.is_elementwise for v in operands) and kinds == {None}
        if is_of_entries and name == "dot_general" and _is_elementwise_dot(equation):
            product = self._op_value(("mul",), operands)
            zeros = [v.zero_value for v in operands]
            product = product._replace(zero_value=zero_value_of("mul", zeros, {}))
            return (
                self._total_value("reduce_sum", [product])
                if len({v.entries for v in operands}) == 1
                else None
            )
        return self._total_value(name, operands) if is_of_entries and name in _TOTALS else None

    def _total_value(self, name: str, summands: Sequence[Value]) -> Value:
        """Return the total of these; a summand that is no total is an entry or an array of them."""
        owners_of_term: dict[int, list[str]] = {}
        zero_effects = ZeroEffects().union(*(v.zero_effects for v in summands))
        for v in summands:
            for term, owners in v.totals[1] if v.totals else {(v.term, tuple(v.entries))}:
                owners_of_term[term] = sorted([*owners_of_term.get(term, []), *owners])
            if not v.totals and v.entries & self._padded:
                zero_effects |= zero_effects_unless(v.zero_value, _TOTALS[name][1])
        totals = frozenset((term, tuple(owners)) for term, owners in owners_of_term.items())
        is_dependent = any(v.is_dependent for v in summands)
        total = _number_value(self._term(name, totals))
        return total._replace(
            is_dependent=is_dependent, totals=(name, totals), zero_effects=zero_effects
        )

    def _zero_after_update(self) -> set[str]:
        """Return what is 0 in padding: if it starts as 0 and an update keeps it 0."""
        values, count = list(map(self._value_of, self._outputs)), len(self._paths)
        is_padded = lambda path: bool(self._entries[path] & self._padded)
        padded_updates = [
            v for v, path in zip(values, self._paths, strict=False) if is_padded(path)
        ]
        nonzero = set() if all(v.zero_value == 0 for v in padded_updates) else {PARAMETER}
        for number, owner in enumerate(self._owners):
            state_values = values[count + number], values[count + len(self._owners) + number]
            if owner and is_padded(owner[0]) and any(v.zero_value != 0 for v in state_values):
                nonzero.add(owner[1])
        return {PARAMETER, *(owner[1] for owner in self._owners if owner)} - nonzero

    # -- interactions -----------------------------------------------------------------------------

    def values_of(self, path: str, with_initial: bool = False) -> list[Value]:
        """Return the values computed for a parameter: update, state, and initial state."""
        pairs = zip(self._owners, self.names, strict=True)
        names = [name for owner, name in pairs if owner and owner[0] == path]
        initial = [self.initial_state[name] for name in names if with_initial]
        return [self.updates[path], *(self.state[name] for name in names), *initial]

    def numbers(self, with_initial: bool) -> dict[str, list[Value]]:
        """Return the values of numbers in the state, and of all that is like no parameter."""
        pairs = zip(self._owners, self.names, strict=True)
        names = [name for owner, name in pairs if not owner]
        return {
            n: [self.state[n], *([self.initial_state[n]] if with_initial else [])] for n in names
        }

    def uses_own_entries(self, path: str) -> bool:
        """Return whether a parameter's update depends on its own entries, numbers and totals."""
        return all(v.entries <= self._entries[path] for v in self.values_of(path, True))

    def is_elementwise(self, path: str) -> bool:
        """Return whether everything that is computed for a parameter is elementwise."""
        return all(v.is_elementwise for v in self.values_of(path))

    def is_counter(self, name: str, leaf: object) -> bool:
        """Return whether a number in the state stays unchanged, or counts updates."""
        for count in (lambda x: x, lambda x: x + 1, optax.safe_increment):
            counter = trace_flat(count, leaf)
            known = {counter.inputs[0]: _number_value(self._term("kept", name))}
            if self._interpret(counter, known)[0].term == self.state[name].term:
                return True
        return False

    def depends_on_zeros(self) -> bool:
        """Return whether more zeros would change what is computed."""
        return any(self._value_of(v).zero_effects for v in self._outputs)

    def mixes_entries(self, path: str, dim: int) -> bool:
        """Return whether entries of a parameter interact along a dimension, except in totals."""
        program, inputs, is_split = self._update_jaxpr(path)
        shape = self._shapes[path]
        group, split_spec, comms = (
            AxisGroup(("parts",), shape[dim], "entries"),
            Split(dim),
            list[CommEvent](),
        )

        def run_sharded(*arrays: jax.Array) -> list[jax.Array]:
            args = [
                ShardedValue(x, split_spec) if s else x
                for x, s in zip(arrays, is_split, strict=True)
            ]
            ctx = make_context(group, comms, args)
            ctx.split_sizes.setdefault(group.size, split_spec)  # of what no array makes: zeros
            outs = eval_partitioned(ctx, program.jaxpr, program.consts, args)
            is_like_param = [ctx.shape(v) == shape for v in outs]
            return [ctx.shard(v, split_spec) for v, s in zip(outs, is_like_param, strict=True) if s]

        local_shapes = [
            jax.ShapeDtypeStruct(group.local_shape(x.shape, split_spec), x.dtype) if s else x
            for x, s in zip(inputs, is_split, strict=True)
        ]
        traced = jax.make_jaxpr(run_sharded, axis_env=[("parts", group.size)])(*local_shapes)
        return bool(comms or traced.jaxpr.effects)

    def _update_jaxpr(self, path: str) -> tuple[Any, list[Any], list[bool]]:
        """Return the program of a parameter's update, totals given; its inputs, which are sharded.

        It also returns the arrays that totals are over.
        """
        state_paths = [owner and owner[0] for owner in self._owners]
        outputs = zip((*self._paths, *state_paths, *state_paths), self._outputs, strict=True)
        targets = [v for entries, v in outputs if entries == path]
        for equation in self._piece.equations:
            if equation.outvars[0] in self._totals:
                inputs_and_totals = [v for v in equation.invars if isinstance(v, Var)]
                targets += [
                    v for v in inputs_and_totals if self._values[v].entries == self._entries[path]
                ]
        equations = [e for e in self._piece.equations if e.outvars[0] not in self._totals]
        inputs_and_totals = [*self._piece.inputs, *self._totals]
        program = replace(self._piece, equations=equations, inputs=inputs_and_totals).subprogram(
            targets
        )
        program = program.subprogram(
            targets, [v for v in inputs_and_totals if v in program.read_vars]
        )
        inputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in map(aval_of, program.inputs)]
        entries = [self._values[v].entries for v in program.inputs]
        is_split = [
            bool(o) and x.shape == self._shapes[path] for o, x in zip(entries, inputs, strict=True)
        ]
        return jax.make_jaxpr(program)(*inputs), inputs, is_split


def _leaf_owner(keys: tuple, leaf: Any, shapes: Mapping[str, tuple]) -> tuple[str, str] | None:
    """Return the parameter of a leaf of the state, and its tree; None: it has none."""
    match = find_parameter(keys, leaf.shape, shapes)
    return match and (match[1], jax.tree_util.keystr(keys[: match[0]]))


def _at_least_float32(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, jnp.promote_types(x.dtype, jnp.float32))


def _is_elementwise_dot(equation: JaxprEqn) -> bool:
    """Return whether a matmul sums entries times those in the same place."""
    (left, right), _ = equation.params["dimension_numbers"]
    return tuple(left) == tuple(right)


def _number_value(term: int, is_number: bool = True) -> Value:
    """Return a number; else an array that is like no parameter."""
    return Value(term, is_dependent=not is_number, is_number=is_number, is_elementwise=is_number)


def _inline(equation: JaxprEqn, values: Sequence[Any]) -> Any:
    """Return the outputs of an equation, a call or a branch inlined, and prints left out.

    All branches are run, and one is selected.
    """
    if not equation.outvars:
        return ()
    if equation.primitive.name != "cond":
        return inline_calls(equation, values, _inline)
    index, *rest = values
    cases = [interpret_jaxpr(*body, rest, _inline) for body in bodies_of(equation)]
    return [lax.select_n(index, *case_values) for case_values in zip(*cases, strict=True)]


def _params_without_sizes(
    name: str, params: Mapping[str, Any], ndim: int, out_ndim: int
) -> list[tuple[str, str]]:
    """Return an equation's parameters without sizes, dimensions counted from the last."""
    ranks = (
        [("ranks", str(out_ndim - ndim))]
        if name in ("reshape", "broadcast_in_dim") and ndim
        else []
    )
    from_last = lambda v: str(
        [d - (ndim or out_ndim) for d in (v if isinstance(v, tuple) else (v,))]
    )
    is_left_out = lambda k, v: k in _SHAPES or v is None or "jaxpr" in k
    kept_params = {k: v for k, v in sorted(params.items()) if not is_left_out(k, v)}
    return [*ranks, *((k, from_last(v) if k in _AXES else str(v)) for k, v in kept_params.items())]
