"""Recipes: configurations of known models on given GPUs, the YAML files of hfjax/configs."""

from importlib.resources import files
from pathlib import Path

from hfjax.trainer import config_io
from hfjax.trainer.config import TrainConfig
from hfjax.utils.keywords import name_hint
from hfjax.utils.read_files import MISSING, path_kind
from hfjax.utils.tables import quote


def recipe_files() -> dict[str, Path]:
    """Return the recipes: name -> file.

    >>> "llama3-8b" in recipe_files()
    True
    """
    folder = Path(str(files("hfjax.configs")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def recipe_title(path: Path) -> str:
    """Return what a recipe is for: its first line."""
    return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def recipe_path(name: str) -> Path:
    """Return the file of a recipe."""
    known = recipe_files()
    if name not in known:
        raise ValueError(
            f"--recipe {quote(name)}: one of {', '.join(known)}.{name_hint(name, known)} A file of "
            "your own is --config FILE."
        )
    return known[name]


def check_recipe_data(name: str, config: TrainConfig, more: str = "--data.train DIR") -> None:
    """Refuse a recipe whose data has not been made; other data is checked when it is read.

    Args:
        name: The recipe.
        config: The recipe with the settings that flags have replaced.
        more: The flags with which the command does without that data.
    """
    own = config_io.load(recipe_path(name)).data.train
    missing = [path for path in own if path_kind(Path(path)) == MISSING]
    if missing and config.data.train == own:
        raise ValueError(
            f"--recipe {name} reads tokens from {quote(missing[0])}, which is not there. Make them "
            f"(hfjax recipes {name} shows how), or give {more}."
        )
