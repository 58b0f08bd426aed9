"""A model folder in Hugging Face's format: config.json, an index, and files of tensors.

The index lists the files of the model; without one it is `model.safetensors`. Pickles are never
opened.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hfjax.utils.read_files import (
    FOLDER,
    MISSING,
    ORDINARY,
    check_fields,
    object_of,
    parse_json,
    path_kind,
    read_text,
)
from hfjax.utils.tables import quote
from hfjax.weights.tensor_files import FileTensor, read_header

CONFIG, SINGLE_FILE = "config.json", "model.safetensors"
INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"
COMPANIONS = (  # copied along with a model, if its folder has them
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("chat_template*", GENERATION),
)
PICKLES = ("*.bin", "*.pth", "*.pt", "*.ckpt")
NAMES = object_of("names of files", lambda x: isinstance(x, str))


@dataclass(frozen=True)
class ModelFolder:
    """The content of a model folder; no weights were read.

    Attributes:
        path: The path of the folder.
        config: The content of config.json.
        tensors: The tensors by name, each with its file.
        hub: The name of the model on the Hub with its commit, if it is from there.
    """

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, FileTensor]
    hub: str | None = None

    @property
    def source(self) -> str:
        """What the folder is called in messages: its name on the Hub, or its path."""
        return self.hub or quote(self.path)

    @property
    def files(self) -> list[Path]:
        """The files of tensors, without duplicates."""
        return list(dict.fromkeys(tensor.file for tensor in self.tensors.values()))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of config.json and of the tensors' headers; no weights are read."""
        digest = hashlib.sha256(read_text(self.path / CONFIG).encode())
        for name, t in sorted(self.tensors.items()):
            digest.update(f"{name} {t.file.name} {t.dtype} {t.shape} {t.begin}\n".encode())
        return digest.hexdigest()[:16]


def read_folder(path: Path) -> ModelFolder:
    """Return the content of a folder; ValueError says what is missing or damaged."""
    if (kind := path_kind(path)) != FOLDER:
        raise ValueError(
            f"{quote(path)} is {kind}: the folder of a model is expected, with {CONFIG} and files "
            "of safetensors, as transformers' save_pretrained writes it; or the name of a model on "
            "the Hub, ORG/NAME."
        )
    if not has_file(path / CONFIG):
        raise ValueError(
            f"{quote(path)} has no {CONFIG}, which says what the model is. Give the folder that "
            "holds it: one of a model as transformers' save_pretrained writes it."
        )
    config = read_json_object(path / CONFIG)
    companion_files(path)  # report dangling links now
    index, has_single_file = path / INDEX, has_file(path / SINGLE_FILE)
    if has_file(index):
        if has_single_file and SINGLE_FILE not in index_files(index).values():
            raise ValueError(
                f"{quote(path)} has {SINGLE_FILE} and {INDEX} of other files: which one is the "
                "model? Take one of them out."
            )
        return ModelFolder(path, config, _read_sharded(path, index))
    if has_single_file:
        return ModelFolder(path, config, read_header(path / SINGLE_FILE))
    raise ValueError(_no_weights_message(path))


def has_file(path: Path) -> bool:
    """Return whether a file exists; refuse a path that is no file, such as a dangling link."""
    if (kind := path_kind(path)) not in (ORDINARY, MISSING):
        raise ValueError(
            f"{quote(path)} is {kind}: an ordinary file is expected. Get it again, or take it out."
        )
    return kind == ORDINARY


def companion_files(path: Path) -> list[Path]:
    """Return the files of a model folder to copy along with it; refuse dangling links."""
    files = [file for pattern in COMPANIONS for file in sorted(path.glob(pattern))]
    return [file for file in files if path_kind(file) != FOLDER and has_file(file)]


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file."""
    try:
        record = parse_json(read_text(path))
        if not isinstance(record, dict):
            raise ValueError("an object is expected")
    except ValueError as error:
        raise ValueError(f"{quote(path)} cannot be read: {error}.".replace("..", ".")) from None
    return record


def _read_sharded(path: Path, index: Path) -> dict[str, FileTensor]:
    """Return the tensors that an index names, each from its file."""
    shards = index_files(index)
    for shard in sorted({*shards.values()}):
        if Path(shard).name != shard or shard in ("", ".", ".."):
            raise ValueError(
                f"{quote(index)} names the file {quote(shard)}, which is not in the folder itself: "
                "files of a model lie beside their index."
            )
        if (kind := path_kind(path / shard)) != ORDINARY:
            raise ValueError(
                f"{quote(index)} names the file {quote(shard)}, which is {kind}: get it again."
            )
    headers = {shard: read_header(path / shard) for shard in dict.fromkeys(shards.values())}
    missing = [name for name, shard in shards.items() if name not in headers[shard]]
    if missing:
        example = f"{quote(missing[0])} in {quote(shards[missing[0]])}"
        more = f", and {len(missing) - 1} more" * (len(missing) > 1)
        raise ValueError(
            f"{quote(index)} names tensors that their files do not hold: {example}{more}. The "
            "index and the files are not of one model: get them again."
        )
    return {name: headers[shard][name] for name, shard in shards.items()}


def index_files(index: Path) -> dict[str, str]:
    """Return the file of each tensor in an index."""
    try:
        return check_fields(read_json_object(index), {"weight_map": NAMES})["weight_map"]
    except ValueError as error:
        raise ValueError(f"{quote(index)}: {error}.".replace("..", ".")) from None


def _no_weights_message(path: Path) -> str:
    """Return the error message for a folder without readable weights."""
    pickles = sorted(p.name for pattern in PICKLES for p in path.glob(pattern))
    if pickles:
        return (
            f"{quote(path)} holds its weights as pickles ({quote(pickles[0])}), which run code "
            "when they are read: they are never opened. Get the model as safetensors "
            f"({SINGLE_FILE}), or write it with transformers: model.save_pretrained(folder)."
        )
    others = sorted(p.name for p in path.glob("*.safetensors"))
    if others:
        return (
            f"{quote(path)} has neither {SINGLE_FILE} nor {INDEX}, which says what the files are "
            f"({quote(others[0])}{', …' * (len(others) > 1)}). Get the index, too; an adapter is "
            "no model: merge it into one first."
        )
    return f"{quote(path)} has no weights: neither {SINGLE_FILE} nor {INDEX} with its files."
