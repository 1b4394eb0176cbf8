"""The pages of the documentation that are part of the repository."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    # pages that `make docs` generates
    *sorted({*(ROOT / "docs").rglob("*.md")} - {ROOT / "docs/reference/command_line.md"}),
]
