"""The kernels of a minibatch: cases outside the table of cases."""

from __future__ import annotations

import time
from collections.abc import Callable

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tests.reference import kernels as reference
from tests.reference.kernel_cases import random_keys

from paceline.kernels import csr, dedup
from paceline.kernels.sparse import largest

pytestmark = [  # without the JIT
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
]


@settings(deadline=None)
@given(st.lists(st.one_of(st.integers(0, 5), st.integers(0, 2**64 - 1)), max_size=60))
def test_dedup_of_any_keys(keys: list[int]) -> None:
    array, scratch = np.array(keys, np.uint64), np.empty(dedup.scratch_size(len(keys)), np.int32)
    unique, inverse = np.empty(len(keys), np.uint64), np.empty(len(keys), np.int32)
    count = dedup.dedup(array, scratch, unique, inverse)
    assert unique[:count].tolist() == list(dict.fromkeys(keys))
    np.testing.assert_array_equal(unique[inverse], array)


def test_dedup_of_colliding_keys() -> None:
    keys = reference.unmix(np.arange(1000, dtype=np.uint64) << np.uint64(32))  # all keys hash to the same first slot
    scratch = np.empty(dedup.scratch_size(1000), np.int32)
    unique, inverse = np.empty(1000, np.uint64), np.empty(1000, np.int32)
    assert dedup.dedup(keys, scratch, unique, inverse) == 1000
    np.testing.assert_array_equal(unique, keys)


@settings(deadline=None)
@given(st.integers(0, 10**9))
def test_scratch_is_a_power_of_two_and_at_most_half_full(num_keys: int) -> None:
    size = dedup.scratch_size(num_keys)
    assert size & (size - 1) == 0
    assert 2 * num_keys <= size <= max(16, 4 * num_keys)


def best_time_s(call: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.thorough  # other programs on the machine change the ratio
@pytest.mark.skipif(numba.config.DISABLE_JIT, reason="times the compiled kernel")  # type: ignore[attr-defined]
def test_dedup_is_much_faster_than_sorting() -> None:
    keys = random_keys(np.random.default_rng(0), 160_000, 100_000)
    scratch = np.empty(dedup.scratch_size(len(keys)), np.int32)
    unique, inverse = np.empty(len(keys), np.uint64), np.empty(len(keys), np.int32)
    dedup.dedup(keys, scratch, unique, inverse)
    paceline_s = best_time_s(lambda: dedup.dedup(keys, scratch, unique, inverse))
    numpy_s = best_time_s(lambda: np.unique(keys, return_inverse=True))
    assert numpy_s / paceline_s > 3, (paceline_s, numpy_s)  # about 10 in benchmarks/kernels.py


@pytest.mark.parametrize("at", [0, 1, 500, 1022])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_non_finite_number_is_found(bad: float, at: int) -> None:
    array = np.full(1023, 3e38, np.float32)  # the sum of these finite numbers is not finite
    assert largest(array) == np.float32(3e38)
    array[at] = bad
    assert not largest(array) < np.inf


def test_opposite_infinities_are_found() -> None:
    assert largest(np.array([np.inf, -np.inf], np.float32)) == np.inf


def test_an_empty_array_is_finite() -> None:
    assert largest(np.empty(0, np.float32)) == 0


@settings(deadline=None)
@given(arrays.arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32)))
def test_the_largest_magnitude_of_any_array(array: np.typing.NDArray[np.float32]) -> None:
    np.testing.assert_equal(largest(array), np.abs(array).max(initial=0))


def test_matrices_without_rows_or_pairs() -> None:
    no_indices, no_values = np.empty(0, np.int32), np.empty(0, np.float32)
    out = np.full(3, np.nan, np.float32)
    csr.csr_dot(np.zeros(4, np.int64), no_indices, no_values, np.ones(2, np.float32), out)
    assert out.tolist() == [0, 0, 0]
    out[:] = np.nan
    csr.csr_transposed_dot(np.zeros(1, np.int64), no_indices, no_values, no_values, out)
    assert out.tolist() == [0, 0, 0]
    assert csr.logistic(no_values, no_values, no_values, no_values) == 0


def test_dot_sums_in_float64() -> None:
    values = np.array([1e8, 1, -1e8, 1], np.float32)
    out = np.empty(1, np.float32)
    csr.csr_dot(np.array([0, 4]), np.zeros(4, np.int32), values, np.ones(1, np.float32), out)
    assert out[0] == 2  # a sum in float32 would be 1


@pytest.mark.parametrize("label", [0.0, 1.0])
@pytest.mark.parametrize("margin", [0.0, 1e-30, 88.0, 710.0, 1e30])
def test_logistic_of_extreme_margins(margin: float, label: float) -> None:
    margins = np.array([margin, -margin], np.float32)
    labels = np.array([label, 1 - label], np.float32)
    probabilities, residuals = np.empty(2, np.float32), np.empty(2, np.float32)
    loss = csr.logistic(margins, labels, probabilities, residuals)
    assert np.isfinite(probabilities).all()
    assert probabilities[0] == pytest.approx(1 / (1 + np.exp(-margin)), rel=1e-6)
    np.testing.assert_allclose(residuals, probabilities - labels, atol=1e-7)
    expected = np.logaddexp(0.0, np.where(labels == 1, -margins.astype(np.float64), margins))
    assert loss == pytest.approx(float(expected.sum()), rel=1e-12, abs=1e-40)
