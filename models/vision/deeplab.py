"""DeepLabV3 on a ResNet, for semantic segmentation: a stem, blocks, and classifiers."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from hfjax.models.layers import Dropout, run_listed
from hfjax.models.vision.convolutions import (
    Conv,
    ConvNorm,
    fan_in_uniform,
    global_avg_pool,
    resize,
)
from hfjax.models.vision.resnet import (
    PRESETS as RESNETS,
    Features,
    ResNetConfig,
    Stem,
    make_blocks,
)
from hfjax.models.vision.vision_config import CONV_REFUSALS, check_tuple
from hfjax.utils.keywords import check_sizes, is_real

__all__ = ["PRESETS", "DeepLab", "DeepLabConfig"]


@dataclass(frozen=True)
class DeepLabConfig(ResNetConfig):
    """The configuration of a DeepLabV3, with the fields of its ResNet backbone.

    Attributes:
        classes: The number of classes, background included.
        mean: The mean to subtract from uint8 images after division by 255.
        std: The standard deviation to divide them by then.
        norm: batch, frozen or group.
        norm_groups: The number of groups of a group norm.
        block: "basic" or "bottleneck".
        depths: The number of blocks of each stage.
        widths: The channels of the 3x3 of each stage.
        stem: "imagenet" or "small".
        output_stride: The total stride of the backbone: later strides become dilations.
        rates: The dilations of the 3x3 convolutions of the atrous spatial pyramid.
        pyramid: The channels of each of these.
        dropout: The dropout rate before the last convolutions.
        auxiliary: Whether an auxiliary FCN head classifies the output of the second last stage.
        auxiliary_dropout: The dropout rate in that head.

    Example:
        >>> from hfjax.models.vision.deeplab import DeepLabConfig
        >>> config = DeepLabConfig.preset("deeplabv3-resnet101", classes=19)
        >>> config.blocks[-1].dilation, config.rates
        (4, (12, 24, 36))
    """

    classes: int = 21
    output_stride: int | None = 8
    rates: tuple[int, ...] = (12, 24, 36)
    pyramid: int = 256
    dropout: float = 0.5
    auxiliary: bool = True
    auxiliary_dropout: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        owner = type(self).__name__
        check_sizes(owner, self, "pyramid")
        check_tuple(owner, "rates", self.rates)
        for name in ("dropout", "auxiliary_dropout"):
            if not is_real(rate := getattr(self, name), 0, 1):
                raise ValueError(
                    f"{owner}: {name}={rate!r}; the part that is dropped is from 0 to 1."
                )
        if not isinstance(self.auxiliary, bool):
            raise ValueError(f"{owner}: auxiliary={self.auxiliary!r}; true or false.")
        if self.auxiliary and len(self.depths) < 2:
            raise ValueError(
                f"{owner}: auxiliary=True with depths={self.depths}; it classifies what leaves the "
                "stage before the last. Give two stages or more, or auxiliary=False."
            )
        narrow = (self.inside_auxiliary // 4,) if self.auxiliary else ()
        self.check_norms(self.pyramid, *narrow)

    @property
    def inside_auxiliary(self) -> int:
        """The output channels of the second last stage."""
        return [b.out_channels for b in self.blocks if b.stage == len(self.depths) - 2][-1]


PRESETS: Mapping[str, DeepLabConfig] = {
    "deeplabv3-tiny": DeepLabConfig(
        classes=5,
        depths=(1, 1, 1),
        widths=(8, 16, 16),
        stem="small",
        output_stride=2,
        norm_groups=4,
        rates=(2, 4, 6),
        pyramid=16,
    ),
    "deeplabv3-resnet50": DeepLabConfig(),
    "deeplabv3-resnet101": DeepLabConfig(depths=RESNETS["resnet101"].depths),
}

DeepLabConfig.known = PRESETS


class Pyramid(nnx.Module):
    """Atrous spatial pyramid pooling (ASPP): 1x1, dilated 3x3 and whole-image features."""

    def __init__(self, in_channels: int, config: DeepLabConfig, *, rngs: nnx.Rngs) -> None:
        width = config.pyramid
        make_conv = lambda size, in_channels, dilation=1: make_conv_norm(
            (size, size, in_channels, width), config, dilation, rngs
        )
        self.here = make_conv(1, in_channels)
        self.around = nnx.List([make_conv(3, in_channels, rate) for rate in config.rates])
        self.image = make_conv(1, in_channels)
        self.project = make_conv(1, width * (2 + len(config.rates)))
        self.dropout = Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the pyramid features of each position."""
        batch_size, height, width, _ = x.shape
        image = jax.nn.relu(self.image(global_avg_pool(x).reshape(batch_size, 1, 1, -1)))
        image = jnp.broadcast_to(image, (batch_size, height, width, image.shape[3]))
        each = [jax.nn.relu(conv(x)) for conv in (self.here, *self.around)]
        features = jnp.concatenate([*each, image], axis=3)
        return self.dropout(jax.nn.relu(self.project(features)))


class Classifier(nnx.Module):
    """A 3x3 convolution and a norm, then a 1x1 to the classes."""

    def __init__(
        self, in_channels: int, width: int, config: DeepLabConfig, dropout: float, *, rngs: nnx.Rngs
    ) -> None:
        self.inner = make_conv_norm((3, 3, in_channels, width), config, 1, rngs)
        self.dropout = Dropout(dropout, rngs=rngs)
        self.outer = Conv(
            (1, 1, width, config.classes), bias=True, kernel_init=fan_in_uniform(width), rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the logits of each position."""
        return self.outer(self.dropout(jax.nn.relu(self.inner(x))))


def make_conv_norm(
    shape: tuple[int, int, int, int], config: DeepLabConfig, dilation: int, rngs: nnx.Rngs
) -> ConvNorm:
    """Return a convolution and its norm, initialised as torch's defaults."""
    init = fan_in_uniform(shape[0] * shape[1] * shape[2])
    return ConvNorm(Conv(shape, dilation=dilation, kernel_init=init, rngs=rngs), config, rngs=rngs)


class DeepLab(nnx.Module):
    """DeepLabV3; `layers` is the list of the backbone's blocks.

    The outputs are {"out": logits [B, H, W, classes], "aux": the auxiliary classifier's logits}, in
    evaluations too; without `auxiliary` there is no "aux".
    """

    refuses: ClassVar[Mapping[str, str]] = CONV_REFUSALS

    def __init__(self, config: DeepLabConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.stem = Stem(config, rngs=rngs)
        self.layers = make_blocks(config, rngs)
        before_last = sum(config.depths[:-1])
        if config.auxiliary:
            self.layers[before_last - 1].keeps = True
        in_channels = config.inside_auxiliary if config.auxiliary else 0
        self.pyramid = Pyramid(config.blocks[-1].out_channels, config, rngs=rngs)
        self.classifier = Classifier(config.pyramid, config.pyramid, config, 0.0, rngs=rngs)
        make_auxiliary = partial(
            Classifier, in_channels, in_channels // 4, config, config.auxiliary_dropout, rngs=rngs
        )
        self.auxiliary = make_auxiliary() if config.auxiliary else None

    def embed(self, batch: Mapping[str, jax.Array]) -> Features:
        """Return the input of the first block from `batch["image"]` [B, H, W, 3], of any size."""
        x = self.stem(batch)
        _, height, width, _ = batch["image"].shape
        return Features(x, None, height, width)

    def head(self, features: Features) -> dict[str, jax.Array]:
        """Return the logits of each pixel."""
        full = lambda logits: resize(logits, (features.height, features.width))
        outputs = {"out": full(self.classifier(self.pyramid(features.x)))}
        if self.auxiliary is not None and features.aux_input is not None:
            outputs["aux"] = full(self.auxiliary(features.aux_input))
        return outputs

    def __call__(self, batch: Mapping[str, jax.Array]) -> dict[str, Any]:
        return self.head(run_listed(self.layers, self.embed(batch)))
