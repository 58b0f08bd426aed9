"""`hfjax data`: make a data set, or show what one holds."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from hfjax.cli.arguments import parsed
from hfjax.data.build_dataset import Prepared, Progress as Tell, Recipe, make
from hfjax.data.documents import KNOWN, suffix, visible
from hfjax.data.images import ImageSet, check_same_classes, parts_of
from hfjax.data.images.find_images import CLASSES
from hfjax.data.images.report import examined, lines
from hfjax.data.token_dataset import META, SPLITS, Meta, TokenSet
from hfjax.utils.command_errors import FAILED, carried_out, ending_in_words
from hfjax.utils.image_names import holds_images
from hfjax.utils.tables import aligned, harmless, human, named

SHOWN = 400  # tokens that are decoded


@dataclass(frozen=True)
class DataCommand:
    """Make a data set of token files from text, JSONL or Parquet; or --show one.

    Of a folder of images it shows what is in it: images are read in place, nothing is written.
    """

    inputs: tyro.conf.Positional[tuple[str, ...]] = ()
    """Files or folders of .txt, .md, .jsonl, .parquet (or .gz), or of images (default: none)."""

    out: Path | None = None
    """New folder of the data set; it appears when complete (default: none)."""

    tokenizer: str = "bytes"
    """bytes, bpe (trained here), a tokenizer.json, a data set or a model folder."""

    vocab: int | None = None
    """Size of a bpe vocabulary (default: 8192)."""

    valid: float = 0.0
    """Fraction of documents for validation; --out then holds train/ and valid/."""

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
    """Replace the data set that is at --out."""

    show: Path | None = None
    """Show what this data set holds and how it begins (default: none)."""

    verify: bool = False
    """Read all of --show and compare its CRC32s."""


def main(argv: Sequence[str]) -> int:
    """Run `hfjax data` with these arguments; return the exit status."""
    with ending_in_words("data"):
        command = parsed(DataCommand, argv, "data")
    return run(command)


def run(command: DataCommand) -> int:
    """Make or show a data set; return the exit status."""
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    act = _make if command.show is None else _show
    return carried_out("data", lambda: act(command, console))


def _make(command: DataCommand, console: Console) -> int | None:
    if command.verify:
        raise ValueError("--verify goes with --show DIR.")
    if _are_images(command):
        return _tell_images(command, console)
    if command.out is None or not command.inputs:
        missing = [name for name in command.inputs if not Path(name).exists()]
        gone = f"{named(missing[0])}: there is no such file or folder; " if missing else ""
        raise ValueError(
            f"{gone}name what to read and where to write: hfjax data INPUT … --out DIR; or a data "
            "set to look at: hfjax data --show DIR"
        )
    given = {field.name: getattr(command, field.name) for field in fields(Recipe)}
    with _progress() as tell:
        made = make(Recipe(**given), tell)
    _summary(made, console)
    return None


def _are_images(command: DataCommand) -> bool:
    """Return whether folders of images are given; with --out those that also hold text are text."""
    folders = [Path(name) for name in command.inputs]
    if not folders or command.pattern or not all(p.is_dir() and holds_images(p) for p in folders):
        return False
    return command.out is None or not any(
        suffix(path) in KNOWN and path.name != CLASSES
        for folder in folders
        for path in visible(folder, "**/*")
    )


def _tell_images(command: DataCommand, console: Console) -> int:
    """Print what is in a folder of images; return 1 if some cannot be used."""
    place = command.inputs[0]
    if command.out is not None:
        raise ValueError(
            f"--out {named(command.out)}: {named(place)} holds images, which are read as they lie, "
            f"so nothing is written. Leave --out away to see what is in it; give the folder itself "
            "to hfjax.data.images.ImageLoader."
        )
    if len(command.inputs) > 1:
        raise ValueError("of folders of images give one at a time.")
    for field in fields(command):
        if field.name != "inputs" and getattr(command, field.name) != field.default:
            raise ValueError(
                f"--{field.name.replace('_', '-')}: {named(place)} holds images; leave it out."
            )
    parts = parts_of(place) or {"": Path(place)}
    sets = [ImageSet(folder) for folder in parts.values()]
    faults = 0
    for number, data in enumerate(sets):
        with _progress() as tell:
            report = examined(data, tell)
        console.print("\n".join([*[""] * (number > 0), *lines(report)]))
        faults += len(report.faults)
    if len(sets) == 2:
        check_same_classes(*sets)
    return FAILED if faults else 0


def _summary(made: Prepared, console: Console) -> None:
    _tell(made.out, made.parts, console)
    console.print(f"\nfiles read: {made.files}; {named(made.out)} is whole.")
    if made.passed_over:
        console.print(
            f"files of another kind, not read: {made.passed_over} (--pattern '**/*' reads all)."
        )
    if made.empty:
        console.print(f"documents without text, left out: {made.empty}.")
    for line in _lost(made):
        console.print(line)
    found = next(iter(made.parts.values())).vocab
    if made.asked_vocab not in (None, found):
        console.print(
            f"The text has pairs for a vocabulary of {found} only; --vocab asked for "
            f"{made.asked_vocab}."
        )


def _lost(made: Prepared) -> Iterator[str]:
    """Yield what of the text a tokenizer cannot write."""
    if made.dropped:
        yield (
            f"warning: {made.dropped:,} characters have no token in the tokenizer and are left out "
            "of the data: is it the one for this text?"
        )
    if made.unknown:
        total = sum(meta.tokens for meta in made.parts.values())
        yield (
            f"warning: {made.unknown:,} of {total:,} tokens are the tokenizer's token for unknown "
            "text, from which that text does not come back."
        )


def _tell(directory: Path, parts: dict[str, Meta], console: Console) -> None:
    """Print a line for each part of a data set."""
    lines = [["data set", "documents", "tokens", "vocabulary", "on disk", "tokens per byte"]]
    for name, meta in parts.items():
        place = directory / name
        size = sum(file.stat().st_size for file in place.iterdir() if file.is_file())
        rate = f"{meta.tokens / meta.text:.3f}" if meta.text else "-"
        numbers = [f"{n:,}" for n in (meta.documents, meta.tokens, meta.vocab)]
        lines.append([name or named(directory.name), *numbers, human(size), rate])
    head, *rows = aligned(lines, numbers=range(1, 6))
    console.print(head, style="bold")
    console.print("\n".join(rows))


def _show(command: DataCommand, console: Console) -> None:
    assert command.show is not None
    if command.inputs or command.out is not None:
        raise ValueError("--show DIR goes without inputs and without --out.")
    parts = [name for name in SPLITS if (command.show / name / META).is_file()] or [""]
    sets = {name: TokenSet(command.show / name) for name in parts}
    _tell(command.show, {name: data.meta for name, data in sets.items()}, console)
    for name, data in sets.items():
        meta, title = data.meta, name or named(command.show)
        end = "none" if meta.end is None else f"token {meta.end}"
        console.print(
            f"\n{title}: {meta.dtype}, tokenizer {meta.tokenizer}, end of a document: {end}"
            f"\nmade from {', '.join(map(named, meta.sources)) or 'tokens'}"
        )
        _begin(data, console)
        if command.verify:
            _verify(data)
            console.print(f"{title}: every CRC32 is right ({', '.join(map(named, meta.crc32))})")


def _verify(data: TokenSet) -> None:
    """Read a data set; what is damaged is a failure, not a mistake in what was typed."""
    try:
        data.verify()
    except ValueError as damaged:
        raise OSError(str(damaged)) from None


def _begin(data: TokenSet, console: Console) -> None:
    """Print the first lines, or the first tokens where there is no tokenizer."""
    stop = int(data.documents[1]) - (data.meta.end is not None)
    first = data.read(0, min(SHOWN, stop))
    if data.meta.tokenizer == "none":
        text = " ".join(map(str, first[:20]))
    else:
        text = data.tokenizer.decode(first)
    for line in text.splitlines()[:5]:
        console.print(f"  | {harmless(line) if console.is_terminal else line}")


@contextmanager
def _progress() -> Iterator[Tell | None]:
    """Give what draws a bar on a terminal, else nothing."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    with bar:
        tasks = {}

        def tell(what: str, read: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=read)

        yield tell
