"""The settings of `hfjax plan`: those of `hfjax train` that do not concern the layout."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar, Literal

from hfjax.cli.draw_timeline import check_ending
from hfjax.planner.make_plan import MAX_ENTRIES
from hfjax.trainer import config_io
from hfjax.trainer.config import Train, check_bounds, pretrained_conflict
from hfjax.utils.tables import parse_bytes

# Settings that are searched, and their names in --why.
SEARCHED = {
    "strategy": "zero=fsdp tensor=2",
    "mesh": "tensor=2",
    "accumulate": "accumulate=2",
    "remat": "remat=full",
    "offload": "offload=0.5",
    "split_rows": "split_rows=2",
    "reduction": "reduction=hierarchical",
    "pipeline": "pipe=2 schedule=1f1b microbatches=8",
    "context": "context=2",
}
COUNTED = ("devices", "cpu_devices")  # the number of GPUs: --count says it
TIMES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
LEAST_MEMORY, MOST_MEMORY = 2**20, 2**40  # bytes


@dataclass(frozen=True)
class PlanSettings(Train):
    """Find the fastest layout of a step on so many GPUs: it scores every mesh, strategy, schedule,
    recomputation and offload by formulas, shows what fits, the fastest first, and why others lose.
    Takes the flags of `hfjax train` that say what is run, and searches how it is laid out.

    No GPU is needed.
    """

    gpu: str = "h200"
    """GPU: {gpus}; a .toml file of constants; or here, as --calibrate here measured."""
    count: int = 8
    """Number of GPUs."""
    tokens_per_step: str | None = None
    """Tokens in a step, over all GPUs: 4M, 512K (of 1024) (default: --batch sequences)."""
    vocab: int | None = None
    """Size of the vocabulary (default: that of the data, or of --model.pretrained)."""
    device_memory: str | None = None
    """Memory for a step, as 24GiB (default: what JAX takes of the GPU, usually 75 %)."""
    rows: int = 10
    """Number of layouts to show, at most 20."""
    compile: int = 4
    """Number of the best to compile for the GPU and rank by that; 0: none."""
    why: str | None = None
    """Compare one layout with the best: 'pipe=8 tensor=8 remat=full' (default: none)."""
    out: Path | None = None
    """Write the best layout, or --why, for hfjax train --config: plan.yaml (default: none)."""
    json: Path | None = None
    """File to write all numbers to (default: none)."""
    picture: Path | None = None
    """Draw a step of the best layout or --why; x.svg, x.png, x.json (Perfetto) (default: none)."""
    calibrate: Literal["here"] | None = None
    """Measure this machine's constants for --gpu here, and stop (default: none)."""

    hidden: ClassVar[tuple[str, ...]] = (*SEARCHED, *COUNTED, "deepspeed")

    def __post_init__(self):
        super().__post_init__()
        check_bounds(self, "", count=1, vocab=1, compile=0)
        check_bounds(self, "", MAX_ENTRIES, rows=1)
        if self.vocab is not None and self.model.pretrained is not None:
            raise ValueError(pretrained_conflict("--vocab", self.vocab, self.model.pretrained))
        if self.device_memory is not None:
            self._check_memory(parse_bytes(self.device_memory, "--device-memory"))
        if self.tokens_per_step is not None:
            parse_count(self.tokens_per_step)
        for flag in ("out", "json", "picture"):
            path = getattr(self, flag)
            if path is not None and not os.access(path.parent, os.W_OK):
                raise ValueError(
                    f"--{flag} {path}: nothing can be written to {path.parent}. Make that folder, "
                    "or name another one."
                )
        if self.out is not None and self.out.suffix not in (".yaml", ".yml"):
            raise ValueError(
                f"--out {self.out}: it is a .yaml file, for hfjax train --config; the directory of "
                "the run is said to hfjax train."
            )
        if self.picture is not None:
            check_ending(self.picture)

    def _check_memory(self, size: int) -> None:
        """Refuse what no GPU has: a number of bytes without its unit, or far too many."""
        if not LEAST_MEMORY <= size <= MOST_MEMORY:
            raise ValueError(
                f"--device-memory {self.device_memory}: that is {size:,} bytes. From 1MiB to 1TiB "
                "are expected, for instance 80GiB."
            )


def parse_count(text: str) -> int:
    """Return the number of tokens that a text stands for.

    >>> parse_count("4M"), parse_count("1_000"), parse_count("512k")
    (4194304, 1000, 524288)
    """
    match = re.fullmatch(r"(\d[\d_]*)([KMG]?)", text.strip().upper())
    if not match or int(match[1]) == 0:
        raise ValueError(
            f"--tokens-per-step {text}: a number is expected, as in 1_000_000, or one of 1024 or "
            "1024 x 1024: 512K, 4M."
        )
    return int(match[1]) * TIMES[match[2]]


def plan_settings(config: Train) -> PlanSettings:
    """Return the configuration of a run as one to plan: without its layout."""
    known = {f.name for f in fields(PlanSettings)} - {"out"}
    values = {f.name: getattr(config, f.name) for f in fields(Train) if f.name in known}
    usual = Train()
    defaults = {name: getattr(usual, name) for name in (*SEARCHED, *COUNTED)}
    return PlanSettings(**{**values, **defaults})


def ignored_settings(config: Train) -> list[str]:
    """Return the settings of a configuration file that concern the layout."""
    names = [
        name for name in config_io.changed_fields(config) if name.partition(".")[0] in SEARCHED
    ]
    return [name.replace("_", "-") for name in names]


def check_searched(argv: Sequence[str]) -> None:
    """Refuse flags of what is searched, and of what another flag sets here."""
    typed = [arg.partition("=") for arg in argv if arg.startswith("--")]
    for flag, _, _ in typed:
        name = flag.removeprefix("--").replace("-", "_")
        if (top := name.partition(".")[0]) in SEARCHED:
            raise ValueError(
                f"{flag}: hfjax plan searches that. To see one configuration beside the first: "
                f'--why "{SEARCHED[top]}"; hfjax memory takes the flag itself.'
            )
        if name in COUNTED:
            raise ValueError(f"{flag}: how many GPUs it is planned for is said by --count.")
    names = {flag.removeprefix("--").replace("-", "_") for flag, _, _ in typed}
    if {"batch", "tokens_per_step"} <= names:
        raise ValueError(
            "--batch beside --tokens-per-step: both say how many rows a step has. Leave one out."
        )


def check_no_deepspeed(config: Train, argv: Sequence[str]) -> None:
    """Refuse a configuration of DeepSpeed: it sets the layout of a run."""
    if config.deepspeed is not None or any(w.startswith("--deepspeed") for w in argv):
        raise ValueError(
            "--deepspeed: its file says how a run is laid out, and hfjax plan searches that. Leave "
            "it out, and say what else it has by flags: --precision, --optimizer.rate …"
        )


def run_of(settings: PlanSettings, default: Train, batch_size: int) -> Train:
    """Return the run whose layout is searched, with this global batch size."""
    values = {f.name: getattr(settings, f.name) for f in fields(Train)}
    return replace(Train(**{**values, "out": default.out}), batch=batch_size)


def step_batch_size(settings: PlanSettings, unit: str, each: int) -> int:
    """Return the global batch size of a step.

    Args:
        settings: The settings.
        unit: The unit of an example: tokens, images.
        each: Number of units in an example.
    """
    if settings.tokens_per_step is None:
        return settings.batch
    if unit != "tokens":
        raise ValueError(
            f"--tokens-per-step {settings.tokens_per_step}: the model is of {unit}. Say by --batch "
            "how many a step takes."
        )
    tokens = parse_count(settings.tokens_per_step)
    batch_size, rest = divmod(tokens, each)
    if not rest:
        return batch_size
    describe = lambda n: f"{n * each:,} ({n} row{'s' if n > 1 else ''})"
    low = [describe(batch_size)] if batch_size else []
    raise ValueError(
        f"--tokens-per-step {settings.tokens_per_step}: {tokens:,} tokens are no whole rows of "
        f"{each} "
        f"(--model.length). The nearest that are: {' and '.join([*low, describe(batch_size + 1)])}."
    )
