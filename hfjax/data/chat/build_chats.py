"""Write the conversations of a file as a data set of tokens, with which of them the loss counts."""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from hfjax.data.chat.conversations import Completion, Conversation, Row, read_rows
from hfjax.data.chat.encode import ChatEncoder
from hfjax.data.chat.special_tokens import MarkedText
from hfjax.data.chat.template import TODAY, Template, TemplateProcess
from hfjax.data.chat.turns import ALL, EACH, render_examples
from hfjax.data.token_dataset import Meta
from hfjax.data.token_writer import TokenWriter, atomic_dataset
from hfjax.data.tokenizer import TrainedTokenizer

GROUP = 256  # rows encoded together


@dataclass(frozen=True)
class ChatOptions:
    """How conversations become examples.

    Attributes:
        turns: all (a conversation is an example), or each (one for each turn of the assistant).
        today: The date that a template may print, as 2026-01-31.
    """

    turns: str = ALL
    today: str = TODAY

    def __post_init__(self) -> None:
        if self.turns not in (ALL, EACH):
            raise ValueError(f"--data.turns {self.turns}: {ALL} or {EACH}.")
        try:
            date.fromisoformat(self.today)
        except ValueError:
            raise ValueError(f"--data.date {self.today}: a date as {TODAY} is needed.") from None


def build_chats(
    path: Path,
    out: Path,
    tokenizer: TrainedTokenizer,
    template: Template | None,
    options: ChatOptions = ChatOptions(),
) -> Meta:
    """Write the data set of a file of conversations; it appears at `out` once complete.

    Args:
        path: The file.
        out: The directory to create.
        tokenizer: The model's tokenizer.
        template: Its template. None: the file has prompts and completions of text only.
        options: How conversations become examples.
    """
    with atomic_dataset(out) as folder, closing(_Encoder(tokenizer, template, options)) as encoder:
        writer = TokenWriter(folder, tokenizer.vocab, is_counted=True)
        with closing(writer):
            for tokens, counted, location in encoder.examples(read_rows(path)):
                if not counted[1:].any():
                    raise ValueError(
                        f"{location}: the loss would count no token of it, since the assistant's "
                        "turns are empty or the template marks none. Take the row out, or give "
                        "another template: --data.template FILE"
                    )
                writer.add_counted(tokens, counted, location)
            return writer.finish(tokenizer, None, [str(path)])


class _Encoder:
    """Makes examples of rows; the template's process starts with the first conversation."""

    def __init__(
        self, tokenizer: TrainedTokenizer, template: Template | None, options: ChatOptions
    ) -> None:
        self._tokenizer, self._template, self._options = tokenizer, template, options
        self._encoder = ChatEncoder(tokenizer)
        self._process: TemplateProcess | None = None

    def examples(self, rows: Iterable[Row]) -> Iterator[tuple[np.ndarray, np.ndarray, str]]:
        """Yield the tokens of each example, which of them count, and where it stands."""
        rows = iter(rows)
        while group := list(itertools.islice(rows, GROUP)):
            texts = [(text, row) for row in group for text in self._texts(row)]
            chats = self._encoder.encode([t for t, row in texts if isinstance(row, Conversation)])
            plain = self._encoder.encode_plain([t for t, row in texts if _is_plain(row)])
            chats, plain = iter(chats), map(self._with_end, plain)
            for _, row in texts:
                yield *next(plain if _is_plain(row) else chats), row.location

    def _texts(self, row: Row) -> list[MarkedText]:
        if isinstance(row, Completion):
            text = row.prompt + row.completion
            return [MarkedText(text, (), ((len(row.prompt), len(text)),))]
        return render_examples(
            row, self._start(row.location), self._encoder.specials, self._options.turns
        )

    def _start(self, location: str) -> TemplateProcess:
        if self._process is None:
            if self._template is None:
                raise ValueError(f"{location}: conversations need a template: --data.template FILE")
            self._process = TemplateProcess(self._template, self._options.today)
        return self._process

    def _with_end(self, example: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return a completion with the end of a text, which counts."""
        end = self._tokenizer.end
        ends = [] if end is None else [end]
        tokens, counted = example
        return np.append(tokens, ends).astype(np.int64), np.append(counted, [1 for _ in ends])

    def close(self) -> None:
        """End the template's process."""
        if self._process is not None:
            self._process.close()


def _is_plain(row: Any) -> bool:
    return isinstance(row, Completion)
