"""The table of docs/own_programs.md, made from the table of rules: print it."""

import inspect
import textwrap
from collections.abc import Callable

from hfjax.parallel.spmd.interpreter import RULES


def table() -> str:
    """Return what each rule does, with the operations that have it."""
    by_rule: dict[Callable, list[str]] = {}
    for name, rule in RULES.items():
        by_rule.setdefault(inspect.unwrap(rule), []).append(name)
    merged: dict[str, list[str]] = {}
    for rule, names in by_rule.items():
        merged.setdefault((rule.__doc__ or "").splitlines()[0], []).extend(names)
    lines = [item for what, names in merged.items() for item in _item(what, sorted(names))]
    return "\n".join(lines)


def _item(what: str, names: list[str]) -> list[str]:
    text = f"- {what} `{' '.join(names)}`"
    return textwrap.wrap(text, 100, subsequent_indent="  ", break_on_hyphens=False)


if __name__ == "__main__":
    print(table())
