"""Shares of a step in proportion to the ranks' speeds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.protocol.balance import Balance, divide, divide_step
from paceline.protocol.stragglers import StepTimes

_speeds = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=12)


@given(count=st.integers(0, 500), speeds=_speeds)
def test_every_rank_has_at_least_one_sample_and_the_shares_add_up(count: int, speeds: list[float]) -> None:
    shares = divide(count, speeds)
    assert sum(shares) == count
    assert len(shares) == len(speeds)
    assert min(shares) >= (count >= len(speeds))
    assert divide(count, speeds) == shares


@given(count=st.integers(1, 14), speeds=st.lists(st.floats(0.1, 10.0), min_size=2, max_size=3))
def test_no_other_shares_end_earlier(count: int, speeds: list[float]) -> None:
    def end(shares: Sequence[int]) -> float:
        return max(share / speed for share, speed in zip(shares, speeds, strict=True))

    least = int(count >= len(speeds))
    others = itertools.product(range(least, count + 1), repeat=len(speeds))
    best = min(end(shares) for shares in others if sum(shares) == count)
    assert end(divide(count, speeds)) <= best * (1 + 1e-9)


@given(count=st.integers(0, 500), size=st.integers(1, 12), speed=st.floats(1e-3, 1e6))
def test_ranks_of_equal_speed_have_equal_shares(count: int, size: int, speed: float) -> None:
    expected = tuple(count // size + (rank < count % size) for rank in range(size))
    assert divide(count, [speed] * size) == expected
    assert divide_step(count, size) == expected


@given(count=st.integers(1, 500), speeds=_speeds)
def test_shares_can_be_computed_from_earlier_shares(count: int, speeds: list[float]) -> None:
    shares = divide(count, speeds)
    if min(shares):
        assert divide_step(count, len(shares), shares) == shares


class Steps:
    """Ranks that compute with the shares of a balance. `times_of` returns the step times for given shares."""

    def __init__(self, count: int, size: int, times_of: Callable[[Sequence[int]], list[float]]) -> None:
        self.balance, self.times = Balance(count), StepTimes(10.0, 1)
        self.changes: list[int] = []
        for number in range(400):
            before = self.balance.shares
            self.times.record(times_of(before or divide_step(count, size)))
            self.balance.update(self.times)
            if self.balance.shares != before:
                self.changes.append(number)


def test_a_slow_rank_gets_fewer_samples_after_ten_steps() -> None:
    steps = Steps(32, 2, lambda shares: [shares[0] * 0.01, shares[1] * 0.03])
    assert steps.balance.shares == (24, 8)
    assert steps.changes == [9]
    steps.balance.reset()
    assert steps.balance.shares is None


def test_a_fixed_time_per_step_is_taken_into_account() -> None:
    """Step times become equal although a part of them does not depend on the shares."""
    steps = Steps(1000, 2, lambda shares: [1.0 + shares[0] * 0.01, 1.0 + shares[1] * 0.03])
    assert steps.balance.shares is not None
    first, second = steps.balance.shares
    assert 1.0 + first * 0.01 == pytest.approx(1.0 + second * 0.03, rel=0.1)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_ranks_of_almost_equal_speed_keep_equal_shares(size: int) -> None:
    steps = Steps(30, size, lambda shares: [share * (1.0 + 0.05 * (rank % 2)) for rank, share in enumerate(shares)])
    assert steps.balance.shares is None


def test_shares_change_less_often_over_time() -> None:
    """The speed of a rank changes after every change of the shares."""
    slow = itertools.cycle((0, 1))
    state = {"shares": (0, 0), "slow": 0}

    def times_of(shares: Sequence[int]) -> list[float]:
        if state["shares"] != tuple(shares):
            state.update(shares=tuple(shares), slow=next(slow))
        return [share * (3.0 if rank == state["slow"] else 1.0) for rank, share in enumerate(shares)]

    steps = Steps(32, 2, times_of)
    gaps = [after - before for before, after in itertools.pairwise([-1, *steps.changes])]
    assert gaps == [10, 20, 40, 80, 160]
