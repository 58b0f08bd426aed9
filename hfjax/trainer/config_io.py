"""Read and write configurations; load functions named as file.py:function."""

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

from hfjax.trainer.config import TrainConfig
from hfjax.trainer.old_config import OldSettings, old_modules, translate
from hfjax.trainer.yaml_fields import Lined, parse_yaml
from hfjax.utils.atomic import replace_text
from hfjax.utils.hub import is_model_name, parse_dataset
from hfjax.utils.read_files import MISSING, brief, is_number, path_kind, read_text
from hfjax.utils.renamed import OldNamesWarning
from hfjax.utils.tables import quote

# The flags that the optimizer state depends on.
STATE_FLAGS = (
    *(f"optimizer.{name}" for name in ("name", "factory", "ema", "frozen", "lr_factors")),
    *("param_dtype", "master_weights"),
    *(f"lora.{name}" for name in ("rank", "alpha", "use_rslora", "targets", "modules_to_save")),
)


# Fields of one machine, or of one start of a run: not saved with it.
MACHINE_FIELDS = ("devices", "cpu_devices", "compilation_cache", "profile", "max_runtime")


def load(path: str | Path) -> TrainConfig:
    """Return the configuration in a YAML file, or `config` of a Python file.

    Args:
        path: The file; a .py file is executed.

    Raises:
        ValueError: The file is missing, or it has an unknown field or an invalid value, in the
            line that the message names.

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
    check_file(path, "--config")
    if path.suffix == ".py":
        return _load_python(path)
    return parse_dataclass(TrainConfig, read_settings(path, "--config"), quote(path))


def check_file(path: Path, flag: str) -> None:
    """Refuse a path that is no file."""
    if (kind := path_kind(path)) != "a file":
        problem = "there is no such file" if kind == MISSING else f"it is {kind}, no file"
        raise ValueError(f"{flag} {quote(path)}: {problem}.")


def read_settings(path: Path, flag: str) -> Mapping[str, Any]:
    """Return the settings in a YAML file, by the fields of today.

    Args:
        path: The file.
        flag: The flag that names it.
    """
    check_file(path, flag)
    try:
        text = read_text(path)
    except UnicodeDecodeError as wrong:
        raise ValueError(f"{flag} {quote(path)} is no YAML: {wrong}") from None
    settings = parse_yaml(text, f"{flag} {quote(path)}")
    if not isinstance(settings, Mapping):
        if settings is None:
            return {}
        raise ValueError(
            f"{quote(path)}: fields with values are expected, found {brief(settings)}."
        )
    return _translate(settings, path, flag)


def _translate(settings: Mapping[str, Any], path: Path, flag: str) -> Mapping[str, Any]:
    """Return settings by the fields of today, with a warning if they have those of before."""
    try:
        settings, renamed = translate(settings)
    except ValueError as wrong:
        raise ValueError(f"{flag} {quote(path)}: {wrong}") from None
    if renamed:
        names = ", ".join(f"{old} is {new}" for old, new in renamed.items())
        warnings.warn(
            f"{quote(path)} has the fields of an earlier hfjax, which are read. Today: {names}.",
            OldNamesWarning,
            stacklevel=4,
        )
    return settings


def _load_python(path: Path) -> TrainConfig:
    try:
        with old_modules():
            config = getattr(_load_module(path), "config", None)
    except Exception as wrong:  # whatever the file does
        raise ValueError(f"--config {quote(path)}: {_error_message(wrong, path)}") from wrong
    if isinstance(config, OldSettings):
        settings = _translate(config, path, "--config")
        return parse_dataclass(TrainConfig, settings, quote(path))
    if not isinstance(config, TrainConfig):
        raise ValueError(
            f"--config {quote(path)}: it must define `config`, a hfjax.trainer.TrainConfig; "
            f"found {config!r}."
        )
    return config


@dataclass(frozen=True)
class _Location:
    """A location in a configuration: file, line and fields."""

    file: str
    line: int | None = None
    fields: str = ""

    def for_key(self, mapping: Mapping, name: str) -> "_Location":
        """Return the location of a key of a mapping."""
        line = mapping.lines.get(name) if isinstance(mapping, Lined) else None
        return replace(self, line=line or self.line)

    def for_field(self, mapping: Mapping, name: str) -> "_Location":
        """Return the location of a field of a mapping."""
        return replace(self.for_key(mapping, name), fields=f"{self.fields}: {name}")

    def __str__(self) -> str:
        line = "" if self.line is None else f":{self.line}"
        return f"{self.file}{line}{self.fields}"


def parse_dataclass(kind: type, mapping: Any, file: str) -> Any:
    """Return a dataclass from a mapping; refuse unknown fields by name."""
    return _parse_dataclass(kind, mapping, _Location(file))


def _parse_dataclass(kind: type, mapping: Any, loc: _Location) -> Any:
    if not isinstance(mapping, Mapping):
        raise ValueError(f"{loc}: fields with values are expected, found {brief(mapping)}.")
    kinds = get_type_hints(kind)
    hints = {field.name: kinds[field.name] for field in fields(kind)}
    for name in mapping:
        if name not in hints:
            near = difflib.get_close_matches(str(name), hints, n=3)
            raise ValueError(
                f"{loc.for_key(mapping, name)}: no field {brief(name)}. Nearest: {near or 'none'}. "
                f"Fields: {', '.join(hints)}."
            )
    field_values = {
        n: _parse_value(hints[n], x, loc.for_field(mapping, n)) for n, x in mapping.items()
    }
    try:
        return kind(**field_values)
    except ValueError as wrong:
        raise ValueError(f"{loc}: {wrong}") from None


def _parse_value(hint: Any, raw: Any, loc: _Location) -> Any:
    """Return a value of the type that a field has."""
    if is_dataclass(hint) and isinstance(hint, type):
        return _parse_dataclass(hint, raw, loc)
    if get_origin(hint) in (Union, types.UnionType):
        options = [h for h in get_args(hint) if h is not type(None)]
        return None if raw is None else _parse_value(options[0], raw, loc)
    if get_origin(hint) is Literal:
        options = {str(option): option for option in get_args(hint)}
        fits, value = str(raw) in options, options.get(str(raw), raw)
    elif get_origin(hint) is tuple:
        raw = [raw] if isinstance(raw, str | int | float) else raw  # one value is a list of one
        fits = isinstance(raw, list | tuple)
        value = tuple(_parse_value(get_args(hint)[0], x, loc) for x in raw) if fits else raw
    else:
        fits, value = _parse_plain(hint, raw)
    if not fits:
        raise ValueError(f"{loc}={brief(raw)}: {_allowed_values(hint)} is expected.")
    return value


def _allowed_values(hint: Any) -> str:
    """Return the allowed values of a field, in words."""
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    descriptions = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    descriptions[Path] = "a path"
    return descriptions.get(hint, "a list")


def _parse_plain(hint: Any, raw: Any) -> tuple[bool, Any]:
    """Return whether a value is of a plain type, and the value as that type."""
    if hint in (int, float):
        number = _parse_number(raw)
        if not is_number(number) or (hint is int and number != number // 1):  # also inf and nan
            return False, raw
        return True, hint(number)
    if hint in (str, Path) and isinstance(raw, str):
        return _can_be_file_name(raw), hint(raw)
    return isinstance(raw, hint), raw


def _parse_number(raw: Any) -> int | float | None:
    """Return a number, or the number that a text spells; None if it is neither."""
    if isinstance(raw, int | float) and not isinstance(raw, bool):
        return raw
    for kind in (int, float) if isinstance(raw, str) else ():
        try:
            return kind(raw)
        except ValueError:
            continue
    return None


def _can_be_file_name(text: str) -> bool:
    """Return whether a text is not empty, and may be the name of a file."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return text != "" and "\0" not in text


def to_plain(config: TrainConfig) -> dict[str, Any]:
    """Return a configuration as plain values for YAML and JSON."""

    def convert(node: Any) -> Any:
        if isinstance(node, Mapping):
            return {key: convert(y) for key, y in node.items()}
        if isinstance(node, list | tuple):
            return [convert(y) for y in node]
        return str(node) if isinstance(node, Path) else node

    return convert(asdict(config))


def save(config: TrainConfig, path: Path) -> None:
    """Write a configuration that `load` reads, from any folder."""
    replace_text(path, yaml.safe_dump(to_plain(with_absolute_paths(config)), sort_keys=False))


def without_machine_fields(config: TrainConfig) -> TrainConfig:
    """Return the configuration without the fields of this machine, or of this start."""
    checkpoint = replace(config.checkpoint, resume=TrainConfig().checkpoint.resume)
    defaults = {name: getattr(TrainConfig(), name) for name in MACHINE_FIELDS}
    return replace(config, checkpoint=checkpoint, **defaults)


def state_differences(config: TrainConfig, other: Any) -> list[tuple[str, str]]:
    """Return the flags of the stored state that differ from another run's, as (ours, theirs)."""
    mine, theirs = _flatten(to_plain(config)), _recorded_flags(other)
    flags = [flag for flag in mine if flag.startswith("model.") or flag in STATE_FLAGS]
    if mine["model.pretrained"] or theirs.get("model.pretrained"):  # in place of a preset
        flags.remove("model.preset")
    return _differences(config, theirs, flags)


def setting_changes(config: TrainConfig, other: Any) -> list[str]:
    """Return the training flags that differ from another run's, each with its old value."""
    flags = [flag for flag in _flatten(to_plain(config)) if not flag.startswith(_NOT_TRAINING)]
    differ = _differences(config, _recorded_flags(other), flags)
    return [f"{current} (before: {previous.removeprefix('with ')})" for current, previous in differ]


def changed_start(config: TrainConfig, other: Any) -> str | None:
    """Return --checkpoint.init-from if it differs from another configuration's."""
    differs = _differences(config, _recorded_flags(other), ["checkpoint.init_from"])
    return config.checkpoint.init_from if differs else None


def _recorded_flags(other: Any) -> dict[str, Any]:
    """Return the flags that a run recorded, by their names of today."""
    if not isinstance(other, dict):
        return {}
    settings, renamed = translate(other)
    flags = _flatten(settings)
    if not renamed:
        return flags
    usual = _flatten(to_plain(TrainConfig()))  # an old one says of axes only what is on
    of_layout = ("mesh.", "offload.", "zero", "sequence_parallel", "strategy")
    return {name: value for name, value in usual.items() if name.startswith(of_layout)} | flags


def _differences(config: TrainConfig, theirs: dict, flags: Sequence[str]) -> list[tuple[str, str]]:
    """Return the flags that differ; a relative path equals its absolute form."""
    mine, absolute = _flatten(to_plain(config)), _flatten(to_plain(with_absolute_paths(config)))
    return [
        (_format_flag(flag, mine[flag], ""), _format_flag(flag, theirs[flag], "with "))
        for flag in flags
        if flag in theirs and theirs[flag] not in (mine[flag], absolute[flag])
    ]


# Flags of a run that do not affect its training.
_NOT_TRAINING = (
    *(*MACHINE_FIELDS, "run_dir", "watchdog_timeout", "init_timeout"),
    *("log.", "eval.", "checkpoint."),
)


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested fields as {"model.seq_len": 128}; {} for anything but a dict."""
    flat: dict[str, Any] = {}
    for name, value in tree.items() if isinstance(tree, dict) else ():
        nested = isinstance(value, dict)
        flat |= _flatten(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat


def _format_flag(name: str, value: Any, prefix: str) -> str:
    name = name.replace("_", "-")
    if value in (None, [], False):
        return f"without --{name}"
    values = " ".join(map(str, value)) if isinstance(value, list) else value
    return f"{prefix}--{name}" + ("" if value is True else f" {values}")


def with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """Return the configuration with absolute paths in place of relative ones.

    Names of the Hub stay.
    """
    absolute = lambda path: None if path is None else os.path.abspath(path)
    data_set = lambda path: path if path and parse_dataset(path) else absolute(path)
    code = lambda name: absolute(name) if name is not None and ".py:" in name else name
    template = config.data.template
    data = replace(
        config.data,
        train=tuple(map(data_set, config.data.train)),
        valid=data_set(config.data.valid),
        factory=code(config.data.factory),
        template=None if template is None else Path(os.path.abspath(template)),
    )
    model_source = config.model.pretrained
    is_name = model_source is not None and is_model_name(model_source)
    model = replace(
        config.model,
        factory=code(config.model.factory),
        loss=code(config.model.loss),
        pretrained=model_source if is_name else absolute(model_source),
    )
    optimizer = replace(config.optimizer, factory=code(config.optimizer.factory))
    log = replace(config.log, tracker=code(config.log.tracker))
    checkpoint = replace(config.checkpoint, init_from=absolute(config.checkpoint.init_from))
    file = None if config.deepspeed is None else Path(os.path.abspath(config.deepspeed))
    others = {"deepspeed": file, "checkpoint": checkpoint, "strategy": code(config.strategy)}
    others["log"] = log
    return replace(config, data=data, model=model, optimizer=optimizer, **others)


def code_flags(config: TrainConfig) -> list[str]:
    """Return the flags by which a configuration names Python code."""
    model, optimizer = config.model, config.optimizer
    names = {
        **{"model.factory": model.factory, "model.loss": model.loss},
        "data.factory": config.data.factory,
        **{"optimizer.factory": optimizer.factory, "strategy": config.strategy},
    }
    return [f"--{flag} {name}" for flag, name in names.items() if name is not None]


def load_function(name: str, flag: str) -> Callable:
    """Return the function named as file.py:function, or as package.module:function."""
    return load_object(name, flag, "function", callable)


def load_object(name: str, flag: str, kind: str, accepts: Callable[[Any], bool]) -> Any:
    """Return an object of a module, named as file.py:name or package.module:name.

    Args:
        name: The name.
        flag: The flag that names it.
        kind: What is expected, in a word.
        accepts: Whether an object is of that kind.
    """
    source, _, attribute = name.rpartition(":")
    file, given = source.endswith(".py"), f"{flag} {quote(name)}"
    if not source or not attribute or (source.startswith(".") and not file):
        raise ValueError(f"{given}: file.py:{kind} or package.module:{kind} is expected.")
    try:
        module = _load_module(Path(source)) if file else importlib.import_module(source)
    except Exception as wrong:  # whatever the file does
        raise ValueError(f"{given}: {_error_message(wrong, Path(source))}.") from wrong
    target = getattr(module, attribute, None)
    if not accepts(target):
        names = [n for n, x in vars(module).items() if accepts(x) and not n.startswith("_")]
        missing = f"{quote(source)} has no {kind} {quote(attribute)}"
        raise ValueError(f"{given}: {missing}. There: {names}.")
    return target


def _error_message(wrong: Exception, path: Path) -> str:
    """Return the error that a Python file raised, with its line."""
    frames = traceback.extract_tb(wrong.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == path.absolute()]
    if isinstance(wrong, ImportError | SyntaxError) or not lines:
        return str(wrong)
    return f"{wrong} ({type(wrong).__name__} in line {lines[-1]})"


def _load_module(path: Path) -> types.ModuleType:
    """Return a Python file as a module; it may import from its own folder."""
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


def changed_fields(config: Any) -> dict[str, Any]:
    """Return the settings that differ from the defaults, {"model.seq_len": 128}."""

    def walk(x: Any, default: Any, prefix: str) -> dict[str, Any]:
        diffs: dict[str, Any] = {}
        for f in fields(x):
            a, b = getattr(x, f.name), getattr(default, f.name)
            if is_dataclass(a):
                diffs |= walk(a, b, f"{prefix}{f.name}.")
            elif a != b:
                diffs[prefix + f.name] = a
        return diffs

    return walk(config, type(config)(), "")
