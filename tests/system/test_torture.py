"""A little of ``make torture``: processes killed and stopped at random, counts exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from .torture import MODES, Run


@pytest.mark.parametrize("mode", MODES)
def test_counts_stay_exact(mode: str, tmp_path: Path) -> None:
    run = Run(seed=7, mode=mode, seconds=2.5, folder=tmp_path, first=("server", "kill"))
    assert run.carry_out() == ""
    assert run.faults["server kill"] >= 1
