"""The dtypes in which a step computes, gathers parameters, reduces gradients; the loss scale."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from hfjax.utils.keywords import is_int, is_real, parse_dtype, strict_fields

AUTO = "auto"  # a precision that depends on the devices: auto.py
WIDE = ("float32", "float64", "bfloat16")


class Dtypes(NamedTuple):
    """The dtypes of one parameter in a step: for arithmetic, all-gather and gradient reduction."""

    compute: Any
    gather: Any
    reduce: Any


@strict_fields
@dataclass(frozen=True)
class LossScale:
    """The factor on the loss of a float16 step, so that small gradients do not become zero.

    A step whose gradient overflows is skipped. The rules are DeepSpeed's (docs/precision.md).

    Attributes:
        initial: The first scale.
        window: Steps without an overflow after which the scale doubles. None: it is fixed.
        hysteresis: Overflows until the scale halves; with 2 the first one only costs its step.
        minimum: The smallest scale; an overflow there stops the run.
        maximum: The largest scale.
        consecutive: Whether each step without an overflow, not each doubling, resets their count.

    Example:
        >>> import hfjax
        >>> scale = hfjax.LossScale(initial=2**15, window=500)
        >>> hfjax.Precision("float16", scale=scale).scale.hysteresis
        2
    """

    initial: float = 2.0**16
    window: int | None = 1000
    hysteresis: int = 2
    minimum: float = 1.0
    maximum: float = 2.0**24
    consecutive: bool = False

    def __post_init__(self) -> None:
        for name in ("initial", "minimum", "maximum"):
            if not (is_real(x := getattr(self, name), 0, 2.0**126) and x > 0):
                raise ValueError(f"loss scale {name}={x!r}: a positive number is expected.")
        if not self.minimum <= self.initial <= self.maximum:
            raise ValueError(
                f"loss scale initial={self.initial:g}: it lies outside of minimum="
                f"{self.minimum:g} and maximum={self.maximum:g}. Choose it between them."
            )
        if not (self.window is None or is_int(self.window)):
            expected = "a positive number of steps, or None for a scale that is fixed."
            raise ValueError(f"loss scale window={self.window!r}: {expected}")
        if not is_int(self.hysteresis):
            raise ValueError(f"loss scale hysteresis={self.hysteresis!r}: at least 1 overflow.")
        if max(self.window or 1, self.hysteresis) >= 2**31:
            raise ValueError("loss scale: window and hysteresis are less than 2^31.")
        if not isinstance(self.consecutive, bool):
            raise ValueError(f"loss scale consecutive={self.consecutive!r}: True or False.")


@strict_fields
@dataclass(frozen=True)
class Precision:
    """Dtypes of a step: float32, bfloat16, float16 or float64 each, as name (or bf16 …) or dtype.

    Attributes:
        compute: The dtype of arithmetic. None: as each parameter is stored.
        gather: The dtype in which an all-gather sends parameters. None: as `compute`.
        reduce: The dtype in which gradients are sent and summed. None: float32, or wider where a
            parameter is stored wider. Never float16: a sum over devices overflows.
        scale: A `hfjax.LossScale`, which float16 needs.

    Example:
        >>> import hfjax
        >>> hfjax.Precision(compute="bfloat16", reduce="float32").at("tokens").reduce
        dtype('float32')
    """

    compute: Any = None
    gather: Any = None
    reduce: Any = None
    scale: LossScale | None = None

    def __post_init__(self) -> None:
        for name in ("compute", "gather", "reduce"):
            value = getattr(self, name)
            dtype = None if value is None else parse_dtype(f"precision {name}", value)
            allowed = WIDE if name == "reduce" else (*WIDE, "float16")
            if dtype is not None and dtype.name not in allowed:
                why = " A sum over devices overflows float16." if dtype == jnp.float16 else ""
                raise ValueError(
                    f"precision {name}={dtype.name}: one of {', '.join(allowed)}.{why}"
                )
            object.__setattr__(self, name, dtype)
        if self.scale is not None and not isinstance(self.scale, LossScale):
            raise ValueError(f"precision scale={self.scale!r}: a hfjax.LossScale is expected.")
        if self.scale is None and self.compute == jnp.float16:
            raise ValueError(
                "precision compute=float16 without a loss scale: small gradients become zero. Use "
                'precision="fp16", or Precision(compute="float16", scale=hfjax.LossScale()).'
            )
        if self.scale is not None and self.compute not in (None, jnp.float16):
            raise ValueError(
                f"precision compute={self.compute.name} with a loss scale: only float16 needs one. "
                'Leave scale out, or compute in "float16".'
            )

    def at(self, path: str) -> "Precision":
        """Return the precision of a parameter: this one for each.

        Args:
            path: Its path.
        """
        return self

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
        reduce = self.reduce or jnp.promote_types(stored, "float32")
        return Dtypes(compute, self.gather or compute, reduce)


PRECISIONS = {
    "stored": Precision(),
    "fp32": Precision(compute=jnp.float32),
    "bf16": Precision(compute=jnp.bfloat16),
    "fp16": Precision(compute=jnp.float16, scale=LossScale()),
    "fp64": Precision(compute=jnp.float64),
}


def precision_of(spec: Any) -> Precision:
    """Return a precision as it is, or the one of a name."""
    if hasattr(spec, "at"):
        return spec
    if isinstance(spec, str) and spec == AUTO:
        raise ValueError(
            'precision="auto": what it stands for depends on the devices, so only train_step, '
            f"eval_step and predict_step take it. Give one of {', '.join(PRECISIONS)} here."
        )
    if not isinstance(spec, str) or spec not in PRECISIONS:
        raise ValueError(
            f"precision={spec!r}: one of auto, {', '.join(PRECISIONS)}, or "
            "hfjax.Precision(compute=…, gather=…, reduce=…)."
        )
    return PRECISIONS[spec]
