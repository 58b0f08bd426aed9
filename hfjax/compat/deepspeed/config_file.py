"""A file of DeepSpeed, read strictly: what each path of it says, and what becomes of it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hfjax.compat.deepspeed.key_entries import (
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
from hfjax.compat.deepspeed.known_keys import OPTIMIZERS, SECTIONS, TABLE, usual_name
from hfjax.utils.keywords import closest, nearest_of
from hfjax.utils.read_files import contents, shown
from hfjax.utils.tables import aligned, named

UNKNOWN = "DeepSpeed has no such key"


@dataclass
class Given:
    """What a file says: {path: value}, and what becomes of each path, in words.

    There are also words of what it does not say and DeepSpeed does all the same. Paths are those of
    the table; `names` are other names of some, as the file has them.
    """

    file: str
    values: dict[str, Any]
    names: dict[str, str]
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

    def table(self) -> tuple[tuple[str, str, str], ...]:
        """Return a line for each key: its path, its value, what becomes of it."""
        name = lambda path: named(self.names.get(path, path))
        rows = self.words.items()
        return tuple((name(path), _shown(self.values, path), words) for path, words in rows)

    def is_refused(self) -> bool:
        """Return whether something is."""
        return any(words.startswith(REFUSED) for words in self.words.values())

    def error(self, says: str = "") -> ValueError:
        """Return the error that has the whole table, below what it says or what is refused."""
        table = self.table()
        refused = ", ".join(path for path, _, words in table if words.startswith(REFUSED))
        says = says or f"{refused}: refused, as said below."
        return ValueError("\n".join([f"{self.file}: {says}", *aligned(table)]))

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
        leaves = dict(_leaves(found))
    except RecursionError:
        raise ValueError(f"{file}: it is nested too deeply.") from None
    paths = {path: usual_name(path, leaves) for path in leaves}
    values = {paths[path]: value for path, value in leaves.items()}
    names = {usual: path for path, usual in paths.items() if path != usual}
    given = Given(file, values, names)
    wrong = {path: _wrong(given, path, value) for path, value in values.items()}
    for path, why in wrong.items():
        given.refuse(path, why) if why else _by_table(given, path, values[path])
    if any(wrong.values()):
        raise given.error()
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
        path = f'{outer}"{name}"' if "." in str(name) else f"{outer}{name}"
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
            return None if nothing else "an object is expected"
        return _unknown(path, typed)
    if value == "auto" and row.default != "auto":
        return f'it is "auto", which a Trainer fills in: write {to_write(row)}'
    if fits(row, value):
        return None
    quoted = isinstance(value, str) and "number" in kind_of(row) and _spells_number(value)
    todo = f". Write {value} without quotes" if quoted else ""
    return f"{kind_of(row)} is expected{todo}"


def _unknown(path: str, typed: str) -> str | None:
    """Return what is said of a key that DeepSpeed does not have, with the nearest of its place.

    None: it is outside of all sections, where DeepSpeed reads no other keys, and near to none.
    """
    if '"' in path:
        return f"{UNKNOWN}: nest objects"
    if (usual := usual_name(path, ())) != path:
        return f"{usual} is the same, and that or its section is there too: keep one"
    inside, _, name = typed.rpartition(".")
    beside = {key.rpartition(".")[2]: key for key in TABLE if key.startswith(f"{inside}.")}
    if ").params" in typed:
        return f"{inside} has no such key.{nearest_of(name, beside)} There are {', '.join(beside)}"
    keys = [key for key in TABLE if "(" not in key and "*" not in key]
    names = {key.rpartition(".")[2]: key for key in keys} | beside
    near = nearest_of(typed, keys)
    if not near and (last := closest(name, names)):
        near = f" Did you mean {names[last]}?"
    if path.partition(".")[0] in SECTIONS:
        return f"{UNKNOWN}.{near}"
    return f"{UNKNOWN}, and passes over it.{near} If not, remove it" if near else None


def _spells_number(text: str) -> bool:
    try:
        return bool(float(text) == float(text))
    except ValueError:
        return False


def _json(value: Any, longest: int = 60) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        return shown(value)
    return text if len(text) <= longest else shown(value)


def _shown(values: dict[str, Any], path: str) -> str:
    return _json(values[path], 30)[:30] if path in values else "not there"


def _by_table(given: Given, path: str, value: Any) -> None:
    """Say what the table says; what is taken is said again by who takes it."""
    row = row_of(TABLE, given.typed(path))
    if row is None and path.partition(".")[0] not in SECTIONS:
        given.ignore(path, f"{UNKNOWN}, and passes over it too")
    elif row is None or value == {}:
        given.ignore(path, "nothing here takes it")
    elif row.verdict == TAKEN:
        given.take(path, row.words.format(_json(value)))
    elif row.verdict == IGNORED:
        given.ignore(path, row.words)
    elif is_default(row, value):
        given.ignore(path, "it is the default, and no other is here")
    else:
        given.refuse(path, row.words)
