"""ResNets: a stem, blocks, and average pooling with a linear map.

The stride of a bottleneck is in its 3x3, as in torchvision (v1.5). A segmentation model keeps the
resolution of later stages: their strides become dilations.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
from flax import nnx

from hfjax.models.layers import Linear, run_listed
from hfjax.models.vision.convolutions import (
    Conv,
    ConvNorm,
    fan_in_uniform,
    global_avg_pool,
    max_pool,
)
from hfjax.models.vision.image_input import normalize_images
from hfjax.models.vision.norms import make_norm
from hfjax.models.vision.vision_config import CONV_REFUSALS, ConvNetConfig, check_tuple
from hfjax.utils.keywords import is_int

__all__ = ["PRESETS", "ResNet", "ResNetConfig"]

EXPANSION = {"basic": 1, "bottleneck": 4}  # output channels of a block / its width
STEM_STRIDES = {"imagenet": 4, "small": 1}  # the total stride of each stem


class BlockShape(NamedTuple):
    """The position and shape of a block.

    Attributes:
        stage: The number of its stage, from 0 on.
        number: Its number in the stage.
        in_channels: The input channels.
        width: The channels of its 3x3.
        out_channels: The output channels.
        stride: The stride of its first 3x3.
        dilation: The dilation of its first 3x3.
    """

    stage: int
    number: int
    in_channels: int
    width: int
    out_channels: int
    stride: int
    dilation: int

    @property
    def skips(self) -> bool:
        """Whether the skip connection is the identity; else it is a 1x1 and a norm."""
        return self.stride == 1 and self.in_channels == self.out_channels


@dataclass(frozen=True)
class ResNetConfig(ConvNetConfig):
    """The configuration of a ResNet.

    Attributes:
        classes: The number of classes.
        mean: The mean to subtract from uint8 images after division by 255.
        std: The standard deviation to divide them by then.
        norm: batch, frozen or group.
        norm_groups: The number of groups of a group norm.
        block: "basic" (two 3x3) or "bottleneck" (a 3x3 between two 1x1, four times as wide).
        depths: The number of blocks of each stage.
        widths: The channels of the 3x3 of each stage; the stem has those of the first.
        stem: "imagenet" (7x7 and a pool: a stride of 4) or "small" (3x3, for small images).
        output_stride: The maximum total stride: strides beyond become dilations. None: each stage
            but the first has a stride of 2.

    Example:
        >>> from hfjax.models.vision.resnet import ResNetConfig
        >>> len(ResNetConfig(depths=(3, 4, 23, 3)).blocks)
        33
    """

    block: str = "bottleneck"
    depths: tuple[int, ...] = (3, 4, 6, 3)
    widths: tuple[int, ...] = (64, 128, 256, 512)
    stem: str = "imagenet"
    output_stride: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        owner = type(self).__name__
        for name, allowed in (("block", EXPANSION), ("stem", STEM_STRIDES)):
            if (setting := getattr(self, name)) not in allowed:
                raise ValueError(f"{owner}: {name}={setting!r}; one of {', '.join(allowed)}.")
        check_tuple(owner, "depths", self.depths)
        check_tuple(owner, "widths", self.widths, len(self.depths))
        self._check_stride(owner)
        self.check_norms(*self.widths)

    def _check_stride(self, owner: str) -> None:
        """Refuse an output stride that the stages cannot produce, and dilated basic blocks."""
        stem_stride = STEM_STRIDES[self.stem]
        allowed = [stem_stride * 2**n for n in range(len(self.depths))]
        stride = self.output_stride
        if stride is not None and not (is_int(stride, 1) and stride in allowed):
            raise ValueError(
                f"{owner}: output_stride={stride!r}; one of {', '.join(map(str, allowed))} with "
                f'stem="{self.stem}" and {len(self.depths)} stages, or None.'
            )
        if stride not in (None, allowed[-1]) and self.block == "basic":
            raise ValueError(
                f"{owner}: output_stride={stride} dilates blocks, and basic blocks are not dilated "
                '(torchvision has none). Choose block="bottleneck".'
            )

    @property
    def blocks(self) -> list[BlockShape]:
        """The shape of each block, in order."""
        shapes: list[BlockShape] = []
        in_channels, total_stride, dilation = self.widths[0], STEM_STRIDES[self.stem], 1
        for stage, (depth, width) in enumerate(zip(self.depths, self.widths, strict=True)):
            out_channels, first_dilation = width * EXPANSION[self.block], dilation
            stride = 1 if stage == 0 else 2
            if stride == 2 and total_stride == self.output_stride:
                stride, dilation = 1, 2 * dilation
            total_stride *= stride
            shapes += [
                BlockShape(stage, 0, in_channels, width, out_channels, stride, first_dilation)
            ]
            make_shape = partial(
                BlockShape, in_channels=out_channels, width=width, out_channels=out_channels
            )
            shapes += [make_shape(stage, n, stride=1, dilation=dilation) for n in range(1, depth)]
            in_channels = out_channels
        return shapes


_RESNET = ResNetConfig()
PRESETS: Mapping[str, ResNetConfig] = {
    "resnet-tiny": ResNetConfig(
        classes=10, block="basic", depths=(1, 1), widths=(16, 32), stem="small", norm_groups=4
    ),
    "resnet18": replace(_RESNET, block="basic", depths=(2, 2, 2, 2)),
    "resnet34": replace(_RESNET, block="basic"),
    "resnet50": _RESNET,
    "resnet101": replace(_RESNET, depths=(3, 4, 23, 3)),
}

ResNetConfig.known = PRESETS


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["x", "aux_input"],
    meta_fields=["height", "width"],
)
@dataclass(frozen=True)
class Features:
    """The values passed between blocks of a segmentation model; the image size is static.

    Attributes:
        x: The output of a block.
        aux_input: The output of the second last stage, once it has run.
        height: The height of the image.
        width: The width of the image.
    """

    x: jax.Array
    aux_input: jax.Array | None
    height: int
    width: int


class Stem(nnx.Module):
    """The stem: a convolution, a norm, and a pool of stride 2 unless it is small."""

    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs) -> None:
        self.small = config.stem == "small"
        size, stride = (3, 1) if self.small else (7, 2)
        self.conv = Conv((size, size, 3, config.widths[0]), stride=stride, rngs=rngs)
        self.norm = make_norm(config, config.widths[0], rngs=rngs)
        self.config = config

    def __call__(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Return the input of the first block from the images of a batch."""
        image = normalize_images(batch, self.config, self.conv.kernel[...].dtype)
        x = jax.nn.relu(self.norm(self.conv(image)))
        return x if self.small else max_pool(x)


class Block(nnx.Module):
    """Two 3x3 convolutions, or one between two 1x1, added to the input.

    Given `Features` it replaces `x`; with `keeps` it also sets `aux_input` to its output.
    """

    def __init__(self, shape: BlockShape, config: ResNetConfig, *, rngs: nnx.Rngs) -> None:
        in_channels, width, out_channels = shape.in_channels, shape.width, shape.out_channels
        first = partial(Conv, stride=shape.stride, dilation=shape.dilation, rngs=rngs)
        norm = partial(make_norm, config, rngs=rngs)
        narrows = config.block == "bottleneck"
        if narrows:
            self.conv1 = Conv((1, 1, in_channels, width), rngs=rngs)
            self.conv2 = first((3, 3, width, width))
        else:
            self.conv1 = first((3, 3, in_channels, width))
            self.conv2 = Conv((3, 3, width, width), rngs=rngs)
        self.conv3 = Conv((1, 1, width, out_channels), rngs=rngs) if narrows else None
        self.norm1, self.norm2 = norm(width), norm(width)
        self.norm3 = norm(out_channels) if narrows else None
        skip = partial(Conv, (1, 1, in_channels, out_channels), stride=shape.stride, rngs=rngs)
        self.skip = None if shape.skips else ConvNorm(skip(), config, rngs=rngs)
        self.keeps = False

    def __call__(self, stream: Any) -> Any:
        """Return the output of the block, as `Features` if the input is."""
        if not isinstance(stream, Features):
            return self._add_residual(stream)
        x = self._add_residual(stream.x)
        return replace(stream, x=x, aux_input=x if self.keeps else stream.aux_input)

    def _add_residual(self, x: jax.Array) -> jax.Array:
        y = self.norm2(self.conv2(jax.nn.relu(self.norm1(self.conv1(x)))))
        if self.conv3 is not None and self.norm3 is not None:
            y = self.norm3(self.conv3(jax.nn.relu(y)))
        return jax.nn.relu(y + (x if self.skip is None else self.skip(x)))


def make_blocks(config: ResNetConfig, rngs: nnx.Rngs) -> nnx.List:
    """Return the blocks of a ResNet."""
    return nnx.List([Block(shape, config, rngs=rngs) for shape in config.blocks])


class ResNet(nnx.Module):
    """A ResNet; `layers` is a list of blocks, each unsharded by itself.

    Checkpoint names in each layer, for remat: conv, the output of a convolution.
    """

    refuses: ClassVar[Mapping[str, str]] = CONV_REFUSALS

    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.stem = Stem(config, rngs=rngs)
        self.layers = make_blocks(config, rngs)
        in_channels = config.blocks[-1].out_channels
        init = fan_in_uniform(in_channels)
        shape, axes = (in_channels, config.classes), ("channel_in", "class")
        self.fc = Linear(shape, axes, 1, init, bias=init, rngs=rngs)

    def embed(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Return the input of the first block from `batch["image"]` [B, H, W, 3]."""
        return self.stem(batch)

    def head(self, x: jax.Array) -> jax.Array:
        """Return the logits [B, classes]."""
        return self.fc(global_avg_pool(x))

    def __call__(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        return self.head(run_listed(self.layers, self.embed(batch)))
