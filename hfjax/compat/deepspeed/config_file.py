"""A DeepSpeed configuration file, read strictly: the value of each path, and its outcome."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hfjax.compat.deepspeed.key_entries import (
    IGNORED,
    REFUSED,
    TAKEN,
    describe_value,
    find_entry,
    is_allowed,
    is_default,
    is_section,
    suggest_value,
)
from hfjax.compat.deepspeed.known_keys import OPTIMIZERS, SECTIONS, TABLE, usual_name
from hfjax.utils.keywords import closest, name_hint
from hfjax.utils.read_files import brief, read_text
from hfjax.utils.tables import align, quote

UNKNOWN = "DeepSpeed has no such key"


@dataclass
class DeepSpeedConfig:
    """The values of a file, {path: value}, and the outcome of each path, in words.

    Outcomes also cover paths that the file omits but DeepSpeed applies by default. Paths are those
    of the table; `names` maps them to other names that the file uses.
    """

    file: str
    values: dict[str, Any]
    names: dict[str, str]
    outcomes: dict[str, str] = field(default_factory=dict)

    def get(self, path: str) -> Any:
        """Return the value of a path, or DeepSpeed's default, or None if it has none."""
        value = self.values.get(path)
        if value is None:
            default = TABLE[self.table_path(path)].default
            return None if isinstance(default, type) else default
        return value

    def table_path(self, path: str) -> str:
        """Return the path as the table has it: with the type of optimizer or schedule."""
        section, _, rest = path.partition(".")
        if section in ("optimizer", "scheduler") and rest.startswith("params"):
            return f"{section}({self.kind(section)}).{rest}"
        return path

    def kind(self, section: str) -> str:
        """Return the type of optimizer or schedule, as the table spells it: adam is Adam."""
        kind = str(self.values.get(f"{section}.type"))
        return OPTIMIZERS.get(kind.lower(), kind) if section == "optimizer" else kind

    @property
    def tensor_size(self) -> int:
        """The number of devices over which a layer is sharded."""
        sizes = (self.get(f"tensor_parallel.{key}") for key in ("autotp_size", "tp.tp_size"))
        return int(max(1, *sizes))

    def take(self, path: str, meaning: str) -> None:
        """Record how a path is applied, if the file has it and it is not refused."""
        self._record(path, f"{TAKEN} {meaning}")

    def ignore(self, path: str, why: str) -> None:
        """Record why a path has no effect, if the file has it."""
        self._record(path, f"{IGNORED} {why}")

    def refuse(self, path: str, why: str) -> None:
        """Record why a path, or DeepSpeed's default for it, is refused: an error at the end."""
        self.outcomes[path] = f"{REFUSED} {why}"

    def imply(self, path: str, meaning: str) -> None:
        """Record what DeepSpeed does by default, if the file does not have a path."""
        if path not in self.values:
            self.outcomes[path] = f"{TAKEN} {meaning}"

    def table(self) -> tuple[tuple[str, str, str], ...]:
        """Return a line for each key: its path, value and outcome."""
        name = lambda path: quote(self.names.get(path, path))
        entries = self.outcomes.items()
        return tuple(
            (name(path), _format_value(self.values, path), outcome) for path, outcome in entries
        )

    def is_refused(self) -> bool:
        """Return whether any path is refused."""
        return any(outcome.startswith(REFUSED) for outcome in self.outcomes.values())

    def error(self, message: str = "") -> ValueError:
        """Return an error with the whole table, below the message or the list of refused paths."""
        table = self.table()
        refused = ", ".join(path for path, _, outcome in table if outcome.startswith(REFUSED))
        message = message or f"{refused}: refused, as said below."
        return ValueError("\n".join([f"{self.file}: {message}", *align(table)]))

    def _record(self, path: str, outcome: str) -> None:
        if path in self.values and not self.outcomes.get(path, "").startswith(REFUSED):
            self.outcomes[path] = outcome


def read_config(source: str | Path | Mapping[str, Any]) -> DeepSpeedConfig:
    """Return the configuration in a file or dict; what no table entry allows is refused."""
    is_dict = isinstance(source, Mapping)
    file = "the configuration" if is_dict else quote(source)
    root = source if is_dict else _parse_file(Path(source))
    if not isinstance(root, Mapping):
        raise ValueError(f"{file}: an object of JSON is expected, found {brief(root)}.")
    try:
        leaves = dict(_iter_leaves(root))
    except RecursionError:
        raise ValueError(f"{file}: it is nested too deeply.") from None
    paths = {path: usual_name(path, leaves) for path in leaves}
    values = {paths[path]: value for path, value in leaves.items()}
    names = {usual: path for path, usual in paths.items() if path != usual}
    config = DeepSpeedConfig(file, values, names)
    problems = {path: _find_problem(config, path, value) for path, value in values.items()}
    for path, why in problems.items():
        config.refuse(path, why) if why else _record_table_outcome(config, path, values[path])
    if any(problems.values()):
        raise config.error()
    return config


def _parse_file(path: Path) -> Any:
    text = ""
    try:
        text = read_text(path)
        return json.loads(
            text, object_pairs_hook=_reject_duplicates, parse_constant=_reject_constant
        )
    except json.JSONDecodeError as error:
        lines = text.splitlines()[error.lineno - 1 : error.lineno]
        comment = any(mark in line for mark in ("//", "/*", "#") for line in lines)
        why = "JSON has no comments: remove it" if comment else f"it is no JSON: {error.msg}"
        raise ValueError(f"{quote(path)}, line {error.lineno}: {why}.") from None
    except RecursionError:
        raise ValueError(f"{quote(path)}: it is nested too deeply.") from None
    except ValueError as error:
        message = str(error)
        raise ValueError(
            message if quote(path) in message else f"{quote(path)}: {message}"
        ) from None


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    merged = dict(pairs)
    names = [name for name, _ in pairs]
    if duplicates := [name for name in merged if names.count(name) > 1]:
        values = [brief(value) for name, value in pairs if name == duplicates[0]]
        raise ValueError(
            f"the key {quote(duplicates[0])} is there twice, {' and '.join(values)}: keep one."
        )
    return merged


def _reject_constant(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON: write a finite one.")


def _iter_leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every path with its value; an object without keys is a value."""
    for name, value in tree.items():
        path = f'{prefix}"{name}"' if "." in str(name) else f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _iter_leaves(value, f"{path}.")
        else:
            yield path, value


def _find_problem(config: DeepSpeedConfig, path: str, value: Any) -> str | None:
    """Return the problem of a key, if any: it is unknown, or its value is invalid."""
    table_path = config.table_path(path)
    entry, is_empty = find_entry(TABLE, table_path), value in ({}, None)
    if entry is None:
        section, params, _ = table_path.partition(").params")
        if params and not is_section(TABLE, f"{section}{params}"):
            return None  # the type is refused
        if is_section(TABLE, table_path):
            return None if is_empty else "an object is expected"
        return _unknown_key_message(path, table_path)
    if value == "auto" and entry.default != "auto":
        return f'it is "auto", which a Trainer fills in: write {suggest_value(entry)}'
    if is_allowed(entry, value):
        return None
    is_quoted = (
        isinstance(value, str) and "number" in describe_value(entry) and _spells_number(value)
    )
    advice = f". Write {value} without quotes" if is_quoted else ""
    return f"{describe_value(entry)} is expected{advice}"


def _unknown_key_message(path: str, table_path: str) -> str | None:
    """Return the message for a key that DeepSpeed does not have, with the closest known key.

    None: it is outside all sections, where DeepSpeed reads no other keys, and resembles none.
    """
    if '"' in path:
        return f"{UNKNOWN}: nest objects"
    if (usual := usual_name(path, ())) != path:
        return f"{usual} is the same, and that or its section is there too: keep one"
    parent, _, name = table_path.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in TABLE if key.startswith(f"{parent}.")}
    if ").params" in table_path:
        return (
            f"{parent} has no such key.{name_hint(name, siblings)} There are {', '.join(siblings)}"
        )
    keys = [key for key in TABLE if "(" not in key and "*" not in key]
    names = {key.rpartition(".")[2]: key for key in keys} | siblings
    suggestion = name_hint(table_path, keys)
    if not suggestion and (last := closest(name, names)):
        suggestion = f" Did you mean {names[last]}?"
    if path.partition(".")[0] in SECTIONS:
        return f"{UNKNOWN}.{suggestion}"
    return f"{UNKNOWN}, and passes over it.{suggestion} If not, remove it" if suggestion else None


def _spells_number(text: str) -> bool:
    try:
        return bool(float(text) == float(text))
    except ValueError:
        return False


def _format_json(value: Any, max_length: int = 60) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        return brief(value)
    return text if len(text) <= max_length else brief(value)


def _format_value(values: dict[str, Any], path: str) -> str:
    return _format_json(values[path], 30)[:30] if path in values else "not there"


def _record_table_outcome(config: DeepSpeedConfig, path: str, value: Any) -> None:
    """Record the table's outcome; the code that applies a taken path records it again."""
    entry = find_entry(TABLE, config.table_path(path))
    if entry is None and path.partition(".")[0] not in SECTIONS:
        config.ignore(path, f"{UNKNOWN}, and passes over it too")
    elif entry is None or value == {}:
        config.ignore(path, "nothing here takes it")
    elif entry.verdict == TAKEN:
        config.take(path, entry.meaning.format(_format_json(value)))
    elif entry.verdict == IGNORED:
        config.ignore(path, entry.meaning)
    elif is_default(entry, value):
        config.ignore(path, "it is the default, and no other is here")
    else:
        config.refuse(path, entry.meaning)
