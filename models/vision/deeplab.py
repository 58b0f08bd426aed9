"""DeepLabV3 on a ResNet: what each pixel shows. In three parts: stem, blocks, classifiers."""

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
    by_inputs,
    mean_of_positions,
    resized,
)
from hfjax.models.vision.resnet import (
    PRESETS as RESNETS,
    Features,
    ResNetConfig,
    Stem,
    blocks_of,
)
from hfjax.models.vision.vision_config import OF_CONVOLUTIONS, check_tuple
from hfjax.utils.keywords import check_sizes, is_real

__all__ = ["PRESETS", "DeepLab", "DeepLabConfig"]


@dataclass(frozen=True)
class DeepLabConfig(ResNetConfig):
    """The shape of a DeepLabV3; its backbone is a ResNet, whose fields it has.

    Attributes:
        classes: The number of classes, the background among them.
        mean: What is subtracted from images of bytes, once they are divided by 255.
        std: What they are divided by then.
        norm: batch, frozen or group.
        norm_groups: How many groups the channels of a group norm are in.
        block: "basic" or "bottleneck".
        depths: The number of blocks of each stage.
        widths: The channels of the 3x3 of each stage.
        stem: "imagenet" or "small".
        output_stride: How many pixels of a side become one: strides beyond become dilations.
        rates: The dilations of the 3x3 that look around a position (atrous spatial pyramid).
        pyramid: The channels of each of these.
        dropout: The part that is dropped before the last convolutions.
        auxiliary: Whether the stage before the last is trained to classify too, by an FCN head.
        auxiliary_dropout: The part that is dropped there.

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
        what = type(self).__name__
        check_sizes(what, self, "pyramid")
        check_tuple(what, "rates", self.rates)
        for name in ("dropout", "auxiliary_dropout"):
            if not is_real(given := getattr(self, name), 0, 1):
                raise ValueError(
                    f"{what}: {name}={given!r}; the part that is dropped is from 0 to 1."
                )
        if not isinstance(self.auxiliary, bool):
            raise ValueError(f"{what}: auxiliary={self.auxiliary!r}; true or false.")
        if self.auxiliary and len(self.depths) < 2:
            raise ValueError(
                f"{what}: auxiliary=True with depths={self.depths}; it classifies what leaves the "
                "stage before the last. Give two stages or more, or auxiliary=False."
            )
        narrow = (self.inside_auxiliary // 4,) if self.auxiliary else ()
        self.check_norms(self.pyramid, *narrow)

    @property
    def inside_auxiliary(self) -> int:
        """The channels that leave the stage before the last."""
        return [b.outside for b in self.blocks if b.stage == len(self.depths) - 2][-1]


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
    """What a position shows with what is around it, near and far, and in the whole image (ASPP)."""

    def __init__(self, inside: int, config: DeepLabConfig, *, rngs: nnx.Rngs) -> None:
        width = config.pyramid
        made = lambda size, inside, dilation=1: convolved(
            (size, size, inside, width), config, dilation, rngs
        )
        self.here = made(1, inside)
        self.around = nnx.List([made(3, inside, rate) for rate in config.rates])
        self.image = made(1, inside)
        self.project = made(1, width * (2 + len(config.rates)))
        self.dropout = Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the channels of each position."""
        rows, height, width, _ = x.shape
        whole = jax.nn.relu(self.image(mean_of_positions(x).reshape(rows, 1, 1, -1)))
        whole = jnp.broadcast_to(whole, (rows, height, width, whole.shape[3]))
        each = [jax.nn.relu(conv(x)) for conv in (self.here, *self.around)]
        joined = jnp.concatenate([*each, whole], axis=3)
        return self.dropout(jax.nn.relu(self.project(joined)))


class Classifier(nnx.Module):
    """A 3x3 and a norm, then what each position is: a 1x1 to the classes."""

    def __init__(
        self, inside: int, width: int, config: DeepLabConfig, dropout: float, *, rngs: nnx.Rngs
    ) -> None:
        self.inner = convolved((3, 3, inside, width), config, 1, rngs)
        self.dropout = Dropout(dropout, rngs=rngs)
        self.outer = Conv(
            (1, 1, width, config.classes), bias=True, draw=by_inputs(width), rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return logits of each position."""
        return self.outer(self.dropout(jax.nn.relu(self.inner(x))))


def convolved(
    shape: tuple[int, int, int, int], config: DeepLabConfig, dilation: int, rngs: nnx.Rngs
) -> ConvNorm:
    """Return a convolution and its norm that begin as torch's own do."""
    draw = by_inputs(shape[0] * shape[1] * shape[2])
    return ConvNorm(Conv(shape, dilation=dilation, draw=draw, rngs=rngs), config, rngs=rngs)


class DeepLab(nnx.Module):
    """DeepLabV3; `layers` is the list of the backbone's blocks.

    The outputs are {"out": logits [B, H, W, classes], "aux": those of the auxiliary classifier},
    in evaluations too; without `auxiliary` there is no "aux".
    """

    refuses: ClassVar[Mapping[str, str]] = OF_CONVOLUTIONS

    def __init__(self, config: DeepLabConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.stem = Stem(config, rngs=rngs)
        self.layers = blocks_of(config, rngs)
        before_last = sum(config.depths[:-1])
        if config.auxiliary:
            self.layers[before_last - 1].keeps = True
        inside = config.inside_auxiliary if config.auxiliary else 0
        self.pyramid = Pyramid(config.blocks[-1].outside, config, rngs=rngs)
        self.classifier = Classifier(config.pyramid, config.pyramid, config, 0.0, rngs=rngs)
        made = partial(Classifier, inside, inside // 4, config, config.auxiliary_dropout, rngs=rngs)
        self.auxiliary = made() if config.auxiliary else None

    def embed(self, batch: Mapping[str, jax.Array]) -> Features:
        """Return what the first block is given of `batch["image"]` [B, H, W, 3], of any size."""
        x = self.stem(batch)
        _, height, width, _ = batch["image"].shape
        return Features(x, None, height, width)

    def head(self, features: Features) -> dict[str, jax.Array]:
        """Return the logits of each pixel."""
        full = lambda logits: resized(logits, (features.height, features.width))
        found = {"out": full(self.classifier(self.pyramid(features.x)))}
        if self.auxiliary is not None and features.kept is not None:
            found["aux"] = full(self.auxiliary(features.kept))
        return found

    def __call__(self, batch: Mapping[str, jax.Array]) -> dict[str, Any]:
        return self.head(run_listed(self.layers, self.embed(batch)))
