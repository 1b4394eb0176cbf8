"""Leases of an epoch's items: each item is in exactly one committed step, although ranks die and join."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.protocol.balance import divide
from paceline.protocol.leases import EpochLeases, Remaining, split_rounds


def sizes(length: int, size: int, **options: Any) -> list[list[int]]:
    """Return the number of each rank's own items in each round."""
    return [[dealt.num_own for dealt in split_rounds(range(length), rank, size, **options)] for rank in range(size)]


@pytest.mark.parametrize(
    ("length", "size", "options", "expected"),
    [
        (10, 2, {"per_rank": 4}, [[4, 1], [4, 1]]),
        (9, 2, {"per_rank": 4}, [[4, 1], [4, 0]]),
        (9, 2, {"per_rank": 4, "drop_last": True}, [[4], [4]]),
        (12, 2, {"per_rank": 4, "per_step": 6}, [[3, 3], [3, 3]]),
        (20, 2, {"per_rank": 4, "per_step": 10}, [[3, 2, 3, 2], [3, 2, 3, 2]]),
        (14, 2, {"per_rank": 4, "per_step": 10, "num_missing": 4}, [[2, 3, 2], [2, 3, 2]]),
        (13, 2, {"per_rank": 4, "per_step": 10, "drop_last": True}, [[3, 2], [3, 2]]),
        (18, 2, {"per_rank": 4, "per_step": 12, "shares": (9, 3)}, [[3, 3, 3, 3, 2], [1, 1, 1, 1, 0]]),
        (3, 3, {"per_rank": 4, "per_step": 2}, [[1, 1], [1, 0], [0, 0]]),
    ],
)
def test_a_step_is_divided_into_rounds(
    length: int, size: int, options: dict[str, Any], expected: list[list[int]]
) -> None:
    assert sizes(length, size, **options) == expected


def test_a_rank_without_an_item_gets_a_copy_of_another_ranks_item() -> None:
    (dealt,) = split_rounds("ab", 2, 3, per_rank=4)
    assert (dealt.items, dealt.num_own, dealt.parts, dealt.is_last) == (["a"], 0, (1, 1, 0), True)


def test_a_newcomer_gets_whole_batches_without_own_items() -> None:
    dealt = [*split_rounds("abcdefg", 2, 2, per_rank=2)]
    assert [(each.items, each.num_own, each.parts) for each in dealt] == [
        (["a", "b"], 0, (2, 2)),
        (["e", "f"], 0, (2, 1)),
    ]


def test_items_of_a_rank_that_does_not_contribute_are_leased_first_again() -> None:
    leases = EpochLeases(Remaining(2))
    leases.lease((2, 2, 2), [10, 11, 12])
    assert (leases.num_held, leases.is_idle) == (6, False)
    assert not leases.lacks({10, 11, 12})
    assert leases.lacks({10, 12})
    leases.keep({10, 12})
    assert leases.remaining == Remaining(8, (3, 6))
    assert leases.num_held == 4
    assert not leases.lacks({10, 12})
    assert leases.without_step() == Remaining(8, (2, 3, 4, 5, 6, 7))
    leases.commit({10, 12})
    assert leases.remaining == Remaining(8, (3, 6))
    assert leases.is_idle


def test_the_rounds_that_a_dead_rank_had_applied_are_not_leased_again() -> None:
    leases = EpochLeases(Remaining())
    for number in range(3):
        leases.lease((2, 2, 2), [10, 11, 12], number)
    assert leases.members == {10, 11, 12}
    leases.commit({10}, {11: 2, 12: 0})
    assert leases.remaining == Remaining(18, (2, 5, 8, 11, 13, 14, 16, 17))
    assert leases.is_idle


@dataclass
class _Rank:
    member: int
    leases: EpochLeases
    step: list[int]
    """The items whose gradients the rank has in the current step."""


@given(data=st.data(), length=st.integers(0, 60), per_rank=st.integers(1, 4), has_steps=st.booleans())
def test_each_item_is_committed_once(data: st.DataObject, length: int, per_rank: int, *, has_steps: bool) -> None:
    per_step = data.draw(st.integers(1, 12)) if has_steps else None
    next_member = data.draw(st.integers(1, 4))
    ranks = [_Rank(member, EpochLeases(Remaining()), []) for member in range(next_member)]
    steps: list[list[int]] = []
    joins = 4

    def begin(ranks: Collection[_Rank]) -> bool:
        """Lease the next round; return whether it is the last round of its step (False at the end of the epoch)."""
        dealt: list[tuple[tuple[int, ...], bool]] = []
        shares = None
        if per_step is not None and data.draw(st.booleans()):
            shares = divide(per_step, [data.draw(st.floats(0.1, 10.0)) for _ in ranks])
        for place, rank in enumerate(ranks):
            items = (number for number in range(length) if number in rank.leases.remaining)
            missing = None if per_step is None else per_step - rank.leases.num_held
            rounds = split_rounds(
                items, place, len(ranks), per_rank=per_rank, per_step=per_step, num_missing=missing, shares=shares
            )
            for found in itertools.islice(rounds, 1):
                rank.leases.lease(found.parts, [other.member for other in ranks])
                rank.step += found.items[: found.num_own]
                dealt.append((found.parts, found.is_last))
        assert dealt in ([], [dealt[0]] * len(ranks) if dealt else [])
        assert dealt or all(rank.leases.is_idle for rank in ranks)
        return bool(dealt) and dealt[0][1]

    while True:
        before = ranks[0].leases.remaining
        is_last = begin(ranks)
        if ranks[0].leases.remaining == before:
            break
        if len(ranks) > 1 and data.draw(st.booleans()):
            ranks.pop(data.draw(st.integers(0, len(ranks) - 1)))
        if not is_last:
            continue
        contributors = {rank.member for rank in ranks}
        assert len({rank.leases.lacks(contributors) for rank in ranks}) == 1
        if per_step is not None and ranks[0].leases.lacks(contributors):
            for rank in ranks:
                rank.leases.keep(contributors)
            continue
        steps.append(sorted(number for rank in ranks for number in rank.step))
        for rank in ranks:
            rank.leases.commit(contributors)
            rank.step = []
        if joins and data.draw(st.booleans()):
            joins, next_member = joins - 1, next_member + 1
            ranks.append(_Rank(next_member, EpochLeases(ranks[0].leases.remaining), []))
        assert len({str(rank.leases.remaining) for rank in ranks}) == 1
    assert sorted(number for step in steps for number in step) == list(range(length))
    if per_step is not None:
        assert all(len(step) == per_step for step in steps[:-1])
