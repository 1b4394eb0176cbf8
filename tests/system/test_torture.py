"""A small part of ``make torture``: two runs with fixed seeds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.thorough
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("seed", "mode", "faults"), [(1, "eventual", 3), (2, "lockstep", 4)])
def test_nothing_is_lost_by_faults(seed: int, mode: str, faults: int, tmp_path: Path) -> None:
    words = [
        "--runs",
        "1",
        "--seed",
        f"{seed}",
        "--mode",
        mode,
        "--replicas",
        "1",
        "--faults",
        f"{faults}",
        "--duration",
        "2",
    ]
    found = subprocess.run(
        [sys.executable, "-m", "system.torture", *words, "--logs", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), *sys.path]))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"{faults} faults" in found.stdout
