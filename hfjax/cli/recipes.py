"""List recipes, configurations of known models on given GPUs, or show one: `hfjax recipes`."""

import argparse
from collections.abc import Sequence

from hfjax.trainer.recipes import recipe_files, recipe_path, recipe_title
from hfjax.utils.command_errors import run_command
from hfjax.utils.tables import align

ABOUT = "List recipes, configurations of known models on given GPUs, or show one."


def command(argv: Sequence[str]) -> int:
    """Run `hfjax recipes` with these arguments; return the exit status."""
    parser = argparse.ArgumentParser("hfjax recipes", description=ABOUT)
    parser.add_argument("name", nargs="?", help="recipe to show (default: list all)")
    name = parser.parse_args(argv).name
    return run_command("recipes", lambda: _show(name))


def _show(name: str | None) -> None:
    if name is not None:
        print(recipe_path(name).read_text(encoding="utf-8"), end="")
        return
    rows = [(name, recipe_title(path)) for name, path in recipe_files().items()]
    print("\n".join(align(rows)))
    print("\nhfjax recipes NAME shows one, hfjax train --recipe NAME trains with it.")
