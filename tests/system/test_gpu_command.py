"""`benchmarks/gpu.py`: its small version on the CPU, and its message without a CUDA device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.warm.processes import WarmProcess

torch = pytest.importorskip("torch")

_PROGRAM = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def _run(*options: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(_PROGRAM), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.thorough
@pytest.mark.parametrize("contender", ["hybrid", "all-reduce, paceline, 2 ranks"])
def test_small_version(tmp_path: Path, contender: str) -> None:
    page, figures = tmp_path / "page.md", tmp_path / "figures.json"
    page.write_text("Before.\n<!-- figures of make gpu -->\nOld.\n<!-- end of figures -->\nAfter.\n")
    ended = _run("--device", "cpu", "--rounds", "1", "--only", contender, "--json", figures, "--docs", page)
    assert ended.returncode == 0, ended.stderr
    (found,) = json.loads(figures.read_text())["contenders"]
    assert found["step_s"] > 0
    text = page.read_text()
    assert text.startswith("Before.\n<!-- figures of make gpu -->\nCPU, torch")
    assert f"| {contender} |" in text
    assert "Old." not in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device() -> None:
    process = WarmProcess([_PROGRAM], kind="torch", env=os.environ, stdout=subprocess.PIPE, text=True)
    printed, _ = process.communicate(60)
    assert (process.returncode, printed) == (0, "No CUDA device is available: nothing was measured.\n")
