"""A model's chat template: found in its folder or in a file, rendered in a process of its own."""

import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hfjax.data.tokenizer import read_keys
from hfjax.utils.command_errors import import_optional
from hfjax.utils.read_files import MISSING, path_kind, read_text
from hfjax.utils.tables import quote

CONFIG, JINJA, SPECIAL = "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"
LIMIT = 12.0  # seconds until a template that loops is ended, a little more than `sandbox.SECONDS`
MOST = 1 << 20  # bytes read at once
SANDBOX = Path(__file__).with_name("sandbox.py")
LEAST_JINJA = (3, 1, 6)  # earlier sandboxes have known ways out
TODAY = "2024-07-26"  # the date that templates of Llama print where no clock is given

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]


@dataclass(frozen=True)
class Template:
    """A template, the special tokens that it may name, and where it is from.

    Attributes:
        text: The template.
        tokens: `bos_token` and the like, by name.
        source: What it is called in messages.
    """

    text: str
    tokens: Mapping[str, Any]
    source: str


@dataclass(frozen=True)
class Rendered:
    """The text of messages, and the spans of `{% generation %}` in it."""

    text: str
    spans: tuple[Span, ...] = ()


def load_template(folder: Path, file: Path | None = None) -> Template:
    """Return the template of a model's folder, or that of a file with the folder's tokens.

    Args:
        folder: The folder of a model or a tokenizer.
        file: A file of Jinja that takes the place of the folder's template.
    """
    tokens = _special_tokens(folder)
    if file is not None:
        if (kind := path_kind(file)) != "a file":
            problem = "no such file" if kind == MISSING else f"it is {kind}"
            raise ValueError(f"--data.template {quote(file)}: {problem}. Give a file of Jinja.")
        return Template(read_text(file), tokens, quote(file))
    path = folder / JINJA
    if path_kind(path) != MISSING:
        return Template(read_text(path), tokens, quote(path))
    template = read_keys(folder / CONFIG).get("chat_template")
    if isinstance(template, list):  # several by name
        by_name = {entry.get("name"): entry.get("template") for entry in template}
        template = by_name.get("default")
    if not isinstance(template, str):
        raise ValueError(
            f"{quote(folder)} has no chat template (chat_template of {CONFIG}, or {JINJA}): how it "
            "writes a conversation is not known. Give one: --data.template FILE"
        )
    return Template(template, tokens, f"chat_template of {quote(folder / CONFIG)}")


def _special_tokens(folder: Path) -> dict[str, Any]:
    """Return the special tokens of a folder by name, as templates know them."""
    record = read_keys(folder / SPECIAL) | read_keys(folder / CONFIG)
    text = lambda value: value.get("content") if isinstance(value, dict) else value
    tokens = {name: text(value) for name, value in record.items() if name.endswith("_token")}
    return {name: token for name, token in tokens.items() if isinstance(token, str)}


class TemplateProcess:
    """A process that renders a template, ended when it takes too long. A context manager.

    Args:
        template: The template.
        today: The date that it may print, as 2026-01-31.
        limit: Seconds until a template that loops is ended.
    """

    def __init__(self, template: Template, today: str = TODAY, limit: float = LIMIT) -> None:
        jinja2 = import_optional("jinja2", "a chat template", "chat")
        version = re.findall(r"\d+", jinja2.__version__)[:3]
        if tuple(map(int, version)) < LEAST_JINJA:
            raise ValueError(
                f"jinja2 {jinja2.__version__}: its sandbox has known ways out. Chat templates need "
                "3.1.6 or later: pip install 'hfjax[chat]'"
            )
        self.template, self._limit, self._rest = template, limit, b""
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        paths = os.pathsep.join(path for path in sys.path if path)  # where Jinja is
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(SANDBOX)], env={**os.environ, "PYTHONPATH": paths}, **pipes
        )
        try:
            first = {"template": template.text, "tokens": dict(template.tokens), "today": today}
            self.has_spans: bool = self._ask(first, "")["has_spans"]
        except BaseException:
            self.close()
            raise

    def render(self, jobs: Sequence[tuple[Messages, bool]], location: str) -> list[Rendered]:
        """Return the texts of messages, each with or without the head of an answer after it.

        Args:
            jobs: Pairs of messages, and whether the head of the assistant's next turn follows.
            location: Where the conversation stands, for messages.
        """
        answers = self._ask([[list(messages), prompt] for messages, prompt in jobs], location)
        return [Rendered(a["text"], tuple((s, e) for s, e in a["spans"])) for a in answers]

    def _ask(self, request: Any, location: str) -> Any:
        """Return the answer to a request; raise what it reports."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            reply = json.loads(self._read_line(location))
        except BrokenPipeError:
            raise ValueError(self._ended_message(location)) from None
        if "error" in reply:
            raise ValueError(self._failure_message(location, **reply))
        return reply

    def _read_line(self, location: str) -> bytes:
        """Return the next line of the answers, within the limit of time."""
        assert self._process.stdout is not None
        deadline, blocks = time.monotonic() + self._limit, [self._rest]
        while b"\n" not in blocks[-1]:
            seconds = deadline - time.monotonic()
            if seconds <= 0 or not select.select([self._process.stdout], [], [], seconds)[0]:
                self.close()
                at = f"{location}: " if location else ""
                raise ValueError(
                    f"{at}{self.template.source} takes more than {self._limit:g} seconds for a "
                    "conversation: it may loop for ever. Mend it, or give another one: "
                    "--data.template FILE"
                )
            block = os.read(self._process.stdout.fileno(), MOST)
            if not block:
                raise ValueError(self._ended_message(location))
            blocks.append(block)
        line, _, self._rest = b"".join(blocks).partition(b"\n")
        return line

    def _ended_message(self, location: str) -> str:
        at = f"{location}: " if location else ""
        return (
            f"{at}the process that renders {self.template.source} ended (status "
            f"{self._process.wait()}). Mend the template, or give another one: --data.template FILE"
        )

    def _failure_message(self, location: str, error: str, message: str, line: int | None) -> str:
        """Return the message about what a template did."""
        where = f"{self.template.source}, line {line}" if line else self.template.source
        at, what = f"{location}: " if location else "", quote(message)
        if error == "raised":
            return f"{at}the template refuses this conversation: {what} ({where})"
        remedy = "Mend it, or give another one: --data.template FILE"
        if error == "syntax":
            return f"{where}: no valid Jinja: {what}. {remedy}"
        if error == "refused":
            return f"{at}{where} reaches out of its sandbox: {what}. {remedy}"
        return f"{at}{where} fails: {what}. {remedy}"

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:  # what was left to write
                    pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
