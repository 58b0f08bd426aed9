"""torchvision's models of images in training: torch.compile, channels last, bfloat16 by autocast.

They have hfjax's first weights, read hfjax's batches of bytes, and have SGD and the losses of
`hfjax.models.vision.losses`.
"""

# pyright: reportMissingImports=false

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torchvision.models import regnet, resnet
from torchvision.models.segmentation import deeplabv3

from benchmarks.torch_compiled import Program, chosen_device
from hfjax.models.vision.deeplab import DeepLabConfig
from hfjax.models.vision.losses import AUXILIARY, IGNORED
from hfjax.models.vision.regnet import RegNetConfig
from hfjax.models.vision.resnet import ResNetConfig
from hfjax.weights.vision_rules import vision_table

UNREAD = ("running_mean", "running_var", "num_batches_tracked")  # which begin as ours


def _resnet(config: ResNetConfig) -> nn.Module:
    dilated = [block.dilation > 1 for block in config.blocks]
    stages = range(1, len(config.depths))
    last = {block.stage: is_so for block, is_so in zip(config.blocks, dilated, strict=True)}
    return resnet.ResNet(
        resnet.Bottleneck,
        list(config.depths),
        num_classes=config.classes,
        replace_stride_with_dilation=[last[stage] for stage in stages],
    )


def _deeplab(config: DeepLabConfig) -> nn.Module:
    model = deeplabv3._deeplabv3_resnet(_resnet(config), config.classes, config.auxiliary)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # no two libraries drop the same
    return model


def _regnet(config: RegNetConfig) -> nn.Module:
    shape = config.depth, config.first, config.slope, config.step, config.group
    blocks = regnet.BlockParams.from_init_params(*shape, se_ratio=config.squeeze)
    norm = partial(nn.BatchNorm2d, eps=1e-5, momentum=0.1)
    return regnet.RegNet(blocks, config.classes, config.stem, norm_layer=norm)


MODELS = {ResNetConfig: _resnet, DeepLabConfig: _deeplab, RegNetConfig: _regnet}


class WithLoss(nn.Module):
    """A model, from bytes to the loss."""

    def __init__(self, model: nn.Module, config: Any):
        super().__init__()
        self.model = model
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(getattr(config, name)).reshape(1, 3, 1, 1))

    def forward(self, batch: Mapping[str, Any]) -> Any:
        """Return the mean cross entropy of images, or of their pixels."""
        outputs = self.model((batch["image"].float() / 255 - self.mean) / self.std)
        loss = partial(functional.cross_entropy, target=batch["label"], ignore_index=IGNORED)
        if torch.is_tensor(outputs):
            return functional.cross_entropy(outputs, batch["label"])
        return loss(outputs["out"]) + AUXILIARY * loss(outputs["aux"])


class ImageProgram(Program):
    """A model of images under training."""

    def place(self, batch: Mapping[str, np.ndarray]) -> Any:
        """Return images of bytes, channels last in memory, and labels on the device."""
        image = torch.tensor(batch["image"], device=self.device).permute(0, 3, 1, 2)
        label = torch.tensor(batch["label"], dtype=torch.long, device=self.device)
        return {"image": image, "label": label}


def given_weights(model: nn.Module, config: Any, flat: Mapping[str, np.ndarray]) -> None:
    """Give a model hfjax's parameters, by path; running statistics are left as they are."""
    found = {}
    for piece in vision_table(config).expand():
        if piece.path in flat:
            rule, block = piece.rule, flat[piece.path][piece.index]
            turned = block.transpose(np.argsort(rule.order)).reshape(rule.shape)
            found[piece.name] = torch.tensor(np.array(turned))
    told = model.load_state_dict(found, strict=False)
    missing = [name for name in told.missing_keys if not name.endswith(UNREAD)]
    if missing or told.unexpected_keys:
        raise ValueError(f"not in both models: {[*missing, *told.unexpected_keys]}")


def of_images(
    config: Any, flat: Mapping[str, np.ndarray], rate: float, momentum: float
) -> ImageProgram:
    """Return the program of torchvision's model with hfjax's parameters; on a GPU if there is one.

    Args:
        config: The shape, as hfjax has it.
        flat: Its first parameters, by path.
        rate: The learning rate of SGD.
        momentum: Of SGD.
    """
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    model = MODELS[type(config)](config)
    given_weights(model, config, flat)
    whole = WithLoss(model, config).to(chosen_device(), memory_format=torch.channels_last)
    fused = chosen_device() == "cuda"
    sgd = torch.optim.SGD(whole.parameters(), lr=rate, momentum=momentum, fused=fused)
    return ImageProgram(whole.train(), sgd, clip=None)
