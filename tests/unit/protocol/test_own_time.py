"""The time that a process has run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.protocol.own_time import OwnTime


@pytest.mark.parametrize("start_s", [0.0, 50.0])
def test_a_pause_counts_as_the_longest_interval(start_s: float) -> None:
    time = OwnTime(2.0, start_s)
    assert [time.read(clock_s) for clock_s in (100.0, 101.5, 161.5)] == [0.0, 1.5, 60.0]
    assert time.now_s == start_s + 1.5 + 2.0


@given(st.lists(st.floats(-1e6, 1e6)))
def test_it_never_runs_backwards_or_jumps(clock: list[float]) -> None:
    time = OwnTime(1.0)
    for clock_s in clock:
        before_s = time.now_s
        elapsed_s = time.read(clock_s)
        assert 0.0 <= time.now_s - before_s <= min(1.0, elapsed_s) + 1e-9
