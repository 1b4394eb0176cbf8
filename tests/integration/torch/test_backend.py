"""``torch.distributed`` on Paceline, with real processes.

Importing torch takes seconds, so one run of a few ranks (see ``ranks.py``) serves all checks of a module.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_HERE = Path(__file__).parent
_SIZES = {"calls": 3, "training": 2, "faults": 3}
_KILLED = {"faults": 2}
_PATIENCE_S = 90.0


class Run:
    """All ranks of one module's checks; they are started at once, and carried to their end by :meth:`finish`."""

    def __init__(self, module: str, folder: Path) -> None:
        self.size = _SIZES[module]
        self._folder = folder
        self._ranks = [
            subprocess.Popen(
                [sys.executable, _HERE / "ranks.py", module, str(rank), str(self.size), folder],
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(self.size)
        ]
        self.errors: list[str] = []
        self.codes: list[int] = []
        self.said: dict[str, list[str]] = {}
        """By check, what each rank says: nothing if all is well."""

    def finish(self) -> None:
        """Wait for the ranks, and read what they say."""
        try:
            for rank in self._ranks:
                rank.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            pass  # what is missing is missed
        finally:
            for rank in self._ranks:
                rank.kill()
            self.errors = [rank.communicate()[1] for rank in self._ranks]
        self.codes = [rank.returncode for rank in self._ranks]
        for report in sorted(self._folder.glob("rank *")):
            for line in report.read_text().splitlines():
                name, said = json.loads(line)
                self.said.setdefault(name, []).append(said)


def _checks(module: str) -> list[str]:
    lines = (_HERE / f"{module}.py").read_text().splitlines()
    return [line[4 : line.index("(")] for line in lines if line.startswith(("def check_", "def last_"))]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    pytest.importorskip("torch")
    started = {module: Run(module, tmp_path_factory.mktemp(module)) for module in _SIZES}
    for run in started.values():
        run.finish()
    return started


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("module", "check"), [(module, check) for module in _SIZES for check in _checks(module)])
def test_backend(runs: dict[str, Run], module: str, check: str) -> None:
    run = runs[module]
    said: Any = run.said.get(check, [])
    num_left = run.size - 1 if check.startswith("last_killed") else run.size
    assert said == [""] * num_left, "\n".join([*said, *run.errors])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("module", _SIZES)
def test_ranks_end_by_themselves(runs: dict[str, Run], module: str) -> None:
    run = runs[module]
    expected = [-9 if rank == _KILLED.get(module) else 0 for rank in range(run.size)]
    assert run.codes == expected, run.errors
    assert "Traceback" not in "".join(run.errors)
