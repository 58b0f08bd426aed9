"""The names of the Hub in a configuration: a run keeps the commit of each, and reads that one.

`pin_sources` puts the commit behind each name, and `prepare_data` makes a folder of tokens from a
data set of the Hub.
"""

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from hfjax.checkpoint import checkpoint_metadata
from hfjax.checkpoint.directory import list_steps
from hfjax.data.build_dataset import Recipe, build_from_files
from hfjax.data.documents import Sources
from hfjax.data.hub_dataset import download_dataset
from hfjax.data.token_dataset import SPLITS, Meta
from hfjax.data.token_writer import is_data_set
from hfjax.data.tokenizer import ByteTokenizer, load_tokenizer
from hfjax.distributed.consensus import run_on_all, run_on_first, speaks
from hfjax.trainer.config import TrainConfig
from hfjax.utils.atomic import atomic_directory
from hfjax.utils.hub import SHORT, HubName, is_model_name, parse_dataset, parse_model, resolve
from hfjax.utils.tables import quote
from hfjax.utils.write_files import user_cache
from hfjax.weights.hub import commit_line, find_commit

VALID = 0.05  # of documents, where a data set has no files to validate on
FORMAT = 1  # of prepared folders: another number makes them anew


def pin_sources(config: TrainConfig, checkpoints: Path) -> tuple[TrainConfig, list[str]]:
    """Return the configuration with the commit of each name of the Hub, and lines about them.

    A run that resumes keeps its commits, wherever a branch has moved to. All processes call this.

    Args:
        config: The configuration of the run.
        checkpoints: The folder of its checkpoints.
    """
    model, data = config.model.pretrained, config.data
    names = [name for name in (*data.train, data.valid) if name and parse_dataset(name)]
    if not names and (model is None or parse_model(model) is None):
        return config, []
    pinned = run_on_first(lambda: _pin(model, names, checkpoints))
    commits = pinned["data"]
    train = tuple(commits.get(name, name) for name in data.train)
    valid = commits.get(data.valid, data.valid)
    model_config = replace(config.model, pretrained=pinned["model"])
    data_config = replace(data, train=train, valid=valid)
    return replace(config, model=model_config, data=data_config), pinned["lines"]


def _pin(model: str | None, names: Sequence[str], checkpoints: Path) -> dict[str, Any]:
    """Return the model and the data sets with their commits, and lines about them."""
    earlier, lines = _recorded_sources(checkpoints), list[str]()
    pinned_model = None if model is None else _pin_model(model, earlier["model"], lines)
    data = {name: _pin_dataset(name, earlier["data"], lines) for name in dict.fromkeys(names)}
    return {"model": pinned_model, "data": data, "lines": lines}


def _recorded_sources(checkpoints: Path) -> dict[str, Any]:
    """Return the model and the data sets that a run's checkpoints record, if it has any."""
    model, data = {}, {}
    for step in reversed(list_steps(checkpoints)):
        with suppress(ValueError):  # a damaged one, which restoring passes over, too
            config = checkpoint_metadata(checkpoints, step)["config"]
            if isinstance(config, dict):
                model, data = config.get("model") or {}, config.get("data") or {}
                break
    sources = [*(data.get("train") or ()), data.get("valid")]
    return {"model": model.get("pretrained"), "data": [s for s in sources if s]}


def _pin_model(source: str, earlier: str | None, lines: list[str]) -> str:
    """Return a model with its commit; a folder as it is, also one that is gone since."""
    name = parse_model(source)
    if name is None:
        return source
    if is_model_name(source) and (folder := os.path.abspath(source)) == earlier:
        return folder
    before = parse_model(earlier or "")
    if name.commit is None and is_model_name(source) and before and _is_same(name, before):
        lines.extend(_moved_lines(name, before))
        return str(before)
    commit = find_commit(source)
    if commit is None:
        return source
    lines.append(commit_line(name.at(commit)))
    return str(name.at(commit))


def _pin_dataset(source: str, earlier: Sequence[str], lines: list[str]) -> str:
    """Return a data set with its commit."""
    name = parse_dataset(source)
    assert name is not None
    if name.commit is not None:
        return source
    for before in filter(None, map(parse_dataset, earlier)):
        if _is_same(name, before):
            lines.extend(_moved_lines(name, before))
            return str(before)
    pinned = name.at(resolve(name))
    lines.append(commit_line(pinned))
    return str(pinned)


def _is_same(name: HubName, before: HubName) -> bool:
    """Return whether a run recorded this name, at a commit."""
    return before.commit is not None and before.branch == name.branch


def _moved_lines(name: HubName, before: HubName) -> list[str]:
    """Return a line if a branch has moved since a run began; without the Hub nothing is known."""
    old_commit = str(before.revision)
    try:
        commit = resolve(name)
    except ValueError:
        return []
    if commit == old_commit:
        return []
    return [
        f"{name} has moved to commit {commit[:SHORT]}: the run goes on with {old_commit[:SHORT]}, "
        "which it began with"
    ]


# -- data ----------------------------------------------------------------------------------------


def prepare_data(source: str, tokenizer: str | Path = "bytes") -> Path:
    """Return the folder of tokens of a data set on the Hub, prepared once. All processes call it.

    It lies in hfjax's cache, by commit, tokenizer and settings. On each machine the first process
    that comes makes it; the others wait and read it.

    Args:
        source: `hub:org/name[/folder][@revision]`.
        tokenizer: As `hfjax.data.load_tokenizer` takes it.
    """
    name = parse_dataset(source)
    assert name is not None
    pinned = name.at(run_on_first(lambda: resolve(name)))
    return run_on_all(lambda: _prepare(pinned, tokenizer))


def data_lines(folders: Mapping[str, Path]) -> list[str]:
    """Return a line for each data set of the Hub, about its folder of tokens."""
    names = {name: path for text, path in folders.items() if (name := parse_dataset(text))}
    count = lambda path, split: f"{Meta.load(path / split).documents:,}"
    return [
        f"{name.branch}: {count(path, SPLITS[0])} documents to train on, {count(path, SPLITS[1])} "
        f"to validate on; tokens in {quote(path)}"
        for name, path in names.items()
    ]


def _prepare(name: HubName, tokenizer: str | Path) -> Path:
    path = user_cache() / "hub" / _folder_name(name, tokenizer)
    if is_data_set(path):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with lock_file(path.with_name(f".{path.name}.lock")):
        if not is_data_set(path):
            _build(name, path, tokenizer)
    return path


def _folder_name(name: HubName, tokenizer: str | Path) -> str:
    """Return a folder's name, which differs with whatever the tokens depend on."""
    loaded = load_tokenizer(tokenizer)
    identity = "" if isinstance(loaded, ByteTokenizer) else f"{loaded.end} {loaded.inner.to_str()}"
    settings = json.dumps([str(name), identity, VALID, FORMAT])
    digest = hashlib.sha256(settings.encode()).hexdigest()[:16]
    return f"{name.repo.replace('/', '--')}-{str(name.revision)[:SHORT]}-{digest}"


@contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Hold a file's lock, which the system frees if this process dies; wait for whoever has it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(name: HubName, path: Path, tokenizer: str | Path) -> None:
    """Build the parts to train and to validate on, from files of their own if there are any."""
    files = download_dataset(name, progress=speaks())
    try:
        if files.valid:
            with atomic_directory(path) as new:
                _build_part(name, files.train, new / "train", tokenizer)
                _build_part(name, files.valid, new / "valid", tokenizer)
        else:
            fraction = _valid_fraction(files.train)
            _build_part(name, files.train, path, tokenizer, fraction)
    except ValueError as error:
        raise ValueError(
            f"{name}: {error}\nA run reads a data set of the Hub by the column or field 'text'. "
            f"With other settings, make it first: hfjax data {name} --field NAME --data-dir DIR; "
            "then give --data.train DIR."
        ) from None


def _build_part(
    name: HubName, files: tuple[Path, ...], out: Path, tokenizer: str | Path, valid: float = 0.0
) -> None:
    build_from_files(Recipe((str(name),), out, str(tokenizer), valid=valid), files)


def _valid_fraction(files: tuple[Path, ...]) -> float:
    """Return the fraction of documents to validate on: of few documents, at least one."""
    count = sum(1 for _ in islice(Sources(files), math.ceil(1 / VALID)))
    return VALID if count <= 1 else max(VALID, 1 / count)
