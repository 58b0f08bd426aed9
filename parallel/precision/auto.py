"""precision="auto": bfloat16 where a GPU has it, otherwise as parameters are stored."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import jax.numpy as jnp
from jax.typing import DTypeLike

from hfjax.parallel.precision.dtypes import AUTO

BFLOAT16_CAPABILITY = 8.0  # from which on NVIDIA's GPUs have matmuls in bfloat16: A100
NARROW = ("float32", "bfloat16")  # parameters with others are of a model that needs them


class Device(Protocol):
    """What a device, or a machine that is planned for, says of itself."""

    @property
    def platform(self) -> str: ...


def auto_precision(device: Device, dtypes: Iterable[DTypeLike] = ()) -> str:
    """Return the precision that "auto" stands for: "bf16" or "stored".

    Args:
        device: A device of the mesh, or a machine.
        dtypes: Those of the parameters.
    """
    inexact = {jnp.dtype(x).name for x in dtypes if jnp.issubdtype(x, jnp.inexact)}
    return "bf16" if has_bfloat16(device) and inexact <= set(NARROW) else "stored"


def has_bfloat16(device: Device) -> bool:
    """Return whether a device has matmuls in bfloat16."""
    if device.platform not in ("gpu", "cuda"):
        return False
    try:
        return float(getattr(device, "compute_capability", "none")) >= BFLOAT16_CAPABILITY
    except ValueError:  # unknown, or one of AMD's names: gfx90a
        return False


def replace_auto(spec: Any, word: str) -> Any:
    """Return a precision with `word` in place of "auto", also by path.

    Args:
        spec: What the user gave: a word, "auto,*norm*=fp32", {"*": "auto"}, or anything else.
        word: The name of a precision.

    Example:
        >>> replace_auto("auto,*norm*=fp32", "bf16")
        'bf16,*norm*=fp32'
    """
    if isinstance(spec, Mapping):
        return {path: word if value == AUTO else value for path, value in spec.items()}
    if not isinstance(spec, str):
        return spec
    entries = (entry.rpartition("=") for entry in spec.split(","))
    return ",".join(
        f"{path}{equals}{word if value.strip() == AUTO else value}"
        for path, equals, value in entries
    )
