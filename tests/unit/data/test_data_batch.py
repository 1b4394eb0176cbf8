from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import Batch
from paceline.data.batch import cut_by_bytes, rebatch


def make(widths: list[int], first: int = 0, *, ones: bool = False) -> Batch:
    indptr = np.cumsum([0, *widths]).astype(np.int64)
    keys = np.arange(first, first + indptr[-1], dtype=np.uint64)
    labels = np.arange(len(widths), dtype=np.float32) % 2
    return Batch(labels, indptr, keys, None if ones else keys.astype(np.float32))


def rows(batches: list[Batch]) -> list[tuple[float, list[int], list[float]]]:
    result = []
    for batch in batches:
        assert batch.indptr[0] == 0
        assert batch.indptr[-1] == len(batch.keys)
        values = np.ones(len(batch.keys)) if batch.values is None else batch.values
        for i in range(batch.num_examples):
            span = slice(int(batch.indptr[i]), int(batch.indptr[i + 1]))
            result.append((float(batch.labels[i]), batch.keys[span].tolist(), values[span].tolist()))
    return result


def test_a_slice_is_a_view_with_a_separate_indptr() -> None:
    batch = make([2, 0, 3, 1])
    part = batch.slice(1, 3)
    assert part.indptr.tolist() == [0, 0, 3]
    assert part.keys.tolist() == [2, 3, 4]
    assert np.shares_memory(part.keys, batch.keys)
    assert rows([part]) == rows([batch])[1:3]
    assert batch.slice(2, 2).num_examples == 0


def test_rows_are_taken_in_any_order() -> None:
    batch = make([2, 0, 3, 1])
    batch.weights = np.arange(4, dtype=np.float32)
    order = np.array([3, 1, 0, 3])
    taken = batch.take(order)
    assert rows([taken]) == [rows([batch])[i] for i in order]
    assert taken.weights is not None
    assert taken.weights.tolist() == [3, 1, 0, 3]
    assert taken.indptr.dtype == np.int64
    nothing = make([1], ones=True).take(np.empty(0, np.int64))
    assert (nothing.num_examples, nothing.indptr.tolist(), nothing.values) == (0, [0], None)


def test_concatenate_fills_in_ones_for_batches_without_values() -> None:
    whole = Batch.concatenate([make([1, 2]), make([2], 10, ones=True), make([])])
    assert whole.values is not None
    assert whole.values.tolist() == [0, 1, 2, 1, 1]
    assert whole.indptr.tolist() == [0, 1, 3, 5]
    assert whole.indptr.dtype == np.int64
    assert Batch.concatenate([make([1], ones=True), make([1], ones=True)]).values is None
    assert Batch.concatenate([]).num_examples == 0


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=8), st.integers(1, 10))
def test_rebatch_keeps_every_row_in_order(shapes: list[list[int]], batch_size: int) -> None:
    blocks = [make(widths, 100 * i, ones=i % 2 == 0) for i, widths in enumerate(shapes)]
    batches = list(rebatch(blocks, batch_size))
    assert rows(batches) == rows(blocks)
    assert all(batch.num_examples == batch_size for batch in batches[:-1])
    assert all(0 < batch.num_examples <= batch_size for batch in batches)


def test_batches_have_slots() -> None:
    with pytest.raises(AttributeError):
        make([1]).label = 1  # type: ignore[attr-defined]


@given(st.lists(st.lists(st.integers(0, 9), max_size=12), max_size=6), st.integers(1, 600))
def test_batches_are_divided_at_a_size_in_bytes(widths: list[list[int]], num_bytes: int) -> None:
    batches = [make(width, 100 * number, ones=number % 2 == 0) for number, width in enumerate(widths)]
    cut = list(cut_by_bytes(iter(batches), num_bytes))
    assert rows(cut) == rows(batches)
    sizes = [16 * batch.num_examples + 12 * len(batch.keys) for batch in cut]
    assert all(size <= num_bytes or batch.num_examples == 1 for size, batch in zip(sizes, cut, strict=True))
    for batch, size, following in zip(cut, sizes, cut[1:], strict=False):
        assert batch.num_examples
        assert size + 16 + 12 * int(following.indptr[1]) > num_bytes


@given(st.lists(st.lists(st.integers(0, 9), max_size=12), max_size=6), st.integers(1, 600), st.integers(1, 5))
def test_batches_are_divided_at_multiples_of_a_number(widths: list[list[int]], num_bytes: int, multiple: int) -> None:
    batches = [make(width, 100 * number, ones=number % 2 == 0) for number, width in enumerate(widths)]
    cut = list(cut_by_bytes(iter(batches), num_bytes, multiple))
    assert rows(cut) == rows(batches)
    for batch in cut[:-1]:
        assert batch.num_examples % multiple == 0 or batch.num_examples < multiple
        assert 16 * batch.num_examples + 12 * len(batch.keys) <= num_bytes or batch.num_examples == 1
