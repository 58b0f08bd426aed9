"""A run's own copy of the model folder that it began from: all but the weights.

The folder may be moved or deleted, and a branch of the Hub may move: resuming, evaluation,
generation and export use the copy, `model/`.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hfjax.checkpoint.directory import list_steps
from hfjax.distributed.consensus import run_on_first
from hfjax.trainer.config import TrainConfig
from hfjax.utils.atomic import atomic_directory
from hfjax.utils.hub import is_model_name, parse_model
from hfjax.utils.read_files import (
    MISSING,
    ORDINARY,
    TEXT,
    Check,
    check_fields,
    integer,
    object_of,
    parse_json,
    path_kind,
    read_text,
)
from hfjax.utils.tables import quote
from hfjax.weights.model_folder import (
    CONFIG,
    ModelFolder,
    companion_files,
    read_folder,
    read_json_object,
)
from hfjax.weights.tensor_files import DTYPE_CODES, DTYPES, FileTensor

COPY, TENSORS = "model", "tensors.json"
_is_sizes = lambda x: isinstance(x, list) and all(type(n) is int and n >= 0 for n in x)
FILE_NAME: Check = ("the name of a file", lambda x: isinstance(x, str) and x == Path(x).name != "")
CHECKS: Mapping[str, Check] = {
    "file": FILE_NAME,
    "dtype": (f"one of {', '.join(DTYPES)}", lambda x: isinstance(x, str) and x in DTYPES),
    "shape": ("a list of sizes", _is_sizes),
    "begin": integer(0),
}


def write_copy(folder: ModelFolder, directory: Path) -> None:
    """Write a run's own copy of a model's folder, without the weights."""
    check_replaceable(directory)
    run_copy = directory / COPY
    try:
        with atomic_directory(run_copy, replace=True) as new:
            for path in (folder.path / CONFIG, *companion_files(folder.path)):
                shutil.copyfile(path, new / path.name)
            (new / TENSORS).write_text(json.dumps(_tensor_index(folder), indent=1) + "\n")
    except OSError as wrong:
        raise OSError(wrong.errno, wrong.strerror, str(run_copy)) from None


def check_replaceable(directory: Path) -> None:
    """Refuse a folder in place of the copy that is not one: it would be deleted."""
    run_copy = directory / COPY
    if path_kind(run_copy) != MISSING and (
        not is_copy(run_copy) or any(run_copy.glob("*.safetensors"))
    ):
        raise ValueError(
            f"{quote(run_copy)} is there, and no run has written it. What a run keeps of its model "
            "would take its place: move it away, or give another --run-dir."
        )


def check_separate(folder: Path, directory: Path) -> None:
    """Refuse a run in the folder of its model, or whose copy would replace something else."""
    if path_kind(directory) != MISSING and path_kind(folder) != MISSING:
        if os.path.samefile(folder, directory):
            raise ValueError(
                f"--run-dir {quote(directory)}: it is the folder of --model.pretrained, and a run "
                "writes files of its own. Give another --run-dir."
            )
    check_replaceable(directory)


def is_copy(path: Path) -> bool:
    """Return whether a folder is a run's own copy, which has no weights."""
    return path_kind(path / TENSORS) == ORDINARY


def _tensor_index(folder: ModelFolder) -> dict[str, Any]:
    """Return the record of the tensors, in the order of the folder's own files."""
    tensors = {
        t.name: {
            "file": t.file.name,
            "dtype": DTYPE_CODES[t.dtype],
            "shape": t.shape,
            "begin": t.begin,
        }
        for t in folder.tensors.values()
    }
    return {
        "from": folder.hub or os.path.abspath(folder.path),
        "fingerprint": folder.fingerprint,
        "tensors": tensors,
    }


def read_copy(path: Path) -> ModelFolder:
    """Return the model folder that a run's copy describes; its tensor files are not there."""
    try:
        fields = {"fingerprint": TEXT, "tensors": object_of("tensors", lambda x: True)}
        record = check_fields(parse_json(read_text(path / TENSORS)), fields)
        tensors = {name: _parse_tensor(path, name, of) for name, of in record["tensors"].items()}
        folder = ModelFolder(path, read_json_object(path / CONFIG), tensors)
        if (fingerprint := folder.fingerprint) != record["fingerprint"]:
            raise ValueError(f"its contents have the hash {fingerprint}, written was another")
    except ValueError as wrong:
        why = str(wrong).rstrip(".")
        raise ValueError(
            f"{quote(path)}, the run's copy of its model, is damaged ({why}). Copy the run again; "
            "or put the folder that it began from in its place."
        ) from None
    return folder


def _parse_tensor(path: Path, name: str, of: Any) -> FileTensor:
    check_fields(of, CHECKS)
    return FileTensor(path / of["file"], name, DTYPES[of["dtype"]], tuple(of["shape"]), of["begin"])


def model_name(folder: ModelFolder) -> str:
    """Return the name of the folder; for a copy, that of the folder that it was made from."""
    source = folder.hub or str(folder.path)
    if is_copy(folder.path):
        source = copied_from(folder.path)
    name = parse_model(source)
    return Path(os.path.abspath(source if name is None else name.repo)).name


def copied_from(run_copy: Path) -> str:
    """Return what a run's copy was made from: an absolute path, or a name of the Hub."""
    return str(parse_json(read_text(run_copy / TENSORS)).get("from"))


# -- resuming --------------------------------------------------------------------------------------


def resume_from_copy(config: TrainConfig, checkpoints: Path) -> tuple[TrainConfig, str | None]:
    """Return the configuration with the run's own copy in place of its folder, if it resumes.

    Also return a message about the folder, if any. One that begins may not lie in the folder. All
    processes call this.

    Args:
        config: The configuration of the run.
        checkpoints: The folder of its checkpoints.
    """
    source, run_copy = config.model.pretrained, config.directory / COPY
    if source is None:
        return config, None
    if not run_on_first(lambda: bool(list_steps(checkpoints))):
        run_on_first(lambda: check_separate(Path(source), config.directory))
        return config, None
    note = run_on_first(lambda: _compare_with_copy(source, run_copy))
    if config.lora.rank is not None:  # the weights below adapters are in no checkpoint
        if note is not None:
            raise ValueError(f"{note.splitlines()[0]}\n{needs_base(source)}")
        return config, None
    return replace(config, model=replace(config.model, pretrained=str(run_copy))), note


def needs_base(source: str) -> str:
    """Return the message about a run with adapters whose base is gone."""
    return (
        f"The run's checkpoints hold adapters alone: the weights of {quote(source)} are needed. If "
        "the folder was moved, give where it is now: --model.pretrained FOLDER."
    )


def _compare_with_copy(source: str, run_copy: Path) -> str | None:
    """Refuse another model than the run's; return a message if its folder is gone."""
    if not is_copy(run_copy):
        raise ValueError(
            f"--model.pretrained {quote(source)}: {quote(run_copy.parent)} has "
            f"checkpoints, and no copy of a model's folder ({quote(run_copy / TENSORS)}): it began "
            "from something else. Give the flags that it was trained with, or begin anew: "
            "--run-dir ANOTHER."
        )
    copied_folder, pretrained_folder = read_copy(run_copy), Path(source)
    if is_model_name(source) and source != (began_from := copied_from(run_copy)):
        raise ValueError(
            f"--model.pretrained {source} is not the model that {quote(run_copy.parent)} began "
            f"from: that is {quote(began_from)}. Give that one; or begin anew: --run-dir ANOTHER."
        )
    if is_model_name(source):
        return None  # a commit never changes
    try:
        source_folder = (
            read_copy(pretrained_folder)
            if is_copy(pretrained_folder)
            else read_folder(pretrained_folder)
        )
        text, hashes = (
            read_text(pretrained_folder / CONFIG),
            (source_folder.fingerprint, copied_folder.fingerprint),
        )
    except (ValueError, OSError) as wrong:
        if path_kind(pretrained_folder / CONFIG) != ORDINARY or read_text(
            pretrained_folder / CONFIG
        ) == _read_config(run_copy):
            return (
                f"{wrong}\nThe run goes on without it: {quote(run_copy)} has what is needed of it."
            )
        text, hashes = (
            read_text(pretrained_folder / CONFIG),
            ("another config.json", copied_folder.fingerprint),
        )
    if hashes[0] != hashes[1]:
        reason = (
            "its config.json differs" * (text != _read_config(run_copy)) or "its tensors differ"
        )
        raise ValueError(
            f"--model.pretrained {quote(pretrained_folder)} is not the model that "
            f"{quote(run_copy.parent)} began from: {reason} (hash {hashes[0]}, of the run "
            f"{hashes[1]}). Give the folder that it began from; or begin anew: --run-dir ANOTHER."
        )
    return None


def _read_config(run_copy: Path) -> str:
    return read_text(run_copy / CONFIG)
