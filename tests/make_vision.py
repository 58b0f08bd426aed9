"""Writes tests/vision.npz: what torchvision makes of small models, in float64.

Run it where torch and torchvision are installed (jax is not needed):

    PYTHONPATH=. python tests/make_vision.py

Of each model: logits in both modes, loss, gradients, and after three steps of SGD parameters and
statistics. Of a tensor one number is kept (vision_draws.told); weights are drawn from their names.
"""

# pyright: reportMissingImports=false

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torchvision.models import regnet, resnet, vision_transformer
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.segmentation.deeplabv3 import ASPP, DeepLabV3
from torchvision.models.segmentation.fcn import FCNHead
from torchvision.ops.misc import FrozenBatchNorm2d

from tests.vision_draws import CLASSES, MOMENTUM, RATE, SMOOTHING, STEPS, batch, drawn, told

NARROWER = 8  # widths of 8, 16, 32 and 64


class Narrow(resnet.ResNet):
    """torchvision's ResNet with an eighth of its channels."""

    def __init__(self, block: Any, depths: list[int], **more: Any):
        super().__init__(block, depths, **more)
        self.fc = nn.Linear(512 // NARROWER * block.expansion, CLASSES)

    def __setattr__(self, name: str, value: Any):
        first = name == "inplanes" and name not in vars(self)
        super().__setattr__(name, value // NARROWER if first else value)

    def _make_layer(self, block: Any, planes: int, *more: Any, **named: Any):
        return super()._make_layer(block, planes // NARROWER, *more, **named)


def small_stem(model: Any) -> Any:
    """Return a ResNet that begins with a 3x3 at every position."""
    model.conv1 = nn.Conv2d(3, 64 // NARROWER, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def deeplab() -> nn.Module:
    """Return a DeepLabV3 with narrow parts, which drops nothing."""
    dilated = [False, True, True]
    backbone = Narrow(resnet.Bottleneck, [1, 1, 2, 1], replace_stride_with_dilation=dilated)
    whole = IntermediateLayerGetter(backbone, {"layer4": "out", "layer3": "aux"})
    inside = 512 // NARROWER * 4
    head = nn.Sequential(
        ASPP(inside, (2, 4, 6), 16),
        nn.Conv2d(16, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, CLASSES, 1),
    )
    model = DeepLabV3(whole, head, FCNHead(inside // 2, CLASSES))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def regnet_y() -> nn.Module:
    """Return a RegNet-Y of three blocks."""
    sizes: Any = {"depth": 3, "w_0": 16, "w_a": 8.0, "w_m": 2.0, "group_width": 8}
    params = regnet.BlockParams.from_init_params(**sizes, se_ratio=0.25)
    return regnet.RegNet(params, num_classes=CLASSES, stem_width=8)


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "basic": lambda: small_stem(Narrow(resnet.BasicBlock, [1, 2, 1, 1])),
    "bottleneck": lambda: Narrow(resnet.Bottleneck, [1, 2, 1, 1]),
    "frozen": lambda: Narrow(resnet.Bottleneck, [1, 1, 1, 1], norm_layer=FrozenBatchNorm2d),
    "group": lambda: Narrow(resnet.BasicBlock, [1, 1, 1, 1], norm_layer=partial(nn.GroupNorm, 4)),
    "regnet": regnet_y,
    "deeplab": deeplab,
    "vit": lambda: vision_transformer.VisionTransformer(8, 2, 2, 2, 32, 64, num_classes=CLASSES),
}


def filled(model: nn.Module) -> nn.Module:
    """Return the model in float64 with weights drawn from their names."""
    model = model.double()
    for name, x in model.state_dict().items():
        if x.is_floating_point():
            x.copy_(torch.from_numpy(drawn(name, tuple(x.shape))))
    return model


def loss_of(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return what the references of torchvision train on."""
    if isinstance(outputs, Mapping):
        of = {k: functional.cross_entropy(x, labels, ignore_index=255) for k, x in outputs.items()}
        return of["out"] + 0.5 * of["aux"]
    return functional.cross_entropy(outputs, labels, label_smoothing=SMOOTHING)


def given(case: str, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and labels of a step as torch has them."""
    made = batch(case, number)
    image = torch.from_numpy(np.ascontiguousarray(made["image"].transpose(0, 3, 1, 2)))
    return image, torch.from_numpy(made["label"])


def logits_of(outputs: Any) -> dict[str, np.ndarray]:
    """Return logits by name, channels last; one number for each pixel."""
    if not isinstance(outputs, Mapping):
        return {"logits": outputs.detach().numpy()}
    last = {k: x.detach().numpy().transpose(0, 2, 3, 1) for k, x in outputs.items()}
    weights = np.arange(1, CLASSES + 1)
    return {k: x @ weights for k, x in last.items()}


def expected(case: str) -> dict[str, np.ndarray]:
    """Return all that is kept of a model."""
    model = filled(MODELS[case]())
    found: dict[str, Any] = {}
    with torch.no_grad():
        outputs = logits_of(model.eval()(given(case, 0)[0]))
        found |= {f"eval/{name}": x for name, x in outputs.items()}
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM)
    for number in range(STEPS):
        image, labels = given(case, number)
        outputs = model(image)
        loss = loss_of(outputs, labels)
        optimizer.zero_grad()
        loss.backward()
        if number == 0:
            found |= {f"train/{name}": x for name, x in logits_of(outputs).items()}
            found["loss"] = loss.item()
            for name, x in model.named_parameters():
                found[f"gradient/{name}"] = told(name, x.grad.numpy())
        optimizer.step()
    for name, x in model.state_dict().items():
        if x.is_floating_point():
            found[f"after/{name}"] = told(name, x.numpy())
    return {f"{case}/{name}": np.asarray(x) for name, x in found.items()}


def main() -> None:
    found = {}
    for case in MODELS:
        found |= expected(case)
    packed: Any = packed_of(found)
    np.savez_compressed(Path(__file__).with_name("vision.npz"), **packed)


def packed_of(found: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return arrays, and all single numbers as two: a file of each would be mostly headers."""
    numbers = {name: x for name, x in found.items() if x.ndim == 0}
    arrays = {name: x for name, x in found.items() if x.ndim}
    return arrays | {"names": np.array(list(numbers)), "numbers": np.array(list(numbers.values()))}


if __name__ == "__main__":
    main()
