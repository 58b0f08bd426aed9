"""The pages of the site, put together from the repository: what Sphinx reads, in one folder.

The Markdown pages are taken as they are; only their links are written anew. A link to a file that
is no page leads to a copy of it.
"""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from docs.site import reference

ROOT = Path(__file__).parents[2]
RESULTS = "benchmarks/results"
RENAMED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
SECTIONS = {  # of the site: each page stands in one of them
    "Start": ["install", "quickstart", "assumed", "tutorial", "first_gpu_run"],
    "How to": [
        *("choose", "memory", "plan", "several_nodes", "processes", "checkpoints", "data"),
        *("training", "custom_loops", "evaluate", "profile_and_tune", "any_model", "optimizers"),
        "precision",
        *("pretrained", "adapters", "vision", "kernels", "ahead_of_time"),
    ],
    "Coming from": ["plain_jax", "migration"],
    "Concepts": [
        *("strategies", "pipelines", "long_sequences", "experts", "tensor_grids", "own_programs"),
        *("appendix_pipelines", "appendix_long_sequences", "appendix_experts"),
        "appendix_tensor_grids",
    ],
    "Reference": [
        *(f"reference/{name}" for name in reference.PAGES),
        *("troubleshooting", "combinations", "glossary"),
    ],
    "Performance": ["costs", "modelled", "results/index"],
    "Project": ["status", "changelog", "appendix_history", "design", "contributing"],
}
FENCE = re.compile(r"^```.*?^```[^\n]*$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def stage(folder: Path) -> None:
    """Make the folder that Sphinx reads."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = [ROOT / name for name in RENAMED]
    pages += [*(ROOT / "docs").glob("*.md"), *(ROOT / RESULTS).glob("*.md")]
    for page in pages:
        text = "".join(_with_links(page, page.read_text(encoding="utf-8"), folder))
        if page.name == "README.md":
            text += "\n" + _contents()
        _write(folder / staged(page), text)
    for name in ("pictures", "cluster"):
        shutil.copytree(ROOT / "docs" / name, folder / name, dirs_exist_ok=True)
    results = sorted(path.stem for path in (ROOT / RESULTS).glob("*.md"))
    _write(folder / "results/index.md", _results(results))
    for name, text in reference.pages():
        _write(folder / f"reference/{name}.md", text)


def staged(path: Path) -> Path:
    """Return where a file of the repository is in the folder that Sphinx reads."""
    name = path.relative_to(ROOT).as_posix()
    if name in RENAMED:
        return Path(RENAMED[name])
    if name.startswith(RESULTS):
        return Path("results") / path.name
    is_page = name.startswith("docs/") and not name.endswith(".py")
    return Path(name.removeprefix("docs/") if is_page else f"source/{name}")


def _with_links(page: Path, text: str, folder: Path) -> Iterator[str]:
    """Yield a page in pieces, with the links outside of its blocks written anew."""
    end = 0
    for block in FENCE.finditer(text):
        yield _linked(page, text[end : block.start()], folder)
        yield block[0]
        end = block.end()
    yield _linked(page, text[end:], folder)


def _linked(page: Path, text: str, folder: Path) -> str:
    def anew(link: re.Match[str]) -> str:
        path, hash, anchor = link[2].partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return link[0]
        target = (page.parent / path).resolve()
        if target.is_dir():
            target /= "index.md" if target == ROOT / RESULTS else "__init__.py"
        place = staged(target)
        if place.parts[0] == "source" and target.exists():
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(target, folder / place)
        here = (folder / staged(page)).parent
        return f"{link[1]}{os.path.relpath(folder / place, here)}{hash}{anchor}{link[3]}"

    return LINK.sub(anew, text)


def _contents() -> str:
    """Return the tables of contents of all sections."""
    return "\n".join(
        "\n".join(["```{toctree}", ":hidden:", f":caption: {section}", "", *pages, "```", ""])
        for section, pages in SECTIONS.items()
    )


def _results(names: list[str]) -> str:
    return "\n".join(
        [
            "# Results",
            "",
            "What each benchmark wrote, with its command, its date and its machine.",
            "",
            "```{toctree}",
            *names,
            "```",
            "",
        ]
    )


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
