"""Data sets of numbered tokens: each token of one is another number, so none is mistaken."""

from pathlib import Path

import numpy as np

from hfjax.data import TokenSet, write_tokens


def numbered(directory: Path, sizes: list[int], first: int = 0) -> TokenSet:
    """Return documents of these sizes whose tokens are first, first + 1, …"""
    ends = np.cumsum(sizes)
    whole = np.arange(first, first + ends[-1])
    documents = np.split(whole, ends[:-1])
    return write_tokens(directory, documents, vocab=int(first + ends[-1]))


def targets(batch: dict) -> np.ndarray:
    """Return the targets that count, in order."""
    found = batch["tokens"][:, 1:]
    return found[batch["mask"] > 0] if "mask" in batch else found.ravel()
