"""A little of ``make torture``: processes killed and stopped at random, counts exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from .torture import CONSISTENCIES, Run


@pytest.mark.parametrize("consistency", CONSISTENCIES)
def test_counts_stay_exact(consistency: str, tmp_path: Path) -> None:
    run = Run(seed=7, consistency=consistency, seconds=4.0, folder=tmp_path)
    assert run.carry_out() == ""
    assert run.faults.total() >= 1
