"""Emulated hosts of benchmarks. The tests are skipped without root and iproute2."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from tests.waiting import wait_until
from tests.warm.processes import WarmProcess

from .running import PROMPT_S

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))), reason="needs root, and ip and tc of iproute2"
)

PROGRAM = """
import subprocess
from hosts import network

with network(2, "1Gbit") as names:
    print(*names, flush=True)
    subprocess.run(["ip", "netns", "exec", names[1], "sleep", "1000"])
"""


def find_processes(host: str) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True, check=True).stdout
    return [int(pid) for pid in found.split()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_removes_the_hosts_and_their_processes(tmp_path: Path, number: int) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    benchmarks = Path(__file__).parents[2] / "benchmarks"
    process = WarmProcess(
        ["program.py"], env={**os.environ, "PYTHONPATH": str(benchmarks)}, cwd=tmp_path, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        _, host = names = process.stdout.readline().split()
        wait_until(lambda: bool(find_processes(host)), "no process runs on the host")
        pids = find_processes(host)
        process.send_signal(number)
        assert process.wait(PROMPT_S) == 128 + number
    finally:
        process.end()
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not [name for name in names if name in left]
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "a process of the host still runs")
