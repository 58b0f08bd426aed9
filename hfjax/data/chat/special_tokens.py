"""Special tokens: those that a template writes are tokens, those that a message spells are text.

Before a message is rendered, what spells a special token in it is put between two characters that
no message has. In the rendered text they show what came from a message, and are taken out.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hfjax.data.chat.template import Rendered, Span

PRIVATE = [chr(code) for code in range(0x10FFFD, 0x10FF00, -1)]  # characters for private use


@dataclass(frozen=True)
class SpecialToken:
    """A special token: what spells it, and on which sides it takes white space with it."""

    text: str
    lstrip: bool
    rstrip: bool


@dataclass(frozen=True)
class MarkedText:
    """A rendered text, where it spells special tokens that stay text, and what the loss counts."""

    text: str
    plain: tuple[Span, ...] = ()
    spans: tuple[Span, ...] = ()


class SpecialTokens:
    """The special tokens of a tokenizer of the `tokenizers` library."""

    def __init__(self, inner: Any) -> None:
        added = inner.get_added_tokens_decoder().values()
        self.by_text = {
            token.content: SpecialToken(token.content, token.lstrip, token.rstrip)
            for token in added
            if token.special
        }
        longest_first = sorted(self.by_text, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def mark(self, messages: Sequence[Mapping[str, Any]]) -> "Marking":
        """Return messages in which special tokens are marked, if there are any."""
        texts = [value for message in messages for value in message.values()]
        if not any(self.pattern.search(text) for text in texts):
            return Marking(tuple(messages), None)
        unused = [c for c in PRIVATE if not any(c in text for text in texts)]
        if len(unused) < 2:
            raise ValueError("the messages use all characters for private use: take them out.")
        opening, closing = unused[:2]
        mark = lambda text: self.pattern.sub(lambda m: f"{opening}{m[0]}{closing}", text)
        marked = tuple({name: mark(text) for name, text in m.items()} for m in messages)
        return Marking(
            marked, re.compile(f"{opening}({self.pattern.pattern}){closing}|{opening}|{closing}")
        )


@dataclass(frozen=True)
class Marking:
    """Messages with marks, and the pattern of the marks. None: there are none."""

    messages: tuple[Mapping[str, Any], ...]
    pattern: re.Pattern | None

    def unmark(self, rendered: Rendered) -> MarkedText:
        """Return a rendered text without marks."""
        if self.pattern is None:
            return MarkedText(rendered.text, (), rendered.spans)
        parts, plain, removed, length, end = [], [], [], 0, 0
        for match in self.pattern.finditer(rendered.text):
            parts += [rendered.text[end : match.start()], match[1] or ""]
            length += match.start() - end
            removed.append(match.start())
            if match[1]:
                plain.append((length, length + len(match[1])))
                removed.append(match.end() - 1)
                length += len(match[1])
            end = match.end()
        parts.append(rendered.text[end:])
        place = lambda index: index - sum(position < index for position in removed)
        spans = tuple((place(start), place(stop)) for start, stop in rendered.spans)
        return MarkedText("".join(parts), tuple(plain), spans)
