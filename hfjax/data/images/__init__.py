"""Folders of images as they lie, and the examples that a run reads from them.

A folder is found by `find_images` and opened as a `dataset`; one file of it is decoded by `decode`.
What `examples` makes of it is drawn in `augment` and computed in `pixels`. `loader` has batches of
examples, in the order and with the resume of hfjax.data. `report` tells what is in a folder.
"""

from hfjax.utils.lazy_import import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
