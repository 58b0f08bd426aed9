"""The words of a command line."""

from collections.abc import Sequence
from typing import Any

import tyro


def parsed(kind: type, argv: Sequence[str], command: str, default: Any = None) -> Any:
    """Return what the arguments of `hfjax COMMAND` say."""
    check_words(argv)
    fields = {} if default is None else {"default": default}
    return tyro.cli(kind, args=list(argv), prog=f"hfjax {command}", **fields)


def check_words(words: Sequence[str]) -> None:
    """Refuse a flag with an empty value: an empty path would be the folder at hand.

    >>> check_words(["--steps", "3", "--out="])
    Traceback (most recent call last):
    ValueError: --out: its value is empty. Give one, or leave the flag out.
    """
    for before, word in zip(["an argument", *words], words, strict=False):
        name, equals, value = word.partition("=")
        if not word or (name.startswith("--") and equals and not value):
            raise ValueError(
                f"{name or before}: its value is empty. Give one, or leave the flag out."
            )
