"""`--deepspeed FILE`: merge the file into a run's configuration; refuse contradictions."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, TypeVar

from hfjax.compat.deepspeed.convert import DeepSpeedSetup, from_deepspeed
from hfjax.compat.deepspeed.optimizer import NoFlagText
from hfjax.trainer.config import TrainConfig
from hfjax.utils.read_files import MISSING, ORDINARY, path_kind
from hfjax.utils.tables import quote

ConfigT = TypeVar("ConfigT", bound=TrainConfig)
FILE = "deepspeed.json"  # the copy that a run keeps
STAGES = {"DDP": 0, "ZERO1": 1, "ZERO2": 2, "FSDP": 3, "HSDP": 3}


def with_deepspeed_file(
    config: ConfigT, argv: Sequence[str], world: int
) -> tuple[ConfigT, DeepSpeedSetup | None]:
    """Return a configuration merged with its DeepSpeed file, and the setup of that file.

    Args:
        config: The configuration of flags and --config.
        argv: The command line. A flag in it that contradicts the file is an error, and so is a
            setting of --config, unless it is a default.
        world: The number of devices.
    """
    if config.deepspeed is None:
        return config, None
    if (kind := path_kind(config.deepspeed)) != ORDINARY:
        problem = "there is no such file" if kind == MISSING else f"it is {kind}, no file"
        raise ValueError(f"--deepspeed {quote(config.deepspeed)}: {problem}.")
    setup = from_deepspeed(config.deepspeed, world)
    typed = {arg.partition("=")[0].removeprefix("--").replace("-", "_") for arg in argv}
    defaults = TrainConfig()
    for flag, value in setup.flags.items():
        current = _get(config, flag)
        is_given = bool({flag, _negated(flag)} & typed) or current != _get(defaults, flag)
        if is_given and not _is_same(setup, flag, current, value):
            other = _show(flag, value) if isinstance(value, bool) else value
            raise ValueError(
                f"{_show(flag, current)}: --deepspeed {quote(config.deepspeed)} says something "
                f"else for {world} devices, {other}. Leave the flag out (or that line of "
                "--config), or change the file."
            )
    return _merge(config, setup), setup


def _merge(config: ConfigT, setup: DeepSpeedSetup) -> ConfigT:
    """Return a configuration with the settings of a file, for any number of devices."""
    flags = {flag: x for flag, x in setup.flags.items() if not isinstance(x, NoFlagText)}
    main, rest = setup.strategy.parts[0].name, _remaining_axis(setup)
    del flags[rest]
    if main in ("FSDP", "HSDP"):
        del flags["zero"]  # the size of fsdp says it
        if _get(config, rest) == _get(TrainConfig(), rest):
            flags[rest] = -1
    changes: dict[str, dict[str, Any]] = {}
    for flag, value in flags.items():
        outer, _, name = flag.rpartition(".")
        changes.setdefault(outer, {})[name] = value
    plain = changes.pop("", {})
    nested = {name: replace(getattr(config, name), **of) for name, of in changes.items()}
    return replace(config, **plain, **nested)


def _remaining_axis(setup: DeepSpeedSetup) -> str:
    """Return the flag of the mesh axis that takes the remaining devices."""
    return "mesh.fsdp" if setup.strategy.parts[0].name == "FSDP" else "mesh.data"


def _get(config: Any, flag: str) -> Any:
    return reduce(getattr, flag.split("."), config)


def _is_same(setup: DeepSpeedSetup, flag: str, current: Any, value: Any) -> bool:
    """Return whether a flag agrees with the file, perhaps in other words."""
    if flag == "zero":
        return current in (value, STAGES[setup.strategy.parts[0].name])
    if flag.startswith("mesh.") and current == -1:
        return value != 1 or flag == _remaining_axis(setup)
    return current == value


def _negated(flag: str) -> str:
    outer, dot, name = flag.rpartition(".")
    return f"{outer}{dot}no_{name}"


def _show(flag: str, value: object) -> str:
    """Return a flag with its value, as on a command line.

    >>> _show("zero", 1), _show("offload.optimizer", False)
    ('--zero 1', '--offload.no-optimizer')
    """
    name = (_negated(flag) if value is False else flag).replace("_", "-")
    return f"--{name}" if isinstance(value, bool) else f"--{name} {value}"
