"""How a step runs. Nothing here says where a tensor lives: that is the strategy's."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp

from hfjax.pallas_kernels.choice import Wanted
from hfjax.parallel.activation_offload import Offload
from hfjax.parallel.compiler import check_options
from hfjax.parallel.context.choice import Context
from hfjax.parallel.remat import Remat
from hfjax.parallel.schedules.named import Schedule


class Dtypes(NamedTuple):
    """The dtypes of one parameter in a step: of arithmetic, of its gather, of its reduction."""

    compute: Any
    gather: Any
    reduce: Any


@dataclass(frozen=True)
class Precision:
    """Dtypes of a step: float32, bfloat16 or float64 each, by name or as a dtype.

    Attributes:
        compute: Of the arithmetic. None: as each parameter is stored.
        gather: Of what a gather of parameters sends. None: as `compute`.
        reduce: Of what a reduction of gradients sends and adds. None: float32, or wider where a
            parameter is stored wider.

    Example:
        >>> import hfjax
        >>> hfjax.Precision(compute="bfloat16", reduce="float32").reduce
        dtype('float32')
    """

    compute: Any = None
    gather: Any = None
    reduce: Any = None

    def __post_init__(self):
        for name in ("compute", "gather", "reduce"):
            given = getattr(self, name)
            dtype = None if given is None else jnp.dtype(given)
            if dtype is not None and dtype.name not in ("float32", "float64", "bfloat16"):
                raise ValueError(
                    f"precision {name}={dtype.name}: float32, bfloat16 or float64. float16 needs "
                    "a loss scale, which is not there yet: use bfloat16."
                )
            object.__setattr__(self, name, dtype)

    def of(self, stored: Any) -> Dtypes:
        """Return the dtypes of arithmetic, gathers and reductions for a stored parameter.

        Args:
            stored: The dtype in which the parameter is stored.

        Example:
            >>> import hfjax, jax.numpy as jnp
            >>> hfjax.Precision("bfloat16").of(jnp.dtype("float32")).gather
            dtype(bfloat16)
        """
        compute = self.compute or stored
        if compute == jnp.float16:
            raise ValueError(
                "a float16 parameter needs a loss scale, which is not there yet: store it in "
                'bfloat16 or float32, or compute otherwise (precision="bf16").'
            )
        reduce = self.reduce or jnp.promote_types(stored, "float32")
        return Dtypes(compute, self.gather or compute, reduce)


PRECISIONS = {
    "stored": Precision(),
    "fp32": Precision(compute=jnp.float32),
    "bf16": Precision(compute=jnp.bfloat16),
    "fp64": Precision(compute=jnp.float64),
}
REDUCTIONS = ("flat", "hierarchical")
NONFINITE = ("stop", "skip", "apply")


@dataclass(frozen=True)
class Execution:
    """How a training step runs; `train_step` takes these fields as keywords, also as words.

    Example:
        >>> import hfjax
        >>> run = hfjax.Execution(accumulate=4, precision="bf16", remat="every:2", offload=0.3)
        >>> run.precision.compute, run.remat.every, run.offload.ratio
        (dtype(bfloat16), 2, 0.3)
    """

    accumulate: int = 1  # microbatches per step: gradients are reduced as the strategy says
    schedule: Schedule | None = None  # of a pipeline; it splits each microbatch again
    clip: float | None = None  # greatest global norm of the gradient
    precision: Precision = Precision()  # or a word: stored, fp32, bf16, fp64
    remat: Remat = Remat("none")  # what layers compute again; or a word, or a policy of jax
    offload: Offload | None = None  # what of that waits on the host; or a fraction, or words
    reshard_after_forward: bool = True  # drop gathered parameters after use and gather again
    # hierarchical: axis by axis, in a node first. What stays whole is scattered over fsdp, added
    # over data, gathered over fsdp; what is scattered is so over fsdp, then over data.
    reduction: str = "flat"
    # Update each layer as soon as its gradient is there, so about one layer's gradients exist at a
    # time. What it excludes: docs/combinations.md.
    optimizer_in_backward: bool = False
    context: Context = Context()  # how devices that share rows work together; or a form's name
    kernels: Wanted = Wanted()  # auto, pallas, xla, reference; or a word for each kernel
    unroll: int | bool | None = None  # layers per turn of the scan; None: as measured per backend
    # A step whose loss or gradient is not finite: stop (leave the state as it was, raise three
    # calls later), skip (leave it, warn, go on; raise after `patience` in a row), apply (update,
    # raise).
    nonfinite: str = "stop"
    patience: int = 10
    # A preset's name, or a dict; auto: on a GPU the preset that was measured best.
    compiler_options: Any = field(default="auto", hash=False)

    def __post_init__(self):
        if not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise ValueError(f"accumulate={self.accumulate!r}: a positive number of microbatches.")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip={self.clip!r}: a positive norm, or None for no clipping.")
        if self.schedule is not None and not isinstance(self.schedule, Schedule):
            raise ValueError(
                f"schedule={self.schedule!r}: a hfjax.Schedule is expected, for instance "
                'hfjax.Schedule("1f1b", microbatches=8).'
            )
        object.__setattr__(self, "precision", _precision(self.precision))
        remat = Remat.of(self.remat)
        object.__setattr__(self, "remat", remat)
        if remat.what == "except_last" and self.schedule is None:
            raise ValueError(
                'remat="except_last" speaks of the microbatches of a pipeline, and there is no '
                'schedule. Use remat="full", or schedule=hfjax.Schedule("gpipe", microbatches=8).'
            )
        if self.offload is not None:
            object.__setattr__(self, "offload", Offload.of(self.offload))
        object.__setattr__(self, "context", Context.of(self.context))
        object.__setattr__(self, "kernels", Wanted.of(self.kernels))
        check_options(self.compiler_options)
        if not isinstance(self.optimizer_in_backward, bool):
            raise ValueError(
                f"optimizer_in_backward={self.optimizer_in_backward!r}: true or false."
            )
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction={self.reduction!r}: one of {', '.join(REDUCTIONS)}.")
        if self.nonfinite not in NONFINITE:
            raise ValueError(f"nonfinite={self.nonfinite!r}: one of {', '.join(NONFINITE)}.")
        if not isinstance(self.patience, int) or self.patience < 1:
            raise ValueError(f"patience={self.patience!r}: a positive number of steps in a row.")


def _precision(given: Precision | str) -> Precision:
    if isinstance(given, Precision):
        return given
    if given not in PRECISIONS:
        raise ValueError(
            f"precision={given!r}: one of {', '.join(PRECISIONS)}, or hfjax.Precision(compute=…, "
            "gather=…, reduce=…)."
        )
    return PRECISIONS[given]
