"""Public names of a package, imported on first use.

Its stub, `__init__.pyi`, is the one list of them, read by type checkers, editors and this module.
"""

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hfjax.utils.command_errors import import_or_explain
from hfjax.utils.keywords import name_hint
from hfjax.utils.renamed import NAMES


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package.

    A submodule of the package (`from hfjax import data as data`) is not in `__all__`.
    """
    namespace = vars(sys.modules[package])
    stub = ast.parse(Path(namespace["__file__"]).with_suffix(".pyi").read_text(encoding="utf-8"))
    lines = [line for line in stub.body if isinstance(line, ast.ImportFrom)]
    source = {alias.name: line.module for line in lines for alias in line.names}
    public = sorted(name for name, module in source.items() if module != package)

    def get(name: str) -> Any:
        """Return a public name; import its module only now: JAX and grain import slowly."""
        if (module := source.get(name)) is None:
            if new := NAMES.get(f"{package}.{name}".removeprefix("hfjax.")):
                raise AttributeError(f"{package}.{name} is {new} now.")
            near = ""
            if not name.startswith("_"):  # tools probe for these
                near = name_hint(name, source) or name_hint(name.upper(), source)
            raise AttributeError(f"module {package!r} has no attribute {name!r}.{near}")
        if module == package:
            return import_or_explain(f"{package}.{name}", f"{package}.{name}")
        return getattr(import_or_explain(module, f"{package}.{name}"), name)

    return get, lambda: sorted({*namespace, *source}), public
