"""An opened folder of images: its classes, and each image with its label or mask."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from hfjax.data.images.decode import (
    MOST_PIXELS,
    DamagedImageError,
    pillow,
    raise_pixel_limit,
    read_image,
    read_mask,
)
from hfjax.data.images.find_images import (
    IMAGES,
    MASKS,
    ImageListing,
    check_class_names,
    class_folders,
    has_masks,
    list_images,
    match_masks,
    read_class_names,
    split_folder,
)
from hfjax.data.images.pixels import IGNORED
from hfjax.utils.image_names import is_system_file
from hfjax.utils.keywords import is_int
from hfjax.utils.tables import quote

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_NAMES = 5  # names listed in a message
READ_AHEAD = 1024  # images queued for threads

T = TypeVar("T")


class ImageSet:
    """An opened folder of images: `set[i]` is an image and its label, or its mask of labels.

    Either folders of classes (`photos/cat/1.jpg`): their sorted names are labels 0, 1, …. Or images
    and masks (`street/images/1.jpg`, `street/masks/1.png`): a mask's grey levels or palette indices
    are the labels, 255 is ignored, and `street/classes.txt` may name them, one per line.

    Args:
        directory: The folder. If it is split into train/ and valid/ (or val/), `part` is required.
        part: train or valid; a folder that is not split is used as it is.
        classes: Names of the classes in the order of labels, such as those of a training set: then
            a class may have no folder here. For masks, also their number. None: as found; for masks
            without names, all masks are read to find the largest label.
        most_pixels: Larger images are refused before they are decoded.

    Raises:
        ValueError: The folder has another structure; the message says what was found and expected.

    Attributes:
        directory: The folder that is read.
        kind: "classes" or "masks".
        classes: Names, in the order of labels.
        names: The images, relative to the folder, in the order of examples.
        labels: The label of each image; empty for a set with masks.
        masks: The names of the masks; empty for a set of classes.
        sizes: File sizes of the images in bytes, then of their masks.
        passed_over: The number of other files.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from PIL import Image
        >>> from hfjax.data.images import ImageSet
        >>> folder = tempfile.TemporaryDirectory()
        >>> for name in ("cat", "dog"):
        ...     Path(folder.name, name).mkdir()
        ...     Image.new("RGB", (40, 30)).save(Path(folder.name, name, "1.png"))
        >>> data = ImageSet(folder.name)
        >>> data.kind, data.classes, len(data)
        ('classes', ['cat', 'dog'], 2)
    """

    def __init__(
        self,
        directory: str | Path,
        part: str | None = None,
        classes: int | Sequence[str] | None = None,
        most_pixels: int = MOST_PIXELS,
    ) -> None:
        if not is_int(most_pixels, 1):
            raise ValueError(f"most_pixels={most_pixels!r}: a whole number from 1 on.")
        pillow()
        raise_pixel_limit(most_pixels)
        self.most_pixels = most_pixels
        self.directory = split_folder(Path(directory), part)
        self.kind = "masks" if has_masks(self.directory) else "classes"
        open_folder = self._open_masks if self.kind == "masks" else self._open_classes
        open_folder(classes)

    # -- by class -------------------------------------------------------------------------

    def _open_classes(self, classes: int | Sequence[str] | None) -> None:
        folders = class_folders(self.directory)
        if isinstance(classes, int):
            raise ValueError(
                f"classes={classes}: {quote(self.directory)} has folders of classes; give names."
            )
        self.classes = folders if classes is None else check_class_names(classes, "classes")
        self._check_folders(folders)
        listings = [list_images(self.directory / name) for name in folders]
        for name, images in zip(folders, listings, strict=True):
            if not images.names:
                raise ValueError(
                    f"class {quote(name)} has no image: {quote(self.directory / name)} holds "
                    f"{images.num_others} other files. Add images, or remove the folder."
                )
        self.names = [f"{f}/{x}" for f, i in zip(folders, listings, strict=True) for x in i.names]
        self.sizes = [size for images in listings for size in images.sizes]
        folder_labels = [self.classes.index(name) for name in folders]
        self.labels = np.repeat(np.array(folder_labels, np.int32), [len(i.names) for i in listings])
        num_unread = sum(1 for entry in os.scandir(self.directory) if _is_unread_file(entry))
        self.passed_over = num_unread + sum(images.num_others for images in listings)
        self.masks: list[str] = []

    def _check_folders(self, folders: list[str]) -> None:
        if unexpected := [name for name in folders if name not in self.classes]:
            raise ValueError(
                f"{quote(self.directory)} has folders of classes that are not among the "
                f"{len(self.classes)} asked for: {_abbreviate(unexpected)}. Remove them, or name "
                "them."
            )

    # -- with masks -----------------------------------------------------------------------

    def _open_masks(self, classes: int | Sequence[str] | None) -> None:
        images = list_images(self.directory / IMAGES)
        masks = list_images(self.directory / MASKS)
        if not images.names:
            raise ValueError(
                f"{quote(self.directory / IMAGES)} holds no image ({images.num_others} other "
                "files)."
            )
        self.names = images.names
        self.masks = match_masks(self.directory, images, masks)
        self.sizes = images.sizes + _file_sizes(masks, self.masks)
        self.labels = np.zeros(0, np.int32)
        num_unread = sum(1 for entry in os.scandir(self.directory) if _is_unread_file(entry))
        num_unpaired = len(masks.names) - len(self.masks)
        self.passed_over = num_unread + images.num_others + masks.num_others + num_unpaired
        self.classes = self._class_names(classes)

    def _class_names(self, classes: int | Sequence[str] | None) -> list[str]:
        if classes is None:
            classes = read_class_names(self.directory) or self._largest_label() + 1
        if not isinstance(classes, int):
            classes = check_class_names(classes, "classes")
        count = classes if isinstance(classes, int) else len(classes)
        if not is_int(count, 1, IGNORED):
            raise ValueError(f"classes={count!r}: masks have 1 to {IGNORED} classes.")
        return classes if isinstance(classes, list) else list(map(str, range(count)))

    def _largest_label(self) -> int:
        largest = max(self.each(self._largest_in_mask))
        if largest < 0:
            raise ValueError(
                f"{quote(self.directory / MASKS)}: every label is {IGNORED}, which does not count. "
                "Labels of classes are 0, 1, …: give other masks."
            )
        return largest

    def _largest_in_mask(self, index: int) -> int:
        """Return the largest label of a mask; -1 if there is none, or the file is damaged."""
        try:
            mask = self.mask(index)
        except DamagedImageError:  # raised when its example is read
            return -1
        labels = mask[mask != IGNORED]
        return int(labels.max()) if labels.size else -1

    # -- content --------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"ImageSet({self})"

    def __str__(self) -> str:
        phrase = "with masks of" if self.kind == "masks" else "of"
        return f"{quote(self.directory)}: {len(self)} images {phrase} {len(self.classes)} classes"

    def __getitem__(self, index: int) -> "tuple[Image, np.ndarray]":
        image = read_image(self.path(index), self.most_pixels)
        if self.kind == "classes":
            return image, self.labels[index]
        mask = self.mask(index)
        self.check_mask(index, image, mask)
        return image, mask

    def path(self, index: int) -> Path:
        """Return the file of an image.

        Args:
            index: The number of the image, from 0 on.

        Example:
            >>> import tempfile
            >>> from pathlib import Path
            >>> from PIL import Image
            >>> from hfjax.data.images import ImageSet
            >>> folder = tempfile.TemporaryDirectory()
            >>> Path(folder.name, "cat").mkdir()
            >>> Image.new("RGB", (40, 30)).save(Path(folder.name, "cat", "1.png"))
            >>> ImageSet(folder.name).path(0).name
            '1.png'
        """
        subfolder = IMAGES if self.kind == "masks" else "."
        return self.directory / subfolder / self.names[index]

    def mask(self, index: int) -> np.ndarray:
        """Return the labels of the mask of an image, uint8 [height, width].

        Args:
            index: The number of the image, from 0 on.

        Example:
            >>> import tempfile
            >>> from pathlib import Path
            >>> from PIL import Image
            >>> from hfjax.data.images import ImageSet
            >>> folder = tempfile.TemporaryDirectory()
            >>> for name, mode in (("images", "RGB"), ("masks", "L")):
            ...     Path(folder.name, name).mkdir()
            ...     Image.new(mode, (40, 30)).save(Path(folder.name, name, "1.png"))
            >>> ImageSet(folder.name).mask(0).shape
            (30, 40)
        """
        return read_mask(self.directory / MASKS / self.masks[index], self.most_pixels)

    def check_mask(self, index: int, image: "Image", mask: np.ndarray) -> None:
        """Refuse a mask whose size differs from its image's, or whose labels exceed the classes.

        Args:
            index: The number of the image, for the message.
            image: The image.
            mask: The labels of its mask, uint8.

        Example:
            >>> import tempfile
            >>> from pathlib import Path
            >>> from PIL import Image
            >>> from hfjax.data.images import ImageSet
            >>> folder = tempfile.TemporaryDirectory()
            >>> for name, mode in (("images", "RGB"), ("masks", "L")):
            ...     Path(folder.name, name).mkdir()
            ...     Image.new(mode, (40, 30)).save(Path(folder.name, name, "1.png"))
            >>> data = ImageSet(folder.name)
            >>> data.check_mask(0, *data[0])
        """
        path = quote(self.directory / MASKS / self.masks[index])
        if mask.shape != (image.height, image.width):
            raise ValueError(
                f"{path} has {mask.shape[1]} x {mask.shape[0]} pixels, its image "
                f"{image.width} x {image.height} (turned as its EXIF says). Make them alike."
            )
        if unknown_labels := self.beyond(mask):
            raise ValueError(
                f"{path} has labels beyond the {len(self.classes)} classes: {unknown_labels}. "
                f"Labels are 0 to {len(self.classes) - 1}, and {IGNORED} for what does not count; "
                f"`hfjax data {quote(self.directory)}` names all such masks."
            )

    def beyond(self, mask: np.ndarray) -> str:
        """Return which labels of a mask are no classes, with their pixel counts; "" if none.

        Args:
            mask: Labels, uint8.

        Example:
            >>> import tempfile
            >>> from pathlib import Path
            >>> import numpy as np
            >>> from PIL import Image
            >>> from hfjax.data.images import ImageSet
            >>> folder = tempfile.TemporaryDirectory()
            >>> for name, mode in (("images", "RGB"), ("masks", "L")):
            ...     Path(folder.name, name).mkdir()
            ...     Image.new(mode, (40, 30)).save(Path(folder.name, name, "1.png"))
            >>> ImageSet(folder.name, classes=2).beyond(np.array([[0, 1], [7, 255]], np.uint8))
            '7 (1 pixels)'
        """
        if (mask + np.uint8(1)).max(initial=0) <= len(self.classes):  # 255 becomes 0
            return ""
        unknown = mask[(mask >= len(self.classes)) & (mask != IGNORED)]
        labels, counts = np.unique(unknown, return_counts=True)
        descriptions = [f"{label} ({n} pixels)" for label, n in zip(labels, counts, strict=True)]
        return ", ".join(descriptions[:MAX_NAMES]) + (
            f" and {len(descriptions) - MAX_NAMES} more" * (len(descriptions) > MAX_NAMES)
        )

    def each(self, read: Callable[[int], T]) -> Iterator[T]:
        """Yield `read(index)` for each image, in order, using one thread per core.

        Args:
            read: Function of the number of an image.

        Example:
            >>> import tempfile
            >>> from pathlib import Path
            >>> from PIL import Image
            >>> from hfjax.data.images import ImageSet
            >>> folder = tempfile.TemporaryDirectory()
            >>> Path(folder.name, "cat").mkdir()
            >>> Image.new("RGB", (40, 30)).save(Path(folder.name, "cat", "1.png"))
            >>> data = ImageSet(folder.name)
            >>> list(data.each(lambda index: data[index][0].size))
            [(40, 30)]
        """
        with ThreadPoolExecutor(num_cores()) as pool:
            for start in range(0, len(self), READ_AHEAD):
                yield from pool.map(read, range(start, min(start + READ_AHEAD, len(self))))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the names and sizes of all files, and of the classes."""
        digest = hashlib.sha256()
        names = [*self.names, *self.masks]
        lines = [f"{name}\0{size}" for name, size in zip(names, self.sizes, strict=True)]
        for text in (self.kind, *self.classes, *lines):
            digest.update(text.encode("utf-8", "surrogateescape") + b"\n")
        return digest.hexdigest()[:16]


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def check_same_classes(train: ImageSet, valid: ImageSet) -> None:
    """Refuse a validation set whose labels do not mean the classes of the training set.

    Validation masks may lack the last classes: their labels are numbers already.

    Args:
        train: The training set.
        valid: The validation set.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from PIL import Image
        >>> from hfjax.data.images import ImageSet, check_same_classes
        >>> folder = tempfile.TemporaryDirectory()
        >>> for name in ("train/cat", "train/dog", "valid/cat"):
        ...     Path(folder.name, name).mkdir(parents=True)
        ...     Image.new("RGB", (40, 30)).save(Path(folder.name, name, "1.png"))
        >>> train = ImageSet(folder.name, "train")
        >>> check_same_classes(train, ImageSet(folder.name, "valid", classes=train.classes))
        >>> check_same_classes(train, ImageSet(folder.name, "valid"))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: ...train has 2 classes and ...valid 1; only the first has dog. ...
    """
    if train.kind != valid.kind:
        raise ValueError(
            f"{quote(train.directory)} is a set of {train.kind}, {quote(valid.directory)} one of "
            f"{valid.kind}: give two of one kind."
        )
    has_same_prefix = train.classes[: len(valid.classes)] == valid.classes
    if train.classes == valid.classes or (train.kind == "masks" and has_same_prefix):
        return
    more = [name for name in valid.classes if name not in train.classes]
    fewer = [name for name in train.classes if name not in valid.classes]
    differences = [f"only the first has {_abbreviate(fewer)}"] if fewer else []
    differences += [f"only the second has {_abbreviate(more)}"] if more else []
    raise ValueError(
        f"{quote(train.directory)} has {len(train.classes)} classes and {quote(valid.directory)} "
        f"{len(valid.classes)}; {' and '.join(differences) or 'their order is another one'}. "
        "Labels would not mean the same: move folders or lines of classes.txt so that both are "
        "alike, or open the second as ImageSet(…, classes=train.classes)."
    )


def _abbreviate(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(map(quote, names[:MAX_NAMES])) + more


def _is_unread_file(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry beside the folders is a file that is not read."""
    return (
        os.path.isfile(entry.path)
        and not is_system_file(entry.name)
        and entry.name != "classes.txt"
    )


def _file_sizes(listing: ImageListing, names: Sequence[str]) -> list[int]:
    sizes = dict(zip(listing.names, listing.sizes, strict=True))
    return [sizes[name] for name in names]
