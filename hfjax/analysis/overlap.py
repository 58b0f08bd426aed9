"""Finds the collective bytes of a compiled GPU program that run under a matmul, in its schedule.

XLA prints a GPU program in the order in which it will be enqueued. A collective is in flight from
its `-start` to its `-done`; instructions between them run beside it. Here

- compute is matmuls only: a `dot`, alone or inside a fusion, and calls of cuBLAS and of cuDNN's
  convolutions; a loop between start and done counts with all its iterations. Norms, softmax,
  copies and other collectives hide nothing.
- a collective is HIDDEN if at least `SUBSTANTIAL` FLOP of matmuls are between start and done. One
  that XLA made synchronous, or left without a start, is exposed.
- COVERED is stricter: the share of its transfer time for which those matmuls last, at the
  machine's `scheduled_flops` and the speed of a link: `inside` if each group of devices is in one
  node, `between` if one crosses nodes. These are half to four fifths of what data sheets promise.
  Transfers go one after another and a matmul covers one of them at a time. It is a model, good for
  comparing schedules, not a clock.

`products` returns every matmul of the program by its shape, for models of how long they take.

Loops are multiplied out; one whose iterations XLA did not count is taken to run once. Bytes are
those of `hfjax.collectives`: the payload's larger side.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import jax

from hfjax.analysis import count_collectives as traffic, hlo
from hfjax.analysis.count_collectives import Collective
from hfjax.analysis.hlo import Transfer
from hfjax.hardware.machine import H200, Machine
from hfjax.utils.tables import count_equal

SUBSTANTIAL = 1e9  # FLOP between start and done: about 2 microseconds
_READ = re.compile(r" (?:while|call|conditional|fusion|custom-call|dot)\(|-start\(|-done\(")
_READ_SYNC = re.compile(rf" (?:{'|'.join(hlo.KINDS)})\(")


@dataclass(frozen=True)
class Flight:
    """One collective of the schedule and what runs while it is in flight."""

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


@dataclass(frozen=True)
class Matmul:
    """One shape of matmul, `batch` times [m, k] x [k, n], and how often the program runs it."""

    batch: int
    m: int
    n: int
    k: int
    bytes: int  # of its operands and its result
    count: int = 1

    @property
    def flops(self) -> float:
        """The FLOP of one run."""
        return 2.0 * self.batch * self.m * self.n * self.k


def flights(compiled: jax.stages.Compiled, machine: Machine = H200) -> list[Flight]:
    """Return every collective of one call of a compiled program, in the order of its schedule."""
    meshes, _ = traffic._meshes_and_platform(compiled)
    return read_schedule(compiled.as_text() or "", meshes, machine)


def read_schedule(
    text: str, meshes: Iterable[traffic.Sizes], machine: Machine = H200
) -> list[Flight]:
    """Return every collective of a scheduled HLO module; `meshes` name the axes of its groups."""
    module, entry = _scheduled(text)
    return list(_Walk(module, list(meshes), machine).walk(entry, 1))


def products(text: str) -> list[Matmul]:
    """Return every matmul of one call of a scheduled HLO module, equal shapes counted together."""
    module, entry = _scheduled(text)
    return _Walk(module, []).products(entry)


def _scheduled(text: str) -> tuple[hlo._Module, str]:
    """Return a scheduled module and the name of its entry."""
    header = text.split("\n", 1)[0]
    if "is_scheduled=true" not in header:
        raise ValueError(
            f"not a scheduled module: {header[:80]!r}. Give the text of a program compiled for a "
            "GPU (a CPU program has no schedule): hfjax.analysis.target_devices gives the devices."
        )
    return hlo._read(text)


class _Walk:
    """Walks computations in the order in which they are enqueued."""

    def __init__(
        self, module: hlo._Module, meshes: list[traffic.Sizes], machine: Machine = H200
    ) -> None:
        self.module, self.meshes, self.machine = module, meshes, machine
        self.counted: dict[str, list[Matmul]] = {}

    def walk(self, name: str, times: int) -> Iterator[Flight]:
        """Yield the flights of a computation that runs `times` times."""
        lines = self.module.computations[name]
        in_flight: dict[str, Flight] = {}
        for instruction, op in self._ops(lines):
            if op.opcode.endswith("-done") and op.operands[0] in in_flight:
                yield in_flight.pop(op.operands[0])
                continue
            yield from self._body_flights(op, times)
            if flight := self._start_flight(op, lines, times):
                if _is_synchronous(op):
                    yield replace(flight, synchronous=True)
                else:
                    in_flight[instruction] = flight
                continue
            flops = sum(p.flops * p.count for p in self._products_of(instruction, op, lines))
            _cover(in_flight, flops, self.machine.scheduled_flops)
        yield from in_flight.values()

    def _ops(self, lines: dict[str, str]) -> Iterator[tuple[str, hlo._Op]]:
        for name, rest in lines.items():
            if _READ.search(rest) or _READ_SYNC.search(rest):
                yield name, hlo._parse(rest)

    def _body_flights(self, op: hlo._Op, times: int) -> Iterator[Flight]:
        """Yield the flights of the loop, call or branches that an instruction runs."""
        if op.opcode == "while":
            yield from self.walk(op.calls(["body"])[0], times * self._trips(op))
        elif op.opcode == "call":
            yield from (f for called in op.calls(hlo._CALLS) for f in self.walk(called, times))
        elif op.opcode == "conditional":
            branches = [list(self.walk(b, times)) for b in op.calls(hlo._BRANCHES)]
            yield from max(
                branches,
                key=lambda branch_flights: sum(f.total for f in branch_flights),
                default=[],
            )

    def _trips(self, op: hlo._Op) -> int:
        return self.module.trips(op, op.calls(["condition"])[0])[0] or 1

    def _start_flight(self, op: hlo._Op, lines: dict[str, str], times: int) -> Flight | None:
        """Return the flight that an instruction starts, None if it starts none."""
        if not op.opcode.endswith("-start") and op.opcode not in hlo.KINDS:
            return None
        transfers = self.module.visit(op, lines)
        if not transfers:
            return None
        kind = transfers[0].kind
        axes, devices = traffic._mesh_axes(kind == "permute", transfers[0].groups, self.meshes)
        size = sum(t.bytes for t in transfers)
        moved = Collective(kind, axes, "", (), size, 1, "", devices).moved
        return Flight(kind, axes, size, max(moved, 1) / self._link(transfers[0].groups), times)

    def _link(self, groups: hlo.Groups) -> float:
        """Return the bytes per second that a device of these groups sends over the slowest link."""
        nodes = ({device // self.machine.per_node for device in group} for group in groups)
        crosses = any(len(of_group) != 1 for of_group in nodes)
        return self.machine.between if crosses else self.machine.inside

    # -- matmuls ------------------------------------------------------------------------------

    def products(self, name: str) -> list[Matmul]:
        """Return the matmuls in one run of a computation."""
        if name not in self.counted:
            lines = self.module.computations[name]
            matmul_lists = (
                self._products_of(instruction, op, lines) for instruction, op in self._ops(lines)
            )
            self.counted[name] = count_equal(p for several in matmul_lists for p in several)
        return self.counted[name]

    def _products_of(self, name: str, op: hlo._Op, lines: dict[str, str]) -> list[Matmul]:
        """Return the matmuls of the instruction `name`, which is `op`."""
        if op.opcode == "dot":
            return [_dot(op, lines, lines[name])]
        if op.opcode == "custom-call":
            return _cublas(op, lines, lines[name]) or _cudnn(op, lines, lines[name])
        if op.opcode == "while":
            trips = self._trips(op)
            body = self.products(op.calls(["body"])[0])
            return [replace(p, count=p.count * trips) for p in body]
        if op.opcode == "conditional":
            branches = map(self.products, op.calls(hlo._BRANCHES))
            return max(branches, key=lambda b: sum(p.flops * p.count for p in b), default=[])
        return [p for called in op.calls(hlo._CALLS) for p in self.products(called)]


def _cover(in_flight: dict[str, Flight], flops: float, speed: float) -> None:
    """Let a matmul run beside the flights; it covers them in the order of their start."""
    seconds = flops / speed
    for name, f in in_flight.items() if flops else ():
        used = min(seconds, f.seconds * (1 - f.covered))
        seconds -= used
        in_flight[name] = replace(f, flops=f.flops + flops, covered=f.covered + used / f.seconds)


def _is_synchronous(op: hlo._Op) -> bool:
    config = op.attributes.get("backend_config", "")
    return not op.opcode.endswith("-start") or '"is_sync":true' in config


def _dot(op: hlo._Op, lines: dict[str, str], result: str) -> Matmul:
    """Return the matmul of a dot; `result` is text whose first array is the result."""
    arrays = [hlo._array(lines[operand]) for operand in op.operands[:2]]
    (_, left), (_, right) = arrays
    sizes = lambda key: [left[int(d)] for d in re.findall(r"\d+", op.attributes.get(key, ""))]
    batch, k = math.prod(sizes("lhs_batch_dims")), math.prod(sizes("lhs_contracting_dims"))
    m, n = (math.prod(shape) // (batch * k) for shape in (left, right))
    arrays.append((hlo._array(result)[0], (batch, m, n)))
    size = sum(Transfer("", (), dtype, shape).bytes for dtype, shape in arrays)
    return Matmul(batch, m, n, k, size)


def _cublas(op: hlo._Op, lines: dict[str, str], result: str) -> list[Matmul]:
    """Return the matmul of a cuBLAS call, none for any other custom call."""
    if "__cublas" not in op.attributes.get("custom_call_target", ""):
        return []
    numbers = json.loads(op.attributes["backend_config"])["gemm_backend_config"]
    numbers = numbers["dot_dimension_numbers"]
    spell = lambda key: ",".join(map(str, numbers.get(key, ())))
    keys = {"lhs_batch_dims": "lhs_batch_dimensions"}
    keys["lhs_contracting_dims"] = "lhs_contracting_dimensions"
    attributes = {ours: spell(theirs) for ours, theirs in keys.items()}
    return [_dot(replace(op, attributes=attributes), lines, result.lstrip("("))]


def _cudnn(op: hlo._Op, lines: dict[str, str], result: str) -> list[Matmul]:
    """Return the matmul that a cuDNN convolution computes, none for any other custom call.

    Output positions times output channels, each a sum over the kernel's positions and channels.
    """
    match = re.search(r"__cudnn\$conv(\w+)", op.attributes.get("custom_call_target", ""))
    if not match:
        return []
    arrays = [hlo._array(lines[operand]) for operand in op.operands[:2]]
    arrays.append(hlo._array(result.lstrip("(")))
    roles = {"BackwardInput": (0, 1), "BackwardFilter": (1, 2)}  # indices: output and kernel
    output, kernel = (arrays[n][1] for n in roles.get(match[1], (2, 1)))
    labels = op.attributes["dim_labels"].split("_")[1].split("->")[0]
    n = kernel[labels.index("o")]
    size = sum(Transfer("", (), dtype, shape).bytes for dtype, shape in arrays)
    return [Matmul(1, math.prod(output) // n, n, math.prod(kernel) // n, size)]
