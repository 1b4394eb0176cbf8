"""A server's part of a dense table: its elements and rejected requests."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.protocol import NUM_BUCKETS
from paceline.protocol.buckets import ALL, bucket_set
from paceline.protocol.placement import place
from paceline.ps.messages import TableSpec
from paceline.tables.bucket_arrays import bucket_bounds, clip_runs, owned_runs
from paceline.tables.initializers import Constant, Zeros
from paceline.tables.part import Selection, TablePart
from paceline.tables.rules import SGD, Adam, UpdateRule
from paceline.tables.settings import to_fields
from paceline.tables.sparse_part import make_part

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # without the JIT


def dense(size: int, buckets: range | tuple[int, ...], update: UpdateRule | None = None) -> TablePart:
    fields = to_fields(SGD(lr=1.0) if update is None else update)
    spec = TableSpec(name="d", kind="dense", size=size, update=fields, initializer=to_fields(Zeros()))
    return make_part(spec, bucket_set(buckets))


@given(size=st.integers(1, 5000), servers=st.integers(1, 4), start=st.integers(0, 5000), stop=st.integers(0, 5000))
def test_runs_are_the_owned_elements(size: int, servers: int, start: int, stop: int) -> None:
    start, stop = sorted((min(start, size), min(stop, size)))
    seen: list[int] = []
    chains = place(NUM_BUCKETS, range(servers))
    for server in range(servers):
        buckets = [bucket for bucket, chain in enumerate(chains) if chain[0] == server]
        runs = owned_runs(size, buckets)
        elements = [e for bucket in buckets for e in range(*bucket_bounds(size, bucket))]
        assert [e for run in runs for e in range(*run)] == elements
        assert all(a[1] < b[0] for a, b in itertools.pairwise(runs))
        clipped = [e for run in clip_runs(runs, start, stop) for e in range(*run)]
        assert clipped == [e for e in elements if start <= e < stop]
        seen += clipped
    assert sorted(seen) == list(range(start, stop))


def test_elements_of_another_server_are_refused() -> None:
    part = dense(1024, (0, 2, 3))  # elements 0, 1, 4 to 7
    keys = np.array([0, 1, 4, 7], np.uint64)
    assert part.num_values(Selection(keys)) == 4
    assert part.num_values(Selection(None, 1, 6)) == 3
    assert part.keys_of(Selection(None, 1, 6)).tolist() == [1, 4, 5]
    for key in (2, 3, 8, 1023):
        with pytest.raises(UsageError, match=f"key {key} of dense table 'd'"):
            part.num_values(Selection(np.array([0, key], np.uint64)))
    for key in (1024, 2**63, 2**64 - 1):
        with pytest.raises(UsageError, match=f"keys of dense table 'd' .*{key}: expected 0 to 1023"):
            part.num_values(Selection(np.array([key, 0], np.uint64)))


def test_copied_records_include_the_state_of_the_rule() -> None:
    rule = Adam(lr=0.1)
    one, other = dense(1024, range(512), rule), dense(1024, range(0, 512, 2), rule)
    assert one.record_words == 4
    one.push(Selection(None, 0, 1024), np.linspace(-1, 1, 1024, dtype=np.float32))
    for bucket in range(0, 512, 2):
        other.write_records(*one.read_bucket(bucket))
    for part in (one, other):
        part.push(Selection(np.array([0, 5, 1020], np.uint64)), np.ones(3, np.float32))
    for bucket in range(0, 512, 2):
        left, right = one.read_bucket(bucket), other.read_bucket(bucket)
        assert np.array_equal(left[0], right[0])
        assert np.array_equal(left[1], right[1])
    with pytest.raises(UsageError, match="bucket 3 of dense table 'd' is not on this server"):
        other.read_bucket(3)


def test_a_part_without_elements() -> None:
    part = dense(3, (7, 9))  # fewer elements than buckets
    assert part.num_rows == 0
    assert part.num_values(Selection(None, 0, 3)) == 0
    part.pull(Selection(None, 0, 3), np.empty(0, np.float32))
    nothing = Selection(np.empty(0, np.uint64))
    assert part.num_values(nothing) == 0
    part.pull(nothing, np.empty(0, np.float32))
    part.push(nothing, np.empty(0, np.float32))
    assert [len(array) for array in part.read_bucket(7)] == [0, 0]


def test_hyperparameters_may_change_but_the_rule_may_not() -> None:
    start = to_fields(Constant(value=1))
    spec = TableSpec(name="w", kind="sparse", update=to_fields(SGD(lr=1.0)), initializer=start)
    part = make_part(spec, ALL)
    keys, ones = Selection(np.array([3], np.uint64)), np.ones(1, np.float32)
    part.push(keys, ones)
    part.set_update(SGD(lr=0.5))
    part.push(keys, ones)
    with pytest.raises(UsageError, match="table 'w' is updated by SGD"):
        part.set_update(Adam(lr=1.0))
    out = np.empty(1, np.float32)
    part.pull(keys, out)
    assert out[0] == -0.5
