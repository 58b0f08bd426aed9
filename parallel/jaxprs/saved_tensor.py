"""Tensors that are saved for a backward pass: what describes them, and how options name them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tensor:
    """One tensor that is saved for a backward pass: the operation that made it, and its names."""

    operation: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    names: frozenset[str] = frozenset()


def parse_names(names: Any, option: str) -> tuple[str, ...]:
    """Return names, given as a sequence or as one string with commas.

    >>> parse_names("qkv, mlp_up", "remat")
    ('qkv', 'mlp_up')
    """
    if isinstance(names, str):
        return tuple(name.strip() for name in names.split(","))
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"{option} names={names!r}: names of jax.ad_checkpoint.checkpoint_name are expected, "
            'for instance ("qkv", "mlp_up").'
        )
    return tuple(names)


def bytes_of(avals: Iterable[Any]) -> int:
    """Return the total bytes of arrays of these shapes and dtypes."""
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in avals)
