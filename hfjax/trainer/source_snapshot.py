"""What a run keeps of the model's folder that it began from: all but the weights.

The folder may be moved or deleted: the run goes on, is evaluated, writes text and is exported by
its own copy, `model/`.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hfjax.checkpoint.directory import steps_in
from hfjax.distributed.consensus import agreed
from hfjax.trainer.config import Train
from hfjax.utils.atomic import atomic_directory
from hfjax.utils.read_files import (
    MISSING,
    ORDINARY,
    TEXT,
    Kind,
    check_fields,
    contents,
    object_of,
    parsed,
    what_is,
    whole,
)
from hfjax.utils.tables import named
from hfjax.weights.model_folder import CONFIG, ModelFolder, companions, read_folder, read_object
from hfjax.weights.tensor_files import DTYPES, WORDS, FileTensor

COPY, TENSORS = "model", "tensors.json"
_sizes = lambda x: isinstance(x, list) and all(type(n) is int and n >= 0 for n in x)
_name: Kind = ("the name of a file", lambda x: isinstance(x, str) and x == Path(x).name != "")
KINDS: Mapping[str, Kind] = {
    "file": _name,
    "dtype": (f"one of {', '.join(DTYPES)}", lambda x: isinstance(x, str) and x in DTYPES),
    "shape": ("a list of sizes", _sizes),
    "begin": whole(0),
}


def keep(folder: ModelFolder, directory: Path) -> None:
    """Write a run's own copy of what a model's folder says."""
    check_ours(directory)
    own = directory / COPY
    try:
        with atomic_directory(own, replace=True) as new:
            for path in (folder.path / CONFIG, *companions(folder.path)):
                shutil.copyfile(path, new / path.name)
            (new / TENSORS).write_text(json.dumps(_told(folder), indent=1) + "\n")
    except OSError as wrong:
        raise OSError(wrong.errno, wrong.strerror, str(own)) from None


def check_ours(directory: Path) -> None:
    """Refuse a folder in the place of the copy that is none: it would be deleted."""
    own = directory / COPY
    if what_is(own) != MISSING and (not is_copy(own) or any(own.glob("*.safetensors"))):
        raise ValueError(
            f"{named(own)} is there, and no run has written it. What a run keeps of its model "
            "would take its place: move it away, or give another --out."
        )


def check_apart(folder: Path, directory: Path) -> None:
    """Refuse a run in the folder of its model, and one whose copy would take another's place."""
    if what_is(directory) != MISSING and what_is(folder) != MISSING:
        if os.path.samefile(folder, directory):
            raise ValueError(
                f"--out {named(directory)}: it is the folder of --model.pretrained, and a run "
                "writes files of its own. Give another --out."
            )
    check_ours(directory)


def is_copy(path: Path) -> bool:
    """Return whether a folder is a run's own copy, which has no weights."""
    return what_is(path / TENSORS) == ORDINARY


def _told(folder: ModelFolder) -> dict[str, Any]:
    """Return what is written of the tensors, in the order of the folder's own files."""
    tensors = {
        t.name: {"file": t.file.name, "dtype": WORDS[t.dtype], "shape": t.shape, "begin": t.begin}
        for t in folder.tensors.values()
    }
    return {
        "from": os.path.abspath(folder.path),
        "fingerprint": folder.fingerprint,
        "tensors": tensors,
    }


def read_copy(path: Path) -> ModelFolder:
    """Return the folder that a run's own copy is of: its files of tensors are not there."""
    try:
        fields = {"fingerprint": TEXT, "tensors": object_of("tensors", lambda x: True)}
        found = check_fields(parsed(contents(path / TENSORS)), fields)
        tensors = {name: _tensor(path, name, of) for name, of in found["tensors"].items()}
        folder = ModelFolder(path, read_object(path / CONFIG), tensors)
        if (now := folder.fingerprint) != found["fingerprint"]:
            raise ValueError(f"its contents have the hash {now}, written was another")
    except ValueError as wrong:
        why = str(wrong).rstrip(".")
        raise ValueError(
            f"{named(path)}, the run's copy of its model, is damaged ({why}). Copy the run again; "
            "or put the folder that it began from in its place."
        ) from None
    return folder


def _tensor(path: Path, name: str, of: Any) -> FileTensor:
    check_fields(of, KINDS)
    return FileTensor(path / of["file"], name, DTYPES[of["dtype"]], tuple(of["shape"]), of["begin"])


def name_of_model(folder: ModelFolder) -> str:
    """Return what the folder is called, or was where the run began."""
    place: Any = folder.path
    if is_copy(folder.path):
        place = parsed(contents(folder.path / TENSORS)).get("from")
    return Path(os.path.abspath(str(place))).name


# -- going on --------------------------------------------------------------------------------------


def going_on(config: Train, steps: Path) -> tuple[Train, str | None]:
    """Return the configuration with a run's own copy in place of its folder, if the run goes on.

    And what is to be said of the folder. All processes call this.

    Args:
        config: Of the run.
        steps: Where its checkpoints are.
    """
    given, own = config.model.pretrained, config.directory / COPY
    if given is None or not agreed(lambda: bool(steps_in(steps))):
        return config, None
    said = agreed(lambda: _compared(given, own))
    return replace(config, model=replace(config.model, pretrained=own)), said


def _compared(given: Path, own: Path) -> str | None:
    """Refuse a folder of another model than the run's; return what to say of one that is gone."""
    if not is_copy(own):
        raise ValueError(
            f"--model.pretrained {named(given)}: {named(own.parent)} has checkpoints, and no copy "
            f"of a model's folder ({named(own / TENSORS)}): it began from something else. Give the "
            "flags that it was trained with, or begin anew: --out ANOTHER."
        )
    mine = read_copy(own)
    try:
        there = read_copy(given) if is_copy(given) else read_folder(given)
        text, hashes = contents(given / CONFIG), (there.fingerprint, mine.fingerprint)
    except (ValueError, OSError) as wrong:
        if what_is(given / CONFIG) != ORDINARY or contents(given / CONFIG) == _config(own):
            return f"{wrong}\nThe run goes on without it: {named(own)} has what is needed of it."
        text, hashes = contents(given / CONFIG), ("another config.json", mine.fingerprint)
    if hashes[0] != hashes[1]:
        what = "its config.json differs" * (text != _config(own)) or "its tensors differ"
        raise ValueError(
            f"--model.pretrained {named(given)} is not the model that {named(own.parent)} began "
            f"from: {what} (hash {hashes[0]}, of the run {hashes[1]}). Give the folder that it "
            "began from; or begin anew: --out ANOTHER."
        )
    return None


def _config(own: Path) -> str:
    return contents(own / CONFIG)
