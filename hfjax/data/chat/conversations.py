"""Conversations of JSONL and Parquet files: rows of `messages`, or of `prompt` and `completion`.

What cannot be trained on is refused by name, with the file and the line or row.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfjax.data.documents import (
    LINES,
    MARK,
    SURROGATE,
    TABLES,
    memory_message,
    open_decompressed,
    suffix,
)
from hfjax.utils.command_errors import import_optional
from hfjax.utils.read_files import MISSING, brief, encoding_error, parse_json, path_kind
from hfjax.utils.tables import quote

ASSISTANT = "assistant"
MESSAGES, PROMPT, COMPLETION = "messages", "prompt", "completion"
KNOWN_ROLES = ("system", "user", ASSISTANT)
TOOL_KEYS = ("tools", "functions", "tool_calls", "function_call", "tool_call_id")
TOOL_ROLES = ("tool", "function", "ipython")
MEDIA_KEYS = ("images", "image", "image_url", "videos", "video", "audios", "audio", "input_audio")
FORM = "Each row has messages, a list of {role, content}; or prompt and completion."


@dataclass(frozen=True)
class Conversation:
    """Messages, of which the loss counts the assistant's from `first` on; and where they stand."""

    messages: tuple[Mapping[str, Any], ...]
    location: str
    first: int = 0


@dataclass(frozen=True)
class Completion:
    """A text to continue and its continuation, which no template changes."""

    prompt: str
    completion: str
    location: str


Row = Conversation | Completion


def is_chat_file(name: str | Path) -> bool:
    """Return whether a data set is named that is one file of rows, not a folder.

    >>> is_chat_file("chats.jsonl.gz"), is_chat_file("library"), is_chat_file("hub:org/a.jsonl")
    (True, False, False)
    """
    path = Path(name)
    named = suffix(path) in (*LINES, *TABLES) and not str(name).startswith("hub:")
    return named and not path.is_dir()


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the conversations of a file; refuse a file that has none."""
    if (kind := path_kind(path)) != "a file":
        problem = "no such file" if kind == MISSING else f"it is {kind}"
        raise ValueError(f"{quote(path)}: {problem}. Give a file of conversations. {FORM}")
    records = _read_table(path) if suffix(path) in TABLES else _read_lines(path)
    empty = True
    for record, location in records:
        empty = False
        yield parse_row(record, location)
    if empty:
        raise ValueError(f"{quote(path)} has no conversation. {FORM}")


def _read_lines(path: Path) -> Iterator[tuple[Any, str]]:
    with open_decompressed(path) as (file, _):
        for number, line in enumerate(file, 1):
            location = f"{quote(path)}:{number}"
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{encoding_error(location, error)}.") from None
            text = text.removeprefix(MARK) if number == 1 else text
            if text.strip():
                yield _parse_json(text, location), location


def _parse_json(text: str, location: str) -> Any:
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{location}: no JSON: {error.msg} at character {error.pos}.") from None
    except ValueError as error:
        raise ValueError(f"{location} cannot be read: {error}. Take the line out.") from None


def _read_table(path: Path) -> Iterator[tuple[Any, str]]:
    message = f"{quote(path)}: reading Parquet"
    parquet = import_optional("pyarrow.parquet", message, "chat")
    pyarrow = import_optional("pyarrow", message, "chat")
    number = 0
    try:
        with parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(256):
                for record in batch.to_pylist():
                    number += 1
                    yield record, f"{quote(path)}: row {number}"
    except MemoryError:
        raise MemoryError(memory_message(quote(path))) from None
    except (pyarrow.ArrowException, OSError) as error:
        if getattr(error, "errno", None) is not None:  # an OS error
            raise
        problem = quote(next(iter(str(error).splitlines()), ""))
        raise ValueError(f"{quote(path)} is no whole Parquet file: {problem}") from None


def parse_row(record: Any, location: str) -> Row:
    """Return the conversation of a row.

    Args:
        record: The row, as JSON.
        location: Its file and line, for messages.
    """
    if not isinstance(record, dict):
        raise ValueError(f"{location} is {brief(record)}: an object is expected. {FORM}")
    _refuse_keys(record, location)
    if record.get(MESSAGES) is not None:
        return _conversation(_parse_messages(record[MESSAGES], MESSAGES, location), location)
    prompt, completion = record.get(PROMPT), record.get(COMPLETION)
    if prompt is None or completion is None:
        fields = ", ".join(map(quote, record)) or "none"
        raise ValueError(
            f"{location} has neither messages nor prompt and completion: it has {fields}. {FORM}"
        )
    if isinstance(prompt, str) and isinstance(completion, str):
        _check_text(prompt, PROMPT, location)
        _check_text(completion, COMPLETION, location)
        return Completion(prompt, completion, location)
    head = _parse_messages(prompt, PROMPT, location)
    tail = _parse_messages(completion, COMPLETION, location)
    return _conversation((*head, *tail), location, len(head))


def _conversation(
    messages: tuple[Mapping[str, Any], ...], location: str, first: int = 0
) -> Conversation:
    if not any(message["role"] == ASSISTANT for message in messages[first:]):
        raise ValueError(
            f"{location} has no turn of the assistant, so the loss would count nothing. Take the "
            "row out."
        )
    return Conversation(messages, location, first)


def _parse_messages(value: Any, field: str, location: str) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"{location}: {field!r} is {brief(value)}: a list of messages is expected. {FORM}"
        )
    return tuple(
        _parse_message(message, f"{location}: {field}[{i}]") for i, message in enumerate(value)
    )


def _parse_message(message: Any, location: str) -> Mapping[str, Any]:
    """Return a message without fields that are null, as templates expect it."""
    if not isinstance(message, dict):
        raise ValueError(
            f"{location} is {brief(message)}: an object of role and content is expected."
        )
    _refuse_keys(message, location)
    message = {name: value for name, value in message.items() if value is not None}
    for name in ("role", "content"):
        if name not in message:
            fields = ", ".join(map(quote, message)) or "none"
            raise ValueError(f"{location} has no {name}: it has {fields}. {FORM}")
    if isinstance(parts := message["content"], list):
        kinds = sorted({str(p.get("type", "part")) for p in parts if isinstance(p, dict)})
        raise ValueError(
            f"{location}: its content is a list ({', '.join(map(quote, kinds)) or 'of texts'}), a "
            "text is expected. Images, sound and other parts are not supported: write a text."
        )
    for name, value in message.items():
        if name not in TOOL_KEYS:  # those are empty
            _check_text(value, name, location)
    if message["role"] in TOOL_ROLES:
        raise ValueError(
            f"{location} has the role {message['role']}: tools are not supported. Take the row out."
        )
    return {name: value for name, value in message.items() if name not in TOOL_KEYS}


def _refuse_keys(record: Mapping[str, Any], location: str) -> None:
    """Refuse what hfjax does not train on, by name; fields that are empty are fine."""
    for names, what in ((TOOL_KEYS, "tools"), (MEDIA_KEYS, "images and sound")):
        for name in names:
            if record.get(name):
                raise ValueError(
                    f"{location} has {name}: {what} are not supported. Take the row out, or the "
                    "field if the conversation is complete without it."
                )


def _check_text(value: Any, name: str, location: str) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{location}: {name!r} is {brief(value)}, a text is expected.")
    if not value.isascii() and (surrogate := SURROGATE.search(value)) is not None:
        raise ValueError(
            f"{location}: character {surrogate.start()} of {name!r} is "
            f"{ascii(surrogate[0])[1:-1]}, half of a pair, which is no text. Mend the row."
        )
