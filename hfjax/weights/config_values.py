"""Values of a config.json, each of the type that is expected of its key."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from hfjax.utils.keywords import is_real, is_whole


@dataclass(frozen=True)
class ConfigValues:
    """The keys of a config.json, or of a part of it.

    Attributes:
        keys: The keys.
        where: What errors call it.
    """

    keys: Mapping[str, Any]
    where: str = "config.json"

    def __contains__(self, name: str) -> bool:
        """Return whether a key is there, and not null."""
        return self.keys.get(name) is not None

    def with_defaults(self, defaults: Mapping[str, Any]) -> "ConfigValues":
        """Return the keys, and those of `defaults` that are absent."""
        return ConfigValues({**defaults, **self.keys}, self.where)

    @property
    def nothing(self) -> "ConfigValues":
        """No keys, of the same place."""
        return ConfigValues({}, self.where)

    def refuse(self, name: str, expected: str) -> NoReturn:
        """Raise an error about the value of a key."""
        given = repr(self.keys[name]) if name in self.keys else "absent"
        raise ValueError(f"{self.where}: {name} is {given}: {expected}")

    def whole(self, name: str, otherwise: int | None = None, least: int = 1) -> int:
        """Return a whole number; `otherwise` where the key is absent."""
        value = self.keys.get(name, otherwise)
        if not is_whole(value, least):
            self.refuse(name, f"a whole number, at least {least}, is expected.")
        return int(value)

    def maybe_whole(self, name: str) -> int | None:
        """Return a whole number, or None where the key is absent or null."""
        return self.whole(name) if name in self else None

    def number(
        self, name: str, otherwise: float | None = None, least: float | None = None
    ) -> float:
        """Return a number above 0, or at least `least`; `otherwise` where the key is absent."""
        value = self.keys.get(name, otherwise)
        if not is_real(value, sys.float_info.min if least is None else least, sys.float_info.max):
            what = "above 0" if least is None else f"at least {least:g}"
            self.refuse(name, f"a finite number {what} is expected.")
        return float(value)  # type: ignore[arg-type]

    def maybe_number(self, name: str) -> float | None:
        """Return a number above 0, or None where the key is absent or null."""
        return self.number(name) if name in self else None

    def flag(self, name: str, otherwise: bool = False) -> bool:
        """Return true or false; false where the key is null."""
        value = self.keys.get(name, otherwise)
        if not isinstance(value, bool | None):
            self.refuse(name, "true or false is expected.")
        return bool(value)

    def word(
        self, name: str, allowed: Mapping[str, str] | Sequence[str], otherwise: str | None = None
    ) -> str:
        """Return a word, one of those allowed; `otherwise` where the key is absent or null."""
        value = self.keys.get(name)
        value = otherwise if value is None else value
        if not isinstance(value, str) or value not in allowed:
            self.refuse(name, f"one of {', '.join(allowed)} is expected.")
        return allowed[value] if isinstance(allowed, Mapping) else value

    def words(self, name: str, allowed: Sequence[str], count: int) -> list[str] | None:
        """Return so many words, of those allowed; None where the key is absent or null."""
        value = self.keys.get(name)
        if value is None:
            return None
        known = isinstance(value, list | tuple) and all(word in allowed for word in value)
        if not known or len(value) != count:
            self.refuse(name, f"{count} words, each of {', '.join(allowed)}, are expected.")
        return list(value)

    def numbers_below(self, name: str, end: int) -> set[int]:
        """Return whole numbers from 0 to `end` - 1; none where the key is absent or null."""
        value = self.keys.get(name)
        value = [] if value is None else value
        if not isinstance(value, list | tuple) or not all(is_whole(n, 0, end - 1) for n in value):
            self.refuse(name, f"a list of whole numbers from 0 to {end - 1} is expected.")
        return set(value)

    def part(self, name: str) -> "ConfigValues | None":
        """Return the keys that lie in a key; None where it is absent, null or has none."""
        value = self.keys.get(name)
        if not isinstance(value, Mapping | None):
            self.refuse(name, "keys and values, or null, are expected.")
        return ConfigValues(value, f"{self.where}, {name}") if value else None

    def only(self, name: str, allowed: Any, why: str) -> None:
        """Refuse a value of a key that is none of the one allowed, absent or null."""
        value = self.keys.get(name)
        if value is not None and value != allowed:
            self.refuse(name, f"{why} {allowed!r} can be read.")
