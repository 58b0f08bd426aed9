"""The flags of every command, read from what `--help` prints."""

import contextlib
import io
import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from hfjax.__main__ import main

COLUMNS = "129"  # of the terminal: with one more the boxes stand in two columns
TITLE = re.compile(r"(?:╭─ | |)((?:[a-z-]+ )?(?:options|arguments)):?(?: +─*╮?)?")


class Flag(NamedTuple):
    """A flag as --help shows it."""

    box: str
    invocation: str
    text: str

    @property
    def name(self) -> str:
        """The long name, without its value and its opposite."""
        return self.invocation.split(",")[-1 if self.invocation.startswith("-n") else 0].split()[0]


def help_of(command: str) -> tuple[str, list[Flag]]:
    """Return what `hfjax COMMAND --help` prints, and the flags in it."""
    before, printed = os.environ.get("COLUMNS"), io.StringIO()
    os.environ["COLUMNS"] = COLUMNS
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([*command.split(), "--help"])
    finally:
        os.environ.pop("COLUMNS")
        os.environ |= {} if before is None else {"COLUMNS": before}
    return printed.getvalue(), list(flags_in(printed.getvalue()))


def flags_in(printed: str) -> Iterator[Flag]:
    """Yield the flags of a help text: of boxes, drawn with lines or with dashes, and of lists."""
    box = ""
    found: list[list[str]] = []
    for line in printed.splitlines():
        inner = line[2:-2].rstrip() if line.startswith("│") else line[2:].rstrip()
        if title := TITLE.fullmatch(line):
            box = title[1]
        elif not inner or line.startswith("╰"):
            yield from (Flag(*entry) for entry in found)
            found = []
        elif set(line.strip(" │")) <= set("─-"):
            found = []  # that was the box's own text
        elif box and not inner.startswith(" "):
            invocation, *text = re.split(r"\s{2,}", inner, maxsplit=1)
            found.append([box, invocation, "".join(text)])
        elif box:
            before = found[-1][2]
            found[-1][2] = before + " " * (before[-1:] not in ("", "-")) + inner.strip()
    yield from (Flag(*entry) for entry in found)
