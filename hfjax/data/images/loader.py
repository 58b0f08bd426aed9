"""Batches of images: the same on any number of processes, threads and restarts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import grain
import numpy as np

from hfjax.data.images.augment import Augment
from hfjax.data.images.dataset import ImageSet, num_cores
from hfjax.data.images.examples import ImageExamples
from hfjax.data.indexed_loader import IndexedLoader, check_batch_size, check_epochs, check_numbers
from hfjax.data.sampler import example_order
from hfjax.utils.keywords import strict_fields
from hfjax.utils.tables import quote

BROKEN = ("refuse", "skip")
MOST_THREADS = 16  # more only wait for each other
RESIZE_RATIO = 256 / 224  # shorter side / centre crop, in evaluations


@strict_fields
@dataclass(eq=False)
class ImageLoader(IndexedLoader):
    """An iterator over batches {"image": uint8 [n, size, size, 3], "label": int32 […]}.

    Labels are [n], or [n, size, size] for a set with masks. Images and their order are a
    function of the files, size, augment, resize, shuffle and seed: not of processes, threads or
    batch size. With `pad_last` there is also "mask", float32 [n].

    Attributes:
        data: A set of images or its directory; if it is split, `train` selects train or valid.
        batch_size: The global batch size, in examples.
        size: Height and width of all images in pixels.
        train: Whether images are augmented (`augment`) and shuffled. If not: with classes, the
            shorter side is resized to `resize` and the centre is cropped; with masks, the whole
            image is scaled to fit, and padded at the right and bottom.
        seed: The seed of shuffle and augmentation.
        epochs: The number of passes over the data. None: no end.
        local_examples: The examples of each batch that this process loads (`share`). None: all.
        pad_last: Whether to pad the last batch with examples of mask 0 instead of dropping it.
        augment: The augmentation of training images. None: `Augment()`.
        resize: The shorter side in evaluations of classes. None: size * 256 / 224, rounded.
        shuffle: Whether each epoch is shuffled anew. None: as `train`.
        broken: refuse, or skip: use the next image that decodes in place of one that does not;
            `skipped` lists those met.
        threads: The number of decoding threads; 0: the caller only. None: one per core, at most 16.
        prefetch: The number of batches to prefetch, at least `threads`. None: two more.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from PIL import Image
        >>> from hfjax.data.images import ImageLoader
        >>> folder = tempfile.TemporaryDirectory()
        >>> for name in ("cat", "dog"):
        ...     Path(folder.name, name).mkdir()
        ...     Image.new("RGB", (40, 30)).save(Path(folder.name, name, "1.png"))
        >>> loader = ImageLoader(folder.name, batch_size=2, size=16, train=False, epochs=1)
        >>> batch = next(loader)
        >>> batch["image"].shape, batch["label"].tolist(), len(loader)
        ((2, 16, 16, 3), [0, 1], 1)
    """

    data: ImageSet | str | Path
    batch_size: int
    size: int
    train: bool = True
    seed: int = 0
    epochs: int | None = None  # None: no end
    local_examples: Sequence[int] | np.ndarray | None = None
    pad_last: bool = False  # pad the last batch with examples of mask 0, do not drop it
    augment: Augment | None = None
    resize: int | None = None
    shuffle: bool | None = None
    broken: str = "refuse"  # or skip
    threads: int | None = None
    prefetch: int | None = None  # batches read ahead

    def __post_init__(self) -> None:
        options = ("threads", "prefetch", "resize", "shuffle")
        explicit = [name for name in options if getattr(self, name) is not None]
        least = {"batch_size": 1, "size": 1, "seed": 0, "threads": 0, "prefetch": self._threads}
        least |= {"resize": self.size}
        optional = {k: n for k, n in least.items() if k not in options or k in explicit}
        flags = ("train", "pad_last", *(name for name in ("shuffle",) if name in explicit))
        check_numbers(self, optional, flags)
        check_epochs(self)
        if self.broken not in BROKEN:
            raise ValueError(f"broken={self.broken!r}: one of {', '.join(BROKEN)}.")
        content = f"{quote(self.images.directory)} has {self.examples_per_epoch} images"
        check_batch_size(self, content, "Lower batch_size, or give more images.")
        self._source  # noqa: B018  raise errors of augment now

    @cached_property
    def images(self) -> ImageSet:
        """The opened set of images."""
        if isinstance(self.data, ImageSet):
            return self.data
        if not isinstance(self.data, str | Path):
            kind = type(self.data).__name__
            raise ValueError(
                f"data is a {kind}: a folder of images, or an ImageSet of one, is expected. Tokens "
                "are read by hfjax.data.Loader."
            )
        return ImageSet(self.data, part="train" if self.train else "valid")

    @property
    def examples_per_epoch(self) -> int:
        """The number of images."""
        return len(self.images)

    @property
    def skipped(self) -> list[str]:
        """With broken="skip": the images that did not decode so far, relative to the directory."""
        return sorted(self._examples.skipped_names)

    def check(self, classes: int) -> None:
        """Refuse a model with fewer classes than the data.

        Args:
            classes: The model's number of classes.

        Example:
            >>> import tempfile
            >>> from pathlib import Path
            >>> from PIL import Image
            >>> from hfjax.data.images import ImageLoader
            >>> folder = tempfile.TemporaryDirectory()
            >>> Path(folder.name, "cat").mkdir()
            >>> Image.new("RGB", (40, 30)).save(Path(folder.name, "cat", "1.png"))
            >>> ImageLoader(folder.name, batch_size=1, size=16).check(classes=10)
        """
        if classes < (num_classes := len(self.images.classes)):
            raise ValueError(
                f"{quote(self.images.directory)} has {num_classes} classes, the model {classes}. "
                f"Give the model {num_classes}, or leave images out."
            )

    # -- data -----------------------------------------------------------------------------

    @property
    def _threads(self) -> int:
        return min(num_cores(), MOST_THREADS) if self.threads is None else self.threads

    @property
    def _shuffles(self) -> bool:
        return self.train if self.shuffle is None else self.shuffle

    @cached_property
    def _examples(self) -> ImageExamples:
        augment = (self.augment or Augment()).of_kind(self.images.kind) if self.train else None
        resize = round(self.size * RESIZE_RATIO) if self.resize is None else self.resize
        skip = self.broken == "skip"
        return ImageExamples(
            self.images, self.size, self.seed, augment, resize, skip, self.pad_last
        )

    def _identity_fields(self) -> dict[str, Any]:
        examples, data = self._examples, self.images
        return {
            "size": self.size,
            "augment": None if examples.augment is None else examples.augment.to_json(),
            "resize": examples.resize if data.kind == "classes" and not self.train else None,
            "shuffle": self._shuffles,
            "seed": self.seed,
            "data": {"kind": data.kind, "images": len(data), "files": data.fingerprint},
        }

    def _order(self, epochs: int | None) -> grain.MapDataset[int]:
        return example_order([len(self.images)], [1.0], self.seed, self._shuffles, epochs)

    def _make_source(self) -> ImageExamples:
        return self._examples

    def _read_options(self) -> grain.ReadOptions:
        waiting = self._threads + 2 if self.prefetch is None else self.prefetch
        return grain.ReadOptions(self._threads, waiting)
