"""Which keys a query sees, and which tiles of keys a tile of queries has to visit.

The position of query i is `query_start + i`, of key j `key_start + j`. With d the key's position
minus the query's, all but documents is `low <= d <= high`. [B]atch, [S] queries, [T] keys.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hfjax.pallas_kernels.mosaic import pad_axis

FAR = 2**29  # farther apart than any two positions


@dataclass(frozen=True)
class Mask:
    """What a query sees: no later keys (`causal`), no keys at a distance of `window` or more."""

    causal: bool = True
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window}: at least 1 (a query sees itself), or None.")

    @property
    def everything(self) -> bool:
        """Whether no position is masked."""
        return not self.causal and self.window is None


class Positions(NamedTuple):
    """The first positions of queries and keys, and their documents.

    Starts may be traced. Documents are given for both or neither: attention stays within documents.
    """

    query_start: jax.Array | int = 0
    key_start: jax.Array | int = 0
    query_documents: jax.Array | None = None
    key_documents: jax.Array | None = None

    @property
    def starts(self) -> tuple[int, int] | None:
        """The first positions if they are static, or None if they are traced."""
        if isinstance(self.query_start, int) and isinstance(self.key_start, int):
            return self.query_start, self.key_start
        return None


class Tiles(NamedTuple):
    """The lengths of queries and keys, and of their tiles."""

    queries: int
    keys: int
    query_tile: int
    key_tile: int


def bounds(mask: Mask, positions: Positions) -> tuple[Any, Any]:
    """Return the visible range (low, high) of key number - query number."""
    if positions.starts is None:
        shift = jnp.int32(positions.query_start) - jnp.int32(positions.key_start)
    else:
        shift = np.int32(positions.starts[0] - positions.starts[1])
    low = np.int32(-FAR) if mask.window is None else shift - (mask.window - 1)
    high = np.int32(FAR) if mask.window is None else shift + (mask.window - 1)
    return low, shift if mask.causal else high


def visible(
    mask: Mask, positions: Positions, query: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """Return which keys each query sees, by position and by document, from their numbers.

    The first is [Q, K]; the second [B, Q, K], or None without documents.
    """
    low, high = bounds(mask, positions)
    distance = key[None, :] - query[:, None]
    near = (distance >= low) & (distance <= high)
    if positions.query_documents is None or positions.key_documents is None:
        return near, None
    of_query, of_key = positions.query_documents[:, query], positions.key_documents[:, key]
    return near, of_query[:, :, None] == of_key[:, None, :]


def _document_ranges(documents: jax.Array, tile: int) -> tuple[jax.Array, jax.Array]:
    """Return the lowest and the highest document of each tile: [B, tiles] each."""
    tiles = pad_axis(documents, 1, tile, mode="edge").reshape(documents.shape[0], -1, tile)
    return tiles.min(-1), tiles.max(-1)


def tile_visibility(mask: Mask, positions: Positions, tiles: Tiles) -> tuple[Any, Any]:
    """Return whether query tiles see any, and all, of each key tile: [B, n, m] each.

    If all inputs are static they are numpy arrays: constants of the program.
    """
    low, high = bounds(mask, positions)
    first = np.arange(0, tiles.queries, tiles.query_tile, dtype=np.int32)[:, None]
    last = np.minimum(first + tiles.query_tile, tiles.queries) - 1
    left = np.arange(0, tiles.keys, tiles.key_tile, dtype=np.int32)[None, :]
    right = np.minimum(left + tiles.key_tile, tiles.keys) - 1
    some = ((right - first >= low) & (left - last <= high))[None]
    every = ((left - last >= low) & (right - first <= high))[None]
    every = every & (left + tiles.key_tile <= tiles.keys)[None]
    if positions.query_documents is None or positions.key_documents is None:
        return some, every
    of_queries = _document_ranges(positions.query_documents, tiles.query_tile)
    of_keys = _document_ranges(positions.key_documents, tiles.key_tile)
    q_low, q_high = (x[:, :, None] for x in of_queries)
    k_low, k_high = (x[:, None, :] for x in of_keys)
    some = some & (q_low <= k_high) & (k_low <= q_high)
    return some, every & (q_low == q_high) & (k_low == k_high) & (q_low == k_low)


def _spans(some: jax.Array | np.ndarray, every: jax.Array | np.ndarray) -> list[Any]:
    """Return, along the last axis: start, start of the full run, its end, end: [B, n] each."""
    xp = np if isinstance(some, np.ndarray) else jnp
    count = some.shape[-1]
    number = xp.broadcast_to(np.arange(count, dtype=np.int32), some.shape)
    start = xp.min(xp.where(some, number, count), axis=-1)
    end = xp.max(xp.where(some, number + 1, 0), axis=-1)
    start = xp.minimum(start, end)
    full = xp.min(xp.where(every, number, count), axis=-1)
    full = xp.where(full < count, full, start)
    broken = ~every & (number >= full[..., None])
    full_end = xp.min(xp.where(broken, number, count), axis=-1)
    return [start, full, xp.maximum(full_end, full), end]


def _table(mask: Mask, positions: Positions, spans: list[Any]) -> jax.Array:
    xp = np if isinstance(spans[0], np.ndarray) else jnp
    limits = [xp.broadcast_to(x, spans[0].shape) for x in bounds(mask, positions)]
    return jnp.asarray(xp.stack([x.astype(np.int32) for x in (*spans, *limits)], axis=-1))


def query_visits(mask: Mask, positions: Positions, tiles: Tiles) -> jax.Array:
    """Return the visits of each tile of queries, [B or 1, query tiles, 6].

    Key tiles from the first to the second number and from the third to the fourth are partially
    visible; those between are fully visible; others are not. The last two numbers are low and high.
    """
    return _table(mask, positions, _spans(*tile_visibility(mask, positions, tiles)))


def key_visits(mask: Mask, positions: Positions, tiles: Tiles) -> jax.Array:
    """Return the visits of each tile of keys, [B or 1, key tiles, 6], in tiles of queries."""
    some, every = (x.swapaxes(1, 2) for x in tile_visibility(mask, positions, tiles))
    return _table(mask, positions, _spans(some, every))
