"""The remaining items of an epoch are divided among any number of ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from torch.utils.data import SequentialSampler

from paceline.protocol.leases import Remaining
from paceline.torch.strategies.sampling import ShardedSampler


def test_returned_items_are_received_first() -> None:
    remaining = Remaining(first=6).with_returned([4, 1]).with_returned([1])
    assert remaining == Remaining(6, (1, 4))
    assert remaining.count(10) == 6
    assert remaining.numbers(4) == [1, 4, 6, 7]
    assert remaining.after(1) == Remaining(6, (4,))
    assert remaining.after(3) == Remaining(7)
    assert [number for number in range(10) if number in remaining] == [1, 4, 6, 7, 8, 9]


@given(
    length=st.integers(1, 40),
    steps=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), max_size=12),
    sizes=st.integers(1, 4),
)
def test_every_item_is_received_once_although_ranks_die(length: int, steps: list[tuple[int, int]], sizes: int) -> None:
    """In each step, some ranks receive one item each. One of the ranks may die and lose its item."""
    remaining, used = Remaining(), []
    for size, dead in steps:
        numbers = remaining.numbers(size)
        remaining = remaining.after(size)
        if dead < size:
            remaining = remaining.with_returned([numbers[dead]] if numbers[dead] < length else [])
        used += [number for rank, number in enumerate(numbers) if rank != dead and number < length]
    data = SequentialSampler(range(length))
    parts = [
        list(ShardedSampler(data, rank, sizes, drop_last=False, pads=False, remaining=remaining))
        for rank in range(sizes)
    ]
    assert sorted([*used, *(number for part in parts for number in part)]) == list(range(length))
    assert [len(part) for part in parts] == [
        len(ShardedSampler(data, rank, sizes, drop_last=False, pads=False, remaining=remaining))
        for rank in range(sizes)
    ]
