"""Tokens of a rendered text, and which of them the loss counts.

The text is encoded at once, special tokens as such: the template writes also the first one, so none
is added. Where a message spells a special token, the text between the template's own is encoded by
itself, with special tokens as plain text.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hfjax.data.chat.special_tokens import MarkedText, SpecialTokens
from hfjax.data.chat.template import Span
from hfjax.data.tokenizer import TrainedTokenizer, tokenizers_library


@dataclass(frozen=True)
class Piece:
    """A part of a text; in a plain one special tokens are text."""

    text: str
    start: int
    is_plain: bool


class ChatEncoder:
    """Encodes rendered texts with a tokenizer of the `tokenizers` library."""

    def __init__(self, tokenizer: TrainedTokenizer) -> None:
        library, text = tokenizers_library(), tokenizer.inner.to_str()
        self.specials = SpecialTokens(tokenizer.inner)
        self._with_special = library.Tokenizer.from_str(text)
        self._plain = tokenizer.inner
        self._later_plain = library.Tokenizer.from_str(_without_first_prefix(text))
        for inner in (self._with_special, self._later_plain):
            inner.no_truncation()
            inner.no_padding()
        self._later_plain.encode_special_tokens = True

    def encode(self, texts: Sequence[MarkedText]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the tokens of each text, and 1 for those that the loss counts.

        A token that reaches into a span counts, as in transformers.
        """
        unmarked = [text for text in texts if not text.plain]
        encodings = iter(self._encode(self._with_special, [text.text for text in unmarked]))
        return [
            self._encode_pieces(text) if text.plain else _counted(*next(encodings), text.spans)
            for text in texts
        ]

    def encode_plain(self, texts: Sequence[MarkedText]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the same for texts that no template wrote: none of their tokens is special."""
        encodings = self._encode(self._plain, [text.text for text in texts])
        return [_counted(*e, text.spans) for e, text in zip(encodings, texts, strict=True)]

    def _encode(self, inner: Any, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return tokens, and for each where it begins and ends."""
        encodings = inner.encode_batch(texts, add_special_tokens=False)
        return [
            (np.array(e.ids, np.int64), np.array(e.offsets, np.int64).reshape(-1, 2))
            for e in encodings
        ]

    def _encode_pieces(self, text: MarkedText) -> tuple[np.ndarray, np.ndarray]:
        tokens, offsets = [], []
        for piece in self._pieces(text):
            plain = self._later_plain if piece.start else self._plain
            inner = plain if piece.is_plain else self._with_special
            ids, places = self._encode(inner, [piece.text])[0]
            tokens.append(ids)
            offsets.append(places + piece.start)
        return _counted(np.concatenate(tokens), np.concatenate(offsets), text.spans)

    def _pieces(self, text: MarkedText) -> Iterator[Piece]:
        """Yield the pieces of a text, cut at special tokens of the template."""
        end = 0
        for start, stop in self._plain_parts(text):
            if start > end:
                yield Piece(text.text[end:start], end, False)
            yield Piece(text.text[start:stop], start, True)
            end = stop
        if end < len(text.text):
            yield Piece(text.text[end:], end, False)

    def _plain_parts(self, text: MarkedText) -> Iterator[Span]:
        """Yield the parts between special tokens of the template that hold one of a message."""
        inside = lambda m: any(m.start() < stop and m.end() > start for start, stop in text.plain)
        matches = [m for m in self.specials.pattern.finditer(text.text) if not inside(m)]
        starts = [0, *(m.end() for m in matches)]
        stops = [*(m.start() for m in matches), len(text.text)]
        for i, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            if not any(start <= first and last <= stop for first, last in text.plain):
                continue
            part = text.text[start:stop]  # white space goes with a token that strips it
            if i and self.specials.by_text[matches[i - 1][0]].rstrip:
                start = stop - len(part.lstrip())
            if i < len(matches) and self.specials.by_text[matches[i][0]].lstrip:
                stop = stop - (len(part) - len(part.rstrip()))
            yield start, stop


def _counted(
    tokens: np.ndarray, offsets: np.ndarray, spans: Sequence[Span]
) -> tuple[np.ndarray, np.ndarray]:
    counted = np.zeros(len(tokens), np.uint8)
    for start, stop in spans:
        counted |= (offsets[:, 0] < stop) & (offsets[:, 1] > start)
    return tokens, counted


def _without_first_prefix(text: str) -> str:
    """Return a tokenizer that puts no space before a text, as within a longer one."""
    config = json.loads(text)
    part = config["pre_tokenizer"] or {}
    for step in (part, *part.get("pretokenizers", ())):
        if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first":
            step["prepend_scheme"] = "never"
    return json.dumps(config)
