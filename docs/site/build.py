"""Build the site: `make docs`. A warning is an error; nothing is fetched from the network."""

import sys
from pathlib import Path

from sphinx.cmd.build import main

from docs.site.stage import ROOT, stage


def build(out: Path) -> int:
    """Return Sphinx's exit status; out/index.html is the site's first page."""
    pages = out.parent / "docs-pages"
    stage(pages)
    here = str(Path(__file__).parent)
    status = main(
        ["-b", "html", "-W", "--keep-going", "-q", "-j", "2", "-c", here, str(pages), str(out)]
    )
    if not status:
        print(f"{out / 'index.html'} is built.")
    return status


if __name__ == "__main__":
    sys.exit(build(ROOT / "build/docs"))
