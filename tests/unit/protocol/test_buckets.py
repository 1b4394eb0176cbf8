"""Sets of buckets as bit masks, and their encoding."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ProtocolError
from paceline.protocol import NUM_BUCKETS, buckets
from paceline.protocol.buckets import ALL, bucket_set, buckets_in

sets_of_buckets = st.sets(st.integers(0, NUM_BUCKETS - 1))


@settings(deadline=None)
@given(sets_of_buckets, sets_of_buckets)
def test_a_mask_has_one_bit_per_bucket(one: set[int], other: set[int]) -> None:
    mask = bucket_set(one)
    assert list(buckets_in(mask)) == sorted(one)
    assert mask.bit_count() == len(one)
    assert set(buckets_in(mask & ~bucket_set(other))) == one - other
    assert buckets.from_bytes(buckets.to_bytes(mask)) == mask


def test_all_buckets() -> None:
    assert list(buckets_in(ALL)) == list(range(NUM_BUCKETS))
    assert buckets.to_bytes(ALL) == b"\xff" * 64
    assert list(buckets_in(0)) == []


def test_bucket_0_is_the_lowest_bit_of_the_first_byte() -> None:
    assert buckets.to_bytes(bucket_set([0, 9])) == b"\x01\x02" + bytes(62)
    assert buckets.from_bytes(memoryview(b"\x01\x02" + bytes(62))) == bucket_set([0, 9])


@pytest.mark.parametrize("num_bytes", [0, 63, 65])
def test_a_set_of_another_size_is_rejected(num_bytes: int) -> None:
    with pytest.raises(ProtocolError, match=f"64 bytes.*{num_bytes}"):
        buckets.from_bytes(bytes(num_bytes))
