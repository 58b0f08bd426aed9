"""How a step runs. Nothing here says where a tensor lives: that is the strategy's."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp


@dataclass(frozen=True)
class Precision:
    """Dtypes of a step: of the arithmetic, of what a gather sends, of what a reduction adds."""

    compute: Any = jnp.float32
    gather: Any = None  # None: as compute
    reduce: Any = jnp.float32

    def __post_init__(self):
        if self.gather is None:
            object.__setattr__(self, "gather", self.compute)
        for name in ("compute", "gather", "reduce"):
            dtype = jnp.dtype(getattr(self, name))
            if dtype.name not in ("float32", "float64", "bfloat16"):
                raise ValueError(
                    f"precision {name}={dtype.name}: float32, bfloat16 or float64. float16 needs "
                    "a loss scale, which is not there yet: use bfloat16."
                )
            object.__setattr__(self, name, dtype)


PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(compute=jnp.bfloat16),
    "fp64": Precision(compute=jnp.float64, reduce=jnp.float64),
}
REMAT = ("none", "dots", "full")
REDUCTIONS = ("flat", "hierarchical")


@dataclass(frozen=True)
class Execution:
    """How a training step runs; `train_step` takes these fields as keywords.

    >>> Execution(precision="bf16").precision.gather
    dtype(bfloat16)
    """

    accumulate: int = 1  # microbatches per step: gradients are reduced as the strategy says
    clip: float | None = None  # greatest global norm of the gradient
    precision: Precision | str = "fp32"
    remat: str | Callable = "none"  # what a layer recomputes: none, dots, full, or a policy of jax
    reshard_after_forward: bool = True  # drop gathered parameters after use and gather again
    reduction: str = "flat"  # hierarchical: scatter over fsdp, add over data, gather over fsdp
    unroll: int | bool | None = None  # layers per turn of the scan; None: as measured per backend
    skip_nonfinite: bool = True  # leave the state as it is when loss or gradient is not finite
    compiler_options: Any = field(default="default", hash=False)  # a preset's name, or a dict

    def __post_init__(self):
        if not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise ValueError(f"accumulate={self.accumulate!r}: a positive number of microbatches.")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip={self.clip!r}: a positive norm, or None for no clipping.")
        object.__setattr__(self, "precision", _precision(self.precision))
        if not callable(self.remat) and self.remat not in REMAT:
            raise ValueError(
                f"remat={self.remat!r}: one of {', '.join(REMAT)}, or a jax.checkpoint policy."
            )
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction={self.reduction!r}: one of {', '.join(REDUCTIONS)}.")


def _precision(given: Precision | str) -> Precision:
    if isinstance(given, Precision):
        return given
    if given not in PRECISIONS:
        raise ValueError(
            f"precision={given!r}: one of {', '.join(PRECISIONS)}, or hfjax.Precision(compute=…, "
            "gather=…, reduce=…)."
        )
    return PRECISIONS[given]
