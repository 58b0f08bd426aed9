"""Row = f(seed, epoch, number): an image of a set, cut and changed, with its label or mask."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hfjax.data.examples import Row
from hfjax.data.images.augment import Augment, colours, crop, generator, uniform, whole
from hfjax.data.images.dataset import ImageSet
from hfjax.data.images.decode import DamagedImageError
from hfjax.data.images.pixels import (
    IGNORED,
    Box,
    array,
    centre,
    coloured,
    filled_up,
    flipped,
    ignored_up,
    longer_to,
    nearest_part,
    resized_crop,
    resized_part,
    shorter_to,
)

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class ImageRows:
    """The rows of a set. Without `augment` as they are evaluated; `skipped` are the broken ones."""

    data: ImageSet
    size: int
    seed: int
    augment: Augment | None
    resize: int  # the shorter side before the middle is cut out; of classes, evaluated
    skip: bool
    masked: bool
    skipped: set[str] = field(default_factory=set)

    def row(self, number: int, place: int) -> Row:
        """Return a row; of one that does not decode the next one that does, or one of mask 0."""
        draw = None
        if self.skip and self.masked and self._is_broken(number):
            return self.nothing()
        if self.augment is not None:
            draw = generator(self.seed, place // len(self.data), number)
        image, label = self._decoded(number)
        make = self._of_class if self.data.kind == "classes" else self._of_mask
        row = make(image, label, draw)
        return {**row, "mask": np.ones((), np.float32)} if self.masked else row

    def _is_broken(self, number: int) -> bool:
        """Return whether an image does not decode; each counts once where scores are told."""
        try:
            _ = self.data[number]
        except DamagedImageError:
            self.skipped.add(self.data.names[number])
            return True
        return False

    def _decoded(self, number: int) -> tuple["Image", np.ndarray]:
        count = len(self.data)
        for index in range(number, number + count):
            try:
                return self.data[index % count]
            except DamagedImageError:
                if not self.skip:
                    raise
                self.skipped.add(self.data.names[index % count])
        raise ValueError(f"{self.data}: none of its images decodes.")

    def nothing(self) -> Row:
        """Return a black image of mask 0: of class 0, or with ignored labels."""
        image = np.zeros((self.size, self.size, 3), np.uint8)
        label = np.zeros((), np.uint8)
        if self.data.kind == "masks":
            label = np.full((self.size, self.size), IGNORED, np.uint8)
        return {"image": image, "label": label, "mask": np.zeros((), np.float32)}

    def together(self, rows: list[Row]) -> Row:
        """Return rows as a batch; labels, one byte so far, become int32."""
        types = {"label": np.int32}
        return {k: np.stack([row[k] for row in rows], dtype=types.get(k)) for k in rows[0]}

    # -- classes --------------------------------------------------------------------------

    def _of_class(self, image: "Image", label: np.ndarray, draw: np.random.Generator | None) -> Row:
        if draw is None:
            sides = shorter_to(*image.size, self.resize)
            found = array(resized_part(image, sides, centre(*sides, self.size)))
        else:
            found = self._changed(image, draw)
        return {"image": found, "label": label}

    def _changed(self, image: "Image", draw: np.random.Generator) -> np.ndarray:
        assert self.augment is not None
        part = resized_crop(image, crop(draw, *image.size, self.augment), self.size)
        if draw.random() < self.augment.flip:
            part = flipped(part)
        return array(coloured(part, colours(draw, self.augment)))

    # -- masks ----------------------------------------------------------------------------

    def _of_mask(self, image: "Image", mask: np.ndarray, draw: np.random.Generator | None) -> Row:
        sides, box, flip = self._fitted(image.size, draw)
        part, labels = resized_part(image, sides, box), nearest_part(mask, sides, box, flip)
        if draw is not None and self.augment is not None:
            part = coloured(flipped(part) if flip else part, colours(draw, self.augment))
        return {
            "image": array(filled_up(part, self.size)),
            "label": ignored_up(labels, self.size),
        }

    def _fitted(
        self, size: tuple[int, int], draw: np.random.Generator | None
    ) -> tuple[tuple[int, int], Box, bool]:
        """Return the sides after scaling, the part of it that is taken, and whether to flip it."""
        if draw is None or self.augment is None or self.augment.scale is None:
            sides = longer_to(*size, self.size)
            return sides, (0, 0, *sides), False
        scale, flip, x, y = draw.random(4)
        width, height = longer_to(*size, self.size * uniform(scale, *self.augment.scale))
        w, h = min(width, self.size), min(height, self.size)
        left, top = whole(x, width - w), whole(y, height - h)
        return (width, height), (left, top, left + w, top + h), bool(flip < self.augment.flip)
