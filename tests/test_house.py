"""The house: what a folder is. The floors are import-linter's (pyproject.toml)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = [
    path.parent
    for top in ("hfjax", "models", "parallel", "pallas_kernels")
    for path in sorted((ROOT / top).rglob("__init__.py"))
    if not any(part.is_symlink() for part in path.parents if part.is_relative_to(ROOT / "hfjax"))
]
FILES = [path for folder in FOLDERS for path in sorted(folder.glob("*.py"))]
of_house = lambda path: str(path.relative_to(ROOT))


@pytest.mark.parametrize("folder", FOLDERS, ids=of_house)
def test_a_folder_says_what_it_holds_and_holds_no_more_than_sixteen_files(folder):
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert text is not None
    assert len(text.partition("\n")[0]) > 20
    assert len([p for p in folder.glob("*.py") if p.name != "__init__.py"]) <= 16


@pytest.mark.parametrize("path", FILES, ids=of_house)
def test_a_file_says_what_it_is_and_can_be_read_in_one_go(path):
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text))
    assert len(text.splitlines()) <= 560


def test_the_design_names_every_folder():
    page = (ROOT / "docs/design.md").read_text()
    for folder in FOLDERS:
        if folder.parent.name != "cli":  # one for each large command
            assert of_house(folder) in page or f"`{folder.name}`" in page, folder
