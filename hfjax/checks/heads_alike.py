"""Whether an attention of a model's own treats heads alike: tried on random numbers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from hfjax.parallel.autodiff.program import piece
from hfjax.parallel.wings.context.ulysses import repeats


@dataclass(frozen=True)
class _HeadsTrial:
    """A trial of an attention of the model's own on random numbers: all heads, and those of each.

    Ulysses gives each device of a row a part of the heads. What the attention makes of a part has
    to be what it makes of it among all heads. `shards` is over how many devices heads are split
    besides.
    """

    attend: Callable
    devices: int
    shards: int
    draw: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    held: dict[int, Any] = field(default_factory=dict)  # in place of what is traced

    def alike(self, operands: Sequence[Any]) -> bool:
        """Return whether each device makes of its heads what one device makes of them."""
        (rows, length, heads, _), tried = operands[0].shape, 2**26
        size = min(length, POSITIONS_TRIED, max(16, math.isqrt(tried // (rows * heads))))
        given = [self._drawn((rows, size, *x.shape[2:]), x.dtype) for x in operands]
        close = 1e-3 if operands[0].dtype.itemsize >= 4 else 5e-2
        parts = [[self._part(x, i) for x in given] for i in range(self.devices)]
        all_heads, some = self._compiled(given), self._compiled(parts[0])
        whole = all_heads(given)
        return all(
            np.allclose(some(part), self._part(whole, i), rtol=0, atol=close, equal_nan=True)
            for i, part in enumerate(parts)
        )

    def _part(self, x: np.ndarray, device: int) -> np.ndarray:
        """Return the heads that a device gets, as `Exchange` deals them."""
        if x.ndim != 4:
            return x
        x = np.repeat(x, repeats(x.shape[2] // self.shards, self.devices), axis=2)
        parts = x.reshape(*x.shape[:2], self.shards, self.devices, -1, x.shape[3])
        return parts[:, :, :, device].reshape(*x.shape[:2], -1, x.shape[3])

    def _compiled(self, like: Sequence[np.ndarray]) -> Callable:
        """Return the attention of operands like these, as a function of numbers."""
        program = piece(self.attend, *map(jax.typeof, like))

        @jax.jit
        def compiled(held: list, given: list) -> jax.Array:
            constants = dict(zip(program.constants, held, strict=True))
            return replace(program, constants=constants)(*given)[0]

        def attend(given: Sequence[np.ndarray]) -> np.ndarray:
            with jax.ensure_compile_time_eval():
                held = list(map(self._stand_in, program.constants.values()))
                return np.asarray(compiled(held, given))

        return attend

    def _stand_in(self, x: Any) -> Any:
        """Return numbers for an array that the attention closes over and that is traced."""
        if not isinstance(x, Tracer):
            return x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), x.shape) if x.shape else jax.random.key(0)
        if id(x) not in self.held:
            self.held[id(x)] = self._drawn(x.shape, x.dtype)
        return self.held[id(x)]

    def _drawn(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        if jnp.issubdtype(dtype, jnp.floating):
            return self.draw.normal(size=shape).astype(dtype)
        whole = self.draw.integers(0, 2 if jnp.issubdtype(dtype, jnp.bool_) else 4, shape)
        return (np.sort(whole, axis=-1) if shape else whole).astype(dtype)


POSITIONS_TRIED = 512


def unlike_heads(who: str, instead: str) -> ValueError:
    """Return the refusal of an attention that does not treat heads alike."""
    return ValueError(
        "the model's own attention does not treat heads alike (what it makes of some heads depends "
        f"on the others, or on how many there are), and {who} gives each device some of them. Put "
        f"what differs by head into the queries, or use {instead}."
    )


def heads_alike(attend: Callable, operands: Sequence[Any], devices: int, shards: int = 1) -> bool:
    """Return whether an attention treats heads alike: each device is given some of them.

    Args:
        attend: The attention.
        operands: Of all heads, or their shapes and dtypes.
        devices: Over how many devices of a row heads are split.
        shards: Over how many they are split besides.
    """
    return _HeadsTrial(attend, devices, shards).alike(operands)
