"""A model's name on the Hub becomes a folder: its commit first, then the files that hfjax reads.

Process 0 finds the commit, and all read that one. Each downloads what its machine's cache does not
have: processes that share a cache take turns, by the locks of the Hub's client.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

from hfjax.distributed.consensus import run_on_all, run_on_first, speaks
from hfjax.utils.hub import (
    PREFIX,
    SHORT,
    HubName,
    download,
    exactly,
    is_model_name,
    list_files,
    parse_model,
    resolve,
)
from hfjax.utils.tables import first_lines, quote
from hfjax.weights.model_folder import (
    COMPANIONS,
    CONFIG,
    INDEX,
    SINGLE_FILE,
    ModelFolder,
    has_file,
    index_files,
    read_folder,
)

logger = logging.getLogger(__name__)

COMPANION_FILES = (*COMPANIONS, "*.jinja", "*.txt")
NOT_READ = ("*/*", "*.bin", "*.pth", "consolidated*")  # folders, pickles, and weights once more
PICKLE = re.compile(r"\.(bin|pth|pt|ckpt)$")


def open_folder(source: str | Path) -> ModelFolder:
    """Return the content of a folder, or of a model of the Hub, downloaded. All processes call it.

    Args:
        source: A path, or `org/name[@revision]`, unless a folder has that name.
    """
    name = find_model(source)
    if name is None:
        return run_on_all(lambda: read_folder(Path(source)))
    return run_on_all(lambda: read_model(name))


def find_model(source: str | Path) -> HubName | None:
    """Return a model's name with its commit; None for a folder. All processes call it."""
    commit = run_on_first(lambda: find_commit(source))
    name = parse_model(source)
    return None if commit is None or name is None else name.at(commit)


def find_commit(source: str | Path) -> str | None:
    """Return the commit of a model of the Hub now; None for a folder. A line says which wins."""
    if str(source).startswith(PREFIX):
        rest = str(source).removeprefix(PREFIX)
        raise ValueError(f"{quote(source)}: models are named without {PREFIX}, as {quote(rest)}.")
    name = parse_model(source)
    if name is None:
        return None
    if not is_model_name(source):
        _log_once(
            f"{quote(source)} is a folder here, which is read; the Hub is not asked ({name}@main "
            "means the Hub)"
        )
        return None
    if name.revision is not None and Path(name.repo).exists():
        _log_once(f"{name} is read from the Hub: {name.repo} here is a folder without revisions")
    return resolve(name)


@cache
def _log_once(line: str) -> None:
    if speaks():
        logger.info("%s", line)


def read_model(name: HubName) -> ModelFolder:
    """Return the content of a model of the Hub at a commit; download what is missing."""
    path = download_model(name)
    with _advise_to_download_again(name):
        return replace(read_folder(path), hub=str(name))


@contextmanager
def _advise_to_download_again(name: HubName) -> Iterator[None]:
    """Add to an error about a file in the Hub's cache how to take it out."""
    try:
        yield
    except ValueError as error:
        raise ValueError(
            f"{name}: {error} To download it again, take it out of the Hub's cache: hf cache rm "
            f"model/{name.repo}"
        ) from None


def download_model(name: HubName) -> Path:
    """Return the folder of a model at a commit: its configuration, weights and tokenizer.

    The files of weights are those of its index, or model.safetensors.
    """
    path = download(name, exactly([CONFIG, INDEX]), progress=False)
    if not has_file(path / CONFIG):
        raise ValueError(
            f"{name} has no {CONFIG}, which says what the model is. {_contents(name)} Give a model "
            "that transformers loads; an adapter is none: merge it into its model first."
        )
    shards = [SINGLE_FILE]
    if has_file(path / INDEX):
        with _advise_to_download_again(name):
            shards = list(dict.fromkeys(index_files(path / INDEX).values()))
    path = download(name, [*exactly(shards), *COMPANION_FILES], NOT_READ, speaks())
    if not any((path / shard).is_file() for shard in shards):
        raise ValueError(_no_weights_message(name))
    return path


def download_tokenizer(name: HubName) -> Path:
    """Return the folder of a model at a commit with its tokenizer and configuration only."""
    return download(name, [*exactly([CONFIG]), *COMPANION_FILES], NOT_READ, speaks())


def _no_weights_message(name: HubName) -> str:
    """Return the error message for a model without safetensors."""
    pickles = [file for file in list_files(name) if PICKLE.search(file)]
    if pickles:
        return (
            f"{name} holds its weights as pickles ({quote(pickles[0])}), which run code when they "
            f"are read: they are never downloaded. Look for a revision with {SINGLE_FILE} (@refs/"
            "pr/N), or write it with transformers: model.save_pretrained(folder)."
        )
    return (
        f"{name} has neither {SINGLE_FILE} nor {INDEX} with its files. {_contents(name)} Give a "
        "model with weights in safetensors, as transformers writes them."
    )


def _contents(name: HubName) -> str:
    """Return a sentence about the files of a name."""
    files = list_files(name)
    return f"It has {', '.join(map(quote, first_lines(files, 6)))}." if files else "It is empty."


def commit_line(name: HubName) -> str:
    """Return the line about the commit that a run reads.

    >>> commit_line(HubName("org/name", "model", 40 * "a"))
    'org/name: commit aaaaaaaaaaaa of the Hub'
    """
    return f"{name.branch}: commit {str(name.revision)[:SHORT]} of the Hub"
