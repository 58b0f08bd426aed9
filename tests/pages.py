"""Pages of documentation as programs: their Python blocks and commands run, in order.

- ```python: run with the names that blocks before it have made; examples after >>> are compared.
- ```output: compared with what the Python block before it has printed.
- $ command, or a line that begins with hfjax: run; the lines below are compared.
- ```bash: the grammar is looked at, and the lines that begin with hfjax are run.
- ```yaml with `# name` in its first line: a file. Other blocks show what cannot be run again.

Compared is what is stable: numbers count as one another, but a loss alone on its line by three
digits; and … stands for any lines.
"""

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hfjax.__main__ import main
from hfjax.cli.launch import split_command
from tests.workers import environment

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(
    r"\b(?=\w*\d)[0-9a-f]{8,}\b|[-+]?\b[\d.,]*\d(e[-+]?\d+)?( ?([KMGT]i)?B\b|[kMG]\b)?"
)


class Block(NamedTuple):
    """A fenced block of a page."""

    line: int  # of the page: where its text begins
    language: str
    text: str


def blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    for found in FENCE.finditer(text):
        yield Block(text.count("\n", 0, found.start(2)) + 1, found[1], found[2])


def commands(block: Block) -> Iterator[tuple[str, list[str]]]:
    """Yield the commands of a block, each with the lines that are printed."""
    lines = block.text.replace("\\\n", " ").splitlines()
    starts = [n for n, line in enumerate(lines) if line.startswith("$ ")]
    starts = starts or [n for n, line in enumerate(lines) if line.startswith("hfjax ")]
    for start, end in zip(starts, [*starts, len(lines)][1:], strict=True):
        yield lines[start].removeprefix("$ "), lines[start + 1 : end]


def write_file(block: Block) -> None:
    """Write the file that a block of YAML names in its first line."""
    name = block.text.splitlines()[0].removeprefix("# ")
    Path(name).write_text(block.text, encoding="utf-8")


class Page:
    """A page, run in a folder with the names that its text takes for granted."""

    def __init__(self, path: Path, small: dict[str, str], names: dict[str, Any]):
        text = path.read_text(encoding="utf-8")
        for long, short in small.items():
            assert long in text, f"{path.name} does not say {long!r} any more"
            text = text.replace(long, short)
        self.path, self.blocks, self.names = path, list(blocks(text)), names
        self.printed = ""  # by the last Python block

    def run(self, wanted: Callable[[str], bool] = lambda command: True) -> None:
        """Run all blocks, and those of the commands that are wanted."""
        for block in self.blocks:
            if block.language == "yaml":
                write_file(block)
            elif ">>> " in block.text:
                self._examples(block)
            elif block.language == "python":
                self._execute(block)
            elif block.language == "output":
                compare(block.text.splitlines(), self.printed, f"{self.path.name}:{block.line}")
            else:
                self._commands(block, wanted)

    def _commands(self, block: Block, wanted: Callable[[str], bool]) -> None:
        if block.language == "bash":
            subprocess.run(["bash", "-n", "-c", block.text], check=True)
        for command, printed in commands(block):
            if wanted(command):
                compare(printed, output_of(command), f"{self.path.name}: $ {command}")

    def _execute(self, block: Block) -> None:
        source, told = "\n" * (block.line - 1) + block.text, io.StringIO()
        try:
            with contextlib.redirect_stdout(told):
                exec(compile(source, self.path, "exec"), self.names)
        except SystemExit as end:
            if end.code != 0:
                raise AssertionError(f"{self.path.name}: exit code {end.code}") from end
        self.printed = told.getvalue()

    def _examples(self, block: Block) -> None:
        for example in doctest.DocTestParser().get_examples(block.text):
            where = f"{self.path.name}:{block.line + example.lineno}: {example.source.strip()}"
            compare(example.want.splitlines(), self._shown(example.source), where)

    def _shown(self, source: str) -> str:
        """Return what a session shows of a statement: what it prints, or its error."""
        with contextlib.redirect_stdout(io.StringIO()) as told:
            try:
                exec(compile(source, self.path, "single"), self.names)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
        return told.getvalue()


def output_of(command: str) -> str:
    """Return what a command prints; those of hfjax run in this process."""
    words = shlex.split(command, comments=True)
    if words[:2] == ["hfjax", "launch"] and (inner := split_command(words)[1])[0] == "hfjax":
        words = list(inner)
    if words[0] != "hfjax" or words[1] == "launch":
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "-c", command],
            env=environment(PATH=path),
            check=True,
            text=True,
            stdout=subprocess.PIPE,
            timeout=120,
        ).stdout
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        status = _status(words[1:])
    error = re.sub(r"\A(.* … \d+ s\n)+", "", told.getvalue())  # what took long comes before it
    assert status == 0 or error.startswith("hfjax "), f"{command}: {status}: {told.getvalue()}"
    assert not re.search(r"--\S+( is --\S+ now\.|: there is no such flag)", error), error
    return told.getvalue()


def _status(words: list[str]) -> Any:
    try:
        return main(words)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code)
        return end.code


def compare(printed: list[str], found: str, where: str) -> None:
    """Refuse an output that lacks a line of those printed, in their order.

    A page breaks a long line of output with a backslash at the end.
    """
    lines = iter([_stable(line) for line in found.splitlines()])
    for line in re.sub(r" \\\n\s*", " ", "\n".join(printed)).splitlines():
        wanted = _stable(line)
        if wanted not in ("", "…") and not any(wanted == each for each in lines):
            raise AssertionError(f"{where}\n  does not print: {line}\n  but:\n{found}")


def _stable(line: str) -> str:
    """Return a line with its numbers and spaces evened out, and without a path to a folder.

    Of a loss that is alone on its line three digits count. A busy machine tells that it waits for
    data, where a page's did not.
    """
    if re.fullmatch(r"\d+\.\d+", line):
        return f"{float(line):.3g}"
    line = re.sub(r"waiting for data \d+%", "", line)
    line = re.sub(r"(?<![\w.])/[\w./-]*/(?=\w)", "/data/", line)
    return " ".join(NUMBER.sub("#", re.sub("─+", "─", line)).split())
