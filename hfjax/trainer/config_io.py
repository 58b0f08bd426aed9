"""Configurations from and to files; functions named as file.py:function."""

import difflib
import importlib
import importlib.util
import os
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from hfjax.parallel.offload.activations import several
from hfjax.trainer.config import Train
from hfjax.trainer.yaml_fields import Lined, parsed
from hfjax.utils.atomic import replace_text
from hfjax.utils.read_files import MISSING, contents, is_number, shown, what_is
from hfjax.utils.renamed import old_modules
from hfjax.utils.tables import named

# What an optimizer's state depends on.
STORED = tuple(f"optimizer.{name}" for name in ("name", "own", "ema", "master", "frozen", "scale"))


# What belongs to a machine, or to one start of a run, and is not saved with it.
HERE = ("devices", "cpu_devices", "cache", "profile", "minutes")


def load(path: str | Path) -> Train:
    """Return the configuration in a YAML file, or `config` of a Python file.

    Args:
        path: The file; one that ends in .py is run.

    Raises:
        ValueError: There is no such file, or it names a field or a value that there is not; it
            says in which line.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from hfjax.trainer import load
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = Path(folder.name, "config.yaml")
        >>> _ = path.write_text("steps: 2000" + chr(10) + "mesh: {fsdp: 8}")
        >>> load(path).steps, load(path).mesh.fsdp
        (2000, 8)
    """
    path = Path(path)
    if (kind := what_is(path)) != "a file":
        found = "there is no such file" if kind == MISSING else f"it is {kind}, no file"
        raise ValueError(f"--config {named(path)}: {found}.")
    if path.suffix == ".py":
        return _from_python(path)
    try:
        text = contents(path)
    except UnicodeDecodeError as wrong:
        raise ValueError(f"--config {named(path)} is no YAML: {wrong}") from None
    given = parsed(text, f"--config {named(path)}")
    if isinstance(given, dict) and (ratios := several(given.get("offload"))):
        # Until November 2026 each stage of a pipeline could have its own.
        given["offload"] = f"{max(ratios):g}"
        warnings.warn(
            f"{named(path)}: offload has several ratios. All stages of a pipeline have one now: "
            f"the largest, {max(ratios):g}, is taken. Write offload: {max(ratios):g}.",
            stacklevel=2,
        )
    _without_dropout(given)
    _rename_schedule(given)
    return read(Train, {} if given is None else given, named(path))


def _without_dropout(given: Any) -> None:
    """Take out a dropout of 0 that a run has written: until November 2026 that was the preset's."""
    model = given.get("model") if isinstance(given, dict) else None
    if not isinstance(model, dict) or not {"smoothing", "group_norms", "stored"} <= set(model):
        return
    if "auxiliary_dropout" not in model and model.get("dropout") == "0.0":
        del model["dropout"]


def _rename_schedule(given: Any) -> None:
    """Replace the names that two schedules had until November 2026."""
    pipeline = given.get("pipeline") if isinstance(given, dict) else None
    if isinstance(pipeline, dict) and pipeline.get("name") in ("1f1b-half", "interleaved-half"):
        pipeline["name"] = pipeline["name"].replace("half", "published")


def _from_python(path: Path) -> Train:
    try:
        with old_modules():
            found = getattr(_module(path), "config", None)
    except Exception as wrong:  # whatever the file does
        raise ValueError(f"--config {named(path)}: {_raised(wrong, path)}") from wrong
    if not isinstance(found, Train):
        raise ValueError(
            f"--config {named(path)}: it must define `config`, a hfjax.trainer.Train; "
            f"found {found!r}."
        )
    return found


@dataclass(frozen=True)
class _Where:
    """Where something is said: in which file, line and fields."""

    file: str
    line: int | None = None
    fields: str = ""

    def of(self, given: Mapping, name: str) -> "_Where":
        """Return where a mapping says something of a name."""
        line = given.lines.get(name) if isinstance(given, Lined) else None
        return replace(self, line=line or self.line)

    def inside(self, given: Mapping, name: str) -> "_Where":
        """Return where a field of a mapping is."""
        return replace(self.of(given, name), fields=f"{self.fields}: {name}")

    def __str__(self) -> str:
        line = "" if self.line is None else f":{self.line}"
        return f"{self.file}{line}{self.fields}"


def read(kind: type, given: Any, where: str) -> Any:
    """Return a dataclass from a mapping; fields that it does not have are refused by name."""
    return _read(kind, given, _Where(where))


def _read(kind: type, given: Any, where: _Where) -> Any:
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}: fields with values are expected, found {shown(given)}.")
    kinds = get_type_hints(kind)
    hints = {field.name: kinds[field.name] for field in fields(kind)}
    for name in given:
        if name not in hints:
            near = difflib.get_close_matches(str(name), hints, n=3)
            raise ValueError(
                f"{where.of(given, name)}: no field {shown(name)}. Nearest: {near or 'none'}. "
                f"Fields: {', '.join(hints)}."
            )
    found = {n: _value(hints[n], x, where.inside(given, n)) for n, x in given.items()}
    try:
        return kind(**found)
    except ValueError as wrong:
        raise ValueError(f"{where}: {wrong}") from None


def _value(hint: Any, given: Any, where: _Where) -> Any:
    """Return a value of the type that a field has."""
    if is_dataclass(hint) and isinstance(hint, type):
        return _read(hint, given, where)
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
        raise ValueError(f"{where}={shown(given)}: {_allowed(hint)} is expected.")
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
    if hint in (int, float):
        number = _number(given)
        if not is_number(number) or (hint is int and number != number // 1):  # also inf and nan
            return False, given
        return True, hint(number)
    if hint in (str, Path) and isinstance(given, str):
        return _is_text(given), hint(given)
    return isinstance(given, hint), given


def _number(given: Any) -> int | float | None:
    """Return the number that was given, or that a text spells; None: it is none."""
    if isinstance(given, int | float) and not isinstance(given, bool):
        return given
    for kind in (int, float) if isinstance(given, str) else ():
        try:
            return kind(given)
        except ValueError:
            continue
    return None


def _is_text(given: str) -> bool:
    """Return whether a text says something, and may be the name of a file."""
    try:
        os.fsencode(given)
    except UnicodeEncodeError:  # half of a pair
        return False
    return given != "" and "\0" not in given


def plain(config: Train) -> dict[str, Any]:
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
    replace_text(path, yaml.safe_dump(plain(anywhere(config)), sort_keys=False))


def lasting(config: Train) -> Train:
    """Return the configuration without what belongs to this machine, or to this start."""
    checkpoints = replace(config.checkpoints, resume=Train().checkpoints.resume)
    here = {name: getattr(Train(), name) for name in HERE}
    return replace(config, checkpoints=checkpoints, **here)


def differing(config: Train, other: Any) -> list[tuple[str, str]]:
    """Return the flags of what is stored that differ from those of another run: here, and there."""
    mine, theirs = _flat(plain(config)), _recorded(other)
    stored = [flag for flag in mine if flag.startswith("model.") or flag in STORED]
    if mine["model.pretrained"] or theirs.get("model.pretrained"):  # in place of a preset
        stored.remove("model.preset")
    return _differing(config, theirs, stored)


def changes(config: Train, other: Any) -> list[str]:
    """Return the flags of how a run trains that differ from another's, each with what it was."""
    flags = [flag for flag in _flat(plain(config)) if not flag.startswith(_BESIDE)]
    differ = _differing(config, _recorded(other), flags)
    return [f"{here} (before: {there.removeprefix('with ')})" for here, there in differ]


def other_start(config: Train, other: Any) -> str | None:
    """Return what --checkpoints.start names, if it is not what another configuration has there."""
    differs = _differing(config, _flat(other), ["checkpoints.start"])
    return config.checkpoints.start if differs else None


def _recorded(other: Any) -> dict[str, Any]:
    """Return the flags of what a run recorded; a dropout of 0 once was the preset's, see `load`."""
    found = _flat(other)
    if "model.auxiliary_dropout" not in found and found.get("model.dropout") == 0:
        del found["model.dropout"]
    return found


def _differing(config: Train, theirs: dict, flags: Sequence[str]) -> list[tuple[str, str]]:
    """Return the flags that differ; a path may be whole in one of both, and relative in another."""
    mine, whole = _flat(plain(config)), _flat(plain(anywhere(config)))
    return [
        (_flag(flag, mine[flag], ""), _flag(flag, theirs[flag], "with "))
        for flag in flags
        if flag in theirs and theirs[flag] not in (mine[flag], whole[flag])
    ]


# Of a run, but not of how it trains.
_BESIDE = (*HERE, "out", "timeout", "init_timeout", "log.", "checkpoints.")


def _flat(plain: Any, prefix: str = "") -> dict[str, Any]:
    """Return {"model.length": 128} of nested fields; nothing of what is none of ours."""
    found: dict[str, Any] = {}
    for name, value in plain.items() if isinstance(plain, dict) else ():
        nested = isinstance(value, dict)
        found |= _flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return found


def _flag(name: str, value: Any, word: str) -> str:
    name = name.replace("_", "-")
    if value in (None, [], False):
        return f"without --{name}"
    values = " ".join(map(str, value)) if isinstance(value, list) else value
    return f"{word}--{name}" + ("" if value is True else f" {values}")


def anywhere(config: Train) -> Train:
    """Return the configuration with whole paths in place of relative ones."""
    whole = lambda place: None if place is None else os.path.abspath(place)
    code = lambda name: whole(name) if name is not None and ".py:" in name else name
    data = replace(
        config.data,
        train=tuple(os.path.abspath(place) for place in config.data.train),
        valid=whole(config.data.valid),
    )
    given = config.model.pretrained
    pretrained = None if given is None else Path(os.path.abspath(given))
    own, loss = code(config.model.own), code(config.model.loss)
    model = replace(config.model, own=own, loss=loss, pretrained=pretrained)
    optimizer = replace(config.optimizer, own=code(config.optimizer.own))
    start = replace(config.checkpoints, start=whole(config.checkpoints.start))
    file = None if config.deepspeed is None else Path(os.path.abspath(config.deepspeed))
    paths = {"deepspeed": file, "checkpoints": start}
    return replace(config, data=data, model=model, optimizer=optimizer, **paths)


def code_of(config: Train) -> list[str]:
    """Return the flags by which a configuration names Python code."""
    model, optimizer = config.model, config.optimizer
    named = {"model.own": model.own, "model.loss": model.loss, "optimizer.own": optimizer.own}
    return [f"--{flag} {name}" for flag, name in named.items() if name is not None]


def function(name: str, flag: str) -> Callable:
    """Return the function named as file.py:function, or as package.module:function."""
    place, _, attribute = name.rpartition(":")
    file = place.endswith(".py")
    if not place or not attribute or (place.startswith(".") and not file):
        raise ValueError(f"{flag} {name}: file.py:function or package.module:function is expected.")
    try:
        module = _module(Path(place)) if file else importlib.import_module(place)
    except Exception as wrong:  # whatever the file does
        raise ValueError(f"{flag} {name}: {_raised(wrong, Path(place))}.") from wrong
    found = getattr(module, attribute, None)
    if not callable(found):
        there = [n for n, x in vars(module).items() if callable(x) and not n.startswith("_")]
        raise ValueError(f"{flag} {name}: {place} has no function {attribute}. There: {there}.")
    return found


def _raised(wrong: Exception, path: Path) -> str:
    """Return what a Python file raised, and in which line of it."""
    frames = traceback.extract_tb(wrong.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == path.absolute()]
    if isinstance(wrong, ImportError | SyntaxError) or not lines:
        return str(wrong)
    return f"{wrong} ({type(wrong).__name__} in line {lines[-1]})"


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
