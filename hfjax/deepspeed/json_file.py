"""A file of DeepSpeed, read strictly: what each path of it says, and what becomes of it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hfjax.base.keywords import nearest_of
from hfjax.base.read_files import contents, shown
from hfjax.base.tables import named
from hfjax.deepspeed.key_rows import (
    IGNORED,
    REFUSED,
    TAKEN,
    fits,
    is_default,
    is_section,
    kind_of,
    row_of,
    to_write,
)
from hfjax.deepspeed.known_keys import OPTIMIZERS, TABLE


@dataclass
class Given:
    """What a file says: {path: value}, and what becomes of each path, in words.

    There are also words of what it does not say and DeepSpeed does all the same.
    """

    file: str
    values: dict[str, Any]
    words: dict[str, str] = field(default_factory=dict)

    def of(self, path: str) -> Any:
        """Return the value of a path, or DeepSpeed's default; None: there is none."""
        value = self.values.get(path)
        if value is None:
            default = TABLE[self.typed(path)].default
            return None if isinstance(default, type) else default
        return value

    def typed(self, path: str) -> str:
        """Return the path by which the table knows it: of its kind of optimizer or schedule."""
        section, _, rest = path.partition(".")
        if section in ("optimizer", "scheduler") and rest.startswith("params"):
            return f"{section}({self.kind(section)}).{rest}"
        return path

    def kind(self, section: str) -> str:
        """Return which optimizer or schedule is meant, as the table spells it: adam is Adam."""
        kind = str(self.values.get(f"{section}.type"))
        return OPTIMIZERS.get(kind.lower(), kind) if section == "optimizer" else kind

    @property
    def tensor(self) -> int:
        """Over how many devices a layer is split."""
        sizes = (self.of(f"tensor_parallel.{key}") for key in ("autotp_size", "tp.tp_size"))
        return int(max(1, *sizes))

    def take(self, path: str, words: str) -> None:
        """Say as what a path is taken, if the file has it and it is not refused."""
        self._say(path, f"{TAKEN} {words}")

    def ignore(self, path: str, why: str) -> None:
        """Say why a path changes nothing, if the file has it."""
        self._say(path, f"{IGNORED} {why}")

    def refuse(self, path: str, why: str) -> None:
        """Say why a path, or DeepSpeed's default of it, is refused: an error at the end."""
        self.words[path] = f"{REFUSED} {why}"

    def imply(self, path: str, words: str) -> None:
        """Say what DeepSpeed does by default, if the file does not have a path."""
        if path not in self.values:
            self.words[path] = f"{TAKEN} {words}"

    def _say(self, path: str, words: str) -> None:
        if path in self.values and not self.words.get(path, "").startswith(REFUSED):
            self.words[path] = words


def read(source: str | Path | Mapping[str, Any]) -> Given:
    """Return what a file or a dict says; what no row of the table allows is refused."""
    plain = isinstance(source, Mapping)
    file = "the configuration" if plain else named(source)
    found = source if plain else _parsed(Path(source))
    if not isinstance(found, Mapping):
        raise ValueError(f"{file}: an object of JSON is expected, found {shown(found)}.")
    try:
        given = Given(file, dict(_leaves(found)))
    except (ValueError, RecursionError) as wrong:
        raise ValueError(f"{file}: {wrong}") from None
    mistakes = [
        told for path, value in given.values.items() if (told := _wrong(given, path, value))
    ]
    if mistakes:
        raise ValueError(f"{given.file}: " + "\n".join(mistakes))
    for path, value in given.values.items():
        _by_table(given, path, value)
    return given


def _parsed(path: Path) -> Any:
    text = ""
    try:
        text = contents(path)
        return json.loads(text, object_pairs_hook=_once, parse_constant=_constant)
    except json.JSONDecodeError as wrong:
        lines = text.splitlines()[wrong.lineno - 1 : wrong.lineno]
        comment = any(mark in line for mark in ("//", "/*", "#") for line in lines)
        why = "JSON has no comments: remove it" if comment else f"it is no JSON: {wrong.msg}"
        raise ValueError(f"{named(path)}, line {wrong.lineno}: {why}.") from None
    except RecursionError:
        raise ValueError(f"{named(path)}: it is nested too deeply.") from None
    except ValueError as wrong:
        told = str(wrong)
        raise ValueError(told if named(path) in told else f"{named(path)}: {told}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    names = [name for name, _ in pairs]
    if twice := [name for name in found if names.count(name) > 1]:
        values = [shown(value) for name, value in pairs if name == twice[0]]
        raise ValueError(
            f"the key {named(twice[0])} is there twice, {' and '.join(values)}: keep one."
        )
    return found


def _constant(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON: write a finite one.")


def _leaves(given: Mapping[str, Any], outer: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every path with its value; an object without keys is a value."""
    for name, value in given.items():
        if "." in str(name):
            raise ValueError(f"{outer}{named(name)}: DeepSpeed has no such key: nest objects.")
        path = f"{outer}{name}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def _wrong(given: Given, path: str, value: Any) -> str | None:
    """Return what is wrong with a key, if something is: it is unknown, or no such value."""
    typed = given.typed(path)
    row, nothing = row_of(TABLE, typed), value in ({}, None)
    if row is None:
        section, params, _ = typed.partition(").params")
        if params and not is_section(TABLE, f"{section}{params}"):
            return None  # the type is refused
        if is_section(TABLE, typed):
            return None if nothing else f"{path} is {_json(value)}: an object is expected."
        return _unknown(path, typed)
    if value == "auto" and row.default != "auto":
        return f'{path} is "auto", which a Trainer fills in: write {to_write(row)}.'
    if fits(row, value):
        return None
    quoted = isinstance(value, str) and "number" in kind_of(row) and _spells_number(value)
    todo = f" Write {value} without quotes." if quoted else ""
    return f"{path} is {_json(value)}: {kind_of(row)} is expected.{todo}"


def _unknown(path: str, typed: str) -> str:
    """Return what is said of a key that DeepSpeed does not have, with the nearest of its place."""
    inside, _, name = typed.rpartition(".")
    beside = {key.rpartition(".")[2]: key for key in TABLE if key.startswith(f"{inside}.")}
    if ").params" in typed:
        all_of = f" There are {', '.join(beside)}."
        return f"{path}: {inside} has no such key.{nearest_of(name, beside)}{all_of}"
    names = {key.rpartition(".")[2]: key for key in TABLE if "(" not in key} | beside
    near = nearest_of(typed, TABLE)
    if not near and (last := nearest_of(name, names)):
        near = f" Did you mean {names[last.split()[-1].rstrip('?')]}?"
    return f"{path}: DeepSpeed has no such key.{near}"


def _spells_number(text: str) -> bool:
    try:
        return bool(float(text) == float(text))
    except ValueError:
        return False


def _json(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        return shown(value)
    return text if len(text) < 60 else shown(value)


def _by_table(given: Given, path: str, value: Any) -> None:
    """Say what the table says; what is taken is said again by who takes it."""
    row = row_of(TABLE, given.typed(path))
    if row is None or value == {}:
        given.ignore(path, "nothing here takes it")
    elif row.verdict == TAKEN:
        given.take(path, row.words.format(_json(value)))
    elif row.verdict == IGNORED:
        given.ignore(path, row.words)
    elif is_default(row, value):
        given.ignore(path, "it is the default, and no other is here")
    else:
        given.refuse(path, row.words)
