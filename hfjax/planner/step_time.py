"""The time of a step by formula; the total is the sum of its parts.

    products    matmuls and attention: operations, or bytes if these take longer
    memory      all else that a device computes: its memory traffic and its launches
    exposed     transfers that no matmuls hide, by purpose, and the slowdown of matmuls by those
                that are hidden
    bubble      slots of a pipeline in which a stage waits
    optimizer   memory traffic of the state
    host        transfers to the host and back

A transfer takes a start, a hop for each step of its ring, and then its bytes at the speed of its
slowest link. In a group with k devices in each of several nodes, k ports carry what leaves a node.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import jax.numpy as jnp

from hfjax.analysis.matmul_time import FusedAttention, ProductModel, matmul_seconds
from hfjax.analysis.overlap import Matmul
from hfjax.hardware.machine import Machine
from hfjax.parallel.mesh import AXES
from hfjax.planner.comm_model import CommVolume
from hfjax.planner.memory_model import MeshShape
from hfjax.planner.programs.model_profile import Work

MAX_HOPS = 64  # hops of a ring: beyond that trees replace it
OVERLAP_FRACTION = 0.9  # of the matmuls' time: the part beside which a transfer can run


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part; `exposed` by purpose."""

    products: float
    memory: float
    exposed: Mapping[str, float]
    bubble: float
    optimizer: float
    host: float
    transfers: float = 0.0  # of all of them, hidden or not

    @property
    def parts(self) -> dict[str, float]:
        """The parts by name, those of transfers by purpose."""
        first = {"products": self.products, "memory": self.memory}
        exposed = {f"exposed: {name}": s for name, s in self.exposed.items()}
        last = {"bubble": self.bubble, "optimizer": self.optimizer, "host": self.host}
        return first | exposed | last

    @property
    def all_exposed(self) -> float:
        """Seconds of exposed transfers."""
        return sum(self.exposed.values())

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class WorkTime:
    """Seconds of a part of the model on one device."""

    products: float
    memory: float

    @property
    def total(self) -> float:
        """The sum of both."""
        return self.products + self.memory

    def with_memory(self, seconds: float) -> "WorkTime":
        """Return it with `seconds` more of memory traffic."""
        return WorkTime(self.products, self.memory + seconds)

    def times(self, count: float) -> "WorkTime":
        """Return it `count` times."""
        return WorkTime(self.products * count, self.memory * count)

    def __add__(self, other: "WorkTime") -> "WorkTime":
        return WorkTime(self.products + other.products, self.memory + other.memory)


NO_WORK = WorkTime(0.0, 0.0)


def time_of_work(work: Work, examples: float, tensor: int, machine: Machine) -> WorkTime:
    """Return the time of a part for so many examples; the number may be a fraction."""
    products = 0.0
    for p in work.products:
        batch, m, n, k = (max(round(x), 1) for x in p.gemm_shape(examples, tensor))
        itemsize = jnp.dtype(p.dtype).itemsize
        one = Matmul(batch, m, n, k, itemsize * batch * (m * k + k * n + m * n))
        products += p.times * matmul_seconds(
            one, ProductModel.from_machine(machine, float32=itemsize > 2)
        )
    for call in work.attention:
        local_examples = examples / (tensor if call.split else 1)
        shape = (local_examples, call.seq_len, call.heads, call.width)
        fused = FusedAttention(*shape, itemsize=call.itemsize)
        products += (
            call.times
            * call.window_fraction
            * (fused.backward if call.backward else fused.forward)(machine)
        )
    bytes_of_rows, fixed = work.traffic
    memory = (bytes_of_rows * examples + fixed) / machine.stream + work.launches * machine.launch
    return WorkTime(products, memory)


# -- transfers ----------------------------------------------------------------------------


@cache
def node_membership(axes: tuple[str, ...], mesh: MeshShape, per_node: int) -> tuple[bool, int]:
    """Return whether a group is inside one node, and how many of its devices each node has.

    >>> node_membership(("fsdp",), MeshShape.of(fsdp=16, tensor=4), 8)
    (False, 2)
    """
    order = list(AXES)
    slowest = min(order.index(axis) for axis in axes)
    faster = math.prod(mesh[a] for a in order[slowest:])
    group = math.prod(mesh[a] for a in axes)
    if faster <= per_node:
        return True, group
    block, members = 1, 1
    for axis in reversed(order):
        size = mesh[axis]
        room = max(per_node // block, 1)
        count = min(size, room)
        if axis in axes:
            members *= count
        block *= size
    return False, max(members, 1)


def comm_seconds(comm: CommVolume, mesh: MeshShape, machine: Machine) -> float:
    """Return how long transfers take, one after another."""
    inside, members = node_membership(comm.axes, mesh, machine.per_node)
    group = math.prod(mesh[a] for a in comm.axes)
    steps = 1 if comm.kind == "permute" else min(group - 1, MAX_HOPS)
    rounds = 2 if comm.kind == "all-reduce" else 1
    if inside:
        start, hop, speed = machine.inside_start, machine.inside_hop, machine.inside
    else:
        start, hop = machine.between_start, machine.between_hop
        speed = min(machine.inside, machine.between * members)
        if comm.kind == "permute":
            speed = machine.between
    return comm.calls * (start + rounds * steps * hop) + comm.sent_bytes(mesh) / speed


def straggler_factor(devices: int, machine: Machine) -> float:
    """Return the slowdown of the slowest of so many devices, relative to the mean.

    >>> from hfjax.hardware.machine import MACHINES
    >>> straggler_factor(1, MACHINES["h100"])
    1.0
    """
    return 1 + machine.spread * math.sqrt(2 * math.log(devices))


@dataclass
class OverlapBudget:
    """The seconds of matmuls that are left to hide transfers, forward and backward.

    Hiding is not free: matmuls lose `slowdown` seconds for each second hidden.
    """

    forward: float
    backward: float
    slowdown: float
    exposed: dict[str, float] = field(default_factory=dict)
    total: float = 0.0

    def add(self, comm: CommVolume, duration: float, fraction: float) -> None:
        """Hide a transfer, at most the given fraction of it, and count the rest as exposed."""
        self.total += duration
        name = "backward" if comm.backward else "forward"
        used = min(getattr(self, name), duration * fraction)
        setattr(self, name, getattr(self, name) - used)
        rest = duration - used + self.slowdown * used
        self.exposed[comm.purpose] = self.exposed.get(comm.purpose, 0.0) + rest
