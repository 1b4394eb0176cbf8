"""Make Paceline appear installed, with the entry points of its pyproject.toml, in programs that a test starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]


def installed_variables(folder: Path) -> dict[str, str]:
    """Return the environment variables of a program. The metadata of the installation are in `folder`."""
    tomllib = pytest.importorskip("tomllib")
    groups = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    about = folder / "paceline-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: paceline\nVersion: 0\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in found.items()) for group, found in groups.items()]
    (about / "entry_points.txt").write_text("".join(lines))
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(_ROOT / "src")])}
