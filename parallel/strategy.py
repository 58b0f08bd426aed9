"""A strategy is a table: logical axis -> mesh axes, in four columns, and a fifth for memory.

Why logical axes? A model knows what its dimensions mean ("embed", "mlp", "heads", "vocab") but not
on which devices it will run. A strategy knows the devices but no model. So the model names its
dimensions once, and the table says which mesh axes shard a dimension of that name. One model runs
under every strategy, one strategy fits every model, and switching is editing a rule.

Columns: `parameters`, `gradients`, `optimizer_state`, `activations`. ZeRO stages are nothing but
columns: the rules of `gradients` and `optimizer_state` come on top of the parameter's own
placement. The rule `*` means the first free dimension that divides. The column `memory` maps
parts of the state to host memory: `optimizer_state -> host`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, NoReturn

from hfjax.parallel.mesh import AXES, BATCH_AXES, DATA_AXES, EXPERTS, ROW_AXIS, SEQUENCE_AXES
from hfjax.parallel.offload.host_memory import memory_rules, show_memory
from hfjax.utils.keywords import check_keywords, is_real, strict_fields

Axes = tuple[str, ...]  # mesh axes of one dimension, major to minor; () is "on no axis"
Rules = Mapping[str, Axes]
SMALL = 2**14  # norms and biases of most models are smaller, their matrices larger
COLUMNS = ("parameters", "gradients", "optimizer_state", "activations")
TABLE = (*COLUMNS, "memory")


def _rules(rules: Mapping[str, str | Axes]) -> Rules:
    tidy = {name: (axes,) if isinstance(axes, str) else tuple(axes) for name, axes in rules.items()}
    for name, axes in tidy.items():
        for axis in axes:
            if axis not in AXES:
                raise ValueError(
                    f"row {name} -> {axes}: unknown mesh axis {axis!r}. Axes: {', '.join(AXES)}."
                )
    return MappingProxyType(tidy)


@strict_fields
@dataclass(frozen=True)
class Strategy:
    """The placement of each kind of tensor. Plain data: print it, edit it, combine with `|`.

    Each column is {logical axis: mesh axis, or several}. The rule `*` stands for the first free
    dimension that divides.

    Attributes:
        name: What is shown.
        parameters: How parameters are sharded.
        gradients: How gradients accumulate, on top of the parameter's own placement; {"*": ()}
            alone means unsharded.
        optimizer_state: How optimizer state is sharded, on top of the parameter's own placement.
        activations: How batch, heads, sequence, … of activations are sharded.
        memory: What is in host memory: optimizer_state, master or parameters -> "host" or
            "device"; for optimizer_state also the fraction of their bytes from 0 to 1.
        replicate_below: Arrays with fewer elements in a layer ignore the rule `*`; 0: none do,
            math.inf: all. None: 2**14.
        joined: The strategies that `|` joined; () for one that is no union, or whose rules changed.

    Example:
        >>> import hfjax
        >>> (hfjax.FSDP | hfjax.TENSOR).parameters["mlp"]
        ('tensor',)
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    gradients: Mapping[str, Any] = field(default_factory=dict)
    optimizer_state: Mapping[str, Any] = field(default_factory=dict)
    activations: Mapping[str, Any] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=dict)  # part of the state -> host
    replicate_below: float | None = None  # smaller arrays ignore the rule *; None: SMALL elements
    joined: tuple["Strategy", ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        for column in COLUMNS:
            object.__setattr__(self, column, _rules(getattr(self, column)))
        object.__setattr__(self, "memory", memory_rules(self.memory))
        if self.gradients.get("*") == () and len(self.gradients) > 1:
            raise ValueError(
                f"{self.name}: gradients row * -> whole stands alone, found {dict(self.gradients)}."
            )
        size = self.replicate_below
        if size is not None and not is_real(size, 0, math.inf):
            raise ValueError(
                f"{self.name}: replicate_below={size!r}: a number of elements, at least 0, is "
                "expected: 0 splits all arrays, math.inf keeps all whole, None means 2**14."
            )

    def __hash__(self) -> int:
        return hash((self.name, self.replicate_below))

    def __or__(self, other: "Strategy") -> "Strategy":
        """Return both tables in one; a rule that both set differently is refused."""
        columns = {column: self._merge(other, column) for column in TABLE}
        sizes = {s.replicate_below for s in (self, other) if s.replicate_below is not None}
        if len(sizes) > 1:
            raise ValueError(f"{self.name} | {other.name}: replicate_below is {sorted(sizes)}.")
        size = next(iter(sizes), None)
        name, strategies = f"{self.name}|{other.name}", (*self.parts, *other.parts)
        return Strategy(name, **columns, replicate_below=size, joined=strategies)

    def __add__(self, other: object) -> NoReturn:
        """Refuse `+`, which the command line has for `|`."""
        name = other.name if isinstance(other, Strategy) else type(other).__name__
        raise TypeError(f"{self.name} + {name}: strategies are joined by |: {self.name} | {name}.")

    @property
    def smallest(self) -> float:
        """The number of elements of a layer from which an array obeys the rule `*`."""
        return SMALL if self.replicate_below is None else self.replicate_below

    @property
    def parts(self) -> tuple["Strategy", ...]:
        """The strategies that `|` joined; itself, if none did."""
        return self.joined or (self,)

    @property
    def splits_over(self) -> Axes:
        """The mesh axes over which it shards more than the batch dimension.

        >>> ZERO1.splits_over, DDP.splits_over
        (('context', 'expert', 'fsdp', 'data'), ())
        """
        columns = (getattr(self, column) for column in COLUMNS)
        split = [axes for rules in columns for name, axes in rules.items() if name != "batch"]
        return tuple(dict.fromkeys(axis for axes in split for axis in axes))

    def _merge(self, other: "Strategy", column: str) -> dict[str, Any]:
        show = show_memory if column == "memory" else _show_axes
        mine, theirs = getattr(self, column), getattr(other, column)
        for rule in mine.keys() & theirs.keys():
            if mine[rule] != theirs[rule]:
                raise ValueError(
                    f"{self.name} | {other.name}: both place {column} row {rule!r}: "
                    f"{self.name} says {show(mine[rule])}, "
                    f"{other.name} says {show(theirs[rule])}. "
                    "Keep one of them, or build a Strategy with the row you mean."
                )
        return {**mine, **theirs}

    def edit(self, **changes) -> "Strategy":
        """Return a copy with some fields changed.

        Args:
            changes: Fields by name. Rules given for a column (`parameters={"embed": "fsdp"}`) are
                added to its rules, or replace them; other fields (`name`, `replicate_below`) are
                replaced.

        Example:
            >>> import hfjax
            >>> mine = hfjax.FSDP.edit(name="mine", gradients={"*": ()}, replicate_below=0)
            >>> print(mine)
            mine  (arrays below 0 elements stay whole)
              rule   parameters           gradients  optimizer_state  activations
              *      fsdp+expert+context  whole      as parameters    -
              batch  -                    -          -                data+fsdp+expert
        """
        allowed = [f.name for f in fields(self) if f.name != "joined"]
        check_keywords("Strategy.edit", changes, allowed)
        merged = {
            name: {**getattr(self, name), **value} if name in TABLE else value
            for name, value in changes.items()
        }
        if changes.keys() & set(COLUMNS):  # with rules of its own it is no longer their union
            merged["joined"] = ()
        return replace(self, **merged)

    def __str__(self) -> str:
        lines = [f"{self.name}  (arrays below {self.smallest} elements stay whole)"]
        rules = dict.fromkeys(rule for column in COLUMNS for rule in getattr(self, column))
        cells = [(rule, *(self._cell(column, rule) for column in COLUMNS)) for rule in rules]
        table = [("rule", *COLUMNS), *cells] if cells else [("splits no array",)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines += ["  ".join(["", *map(str.ljust, line, widths)]).rstrip() for line in table]
        memory = ", ".join(f"{name} -> {show_memory(at)}" for name, at in self.memory.items())
        lines += [f"  memory: {memory}"] * bool(memory)
        return "\n".join(lines)

    def _cell(self, column: str, rule: str) -> str:
        """Return the text of a rule in a column; optimizer state follows gradients."""
        mine, full_gradients = getattr(self, column).get(rule), self.gradients.get("*") == ()
        if column not in ("gradients", "optimizer_state"):
            return "-" if mine is None else _show_axes(mine)
        if column == "gradients" and full_gradients:
            return "whole" if rule == "*" or rule in self.parameters else "-"
        base = "parameters" if self.parameters.get(rule) else ""
        if column == "optimizer_state" and not full_gradients and self.gradients.get(rule):
            if mine == self.gradients[rule]:
                return self._cell("gradients", rule)
            base = "gradients"
        phrases = [f"as {base}"] * bool(base) + [_show_axes(mine or ())] * bool(mine)
        return ", then ".join(phrases) or "-"


def _show_axes(axes: Axes) -> str:
    return "+".join(axes) or "whole"


_BATCH_RULE = {"batch": BATCH_AXES}
_SPLIT_INNER_FIRST = tuple(reversed(DATA_AXES))  # so a reduce-scatter can go node by node
_MEGATRON = {"vocab": "tensor", "heads": "tensor", "mlp": "tensor"}

DDP = Strategy("DDP", activations=_BATCH_RULE)
ZERO1 = Strategy("ZERO1", optimizer_state={"*": _SPLIT_INNER_FIRST}, activations=_BATCH_RULE)
ZERO2 = Strategy(
    "ZERO2",
    gradients={"*": _SPLIT_INNER_FIRST},
    optimizer_state={"*": _SPLIT_INNER_FIRST},
    activations=_BATCH_RULE,
)
# Devices that share sequences, or experts, shard the other parameters too: eight devices of one
# sequence would else replicate the model.
FSDP = ZERO3 = Strategy(
    "FSDP", parameters={"*": ("fsdp", "expert", *SEQUENCE_AXES)}, activations=_BATCH_RULE
)
# Hybrid sharding is FSDP on a mesh with data > 1: gradients are reduce-scattered over fsdp (inside
# a node), then shards are all-reduced over data (across nodes), once per step.
HSDP = replace(FSDP, name="HSDP")
TENSOR = Strategy("TENSOR", parameters=_MEGATRON, activations={**_MEGATRON, **_BATCH_RULE})
# Weights and activations are sharded over both axes of a grid: tensor_grid/ops.py.
GRID = Strategy(
    "GRID",
    parameters={**_MEGATRON, "embed": ROW_AXIS},
    activations={**_MEGATRON, "seq": "tensor", "embed": ROW_AXIS, **_BATCH_RULE},
)
SEQUENCE = Strategy("SEQUENCE", activations={"seq": "tensor", **_BATCH_RULE})
CONTEXT = Strategy("CONTEXT", activations={"positions": SEQUENCE_AXES, **_BATCH_RULE})
EXPERT = Strategy("EXPERT", parameters={EXPERTS: "expert"}, activations=_BATCH_RULE)
PIPE = Strategy("PIPE", parameters={"layers": "pipe"}, activations=_BATCH_RULE)
# The largest part of the state: two moments and, if any, master weights of each parameter.
HOST_OPTIMIZER = Strategy("HOST_OPTIMIZER", memory={"optimizer_state": "host", "master": "host"})
HOST_PARAMETERS = Strategy("HOST_PARAMETERS", memory={"parameters": "host"})


def python_expression(name: str) -> str:
    """Return how a program writes the strategy of a name, as the command line has it.

    >>> python_expression("fsdp+tensor"), python_expression("mine")
    ('hfjax.FSDP | hfjax.TENSOR', 'hfjax.FSDP, for instance')
    """
    members = re.findall(r"\w+", name.upper())
    known = members and all(isinstance(globals().get(member), Strategy) for member in members)
    return (
        " | ".join(f"hfjax.{member}" for member in members) if known else "hfjax.FSDP, for instance"
    )
