"""The settings of `hfjax memory`, and the alternatives that stand beside them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from hfjax.base.tables import bytes_of
from hfjax.parallel.activation_offload import Offload
from hfjax.run import files
from hfjax.run.config import Train, at_least, beside_pretrained
from hfjax.run.yaml_text import parsed

AUTO = "auto"  # the least offload that fits
REMATS = ("none", "dots", "full")
RATIOS = ("0.5", "1")
ON_HOST = "host_optimizer"


@dataclass(frozen=True)
class Memory(Train):
    """What a training step would take of each device, before anything runs: the settings given
    beside alternatives. Takes every flag of `hfjax train`.

    Without a GPU it compiles for one that is not here (--gpu, --count), if the wheels that compile
    for CUDA are installed.
    """

    out: Path | None = None
    """The picture to draw, a .png file."""
    json: Path | None = None
    """The file to write all numbers to."""
    gpu: Literal["h200", "h100", "here"] = "h200"
    """Compile for such GPUs; here: for the devices at hand."""
    count: int = 8
    """How many of them."""
    device_memory: str | None = None
    """The memory that a step may use of a device, for instance 24GiB; None: what JAX takes of the
    GPU: 75 %, or what XLA_CLIENT_MEM_FRACTION says."""
    compare: tuple[str, ...] | None = None
    """Settings to put beside, each as FLAG=VALUE,…: remat=full accumulate=4,remat=dots; None: each
    kind of remat, offload by half and whole, the optimizer on the host; none: only what is given.
    """
    vocab: int | None = None
    """Tokens in the vocabulary; None: those of the data, or of --model.pretrained."""
    offload: str | None = None
    """As in hfjax train; auto: the smallest part of the bytes that fits the memory of a device."""
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
        ratios = [ratio for ratio in RATIOS if _offload(ratio) != _offload(given.offload)]
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
    plain = files.plain(given)
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
    return replace(files.read(Memory, plain, "--compare"), compare=given.compare)
