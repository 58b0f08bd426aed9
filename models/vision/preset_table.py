"""The presets of all vision models."""

from collections.abc import Mapping

from hfjax.models.vision import deeplab, regnet, resnet, vit
from hfjax.models.vision.vision_config import VisionConfig

PRESETS: Mapping[str, VisionConfig] = {
    **resnet.PRESETS,
    **regnet.PRESETS,
    **deeplab.PRESETS,
    **vit.PRESETS,
}
