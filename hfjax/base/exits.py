"""How a command ends: exit status, mistakes on standard error, packages that are not installed.

Training needs neither grain nor tyro, so modules that do are imported with `imported`.
"""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def carried_out(name: str, act: Callable[[], Any]) -> int:
    """Run what `hfjax NAME` does; return its exit status."""
    try:
        act()
        sys.stdout.flush()
    except BrokenPipeError:
        return nobody_reads()
    except (ValueError, OSError) as wrong:
        print(f"hfjax {name}: {wrong}", file=sys.stderr)
        return 1
    return 0


def nobody_reads() -> int:
    """Return the exit status when the reader of standard output has seen enough."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def imported(module: str, what: str) -> Any:
    """Return a module of hfjax, imported now; a package that it needs and is not there is named.

    >>> imported("hfjax.base.exits", "this line").__name__
    'hfjax.base.exits'
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as missing:
        package = (missing.name or "hfjax").partition(".")[0]
        if package == "hfjax":
            raise
        raise ModuleNotFoundError(
            f"{what} needs the package {package}, which is not installed: pip install {package}",
            name=missing.name,
        ) from missing
