"""The public names of ``paceline.launch``, and imports before the start of the fork server."""

from __future__ import annotations

import subprocess
import sys

import pytest

import paceline.launch


def test_public_names_are_sorted_and_defined() -> None:
    assert sorted(paceline.launch.__all__, key=lambda name: (name[0].islower(), name)) == paceline.launch.__all__
    for name in paceline.launch.__all__:
        assert getattr(paceline.launch, name).__name__ == name
        assert name in dir(paceline.launch)
    with pytest.raises(AttributeError, match="nothing"):
        paceline.launch.nothing  # noqa: B018


def test_the_command_line_imports_nothing_heavy_before_it_is_needed() -> None:
    """The fork server must start before this process imports NumPy and Numba, so that both import them in parallel."""
    program = (
        "import sys, paceline.cli.app, paceline.launch.fork_server\nprint(sorted({'numba', 'numpy'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout == b"[]\n"
