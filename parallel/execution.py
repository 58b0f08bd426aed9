"""How a step runs. Where tensors are placed is up to the strategy."""

import math
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from hfjax.parallel.compiler_options import check_options
from hfjax.parallel.offload.activations import Offload
from hfjax.parallel.precision.dtypes import Precision, precision_of
from hfjax.parallel.remat import Remat
from hfjax.parallel.schedules.table import Table, Versions
from hfjax.parallel.settings import ContextParallel, KernelChoices, check_dispatch, parse_context
from hfjax.utils.keywords import is_int, is_real, strict_fields

REDUCTIONS = ("flat", "hierarchical")
NONFINITE = ("stop", "skip", "apply")
BATCH_VIEWS = ("global", "strict", "local")
COUNTS = {
    "gradient_accumulation_steps": "microbatches",
    "tensor_overlap_chunks": "chunks",
    "max_skipped": "steps in a row",
}


@runtime_checkable
class PipelineSchedule(Protocol):
    """What a step needs of its `hfjax.Schedule` (schedules/named.py)."""

    @property
    def name(self) -> str: ...
    @property
    def microbatches(self) -> int: ...
    @property
    def balance(self) -> str | tuple[int, ...]: ...
    @property
    def branches(self) -> bool | str: ...
    @property
    def asynchronous(self) -> bool: ...

    def table(self, stages: int) -> Table:
        """Return which stage does what in which tick."""
        ...

    def versions(self, stages: int) -> Versions | None:
        """Return which version of the weights each task uses; None: only one."""
        ...


def guard(on_nonfinite: str, finite: Any, new: Any, old: Any) -> Any:
    """Return the new arrays; if a step is not finite the old ones, unless it is applied."""
    if on_nonfinite == "apply":
        return new
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old)


@strict_fields
@dataclass(frozen=True)
class Execution:
    """How a training step runs; `train_step` takes these fields as keywords, also as strings.

    Attributes:
        gradient_accumulation_steps: Microbatches per step; gradients are reduced as the strategy
            says.
        schedule: A `hfjax.Schedule` of a pipeline; it splits each microbatch again.
        max_grad_norm: Greatest global norm of the gradient. None, or infinity: it is not clipped.
        precision: Dtype of arithmetic: a name (auto, stored, fp32, bf16, fp16, fp64), a
            `hfjax.Precision`, or by path: {"*": "bf16", "*norm*": "fp32"}. auto, the default of
            functions that make steps: bf16 on NVIDIA GPUs that have it (from A100 on) if parameters
            are float32, otherwise stored, the dtypes of the parameters. Gradients are reduced in
            float32.
        remat: What layers recompute: none, full, dots, names:…, every:k, group:k, except_last;
            a `hfjax.Remat`, or a policy of jax.
        offload: Which of their activations go to host memory: a fraction, dots, names:…, or a
            `hfjax.Offload`. None: none.
        reshard_after_forward: Whether to drop gathered parameters after use and gather them again.
        gradient_reduction: flat, or hierarchical: axis by axis, within a node first.
        optimizer_in_backward: Whether to update each layer as soon as its gradient is ready, so
            that about one layer's gradients exist at a time. docs/combinations.md says what it
            excludes.
        context: How devices that share sequences work together: auto, ring, allgather, ulysses, or
            a `hfjax.ContextParallel`.
        dispatch: How tokens get to experts on other devices: auto (what sends the fewest bytes),
            all_to_all, gather.
        kernels: auto, pallas, xla, reference; or {kernel: one of these}.
        unroll: Layers per loop iteration; True: no loop. None: as measured per backend.
        tensor_overlap_chunks: Chunks of a device's batch that go through each layer in turn: while
            the collectives over tensor of one are in flight, matmuls of another run.
        batch_view: Which examples model and loss see: global (the whole batch, as on one device),
            strict (the same, and operations without a rule are refused), local (those of each
            device).
        on_nonfinite: If a loss or gradient is not finite: stop (leave the state as it was, raise
            three calls later), skip (leave it, warn, go on), apply (update, raise).
        max_skipped: Under skip: after how many such steps in a row to raise.
        compiler_options: A preset's name, or a dict; auto: on a GPU the preset that was measured
            best.

    Example:
        >>> import hfjax
        >>> run = hfjax.Execution(precision="bf16", remat="every:2", offload=0.3)
        >>> run.precision.compute, run.remat.every, run.offload.ratio
        (dtype(bfloat16), 2, 0.3)
    """

    gradient_accumulation_steps: int = 1
    schedule: PipelineSchedule | None = None
    max_grad_norm: float | None = None
    precision: Precision = Precision()
    remat: Remat = Remat("none")
    offload: Offload | None = None
    reshard_after_forward: bool = True
    # Hierarchical: unsharded gradients are reduce-scattered over fsdp, all-reduced over data,
    # all-gathered over fsdp; sharded ones are reduce-scattered over fsdp, then over data.
    gradient_reduction: str = "flat"
    optimizer_in_backward: bool = False
    context: ContextParallel = ContextParallel()
    dispatch: str = "auto"
    kernels: KernelChoices = KernelChoices()
    unroll: int | bool | None = None
    tensor_overlap_chunks: int = 1
    batch_view: str = "global"
    on_nonfinite: str = "stop"
    max_skipped: int = 10
    compiler_options: Any = field(default="auto", hash=False)

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.schedule is not None and not isinstance(self.schedule, PipelineSchedule):
            raise ValueError(
                f"schedule={self.schedule!r}: a hfjax.Schedule is expected, for instance "
                'hfjax.Schedule("1f1b", microbatches=8).'
            )
        object.__setattr__(self, "precision", precision_of(self.precision))
        remat = Remat.of(self.remat)
        object.__setattr__(self, "remat", remat)
        if remat.what == "except_last" and self.schedule is None:
            raise ValueError(
                'remat="except_last" speaks of the microbatches of a pipeline, and there is no '
                'schedule. Use remat="full", or schedule=hfjax.Schedule("gpipe", microbatches=8).'
            )
        if self.offload is not None:
            object.__setattr__(self, "offload", Offload.of(self.offload))
        object.__setattr__(self, "context", parse_context(self.context))
        object.__setattr__(self, "kernels", KernelChoices.of(self.kernels))
        check_dispatch(self.dispatch)
        check_options(self.compiler_options)
        if self.gradient_reduction not in REDUCTIONS:
            raise ValueError(
                f"gradient_reduction={self.gradient_reduction!r}: one of {', '.join(REDUCTIONS)}."
            )
        if self.batch_view not in BATCH_VIEWS:
            raise ValueError(f"batch_view={self.batch_view!r}: one of {', '.join(BATCH_VIEWS)}.")
        if self.on_nonfinite not in NONFINITE:
            raise ValueError(f"on_nonfinite={self.on_nonfinite!r}: one of {', '.join(NONFINITE)}.")
        if self.on_nonfinite == "apply" and self.precision.scale:
            raise ValueError(
                'on_nonfinite="apply" with a loss scale: it lives by skipping steps that overflow. '
                'Use on_nonfinite="stop" or "skip", which judge steps whose loss is not finite.'
            )

    def _check_numbers(self) -> None:
        for name, unit in COUNTS.items():
            if not is_int(value := getattr(self, name)):
                raise ValueError(f"{name}={value!r}: a positive number of {unit}.")
        if (clip := self.max_grad_norm) is not None:
            if not is_real(clip, 2**-126, math.inf):  # from the least normal float32
                raise ValueError(
                    f"max_grad_norm={clip!r}: a positive norm, or None for no clipping."
                )
            object.__setattr__(self, "max_grad_norm", None if clip == math.inf else float(clip))
        unroll = self.unroll
        if not (unroll is None or isinstance(unroll, bool) or is_int(unroll)):
            raise ValueError(
                f"unroll={unroll!r}: a positive number of layers, true (all of them), or None."
            )
        for name in ("optimizer_in_backward", "reshard_after_forward"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name}={value!r}: true or false.")
