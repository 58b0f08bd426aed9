"""The kernels of a step: passed to the modules and to the optimizer that use them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

import jax
from jax.sharding import Mesh

from hfjax.pallas_kernels.capabilities import Projection
from hfjax.parallel.engine import model_ops
from hfjax.parallel.extensions.kernel_dispatch import batch_stats
from hfjax.parallel.extensions.kernel_dispatch.choose_kernel import (
    IMPLS,
    KernelChoice,
    Refusal,
    Shape,
    choose_impl,
    format_shape,
)
from hfjax.parallel.mesh import (
    PIPE_AXIS,
    SEQUENCE_AXES,
    TENSOR_AXES,
    active_batch_axes,
    in_use,
    size_of,
)
from hfjax.parallel.settings import KERNELS, KernelChoices
from hfjax.parallel.spmd.partition_context import is_recording
from hfjax.utils.tables import align

OWN_LOGITS = (
    "the model hands over logits of its own, and the kernel makes x @ kernel.T: scale x before, "
    "and put caps and biases into a loss that is given logits"
)


@dataclass(frozen=True)
class Kernels:
    """Chooses the implementation of each capability on a mesh, and records the choices: print it.

    Known once the step is traced: capabilities that the step does not use are not in it.
    """

    requested: KernelChoices
    mesh: Mesh
    without_logits: bool = False  # the loss takes a Projection in place of logits
    choices: dict[str, list[KernelChoice]] = field(default_factory=dict, compare=False)  # by kernel

    @classmethod
    def of(cls, requested: KernelChoices, mesh: Mesh, loss: Callable) -> "Kernels":
        """Return the kernels of a step with this loss."""
        return cls(requested, mesh, getattr(loss, "takes_projection", False))

    def impl(
        self,
        kernel: str,
        refusal: Refusal = None,
        impossible: str | None = None,
        shape: Shape | None = None,
    ) -> str:
        """Return the implementation to use: pallas, xla or reference. See `choose_impl`."""
        device = self.mesh.devices.flat[0]
        return self._record(
            choose_impl(self.requested, kernel, device, refusal, impossible, shape), shape
        )

    def array_impl(self, kernel: str, refusal: Callable[[], str | None], shape: Shape) -> str:
        """Return the implementation for one of many arrays; xla for one that does not fit."""
        if self.requested.choice(kernel) == "pallas" and (why := refusal()):
            return self._record(KernelChoice(kernel, "xla", why), shape)
        return self.impl(kernel, refusal, shape=shape)

    @property
    def _sharded(self) -> Any:
        """The kernels on a mesh, imported where one may run: a step on CPUs loads none."""
        from hfjax.parallel.extensions.kernel_dispatch import tensor_sharded

        return tensor_sharded

    def choose_kernel(self, op: model_ops.CollectiveOp) -> model_ops.CollectiveKernel | None:
        """Return the kernel for a `CollectiveOp` (engine/comm_plan.py) in place of XLA, or None."""
        refusal = lambda: self._sharded.sending_refuses(op)
        impl = self.array_impl(op.kind, refusal, {"N": op.x.size})
        return self._sharded.CastingKernel(impl) if impl in IMPLS else None

    def impls(self, kernel: str) -> set[str]:
        """Return the implementations chosen for a kernel, over all operands."""
        return {choice.impl for choice in self.choices.get(kernel, ())}

    def _record(self, choice: KernelChoice, shape: Shape | None) -> str:
        """Record a choice with the shape that it is for; return its implementation."""
        choices = self.choices.setdefault(choice.kernel, [])
        choice = replace(choice, operands=format_shape(shape))
        if choice not in choices:
            choices.append(choice)
        return choice.impl

    def matmul(self, place: Any, between: tuple, multiply: Callable) -> Callable:
        """Return the matmul of a linear map between two named dimensions.

        Where a tensor axis shards the sequence, and one of the two, it may go around the ring.
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
        custom_logits: Callable | None,
        make_logits: Callable,
    ) -> Any:
        """Return a projection of which logits are never computed, or the logits: `make_logits()`.

        Args:
            x_BSD: The head's input.
            kernel_VD: The head's matrix.
            vocab: The size of the vocabulary, without padding.
            custom_logits: Computes logits that are more than x @ kernel.T, or None.
            make_logits: Computes the logits.
        """
        tokens = jax.ShapeDtypeStruct(
            (self._local_count(x_BSD[..., 0].size), x_BSD.shape[-1]), x_BSD.dtype
        )
        labels = jax.ShapeDtypeStruct(tokens.shape[:1], "int32")
        refusal = lambda: self._sharded.cross_entropy.refuses(tokens, kernel_VD, labels)
        shape = {
            "N": tokens.shape[0],
            "V": self._vocab_shard(kernel_VD.shape[0]),
            "D": tokens.shape[1],
        }
        impossible = self._projection_refusal(kernel_VD) or (OWN_LOGITS if custom_logits else None)
        impl = self.impl("cross_entropy", refusal, impossible, shape)
        if impl not in IMPLS:
            return make_logits()
        return Projection(x_BSD, kernel_VD, self._sharded.sharded_losses(self.mesh, impl, vocab))

    def attend(self, plain: Callable, *operands: jax.Array) -> jax.Array:
        """Return attention of q_BSHD, k_BSGD, v_BSGD, and documents_BS if there are any."""
        operands = tuple(x for x in operands if x is not None)
        impl = self.attention_impl(*operands)
        if impl not in IMPLS:
            return plain(*operands)
        window = getattr(plain, "window", None)
        return self._sharded.sharded_attention(self.mesh, impl, len(operands) == 4, window)(
            *operands
        )

    def attention_impl(self, *operands: jax.Array) -> str:
        """Return the implementation of attention to use for these operands."""
        q, k, v, *_ = operands
        impossible = self._uneven_refusal("heads of keys", k.shape[2])
        shape = {"S": q.shape[1], "D": q.shape[3]}
        refusal = lambda: self._sharded.flash_block.refuses(q, k, v)
        return self.impl("flash_block", refusal, impossible, shape)

    def _multiply(
        self, kind: str, plain: Callable, x_BSI: jax.Array, kernel_IO: jax.Array
    ) -> jax.Array:
        impossible = self._ring_refusal(x_BSI)
        refusal = lambda: self._sharded.ring_refuses(self.mesh, kind, x_BSI, kernel_IO)
        num_tokens, (inputs, outputs) = self._local_count(x_BSI[..., 0].size), kernel_IO.shape
        impl = self.impl(kind, refusal, impossible, {"M": num_tokens, "K": inputs, "N": outputs})
        if impl not in IMPLS:
            return plain(x_BSI, kernel_IO)
        return self._sharded.ring_matmul(self.mesh, impl, kind)(x_BSI, kernel_IO)

    # -- what only XLA can do ---------------------------------------------------------------------

    def _local_count(self, count: int) -> int:
        """Return how many positions are local; a model that is traced sees the global count."""
        return count // size_of(self._data_axes, self.mesh) if is_recording() else count

    @property
    def _data_axes(self) -> tuple[str, ...]:
        """The axes that shard examples and positions, all of which a model's trace sees."""
        return (*active_batch_axes(self.mesh), *in_use(self.mesh, SEQUENCE_AXES))

    def _vocab_shard(self, count: int) -> int:
        return -(-count // size_of(TENSOR_AXES, self.mesh))

    def _uneven_refusal(self, label: str, count: int) -> str | None:
        shards = size_of(TENSOR_AXES, self.mesh)
        if count % shards == 0:
            return None
        return f"{count} {label} do not divide by a tensor axis of {shards}"

    def _projection_refusal(self, kernel_VD: jax.Array) -> str | None:
        if self.without_logits:
            return self._uneven_refusal("rows of the vocabulary", kernel_VD.shape[0])
        return (
            "the loss takes logits; mark one that takes a projection with "
            "hfjax.pallas_kernels.capabilities.takes_projection"
        )

    def _ring_refusal(self, x_BSI: jax.Array) -> str | None:
        if self.mesh.shape[PIPE_AXIS] > 1:
            return "no ring in a pipeline: not all stages would take part in it"
        seq_shards = size_of(SEQUENCE_AXES, self.mesh) if is_recording() else 1
        return self._uneven_refusal("positions", x_BSI.shape[1] // seq_shards)

    def __str__(self) -> str:
        lines = [line for kernel in KERNELS for line in self._lines(kernel)]
        return "\n".join(align(lines))

    def _lines(self, kernel: str) -> list[tuple[str, ...]]:
        """Return a line per implementation and reason: the kernel, both, and the operands."""
        operands: dict[tuple[str, str], list[str]] = {}
        for choice in self.choices.get(kernel, ()):
            operands.setdefault((choice.impl, choice.why), []).append(choice.operands)
        if not operands:
            return [(kernel, "-", "nothing in this step has use for it", "")]
        return [(kernel, *key, "; ".join(filter(None, shapes))) for key, shapes in operands.items()]


@dataclass(frozen=True, eq=False)
class KernelOps(model_ops.CommonOps):
    """What all model ops that use kernels have in common."""

    kernels: Kernels
    channel_stats, sum_over_batch = batch_stats.batch_stats, model_ops.sum_over_data

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.kernels.mesh

    def matmul(self, place: Any, between: tuple, multiply: Callable) -> Callable:
        """Return the matmul of a linear map; it may go around the ring of the tensor axis."""
        return self.kernels.matmul(place, between, multiply)

    def outputs(
        self, x_BSD: jax.Array, kernel_VD: jax.Array, vocab: int, logits: Callable | None = None
    ) -> Any:
        """Return the loss's input: logits, or a projection of which they are never computed."""
        make_logits = partial(model_ops.make_logits, self, x_BSD, kernel_VD, vocab, logits)
        return self.kernels.outputs(x_BSD, kernel_VD, vocab, logits, make_logits)

    def choose_kernel(self, op: model_ops.CollectiveOp) -> model_ops.CollectiveKernel | None:
        """Return the kernel for a collective in place of XLA, or None."""
        return self.kernels.choose_kernel(op)


@final
@dataclass(frozen=True, eq=False)
class WholeSequenceOps(KernelOps):
    """The `ModelOps` of devices that have full sequences: kernels are all that they add."""

    def attention(self, attend: Callable) -> Callable:
        """Return the attention that a layer runs; a user's own is unchanged."""
        replaceable = getattr(attend, "is_causal_attention", False)
        if not replaceable:
            return attend
        by_position = partial(model_ops.bind_positional, attend)
        return lambda *args, **kwargs: self.kernels.attend(attend, *by_position(args, kwargs)[0])

    run_length, local_sequence_batch, lookup = (
        model_ops.full_length,
        model_ops.unsliced_batch,
        model_ops.lookup_table,
    )
    inner_groups, named_groups = model_ops.no_inner_groups, model_ops.no_named_groups
    check_positions, context_choice = model_ops.skip_position_check, model_ops.no_choice
    reads_model, read_model = model_ops.reads_nothing, model_ops.read_nothing
