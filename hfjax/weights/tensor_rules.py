"""A table of invertible rules that map the tensors of a file to parameters.

A rule reshapes a tensor (`view`), transposes it to our order (`order`), and says where in the
parameter the result goes (`concat_dim`, `start`). So every element has one position, and export
applies the same table in reverse.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

from hfjax.utils.keywords import NEAREST, name_hint
from hfjax.utils.tables import align as in_columns, first_lines, quote
from hfjax.weights.tensor_files import KNOWN_TYPES, FileTensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rule:
    """Maps a tensor of a file, perhaps one per layer and expert, to its position in a parameter.

    Attributes:
        theirs: The tensor's name; `{layer}` and `{expert}` stand for their numbers.
        ours: The path of the parameter. Numbers that it does not name index its first dimensions.
        shape: The shape in the file.
        view: The shape after splitting dimensions, or adding one of size 1.
        order: The dimensions of the view in our order.
        concat_dim: The dimension of ours that several tensors share, or that is padded at its end.
        start: The offset of this tensor in that dimension.
        layers: The layers that have it. None: all.
        twin: A second name of the tensor, if a file holds it twice: both must be equal.
        transform: The transformation in words.

    Example:
        >>> from hfjax.weights.tensor_rules import Rule
        >>> Rule("lm_head.weight", "unembed/kernel", (8, 4), (8, 4), (1, 0)).block
        (4, 8)
    """

    theirs: str
    ours: str
    shape: Shape
    view: Shape
    order: tuple[int, ...]
    concat_dim: int | None = None
    start: int = 0
    layers: frozenset[int] | None = None
    twin: str | None = None
    transform: str = ""

    @property
    def block(self) -> Shape:
        """The shape in our order."""
        return tuple(self.view[i] for i in self.order)


def copy_rule(theirs: str, ours: str, *shape: int, **more: Any) -> Rule:
    """Return the rule of a tensor that is equal to ours."""
    return Rule(theirs, ours, shape, shape, tuple(range(len(shape))), **more)


def transpose_rule(theirs: str, ours: str, rows: int, columns: int, **more: Any) -> Rule:
    """Return the rule of a matrix that is the transpose of ours: torch has [out, in]."""
    more = {"transform": "transpose", **more}
    return Rule(theirs, ours, (rows, columns), (rows, columns), (1, 0), **more)


@dataclass(frozen=True)
class TensorMapping:
    """One tensor of a file: its rule, and its layer and expert.

    Attributes:
        rule: The rule of the tensor.
        name: The name in the file.
        path: The path of its parameter.
        index: The index in the first dimensions of the parameter.
        tensor: The tensor in the file; None: not matched yet.
        twin: The same tensor under another name, if a file has it twice.
    """

    rule: Rule
    name: str
    path: str
    index: tuple[int, ...]
    tensor: FileTensor | None = None
    twin: FileTensor | None = None


@dataclass(frozen=True)
class RuleTable:
    """The rules of a model, with its numbers of layers and experts.

    Attributes:
        rules: One for each tensor of a layer, of the embedding and of the head.
        counts: The numbers of layers and experts, {"layer": 32, "expert": 8}.
        prefix: A prefix that all names in a file may lack.
        ignored: Patterns of tensors that follow from the configuration: they are not read.
    """

    rules: Sequence[Rule]
    counts: Mapping[str, int]
    prefix: str = ""
    ignored: tuple[str, ...] = ()

    def expand(self) -> Iterator[TensorMapping]:
        """Yield the mapping of every tensor, rule by rule."""
        for rule in self.rules:
            counted = [name for name in self.counts if f"{{{name}}}" in rule.theirs]
            inner = [name for name in counted if f"{{{name}}}" not in rule.ours]
            for numbers in product(*(range(self.counts[name]) for name in counted)):
                values = dict(zip(counted, numbers, strict=True))
                if rule.layers is None or values["layer"] in rule.layers:
                    index = tuple(values[name] for name in inner)
                    yield TensorMapping(
                        rule, rule.theirs.format(**values), rule.ours.format(**values), index
                    )

    def match_tensors(
        self, tensors: Mapping[str, FileTensor], shapes: Mapping[str, Shape]
    ) -> list[TensorMapping]:
        """Return every mapping with its tensor; ValueError lists all mismatches.

        Args:
            tensors: The tensors of the files, by name.
            shapes: The shapes of the parameters, by path.
        """
        prefix_length = len(self.prefix) * (
            not any(name.startswith(self.prefix) for name in tensors)
        )
        mappings = [
            self._attach_tensors(mapping, tensors, prefix_length) for mapping in self.expand()
        ]
        check_coverage(mappings, shapes)
        used = {
            t.name for mapping in mappings for t in (mapping.tensor, mapping.twin) if t is not None
        }
        unused = [
            t
            for name, t in tensors.items()
            if name not in used and not any(fnmatchcase(name, pattern) for pattern in self.ignored)
        ]
        if lines := find_mismatches(mappings, unused):
            raise ValueError(
                "the tensors of the files are not those of the model that config.json describes:"
                "\n  " + "\n  ".join(lines) + "\nNo weight was read. Give the folder of one model "
                "with its own config.json; hfjax inspect FOLDER shows what is expected."
            )
        return mappings

    def _attach_tensors(
        self, mapping: TensorMapping, tensors: Mapping[str, FileTensor], prefix_length: int
    ) -> TensorMapping:
        lookup = lambda name: (
            None if name is None else tensors.get(name[prefix_length:], tensors.get(name))
        )
        return replace(mapping, tensor=lookup(mapping.name), twin=lookup(mapping.rule.twin))


def check_coverage(mappings: Sequence[TensorMapping], shapes: Mapping[str, Shape]) -> None:
    """Refuse tensors that do not fit their parameters, and parameters without a tensor."""
    for mapping in mappings:
        shape, rule = shapes.get(mapping.path), mapping.rule
        block_shape = None if shape is None else shape[len(mapping.index) :]
        if shape is None or not _fits(rule, block_shape or ()):
            problem = "is not in the model" if shape is None else f"is {_format_shape(shape)} there"
            raise ValueError(
                f"{mapping.name} -> {mapping.path} {_format_shape(rule.block)}: it {problem}."
            )
    filled = {mapping.path for mapping in mappings}
    for path, shape in shapes.items():
        if path not in filled:
            raise ValueError(
                f"{path} {_format_shape(shape)} of the model has no tensor in the files of its "
                "family: the layout is not of the model that hfjax.pretrained returned."
            )


def _fits(rule: Rule, shape: Shape) -> bool:
    """Return whether a block fits a parameter; along one dimension it may be a slice."""
    if len(rule.block) != len(shape):
        return False
    end = lambda i, n: rule.start + n <= shape[i] if i == rule.concat_dim else n == shape[i]
    return all(end(i, n) for i, n in enumerate(rule.block))


def find_mismatches(mappings: Sequence[TensorMapping], unused: Sequence[FileTensor]) -> list[str]:
    """Return a line for each mismatch: of mappings with their tensors, and of unused tensors."""
    wrong = [*_shape_lines(mappings), *_dtype_lines(mappings)]
    return [*_missing_lines(mappings, unused), *wrong, *_unused_lines(unused, mappings)]


def _missing_lines(mappings: Iterable[TensorMapping], unused: Sequence[FileTensor]) -> list[str]:
    missing = [mapping for mapping in mappings if mapping.tensor is None]
    names = [tensor.name for tensor in unused]
    return first_lines(
        [
            f"{mapping.name} {_format_shape(mapping.rule.shape)} (our {mapping.path}) is missing"
            f"{quote(name_hint(mapping.name, names[:1000], NEAREST))}"
            for mapping in missing
        ]
    )


def _shape_lines(mappings: Iterable[TensorMapping]) -> list[str]:
    both = [(p, t) for p in mappings for t in (p.tensor, p.twin) if t is not None]
    return first_lines(
        [
            f"{quote(t.name)} is {t.dtype}{_format_shape(t.shape)}, {_format_shape(p.rule.shape)} "
            f"of {', '.join(KNOWN_TYPES[:-1])} or {KNOWN_TYPES[-1]} is expected (our {p.path})"
            for p, t in both
            if t.shape != p.rule.shape or t.dtype.name not in KNOWN_TYPES
        ]
    )


def _dtype_lines(mappings: Iterable[TensorMapping]) -> list[str]:
    return [
        f"{quote(t.name)} is {t.dtype}, and {quote(p.tensor.name)}, which is the same (config.json "
        f"says tie_word_embeddings), {p.tensor.dtype}: store it once, or both in one type"
        for p in mappings
        if (t := p.twin) is not None and p.tensor is not None and p.tensor.dtype != t.dtype
    ]


def _unused_lines(unused: Sequence[FileTensor], mappings: Sequence[TensorMapping]) -> list[str]:
    known = [mapping.name for mapping in mappings if mapping.tensor is None]
    return first_lines(
        [
            f"{quote(t.name)} {_format_shape(t.shape)} is no tensor of this model"
            f"{quote(name_hint(t.name, known[:1000], NEAREST))}"
            for t in unused
        ]
    )


def _format_shape(shape: Shape) -> str:
    return f"[{', '.join(map(str, shape))}]"


def format_table(table: RuleTable) -> list[str]:
    """Return the table as text, a line for each rule."""
    entries = [("tensor of the files", "shape", "parameter", "where in it", "how")]
    for rule in table.rules:
        ranges = {name: f"0…{count - 1}" for name, count in table.counts.items()}
        numbers = ranges if rule.layers is None else ranges | {"layer": _format_ranges(rule.layers)}
        indices = [numbers[n] for n in table.counts if f"{{{n}}}" in rule.theirs]
        inner = ", ".join([*indices, *_slices(rule)])
        entries.append(
            (
                rule.theirs,
                _format_shape(rule.shape),
                rule.ours,
                f"[{inner}]",
                rule.transform or "as it is",
            )
        )
    return in_columns(entries)


def _slices(rule: Rule) -> list[str]:
    slice_text = lambda i, n: f"{rule.start}:{rule.start + n}" if i == rule.concat_dim else ":"
    return [slice_text(i, n) for i, n in enumerate(rule.block)]


def _format_ranges(numbers: Iterable[int]) -> str:
    """Return numbers as a compact list of ranges.

    >>> _format_ranges([0, 1, 2, 5])
    '0…2,5'
    """
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(f"{r[0]}…{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)
