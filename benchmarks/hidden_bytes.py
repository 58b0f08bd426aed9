"""Which collective bytes of a compiled GPU program run under a matmul: reads the schedule.

XLA prints a GPU program in the order in which it will be enqueued. A collective is under way from
its `-start` to its `-done`; what stands between runs beside it. Here

- compute is matmuls only: a `dot`, alone or inside a fusion, and cuBLAS calls; a loop between start
  and done counts with all its turns. Norms, softmax, copies and other collectives hide nothing.
- a collective is HIDDEN if at least `SUBSTANTIAL` FLOP of matmuls stand between start and done. One
  that XLA made synchronous, or left without a start, is exposed.
- COVERED is stricter: the share of its transfer time for which those matmuls last, at `FLOPS` and
  the speed of a link: `INSIDE` if each group of devices lies in one node, `BETWEEN` if one crosses
  nodes. These are half to four fifths of what data sheets promise. Transfers go one after another
  and a matmul covers one of them at a time. It is a model, good for comparing schedules, not a
  clock.

Loops are multiplied out; one whose turns XLA did not count is taken to run once. Bytes are those
of `hfjax.collectives`: the payload's larger side.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import jax

from hfjax.analysis import collectives as traffic, hlo
from hfjax.analysis.collectives import Collective

SUBSTANTIAL = 1e9  # FLOP between start and done: about 2 microseconds
FLOPS = 500e12  # per second, of bfloat16 matmuls as they are reached
INSIDE = 360e9  # bytes per second that one GPU sends over NVLink
BETWEEN = 40e9  # … over InfiniBand: a port of 400 Gbit/s for each GPU
NODE = 8  # GPUs, which follow one another in the mesh
_CALLS = ("calls", "to_apply", "called_computations")
_READ = re.compile(r" (?:while|call|conditional|fusion|custom-call|dot)\(|-start\(|-done\(")
_READ_SYNC = re.compile(rf" (?:{'|'.join(hlo.KINDS)})\(")


@dataclass(frozen=True)
class Flight:
    """One collective of the schedule and what runs while it is under way."""

    kind: str
    axes: tuple[str, ...]
    bytes: int  # payload of one call on one device
    seconds: float  # that one call takes, modelled
    count: int
    flops: float = 0.0  # of matmuls between start and done
    covered: float = 0.0  # share of `seconds`
    synchronous: bool = False  # nothing can run beside it

    @property
    def total(self) -> int:
        """The payload bytes of all calls."""
        return self.bytes * self.count

    @property
    def hidden(self) -> int:
        """The bytes of all calls if they run under a substantial matmul, else 0."""
        return self.total if self.flops >= SUBSTANTIAL else 0

    @property
    def exposed(self) -> float:
        """The seconds of all calls that nothing covers."""
        return self.seconds * (1 - self.covered) * self.count


def flights(compiled: jax.stages.Compiled) -> list[Flight]:
    """Return every collective of one call of a compiled program, in the order of its schedule."""
    meshes, _ = traffic._compiled_for(compiled)
    return read(compiled.as_text() or "", meshes)


def read(text: str, meshes: Iterable[traffic.Sizes]) -> list[Flight]:
    """Return every collective of a scheduled HLO module; `meshes` name the axes of its groups."""
    header = text.split("\n", 1)[0]
    if "is_scheduled=true" not in header:
        raise ValueError(
            f"not a scheduled module: {header[:80]!r}. Give the text of a program compiled for a "
            "GPU (a CPU program has no schedule): hfjax.target.target_devices gives the devices."
        )
    computations, entry = hlo._computations(text)
    devices = re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)
    module = hlo._Module(computations, math.prod(map(int, devices)))
    return list(Schedule(module, list(meshes)).walk(entry, 1))


class Schedule:
    """Walks computations in the order in which they are enqueued."""

    def __init__(self, module: hlo._Module, meshes: list[traffic.Sizes]):
        self.module, self.meshes = module, meshes
        self.counted: dict[str, float] = {}

    def walk(self, name: str, times: int) -> Iterator[Flight]:
        """Yield the flights of a computation that runs `times` times."""
        lines = self.module.computations[name]
        airborne: dict[str, Flight] = {}
        for instruction, op in self._ops(lines):
            if op.opcode.endswith("-done") and op.operands[0] in airborne:
                yield airborne.pop(op.operands[0])
                continue
            yield from self._inside(op, times)
            if flight := self._started(op, lines, times):
                if _is_synchronous(op):
                    yield replace(flight, synchronous=True)
                else:
                    airborne[instruction] = flight
                continue
            _cover(airborne, self._flops_of(op, lines))
        yield from airborne.values()

    def _ops(self, lines: dict[str, str]) -> Iterator[tuple[str, hlo._Op]]:
        for name, rest in lines.items():
            if _READ.search(rest) or _READ_SYNC.search(rest):
                yield name, hlo._parse(rest)

    def _inside(self, op: hlo._Op, times: int) -> Iterator[Flight]:
        """Yield the flights of the loop, call or branches that an instruction runs."""
        if op.opcode == "while":
            yield from self.walk(op.calls(["body"])[0], times * self._trips(op))
        elif op.opcode == "call":
            yield from (f for called in op.calls(_CALLS) for f in self.walk(called, times))
        elif op.opcode == "conditional":
            branches = [list(self.walk(b, times)) for b in op.calls(hlo._BRANCHES)]
            yield from max(branches, key=lambda found: sum(f.total for f in found), default=[])

    def _trips(self, op: hlo._Op) -> int:
        return self.module.trips(op, op.calls(["condition"])[0])[0] or 1

    def _started(self, op: hlo._Op, lines: dict[str, str], times: int) -> Flight | None:
        """Return the flight that an instruction starts, None if it starts none."""
        if not op.opcode.endswith("-start") and op.opcode not in hlo.KINDS:
            return None
        found = self.module.visit(op, lines)
        if not found:
            return None
        kind = found[0].kind
        axes, devices = traffic._name(kind == "permute", found[0].groups, self.meshes)
        size = sum(t.bytes for t in found)
        moved = Collective(kind, axes, "", (), size, 1, "", devices).moved
        return Flight(kind, axes, size, max(moved, 1) / link(found[0].groups), times)

    # -- matmuls ------------------------------------------------------------------------------

    def _flops(self, name: str) -> float:
        """Return the FLOP of the matmuls in one run of a computation."""
        if name not in self.counted:
            lines = self.module.computations[name]
            self.counted[name] = sum(self._flops_of(op, lines) for _, op in self._ops(lines))
        return self.counted[name]

    def _flops_of(self, op: hlo._Op, lines: dict[str, str]) -> float:
        if op.opcode == "dot":
            return _dot(op, lines, op.attributes["lhs_contracting_dims"])
        if op.opcode == "custom-call":
            return _cublas(op, lines)
        if op.opcode == "while":
            return self._trips(op) * self._flops(op.calls(["body"])[0])
        if op.opcode == "conditional":
            return max(map(self._flops, op.calls(hlo._BRANCHES)), default=0.0)
        return sum(map(self._flops, op.calls(_CALLS)))


def link(groups: hlo.Groups) -> float:
    """Return the bytes per second that a device of these groups sends: by the slowest link."""
    inside = all(len({device // NODE for device in group}) == 1 for group in groups)
    return INSIDE if inside else BETWEEN


def _cover(airborne: dict[str, Flight], flops: float) -> None:
    """Let a matmul run beside the flights under way; it covers them in the order of their start."""
    seconds = flops / FLOPS
    for name, f in airborne.items() if flops else ():
        used = min(seconds, f.seconds * (1 - f.covered))
        seconds -= used
        airborne[name] = replace(f, flops=f.flops + flops, covered=f.covered + used / f.seconds)


def _is_synchronous(op: hlo._Op) -> bool:
    config = op.attributes.get("backend_config", "")
    return not op.opcode.endswith("-start") or '"is_sync":true' in config


def _dot(op: hlo._Op, lines: dict[str, str], contracted: str) -> float:
    """Return 2 x the result's elements x the contracted length, batch dimensions counted once."""
    left, right = (hlo._array(lines[operand])[1] for operand in op.operands[:2])
    length = math.prod(left[int(d)] for d in re.findall(r"\d+", contracted))
    batch = math.prod(left[int(d)] for d in re.findall(r"\d+", _batch(op)))
    return 2.0 * math.prod(left) * math.prod(right) / length / batch


def _batch(op: hlo._Op) -> str:
    return op.attributes.get("lhs_batch_dims", "")


def _cublas(op: hlo._Op, lines: dict[str, str]) -> float:
    """Return the FLOP of a cuBLAS call, 0 for any other custom call."""
    if "__cublas" not in op.attributes.get("custom_call_target", ""):
        return 0.0
    numbers = json.loads(op.attributes["backend_config"])["gemm_backend_config"]
    numbers = numbers["dot_dimension_numbers"]
    spell = lambda key: ",".join(map(str, numbers.get(key, ())))
    op = replace(op, attributes={"lhs_batch_dims": spell("lhs_batch_dimensions")})
    return _dot(op, lines, spell("lhs_contracting_dimensions"))
