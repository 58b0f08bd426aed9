"""Configurations from and to files; functions named as file.py:function."""

import difflib
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from hfjax.run.config import Train


def load(path: str | Path) -> Train:
    """Return the configuration in a YAML file, or `config` of a Python file."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"--config {path}: there is no such file.")
    if path.suffix == ".py":
        return _from_python(path)
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as wrong:
        raise ValueError(f"--config {path} is no YAML: {wrong}") from None
    if not isinstance(given, Mapping | None):
        raise ValueError(f"--config {path}: fields with values are expected, found {given!r}.")
    return read(Train, given or {}, str(path))


def _from_python(path: Path) -> Train:
    try:
        found = getattr(_module(path), "config", None)
    except (TypeError, ValueError) as wrong:
        raise ValueError(f"--config {path}: {wrong}") from wrong
    if not isinstance(found, Train):
        raise ValueError(
            f"--config {path}: it must define `config`, a hfjax.run.Train; found {found!r}."
        )
    return found


def read(kind: type, given: Any, where: str) -> Any:
    """Return a dataclass from a mapping; fields that it does not have are refused by name."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}: fields with values are expected, found {given!r}.")
    hints = get_type_hints(kind)
    for name in given:
        if name not in hints:
            near = difflib.get_close_matches(str(name), hints, n=3)
            raise ValueError(
                f"{where}: no field {name!r}. Nearest: {near or 'none'}. "
                f"Fields: {', '.join(hints)}."
            )
    return kind(**{name: _value(hints[name], x, f"{where}: {name}") for name, x in given.items()})


def _value(hint: Any, given: Any, where: str) -> Any:
    """Return a value of the type that a field has."""
    if is_dataclass(hint) and isinstance(hint, type):
        return read(hint, given, where)
    if get_origin(hint) in (Union, types.UnionType):
        options = [h for h in get_args(hint) if h is not type(None)]
        return None if given is None else _value(options[0], given, where)
    if get_origin(hint) is Literal:
        fits, value = given in get_args(hint), given
    elif get_origin(hint) is tuple:
        given = [given] if isinstance(given, str | int | float) else given  # one is a list of one
        fits = isinstance(given, list | tuple)
        value = tuple(_value(get_args(hint)[0], x, where) for x in given) if fits else given
    else:
        fits, value = _plain(hint, given)
    if not fits:
        raise ValueError(f"{where}={given!r}: {_allowed(hint)} is expected.")
    return value


def _allowed(hint: Any) -> str:
    """Return in words what a field may be."""
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    words[Path] = "a path"
    return words.get(hint, "a list")


def _plain(hint: Any, given: Any) -> tuple[bool, Any]:
    """Return whether a value is of a plain type, and the value as that type."""
    number = isinstance(given, int | float) and not isinstance(given, bool)
    if hint in (int, float) and isinstance(given, str):  # YAML reads 3e-4 as text
        try:
            given, number = float(given), True
        except ValueError:
            return False, given
    if hint is float:
        return number, float(given) if number else given
    if hint is int and number and given == int(given):
        return True, int(given)
    if hint is str and number:  # YAML reads 0.5 as a number
        return True, str(given)
    if hint is Path:
        return isinstance(given, str | Path), Path(given) if isinstance(given, str) else given
    return isinstance(given, hint) and (hint is bool or not isinstance(given, bool)), given


def plain(config: Any) -> Any:
    """Return a configuration as YAML and JSON have it."""

    def value(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {key: value(y) for key, y in x.items()}
        if isinstance(x, list | tuple):
            return [value(y) for y in x]
        return str(x) if isinstance(x, Path) else x

    return value(asdict(config))


def save(config: Train, path: Path) -> None:
    """Write a configuration that `load` reads, from any folder."""
    path.write_text(yaml.safe_dump(plain(anywhere(config)), sort_keys=False), encoding="utf-8")


def anywhere(config: Train) -> Train:
    """Return the configuration with whole paths in place of relative ones."""
    whole = lambda place: None if place is None else os.path.abspath(place)
    code = lambda name: whole(name) if name is not None and ".py:" in name else name
    data = replace(
        config.data,
        train=tuple(os.path.abspath(place) for place in config.data.train),
        valid=whole(config.data.valid),
    )
    model = replace(config.model, own=code(config.model.own), loss=code(config.model.loss))
    optimizer = replace(config.optimizer, own=code(config.optimizer.own))
    start = replace(config.checkpoints, start=whole(config.checkpoints.start))
    return replace(config, data=data, model=model, optimizer=optimizer, checkpoints=start)


def code_of(config: Train) -> list[str]:
    """Return the flags by which a configuration names Python code."""
    model, optimizer = config.model, config.optimizer
    named = {"model.own": model.own, "model.loss": model.loss, "optimizer.own": optimizer.own}
    return [f"--{flag} {name}" for flag, name in named.items() if name is not None]


def function(name: str, flag: str) -> Callable:
    """Return the function named as file.py:function, or as package.module:function."""
    place, _, attribute = name.rpartition(":")
    if not place:
        raise ValueError(f"{flag} {name}: file.py:function or package.module:function is expected.")
    try:
        module = _module(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (FileNotFoundError, ModuleNotFoundError) as missing:
        raise ValueError(f"{flag} {name}: {missing}.") from None
    found = getattr(module, attribute, None)
    if not callable(found):
        there = [n for n, x in vars(module).items() if callable(x) and not n.startswith("_")]
        raise ValueError(f"{flag} {name}: {place} has no function {attribute}. There: {there}.")
    return found


def _module(path: Path) -> types.ModuleType:
    """Return a Python file as a module; it may import what lies beside it."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent.absolute()) not in sys.path:
        sys.path.append(str(path.parent.absolute()))
    spec.loader.exec_module(module)
    return module


def changed(config: Any) -> dict[str, Any]:
    """Return what differs from the defaults, {"model.length": 128}."""

    def walk(x: Any, default: Any, prefix: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for f in fields(x):
            a, b = getattr(x, f.name), getattr(default, f.name)
            if is_dataclass(a):
                found |= walk(a, b, f"{prefix}{f.name}.")
            elif a != b:
                found[prefix + f.name] = a
        return found

    return walk(config, type(config)(), "")
