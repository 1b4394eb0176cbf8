"""Numbers on a common scale."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data import Batch
from paceline.data.key_scaling import KeyScaling, distinct_keys, find_key_scaling
from paceline.data.scales.bins import key_bin_key
from paceline.errors import UsageError


def dense_batch(columns: list[np.ndarray]) -> Batch:
    n, width = len(columns[0]), len(columns)
    keys = np.tile(np.arange(10, 10 + width, dtype=np.uint64), n)
    values = np.stack(columns, axis=1).astype(np.float32).reshape(-1)
    return Batch(np.zeros(n, np.float32), np.arange(0, n * width + 1, width), keys, values)


def to_dense(batch: Batch, keys: list[int]) -> np.ndarray:
    dense = np.zeros((batch.num_examples, len(keys)))
    values = np.ones(len(batch.keys)) if batch.values is None else batch.values
    row = np.repeat(np.arange(batch.num_examples), np.diff(batch.indptr))
    for at, key in enumerate(keys):
        chosen = batch.keys == key
        dense[row[chosen], at] = values[chosen]
    return dense


def test_columns_of_all_examples_are_standardised() -> None:
    rng = np.random.default_rng(0)
    batch = dense_batch([rng.normal(40, 12, 500), rng.normal(0, 1e5, 500), rng.normal(3, 1e-3, 500)])
    scaling = find_key_scaling(batch)
    assert scaling is not None
    scaled = to_dense(scaling.apply(batch), [10, 11, 12])
    assert scaled.mean(0) == pytest.approx(0, abs=1e-3)
    assert scaled.std(0) == pytest.approx(1, abs=1e-3)


def test_an_absent_centred_value_counts_as_zero() -> None:
    scaling = KeyScaling(np.array([5], np.uint64), np.array([10.0]), np.array([2.0]), 1.0)
    batch = Batch(
        np.zeros(2, np.float32), np.array([0, 1, 3]), np.array([7, 5, 8], np.uint64), np.array([3, 14, 4], np.float32)
    )
    scaled = scaling.apply(batch)
    assert scaled.indptr.tolist() == [0, 2, 4]
    assert scaled.keys.tolist() == [5, 7, 5, 8]
    assert scaled.values is not None
    assert scaled.values.tolist() == [-5, 3, 2, 4]


def test_data_with_only_ones_needs_no_scaling() -> None:
    assert find_key_scaling(Batch(np.zeros(1, np.float32), np.array([0, 2]), np.array([1, 2], np.uint64))) is None
    assert find_key_scaling(dense_batch([np.ones(50), np.ones(50)])) is None


def test_rare_features_share_one_scale() -> None:
    """One large numeric column and a thousand rare flags: the flags keep the value 1."""
    n = 1000
    keys = np.stack([np.zeros(n, np.uint64), np.arange(1, n + 1, dtype=np.uint64)], axis=1).reshape(-1)
    values = np.stack([np.random.default_rng(0).normal(5e5, 1e5, n), np.ones(n)], axis=1).astype(np.float32).reshape(-1)
    batch = Batch(np.zeros(n, np.float32), np.arange(0, 2 * n + 1, 2), keys, values)
    scaling = find_key_scaling(batch)
    assert scaling is not None
    assert scaling.other_scale == 1
    assert scaling.keys.tolist() == [0]
    scaled = scaling.apply(batch)
    assert scaled.values is not None
    assert scaled.values[1::2].tolist() == [1] * n
    assert abs(scaled.values[0::2].mean()) < 1e-3


@given(st.data())
def test_apply_scales_values(data: st.DataObject) -> None:
    n, keys = data.draw(st.integers(1, 6)), [3, 9, 2**63]
    rows = [data.draw(st.lists(st.sampled_from(keys), unique=True)) for _ in range(n)]
    flat = np.array([key for row in rows for key in row], np.uint64)
    values = np.array(data.draw(st.lists(st.integers(-9, 9), min_size=len(flat), max_size=len(flat))), np.float32)
    batch = Batch(np.zeros(n, np.float32), np.cumsum([0, *map(len, rows)]), flat, values)
    means = np.array(data.draw(st.lists(st.sampled_from([0.0, 2.0]), min_size=2, max_size=2)))
    scaling = KeyScaling(np.array([3, 2**63], np.uint64), means, np.array([2.0, 4.0]), 8.0)
    expected = to_dense(batch, keys)
    present = to_dense(Batch(batch.labels, batch.indptr, batch.keys), keys) > 0
    offsets, scales = np.array([means[0], 0, means[1]]), np.array([2.0, 8.0, 4.0])
    expected = np.where(present | (offsets != 0), (expected - offsets) / scales, 0)
    again = KeyScaling.from_spec(json.loads(json.dumps(scaling.spec())))
    assert again.digest() == scaling.digest()
    np.testing.assert_allclose(to_dense(again.apply(batch), keys), expected)


def test_an_invalid_scaling_is_rejected() -> None:
    for spec in ({}, {"keys": [1], "means": [], "scales": [1], "other_scale": 1}, {"keys": [2, 1], "means": [0, 0],
                 "scales": [1, 1], "other_scale": 1}, {"keys": [1], "means": [0], "scales": [0], "other_scale": 1},
                 {"keys": ["x"], "means": [0], "scales": [1], "other_scale": 1}):  # fmt: skip
        with pytest.raises(UsageError):
            KeyScaling.from_spec(spec)


def test_distinct_keys() -> None:
    keys, ids = distinct_keys(np.array([7, 7, 2, 7, 9], np.uint64))
    assert keys.tolist() == [7, 2, 9]
    assert ids.tolist() == [0, 0, 1, 0, 2]


def test_extreme_values_are_bounded_and_weights_can_be_unscaled() -> None:
    scaling = KeyScaling(np.array([5], np.uint64), np.array([10.0]), np.array([2.0]), 4.0)
    wild = Batch(np.zeros(1, np.float32), np.array([0, 1]), np.array([5], np.uint64), np.array([1e30], np.float32))
    scaled = scaling.apply(wild)
    assert scaled.values is not None
    assert scaled.values.tolist() == [1000]
    weights, shift = scaling.unscaled(np.array([5, 9], np.uint64), np.array([[4.0], [8.0]], np.float32))
    assert weights.reshape(-1).tolist() == [2, 2]
    assert shift.tolist() == [-20]


def nonlinear_scaling() -> KeyScaling:
    return KeyScaling(
        np.array([1, 2, 9], np.uint64),
        np.array([0.0, 1.0, 0.0]),
        np.array([1.0, 2.0, 1.0]),
        1.0,
        units=np.array([0.0, 3.0, 0.0]),
        edges={1: (-1.0, 0.0, 2.0), 9: (5.0,)},
        filled=np.array([True, True, False]),
    )


@given(st.data())
def test_logarithms_and_bins(data: st.DataObject) -> None:
    """The columns have different bins or a logarithm. A missing number of a filled key counts as 0."""
    n = data.draw(st.integers(1, 5))
    rows = [data.draw(st.lists(st.sampled_from([1, 2, 7, 9]), unique=True)) for _ in range(n)]
    numbers = st.sampled_from([-5.0, -1.0, -0.0, 0.0, 1.5, 2.0, 5.0, 1e9])
    flat = [(key, data.draw(numbers)) for row in rows for key in row]
    keys, values = np.array([key for key, _ in flat], np.uint64), np.array([value for _, value in flat], np.float32)
    batch = Batch(np.zeros(n, np.float32), np.cumsum([0, *map(len, rows)]), keys, values)
    scaling = nonlinear_scaling()
    again = KeyScaling.from_spec(json.loads(json.dumps(scaling.spec())))
    assert again.digest() == scaling.digest()
    found = again.apply(batch)
    assert found.values is not None
    for row in range(n):
        given = dict(flat[batch.indptr[row] : batch.indptr[row + 1]])
        expected = {}
        for key, value in ({1: 0.0, 2: 0.0} | given).items():
            if key in scaling.edges:
                expected[key_bin_key(key, sum(edge <= value for edge in scaling.edges[key]))] = 1.0
            else:
                scaled = (np.sign(value) * np.log1p(abs(value) / 3) - 1) / 2 if key == 2 else value
                expected[key] = min(max(scaled, -1000), 1000)
        at = slice(int(found.indptr[row]), int(found.indptr[row + 1]))
        assert dict(zip(found.keys[at].tolist(), found.values[at].tolist(), strict=True)) == pytest.approx(expected)


def test_bins_have_separate_keys_and_no_scale() -> None:
    scaling = nonlinear_scaling()
    assert len(set(scaling.bin_keys.tolist())) == 6
    assert not scaling.is_linear
    assert KeyScaling(np.array([5], np.uint64), np.array([10.0]), np.array([2.0]), 4.0).is_linear
    assert [scale.edges for scale in scaling.nonlinear_scales().values()] == [(-1.0, 0.0, 2.0), (), (5.0,)]
    with pytest.raises(UsageError, match="must have a mean"):
        KeyScaling(np.array([5], np.uint64), np.array([10.0]), np.array([2.0]), 4.0, edges={6: (1.0,)})
