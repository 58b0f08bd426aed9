"""How a command ends: exit status, mistakes on standard error, packages that are not installed.

Training needs neither grain nor tyro, so modules that do are imported with `import_or_explain`.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import IO, Any, TextIO, cast

from hfjax.utils.tables import escape_controls

FAILED = 1  # the requested action failed
MISTAKE = 2  # invalid input; argparse and tyro use the same
# Reported without a traceback.
EXPECTED_ERRORS = (ValueError, FloatingPointError, TimeoutError, OSError, MemoryError)


@contextmanager
def report_errors(name: str) -> Iterator[None]:
    """Run `hfjax NAME`; report errors on standard error, and by the exit status."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise SystemExit(close_stdout()) from None
    except EXPECTED_ERRORS as wrong:
        raise SystemExit(_report_error(name, wrong)) from None


def run_command(name: str, action: Callable[[], int | None]) -> int:
    """Run the action of `hfjax NAME`; return its exit status: that of `action`, or 0 for None."""
    try:
        status = action()
        sys.stdout.flush()
    except BrokenPipeError:
        return close_stdout()
    except EXPECTED_ERRORS as wrong:
        return _report_error(name, wrong)
    return status or 0


def _report_error(name: str, wrong: Exception) -> int:
    """Print an error; return the exit status."""
    notes = getattr(wrong, "__notes__", [])
    more = [line for line in notes if not line.startswith("-----")]  # JAX's note on its traceback
    first = f"hfjax {name}: {str(wrong) or 'memory is full'}"
    print(escape_controls("\n".join([first, *more])), file=sys.stderr)
    return MISTAKE if isinstance(wrong, ValueError) else FAILED


def close_stdout() -> int:
    """Return the exit status when the reader of standard output has seen enough."""
    redirect_to_null(sys.stdout)
    return FAILED


def redirect_to_null(stream: IO) -> None:
    """Discard a stream's buffered and further output: writing it at the exit would fail."""
    with suppress(OSError, ValueError):  # it has no descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


class _TolerantStream:
    """A stream; when it cannot be written, it calls `hook` and discards further output."""

    def __init__(self, stream: TextIO, hook: Callable[[OSError], Any]) -> None:
        self._stream, self._hook = stream, hook

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except BlockingIOError:
            return  # slow reader of a non-blocking stream: buffered output is written later
        except OSError as error:
            redirect_to_null(self._stream)
            self._hook(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def tolerant_stream(
    stream: TextIO | None, hook: Callable[[OSError], Any] = lambda _: None
) -> TextIO | None:
    """Return a stream that raises no error when it cannot be written, but calls `hook` with it."""
    return None if stream is None else cast("TextIO", _TolerantStream(stream, hook))


def import_or_explain(module: str, caller: str) -> ModuleType:
    """Import and return a module of hfjax; name a package that it needs and that is missing.

    >>> import_or_explain("hfjax.utils.command_errors", "this line").__name__
    'hfjax.utils.command_errors'
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as missing:
        package = (missing.name or "hfjax").partition(".")[0]
        if package == "hfjax":
            raise
        raise ModuleNotFoundError(
            f"{caller} needs the package {package}, which is not installed: pip install {package}, "
            "or activate the environment that has it (source .venv/bin/activate)",
            name=missing.name,
        ) from missing


def import_optional(module: str, caller: str, extra: str) -> ModuleType:
    """Import and return a module of an optional package; if missing, name the extra that has it.

    >>> import_optional("json", "this line", "text").__name__
    'json'
    """
    try:
        return import_module(module)
    except ImportError:
        package = {"PIL": "pillow"}.get(name := module.split(".")[0], name)
        how = f"pip install 'hfjax[{extra}]'"
        raise ValueError(f"{caller} needs the package {package}: {how}") from None
