"""The settings of `hfjax memory`, and the alternatives that it compares."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from hfjax.parallel.offload.activations import Offload
from hfjax.planner.search import OFFLOADS, REMATS
from hfjax.trainer import config_io
from hfjax.trainer.config import OffloadConfig, TrainConfig, check_bounds, pretrained_conflict
from hfjax.trainer.old_config import strategy_flags
from hfjax.trainer.yaml_fields import Lined, parse_yaml
from hfjax.utils.read_files import read_text
from hfjax.utils.tables import parse_bytes, quote

AUTO = "auto"  # the least offload that fits
OF_OLD_STRATEGIES = ("strategy", "mesh", "zero", "sequence_parallel")  # fields that they set


@dataclass(frozen=True)
class OffloadOptions(OffloadConfig):
    """Offload to host memory."""

    activations: str | None = None
    """Residuals of layers: fraction (0.3), dots, names:A,B or auto, as it fits (default: none)."""
    activation_words: ClassVar[tuple[str, ...]] = (AUTO,)


@dataclass(frozen=True)
class Memory(TrainConfig):
    """Estimate the memory that a training step takes on each device, before anything runs: of the
    settings given, and of alternatives. Takes every flag of `hfjax train`.

    Without a GPU it compiles for one that is not here (--gpu, --count), if the wheels that compile
    for CUDA are installed.
    """

    plot: Path | None = None
    """Picture to draw, a .png file (default: none)."""
    json: Path | None = None
    """File to write all numbers to (default: none)."""
    gpu: Literal["h200", "h100", "here"] = "h200"
    """GPU to compile for; here: the devices of this machine."""
    count: int = 8
    """Number of GPUs."""
    device_memory: str | None = None
    """Memory for a step, as 24GiB (default: what JAX takes of the GPU, usually 75 %)."""
    compare: tuple[Path, ...] | None = None
    """YAML files of settings to change, each compared; or none (default: remats, offloads)."""
    vocab: int | None = None
    """Size of the vocabulary (default: that of the data, or of --model.pretrained)."""
    offload: OffloadOptions = field(default_factory=OffloadOptions)

    hidden: ClassVar[tuple[str, ...]] = ("run_dir",)

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
        if self.plot is not None and self.plot.suffix != ".png":
            raise ValueError(f"--plot {self.plot}: the picture is a .png file.")


def memory_settings(config: TrainConfig, **changes: Any) -> Memory:
    """Return the configuration of a run as settings of `hfjax memory`."""
    values = {f.name: getattr(config, f.name) for f in fields(TrainConfig)}
    values |= {"offload": OffloadOptions(**vars(config.offload)), "run_dir": None}
    return Memory(**{**values, "devices": None, "cpu_devices": None, **changes})


def alternatives(settings: Memory) -> Iterator[tuple[str, Memory]]:
    """Yield the given settings and the alternatives to compare, each with its name."""
    yield _alternative_name(settings), settings
    if settings.compare is None:
        ratio = settings.offload.activations
        plain = with_offload(settings, None)
        yield from (
            (f"remat={remat}", replace(plain, remat=remat))
            for remat in REMATS
            if remat != settings.remat or ratio
        )
        for other in OFFLOADS:
            if _offload(other) != _offload(ratio):
                variant = with_offload(settings, other)
                yield _alternative_name(variant), variant
        if not settings.offload.optimizer:
            offload = replace(settings.offload, optimizer=True)
            yield "offload.optimizer", replace(settings, offload=offload)
    else:
        paths = [path for path in settings.compare if str(path) != "none"]
        names = [path.name for path in paths]
        for path, name in zip(paths, names, strict=True):
            yield (name if names.count(name) == 1 else str(path)), apply_changes(settings, path)


def with_offload(settings: Memory, ratio: str | None) -> Memory:
    """Return the settings with another offload of activations."""
    return replace(settings, offload=replace(settings.offload, activations=ratio))


def _alternative_name(settings: Memory) -> str:
    ratio = settings.offload.activations
    return f"remat={settings.remat}" + (f",offload={ratio}" if ratio else "")


def _offload(text: str | None) -> Offload | None:
    return None if text in (None, AUTO) else Offload.of(str(text))


def apply_changes(base_settings: Memory, changes_path: Path) -> Memory:
    """Return the settings with those of a YAML file replaced.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = Path(folder.name, "full.yaml")
    >>> _ = path.write_text("remat: full")
    >>> apply_changes(Memory(), path).remat
    'full'
    """
    if "=" in str(changes_path) and not changes_path.exists():
        raise ValueError(
            f"--compare {quote(changes_path)}: the name of a YAML file is expected, which has the "
            "settings to change, as remat: full."
        )
    changes = config_io.read_settings(changes_path, "--compare")
    if _has_old_strategy(
        changes_path
    ):  # it says the whole layout, of which only some is in `changes`
        usual = {name: getattr(TrainConfig(), name) for name in OF_OLD_STRATEGIES}
        offload = replace(base_settings.offload, optimizer=False, parameters=False)
        base_settings = replace(base_settings, **usual, offload=offload)
    merged = _merge(config_io.to_plain(base_settings), changes)
    changed = config_io.parse_dataclass(Memory, merged, quote(changes_path))
    return replace(changed, compare=base_settings.compare)


def _has_old_strategy(path: Path) -> bool:
    """Return whether a YAML file joins strategies by their names, as `strategy: fsdp+tensor`."""
    settings = parse_yaml(read_text(path), quote(path))
    names = settings.get("strategy") if isinstance(settings, Mapping) else None
    return isinstance(names, str) and strategy_flags(names) != ""


def _merge(plain: Mapping[str, Any], changes: Mapping[str, Any]) -> Lined:
    """Return nested settings with some of them replaced; the lines are those of the changes."""
    merged = Lined()
    merged |= plain
    merged.lines |= changes.lines if isinstance(changes, Lined) else {}
    for name, new in changes.items():
        both = isinstance(plain.get(name), Mapping) and isinstance(new, Mapping)
        merged[name] = _merge(plain[name], new) if both else new
    return merged
