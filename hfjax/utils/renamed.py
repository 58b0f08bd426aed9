"""Old names of modules, for Python configurations that were written before."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

MODULES = {"hfjax.run": "hfjax.trainer", "hfjax.run.config": "hfjax.trainer.config"}


@contextmanager
def old_modules() -> Iterator[None]:
    """Make old names of modules importable while a user's file is read."""
    added = {old: import_module(new) for old, new in MODULES.items() if old not in sys.modules}
    sys.modules.update(added)
    try:
        yield
    finally:
        for old in added:
            sys.modules.pop(old, None)
