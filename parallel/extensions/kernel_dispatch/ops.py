"""The kernels of a step: handed to the modules and to the optimizer that have use for them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

import jax
from jax.sharding import Mesh

from hfjax.pallas_kernels.attention import block as flash_block
from hfjax.pallas_kernels.capabilities import Projection
from hfjax.pallas_kernels.cross_entropy import loss as cross_entropy
from hfjax.parallel.engine import model_ops
from hfjax.parallel.extensions.kernel_dispatch import batch_stats, tensor_sharded
from hfjax.parallel.extensions.kernel_dispatch.choose_kernel import (
    KernelChoice,
    Shape,
    choose,
    show,
)
from hfjax.parallel.mesh import (
    PIPE_AXIS,
    SEQUENCE_AXES,
    TENSOR_AXES,
    in_use,
    row_axes,
    size_of,
)
from hfjax.parallel.settings import KERNELS, Wanted
from hfjax.parallel.spmd.partition_context import is_recording
from hfjax.utils.tables import aligned

OWN_LOGITS = (
    "the model hands over logits of its own, and the kernel makes x @ kernel.T: scale x before, "
    "and put caps and biases into a loss that is given logits"
)


@dataclass(frozen=True)
class Kernels:
    """Chooses the form of each capability on a mesh, and remembers what was chosen: print it.

    Known once the step is traced: what nothing in the step asked for is not in it.
    """

    wanted: Wanted
    mesh: Mesh
    without_logits: bool = False  # the loss takes a Projection in place of logits
    choices: dict[str, list[KernelChoice]] = field(default_factory=dict, compare=False)  # by kernel

    @classmethod
    def of(cls, wanted: Wanted, mesh: Mesh, loss: Callable) -> "Kernels":
        """Return the kernels of a step with this loss."""
        return cls(wanted, mesh, getattr(loss, "takes_projection", False))

    def form(
        self,
        kernel: str,
        refusal: str | None = None,
        impossible: str | None = None,
        shape: Shape | None = None,
    ) -> str:
        """Return the form to take: pallas, xla or reference. See `Wanted.choose`."""
        device = self.mesh.devices.flat[0]
        return self._keep(choose(self.wanted, kernel, device, refusal, impossible, shape), shape)

    def form_of_one(self, kernel: str, refusal: str | None, shape: Shape) -> str:
        """Return the form to take for one of many arrays; one that does not fit goes by XLA."""
        if refusal and self.wanted.word(kernel) == "pallas":
            return self._keep(KernelChoice(kernel, "xla", refusal), shape)
        return self.form(kernel, refusal, shape=shape)

    def sender(self, move: model_ops.Move) -> tensor_sharded.CastingSender | None:
        """Return what moves an array (a `Move` of engine/comm_plan.py) in place of XLA, or None."""
        refusal = tensor_sharded.sending_refuses(move)
        form = self.form_of_one(move.kind, refusal, {"N": move.x.size})
        return tensor_sharded.CastingSender(form) if form in tensor_sharded.FORMS else None

    def forms(self, kernel: str) -> set[str]:
        """Return the forms that were taken of a kernel, over all operands."""
        return {choice.form for choice in self.choices.get(kernel, ())}

    def _keep(self, choice: KernelChoice, shape: Shape | None) -> str:
        """Return the form of a choice, which is remembered with what it was made for."""
        known = self.choices.setdefault(choice.kernel, [])
        choice = replace(choice, of=show(shape))
        if choice not in known:
            known.append(choice)
        return choice.form

    def matmul(self, place: Any, between: tuple, multiply: Callable) -> Callable:
        """Return the product of a linear map between two named dimensions.

        Where a tensor axis splits the sequence, and one of the two, it may go around the ring.
        """
        kind = ("all_gather_matmul", "matmul_reduce_scatter")[between[0] != "embed"]
        if not place.axes("seq") or not any(map(place.axes, between)):
            return multiply
        return partial(self._multiply, kind, multiply)

    def outputs(
        self,
        x_BSD: jax.Array,
        kernel_VD: jax.Array,
        vocab: int,
        own: Callable | None,
        made: Callable,
    ) -> Any:
        """Return a projection that logits are never made of, or `made()`: logits.

        Args:
            x_BSD: What the head multiplies.
            kernel_VD: Its matrix.
            vocab: The rows of it that count.
            own: What makes logits that are more than x @ kernel.T, or None.
            made: What makes logits.
        """
        rows = jax.ShapeDtypeStruct((self._here(x_BSD[..., 0].size), x_BSD.shape[-1]), x_BSD.dtype)
        labels = jax.ShapeDtypeStruct(rows.shape[:1], "int32")
        refusal = cross_entropy.refuses(rows, kernel_VD, labels)
        shape = {"N": rows.shape[0], "V": self._share(kernel_VD.shape[0]), "D": rows.shape[1]}
        impossible = self._no_projection(kernel_VD) or (OWN_LOGITS if own else None)
        form = self.form("cross_entropy", refusal, impossible, shape)
        if form not in tensor_sharded.FORMS:
            return made()
        return Projection(x_BSD, kernel_VD, tensor_sharded.losses(self.mesh, form, vocab))

    def attend(self, plain: Callable, *operands: jax.Array) -> jax.Array:
        """Return attention of q_BSHD, k_BSGD, v_BSGD, and documents_BS if there are any."""
        operands = tuple(x for x in operands if x is not None)
        form = self.of_attention(*operands)
        if form not in tensor_sharded.FORMS:
            return plain(*operands)
        window = getattr(plain, "window", None)
        return tensor_sharded.attention(self.mesh, form, len(operands) == 4, window)(*operands)

    def of_attention(self, *operands: jax.Array) -> str:
        """Return the form of attention to take for these operands."""
        q, k, v, *_ = operands
        impossible = self._uneven("heads of keys", k.shape[2])
        shape = {"S": q.shape[1], "D": q.shape[3]}
        return self.form("flash_block", flash_block.refuses(q, k, v), impossible, shape)

    def _multiply(
        self, kind: str, plain: Callable, x_BSI: jax.Array, kernel_IO: jax.Array
    ) -> jax.Array:
        impossible = self._no_ring(x_BSI)
        refusal = impossible or tensor_sharded.ring_refuses(self.mesh, kind, x_BSI, kernel_IO)
        rows, (inputs, outputs) = self._here(x_BSI[..., 0].size), kernel_IO.shape
        form = self.form(kind, refusal, impossible, {"M": rows, "K": inputs, "N": outputs})
        if form not in tensor_sharded.FORMS:
            return plain(x_BSI, kernel_IO)
        return tensor_sharded.ring(self.mesh, form, kind)(x_BSI, kernel_IO)

    # -- what only XLA's form can do --------------------------------------------------------------

    def _here(self, count: int) -> int:
        """Return how many positions of rows are here; a model that is traced sees all."""
        return count // size_of(self._parts, self.mesh) if is_recording() else count

    @property
    def _parts(self) -> tuple[str, ...]:
        """The axes whose devices have other rows and positions than those of a model's trace."""
        return (*row_axes(self.mesh), *in_use(self.mesh, SEQUENCE_AXES))

    def _share(self, count: int) -> int:
        return -(-count // size_of(TENSOR_AXES, self.mesh))

    def _uneven(self, what: str, count: int) -> str | None:
        shards = size_of(TENSOR_AXES, self.mesh)
        if count % shards == 0:
            return None
        return f"{count} {what} do not divide by a tensor axis of {shards}"

    def _no_projection(self, kernel_VD: jax.Array) -> str | None:
        if self.without_logits:
            return self._uneven("rows of the vocabulary", kernel_VD.shape[0])
        return (
            "the loss takes logits; mark one that takes a projection with "
            "hfjax.pallas_kernels.capabilities.takes_projection"
        )

    def _no_ring(self, x_BSI: jax.Array) -> str | None:
        if self.mesh.shape[PIPE_AXIS] > 1:
            return "no ring in a pipeline: not all stages would take part in it"
        shared = size_of(SEQUENCE_AXES, self.mesh) if is_recording() else 1
        return self._uneven("positions", x_BSI.shape[1] // shared)

    def __str__(self) -> str:
        lines = [line for kernel in KERNELS for line in self._lines(kernel)]
        return "\n".join(aligned(lines))

    def _lines(self, kernel: str) -> list[tuple[str, ...]]:
        """Return a line for each form and reason: the kernel, both, and the operands that go so."""
        together: dict[tuple[str, str], list[str]] = {}
        for choice in self.choices.get(kernel, ()):
            together.setdefault((choice.form, choice.why), []).append(choice.of)
        if not together:
            return [(kernel, "-", "nothing in this step has use for it", "")]
        return [(kernel, *key, "; ".join(filter(None, of))) for key, of in together.items()]


@dataclass(frozen=True)
class TakesKernels(model_ops.InStep):
    """What those have in common that take kernels where they are handed to them."""

    kernels: Kernels
    moments, sum_over_batch = batch_stats.of_rows, model_ops.sum_over_samples

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.kernels.mesh

    def matmul(self, place: Any, between: tuple, multiply: Callable) -> Callable:
        """Return the product of a linear map; it may go around the ring of the tensor axis."""
        return self.kernels.matmul(place, between, multiply)

    def outputs(
        self, x_BSD: jax.Array, kernel_VD: jax.Array, vocab: int, logits: Callable | None = None
    ) -> Any:
        """Return what the loss is given: logits, or a projection that they are never made of."""
        made = partial(model_ops.made_logits, self, x_BSD, kernel_VD, vocab, logits)
        return self.kernels.outputs(x_BSD, kernel_VD, vocab, logits, made)

    def sender(self, move: model_ops.Move) -> model_ops.Sender | None:
        """Return what moves an array in place of XLA, or None."""
        return self.kernels.sender(move)


@final
@dataclass(frozen=True)
class WithKernels(TakesKernels):
    """The `Local` of devices that have whole rows: their kernels are all that is asked for."""

    def attention(self, attend: Callable) -> Callable:
        """Return the attention that a layer runs; one of the user's own stays as it is."""
        replaceable = getattr(attend, "is_causal_attention", False)
        if not replaceable:
            return attend
        by_position = partial(model_ops.by_position, attend)
        return lambda *given, **named: self.kernels.attend(attend, *by_position(given, named)[0])

    run_length, dealt, lookup = model_ops.all_here, model_ops.whole_batch, model_ops.rows_of_table
    inner_sides, named_sides = model_ops.no_sides, model_ops.no_names
    check_positions = model_ops.none_joined
