"""A rank with long steps is a straggler until its steps are short again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.protocol.stragglers import StepTimes


def recorded(steps: Sequence[Sequence[float]], min_ranks: int = 1) -> StepTimes:
    times = StepTimes(3.0, min_ranks)
    for step in steps:
        times.record(step)
    return times


@pytest.mark.parametrize(
    ("steps", "min_ranks", "straggler"),
    [
        ([[1, 4, 1]] * 5, 1, 1),
        ([[1, 4, 1]] * 4, 1, None),  # too few steps
        ([[1, 2.9, 1]] * 5, 1, None),
        ([[1, 1, 1]] * 3 + [[1, 90, 1]] * 2, 1, None),  # two long steps
        ([[1, 90, 1]] * 2 + [[1, 1, 1]] * 5, 1, None),
        ([[4, 1]] * 5, 1, 0),  # two ranks
        ([[4, 1]] * 5, 2, None),  # too few ranks would be left
        ([[4]] * 5, 1, None),
        ([[9, 8, 1, 1, 1]] * 5, 1, 0),  # only the slowest rank
    ],
)
def test_the_slowest_rank_is_a_straggler(steps: list[list[float]], min_ranks: int, straggler: int | None) -> None:
    assert recorded(steps, min_ranks).straggler() == straggler


def test_a_change_of_ranks_restarts_the_measurement() -> None:
    times = recorded([[1, 4]] * 5)
    times.reset()
    assert times.straggler() is None
    assert times.medians() == []


@pytest.mark.parametrize(
    ("times_s", "has_recovered"), [([1, 1, 1], True), ([1, 1], False), ([1, 1, 5], False), ([5, 1, 1, 1], True)]
)
def test_a_straggler_recovers_after_three_short_steps(times_s: list[float], has_recovered: bool) -> None:
    assert recorded([[time_s] for time_s in times_s]).has_recovered(2.0) == has_recovered
