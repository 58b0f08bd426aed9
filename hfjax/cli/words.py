"""The words of a command line."""

from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tyro


def parsed(kind: type, argv: Sequence[str], command: str, default: Any = None) -> Any:
    """Return what the arguments of `hfjax COMMAND` say."""
    check_words(argv)
    check_once(kind, argv)
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


def check_once(kind: type, words: Sequence[str]) -> None:
    """Refuse a flag of several values that is there twice: only the last ones would count."""
    flags = [word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")]
    for flag in _of_several(kind):
        if flags.count(flag) > 1:
            raise ValueError(
                f"{flag} is there twice, and only its last values would count. Give it once, "
                f"all values behind it: {flag} ONE ANOTHER."
            )


def _of_several(kind: type, prefix: str = "--") -> Iterator[str]:
    """Yield the flags of a dataclass that take several values, but may be there only once."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        flag = f"{prefix}{name.replace('_', '-')}"
        if is_dataclass(hint) and isinstance(hint, type):
            yield from _of_several(hint, f"{flag}.")
        elif get_origin(hint) is not Annotated and _is_tuple(hint):
            yield flag


def _is_tuple(hint: object) -> bool:
    return any(get_origin(option) is tuple for option in (hint, *get_args(hint)))
