"""Models of images trained by hfjax and by torchvision under torch.compile, as training.py does it.

ResNet-50 and DeepLabV3 compile beside each other in one section, RegNet-Y in another: what a model
is made of is in train_images.py. Both read bytes that lie on the device, compute in bfloat16 with
norms in float32, and take SGD with momentum; nothing is dropped, so that first losses are alike.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from benchmarks.gpu_sections.rows import Reporter
from benchmarks.gpu_sections.train_worker import Asked
from benchmarks.gpu_sections.training import TORCH, Programs, Setting, run

SIDE = 32  # of the images of a dry run
BOTH: Programs = {"hfjax": {}, TORCH: {}}


@dataclass(frozen=True)
class ImageSetting(Setting):
    """A model of images; `length` is their side."""

    products: int = 0  # multiplications of an image's convolutions in a forward pass
    rivals: ClassVar[Sequence[str]] = ("torch", "torchvision")

    @property
    def name(self) -> str:
        """What the table calls it."""
        return f"{self.preset}, {self.rows} x {self.length} x {self.length}"

    def asked(self, program: str, tiny: bool) -> Asked:
        """Return what a worker is asked for."""
        which = "torch" if program.startswith(TORCH) else "hfjax"
        rows, side = (4, SIDE) if tiny else (self.rows, self.length)
        execution = dict(self.programs[program])
        return Asked(which, self.preset, rows, side, execution, "", tiny, images=True)

    def numbers(self, ms: float, asked: Asked, told: Mapping[str, Any]) -> dict[str, float]:
        """Return what a row has of a step that took so long, by what its worker told.

        Of each multiplication of a forward pass: it and an addition, there and twice backward.
        """
        flops = 6.0 * asked.rows * self.products
        return {"images_s": 1e3 * asked.rows / ms, "flops": flops}


RESNET: Programs = {
    **BOTH,
    "hfjax, nothing checked": {"on_nonfinite": "apply"},
}
DEEPLAB: Programs = {
    **BOTH,
    "hfjax, remat full": {"remat": "full"},
}
IMAGES: Mapping[str, Sequence[ImageSetting]] = {
    "main": (
        ImageSetting("resnet50", 128, RESNET, 224, 2, 4_087_136_256),
        ImageSetting("deeplabv3-resnet101", 8, DEEPLAB, 513, 2, 258_664_795_840),
    ),
    "more": (ImageSetting("regnet-y-3.2gf", 64, BOTH, 224, 2, 3_174_970_752),),
}


def section(which: str) -> Callable[[Reporter], None]:
    """Return the section that trains some of them."""
    return lambda reporter: run(reporter, *IMAGES[which])
