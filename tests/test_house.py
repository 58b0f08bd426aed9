"""The house: what a folder is. The floors are import-linter's (pyproject.toml)."""

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

import hfjax

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
def test_a_folder_says_what_it_holds(folder):
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert text is not None
    assert len(text.partition("\n")[0]) > 20


@pytest.mark.parametrize("path", FILES, ids=of_house)
def test_a_file_says_what_it_is_and_can_be_read_in_one_go(path):
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text))
    assert len(text.splitlines()) <= 560


@pytest.mark.parametrize("folder", FOLDERS, ids=of_house)
def test_a_folder_names_exactly_its_files(folder):
    """In backticks: the files, and folders if it likes, but for names in capitals."""
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    named = set(re.findall(r"`([a-z_0-9]+)`", text))
    files = {p.stem for p in folder.glob("*.py")} - {"__init__", "__main__"}
    assert files <= named
    assert named <= files | {p.parent.name for p in folder.glob("*/__init__.py")}


def test_the_partitioner_is_a_library_of_its_own():
    """It imports utilities and the reading of jaxprs: nothing of a mesh, a model or a step."""
    mine = ("hfjax.parallel.spmd", "hfjax.parallel.jaxprs", "hfjax.utils")
    for path in sorted((ROOT / "parallel/spmd").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            where = f"{of_house(path)}:{getattr(node, 'lineno', 0)}"
            assert not name.startswith("hfjax") or name.startswith(mine), where


def test_a_member_of_a_layout_is_shown_or_read_by_two_files_that_do_not_make_it():
    pages = "".join(path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")])
    doctests = re.findall(r">>> (.*)", (ROOT / "hfjax/sharding/layout.py").read_text())
    others = [p.read_text() for p in FILES if not of_house(p).startswith("hfjax/sharding")]
    for name in {*hfjax.Layout.__dataclass_fields__, *vars(hfjax.Layout)}:
        if not name.startswith("_"):
            of = re.compile(rf"\.{name}\b")
            shown = f"layout.{name}" in pages or any(map(of.search, doctests))
            assert shown or len(list(filter(of.search, others))) >= 2, name


def test_the_design_names_every_folder():
    page = (ROOT / "docs/design.md").read_text()
    for folder in FOLDERS:
        if folder.parent.name != "cli":  # one for each large command
            assert of_house(folder) in page or f"`{folder.name}`" in page, folder


MOST = {"arguments": 15, "results": 6}  # of functions, without a type or of Any, in 1,000 lines


@pytest.mark.slow
def test_no_more_arguments_without_a_type():
    bare = lambda hint: hint is None or ast.unparse(hint) == "Any"
    found, lines = dict.fromkeys(MOST, 0), 0
    for text in (path.read_text() for path in FILES):
        lines += len(text.splitlines())
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                a = node.args
                given = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
                hints = [x.annotation for x in given if x.arg not in ("self", "cls")]
                found["arguments"] += sum(map(bare, hints))
                found["results"] += bare(node.returns)
    assert all(found[what] * 1000 <= most * lines for what, most in MOST.items()), (found, lines)


def classes() -> set[type]:
    """Return every class of the package."""
    names = [m.name for m in pkgutil.walk_packages(hfjax.__path__, "hfjax.")]
    modules = [importlib.import_module(name) for name in names if not name.endswith("__main__")]
    held = [x for module in modules for x in vars(module).values() if isinstance(x, type)]
    return {x for x in held if x.__module__.startswith("hfjax.")}


def overridden(kind: type) -> Iterator[str]:
    """Yield the concrete methods of classes in other files that a class has in its own way."""
    runs = lambda x: callable(x) or isinstance(x, property | cached_property | classmethod)
    for base in kind.__mro__[1:]:
        if base.__module__.startswith("hfjax.") and base.__module__ != kind.__module__:
            for name in vars(kind).keys() & vars(base).keys():
                old: Any = vars(base)[name]
                special = name.startswith("__") or getattr(old, "__isabstractmethod__", False)
                if runs(old) and not special:
                    yield f"{kind.__name__}.{name} of {base.__module__}.{base.__name__}"


def test_a_class_is_abstract_or_final_no_concrete_method_is_overridden_in_another_file():
    assert [found for kind in classes() for found in overridden(kind)] == []


def test_the_walk_names_what_is_there():
    page = (ROOT / "docs/design.md").read_text()
    walk = page.split("## A walk")[1].split("\n## ")[0]
    assert len(re.findall(r"(?m)^\d+\. ", walk)) <= 15
    for name, path in re.findall(r"\[`(\w+)`\]\(\.\./([\w/.]+)\)", walk):
        assert re.search(rf"(?m)^ *(def|class) {name}\b", (ROOT / path).read_text()), (name, path)
