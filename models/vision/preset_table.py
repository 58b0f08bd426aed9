"""The named shapes of all models of images."""

from collections.abc import Mapping

from hfjax.models.vision import deeplab, regnet, resnet, vit
from hfjax.models.vision.vision_config import VisionConfig

PRESETS: Mapping[str, VisionConfig] = {
    **resnet.PRESETS,
    **regnet.PRESETS,
    **deeplab.PRESETS,
    **vit.PRESETS,
}
