"""``torch.distributed`` and Horovod's API on Paceline, with real processes.

Importing torch takes seconds, so one run of a few ranks (see ``ranks.py``) serves all checks of a module.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.warm.processes import WarmProcess

_FOLDER = Path(__file__).parent
_SIZES = {
    "calls": 3,
    "training": 2,
    "gradient_filters": 2,
    "faults": 3,
    "horovod_calls": 3,
    "horovod_training": 2,
    "horovod_faults": 3,
}
_KILLED = {"faults": 2, "horovod_faults": 2}
_PATIENCE_S = 250.0

pytestmark = pytest.mark.timeout(300)


@dataclass
class Run:
    """The results of all ranks of one module."""

    size: int
    errors: list[str]
    codes: list[int]
    reports: dict[str, list[str]] = field(default_factory=dict)
    """The errors of each rank by check; empty if all checks passed."""


def _read(folder: Path, size: int) -> Run:
    errors = [path.read_text(errors="replace") for path in sorted(folder.glob("errors *"))]
    codes = folder / "codes"
    run = Run(size, errors, json.loads(codes.read_text()) if codes.exists() else [])
    for report in sorted(folder.glob("rank *")):
        for line in report.read_text().splitlines():
            name, reports = json.loads(line)
            run.reports.setdefault(name, []).append(reports)
    return run


def _checks(module: str) -> list[str]:
    lines = (_FOLDER / f"{module}.py").read_text().splitlines()
    return [line[4 : line.index("(")] for line in lines if line.startswith(("def check_", "def last_"))]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    pytest.importorskip("torch")
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / "torch ranks"
    with (shared / "torch lock").open("w") as lock:  # the first worker of pytest runs the ranks for all workers
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            _run_ranks(folder)
    return {module: _read(folder / module, size) for module, size in _SIZES.items()}


def _run_ranks(folder: Path) -> None:
    arguments = [f"{module}:{size}" for module, size in _SIZES.items()]
    process = WarmProcess([_FOLDER / "ranks.py", folder, *arguments], kind="torch", env=os.environ)
    try:
        process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # a missing report is detected
        process.wait()


@pytest.mark.parametrize(("module", "check"), [(module, check) for module in _SIZES for check in _checks(module)])
def test_backend(runs: dict[str, Run], module: str, check: str) -> None:
    run = runs[module]
    reports: Any = run.reports.get(check, [])
    num_left = run.size - 1 if check.startswith("last_killed") else run.size
    assert reports == [""] * num_left, "\n".join([*reports, *run.errors])


@pytest.mark.parametrize("module", _SIZES)
def test_ranks_end_without_being_killed(runs: dict[str, Run], module: str) -> None:
    run = runs[module]
    expected = [-9 if rank == _KILLED.get(module) else 0 for rank in range(run.size)]
    assert run.codes == expected, run.errors
    assert "Traceback" not in "".join(run.errors)
