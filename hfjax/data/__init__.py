"""Token files on disk and the rows that a run reads from them. Knows no mesh and no model.

Making a data set: `recipe`, from `sources` (or `library`: Python's own source) by `tokenizer`,
written by `token_writer`. Reading one: `tokens`, cut into `rows`, in the
order of `stream`, as the batches of `loader`; `row_loader` is what it shares with that of images.
"""

from typing import TYPE_CHECKING, Any

from hfjax.base.exits import imported

if TYPE_CHECKING:
    from hfjax.data.library import standard_library
    from hfjax.data.loader import Loader, share
    from hfjax.data.recipe import prepare
    from hfjax.data.token_writer import write_tokens
    from hfjax.data.tokenizer import load_tokenizer
    from hfjax.data.tokens import TokenSet

__all__ = [
    "Loader",
    "TokenSet",
    "load_tokenizer",
    "prepare",
    "share",
    "standard_library",
    "write_tokens",
]

_MODULES = {
    "Loader": "loader",
    "TokenSet": "tokens",
    "load_tokenizer": "tokenizer",
    "prepare": "recipe",
    "share": "loader",
    "standard_library": "library",
    "write_tokens": "token_writer",
}


def __getattr__(name: str) -> Any:
    """Return a public name, its module imported only now: grain takes half a second."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(imported(f"{__name__}.{_MODULES[name]}", f"{__name__}.{name}"), name)
