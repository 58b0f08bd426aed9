"""Token files on disk and the rows that a run reads from them. Knows no mesh and no model.

Making a data set: `recipe`, from `sources` (or `library`: Python's own source) by `tokenizer`,
written by `token_writer`. Reading one: `tokens`, cut into `rows`, in the
order of `stream`, as the batches of `loader`; `row_loader` is what it shares with that of images.
"""

from hfjax.base.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
