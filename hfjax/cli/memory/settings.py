"""The settings of `hfjax memory`, and the alternatives that stand beside them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from hfjax.parallel.offload.activations import Offload
from hfjax.planner.search import OFFLOADS, REMATS
from hfjax.trainer import config_io
from hfjax.trainer.config import Train, at_least, beside_pretrained
from hfjax.trainer.yaml_fields import parsed
from hfjax.utils.tables import bytes_of

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
        at_least(self, "", count=1, vocab=1)
        if self.cpu_devices is not None and self.gpu != "here":
            raise ValueError(
                f"--cpu-devices {self.cpu_devices} goes with --gpu here: how many GPUs to compile "
                "for is said by --count."
            )
        if self.vocab is not None and self.model.pretrained is not None:
            raise ValueError(beside_pretrained("--vocab", self.vocab, self.model.pretrained))
        if self.device_memory is not None:
            bytes_of(self.device_memory, "--device-memory")
        if self.out is not None and self.out.suffix != ".png":
            raise ValueError(f"--out {self.out}: the picture is a .png file.")


def of_run(config: Train, **changes: Any) -> Memory:
    """Return the configuration of a run as one that is only planned."""
    taken = {f.name: getattr(config, f.name) for f in fields(Train)}
    return Memory(**{**taken, "out": None, "devices": None, "cpu_devices": None, **changes})


def alternatives(given: Memory) -> Iterator[tuple[str, Memory]]:
    """Yield the settings given and what to put beside them, each by its name."""
    yield _name(given), given
    if given.compare is None:
        plain = replace(given, offload=None) if given.offload else given
        remats = [f"remat={remat}" for remat in REMATS if remat != given.remat or given.offload]
        yield from ((words, changed(plain, words)) for words in remats)
        ratios = [ratio for ratio in OFFLOADS if _offload(ratio) != _offload(given.offload)]
        for ratio in ratios:
            beside = replace(given, offload=ratio)
            yield _name(beside), beside
        if ON_HOST not in given.strategy:
            words = f"strategy={given.strategy}+{ON_HOST}"
            yield words, changed(given, words)
    else:
        for words in given.compare:
            if words != "none":
                yield words, changed(given, words)


def _name(given: Memory) -> str:
    return f"remat={given.remat}" + (f",offload={given.offload}" if given.offload else "")


def _offload(words: str | None) -> Offload | None:
    return None if words in (None, AUTO) else Offload.of(str(words))


def changed(given: Memory, words: str) -> Memory:
    """Return the settings with those of `FLAG=VALUE,…` in place of their own.

    >>> changed(Memory(), "remat=names:qkv,mlp_up,accumulate=4").remat
    'names:qkv,mlp_up'
    """
    plain = config_io.plain(given)
    for word in re.split(r",(?=[^,=]*=)", words):
        flag, equals, value = word.strip().removeprefix("--").partition("=")
        *outer, last = flag.replace("-", "_").split(".")
        place = plain
        for name in outer:
            place = place.get(name) if isinstance(place, dict) else None
        if not equals or not isinstance(place, dict) or last not in place:
            raise ValueError(
                f"--compare {words}: FLAG=VALUE is expected, of a flag of hfjax train: remat=full, "
                "or several joined by commas: remat=full,accumulate=4."
            )
        place[last] = None if value == "None" else parsed(value, f"--compare {words}")
    return replace(config_io.read(Memory, plain, "--compare"), compare=given.compare)
