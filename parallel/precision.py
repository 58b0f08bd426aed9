"""In which dtypes a step computes, gathers parameters and reduces gradients."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from hfjax.base.keywords import known_fields


class Dtypes(NamedTuple):
    """The dtypes of one parameter in a step: of arithmetic, of its gather, of its reduction."""

    compute: Any
    gather: Any
    reduce: Any


@known_fields
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


def precision_of(given: Precision | str) -> Precision:
    """Return a precision that was given, or the one that a word stands for."""
    if isinstance(given, Precision):
        return given
    if given not in PRECISIONS:
        raise ValueError(
            f"precision={given!r}: one of {', '.join(PRECISIONS)}, or hfjax.Precision(compute=…, "
            "gather=…, reduce=…)."
        )
    return PRECISIONS[given]
