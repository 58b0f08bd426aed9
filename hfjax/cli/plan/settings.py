"""The settings of `hfjax plan`: those of `hfjax train`, and what to plan for."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, Literal

from hfjax.cli.draw_timeline import check_ending
from hfjax.planner.make_plan import MAX_ENTRIES
from hfjax.trainer import config_io
from hfjax.trainer.config import MOST, TrainConfig, check_bounds, pretrained_conflict
from hfjax.utils.tables import parse_bytes, quote

# Settings of the layout: they are searched, and flags of them describe one layout to compare.
SEARCHED = (
    *("zero", "sequence_parallel", "mesh", "gradient_accumulation_steps", "remat", "offload"),
    *("tensor_overlap_chunks", "gradient_reduction", "pipeline", "context", "strategy"),
)
NOT_SEARCHED = ("context", "strategy", "offload.parameters")  # kept at their defaults
COUNTED = ("devices", "cpu_devices")  # the number of GPUs: --count says it
TIMES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
LEAST_MEMORY, MOST_MEMORY = 2**20, 2**40  # bytes


@dataclass(frozen=True)
class PlanSettings(TrainConfig):
    """Find the fastest layout of a step on so many GPUs: it scores every mesh, strategy, schedule,
    recomputation and offload by formulas, shows what fits, the fastest first, and why others lose.
    Takes the flags of `hfjax train`; those of the layout (--mesh.pipe 8 --remat full) describe one
    layout, which is compared with the best.

    No GPU is needed.
    """

    gpu: str = "h200"
    """GPU: {gpus}; a .toml file of constants; or here, as --calibrate here measured."""
    count: int = 8
    """Number of GPUs."""
    tokens_per_step: str | None = None
    """Tokens in a step, over all GPUs: 4M, 512K (of 1024) (default: as --global-batch-size)."""
    vocab: int | None = None
    """Size of the vocabulary (default: that of the data, or of --model.pretrained)."""
    device_memory: str | None = None
    """Memory for a step, as 24GiB (default: what JAX takes of the GPU, usually 75 %)."""
    top: int = 10
    """Number of layouts to show, at most 20."""
    compile: int = 4
    """Number of the best to compile for the GPU and rank by that; 0: none."""
    compare: Path | None = None
    """File of hfjax train --config, whose layout to compare with the best (default: none)."""
    plan: Path | None = None
    """Write the best layout, or the compared one, for hfjax train --config (default: none)."""
    json: Path | None = None
    """File to write all numbers to (default: none)."""
    picture: Path | None = None
    """Picture of a step of that layout: .svg, .png, or .json for Perfetto (default: none)."""
    calibrate: Literal["here"] | None = None
    """Measure this machine's constants for --gpu here, and stop (default: none)."""

    hidden: ClassVar[tuple[str, ...]] = (*COUNTED, "deepspeed", "run_dir", "context", "strategy")

    def __post_init__(self):
        if self.tokens_per_step is not None:  # sets the batch, once sequences have a length
            object.__setattr__(self, "global_batch_size", MOST)
        super().__post_init__()
        check_bounds(self, "", count=1, vocab=1, compile=0)
        check_bounds(self, "", MAX_ENTRIES, top=1)
        if self.vocab is not None and self.model.pretrained is not None:
            raise ValueError(pretrained_conflict("--vocab", self.vocab, self.model.pretrained))
        if self.device_memory is not None:
            self._check_memory(parse_bytes(self.device_memory, "--device-memory"))
        if self.tokens_per_step is not None:
            parse_count(self.tokens_per_step)
        for flag in ("plan", "json", "picture"):
            path = getattr(self, flag)
            if path is not None and not os.access(path.parent, os.W_OK):
                raise ValueError(
                    f"--{flag} {path}: nothing can be written to {path.parent}. Make that folder, "
                    "or name another one."
                )
        if self.plan is not None and self.plan.suffix not in (".yaml", ".yml"):
            raise ValueError(
                f"--plan {self.plan}: a .yaml file is written, for hfjax train --config."
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


def plan_settings(config: TrainConfig) -> PlanSettings:
    """Return the configuration of a run as one to plan: without its layout."""
    values = {f.name: getattr(config, f.name) for f in fields(TrainConfig)}
    usual = TrainConfig()
    defaults = {name: getattr(usual, name) for name in (*SEARCHED, *COUNTED)}
    return PlanSettings(**{**values, **defaults})


def ignored_settings(config: TrainConfig) -> list[str]:
    """Return the settings of a configuration file that concern the layout."""
    names = [
        name for name in config_io.changed_fields(config) if name.partition(".")[0] in SEARCHED
    ]
    return [name.replace("_", "-") for name in names]


def _typed(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the fields that a command line sets, each with its arguments."""
    starts = [n for n, arg in enumerate(argv) if arg.startswith("--")]
    for start, end in pairwise([*starts, len(argv)]):
        name = argv[start].partition("=")[0].removeprefix("--").replace("-", "_")
        yield re.sub(r"^((?:\w+\.)?)no_", r"\1", name), list(argv[start:end])


def _is_of_layout(name: str) -> bool:
    return name.partition(".")[0] in SEARCHED


def layout_flags(argv: Sequence[str]) -> dict[str, str]:
    """Return the flags of the layout in a command line: their fields, and the flags as typed.

    >>> layout_flags(["--mesh.pipe", "8", "--no-sequence-parallel", "--steps=3"])
    {'mesh.pipe': '--mesh.pipe 8', 'sequence_parallel': '--no-sequence-parallel'}
    """
    return {name: " ".join(args) for name, args in _typed(argv) if _is_of_layout(name)}


def run_flags(argv: Sequence[str]) -> list[str]:
    """Return the arguments of a command line without flags of the layout.

    >>> run_flags(["--mesh.pipe", "8", "--steps", "3"])
    ['--steps', '3']
    """
    return [arg for name, args in _typed(argv) if not _is_of_layout(name) for arg in args]


def check_flags(argv: Sequence[str]) -> None:
    """Refuse flags that a plan has no use for."""
    names = {name: args[0].partition("=")[0] for name, args in _typed(argv)}
    for name, flag in names.items():
        if name == "strategy":
            raise ValueError(
                f"{flag}: a plan has no formula for a table of your own; hfjax memory takes it. "
                "The sizes of the mesh say which layout to compare with the best: --mesh.fsdp -1."
            )
        if name in NOT_SEARCHED or name.partition(".")[0] in NOT_SEARCHED:
            raise ValueError(f"{flag}: a plan has no formula for it. hfjax memory takes it.")
        if name in COUNTED:
            raise ValueError(f"{flag}: the number of GPUs is --count.")
    if {"global_batch_size", "tokens_per_step"} <= names.keys():
        raise ValueError(
            "--global-batch-size beside --tokens-per-step: both say how many examples a step has. "
            "Leave one out."
        )
    if "compare" in names and (layout := list(filter(_is_of_layout, names))):
        raise ValueError(
            f"{names[layout[0]]} beside --compare: the file says the whole layout. Leave out one "
            "of the two."
        )


def check_compared(config: TrainConfig, path: Path) -> None:
    """Refuse a configuration whose layout a plan has no formula for."""
    for name in config_io.changed_fields(config):
        if name == "deepspeed" or name in NOT_SEARCHED or name.partition(".")[0] in NOT_SEARCHED:
            raise ValueError(
                f"--compare {quote(path)}: it has {name}, and a plan has no formula for that. "
                "hfjax memory takes it."
            )


def check_no_deepspeed(config: TrainConfig, argv: Sequence[str]) -> None:
    """Refuse a configuration of DeepSpeed: it sets the layout of a run."""
    if config.deepspeed is not None or any(w.startswith("--deepspeed") for w in argv):
        raise ValueError(
            "--deepspeed: its file says how a run is laid out, and hfjax plan searches that. Leave "
            "it out, and say what else it has by flags: --precision, --optimizer.learning-rate …"
        )


def run_of(settings: PlanSettings, default: TrainConfig, batch_size: int) -> TrainConfig:
    """Return the run whose layout is searched, with this global batch size."""
    usual = TrainConfig()
    values = {f.name: getattr(settings, f.name) for f in fields(TrainConfig)}
    values |= {name: getattr(usual, name) for name in SEARCHED}
    return TrainConfig(**{**values, "run_dir": default.run_dir, "global_batch_size": batch_size})


def step_batch_size(settings: PlanSettings, unit: str, each: int) -> int:
    """Return the global batch size of a step.

    Args:
        settings: The settings.
        unit: The unit of an example: tokens, images.
        each: Number of units in an example.
    """
    if settings.tokens_per_step is None:
        return settings.global_batch_size
    if unit != "tokens":
        raise ValueError(
            f"--tokens-per-step {settings.tokens_per_step}: the model is of {unit}. Give "
            "--global-batch-size, the number of them in a step."
        )
    tokens = parse_count(settings.tokens_per_step)
    batch_size, rest = divmod(tokens, each)
    if not rest:
        return batch_size
    describe = lambda n: f"{n * each:,} ({n} example{'s' if n > 1 else ''})"
    low = [describe(batch_size)] if batch_size else []
    raise ValueError(
        f"--tokens-per-step {settings.tokens_per_step}: {tokens:,} tokens are no whole sequences "
        f"of {each} (--model.seq-len). The nearest that are: "
        f"{' and '.join([*low, describe(batch_size + 1)])}."
    )
