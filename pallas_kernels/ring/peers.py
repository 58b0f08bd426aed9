"""Who the ranks of a ring are and how they reach each other: on several GPUs, or on one.

A kernel's body is written once, against a ring. `MeshRing` is a ring of GPUs along one named axis
of a mesh (of any mesh: the other axes' coordinates stay). `VirtualRing` plays it on ONE GPU: the
ranks are a grid axis, every buffer carries a leading axis of ranks and "the same buffer on rank r"
is its row r. The second runs the same copies, signals and order of events where there is one GPU.

What a body may rely on, and what it owes:

- **Entry.** Semaphores are zero and every rank's buffers exist before any rank's kernel runs. jax
  fills the semaphores with zeros in the program, and before each launch of a kernel that names a
  peer the runtime runs a barrier of all GPUs of the mesh on the stream (NVSHMEM's, or XLA's
  `LaunchMultiGpuBarrier`, in jaxlib of 0.10.2 as of 0.12). So no barrier of our own stands at the
  entry: a fast rank can neither signal into a semaphore that is about to be zeroed nor write into a
  buffer that an earlier operation still reads.
- **Exit.** Nothing waits at the end. A kernel must have waited, before it ends, for every signal
  sent to it, and be done with every ref of a peer; else what is under way lands in memory that the
  next operation uses. A body whose peers READ its buffers ends with `meet`.
- **All blocks at once.** A block that waits for another needs it to be running: a grid has at most
  as many blocks as the GPU holds at once (132 on an H100 or H200, times the ranks of a virtual
  ring). Anything else that holds processors until another GPU answers may not start in between: a
  collective of NCCL on a second stream, running here and waiting there for the processors that
  these blocks hold, would never end. Beside such collectives leave NCCL's blocks free.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from hfjax.pallas_kernels import current_platform, plgpu
from hfjax.pallas_kernels.mosaic import Ref, RefSlice
from hfjax.utils.paths import Index

MAX_GPUS = 32  # of a mesh: so many the runtime's barrier before a launch takes


@dataclass(frozen=True)
class MeshRing:
    """The ring of `size` GPUs along `axis`, inside `jax.shard_map`."""

    axis: str
    size: int

    ranks = ()  # the leading axes of every buffer, and of the grid, that are ranks
    rank_names = ()

    def rank(self) -> jax.Array:
        # On a mesh of one device axis_index asks NVSHMEM, which need not be there.
        return jnp.int32(0) if self.size == 1 else lax.axis_index(self.axis)

    def local(self, ref: Ref) -> Ref:
        """Return this rank's part of a buffer."""
        return ref

    def peer(self, ref: Any, rank: Index) -> Any:
        """Return the same buffer on another rank, to store to or to load from."""
        device: Any = {self.axis: rank}
        return ref if self.size == 1 else plgpu.remote_ref(ref, device)

    def semaphores(self, count: int) -> Any:
        """Return `count` semaphores on each rank, which are zero."""
        return pl.get_global(plgpu.SemaphoreType.REGULAR((count,)))

    def signal(self, semaphores: Any, index: Index, rank: Index) -> None:
        """Add one to a semaphore of `rank`; what this warpgroup stored before is seen before."""
        device = None if self.size == 1 else {self.axis: rank}
        pl.semaphore_signal(semaphores.at[index], device_id=device)

    def wait(self, semaphores: Any, index: Index, value: Index) -> None:
        """Wait until a semaphore of this rank has reached `value`; it keeps its value."""
        pl.semaphore_wait(semaphores.at[index], value=value, decrement=False)


@dataclass(frozen=True)
class VirtualRing:
    """A ring of `size` ranks on one GPU: the grid's axis "rank", the first axis of every buffer."""

    size: int

    rank_names = ("rank",)

    @property
    def ranks(self) -> tuple:
        return (self.size,)

    def rank(self) -> jax.Array:
        return lax.axis_index("rank")

    def local(self, ref: Ref) -> RefSlice:
        return ref.at[self.rank()]

    def peer(self, ref: Ref, rank: Index) -> RefSlice:
        return ref.at[rank]

    def semaphores(self, count: int) -> tuple[Any, int]:
        return pl.get_global(plgpu.SemaphoreType.REGULAR((self.size * count,))), count

    def signal(self, semaphores: tuple[Any, int], index: Index, rank: Index) -> None:
        all_ranks, count = semaphores
        pl.semaphore_signal(all_ranks.at[rank * count + index])

    def wait(self, semaphores: tuple[Any, int], index: Index, value: Index) -> None:
        all_ranks, count = semaphores
        pl.semaphore_wait(all_ranks.at[self.rank() * count + index], value=value, decrement=False)


Ring = MeshRing | VirtualRing


def rank_ahead(ring: Ring, steps: Index) -> jax.Array:
    """Return the rank that is `steps` (at most the ring's size) places after this one."""
    return lax.rem(ring.rank() + steps, jnp.int32(ring.size))


def unreachable_reason(size: int, blocks: int) -> str | None:
    """Return why a ring of `size` ranks with so many blocks each cannot run here, or None."""
    processors = current_platform.processors()
    if processors and blocks > processors:
        return (
            f"{blocks} blocks on a GPU of {processors} processors: a block that waits for another "
            f"needs it to run at the same time. Take Tuning(blocks={processors})"
        )
    if size > 1 and jax.process_count() > 1:
        return (
            f"a ring of {size} GPUs in {jax.process_count()} processes: the kernels reach only "
            "GPUs of their own process. Start one process per host, or use `reference`"
        )
    mesh = jax.sharding.get_abstract_mesh().size
    if size > 1 and mesh > MAX_GPUS:
        return (
            f"a mesh of {mesh} GPUs: the runtime aligns the start of at most {MAX_GPUS}. "
            "Use `reference`"
        )
    return None
