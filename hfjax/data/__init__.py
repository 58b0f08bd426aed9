"""Data sets on disk and the examples that a run reads from them. Knows no mesh and no model.

Making a token data set: `build_dataset`, from `documents` (or `stdlib_corpus`: Python's own source)
by `tokenizer`, written by `token_writer`. Reading one: `token_dataset`, cut into `examples`, in the
order of `sampler`, as the batches of `token_loader`; `indexed_loader` is what it shares with the
loader of `images`.
"""

from hfjax.utils.lazy_import import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
