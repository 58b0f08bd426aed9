"""`hfjax data`: makes a data set, or shows its contents."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from hfjax.cli.arguments import parse_flags
from hfjax.data.build_dataset import (
    PreparedDataset,
    Progress as Tell,
    Recipe,
    build_from_files,
    find_inputs,
)
from hfjax.data.documents import KNOWN, list_visible, suffix
from hfjax.data.images import ImageSet, check_same_classes, parts_of
from hfjax.data.images.find_images import CLASSES
from hfjax.data.images.report import examine, format_report
from hfjax.data.token_dataset import META, SPLITS, Meta, TokenSet
from hfjax.utils.command_errors import FAILED, report_errors, run_command
from hfjax.utils.hub import parse_dataset
from hfjax.utils.image_names import contains_images
from hfjax.utils.tables import align, escape_controls, human, quote
from hfjax.weights.hub import download_tokenizer, find_model

SHOWN = 400  # tokens that are decoded


@dataclass(frozen=True)
class DataCommand:
    """Make a data set of token files from text, JSONL or Parquet; or --show one.

    Of a folder of images it shows what is in it: images are read in place, nothing is written.
    """

    inputs: tyro.conf.Positional[tuple[str, ...]] = ()
    """Files, folders of .txt, .md, .jsonl, .parquet (.gz), images; hub:ORG/NAME (default: none)."""

    data_dir: Path | None = None
    """New folder of the data set; it appears when complete (default: none)."""

    tokenizer: str = "bytes"
    """bytes, bpe (trained here), a tokenizer.json, data set, model or ORG/NAME."""

    vocab: int | None = None
    """Size of a bpe vocabulary (default: 8192)."""

    valid: float = 0.0
    """Fraction of documents for validation; the folder then has train/ and valid/."""

    field: str = "text"
    """Field of JSONL, or column of Parquet, that holds the text."""

    pattern: str | None = None
    """Files to read of a folder, as '**/*.py' (default: all of known types)."""

    append_end: bool = True
    """End each document with byte 0, or the tokenizer's end of text."""

    end_token: str | None = None
    """Name of the end token in a tokenizer.json (default: one of the usual ones)."""

    errors: str = "strict"
    """Text that is not UTF-8: strict refuses it, replace writes U+FFFD."""

    overwrite: bool = False
    """Replace the data set that is at --data-dir."""

    show: Path | None = None
    """Show what this data set holds and how it begins (default: none)."""

    verify: bool = False
    """Read all of --show and compare its CRC32s."""


def main(argv: Sequence[str]) -> int:
    """Run `hfjax data` with these arguments; return the exit status."""
    with report_errors("data"):
        command = parse_flags(DataCommand, argv, "data")
    return run(command)


def run(command: DataCommand) -> int:
    """Make or show a data set; return the exit status."""
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    act = _make if command.show is None else _show
    return run_command("data", lambda: act(command, console))


def _make(command: DataCommand, console: Console) -> int | None:
    if command.verify:
        raise ValueError("--verify goes with --show DIR.")
    if _are_images(command):
        return _print_images(command, console)
    if command.data_dir is None or not command.inputs:
        missing = [n for n in command.inputs if not (parse_dataset(n) or Path(n).exists())]
        gone = f"{quote(missing[0])}: there is no such file or folder; " if missing else ""
        raise ValueError(
            f"{gone}name what to read and where to write: hfjax data INPUT … --data-dir DIR; or a "
            "data set to look at: hfjax data --show DIR"
        )
    names = (field.name for field in fields(Recipe) if field.name != "out")
    recipe = Recipe(out=command.data_dir, **{name: getattr(command, name) for name in names})
    recipe, files, passed_over = find_inputs(recipe)
    recipe = replace(recipe, tokenizer=_local_tokenizer(recipe.tokenizer))
    with _progress() as progress:
        dataset = build_from_files(recipe, files, passed_over, progress)
    _print_summary(dataset, console)
    return None


def _local_tokenizer(source: str) -> str:
    """Return a tokenizer as `load_tokenizer` takes it: of a model of the Hub, it is downloaded."""
    name = find_model(source)
    return source if name is None else str(download_tokenizer(name))


def _are_images(command: DataCommand) -> bool:
    """Return whether folders of images are given; with --data-dir, those with text are text."""
    folders = [Path(name) for name in command.inputs]
    if (
        not folders
        or command.pattern
        or not all(p.is_dir() and contains_images(p) for p in folders)
    ):
        return False
    return command.data_dir is None or not any(
        suffix(path) in KNOWN and path.name != CLASSES
        for folder in folders
        for path in list_visible(folder, "**/*")
    )


def _print_images(command: DataCommand, console: Console) -> int:
    """Print the contents of a folder of images; return 1 if some cannot be used."""
    root = command.inputs[0]
    if command.data_dir is not None:
        raise ValueError(
            f"--data-dir {quote(command.data_dir)}: {quote(root)} holds images, which are read "
            "in place, so nothing is written. Leave out --data-dir to see what is in it; give the "
            "folder itself to hfjax.data.images.ImageLoader."
        )
    if len(command.inputs) > 1:
        raise ValueError("of folders of images give one at a time.")
    for field in fields(command):
        if field.name != "inputs" and getattr(command, field.name) != field.default:
            raise ValueError(
                f"--{field.name.replace('_', '-')}: {quote(root)} holds images; leave it out."
            )
    splits = parts_of(root) or {"": Path(root)}
    sets = [ImageSet(folder) for folder in splits.values()]
    faults = 0
    for number, data in enumerate(sets):
        with _progress() as progress:
            report = examine(data, progress)
        console.print("\n".join([*[""] * (number > 0), *format_report(report)]))
        faults += len(report.faults)
    if len(sets) == 2:
        check_same_classes(*sets)
    return FAILED if faults else 0


def _print_summary(dataset: PreparedDataset, console: Console) -> None:
    _print_splits(dataset.out, dataset.parts, console)
    console.print(f"\nfiles read: {dataset.files}; {quote(dataset.out)} is whole.")
    if dataset.passed_over:
        console.print(
            f"files of another kind, not read: {dataset.passed_over} (--pattern '**/*' reads all)."
        )
    if dataset.empty:
        console.print(f"documents without text, left out: {dataset.empty}.")
    for line in _lost_text_warnings(dataset):
        console.print(line)
    vocab = next(iter(dataset.parts.values())).vocab
    if dataset.bpe_vocab not in (None, vocab):
        console.print(
            f"The text has pairs for a vocabulary of {vocab} only; --vocab asked for "
            f"{dataset.bpe_vocab}."
        )


def _lost_text_warnings(dataset: PreparedDataset) -> Iterator[str]:
    """Yield warnings of text that a tokenizer cannot represent."""
    if dataset.dropped:
        yield (
            f"warning: {dataset.dropped:,} characters have no token in the tokenizer and are left "
            "out of the data: is it the one for this text?"
        )
    if dataset.unknown:
        num_tokens = sum(meta.tokens for meta in dataset.parts.values())
        yield (
            f"warning: {dataset.unknown:,} of {num_tokens:,} tokens are the tokenizer's token for "
            "unknown text, from which that text does not come back."
        )


def _print_splits(directory: Path, splits: dict[str, Meta], console: Console) -> None:
    """Print a line for each split of a data set."""
    lines = [["data set", "documents", "tokens", "vocabulary", "on disk", "tokens per byte"]]
    for name, meta in splits.items():
        folder = directory / name
        size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        rate = f"{meta.tokens / meta.text:.3f}" if meta.text else "-"
        numbers = [f"{n:,}" for n in (meta.documents, meta.tokens, meta.vocab)]
        lines.append([name or quote(directory.name), *numbers, human(size), rate])
    head, *body = align(lines, numbers=range(1, 6))
    console.print(head, style="bold")
    console.print("\n".join(body))


def _show(command: DataCommand, console: Console) -> None:
    assert command.show is not None
    if command.inputs or command.data_dir is not None:
        raise ValueError("--show DIR goes without inputs and without --data-dir.")
    names = [name for name in SPLITS if (command.show / name / META).is_file()] or [""]
    sets = {name: TokenSet(command.show / name) for name in names}
    _print_splits(command.show, {name: data.meta for name, data in sets.items()}, console)
    for name, data in sets.items():
        meta, title = data.meta, name or quote(command.show)
        end = "none" if meta.end is None else f"token {meta.end}"
        console.print(
            f"\n{title}: {meta.dtype}, tokenizer {meta.tokenizer}, end of a document: {end}"
            f"\nmade from {', '.join(map(quote, meta.sources)) or 'tokens'}"
        )
        _print_beginning(data, console)
        if command.verify:
            _verify(data)
            console.print(f"{title}: every CRC32 is right ({', '.join(map(quote, meta.crc32))})")


def _verify(data: TokenSet) -> None:
    """Read a data set; damage is a failure, not a mistake in the arguments."""
    try:
        data.verify()
    except ValueError as damaged:
        raise OSError(str(damaged)) from None


def _print_beginning(data: TokenSet, console: Console) -> None:
    """Print the first lines, or the first tokens where there is no tokenizer."""
    stop = int(data.documents[1]) - (data.meta.end is not None)
    first = data.read(0, min(SHOWN, stop))
    if data.meta.tokenizer == "none":
        text = " ".join(map(str, first[:20]))
    else:
        text = data.tokenizer.decode(first)
    for line in text.splitlines()[:5]:
        console.print(f"  | {escape_controls(line) if console.is_terminal else line}")


@contextmanager
def _progress() -> Iterator[Tell | None]:
    """Yield a function that draws a bar on a terminal, else None."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    with bar:
        tasks = {}

        def update_bar(label: str, read: int, size: int) -> None:
            if label not in tasks:
                tasks[label] = bar.add_task(label, total=size)
            bar.update(tasks[label], completed=read)

        yield update_bar
