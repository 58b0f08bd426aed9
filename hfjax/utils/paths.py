"""Trees by path: `{"layers/mlp/up/kernel": …}` and back, and patterns of paths."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any  # a pytree: arrays in dictionaries, lists, tuples, modules
Index = int | jax.Array  # a number that a program may compute
Shaped = jax.Array | jax.ShapeDtypeStruct  # an array, or its shape and dtype
Flat = dict[str, Any]  # path -> array, for instance {"layers/mlp/up/kernel": …}


def is_random_key(x: Any) -> bool:
    """Return whether an array, or its shape and dtype, is of random keys; NumPy has none."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def join_path(keys: Iterable[Any]) -> str:
    """Return the path that nnx spells as keys.

    >>> join_path(("layers", 0, "kernel"))
    'layers/0/kernel'
    """
    return "/".join(map(str, keys))


def nest(flat: Mapping[str, Any]) -> dict:
    """Return {"a/b": x} as {"a": {"b": x}}."""
    tree: dict = {}
    for path, value in flat.items():
        *parents, name = path.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[name] = value
    return tree


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {"a": {"b": x}} as {"a/b": x}."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        nested = isinstance(value, Mapping)
        flat |= flatten(value, f"{prefix}{name}/") if nested else {prefix + name: value}
    return flat


def find_parameter(
    keys: tuple, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[int, str] | None:
    """Return where among the keys of an array the path of a parameter begins, and that path.

    None if it is not optimizer state of a parameter: a count, or an array of another shape.
    """
    names = [str(getattr(key, "key", "")) for key in keys]
    for start in range(len(names)):
        path = "/".join(names[start:])
        if shapes.get(path) == shape:
            return start, path
    return None


def suggest(path: str, known: Iterable[str]) -> str:
    """Return a sentence with the known paths most similar to an unknown one."""
    known = list(known)
    near = difflib.get_close_matches(path, known, n=3)
    near = near or [p for p in known if p.startswith(path)][:3]
    return f"Nearest: {near or 'none'}. All: layout.specs."


def match_patterns(patterns: Sequence[str], paths: Iterable[str]) -> dict[str, str]:
    """Return path -> the first pattern that it matches; `*` matches anything, also `/`.

    >>> match_patterns(["*/bias", "*"], ["mlp/bias", "mlp/kernel"])
    {'mlp/bias': '*/bias', 'mlp/kernel': '*'}

    A pattern that matches nothing is refused.
    """
    paths = list(paths)
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise ValueError(f"pattern {pattern!r} matches no parameter. {suggest(pattern, paths)}")
    first_matches = {p: next((x for x in patterns if fnmatchcase(p, x)), None) for p in paths}
    return {path: pattern for path, pattern in first_matches.items() if pattern is not None}


def natural_sort_key(path: str) -> list[Any]:
    """Return a key that sorts the numbers in paths by value, not by their digits.

    >>> sorted(["layers/10/", "layers/9/"], key=natural_sort_key)
    ['layers/9/', 'layers/10/']
    """
    return [int(piece) if piece.isdigit() else piece for piece in re.split(r"(\d+)", path)]


def check_paths(paths: Sequence[str]) -> None:
    """Refuse two arrays with the same path, or one path inside another."""
    known = set(paths)
    parents = lambda path: ("/".join(path.split("/")[:i]) for i in range(1, path.count("/") + 1))
    duplicates = (
        [path for path in known if paths.count(path) > 1] if len(known) < len(paths) else []
    )
    nested = [path for path in paths if known.intersection(parents(path))]
    if wrong := sorted(duplicates) + nested:
        raise ValueError(
            f"two arrays have the path {wrong[0]!r}, or a part of it: a name has a / in it, which "
            "separates the names of a path. Rename it."
        )
