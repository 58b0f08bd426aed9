"""Pictures of README and docs: each is there, is shown, is said in words, and keeps its spaces."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PICTURES = sorted(
    path for path in (ROOT / "docs/pictures").iterdir() if path.suffix in {".svg", ".png"}
)
SHOWN = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)[^)]*\)")  # ![words](path "title")
SVG, XML = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/XML/1998/namespace}"
name = lambda path: path.name


def shown() -> Iterator[tuple[Path, str, Path]]:
    """Yield page, words and file of every picture that a page shows."""
    for page in PAGES:
        for found in SHOWN.finditer(page.read_text(encoding="utf-8")):
            if not urlsplit(found[2]).scheme:
                yield page, " ".join(found[1].split()), (page.parent / found[2]).resolve()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_a_page_shows_is_there_and_is_said_in_words(page):
    for where, words, path in shown():
        if where == page:
            assert path.is_file(), f"{page.name} shows {path}, which is not there"
            assert len(words.split()) >= 3, f"{page.name}: ![{words}]: say what {path.name} shows"


@pytest.mark.parametrize("picture", PICTURES, ids=name)
def test_a_picture_is_shown_by_a_page(picture):
    assert picture in {path for _, _, path in shown()}


@pytest.mark.parametrize("picture", [p for p in PICTURES if p.suffix == ".svg"], ids=name)
def test_no_text_of_an_svg_needs_spaces_that_a_browser_drops(picture):
    faults = [*dropped_spaces(ElementTree.parse(picture).getroot())]
    assert not faults, f"put each word at its own x, or set xml:space: {faults}"


def dropped_spaces(root: ElementTree.Element, kept: bool = False) -> Iterator[str]:
    """Yield the texts below an element that begin or end with a space, or have several in a row."""
    kept = root.get(f"{XML}space", "preserve" if kept else "") == "preserve"
    if root.tag in {f"{SVG}text", f"{SVG}tspan"} and not kept:
        said = root.text or ""
        if said.strip() and (said != said.strip() or re.search(r"\s\s", said)):
            yield said
    for child in root:
        yield from dropped_spaces(child, kept)


def test_dropped_spaces_are_found():
    svg = '<svg xmlns="http://www.w3.org/2000/svg">{}</svg>'
    faults = lambda inner: [*dropped_spaces(ElementTree.fromstring(svg.format(inner)))]
    assert faults("<text>a  b</text><text> c</text><text><tspan>d  e</tspan></text>") == [
        "a  b",
        " c",
        "d  e",
    ]
    assert faults('<text xml:space="preserve"> a  b</text><text>a b</text><text>\n</text>') == []


def test_the_picture_of_a_strategy_has_the_table_as_it_is_printed():
    path = ROOT / "docs/pictures/mesh.py"
    spec = importlib.util.spec_from_file_location("picture_of_a_mesh", path)
    assert spec is not None
    assert spec.loader is not None
    drawing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    found = (ROOT / "docs/pictures/mesh.svg").read_text(encoding="utf-8")
    assert found == drawing.svg(), "draw it again: python docs/pictures/mesh.py"
