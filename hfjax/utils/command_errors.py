"""How a command ends: exit status, mistakes on standard error, packages that are not installed.

Training needs neither grain nor tyro, so modules that do are imported with `imported`.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import IO, Any, TextIO, cast

from hfjax.utils.tables import harmless

FAILED = 1  # what was asked for went wrong
MISTAKE = 2  # what was given cannot be; argparse and tyro use the same
# Told without a traceback.
WORDS = (ValueError, FloatingPointError, TimeoutError, OSError, MemoryError)


@contextmanager
def ending_in_words(name: str) -> Iterator[None]:
    """Run `hfjax NAME`; what is wrong is said on standard error, and by the exit status."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise SystemExit(nobody_reads()) from None
    except WORDS as wrong:
        raise SystemExit(_told(name, wrong)) from None


def carried_out(name: str, act: Callable[[], int | None]) -> int:
    """Run what `hfjax NAME` does; return its exit status: what `act` returns, or 0 for None."""
    try:
        status = act()
        sys.stdout.flush()
    except BrokenPipeError:
        return nobody_reads()
    except WORDS as wrong:
        return _told(name, wrong)
    return status or 0


def _told(name: str, wrong: Exception) -> int:
    """Say what is wrong; return the exit status."""
    notes = getattr(wrong, "__notes__", [])
    more = [note for note in notes if not note.startswith("-----")]  # jax on its traceback
    first = f"hfjax {name}: {str(wrong) or 'memory is full'}"
    print(harmless("\n".join([first, *more])), file=sys.stderr)
    return MISTAKE if isinstance(wrong, ValueError) else FAILED


def nobody_reads() -> int:
    """Return the exit status when the reader of standard output has seen enough."""
    to_nowhere(sys.stdout)
    return FAILED


def to_nowhere(stream: IO) -> None:
    """Let what a stream still holds, and what follows, go nowhere: the exit would fail to write."""
    with suppress(OSError, ValueError):  # it has no descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class _Surviving:
    """A stream; when it cannot be written, `lost` is told, and what follows goes nowhere."""

    def __init__(self, stream: TextIO, lost: Callable[[OSError], Any]) -> None:
        self._stream, self._lost = stream, lost

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except BlockingIOError:
            return  # its reader is slow, and it does not wait: what is kept is written later
        except OSError as error:
            to_nowhere(self._stream)
            self._lost(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def surviving(
    stream: TextIO | None, lost: Callable[[OSError], Any] = lambda _: None
) -> TextIO | None:
    """Return a stream that raises no error when it cannot be written, but calls `lost` with it."""
    return None if stream is None else cast("TextIO", _Surviving(stream, lost))


def imported(module: str, what: str) -> ModuleType:
    """Return a module of hfjax, imported now; a package that it needs and is not there is named.

    >>> imported("hfjax.utils.command_errors", "this line").__name__
    'hfjax.utils.command_errors'
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as missing:
        package = (missing.name or "hfjax").partition(".")[0]
        if package == "hfjax":
            raise
        raise ModuleNotFoundError(
            f"{what} needs the package {package}, which is not installed: pip install {package}, "
            "or activate the environment that has it (source .venv/bin/activate)",
            name=missing.name,
        ) from missing


def optional(module: str, what: str, extra: str) -> ModuleType:
    """Return a module of a package that hfjax does not need; or say which extra brings it.

    >>> optional("json", "this line", "text").__name__
    'json'
    """
    try:
        return import_module(module)
    except ImportError:
        package = {"PIL": "pillow"}.get(name := module.split(".")[0], name)
        how = f"pip install 'hfjax[{extra}]'"
        raise ValueError(f"{what} needs the package {package}: {how}") from None
