"""Data sets on disk and the examples that a run reads from them. Independent of mesh and model.

To build a token data set, `build_dataset` encodes `documents` (or `stdlib_corpus`: Python's own
source, or a `hub_dataset`) with a `tokenizer`, and `token_writer` writes the result. To read one,
`token_dataset` opens it, `examples` cuts it into examples, `sampler` orders them and `token_loader`
yields batches. `indexed_loader` is the base class shared with the loaders of `images` and of any
Grain data set: `grain_loader`, whose examples `grain_examples` reads and checks.
"""

from hfjax.utils.lazy_import import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
