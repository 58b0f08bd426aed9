"""Settings of Sphinx; `make docs` runs it on the pages that stage.py has put together."""

import re
from pathlib import Path
from typing import Any

from hfjax.utils.version import version as _version

project, author, version = "hfjax", "the authors of hfjax", _version()
release = version
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
html_theme, html_title = "furo", f"hfjax {version}"
html_static_path = [str(Path(__file__).parent / "static")]
html_js_files = ["filter.js"]
html_css_files = ["tables.css"]
html_copy_source = False
html_show_copyright = False

myst_heading_anchors = 4  # as where repositories are hosted: page.md#its-heading
myst_enable_extensions = ["attrs_block"]
myst_links_external_new_tab = False
suppress_warnings = ["myst.header"]  # README begins with a title, and then has sections

default_role = "code"  # docstrings write `name` as Markdown does
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_rtype = False
napoleon_use_ivar = True

FIELD = re.compile(r"        (\w+): (.*)")  # what an argument takes by keyword, one step further in


def as_list(*described: Any) -> None:
    """Make the fields below an argument a list, for docstrings that have them."""
    lines: list[str] = described[-1]
    within = False
    for at, line in enumerate(lines):
        if field := FIELD.fullmatch(line):
            within = within or not lines[at - 1]
            if within:
                lines[at] = f"        * **{field[1]}**: {field[2]}"
        elif within and line.startswith(" " * 12):
            lines[at] = line[2:]
        elif line:
            within = False


def setup(app: Any) -> None:
    """Let Sphinx call what is above, before napoleon reads a docstring."""
    app.connect("autodoc-process-docstring", as_list, priority=400)
