"""Build the site: `make docs`. A warning is an error; nothing is fetched from the network."""

import sys
from pathlib import Path

from sphinx.cmd.build import main

from docs.site.stage import ROOT, stage


def built(pages: Path, out: Path) -> int:
    """Return Sphinx's exit status for a folder of pages."""
    here = str(Path(__file__).parent)
    strict = ["-W", "--keep-going", "-q"]
    return main(["-b", "html", *strict, "-j", "2", "-c", here, str(pages), str(out)])


def build(out: Path) -> int:
    """Return the exit status of the whole site; out/index.html is its first page."""
    pages = out.parent / "docs-pages"
    stage(pages)
    if not (status := built(pages, out)):
        print(f"{out / 'index.html'} is built.")
    return status


if __name__ == "__main__":
    sys.exit(build(ROOT / "build/docs"))
