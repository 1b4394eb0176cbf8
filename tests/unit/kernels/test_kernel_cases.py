"""Every kernel equals its reference in Python (the twin). The benchmark measures the same cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numba
import numpy as np
import pytest
from tests.reference import filter_cases, kernel_cases, rule_cases
from tests.reference.kernel_cases import ArrayCase
from tests.reference.rule_cases import SPARSE_CASES, SparseCase

from paceline.tables.compile import KERNELS

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value")  # without the JIT

ARRAY_CASES = (*kernel_cases.ARRAY_CASES, *rule_cases.ARRAY_CASES, *filter_cases.ARRAY_CASES)
_MOST_ITEMS = 200 if numba.config.DISABLE_JIT else 10_000  # type: ignore[attr-defined]


_SLOW = "read_numbers 10000 less 1 bytes"


def _large_is_thorough(case: ArrayCase) -> Any:
    is_thorough = case.num_items > _MOST_ITEMS or case.label == _SLOW
    return pytest.param(case, id=case.label, marks=[pytest.mark.thorough] * is_thorough)


@pytest.mark.parametrize("case", [_large_is_thorough(case) for case in ARRAY_CASES if case.num_items <= 1_000_000])
def test_kernel_and_twin_agree(case: ArrayCase) -> None:
    kernel_arguments, reference_arguments = case.arguments(), case.arguments()
    result, expected = case.kernel(*kernel_arguments), case.twin(*reference_arguments)
    if isinstance(expected, float):
        assert result == pytest.approx(expected, rel=case.tolerance, abs=case.tolerance)
    else:
        assert result == expected
    for position in case.outputs:
        np.testing.assert_allclose(
            kernel_arguments[position],
            reference_arguments[position],
            rtol=case.tolerance,
            atol=case.tolerance,
            strict=True,
        )
    for position, (kernel_argument, other) in enumerate(zip(kernel_arguments, reference_arguments, strict=True)):
        if position not in case.outputs and not (case.kernel.__name__ == "dedup" and position == 1):
            np.testing.assert_array_equal(kernel_argument, other)  # the kernel does not change its inputs


@pytest.mark.parametrize(
    "case",
    [
        replace(case, num_rows=case.num_rows // 10, num_keys=case.num_keys // 10)  # the twin is slow
        for case in SPARSE_CASES
        if case.num_rows <= 5000
    ],
    ids=lambda case: case.label,
)
def test_sparse_table_and_twin_agree(case: SparseCase) -> None:
    if numba.config.DISABLE_JIT and case.dim > 1:  # type: ignore[attr-defined]
        pytest.skip("one width is enough for coverage")
    store, twin = case.store(), case.twin()
    keys, batch, grads = case.batches()
    start = np.resize(grads, len(keys) * case.dim)
    for pushed_keys, pushed_grads in ((keys, start), (batch, grads), (batch, grads)):
        store.push(pushed_keys, pushed_grads)
        twin.push(pushed_keys, pushed_grads)
    erased = batch[::3].copy()
    assert store.erase(erased) == twin.erase(erased.tolist())
    assert len(store) == len(twin.rows)
    found, expected = (np.empty(len(batch) * case.dim, np.float32) for _ in range(2))
    store.pull(batch, found)
    twin.gather(batch, expected)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    whole, exists = store.read_records(batch)
    assert exists.tolist() == [key in twin.rows for key in batch.tolist()]
    for key, record in zip(batch[exists].tolist(), whole[exists], strict=True):
        np.testing.assert_allclose(record, twin.rows[key], rtol=1e-6, atol=1e-6)
    for bucket_keys, records in store.items():
        for key, record in zip(bucket_keys.tolist(), records, strict=True):
            np.testing.assert_allclose(record, twin.rows.pop(key), rtol=1e-6, atol=1e-6)
    assert not twin.rows


def test_every_kernel_has_a_case() -> None:
    in_cases = {case.kernel.__name__ for case in ARRAY_CASES}
    through_the_store = {"gather", "push", "write_records", "copy_records", "erase", "bucket_keys", "rehash"}
    through_the_store |= {"read_records", "has_room", "is_run_too_long", "count_absent", "digest_records"}
    texts = {"parse_criteo", "parse_libsvm", "hash_strings", "split_strings", "parse_floats"}  # test_text_kernels.py
    texts |= {"parse_csv", "skip_rows"}  # test_csv_kernels.py
    texts |= {"parse_vw", "parse_json_lines"}  # tests/unit/data/test_vw_and_json.py
    texts |= {"scale_numbers", "scale_columns", "xxh64"}  # test_data_scaling.py, test_checksum.py
    texts |= {"bin_columns"}  # tests/unit/data/test_bins.py
    texts |= {"cross_features", "cross_fields"}  # tests/unit/models/test_interactions.py
    texts |= {"group_fields", "count_crosses"}  # tests/unit/models/test_interactions.py
    texts |= {"place_features", "least_counts", "add_counts"}  # tests/unit/models/test_counting.py
    texts |= {"note_frequent", "count_occurrences"}  # tests/unit/models/test_counting.py
    in_memory = {"logistic_pass"}  # tests/unit/models/test_tuning.py
    of_passes = {"mark", "mark_all", "old_keys"}  # tests/unit/ps/test_passes.py
    between_processes = {  # tests/integration/collectives
        *("publish_word", "read_word", "claim", "read_peer"),
        *("all_reduce_small", "all_reduce", "all_reduce_direct", "move"),
    }
    assert in_cases | through_the_store | texts | in_memory | of_passes | between_processes == {
        kernel.__name__ for kernel in KERNELS
    }
