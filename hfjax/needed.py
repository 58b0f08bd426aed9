"""Modules that need a package which may not be there: training needs neither grain nor tyro."""

from importlib import import_module
from typing import Any


def imported(module: str, what: str) -> Any:
    """Return a module of hfjax, imported now; a package that it needs and is not there is named.

    >>> imported("hfjax.needed", "this line").__name__
    'hfjax.needed'
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
