"""Pallas's Mosaic GPU, imported on first use: that takes a quarter of a second."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax.experimental.pallas.mosaic_gpu import *  # noqa: F403  # pyright: ignore


def __getattr__(name: str) -> Any:
    """Return the attribute of Mosaic GPU."""
    return getattr(import_module("jax.experimental.pallas.mosaic_gpu"), name)
