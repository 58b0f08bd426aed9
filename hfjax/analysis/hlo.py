"""Reads the collectives in a compiled program's text; has what both readers share.

`compiled.as_text()` is the only full view of an optimised program that jax offers. Its grammar is
regular enough for one scanner (`_split`, which knows brackets and quotes); the few regular
expressions below each read one fixed spelling and say which.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

Groups = tuple[tuple[int, ...], ...]
Axis = tuple[str, int, int]  # a mesh axis, or the part of it of this `size` after `pre` major parts

KINDS: Mapping[str, str] = {
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-reduce": "all-reduce",
    "collective-permute": "permute",
    "all-to-all": "all-to-all",
}

# --- what the StableHLO reader and this one share -------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One collective of the program before its device groups are named after mesh axes."""

    kind: str
    groups: Groups  # device ids that communicate; for a permute (source, target) pairs
    dtype: str
    shape: tuple[int, ...]
    count: int = 1
    where: str = ""

    @property
    def bytes(self) -> int:
        """The size of the payload, the larger of the two sides, on one device."""
        bits = re.search(r"\d+", self.dtype)  # float8_e4m3fn -> 8; a bool takes a byte
        return -(-math.prod(self.shape) * (int(bits[0]) if bits else 8) // 8)


TransferT = TypeVar("TransferT", bound=Transfer)


def repeat_region(body: Iterable[TransferT], label: str, times: int = 1) -> list[TransferT]:
    """Returns the transfers of a region that runs `times` times, `label` put before their place."""
    nested = lambda inner: f"{label} > {inner}" if inner else label
    return [
        dataclasses.replace(t, count=t.count * times, where=nested(t.where)) for t in body if times
    ]


def loop(
    trips: int | None, body: list[TransferT], condition: list[TransferT], suffix: str = ""
) -> list[TransferT]:
    """Returns the transfers of a loop: its body `trips` times, its condition once more."""
    if trips is None:
        return repeat_region([*condition, *body], "loop of unknown length")
    label = f"loop of {trips}{suffix}"
    return repeat_region(body, label, trips) + repeat_region(condition, label, trips + 1)


def heaviest_branch(branches: Sequence[list[TransferT]]) -> list[TransferT]:
    """Returns the transfers of the branch with the most bytes."""
    branch = max(branches, key=lambda b: sum(t.bytes * t.count for t in b), default=[])
    return repeat_region(branch, f"heaviest of {len(branches)} branches")


def dtype_name(short: str) -> str:
    """Returns jax's name of an HLO element type: float32 for f32, float8_e4m3fn for f8e4m3fn."""
    match = re.fullmatch(r"(bf|f|s|u|c)(\d+)(\w*)", short)  # letters, bits, variant
    if not match:
        return "bool" if short == "pred" else short
    names = {"bf": "bfloat", "f": "float", "s": "int", "u": "uint", "c": "complex"}
    return names[match[1]] + match[2] + (f"_{match[3]}" if match[3] else "")


def active_groups(kind: str, groups: Iterable[Iterable[int]]) -> Groups:
    """Returns the groups that communicate: lone devices and padding (-1) are dropped."""
    members = (tuple(int(d) for d in group if d >= 0) for group in groups)
    enough = (lambda g: g[0] != g[1]) if kind == "permute" else (lambda g: len(g) > 1)
    return tuple(group for group in members if enough(group))


def mesh_groups(
    sizes: Mapping[str, int], axes: Iterable[Axis], ids: np.ndarray | None = None
) -> Groups:
    """Returns the groups of devices that differ only along `axes` of a mesh of these `sizes`."""
    axes, shape, group_dims = list(axes), [], []
    for name, size in sizes.items():
        done = 1
        for pre, sub_size in sorted(
            (pre, sub_size) for axis, pre, sub_size in axes if axis == name
        ):
            group_dims.append(len(shape) + 1)
            shape += [pre // done, sub_size]
            done = pre * sub_size
        shape.append(size // done)
    grid = (np.arange(math.prod(sizes.values())) if ids is None else ids).reshape(shape)
    table = np.moveaxis(grid, group_dims, range(-len(group_dims), 0))
    return tuple(map(tuple, table.reshape(-1, math.prod(shape[i] for i in group_dims)).tolist()))


# --- the text -------------------------------------------------------------------------------------

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")  # `%name (args) -> type {`
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)")  # `  %name = type opcode(…), …`
_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\]")  # `bf16[8,128]`
_CALLS = ("calls", "to_apply", "called_computations")
_BRANCHES = ("branch_computations", "true_computation", "false_computation")
_CONTROL = (" while(", " conditional(", " call(", " send(", "calls=", "called_computations=")
_WORTH_PARSING = (*_CONTROL, *(f" {name}{tail}(" for name in KINDS for tail in ("", "-start")))


def transfers(text: str) -> list[Transfer]:
    """Returns every collective that one call of this HLO module performs, as device groups."""
    module, entry = _read(text)
    return module.walk(entry)


def _read(text: str) -> tuple["_Module", str]:
    """Returns the module of a text and its entry's name."""
    computations, entry = _computations(text)
    # `num_partitions=8` and `replica_count=1` stand in the first line, when they are not 1.
    header = text.split("\n", 1)[0]
    sizes = re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)
    return _Module(computations, math.prod(map(int, sizes))), entry


def _computations(text: str) -> tuple[dict[str, dict[str, str]], str]:
    """Returns {computation: {instruction: the rest of its line}} and the entry's name."""
    computations: dict[str, dict[str, str]] = {}
    entry, lines = "", {}
    for line in text.splitlines():
        if match := _INSTRUCTION.match(line):
            lines[match[1]] = match[2]
        elif match := _COMPUTATION.match(line):
            lines = computations[match[2]] = {}
            entry = match[2] if match[1] else entry
    if not entry:
        raise ValueError(f"not the text of an HLO module, no ENTRY in it: {text[:80]!r}")
    return computations, entry


@dataclasses.dataclass(frozen=True)
class _Op:
    """One instruction: opcode, names of its operands, attributes as text."""

    opcode: str
    operands: list[str]
    attributes: dict[str, str]

    def calls(self, keys: Sequence[str]) -> list[str]:
        """Returns the names of the computations under these attributes."""
        return [name for k in keys for name in _names(self.attributes.get(k, ""))]


def _split(text: str, separator: str) -> list[str]:
    """Returns the parts of `text` between separators outside every bracket and string."""
    parts, depth, quoted, start = [], 0, False, 0
    for i, char in enumerate(text):
        if char == '"' and text[i - 1] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += (char in "([{") - (char in ")]}")
            if char == separator and not depth:
                parts.append(text[start:i])
                start = i + 1
    return [part.strip() for part in (*parts, text[start:])]


def _names(text: str) -> list[str]:
    """Returns the names in `%a`, `{%a, %b}` or `f32[8]{0} %a, /*index=5*/%b`."""
    parts = _split(text.removeprefix("{").removesuffix("}"), ",")
    return [re.split(r"[ %/]", part)[-1] for part in parts if part]


def _parse(rest: str) -> _Op:
    head, *attributes = _split(rest, ",")
    opcode, _, operands = _split(head, " ")[1].partition("(")
    pairs = (attribute.partition("=") for attribute in attributes)
    return _Op(opcode, _names(operands.removesuffix(")")), {k: v for k, _, v in pairs})


def _as_permute(send: _Op) -> _Op:
    """Returns one direction of a permute that XLA broke into sends; a send to the host as it is."""
    extra = _split(send.attributes.get("frontend_attributes", "{}")[1:-1], ",")
    pairs = [e.partition("=")[2].strip('"') for e in extra if "source_target_pairs" in e]
    attributes = {"source_target_pairs": pairs[0]} if pairs else {}
    return _Op("collective-permute", send.operands[:1], attributes) if pairs else send


class _Module:
    """The computations of one module, each walked once."""

    def __init__(self, computations: dict[str, dict[str, str]], devices: int) -> None:
        self.computations, self.devices = computations, devices
        self.walked: dict[str, list[Transfer]] = {}

    def walk(self, name: str) -> list[Transfer]:
        """Returns the transfers of one run of a computation."""
        if name not in self.walked:
            lines = self.computations[name]
            relevant = (rest for rest in lines.values() if any(w in rest for w in _WORTH_PARSING))
            self.walked[name] = [t for rest in relevant for t in self.visit(_parse(rest), lines)]
        return self.walked[name]

    def visit(self, op: _Op, lines: dict[str, str]) -> list[Transfer]:
        if op.opcode.endswith(("-done", "-update")):  # counted at its -start
            return []
        if op.opcode == "send":
            op = _as_permute(op)
        if (name := op.opcode.removesuffix("-start")) in KINDS:
            groups = active_groups(KINDS[name], _groups(name, op.attributes, self.devices))
            payloads = _payloads(name, op, lines, groups)
            return [Transfer(KINDS[name], groups, *payload) for payload in payloads]
        if op.opcode == "while":
            condition, body = op.calls(["condition"])[0], op.calls(["body"])[0]
            trips, suffix = self.trips(op, condition)
            return loop(trips, self.walk(body), self.walk(condition), suffix)
        if op.opcode == "conditional":
            return heaviest_branch([self.walk(branch) for branch in op.calls(_BRANCHES)])
        return [t for called in op.calls(_CALLS) for t in self.walk(called)]

    def trips(self, op: _Op, condition: str) -> tuple[int | None, str]:
        """Returns a while's trip count by XLA, or by its condition with a label that says so."""
        try:
            return int(json.loads(op.attributes["backend_config"])["known_trip_count"]["n"]), ""
        except (KeyError, ValueError, TypeError):  # none there, or not JSON
            return self.bound(condition), " by its condition"

    def bound(self, condition: str) -> int | None:
        """Returns the constant of `counter < constant`, None if a condition is anything more."""
        lines = list(self.computations[condition].values())
        fused = [name for rest in lines if "calls=" in rest for name in _parse(rest).calls(_CALLS)]
        lines += [rest for name in fused for rest in self.computations[name].values()]
        bounds = re.findall(r"[su]\d+\[\] constant\((\d+)\)", "\n".join(lines))
        directions = re.findall(r"direction=(\w+)", "\n".join(lines))
        return int(bounds[0]) if len(bounds) == 1 and directions == ["LT"] else None


def _payloads(name: str, op: _Op, lines: dict[str, str], groups: Groups) -> list[tuple]:
    """Returns (dtype, shape) of each operand's larger side, computed from the operands.

    The operands look the same with and without -start, while results come as bare arrays, tuples
    or ((operands), (results)). An all-to-all without `dimensions` sends one operand to each peer.
    """
    if not groups:
        return []
    arrays = [_array(lines[operand]) for operand in op.operands]
    if name == "all-gather":
        dim = int(op.attributes["dimensions"].strip("{}"))
        n = max(map(len, groups))
        times = lambda shape: (*shape[:dim], shape[dim] * n, *shape[dim + 1 :])
        return [(dtype, times(shape)) for dtype, shape in arrays]
    if name == "all-to-all" and "dimensions" not in op.attributes and len(set(arrays)) == 1:
        return [(arrays[0][0], (len(arrays), *arrays[0][1]))]
    return arrays


def _array(rest: str) -> tuple[str, tuple[int, ...]]:
    match = _ARRAY.match(rest)
    if not match:
        raise ValueError(f"a collective's operand is not an array: {rest[:80]!r}")
    return dtype_name(match[1]), tuple(int(d.lstrip("<=")) for d in match[2].split(",") if d)


def _groups(name: str, attributes: dict[str, str], devices: int) -> Iterable[Iterable[int]]:
    """Returns the device groups of a collective in any of XLA's spellings, or a permute's pairs."""
    if name == "collective-permute":
        return _braces(attributes["source_target_pairs"])
    # Without use_global_device_ids but with a channel, a gather or reduction names replicas (jax
    # has one) and spans all their partitions; an all-to-all always names partitions.
    by_replica = name != "all-to-all" and "use_global_device_ids" not in attributes
    text = attributes.get("replica_groups", "{}")
    if text == "{}" or (by_replica and "channel_id" in attributes):
        return [range(devices)]
    if text.startswith("mesh"):  # _split cut `mesh[…], device_ids=(…) {…}` at its comma
        ids = attributes.get("device_ids")
        return _mesh_groups(text if ids is None else f"{text}, device_ids={ids}")
    return _iota(text) if text.startswith("[") else _braces(text)


def _braces(text: str) -> list[list[int]]:
    """Reads `{{0,1},{2,3}}`."""
    return [[int(i) for i in re.findall(r"\d+", g)] for g in re.findall(r"\{([\d, ]+)\}", text)]


def _iota(text: str) -> np.ndarray:
    """Reads `[4,2]<=[2,4]T(1,0)`: 0, 1, 2, … reshaped to [2,4], transposed, reshaped to [4,2]."""
    match = re.fullmatch(r"\[([\d,]*)\]<=\[([\d,]*)\](?:T\(([\d,]*)\))?", text)
    if not match:
        raise ValueError(f"cannot read the device groups {text!r}: a spelling new to hfjax")
    shape, source, order = ([int(i) for i in g.split(",") if i] for g in match.groups(""))
    ids = np.arange(math.prod(source)).reshape(source)
    return ids.transpose(order or range(len(source))).reshape(shape)


def _mesh_groups(text: str) -> Groups:
    """Reads `mesh['a'=2,'b'=4], device_ids=([2,4]<=[4,2]T(1,0)) {'a','b':(1)2}`; ids may miss."""
    match = re.fullmatch(r"mesh\[(.*?)\](?:, device_ids=\((.*)\))? \{(.*)\}", text)
    if not match:
        raise ValueError(f"cannot read the device groups {text!r}: a spelling new to hfjax")
    sizes = {name: int(n) for name, n in re.findall(r"'?([^',=]+)'?=(\d+)", match[1])}
    axes = [
        (name, int(pre or 1), int(sub_size or sizes[name]))
        for name, pre, sub_size in re.findall(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?", match[3])
    ]
    if not match[2]:
        return mesh_groups(sizes, axes)
    return mesh_groups(sizes, axes, _device_ids(match[2]))


def _device_ids(text: str) -> np.ndarray:
    """Reads `[2,4]<=[4,2]T(1,0)`, `[2,4]T(1,0)` (0, 1, 2, … so shaped, transposed), or a list."""
    if "<=" in text:
        return _iota(text)
    match = re.fullmatch(r"\[([\d,]*)\]T\(([\d,]*)\)", text)
    if not match:
        return np.array([int(i) for i in re.findall(r"\d+", text)])
    shape, order = ([int(i) for i in g.split(",")] for g in match.groups())
    return np.arange(math.prod(shape)).reshape(shape).transpose(order)
