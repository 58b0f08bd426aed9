"""Bounds of the numbers in a configuration; an error names the flag."""

import math
from typing import Any

import numpy as np

from hfjax.utils.keywords import is_int, is_real
from hfjax.utils.read_files import brief

MOST = 2**31 - 1  # of counts and seconds
LARGEST, SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)


def check_bounds(settings: Any, prefix: str, most: float = MOST, **least: float) -> None:
    """Refuse settings that are out of bounds or not numbers; None is allowed."""
    for name, bound in least.items():
        value = getattr(settings, name)
        if value is None:
            continue
        number = is_real(value, -math.inf, math.inf)
        counts = settings.__dataclass_fields__[name].type in (int, int | None)
        if counts and number and not is_int(value, -MOST, 2**63) and bound <= value <= most:
            flag = f"{prefix}{name}".replace("_", "-")
            raise ValueError(
                f"--{flag} {brief(value)}: a number from {bound} on is needed, a whole one."
            )
        if not number or not bound <= value <= most:
            flag = f"{prefix}{name}".replace("_", "-")
            to = f"to {int(most) if most < 2**53 else most}" if number and value > most else "on"
            raise ValueError(f"--{flag} {brief(value)}: a number from {bound} {to} is needed.")


def check_float32(settings: Any, prefix: str, *names: str) -> None:
    """Refuse numbers below 0, and those that float32 makes infinite or 0."""
    check_bounds(settings, prefix, LARGEST, **dict.fromkeys(names, 0))
    for name in names:
        if 0 < (value := getattr(settings, name) or 0) < SMALLEST:
            flag = f"{prefix}{name}".replace("_", "-")
            raise ValueError(f"--{flag} {value}: that is 0 in float32. Give 0, or more.")


FORMER_DEFAULTS = (("packing", "stream"),)  # before chats


def is_default(settings: Any, name: str) -> bool:
    """Return whether a setting has its default, or the one that runs recorded before."""
    value = getattr(settings, name)
    return value == settings.__dataclass_fields__[name].default or (name, value) in FORMER_DEFAULTS
