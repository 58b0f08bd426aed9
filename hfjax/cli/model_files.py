"""`hfjax inspect` and `hfjax export`: show a model's folder, and write one from a run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from hfjax.adapters import export_adapter
from hfjax.checkpoint import RestoredRun
from hfjax.cli.arguments import parse_flags
from hfjax.cli.train import Saved, saved_config, saved_state
from hfjax.distributed.consensus import say
from hfjax.distributed.stop import leaving
from hfjax.trainer.build import RunComponents
from hfjax.trainer.config import ModelConfig, TrainConfig
from hfjax.trainer.logs.console import show_waiting
from hfjax.trainer.model import ROUND_TO
from hfjax.trainer.pretrained_model import byte_counts, open_pretrained
from hfjax.trainer.tasks.images import is_image_task
from hfjax.utils.command_errors import report_errors
from hfjax.utils.tables import human, parse_bytes, quote
from hfjax.weights.pretrained import SHARD, Pretrained, export, pretrained
from hfjax.weights.save import check_free_to_write
from hfjax.weights.vision_files import write_vision

FILE = ".safetensors"


@dataclass(frozen=True)
class Inspect:
    """Show what is in the folder of a model from Hugging Face: its tensors, and where each goes.

    It reads no weight and starts no run: hfjax train --model.pretrained FOLDER does that.
    """

    folder: tyro.conf.Positional[str]
    """Folder with config.json and .safetensors files, or ORG/NAME[@REVISION]."""


@dataclass(frozen=True)
class Export(Saved):
    """Write the model of a run as a folder that transformers loads; of images as a file that
    torchvision loads. Of a run with adapters, write these as a folder that peft loads."""

    export_dir: Path = field(kw_only=True)
    """New folder, or FILE.safetensors for images; it appears when complete."""
    like: str | None = None
    """Folder, name on the Hub, or image file, of names and dtypes (default: the run's model)."""
    dtype: Literal["float32", "bfloat16", "float16", "fp32", "bf16", "fp16"] | None = None
    """Dtype of all tensors (default: each as in --like)."""
    shard: str = SHARD
    """Maximum size of a file."""
    merge: bool = False
    """Write the whole model of a run with adapters, these merged into it."""

    def __post_init__(self):
        if parse_bytes(self.shard, "--shard") < 1:
            raise ValueError(f"--shard {self.shard}: at least one byte is needed, as in 5GB.")


def inspect_command(argv: Sequence[str]) -> int:
    """Print the contents of a folder; return the exit status."""
    with report_errors("inspect"):
        args: Inspect = parse_flags(Inspect, argv, "inspect")
        print(pretrained(args.folder))
    return 0


def export_command(argv: Sequence[str]) -> int:
    """Write the model of a run; return the exit status."""
    with leaving(), report_errors("export"):
        _export(parse_flags(Export, argv, "export"))
    return 0


def _export(args: Export) -> None:
    check_free_to_write(args.export_dir)
    config = saved_config(args)
    if is_image_task(config):
        return _export_images(args, config)
    if config.model.pretrained is None and args.like is None:
        raise ValueError(_no_folder_message(args, config))
    has_adapters = config.lora.rank is not None
    _check_merge(args, has_adapters)
    run, restored = saved_state(args, config, master=config.master_weights)
    if has_adapters and not args.merge:
        return _export_adapter(args, run, restored)
    like = _template_model(args, run)
    with show_waiting(f"writing {quote(args.export_dir)}"):
        written = export(args.export_dir, run.layout, restored.state, like, args.dtype, args.shard)
    say(
        f"{quote(args.export_dir)}: {quote(args.run)} after step {restored.step}, "
        f"{len(like.mappings)} tensors; wrote {byte_counts(written)}"
    )


def _check_merge(args: Export, has_adapters: bool) -> None:
    """Refuse flags of another kind of export."""
    if args.merge and not has_adapters:
        raise ValueError(
            f"--merge: {quote(args.run)} has no adapters (--lora.rank), its whole model is written "
            "anyway. Leave it out."
        )
    if has_adapters and not args.merge and (args.like is not None or args.shard != SHARD):
        raise ValueError(
            f"--like, --shard: of whole models, and of {quote(args.run)} adapters are written. "
            "Leave them out, or give --merge."
        )


def _export_adapter(args: Export, run: RunComponents, restored: RestoredRun) -> None:
    """Write the adapters of a run as peft's files."""
    with show_waiting(f"writing {quote(args.export_dir)}"):
        written = export_adapter(args.export_dir, run.layout, restored.state, args.dtype)
    adapters = run.layout.template.model_init.adapters
    say(
        f"{quote(args.export_dir)}: {quote(args.run)} after step {restored.step}, adapters of "
        f"{len(adapters)} linear maps; wrote {byte_counts(written)}"
    )


def _export_images(args: Export, config: TrainConfig) -> None:
    """Write a model of images as one file, with torchvision's names."""
    if args.export_dir.suffix != FILE:
        raise ValueError(
            f"--export-dir {quote(args.export_dir)}: a model of images is one file with "
            f"torchvision's names: give a name that ends in {FILE}."
        )
    if config.model.factory is not None:
        raise ValueError(
            f"--model.factory {config.model.factory}: torchvision has no names for it."
        )
    if args.dtype is not None or args.shard != SHARD:
        raise ValueError("--dtype, --shard: of models of text. Leave them out.")
    began = config.model.weights
    default = began if began is not None and began.is_file() else None
    like = default if args.like is None else Path(args.like)
    run, restored = saved_state(args, config, master=config.master_weights)
    with show_waiting(f"writing {quote(args.export_dir)}"):
        write_vision(args.export_dir, run.layout, restored.state, run.model.shape, like)
    say(
        f"{quote(args.export_dir)}: {quote(args.run)} after step {restored.step}, "
        f"{human(args.export_dir.stat().st_size)}"
    )


def _no_folder_message(args: Export, config: TrainConfig) -> str:
    own = config.model.factory
    model_flag = (
        f"--model.preset {config.model.preset}" if own is None else f"--model.factory {own}"
    )
    return (
        f"{quote(args.run)} began from no model's folder ({model_flag}), which would say what "
        "files, names and configuration of transformers are those of this model. Give one of the "
        "same shape: --like FOLDER."
    )


def _template_model(args: Export, run: RunComponents) -> Pretrained:
    """Return the model whose names the files get; refuse one that computes something else."""
    if args.like is None:
        assert run.pretrained is not None
        return run.pretrained
    pad = 1 if run.config.model.factory else ROUND_TO
    like = open_pretrained(ModelConfig(pretrained=args.like), pad=pad)
    tokens = max(tokens.vocab for tokens in run.tokens) if run.pretrained is None else 0
    if tokens > like.config.vocab:
        raise ValueError(
            f"--like {quote(args.like)}: its vocabulary has {like.config.vocab} tokens, and the "
            f"run's data {tokens}: the others would be lost. Give a model with at least so many."
        )
    return like
