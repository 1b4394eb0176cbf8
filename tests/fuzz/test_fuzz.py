"""A short version of the fuzzing in ``make thorough``: 10,000 frames at all listeners."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("resource")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_no_frame_harms_a_listener_or_other_clients() -> None:
    """The fuzzing runs in a child process with little memory, because it may crash."""
    command = [sys.executable, "-m", "tests.fuzz", "--frames", "10000", "--seed", "suite"]
    run = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=390)
    assert run.returncode == 0, run.stderr[-6000:]
    assert "nothing found" in run.stderr
