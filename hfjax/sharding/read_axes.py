"""Names of dimensions, read from a model's own program: `hfjax.layout(…, axes="auto")`.

A dimension is named if devices can keep it split from the matmul that makes it to the matmul that
sums over it. It is "heads" if attention keeps it, "vocab" if a table is looked up by it, else
"mlp". All that is joined with it is named together: both kernels, the bias, queries with keys.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from flax import nnx

from hfjax.parallel.adapters.forward_signature import call_model
from hfjax.parallel.adapters.model_template import ModelTemplate, items_of, raw_value
from hfjax.parallel.jaxprs.dimensions import Dimensions, Use, Value
from hfjax.parallel.mesh import BATCH_AXES, STACK
from hfjax.parallel.spmd.partition_context import trace_global
from hfjax.parallel.spmd.placements import AxisGroup
from hfjax.parallel.strategy import TENSOR
from hfjax.sharding.report import READ
from hfjax.utils.paths import Flat

Names = dict[str, tuple[str | None, ...]]
Places = list[tuple[str, int]]  # path and dimension of arrays


IN_OUTPUT = "it is in the model's output"
OF_HEADS, CHOSEN = 98, 99  # the numbers of the last reasons


@dataclass(frozen=True)
class ReadAxes:
    """What a program says of the dimensions of its parameters.

    Attributes:
        names: The names of each parameter that has one.
        left: Path -> why a matrix has none.
    """

    names: Names
    left: Mapping[str, str]

    @property
    def notes(self) -> Iterator[str]:
        """Lines for `print(layout)`."""
        names = _group_by_pattern(self.names)
        yield f"{READ} named " + (
            ", ".join(f"{path} {names}" for names, paths in names.items() for path in paths)
            or "nothing"
        )
        for reason, paths in _group_by_pattern(self.left).items():
            yield f"{READ} left {', '.join(paths)}: {reason}"


def read_axes(
    template: ModelTemplate,
    forward: Callable | None,
    example: Any,
    divisor: Callable[[str], int],
) -> ReadAxes:
    """Return names of dimensions under which a strategy can split pairs of matmuls.

    Args:
        template: The model; names of its own stay.
        forward: As `hfjax.layout` has it.
        example: A batch, or its shapes.
        divisor: Name -> the number of devices that will split a dimension of this name.
    """
    parameters = {path: raw_value(x) for path, x in template.parameters.items()}
    dimensions, values, outputs = _read_program(template, forward, example)
    return _Reader(dimensions, values, outputs, divisor, template).read(parameters)


def _read_program(
    template: ModelTemplate, forward: Callable | None, example: Any
) -> tuple[Dimensions, dict[str, Value], list[Value]]:
    """Return the dimensions of the model's program, of its parameters and of its outputs."""
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    shapes = lambda arrays: {path: shape(raw_value(x)) for path, x in arrays.items()}
    inputs = shapes(template.parameters), shapes(template.variables), jax.tree.map(shape, example)

    def run(parameters: Flat, variables: Flat, batch: Any) -> Any:
        model = template.merge(parameters, variables, "train")
        with template.call_context():
            if template.is_layer_stack and forward is None:
                return _run_parts(template, model, template.prepare_batch(batch))
            return call_model(forward, model, variables, batch, "train")

    program, _ = trace_global(AxisGroup(BATCH_AXES, 1), run, *inputs)
    dimensions = Dimensions()
    values = {path: Value(dimensions.new_dims(x.shape), False) for path, x in inputs[0].items()}
    data = [Value(None, i == 1) for i in (0, 1) for _ in jax.tree.leaves(inputs[1 + i])]
    leaves = [*jax.tree.leaves(dict(values)), *data]
    jaxpr = program.jaxpr
    return dimensions, values, dimensions.read(jaxpr, len(program.consts), leaves)


def _run_parts(template: ModelTemplate, model: Any, batch: Any) -> Any:
    """Return the outputs of a model in three parts."""
    x = model.embed(batch)
    if template.is_layer_list:
        for layer in items_of(model.layers):
            x = layer(x)
        return model.head(x)
    graph, arrays = nnx.split(model.layers)
    run = lambda x, layer: (nnx.merge(graph, layer)(x), None)
    return model.head(jax.lax.scan(run, x, arrays)[0])


@dataclass(frozen=True, eq=False)
class _Reader:
    """Chooses which dimensions are named."""

    dimensions: Dimensions
    values: Mapping[str, Value]
    outputs: Sequence[Value]
    divisor: Callable[[str], int]
    template: ModelTemplate

    def read(self, parameters: Flat) -> ReadAxes:
        """Return the names, and why matrices have none."""
        reasons, names, path_parts = {}, {}, {}
        for part, why in self._reasons():
            reasons.setdefault(part, why)
        self._keep_heads_whole(reasons)
        size = lambda part: sum(parameters[path].size for path, _ in self._places[part])
        cost = lambda part: self._costs[part] / size(part)
        for part in sorted(self._places.keys() - reasons, key=lambda part: (cost(part), part)):
            paths = [path for path, _ in self._places[part]]
            if split_path := next((path for path in paths if path in path_parts), None):
                reasons[part] = (
                    CHOSEN,
                    f"{split_path} is split along its other dimension, which sends less",
                )
                continue
            path_parts |= dict.fromkeys(paths, part)
            names[part] = self._kind(part)
        return self._result(names, reasons)

    def _result(self, names: Mapping[int, str], reasons: Mapping[int, tuple]) -> ReadAxes:
        all_names, left = {}, {}
        for path, value in self.values.items():
            own = self.template.axes(path, {})
            first = [self.dimensions.parts(dim)[:1] for dim in value.dims or ()]
            read = [next((self._stacks.get(x) or names.get(x) for x in dim), None) for dim in first]
            if set(own) - {STACK, None}:
                continue
            if any(read):
                all_names[path] = tuple(a or b for a, b in zip(own, read, strict=True))
            why = [reasons[x] for dim in reversed(first) for x in dim if x in reasons]
            is_matrix = len(first) - (STACK in (*own, *read)) > 1
            if not set(read) & set(names.values()) and is_matrix and why:
                left[path] = max(why, key=lambda reason: reason[0])[1]
        return ReadAxes(all_names, left)

    def _keep_heads_whole(self, reasons: dict[int, tuple[int, str]]) -> None:
        """Leave the features of each head; if its heads cannot be split, all of an attention."""
        for heads, features in self._attentions:
            left = [reasons[part][1] for part in sorted(heads) if part in reasons]
            if not left and not heads <= self._places.keys():
                left = ["heads are not the first part of a dimension"]
            if left:
                reasons |= dict.fromkeys(heads | features, (OF_HEADS, left[0]))
            else:
                why = "it is a part of each head, and only heads are split"
                reasons |= dict.fromkeys(features, (OF_HEADS, why))

    # -- what is known of a part of a dimension ----------------------------------------------

    @cached_property
    def _places(self) -> dict[int, Places]:
        """Part -> where among the parameters it is the first part of a dimension."""
        places: dict[int, Places] = defaultdict(list)
        for path, value in self.values.items():
            for dim, parts in enumerate(value.dims or ()):
                for part in self.dimensions.parts(parts)[:1]:
                    places[part].append((path, dim))
        return dict(places)

    def _parts_of(self, uses: Iterable[Use]) -> set[int]:
        return {part for use in uses for part in self.dimensions.parts(use.parts)}

    @cached_property
    def _stacks(self) -> dict[int, str]:
        return dict.fromkeys(self._parts_of(self.dimensions.scanned), STACK)

    @cached_property
    def _costs(self) -> dict[int, int]:
        """Part -> the elements that devices sum in a step if they split it."""
        costs: dict[int, int] = defaultdict(int)
        for use in (*self.dimensions.produced, *self.dimensions.consumed):
            for part in self.dimensions.parts(use.parts)[:1]:
                costs[part] += use.cost
        return costs

    @cached_property
    def _last_of_output(self) -> set[int]:
        dims = [value.dims[-1] for value in self.outputs if value.dims]
        return {part for dim in dims for part in self.dimensions.parts(dim)[:1]}

    @cached_property
    def _vocabularies(self) -> set[int]:
        """The parts that are rows of a table, or logits over them."""
        d, sizes = self.dimensions, self.dimensions.sizes
        rows = self._parts_of(d.looked_up)
        logits = self._last_of_output & self._parts_of(d.produced)
        words = {sizes[part] for part in rows & logits}
        words |= {sizes[part] for part in rows} & {sizes[part] for part in logits}
        words |= {max((sizes[part] for part in rows), default=0)}
        return {part for part in rows | logits if sizes[part] in words}

    @cached_property
    def _attention_heads(self) -> set[int]:
        """The parts that are heads: kept by a matmul of two activations, or by scores and after."""
        d, places = self.dimensions, self._places.keys()
        flat = lambda dims: {part for dim in dims for part in d.parts(dim)}
        matmuls = [(flat(outer), flat(summed)) for outer, summed in d.activation_matmuls]
        positions = {part for outer, _ in matmuls for part in outer} - places
        scores = {part for outer, summed in matmuls if not summed & positions for part in outer}
        mixed = {part for outer, summed in matmuls if summed & positions for part in outer}
        return self._parts_of(d.batched) | (scores & mixed & places)

    @cached_property
    def _attentions(self) -> list[tuple[set[int], set[int]]]:
        """The heads of attentions, and the other parts of dimensions of their projections."""
        attentions: list[tuple[set[int], set[int]]] = []
        for dims in self.dimensions.projections:
            split = [self.dimensions.parts(dim) for dim in dims]
            of_heads = [[p for p in parts if p in self._attention_heads] for parts in split]
            heads = {parts[0] for parts in of_heads if parts}
            if not heads:
                continue
            features = {part for parts in split for part in parts}
            for other in [x for x in attentions if features & x[0].union(x[1])]:
                attentions.remove(other)
                heads, features = heads | other[0], features.union(*other)
            attentions.append((heads, features - heads))
        return attentions

    @cached_property
    def _heads(self) -> set[int]:
        dims = [dim for value in self.values.values() for dim in value.dims or ()]
        divided = [parts for dim in dims if len(parts := self.dimensions.parts(dim)) > 1]
        return self._attention_heads | {parts[0] for parts in divided}

    def _kind(self, part: int) -> str:
        return "vocab" if part in self._vocabularies else "heads" if part in self._heads else "mlp"

    def _reasons(self) -> Iterator[tuple[int, tuple[int, str]]]:
        """Yield each part that cannot be named, and why: the number of the check, and words."""
        d, inner = self.dimensions, self.dimensions.inner_parts()
        blocked = {part: use.line for use in reversed(d.blocked) for part in d.parts(use.parts)}
        produced, consumed = self._parts_of(d.produced), self._parts_of(d.consumed)
        rows, outputs = self._parts_of(d.looked_up), self._parts_of(self._outer_outputs())
        for part, places in self._places.items():
            size, kind = d.sizes[part], self._kind(part)
            is_hidden, devices = kind != "vocab", self.divisor(kind)
            paths = [path for path, _ in places]
            own = next(filter(None, (self._own_names(*place) for place in places)), "")
            checks = (
                (is_hidden and part not in produced | rows, "no matmul with a parameter makes it"),
                (part in blocked, f"{blocked.get(part)} works along it"),
                (part in inner, "a reshape makes it an inner part of a dimension"),
                (part in outputs or (is_hidden and part in self._last_of_output), IN_OUTPUT),
                (is_hidden and part in rows, "another table has more rows"),
                (is_hidden and part not in consumed, "no matmul with a parameter sums over it"),
                (len(paths) > len(set(paths)), f"{max(paths, key=paths.count)} has it twice"),
                (bool(own), own),
                (bool(size % devices), f"{kind}: {size} do not divide by {devices}"),
            )
            yield from ((part, (i, why)) for i, (is_so, why) in enumerate(checks) if is_so)

    def _outer_outputs(self) -> Iterator[Use]:
        return (Use(dim, "") for value in self.outputs for dim in (value.dims or ())[:-1])

    def _own_names(self, path: str, dim: int) -> str:
        """Return why the model's own names forbid that a dimension is split; "": they do not."""
        own = self.template.axes(path, {})
        if not set(own) - {STACK, None} or own[dim] in TENSOR.parameters:
            return ""
        return f"the model names {path} {own}"


def _group_by_pattern(entries: Mapping[str, Any]) -> dict[Any, list[str]]:
    """Return value -> the paths that have it, numbers in them written as `*`.

    >>> _group_by_pattern({"blocks/0/up": 1, "blocks/1/up": 1, "head": 2})
    {1: ['blocks/*/up'], 2: ['head']}
    """
    groups: dict[Any, dict[str, None]] = defaultdict(dict)
    for path, value in entries.items():
        groups[value][re.sub(r"(?<![^/])\d+(?![^/])", "*", path)] = None
    return {value: list(paths) for value, paths in groups.items()}
