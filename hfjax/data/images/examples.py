"""Example = f(seed, epoch, number): an image, cropped and augmented, with its label or mask."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hfjax.data.examples import ArrayDict
from hfjax.data.images.augment import (
    Augment,
    color_factors,
    generator,
    random_crop,
    uniform,
    uniform_int,
)
from hfjax.data.images.dataset import ImageSet
from hfjax.data.images.decode import DamagedImageError
from hfjax.data.images.pixels import (
    IGNORED,
    Box,
    adjust_colors,
    center_box,
    crop_and_resize,
    flip_horizontal,
    pad_image,
    pad_labels,
    resize_and_crop,
    resize_labels,
    size_by_longer_side,
    size_by_shorter_side,
    to_array,
)

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class ImageExamples:
    """The examples of a set, for evaluation without `augment`; `skipped_names` failed to decode."""

    data: ImageSet
    size: int
    seed: int
    augment: Augment | None
    resize: int  # the shorter side before the centre crop, to evaluate classes
    skip: bool
    with_mask: bool
    skipped_names: set[str] = field(default_factory=set)

    def example(self, index: int, position: int) -> ArrayDict:
        """Return an example; if it does not decode, the next one that does, or one of mask 0."""
        rng = None
        if self.skip and self.with_mask and self._is_broken(index):
            return self.padding_example()
        if self.augment is not None:
            rng = generator(self.seed, position // len(self.data), index)
        image, label = self._decode(index)
        transform = self._class_example if self.data.kind == "classes" else self._mask_example
        arrays = transform(image, label, rng)
        return {**arrays, "mask": np.ones((), np.float32)} if self.with_mask else arrays

    def _is_broken(self, index: int) -> bool:
        """Return whether an image does not decode; in evaluations each counts once."""
        try:
            _ = self.data[index]
        except DamagedImageError:
            self.skipped_names.add(self.data.names[index])
            return True
        return False

    def _decode(self, start: int) -> tuple["Image", np.ndarray]:
        count = len(self.data)
        for index in range(start, start + count):
            try:
                return self.data[index % count]
            except DamagedImageError:
                if not self.skip:
                    raise
                self.skipped_names.add(self.data.names[index % count])
        raise ValueError(f"{self.data}: none of its images decodes.")

    def padding_example(self) -> ArrayDict:
        """Return a black image of mask 0, with class 0 or ignored labels."""
        image = np.zeros((self.size, self.size, 3), np.uint8)
        label = np.zeros((), np.uint8)
        if self.data.kind == "masks":
            label = np.full((self.size, self.size), IGNORED, np.uint8)
        return {"image": image, "label": label, "mask": np.zeros((), np.float32)}

    def collate(self, examples: list[ArrayDict]) -> ArrayDict:
        """Return examples as a batch; labels are cast from uint8 to int32."""
        types = {"label": np.int32}
        return {
            k: np.stack([example[k] for example in examples], dtype=types.get(k))
            for k in examples[0]
        }

    # -- classes --------------------------------------------------------------------------

    def _class_example(
        self, image: "Image", label: np.ndarray, rng: np.random.Generator | None
    ) -> ArrayDict:
        if rng is None:
            scaled_size = size_by_shorter_side(*image.size, self.resize)
            pixels = to_array(
                resize_and_crop(image, scaled_size, center_box(*scaled_size, self.size))
            )
        else:
            pixels = self._apply_augment(image, rng)
        return {"image": pixels, "label": label}

    def _apply_augment(self, image: "Image", rng: np.random.Generator) -> np.ndarray:
        assert self.augment is not None
        cropped_image = crop_and_resize(
            image, random_crop(rng, *image.size, self.augment), self.size
        )
        if rng.random() < self.augment.flip:
            cropped_image = flip_horizontal(cropped_image)
        return to_array(adjust_colors(cropped_image, color_factors(rng, self.augment)))

    # -- masks ----------------------------------------------------------------------------

    def _mask_example(
        self, image: "Image", mask: np.ndarray, rng: np.random.Generator | None
    ) -> ArrayDict:
        scaled_size, box, flip = self._crop_params(image.size, rng)
        cropped_image, labels = (
            resize_and_crop(image, scaled_size, box),
            resize_labels(mask, scaled_size, box, flip),
        )
        if rng is not None and self.augment is not None:
            cropped_image = adjust_colors(
                flip_horizontal(cropped_image) if flip else cropped_image,
                color_factors(rng, self.augment),
            )
        return {
            "image": to_array(pad_image(cropped_image, self.size)),
            "label": pad_labels(labels, self.size),
        }

    def _crop_params(
        self, size: tuple[int, int], rng: np.random.Generator | None
    ) -> tuple[tuple[int, int], Box, bool]:
        """Return the size after scaling, the box to crop from it, and whether to flip it."""
        if rng is None or self.augment is None or self.augment.scale is None:
            scaled_size = size_by_longer_side(*size, self.size)
            return scaled_size, (0, 0, *scaled_size), False
        scale, flip, x, y = rng.random(4)
        width, height = size_by_longer_side(*size, self.size * uniform(scale, *self.augment.scale))
        w, h = min(width, self.size), min(height, self.size)
        left, top = uniform_int(x, width - w), uniform_int(y, height - h)
        return (width, height), (left, top, left + w, top + h), bool(flip < self.augment.flip)
