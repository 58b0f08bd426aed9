"""`hfjax import` and `hfjax export`: a model's folder looked at, and written from a run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from hfjax.cli.arguments import parsed
from hfjax.cli.run import Saved, saved_config, saved_state
from hfjax.distributed.consensus import say
from hfjax.distributed.stop import leaving
from hfjax.trainer.build import Parts
from hfjax.trainer.config import Model, Train
from hfjax.trainer.console import waiting
from hfjax.trainer.model import ROUND_TO
from hfjax.trainer.pretrained_model import by_process, model_of
from hfjax.trainer.tasks.images import of_images
from hfjax.utils.command_errors import ending_in_words
from hfjax.utils.tables import bytes_of, human, named
from hfjax.weights.pretrained import SHARD, Pretrained, export, pretrained
from hfjax.weights.save import check_free_to_write
from hfjax.weights.vision_files import write_vision

FILE = ".safetensors"


@dataclass(frozen=True)
class Import:
    """Show what is in the folder of a model from Hugging Face: its tensors, and where each goes.

    It reads no weight and starts no run: hfjax train --model.pretrained FOLDER does that.
    """

    folder: tyro.conf.Positional[Path]
    """Folder with config.json and .safetensors files."""


@dataclass(frozen=True)
class Export(Saved):
    """Write the model of a run as a folder that transformers loads; of images as a file that
    torchvision loads."""

    out: Path = field(kw_only=True)
    """New folder, or FILE.safetensors for images; it appears when complete."""
    like: Path | None = None
    """Folder, or image file, of names and dtypes (default: what the run began from)."""
    dtype: Literal["float32", "bfloat16", "float16", "fp32", "bf16", "fp16"] | None = None
    """Dtype of all tensors (default: each as in --like)."""
    shard: str = SHARD
    """Maximum size of a file."""

    def __post_init__(self):
        if bytes_of(self.shard, "--shard") < 1:
            raise ValueError(f"--shard {self.shard}: at least one byte is needed, as in 5GB.")


def import_command(argv: Sequence[str]) -> int:
    """Print what is in a folder; return the exit status."""
    with ending_in_words("import"):
        given: Import = parsed(Import, argv, "import")
        print(pretrained(given.folder))
    return 0


def export_command(argv: Sequence[str]) -> int:
    """Write the model of a run; return the exit status."""
    with leaving(), ending_in_words("export"):
        _export(parsed(Export, argv, "export"))
    return 0


def _export(given: Export) -> None:
    check_free_to_write(given.out)
    config = saved_config(given)
    if of_images(config):
        return _export_images(given, config)
    if config.model.pretrained is None and given.like is None:
        raise ValueError(_of_no_folder(given, config))
    parts, restored = saved_state(given, config, master=config.optimizer.master)
    like = _like(given, parts)
    with waiting(f"writing {named(given.out)}"):
        written = export(given.out, parts.layout, restored.state, like, given.dtype, given.shard)
    say(
        f"{named(given.out)}: {named(given.run)} after step {restored.step}, "
        f"{len(like.pieces)} tensors; wrote {by_process(written)}"
    )


def _export_images(given: Export, config: Train) -> None:
    """Write a model of images as one file, with torchvision's names."""
    if given.out.suffix != FILE:
        raise ValueError(
            f"--out {named(given.out)}: a model of images is one file with torchvision's names: "
            f"give a name that ends in {FILE}."
        )
    if config.model.own is not None:
        raise ValueError(f"--model.own {config.model.own}: torchvision has no names for it.")
    if given.dtype is not None or given.shard != SHARD:
        raise ValueError("--dtype, --shard: of models of text. Leave them out.")
    began = config.model.weights
    like = given.like or (began if began is not None and began.is_file() else None)
    parts, restored = saved_state(given, config, master=config.optimizer.master)
    with waiting(f"writing {named(given.out)}"):
        write_vision(given.out, parts.layout, restored.state, parts.model.shape, like)
    say(
        f"{named(given.out)}: {named(given.run)} after step {restored.step}, "
        f"{human(given.out.stat().st_size)}"
    )


def _of_no_folder(given: Export, config: Train) -> str:
    own = config.model.own
    what = f"--model.preset {config.model.preset}" if own is None else f"--model.own {own}"
    return (
        f"{named(given.run)} began from no model's folder ({what}), which would say what files, "
        "names and configuration of transformers are those of this model. Give one of the same "
        "shape: --like FOLDER."
    )


def _like(given: Export, parts: Parts) -> Pretrained:
    """Return the model whose names the files get; refuse one that computes something else."""
    if given.like is None:
        assert parts.pretrained is not None
        return parts.pretrained
    pad = 1 if parts.config.model.own else ROUND_TO
    like = model_of(Model(pretrained=given.like), pad)
    tokens = max(tokens.vocab for tokens in parts.tokens) if parts.pretrained is None else 0
    if tokens > like.config.vocab:
        raise ValueError(
            f"--like {named(given.like)}: its vocabulary has {like.config.vocab} tokens, and the "
            f"run's data {tokens}: the others would be lost. Give a model with at least so many."
        )
    return like
