"""Which bytes of a compiled GPU program only move, and what is gathered at once: its schedule.

Each instruction reads its operands and writes its result, each loop times its turns. A fusion reads
of what it slices the slices; what is updated in place costs the update. An instruction *moves* if
nothing in it computes: slices, updates of slices, concatenations, copies, transposes, and fusions
of these. A change of type computes.

`Whole` follows what gathers of parameters make, through views and loops, until nothing reads it.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import jax

from hfjax.analysis import count_collectives as traffic, hlo
from hfjax.analysis.hlo import Transfer

MOVES = {"slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "copy", "transpose"}
SLICES = {"slice", "dynamic-slice", "gather"}
VIEWS = {"bitcast", "reshape", "opt-barrier"}
# Names for what is there already.
NAMES = VIEWS | {"parameter", "tuple", "get-tuple-element", "constant", "after-all", "partition-id"}
# What a fusion that only moves may hold beside moves: zeros around a slice, a choice by place.
BESIDE = NAMES | {"broadcast", "iota", "pad", "select", "compare"}
LEAST = 1 << 20  # bytes of a gathered array that counts as a parameter
_CALLS = ("calls", "to_apply", "called_computations")
_ARRAYS = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")


@dataclass
class Moved:
    """Bytes that one call of a program reads and writes on one device."""

    total: int = 0
    moved: int = 0  # by what only moves
    by: dict[str, int] = field(default_factory=dict)  # what moves, by the name of the instruction

    def add(self, other: "Moved", times: int = 1) -> None:
        """Add what a region moves that runs so many times."""
        self.total += other.total * times
        self.moved += other.moved * times
        for name, size in other.by.items():
            self.by[name] = self.by.get(name, 0) + size * times


@dataclass(frozen=True)
class Whole:
    """Gathered arrays: how many in one call, and what is there at once at most."""

    gathers: int = 0
    bytes: int = 0
    arrays: int = 0


Arrays = dict[str, int]  # name of a gathered array -> its bytes


class Program:
    """A scheduled HLO module; `axes` are those along which parameters are gathered."""

    def __init__(self, compiled: jax.stages.Compiled, axes: Iterable[str] = ("fsdp",)):
        text = compiled.as_text() or ""
        meshes, _ = traffic._meshes_and_platform(compiled)
        self.meshes, self.axes = list(meshes), set(axes)
        self.computations, self.entry = hlo._computations(text)
        devices = re.findall(r"(?:num_partitions|replica_count)=(\d+)", text.split("\n", 1)[0])
        self.module = hlo._Module(self.computations, math.prod(map(int, devices)))
        self.types: dict[str, dict[str, str]] = {}
        self.parsed: dict[str, dict[str, hlo._Op]] = {}
        self.seen: dict[str, Moved] = {}

    def ops(self, name: str) -> dict[str, hlo._Op]:
        """Return the instructions of a computation, in the order in which they are enqueued."""
        if name not in self.parsed:
            lines = self.computations[name]
            self.parsed[name] = {made: hlo._parse(rest) for made, rest in lines.items()}
            self.types[name] = {m: hlo._split(rest, " ")[0] for m, rest in lines.items()}
        return self.parsed[name]

    def turns(self, op: hlo._Op) -> int:
        """Return how often a loop runs; 1 if XLA did not count."""
        return self.module.trips(op, op.calls(["condition"])[0])[0] or 1

    # -- bytes --------------------------------------------------------------------------------

    @cached_property
    def moved(self) -> Moved:
        """The bytes of one call of the program."""
        return self._region(self.entry)

    def _region(self, name: str) -> Moved:
        if name not in self.seen:
            found = Moved()
            for made, op in self.ops(name).items():
                if op.opcode == "while":
                    found.add(self._region(op.calls(["body"])[0]), self.turns(op))
                elif op.opcode == "conditional":
                    branches = map(self._region, op.calls(hlo._BRANCHES))
                    found.add(max(branches, key=lambda m: m.total))
                elif op.opcode == "call":
                    for called in op.calls(_CALLS):
                        found.add(self._region(called))
                elif op.opcode not in NAMES and not op.opcode.endswith(("-done", "-update")):
                    found.add(self._instruction(name, made, op))
            self.seen[name] = found
        return self.seen[name]

    def _instruction(self, name: str, made: str, op: hlo._Op) -> Moved:
        types = self.types[name]
        label = re.sub(r"[.\d]+$", "", made)
        if op.opcode != "custom-call" and (called := op.calls(["calls"])):
            total, moves = self._fusion(called[0])
        elif op.opcode == "dynamic-update-slice":
            total, moves = 2 * size(types[op.operands[1]]), True
        elif op.opcode in SLICES:
            total, moves = 2 * size(types[made]), op.opcode in MOVES
        else:
            read = sum(size(types[x]) for x in op.operands)
            written = size(types[made])
            if op.opcode.endswith("-start"):  # its result names its operands too
                written = max(written - read, 0)
            total, moves = read + written, op.opcode.removesuffix("-start") in MOVES
        return Moved(total, total * moves, {label: total} if moves else {})

    def _fusion(self, name: str) -> tuple[int, bool]:
        """Return the bytes of a fusion, and whether it only moves."""
        ops, types = self.ops(name), self.types[name]
        users: dict[str, list[str]] = {}
        for made, op in ops.items():
            for operand in op.operands:
                users.setdefault(operand, []).append(made)
        given = [made for made, op in ops.items() if op.opcode == "parameter"]
        read = sum(min(self._read(x, ops, users, types), size(types[x])) for x in given)
        root = list(ops)[-1]
        results = ops[root].operands if ops[root].opcode == "tuple" else [root]
        written = sum(self._written(x, ops, types) for x in results)
        large = {op.opcode for made, op in ops.items() if elements(types[made]) > 1}
        return read + written, bool(MOVES & large) and large <= MOVES | BESIDE

    def _read(self, value: str, ops: Mapping, users: Mapping, types: Mapping) -> int:
        total = 0
        for user in users.get(value, ()):
            op = ops[user]
            if op.opcode in VIEWS:
                total += self._read(user, ops, users, types)
            elif op.opcode in SLICES and op.operands[0] == value:
                total += size(types[user])
            elif not (op.opcode == "dynamic-update-slice" and op.operands[0] == value):
                total += size(types[value])
        return total

    def _written(self, value: str, ops: Mapping, types: Mapping) -> int:
        op = ops[value]
        if op.opcode in VIEWS:
            return self._written(op.operands[0], ops, types)
        if op.opcode == "dynamic-update-slice":
            return size(types[op.operands[1]])
        return 0 if op.opcode == "parameter" else size(types[value])

    # -- gathered parameters --------------------------------------------------------------------

    @cached_property
    def whole(self) -> Whole:
        """What is gathered in one call."""
        return self._held(self.entry, {})[0]

    def _held(self, name: str, given: Mapping[int, Arrays]) -> tuple[Whole, dict[int, Arrays]]:
        """Return what a computation holds, and what the elements of its result hold.

        `given` says it of the elements of its parameter.
        """
        ops = self.ops(name)
        parts: dict[str, dict[int, Arrays]] = {}  # of tuples
        holds: dict[str, Arrays] = {}
        loops: dict[int, tuple[Whole, set[str]]] = {}  # what they hold, and what goes through them
        gathers = 0
        for at, (made, op) in enumerate(ops.items()):
            if op.opcode == "parameter":
                parts[made] = dict(given)
            elif op.opcode == "tuple":
                parts[made] = {i: holds[x] for i, x in enumerate(op.operands) if holds[x]}
            elif op.opcode == "all-gather-done" and self.types[name][made].startswith("("):
                parts[made] = {
                    int(k.partition("#")[2]): {k: b} for k, b in holds[op.operands[0]].items()
                }
            elif op.opcode == "while":
                state = parts.get(op.operands[0], {})
                parts[made], loops[at] = self._loop(made, op, state)
                gathers += loops[at][0].gathers
            new = self._gathered(name, made, op)
            gathers += len(new)
            holds[made] = new or _handed_on(made, op, parts, holds)
        root = list(ops)[-1]
        most, arrays = _at_once(ops, holds, loops, root)
        return Whole(gathers, most, arrays), parts.get(root, {})

    def _loop(self, made: str, op: hlo._Op, state: dict[int, Arrays]) -> tuple:
        body = op.calls(["body"])[0]
        _, carried = self._held(body, state)
        found, carried = self._held(body, carried | state)
        out = {i: {f"{made}/{i}/{k}": b for k, b in a.items()} for i, a in carried.items()}
        found = Whole(found.gathers * self.turns(op), found.bytes, found.arrays)
        passed = {k for arrays in (*state.values(), *out.values()) for k in arrays}
        return out, (found, passed)

    def _gathered(self, name: str, made: str, op: hlo._Op) -> Arrays:
        """Return the parameters that a gather makes whole."""
        if op.opcode.removesuffix("-start") != "all-gather":
            return {}
        groups = self.module.visit(op, self.computations[name])[0].groups
        along, _ = traffic._mesh_axes(False, groups, self.meshes)
        if not set(along) <= self.axes:
            return {}
        results = _ARRAYS.findall(self.types[name][made])[-len(op.operands) :]
        sizes = [size(f"{dtype}[{dims}]") for dtype, dims in results]
        return {f"{made}#{i}": b for i, b in enumerate(sizes) if b >= LEAST}


def _handed_on(made: str, op: hlo._Op, parts: Mapping, holds: Mapping[str, Arrays]) -> Arrays:
    """Return which gathered arrays an instruction hands on: views of them, or tuples."""
    if op.opcode == "get-tuple-element" and op.operands[0] in parts:
        return parts[op.operands[0]].get(int(op.attributes["index"]), {})
    if op.opcode in VIEWS | {"get-tuple-element", "all-gather-done"}:
        return holds[op.operands[0]]
    return {k: b for arrays in parts.get(made, {}).values() for k, b in arrays.items()}


def _at_once(
    ops: Mapping[str, hlo._Op], holds: Mapping[str, Arrays], loops: Mapping, root: str
) -> tuple[int, int]:
    """Return the most bytes, and arrays, that are there at once."""
    sizes = {k: b for arrays in holds.values() for k, b in arrays.items()}
    born, until = {}, {}
    for at, (made, op) in enumerate(ops.items()):
        for array in holds[made]:
            born.setdefault(array, at)
        if op.opcode.endswith("-done") or op.opcode == "get-tuple-element":
            continue  # no use of its own: who reads it is
        until |= {array: at for x in (made, *op.operands) for array in holds.get(x, ())}
    until |= dict.fromkeys(holds[root], len(ops))
    most = arrays = 0
    for at in {*born.values(), *loops}:
        within, through = loops.get(at, (Whole(), set()))
        here = {k for k in born if born[k] <= at <= until[k]} - through
        most = max(most, sum(sizes[k] for k in here) + within.bytes)
        arrays = max(arrays, len(here) + within.arrays)
    return most, arrays


def size(types: str) -> int:
    """Return the bytes of arrays, given as HLO writes their types."""
    found = 0
    for dtype, dims in _ARRAYS.findall(types):
        shape = tuple(int(d.lstrip("<=")) for d in dims.split(",") if d)
        found += Transfer("", (), hlo.dtype_name(dtype), shape).bytes
    return found


def elements(types: str) -> int:
    """Return the number of elements of the largest of some arrays."""
    of = lambda dims: math.prod(int(d.lstrip("<=")) for d in dims.split(",") if d)
    return max((of(dims) for _, dims in _ARRAYS.findall(types)), default=0)
