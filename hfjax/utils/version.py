"""The version of hfjax: that of the installed package, or of the checkout that is imported."""

import tomllib
from importlib.metadata import PackageNotFoundError, version as installed
from pathlib import Path


def version() -> str:
    """Return the version, for instance 0.1.0.

    >>> version().count(".")
    2
    """
    try:
        return installed("hfjax")
    except PackageNotFoundError:  # a checkout on the path
        text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
        return tomllib.loads(text)["project"]["version"]
