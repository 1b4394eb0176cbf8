"""Run all checks of a module on several ranks.

The checks of one run share the rank processes, because importing torch is slow.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.warm.processes import WarmProcess
from torch.distributed import TCPStore  # type: ignore[attr-defined]

_FOLDER = Path(__file__).parent


@dataclass
class RankReports:
    """Exit codes and errors by rank, and the reports of each check: one per rank, empty if the check passed."""

    codes: list[int | None]
    errors: list[str]
    reports: dict[str, list[str]] = field(default_factory=dict)

    def failures(self) -> str:
        """Return the failed checks and errors of ranks as text, or an empty text if every check passed on every rank.

        A check ``last_killed`` ends one rank, which reports nothing.
        """
        size = len(self.codes)
        failed = {
            check: reports
            for check, reports in self.reports.items()
            if reports != [""] * (size - 1 if check == "last_killed" else size)
        }
        lines = [f"{check}, rank {rank}: {text}" for check, texts in failed.items() for rank, text in enumerate(texts)]
        return "\n".join([*lines, *self.errors]) if failed else ""


@contextlib.contextmanager
def started_ranks(
    words: Sequence[str | Path], size: int, name: str, environment: Mapping[str, str]
) -> Iterator[list[WarmProcess]]:
    """Start the ranks of a program, with a store in this process. Kill them at the end of the block."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    surroundings = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")},
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": name,
        **environment,
    }
    ranks = [
        WarmProcess(
            words,
            kind="torch",
            env={**surroundings, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.end()


def run_ranks(
    words: Sequence[str | Path],
    size: int,
    name: str,
    environment: Mapping[str, str] | None = None,
    *,
    patience_s: float,
) -> None:
    """Run a program on ranks, without warnings. Every rank must succeed."""
    with started_ranks(["-W", "error", *words], size, name, environment or {}) as ranks:
        errors = [rank.communicate(timeout=patience_s)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(errors)


def run_checks(
    module: str,
    size: int,
    folder: Path,
    *,
    checks: str = "check_ last_",
    environment: Mapping[str, str] | None = None,
    patience_s: float = 180,
) -> RankReports:
    """Run the checks of `module` whose names have a prefix in `checks` on `size` ranks, and return their reports.

    Ranks that do not end within `patience_s` seconds are killed; the reports of their remaining checks are missing.
    """
    with started_ranks(
        [_FOLDER / "strategy_ranks.py", module, folder], size, module, {"CHECKS": checks, **(environment or {})}
    ) as ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            for rank in ranks:
                rank.wait(patience_s)
        for rank in ranks:
            rank.kill()
        errors = [rank.communicate()[1] for rank in ranks]
    result = RankReports([rank.returncode for rank in ranks], errors)
    lines = (_FOLDER / f"{module}.py").read_text().splitlines()
    result.reports = {
        line[4 : line.index("(")]: []
        for line in lines
        if line.startswith(tuple(f"def {prefix}" for prefix in checks.split()))
    }
    for report in sorted(folder.glob("rank *")):
        for name, text in map(json.loads, report.read_text().splitlines()):
            result.reports[name].append(text)
    return result
