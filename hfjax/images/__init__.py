"""Folders of images as they lie, and the rows that a run reads from them. Knows no mesh, no model.

A folder is found by `find_images` and opened as an `image_set`; one file of it is decoded by
`decode`. What `image_rows` makes of it is drawn in `augment` and computed in `pixels`.
`image_loader` has batches of rows, in the order and with the resume of hfjax.data.
`image_report` tells what is in a folder.
"""

from hfjax.base.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
