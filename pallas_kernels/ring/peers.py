"""The ranks of a ring and their communication, on several GPUs or simulated on one.

A kernel's body is written once, against a ring. `MeshRing` is a ring of GPUs along one named axis
of any mesh (the other axes' coordinates are fixed). `VirtualRing` simulates it on ONE GPU: the
ranks are a grid axis, every buffer has a leading axis of ranks and "the same buffer on rank r" is
its entry r. So one GPU runs the same copies, signals and order of events.

The contract of a body:

- **Entry.** Semaphores are zero and every rank's buffers exist before any rank's kernel runs. jax
  fills the semaphores with zeros in the program, and before each launch of a kernel that names a
  peer the runtime runs a barrier of all GPUs of the mesh on the stream (NVSHMEM's, or XLA's
  `LaunchMultiGpuBarrier`, in jaxlib of 0.10.2 as of 0.12). So we need no entry barrier of our own:
  a fast rank can neither signal a semaphore that is about to be zeroed nor write to a buffer that
  an earlier operation still reads.
- **Exit.** There is no exit barrier. Before it ends, a kernel must have waited for every signal
  sent to it, and be done with every ref of a peer; otherwise data in flight lands in memory that
  the next operation uses. A body whose peers READ its buffers must end with a barrier.
- **Co-residency.** A block that waits for another needs it to be running: a grid has at most as
  many blocks as the GPU runs concurrently (132 on an H100 or H200, times the ranks of a virtual
  ring). No other kernel that occupies multiprocessors until another GPU answers may start in
  between: an NCCL collective on a second stream, running here and waiting there for the
  multiprocessors that these blocks occupy, would deadlock. Beside such collectives leave NCCL's
  blocks free.
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

MAX_GPUS = 32  # of a mesh: the limit of the runtime's barrier before a launch


@dataclass(frozen=True)
class MeshRing:
    """The ring of `size` GPUs along `axis`, inside `jax.shard_map`."""

    axis: str
    size: int

    ranks = ()  # the leading rank axes of every buffer and of the grid
    rank_names = ()

    def rank(self) -> jax.Array:
        # On a mesh of one device axis_index needs NVSHMEM, which may be missing.
        return jnp.int32(0) if self.size == 1 else lax.axis_index(self.axis)

    def local(self, ref: Ref) -> Ref:
        """Return this rank's buffer."""
        return ref

    def peer(self, ref: Any, rank: Index) -> Any:
        """Return the same buffer on another rank, for loads and stores."""
        device: Any = {self.axis: rank}
        return ref if self.size == 1 else plgpu.remote_ref(ref, device)

    def semaphores(self, count: int) -> Any:
        """Return `count` semaphores on each rank, initially zero."""
        return pl.get_global(plgpu.SemaphoreType.REGULAR((count,)))

    def signal(self, semaphores: Any, index: Index, rank: Index) -> None:
        """Add one to a semaphore of `rank`; earlier stores of this warpgroup are visible before."""
        device = None if self.size == 1 else {self.axis: rank}
        pl.semaphore_signal(semaphores.at[index], device_id=device)

    def wait(self, semaphores: Any, index: Index, value: Index) -> None:
        """Wait until a semaphore of this rank reaches `value`, without decrementing it."""
        pl.semaphore_wait(semaphores.at[index], value=value, decrement=False)


@dataclass(frozen=True)
class VirtualRing:
    """A ring of `size` ranks on one GPU: the grid axis "rank", the first axis of every buffer."""

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
    """Return the rank `steps` (at most the ring's size) places after this one."""
    return lax.rem(ring.rank() + steps, jnp.int32(ring.size))


def unreachable_reason(size: int, blocks: int) -> str | None:
    """Return why a ring of `size` ranks with `blocks` blocks each cannot run here, or None."""
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
