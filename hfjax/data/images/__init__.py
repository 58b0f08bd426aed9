"""Image folders as they are on disk, and the examples that a run reads from them.

`find_images` lists a folder, `dataset` opens it and `decode` decodes one file. `examples` makes an
example of it: `augment` draws the random parameters, `pixels` computes the result. `loader` yields
batches, with the ordering and exact resume of hfjax.data. `report` describes a folder's content.
"""

from hfjax.utils.lazy_import import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
