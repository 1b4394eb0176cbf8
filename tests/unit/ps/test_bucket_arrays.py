"""Sets of buckets as arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.reference import kernels as reference
from tests.reference.kernel_cases import random_keys

from paceline.protocol.buckets import ALL, Buckets, bucket_set, buckets_in
from paceline.tables.bucket_arrays import buckets_of_keys, from_flags, to_flags, to_words

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # without the JIT


@given(buckets=st.integers(0, ALL))
def test_words_and_flags_represent_the_set(buckets: Buckets) -> None:
    flags = to_flags(buckets)
    assert len(flags) == 512
    assert flags.dtype == np.bool_
    assert np.flatnonzero(flags).tolist() == list(buckets_in(buckets))
    assert from_flags(flags) == buckets
    words = to_words(buckets).tolist()
    assert sum(word << 64 * i for i, word in enumerate(words)) == buckets
    assert len(words) == 8


@settings(deadline=None)
@given(seed=st.integers(0, 1000), count=st.integers(0, 1000))
def test_buckets_of_keys_follow_from_the_hashes(seed: int, count: int) -> None:
    keys = random_keys(np.random.default_rng(seed), count)
    assert buckets_of_keys(keys) == bucket_set(np.unique(reference.bucket_of(keys)))
