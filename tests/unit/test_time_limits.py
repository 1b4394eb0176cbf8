"""The limit of ``tests.time_limits`` ends what the limit of pytest-timeout no longer ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RERUN = """
@pytest.mark.flaky(reruns=1)
def test_hangs_the_second_time(runs=[]):
    runs.append(1)
    assert len(runs) > 1
    time.sleep(60)
"""
TEARDOWN = """
@pytest.fixture
def resource():
    yield
    time.sleep(60)

def test_fails(resource):
    assert False
"""


@pytest.mark.parametrize("program", [RERUN, TEARDOWN], ids=["rerun", "teardown"])
def test_a_failed_test_that_hangs_ends(tmp_path: Path, program: str) -> None:
    script = tmp_path / "test_script.py"
    script.write_text(f"import time, pytest\nfrom tests import time_limits\ntime_limits.ADDITIONAL_S = 0\n{program}")
    words = [
        "-p",
        "tests.time_limits",
        "-p",
        "no:cacheprovider",
        "--timeout",
        "0.5",
        "--rootdir",
        str(tmp_path),
        str(script),
    ]
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=root, capture_output=True, timeout=50)
    assert ended.returncode == 1
    assert b"Timeout (0:00:00.500000)!" in ended.stderr
    assert b"test_script.py" in ended.stderr
