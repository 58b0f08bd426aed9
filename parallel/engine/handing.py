"""What a layout hands to the modules of a model: those that mark an attribute of theirs get it."""

from typing import Any

from flax import nnx

from hfjax.base.paths import natural, path_of


def hand(model: nnx.Module, name: str, mark: str, given: Any) -> None:
    """Put `given` in the attribute `name` of all modules whose own one there is marked."""
    for _, module in nnx.iter_modules(model):
        if getattr(getattr(module, name, None), mark, False):
            setattr(module, name, given)


def number(model: nnx.Module) -> None:
    """Give modules that take a number theirs, in the order of paths: one for all layers of a stack.

    They are those whose `number` is `hfjax.models.parts.unnumbered` (marked `takes_number`).
    """
    takes = lambda module: getattr(getattr(module, "number", None), "takes_number", False)
    found = {
        f"{path_of(keys)}/": module for keys, module in nnx.iter_modules(model) if takes(module)
    }
    for i, path in enumerate(sorted(found, key=natural)):
        setattr(found[path], "number", i)  # noqa: B010  modules of any kind
