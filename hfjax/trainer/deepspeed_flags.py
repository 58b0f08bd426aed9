"""`--deepspeed FILE`: merge the file into a run's configuration; refuse contradictions."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, TypeVar

from hfjax.compat.deepspeed.convert import DeepSpeedSetup, from_deepspeed
from hfjax.compat.deepspeed.optimizer import NoFlagText
from hfjax.trainer.config import Train
from hfjax.utils.read_files import MISSING, ORDINARY, path_kind
from hfjax.utils.tables import quote

ConfigT = TypeVar("ConfigT", bound=Train)
FILE = "deepspeed.json"  # the copy that a run keeps


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
    defaults, changes = Train(), {}
    rest = f"mesh.{'fsdp' if setup.strategy.parts[0].name == 'FSDP' else 'data'}"
    for flag, value in setup.flags.items():
        current = _get(config, flag)
        if not _is_same(flag, current, value) and (
            flag in typed or current != _get(defaults, flag)
        ):
            raise ValueError(
                f"--{flag.replace('_', '-')} {current}: --deepspeed {quote(config.deepspeed)} says "
                f"something else for {world} devices, {value}. Leave the flag out (or that line of "
                "--config), or change the file."
            )
        if not isinstance(value, NoFlagText) and flag != rest:  # it takes the remaining devices
            outer, _, name = flag.rpartition(".")
            changes.setdefault(outer, {})[name] = value
    plain = changes.pop("", {})
    nested = {name: replace(getattr(config, name), **of) for name, of in changes.items()}
    return replace(config, **plain, **nested), setup


def _get(config: Any, flag: str) -> Any:
    return reduce(getattr, flag.split("."), config)


def _is_same(flag: str, current: object, value: object) -> bool:
    """Return whether a flag agrees with the file, perhaps by another name."""
    if flag == "strategy":
        names = lambda text: {*text.lower().replace("zero3", "fsdp").replace("|", "+").split("+")}
        return names(current) == names(value)
    return current == value or (flag.startswith("mesh.") and current == -1)
