"""Typed access to the values of a config.json."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from hfjax.utils.keywords import is_int, is_real


@dataclass(frozen=True)
class ConfigValues:
    """The keys of a config.json, or of a section of it.

    Attributes:
        keys: The keys and their values.
        source: The name of the file in errors.
    """

    keys: Mapping[str, Any]
    source: str = "config.json"

    def __contains__(self, name: str) -> bool:
        """Return whether a key is present and not null."""
        return self.keys.get(name) is not None

    def with_defaults(self, defaults: Mapping[str, Any]) -> "ConfigValues":
        """Return a copy with absent keys taken from `defaults`."""
        return ConfigValues({**defaults, **self.keys}, self.source)

    @property
    def empty(self) -> "ConfigValues":
        """A copy without keys, with the same source."""
        return ConfigValues({}, self.source)

    def refuse(self, name: str, expected: str) -> NoReturn:
        """Raise an error about the value of a key."""
        value = repr(self.keys[name]) if name in self.keys else "absent"
        raise ValueError(f"{self.source}: {name} is {value}: {expected}")

    def get_int(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        """Return an integer; `default` where the key is absent."""
        value = self.keys.get(name, default)
        if not is_int(value, minimum):
            self.refuse(name, f"a whole number, at least {minimum}, is expected.")
        return int(value)

    def maybe_int(self, name: str) -> int | None:
        """Return an integer, or None where the key is absent or null."""
        return self.get_int(name) if name in self else None

    def get_float(
        self, name: str, default: float | None = None, minimum: float | None = None
    ) -> float:
        """Return a number above 0, or at least `minimum`; `default` where the key is absent."""
        value = self.keys.get(name, default)
        if not is_real(
            value, sys.float_info.min if minimum is None else minimum, sys.float_info.max
        ):
            bound = "above 0" if minimum is None else f"at least {minimum:g}"
            self.refuse(name, f"a finite number {bound} is expected.")
        return float(value)  # type: ignore[arg-type]

    def maybe_float(self, name: str) -> float | None:
        """Return a number above 0, or None where the key is absent or null."""
        return self.get_float(name) if name in self else None

    def get_bool(self, name: str, default: bool = False) -> bool:
        """Return a bool; False where the key is null."""
        value = self.keys.get(name, default)
        if not isinstance(value, bool | None):
            self.refuse(name, "true or false is expected.")
        return bool(value)

    def get_choice(
        self, name: str, allowed: Mapping[str, str] | Sequence[str], default: str | None = None
    ) -> str:
        """Return one of the allowed strings; `default` where the key is absent or null."""
        value = self.keys.get(name)
        value = default if value is None else value
        if not isinstance(value, str) or value not in allowed:
            self.refuse(name, f"one of {', '.join(allowed)} is expected.")
        return allowed[value] if isinstance(allowed, Mapping) else value

    def get_choices(self, name: str, allowed: Sequence[str], count: int) -> list[str] | None:
        """Return `count` of the allowed strings; None where the key is absent or null."""
        value = self.keys.get(name)
        if value is None:
            return None
        is_known = isinstance(value, list | tuple) and all(choice in allowed for choice in value)
        if not is_known or len(value) != count:
            self.refuse(name, f"{count} words, each of {', '.join(allowed)}, are expected.")
        return list(value)

    def get_indices(self, name: str, end: int) -> set[int]:
        """Return integers from 0 to `end` - 1; none where the key is absent or null."""
        value = self.keys.get(name)
        value = [] if value is None else value
        if not isinstance(value, list | tuple) or not all(is_int(n, 0, end - 1) for n in value):
            self.refuse(name, f"a list of whole numbers from 0 to {end - 1} is expected.")
        return set(value)

    def get_section(self, name: str) -> "ConfigValues | None":
        """Return the section of a key; None where it is absent, null or empty."""
        value = self.keys.get(name)
        if not isinstance(value, Mapping | None):
            self.refuse(name, "keys and values, or null, are expected.")
        return ConfigValues(value, f"{self.source}, {name}") if value else None

    def require(self, name: str, allowed: Any, why: str) -> None:
        """Refuse a value other than the one allowed, unless the key is absent or null."""
        value = self.keys.get(name)
        if value is not None and value != allowed:
            self.refuse(name, f"{why} {allowed!r} can be read.")
