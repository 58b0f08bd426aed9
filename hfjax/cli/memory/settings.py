"""The settings of `hfjax memory`, and the alternatives that it compares."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from hfjax.parallel.offload.activations import Offload
from hfjax.planner.search import OFFLOADS, REMATS
from hfjax.trainer import config_io
from hfjax.trainer.config import Train, check_bounds, pretrained_conflict
from hfjax.trainer.yaml_fields import parse_yaml
from hfjax.utils.tables import parse_bytes

AUTO = "auto"  # the least offload that fits
ON_HOST = "host_optimizer"


@dataclass(frozen=True)
class Memory(Train):
    """Estimate the memory that a training step takes on each device, before anything runs: of the
    settings given, and of alternatives. Takes every flag of `hfjax train`.

    Without a GPU it compiles for one that is not here (--gpu, --count), if the wheels that compile
    for CUDA are installed.
    """

    out: Path | None = None
    """Picture to draw, a .png file (default: none)."""
    json: Path | None = None
    """File to write all numbers to (default: none)."""
    gpu: Literal["h200", "h100", "here"] = "h200"
    """GPU to compile for; here: the devices of this machine."""
    count: int = 8
    """Number of GPUs."""
    device_memory: str | None = None
    """Memory for a step, as 24GiB (default: what JAX takes of the GPU, usually 75 %)."""
    compare: tuple[str, ...] | None = None
    """Settings to compare: remat=full accumulate=4; or none (default: remats, offloads)."""
    vocab: int | None = None
    """Size of the vocabulary (default: that of the data, or of --model.pretrained)."""
    offload: str | None = None
    """Offload activations: fraction (0.3), dots, names:A,B or auto, as it fits (default: none)."""
    offload_words: ClassVar[tuple[str, ...]] = (AUTO,)

    def __post_init__(self):
        super().__post_init__()
        check_bounds(self, "", count=1, vocab=1)
        if self.cpu_devices is not None and self.gpu != "here":
            raise ValueError(
                f"--cpu-devices {self.cpu_devices} goes with --gpu here: how many GPUs to compile "
                "for is said by --count."
            )
        if self.vocab is not None and self.model.pretrained is not None:
            raise ValueError(pretrained_conflict("--vocab", self.vocab, self.model.pretrained))
        if self.device_memory is not None:
            parse_bytes(self.device_memory, "--device-memory")
        if self.out is not None and self.out.suffix != ".png":
            raise ValueError(f"--out {self.out}: the picture is a .png file.")


def memory_settings(config: Train, **changes: Any) -> Memory:
    """Return the configuration of a run as settings of `hfjax memory`."""
    values = {f.name: getattr(config, f.name) for f in fields(Train)}
    return Memory(**{**values, "out": None, "devices": None, "cpu_devices": None, **changes})


def alternatives(settings: Memory) -> Iterator[tuple[str, Memory]]:
    """Yield the given settings and the alternatives to compare, each with its name."""
    yield _name(settings), settings
    if settings.compare is None:
        plain = replace(settings, offload=None) if settings.offload else settings
        remats = [
            f"remat={remat}" for remat in REMATS if remat != settings.remat or settings.offload
        ]
        yield from ((changes, apply_changes(plain, changes)) for changes in remats)
        ratios = [ratio for ratio in OFFLOADS if _offload(ratio) != _offload(settings.offload)]
        for ratio in ratios:
            variant = replace(settings, offload=ratio)
            yield _name(variant), variant
        if ON_HOST not in settings.strategy:
            changes = f"strategy={settings.strategy}+{ON_HOST}"
            yield changes, apply_changes(settings, changes)
    else:
        for changes in settings.compare:
            if changes != "none":
                yield changes, apply_changes(settings, changes)


def _name(settings: Memory) -> str:
    return f"remat={settings.remat}" + (f",offload={settings.offload}" if settings.offload else "")


def _offload(text: str | None) -> Offload | None:
    return None if text in (None, AUTO) else Offload.of(str(text))


def apply_changes(settings: Memory, changes: str) -> Memory:
    """Return the settings with those of `FLAG=VALUE,…` replaced.

    >>> apply_changes(Memory(), "remat=names:qkv,mlp_up,accumulate=4").remat
    'names:qkv,mlp_up'
    """
    plain = config_io.to_plain(settings)
    for change in re.split(r",(?=[^,=]*=)", changes):
        flag, equals, value = change.strip().removeprefix("--").partition("=")
        *outer, last = flag.replace("-", "_").split(".")
        target = plain
        for name in outer:
            target = target.get(name) if isinstance(target, dict) else None
        if not equals or not isinstance(target, dict) or last not in target:
            raise ValueError(
                f"--compare {changes}: FLAG=VALUE is expected, of a flag of hfjax train: "
                "remat=full, "
                "or several joined by commas: remat=full,accumulate=4."
            )
        target[last] = None if value == "None" else parse_yaml(value, f"--compare {changes}")
    return replace(config_io.parse_dataclass(Memory, plain, "--compare"), compare=settings.compare)
