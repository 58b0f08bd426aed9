"""The files of a data set on the Hub: which are read, as text, JSONL or Parquet.

A data set there is a repository: files of one kind (Parquet, else JSONL, else text), whose paths
say to which split they belong, as the Hub reads them. Files for tests are never trained on.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from hfjax.data.documents import LINES, TABLES, suffix
from hfjax.utils.hub import HubName, download, exactly, list_files
from hfjax.utils.tables import first_lines, quote

KINDS = {"Parquet": TABLES, "JSONL": LINES, "text": (".txt",)}
TRAIN, VALID, TEST = "train", "valid", "test"
SPLIT_WORDS = {  # of paths, as the Hub's data sets use them
    TRAIN: ("train", "training"),
    VALID: ("valid", "validation", "val", "dev"),
    TEST: ("test", "testing", "eval", "evaluation"),
}
SHOWN = 6  # names in a message


@dataclass(frozen=True)
class HubFiles:
    """The files of a data set that are read, downloaded; and how many others it has.

    Attributes:
        train: Those to train on.
        valid: Those to validate on.
        passed_over: The number of files that are not read: for tests, or of another kind.
    """

    train: tuple[Path, ...]
    valid: tuple[Path, ...]
    passed_over: int


def download_dataset(
    name: HubName, pattern: str | None = None, valid: bool = True, progress: bool = True
) -> HubFiles:
    """Return the files of a data set at a commit, downloaded into the Hub's cache.

    Args:
        name: The name with a commit.
        pattern: The files to read, of any split. None: those of the split to train on.
        valid: Whether to read files to validate on, too.
        progress: Whether to show it on standard error.
    """
    files = list_files(name)
    in_folder = [f for f in files if PurePosixPath(f).is_relative_to(name.folder or ".")]
    chosen = [f for f in in_folder if pattern is None or _matches(f, pattern)]
    kind, paths = _files_of_a_kind(name, chosen, files)
    if pattern is None:
        _check_one_folder(name, paths)
    splits = {split: [] for split in SPLIT_WORDS}
    for path in paths:
        splits[TRAIN if pattern else split_of(path)].append(path)
    if not splits[TRAIN]:
        raise ValueError(
            f"{name} has no files to train on, only {_shorten(paths)}. Name those to read: hfjax "
            f"data {name} --pattern '*.{kind.lower()}' --data-dir DIR"
        )
    read = [*splits[TRAIN], *(splits[VALID] if valid else [])]
    folder = download(name, exactly(read), progress=progress)
    here = lambda split: tuple(folder / path for path in splits[split] if path in read)
    return HubFiles(here(TRAIN), here(VALID), len(in_folder) - len(read))


def _matches(path: str, pattern: str) -> bool:
    """Return whether a path matches a pattern, in which **/ may stand for no folder."""
    return fnmatchcase(path, pattern) or fnmatchcase(path, pattern.removeprefix("**/"))


def _files_of_a_kind(
    name: HubName, paths: Sequence[str], files: Sequence[str]
) -> tuple[str, list[str]]:
    """Return the first kind that there is, and its files; refuse a data set without text."""
    for kind, suffixes in KINDS.items():
        if chosen := [path for path in paths if suffix(Path(path)) in suffixes]:
            return kind, chosen
    raise ValueError(
        f"{name} has no files of Parquet, JSONL or text ({', '.join(sum(KINDS.values(), ()))}). "
        f"It has {_shorten(files)}. Look for a revision that has them (@refs/convert/parquet is "
        "one that the Hub makes of many), or convert them and give the files to hfjax data."
    )


def _check_one_folder(name: HubName, paths: Sequence[str]) -> None:
    """Refuse a data set of several folders, which are subsets that are not to be mixed."""
    folders = sorted({_subset(path) for path in paths})
    if len(folders) > 1:
        at = f"@{name.revision}" * (name.revision is not None)
        examples = [f"hub:{name.repo}/{folder}{at}" for folder in folders if folder]
        raise ValueError(
            f"{name} has {len(folders)} folders of data: {_shorten([f or '.' for f in folders])}. "
            f"They may hold the same text twice: name those to read, as {examples[0]}."
        )


def _subset(path: str) -> str:
    """Return the folder of a file, without a last part that only says its split."""
    folder = PurePosixPath(path).parent
    if _word_split(folder.name) is not None and folder.name in sum(SPLIT_WORDS.values(), ()):
        folder = folder.parent
    return "" if str(folder) == "." else str(folder)


def split_of(path: str) -> str:
    """Return the split of a file, by its name, else by the folders above; to train on without any.

    >>> split_of("data/test-00000-of-00001.parquet"), split_of("validation/a.jsonl")
    ('test', 'valid')
    """
    parts = reversed(PurePosixPath(path).parts)
    return next((split for part in parts if (split := _word_split(part))), TRAIN)


def _word_split(part: str) -> str | None:
    """Return the split that a part of a path names."""
    words = re.split(r"[^a-z]+", part.lower())
    return next((s for s, names in SPLIT_WORDS.items() if set(names) & set(words)), None)


def _shorten(names: Sequence[str]) -> str:
    return ", ".join(map(quote, first_lines(list(names), SHOWN))) or "no file"
