"""The site: every page and every public name is in it once, and numbers are those of results."""

import re
from pathlib import Path

import pytest

import hfjax
from docs.site import reference
from docs.site.build import built
from docs.site.stage import SECTIONS
from tests.test_docstrings import MORE, public_names

ROOT = Path(__file__).parents[1]
SAME = {"hfjax.trainer:generate": "hfjax:generate"}  # one function, by two names


def listed():
    return [
        name for _, groups in reference.API.values() for names in groups.values() for name in names
    ]


def test_every_public_name_is_on_one_page():
    names = [*public_names()]
    wanted = {SAME.get(name, name) for name in [*names, *MORE]}
    assert sorted(wanted - set(listed())) == []
    assert len(listed()) == len(set(listed()))


def test_every_public_name_has_a_docstring():
    silent = [name for name in listed() if not isinstance(reference.the(name), hfjax.Strategy)]
    assert [name for name in silent if not reference.the(name).__doc__] == []


def test_every_page_stands_in_one_section():
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    pages |= {f"reference/{name}" for name in reference.PAGES}
    pages |= {"changelog", "contributing", "results/index"}
    stand = [page for names in SECTIONS.values() for page in names]
    assert sorted(stand) == sorted(pages)


def test_numbers_that_were_measured_are_those_of_the_results():
    """Each row of README's table names the file that has its numbers."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text[text.index("## Measured") :].split("\n## ")[0]
    rows = [line for line in table.splitlines() if "benchmarks/results" in line]
    assert len(rows) >= 3
    for row in rows:
        [file] = set(re.findall(r"\((benchmarks/results/[\w.]+)\)", row))
        results = (ROOT / file).read_text(encoding="utf-8")
        cells = row.split("|")
        date = re.search(r"\d{4}-\d\d-\d\d", cells[5])
        numbers = re.findall(r"\d[\d,.]*\d{2}", " ".join(cells[3:5]))
        assert date
        assert numbers
        assert [n for n in [*numbers, date[0]] if n not in results] == [], row


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# A\n\nSee [b](nowhere.md).\n", r"index\.md:3.*nowhere\.md"),
        ("# A\n\nSee [b](#not-a-heading).\n", r"index\.md:3.*not-a-heading"),
        ("# A\n\n![b](no.svg)\n", r"index\.md:3.*no\.svg"),
        ("# A\n\n```{eval-rst}\n.. autofunction:: hfjax.no_such\n```\n", r"no_such"),
    ],
)
def test_a_page_with_a_fault_fails_the_site_and_is_named(text, said, tmp_path, capfd):
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages/index.md").write_text(text, encoding="utf-8")
    assert built(tmp_path / "pages", tmp_path / "out") == 1
    assert re.search(said, capfd.readouterr().err)
