"""The configuration fields that all vision models share, and their checks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hfjax.models.model_config import Presets
from hfjax.utils.keywords import check_sizes, is_int, is_real

# Mesh axes that vision models do not support, with advice: hfjax.layout refuses them.
IMAGE_REFUSALS: Mapping[str, str] = {
    "context": "CONTEXT shares long rows of tokens, and images are none. Use data or fsdp.",
    "row": "GRID is not for models of images. Use data or fsdp, for a ViT also tensor.",
}
CONV_REFUSALS: Mapping[str, str] = {
    **IMAGE_REFUSALS,
    "tensor": "TENSOR and SEQUENCE do not split convolutions. Use data or fsdp.",
}
NORMS = ("batch", "group", "frozen")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet


@dataclass(frozen=True)
class VisionConfig(Presets):
    """The configuration that every vision model has.

    Attributes:
        classes: The number of classes.
        mean: The mean to subtract from uint8 images after division by 255.
        std: The standard deviation to divide them by then.
    """

    classes: int = 1000
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD

    def __post_init__(self) -> None:
        owner = type(self).__name__
        check_sizes(owner, self, "classes")
        for name, least in (("mean", -math.inf), ("std", 0.0)):
            numbers = getattr(self, name)
            fits = isinstance(numbers, tuple) and len(numbers) == 3
            if not fits or not all(is_real(x, -1e30, 1e30) and x > least for x in numbers):
                above = " above 0" if least == 0 else ""
                raise ValueError(
                    f"{owner}: {name}={numbers!r}; three finite numbers{above} are expected, "
                    "of red, green and blue. Those of ImageNet are "
                    f"{MEAN if name == 'mean' else STD}."
                )


@dataclass(frozen=True)
class ConvNetConfig(VisionConfig):
    """The configuration that every convolutional model has.

    Attributes:
        norm: The norm after each convolution: "batch" (over all examples, running statistics in
            evaluations), "frozen" (running statistics always; nothing of it is trained), or
            "group" (within an example).
        norm_groups: The number of groups of a group norm.
    """

    norm: str = "batch"
    norm_groups: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        owner = type(self).__name__
        check_sizes(owner, self, "norm_groups")
        if self.norm not in NORMS:
            raise ValueError(f"{owner}: norm={self.norm!r}; one of {', '.join(NORMS)}.")

    def check_norms(self, *widths: int) -> None:
        """Refuse channels that are not divisible into the groups of a group norm."""
        for width in widths if self.norm == "group" else ():
            if width % self.norm_groups:
                raise ValueError(
                    f"{type(self).__name__}: {width} channels do not divide into "
                    f"norm_groups={self.norm_groups}. Choose a number that divides all widths."
                )


def check_tuple(owner: str, name: str, numbers: Any, count: int | None = None) -> None:
    """Refuse anything but a tuple of positive integers, of length `count` if given."""
    fits = isinstance(numbers, tuple) and len(numbers) > 0 and all(map(is_int, numbers))
    if not fits or len(numbers) != (count or len(numbers)):
        expected = "whole numbers" if count is None else f"{count} whole numbers"
        raise ValueError(
            f"{owner}: {name}={numbers!r}; a tuple of {expected}, at least 1 each, is expected."
        )
