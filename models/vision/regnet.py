"""RegNet-Y: a stem, blocks with squeeze and excitation, and a linear map.

Four numbers give the widths of all blocks (Radosavovic et al., 2020), as torchvision rounds them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, NamedTuple

import jax
from flax import nnx

from hfjax.models.layers import Linear, run_listed
from hfjax.models.vision.convolutions import Conv, ConvNorm, global_avg_pool
from hfjax.models.vision.image_input import normalize_images
from hfjax.models.vision.vision_config import CONV_REFUSALS, ConvNetConfig
from hfjax.utils.keywords import check_sizes, is_real

__all__ = ["PRESETS", "RegNet", "RegNetConfig"]

QUANTUM = 8  # widths are multiples of it


class RegNetBlockShape(NamedTuple):
    """The position and shape of a block.

    Attributes:
        stage: The number of its stage, from 0 on.
        number: Its number in the stage.
        in_channels: The input channels.
        out_channels: The output channels, also of all its convolutions.
        group: The channels of a group of its 3x3.
        squeezed: The channels between squeeze and excitation.
        stride: The stride of its 3x3.
    """

    stage: int
    number: int
    in_channels: int
    out_channels: int
    group: int
    squeezed: int
    stride: int

    @property
    def skips(self) -> bool:
        """Whether the skip connection is the identity; else it is a 1x1 and a norm."""
        return self.stride == 1 and self.in_channels == self.out_channels


@dataclass(frozen=True)
class RegNetConfig(ConvNetConfig):
    """The configuration of a RegNet-Y.

    Attributes:
        classes: The number of classes.
        mean: The mean to subtract from uint8 images after division by 255.
        std: The standard deviation to divide them by then.
        norm: batch, frozen or group.
        norm_groups: The number of groups of a group norm.
        depth: The number of blocks.
        first: The width of the first block (w_0), a multiple of 8.
        slope: The increase in width per block (w_a), before widths are rounded.
        step: The ratio between the widths that they are rounded to (w_m), above 1.
        group: The channels of a group of the 3x3.
        squeeze: Channels between squeeze and excitation, as a fraction of the block's input.
        stem: The channels of the stem.

    Example:
        >>> from hfjax.models.vision.regnet import RegNetConfig
        >>> [(width, depth) for width, _, depth in RegNetConfig.preset("regnet-y-400mf").stages]
        [(48, 1), (104, 3), (208, 6), (440, 6)]
    """

    depth: int = 16
    first: int = 48
    slope: float = 27.89
    step: float = 2.09
    group: int = 8
    squeeze: float = 0.25
    stem: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        owner = type(self).__name__
        check_sizes(owner, self, "depth", "first", "group", "stem")
        if self.first % QUANTUM:
            raise ValueError(
                f"{owner}: first={self.first}; a multiple of {QUANTUM} is expected, as all widths "
                "are."
            )
        for name, least, above in (("slope", 0, False), ("step", 1, True), ("squeeze", 0, True)):
            number = getattr(self, name)
            if not is_real(number, least, 1e9) or (above and number <= least):
                relation = "above" if above else "at least"
                raise ValueError(
                    f"{owner}: {name}={number!r}; a number {relation} {least} is expected."
                )
        self.check_norms(self.stem, *(width for width, _, _ in self.stages))

    @property
    def stages(self) -> list[tuple[int, int, int]]:
        """The width, the channels of a group, and the number of blocks of each stage."""
        powers = [
            round(math.log((self.first + n * self.slope) / self.first) / math.log(self.step))
            for n in range(self.depth)
        ]
        widths = [QUANTUM * round(self.first * self.step**n / QUANTUM) for n in powers]
        stages = []
        for width, repeats in groupby(widths):
            group = min(self.group, width)
            stages.append((_round_to_group(width, group), group, len(list(repeats))))
        return stages

    @property
    def blocks(self) -> list[RegNetBlockShape]:
        """The shape of each block, in order."""
        shapes, in_channels = [], self.stem
        for stage, (width, group, depth) in enumerate(self.stages):
            for number in range(depth):
                squeezed, stride = round(self.squeeze * in_channels), 2 if number == 0 else 1
                shapes.append(
                    RegNetBlockShape(stage, number, in_channels, width, group, squeezed, stride)
                )
                in_channels = width
        return shapes


def _round_to_group(width: int, group: int) -> int:
    """Return the nearest multiple of a group that is not smaller by more than a tenth.

    >>> _round_to_group(112, 24), _round_to_group(8, 24)
    (120, 24)
    """
    rounded = max(group, (width + group // 2) // group * group)
    return rounded + group if rounded < 0.9 * width else rounded


def _make_preset(depth: int, first: int, slope: float, step: float, group: int) -> RegNetConfig:
    return RegNetConfig(depth=depth, first=first, slope=slope, step=step, group=group)


PRESETS: Mapping[str, RegNetConfig] = {
    "regnet-tiny": RegNetConfig(
        classes=10, depth=3, first=16, slope=8.0, step=2.0, group=8, stem=8, norm_groups=4
    ),
    "regnet-y-400mf": _make_preset(16, 48, 27.89, 2.09, 8),
    "regnet-y-800mf": _make_preset(14, 56, 38.84, 2.4, 16),
    "regnet-y-1.6gf": _make_preset(27, 48, 20.71, 2.65, 24),
    "regnet-y-3.2gf": _make_preset(21, 80, 42.63, 2.66, 24),
    "regnet-y-8gf": _make_preset(17, 192, 76.82, 2.19, 56),
    "regnet-y-16gf": _make_preset(18, 200, 106.23, 2.48, 112),
    "regnet-y-32gf": _make_preset(20, 232, 115.89, 2.53, 232),
    "regnet-y-128gf": _make_preset(27, 456, 160.83, 2.52, 264),
}

RegNetConfig.known = PRESETS


class SqueezeExcitation(nnx.Module):
    """Scales channels by weights from 0 to 1, two linear maps of their means over the image."""

    def __init__(self, in_channels: int, squeezed: int, *, rngs: nnx.Rngs) -> None:
        self.squeeze = Conv((1, 1, in_channels, squeezed), bias=True, rngs=rngs)
        self.excite = Conv((1, 1, squeezed, in_channels), bias=True, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the scaled channels."""
        mean = global_avg_pool(x).reshape(x.shape[0], 1, 1, -1)
        return x * jax.nn.sigmoid(self.excite(jax.nn.relu(self.squeeze(mean))))


class RegNetBlock(nnx.Module):
    """A grouped 3x3 between two 1x1, with squeeze and excitation, added to the input."""

    def __init__(self, shape: RegNetBlockShape, config: RegNetConfig, *, rngs: nnx.Rngs) -> None:
        in_channels, out_channels = shape.in_channels, shape.out_channels
        make_conv = lambda size, in_channels, stride=1: ConvNorm(
            Conv((size, size, in_channels, out_channels), stride=stride, rngs=rngs),
            config,
            rngs=rngs,
        )
        self.skip = None if shape.skips else make_conv(1, in_channels, shape.stride)
        self.narrow = make_conv(1, in_channels)
        self.grouped = make_conv(3, shape.group, shape.stride)
        self.weigh = SqueezeExcitation(out_channels, shape.squeezed, rngs=rngs)
        self.widen = make_conv(1, out_channels)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the output of the block."""
        y = jax.nn.relu(self.grouped(jax.nn.relu(self.narrow(x))))
        y = self.widen(self.weigh(y))
        return jax.nn.relu((x if self.skip is None else self.skip(x)) + y)


class RegNet(nnx.Module):
    """A RegNet-Y; `layers` is a list of blocks, each unsharded by itself.

    Checkpoint names in each layer, for remat: conv, the output of a convolution.
    """

    refuses: ClassVar[Mapping[str, str]] = CONV_REFUSALS

    def __init__(self, config: RegNetConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        conv = Conv((3, 3, 3, config.stem), stride=2, rngs=rngs)
        self.stem = ConvNorm(conv, config, rngs=rngs)
        self.layers = nnx.List([RegNetBlock(shape, config, rngs=rngs) for shape in config.blocks])
        shape, axes = (config.blocks[-1].out_channels, config.classes), ("channel_in", "class")
        self.fc = Linear(shape, axes, 1, 0.01, rngs=rngs)

    def embed(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Return the input of the first block from `batch["image"]` [B, H, W, 3]."""
        image = normalize_images(batch, self.config, self.stem.conv.kernel[...].dtype)
        return jax.nn.relu(self.stem(image))

    def head(self, x: jax.Array) -> jax.Array:
        """Return the logits [B, classes]."""
        return self.fc(global_avg_pool(x))

    def __call__(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        return self.head(run_listed(self.layers, self.embed(batch)))
