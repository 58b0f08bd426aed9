"""Folders of images as they lie, and the rows that a run reads from them. Knows no mesh, no model.

A folder is found by `find_images` and opened as an `image_set`; one file of it is decoded by
`decode`. What `image_rows` makes of it is drawn in `augment` and computed in `pixels`.
`image_loader` has batches of rows, in the order and with the resume of hfjax.data.
`image_report` tells what is in a folder.
"""

from typing import TYPE_CHECKING, Any

from hfjax.base.exits import imported

if TYPE_CHECKING:
    from hfjax.images.augment import Augment
    from hfjax.images.find_images import parts_of
    from hfjax.images.image_loader import ImageLoader
    from hfjax.images.image_set import ImageSet, check_same_classes

__all__ = ["Augment", "ImageLoader", "ImageSet", "check_same_classes", "parts_of"]

_MODULES = {
    "Augment": "augment",
    "ImageLoader": "image_loader",
    "ImageSet": "image_set",
    "check_same_classes": "image_set",
    "parts_of": "find_images",
}


def __getattr__(name: str) -> Any:
    """Return a public name, its module imported only now: grain takes half a second."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(imported(f"{__name__}.{_MODULES[name]}", f"{__name__}.{name}"), name)
