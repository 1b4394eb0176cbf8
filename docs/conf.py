"""Settings of the documentation's site: ``make docs`` builds it into ``docs/_build``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import paceline

sys.path.insert(0, str(Path(__file__).parent))
from command_line import write_command_line  # type: ignore[import-not-found]

project = "Paceline"
author = "The authors of Paceline"
version = release = paceline.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinxcontrib.mermaid",
]
exclude_patterns = ["_build"]
smartquotes = False

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]
myst_fence_as_directive = ["mermaid"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_inherit_docstrings = True
autodoc_mock_imports = ["ray"]  # a large package

html_theme = "furo"
html_title = f"Paceline {version}"
html_show_copyright = False


def setup(app: Any) -> None:
    """Generate the page of the command line before the sources are read."""
    app.connect("builder-inited", lambda app: write_command_line(Path(app.srcdir, "reference/command_line.md")))
    app.connect("autodoc-process-docstring", escape_bars)


def escape_bars(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Escape the bars of formulas such as |x|, because reStructuredText would read them as substitutions."""
    lines[:] = [line.replace("|", r"\|") for line in lines]
