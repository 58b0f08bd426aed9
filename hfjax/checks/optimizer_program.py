"""What an optimizer does, read from its own program: nothing is run.

`OptimizerProgram` gives all that an optimizer computes a term: which operations make it, of what.
Arrays have no size in a term, and a parameter no name, so that terms of a parameter and of a part
of it are the same if the same is done with each. What is added up over arrays says over which; what
the program adds up of its own, of which shape.
`joins` asks the table of rules whether entries along a dimension meet.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
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
    AtZero,
    Moved,
    at_zero_of,
    chosen_at_zero,
    moved_unless,
    other_choices,
)
from hfjax.parallel.jaxprs.program import Piece, bodies_of, evaluated, inlined, piece
from hfjax.parallel.spmd.interpreter import run, scope_of
from hfjax.parallel.spmd.partition_context import Join, aval_of
from hfjax.parallel.spmd.placements import Cut, Part, Side
from hfjax.parallel.spmd.rules.pointwise import POINTWISE
from hfjax.utils.paths import Flat, flatten, nest, parameter_of

Entries = frozenset[str]  # of what parameters, or parts of them
NONE: Entries = frozenset()
Terms = dict[Hashable, int]  # each has a number
GRADIENT, PARAMETER, ROW = "gradient", "parameter", "row of "

# Reductions of all entries, what puts two of them together, and the entry that changes nothing.
_TOTALS = {
    "reduce_sum": (("add", "add_any"), 0),
    "reduce_and": (("and",), 1),
    "reduce_or": (("or",), 0),
    "reduce_max": (("max",), None),
    "reduce_min": (("min",), None),
}
_COMBINES = {name: total for total, (names, _) in _TOTALS.items() for name in names}
_FORMS = ("reshape", "broadcast_in_dim", "squeeze", "expand_dims")
_SHAPES = ("shape", "sharding", "out_sharding", "new_sizes", "broadcast_dimensions", "weak_type")
_AXES = ("axes", "axis", "dimension", "dimensions")


class Value(NamedTuple):
    """What is known of a value.

    Attributes:
        term: The number of its term.
        of: Whose entries it has; none if it is a number.
        depends: Whether it follows from a gradient, a parameter or what is kept of them.
        at_zero: What it is where the arrays that it follows from are 0.
        totals: If it is a total: of what kind, of which terms, over whose entries. Of a row of
            totals, that of all.
        moved: Where more zeros would move it: (a number that chooses, its choice), ALWAYS.
        number: Whether it is one number, of whatever shape.
        entrywise: Whether each entry is made of the entries in its place, and of numbers.
    """

    term: int
    of: Entries = NONE
    depends: bool = False
    at_zero: AtZero = None
    totals: tuple[str, frozenset[tuple[int, tuple[str, ...]]]] | None = None
    moved: Moved = frozenset()
    number: bool = False
    entrywise: bool = False


class OptimizerProgram:
    """An optimizer's update of parameters of these shapes.

    Args:
        optimizer: Any of optax.
        parameters: Path -> shape and dtype.
        of: Path -> whose entries it has.
        terms: Those of the programs that it is compared with.
        more: Of whose entries there may be more, which are 0.
    """

    def __init__(
        self,
        optimizer: Any,
        parameters: Flat,
        of: Mapping[str, Entries],
        terms: Terms,
        more: Entries = NONE,
    ) -> None:
        self._terms, self._of, self._more = terms, of, more
        like = {path: _wide(x) for path, x in parameters.items()}
        state = jax.eval_shape(optimizer.init, nest(like))
        found, form = jax.tree_util.tree_flatten_with_path(state)
        self.names = [jax.tree_util.keystr(keys) for keys, _ in found]

        def update(gradients: Flat, kept: list[Any], parameters: Flat) -> Any:
            given = (nest(gradients), form.unflatten(kept), nest(parameters))
            updates, state = optimizer.update(*given)
            begun = optimizer.init(nest(parameters))
            return flatten(cast(dict, updates)), jax.tree.leaves(state), jax.tree.leaves(begun)

        kept = [leaf for _, leaf in found]
        self._piece: Piece = piece(update, like, kept, like, instead=_straight)
        self._shapes = {path: x.shape for path, x in like.items()}
        self._places = [_place(keys, leaf, self._shapes) for keys, leaf in found]
        self._paths, self._outs = sorted(like), self._piece.outputs
        self._zeros = {PARAMETER, *(place[1] for place in self._places if place)}
        self._values = self._read()
        while not self._zeros <= (zeros := self._zero_afterwards()):
            self._zeros &= zeros
            self._values = self._read()
        self._totals = {v: None for v, value in self._values.items() if value.totals}
        values = iter(map(self._value, self._outs))
        self.updates = dict(zip(self._paths, values, strict=False))
        self.state = dict(zip(self.names, values, strict=False))
        self.begun = dict(zip(self.names, values, strict=True))

    # -- terms ------------------------------------------------------------------------------------

    def _term(self, *of: Hashable) -> int:
        return self._terms.setdefault(of, len(self._terms))

    def _read(self) -> dict[Var, Value]:
        """Return what is known of each value."""
        labels = [(path, GRADIENT) for path in self._paths]
        pairs = zip(self._places, self.names, strict=True)
        labels += [place or ("", name) for place, name in pairs]
        labels += [(path, PARAMETER) for path in self._paths]
        known: dict[Var, Value] = {}
        for variable, (path, what) in zip(self._piece.inputs, labels, strict=True):
            number = aval_of(variable).shape == ()
            at_zero = 0.0 if what in (GRADIENT, *self._zeros) else None
            known[variable] = (
                Value(self._term("own", what), self._of[path], True, at_zero, entrywise=True)
                if path
                else _number(self._term("kept", what), number)
            )
        for variable, constant in self._piece.constants.items():
            known[variable] = self._constant(constant)
        self._run(self._piece.equations, known)
        return known

    def _constant(self, x: Any) -> Value:
        if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        plain = np.asarray(x)
        term = self._term("constant", str(plain.dtype), plain.shape, plain.tobytes())
        if plain.shape != ():
            return Value(term)
        exact = plain.dtype.kind in "biuf" and np.isfinite(plain)
        return _number(term)._replace(at_zero=float(plain) if exact else None)

    def _value(self, v: Any, known: Mapping[Var, Value] | None = None) -> Value:
        if isinstance(v, Literal):
            return self._constant(v.val)
        return (self._values if known is None else known)[v]

    def _run(self, equations: Iterable[Any], known: dict[Var, Value]) -> None:
        for equation in equations:
            if not equation.outvars:  # a print
                continue
            given = [self._value(v, known) for v in equation.invars]
            known.update(zip(equation.outvars, self._results(equation, given), strict=True))

    def _results(self, equation: Any, given: list[Value]) -> list[Value]:
        name, variables = equation.primitive.name, equation.outvars
        if (handed := self._handed(equation, given)) is not None:
            return [handed]
        shapes = [v.aval.shape for v in equation.invars]
        ndim, out = max(map(len, shapes), default=0), variables[0].aval
        key = (name, *_plain(name, equation.params, ndim, out.ndim))
        bodies = list(self._bodies(equation, given))
        key = (*key, *(tuple(v.term for v in body) for body in bodies))
        if out.ndim < ndim and not any(v.of for v in given):  # of its own arrays, or of numbers
            key = (*key, *shapes)
        chooses = name == "select_n" and given[0].number
        zeros = [NUMBER if v.number and v.at_zero is None else v.at_zero for v in given]
        alike = len({v.term for v in given}) == 1
        at_zero = at_zero_of(name, zeros, equation.params, alike)
        if chooses:
            at_zero = chosen_at_zero(given[0].term, zeros[1:])
        made = self._made(key, given)
        number = all(v.number for v in given) and bool(given)
        number &= name in POINTWISE or out.size == 1
        entrywise = name in POINTWISE and all(v.entrywise for v in given)
        known = None if number and not isinstance(at_zero, float) else at_zero
        made = made._replace(at_zero=known, number=number, entrywise=entrywise or number)
        made = made._replace(moved=made.moved.union(*(v.moved for body in bodies for v in body)))
        if chooses:
            cases = [v.moved - other_choices(given[0].term, i) for i, v in enumerate(given[1:])]
            made = made._replace(moved=given[0].moved.union(*cases))
        return [made._replace(term=self._term(made.term, i)) for i in range(len(variables))]

    def _made(self, key: tuple, given: Sequence[Value]) -> Value:
        """Return what an operation makes; where entries of several meet, the term says of whom."""
        apart = len({v.of for v in given if v.of}) > 1
        operands = [(v.term, tuple(sorted(v.of))) if apart else v.term for v in given]
        of, depends = NONE.union(*(v.of for v in given)), any(v.depends for v in given)
        moved = Moved().union(*(v.moved for v in given))
        return Value(self._term(*key, *operands), of, depends, moved=moved)

    def _bodies(self, equation: JaxprEqn, given: Sequence[Value]) -> Iterator[list[Value]]:
        """Yield what the programs of a loop make of what enters them."""
        of = NONE.union(*(v.of for v in given))
        for body, constants in bodies_of(equation):
            enter = [Value(self._term("in", i), of, True) for i in range(len(body.invars))]
            known = dict(zip(body.constvars, map(self._constant, constants), strict=True))
            known |= zip(body.invars, enter, strict=True)
            self._run(body.eqns, known)
            yield [self._value(v, known) for v in body.outvars]

    def _handed(self, equation: Any, given: list[Value]) -> Value | None:
        """Return a number in another form, or a total; None: neither."""
        name, out = equation.primitive.name, equation.outvars[0].aval
        if name in _FORMS and (
            given[0].number or len(out.shape) == 1 < equation.invars[0].aval.ndim
        ):
            return given[0]
        kinds = {v.totals and v.totals[0] for v in given}
        if name in ("concatenate", "stack") and len(kinds) == 1 and (kind := kinds.pop()):
            row = self._made((ROW,), given)
            total = self._totalled(kind, given)
            return row._replace(totals=(ROW + kind, total.totals[1]), moved=total.moved)  # type: ignore[index]
        if out.shape != ():
            return None
        total = _COMBINES.get(name, "")
        if total and any(v.totals for v in given):
            pairs = zip(given, equation.invars, strict=True)
            parts = [v for v, x in pairs if not (isinstance(x, Literal) and x.val == 0)]
            fits = all(v.totals[0] == total if v.totals else v.of for v in parts)
            return self._totalled(total, parts) if fits else None
        if name in _TOTALS and kinds == {ROW + name}:
            return self._totalled(name, given)
        of_entries = all(v.of and v.entrywise for v in given) and kinds == {None}
        if of_entries and name == "dot_general" and _in_pairs(equation):
            inner = self._made(("mul",), given)
            zeros = [v.at_zero for v in given]
            inner = inner._replace(at_zero=at_zero_of("mul", zeros, {}))
            return (
                self._totalled("reduce_sum", [inner]) if len({v.of for v in given}) == 1 else None
            )
        return self._totalled(name, given) if of_entries and name in _TOTALS else None

    def _totalled(self, name: str, parts: Sequence[Value]) -> Value:
        """Return the total of these; a value that is none is one entry, or an array of them."""
        over: dict[int, list[str]] = {}
        moved = Moved().union(*(v.moved for v in parts))
        for v in parts:
            for term, of in v.totals[1] if v.totals else {(v.term, tuple(v.of))}:
                over[term] = sorted([*over.get(term, []), *of])
            if not v.totals and v.of & self._more:
                moved |= moved_unless(v.at_zero, _TOTALS[name][1])
        totals = frozenset((term, tuple(of)) for term, of in over.items())
        depends = any(v.depends for v in parts)
        found = _number(self._term(name, totals))
        return found._replace(depends=depends, totals=(name, totals), moved=moved)

    def _zero_afterwards(self) -> set[str]:
        """Return what is 0 in places that are added: if it begins so and an update leaves it so."""
        values, count = list(map(self._value, self._outs)), len(self._paths)
        added = lambda path: bool(self._of[path] & self._more)
        moved = [v for v, path in zip(values, self._paths, strict=False) if added(path)]
        other = set() if all(v.at_zero == 0 for v in moved) else {PARAMETER}
        for number, place in enumerate(self._places):
            kept = values[count + number], values[count + len(self._places) + number]
            if place and added(place[0]) and any(v.at_zero != 0 for v in kept):
                other.add(place[1])
        return {PARAMETER, *(place[1] for place in self._places if place)} - other

    # -- what meets -------------------------------------------------------------------------------

    def of_path(self, path: str, begins: bool = False) -> list[Value]:
        """Return what is computed for a parameter: its update, what is kept, and what was first."""
        pairs = zip(self._places, self.names, strict=True)
        names = [name for place, name in pairs if place and place[0] == path]
        first = [self.begun[name] for name in names if begins]
        return [self.updates[path], *(self.state[name] for name in names), *first]

    def numbers(self, begins: bool) -> dict[str, list[Value]]:
        """Return what becomes of numbers that are kept, and of all that is like no parameter."""
        pairs = zip(self._places, self.names, strict=True)
        names = [name for place, name in pairs if not place]
        return {n: [self.state[n], *([self.begun[n]] if begins else [])] for n in names}

    def own_only(self, path: str) -> bool:
        """Return whether a parameter's update is of its own entries, numbers and totals."""
        return all(v.of <= self._of[path] for v in self.of_path(path, True))

    def entrywise(self, path: str) -> bool:
        """Return whether all that is computed for a parameter is so entry by entry."""
        return all(v.entrywise for v in self.of_path(path))

    def counts(self, name: str, like: object) -> bool:
        """Return whether a number that is kept stays as it is, or counts updates."""
        for count in (lambda x: x, lambda x: x + 1, optax.safe_increment):
            counter = piece(count, like)
            known = {counter.inputs[0]: _number(self._term("kept", name))}
            self._run(counter.equations, known)
            if self._value(counter.outputs[0], known).term == self.state[name].term:
                return True
        return False

    def zeros_matter(self) -> bool:
        """Return whether more zeros would change what is computed."""
        return any(self._value(v).moved for v in self._outs)

    def joins(self, path: str, dim: int) -> bool:
        """Return whether entries of a parameter meet along a dimension, but for totals."""
        program, inputs, split = self._part(path)
        shape = self._shapes[path]
        side, cut, told = Side(("parts",), shape[dim], "entries"), Cut(dim), list[Join]()

        def in_parts(*arrays: jax.Array) -> list[jax.Array]:
            given = [Part(x, cut) if s else x for x, s in zip(arrays, split, strict=True)]
            scope = scope_of(side, told, given)
            scope.sizes.setdefault(side.size, cut)  # of what no array makes: zeros
            found = run(scope, program.jaxpr, program.consts, given)
            like_it = [scope.shape(v) == shape for v in found]
            return [scope.part(v, cut) for v, s in zip(found, like_it, strict=True) if s]

        local = [
            jax.ShapeDtypeStruct(side.local(x.shape, cut), x.dtype) if s else x
            for x, s in zip(inputs, split, strict=True)
        ]
        traced = jax.make_jaxpr(in_parts, axis_env=[("parts", side.size)])(*local)
        return bool(told or traced.jaxpr.effects)

    def _part(self, path: str) -> tuple[Any, list[Any], list[bool]]:
        """Return what makes a parameter's update, with totals given; its inputs, which are split.

        It returns the arrays that totals are of as well.
        """
        kept = [place and place[0] for place in self._places]
        outputs = zip((*self._paths, *kept, *kept), self._outs, strict=True)
        targets = [v for of, v in outputs if of == path]
        for equation in self._piece.equations:
            if equation.outvars[0] in self._totals:
                given = [v for v in equation.invars if isinstance(v, Var)]
                targets += [v for v in given if self._values[v].of == self._of[path]]
        left = [e for e in self._piece.equations if e.outvars[0] not in self._totals]
        given = [*self._piece.inputs, *self._totals]
        part = replace(self._piece, equations=left, inputs=given).part(targets)
        part = part.part(targets, [v for v in given if v in part.reads])
        inputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in map(aval_of, part.inputs)]
        of = [self._values[v].of for v in part.inputs]
        own = [bool(o) and x.shape == self._shapes[path] for o, x in zip(of, inputs, strict=True)]
        return jax.make_jaxpr(part)(*inputs), inputs, own


def _place(keys: tuple, leaf: Any, shapes: Mapping[str, tuple]) -> tuple[str, str] | None:
    """Return of which parameter a leaf of the state is, and in which tree; None: of none."""
    at = parameter_of(keys, leaf.shape, shapes)
    return at and (at[1], jax.tree_util.keystr(keys[: at[0]]))


def _wide(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, jnp.promote_types(x.dtype, jnp.float32))


def _in_pairs(equation: JaxprEqn) -> bool:
    """Return whether a product adds up entries times those in the same place."""
    (left, right), _ = equation.params["dimension_numbers"]
    return tuple(left) == tuple(right)


def _number(term: int, number: bool = True) -> Value:
    """Return a number; else an array that is like no parameter."""
    return Value(term, depends=not number, number=number, entrywise=number)


def _straight(equation: JaxprEqn, values: Sequence[Any]) -> Any:
    """Return what a call, a branch or a print gives in a program that has none; None: as it is.

    Of branches all are run, and one is chosen.
    """
    if not equation.outvars:
        return ()
    if equation.primitive.name != "cond":
        return inlined(equation, values, _straight)
    which, *rest = values
    cases = [evaluated(*body, rest, _straight) for body in bodies_of(equation)]
    return [lax.select_n(which, *each) for each in zip(*cases, strict=True)]


def _plain(name: str, params: Mapping[str, Any], ndim: int, out: int) -> list[tuple[str, str]]:
    """Return an equation's parameters without sizes, dimensions counted from the last."""
    ranks = [("ranks", str(out - ndim))] if name in ("reshape", "broadcast_in_dim") and ndim else []
    last = lambda v: str([d - (ndim or out) for d in (v if isinstance(v, tuple) else (v,))])
    left_out = lambda k, v: k in _SHAPES or v is None or "jaxpr" in k
    told = {k: v for k, v in sorted(params.items()) if not left_out(k, v)}
    return [*ranks, *((k, last(v) if k in _AXES else str(v)) for k, v in told.items())]
