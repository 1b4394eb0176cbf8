"""Memory for a model's rows is reserved once, before the rows are written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.ps import FTRL
from paceline.storage.model_directory import fill_store, read_model, save_model
from paceline.tables.initializers import Zeros
from paceline.tables.settings import to_fields
from paceline.tables.sparse_store import SparseStore
from paceline.tables.spec import TableSpec

_ROWS = 600_000


@pytest.mark.parametrize("dim", [1, 8])
def test_rows_fit_in_the_reserved_memory(dim: int) -> None:
    store = SparseStore(dim=dim)
    store.make_room_evenly(_ROWS)
    keys = np.unique(np.random.default_rng(0).integers(0, 2**63, _ROWS, dtype=np.uint64))
    keys[0] = 0
    values = np.arange(keys.size * dim, dtype=np.float32).reshape(-1, dim)
    before = list(store.lines)
    store.write_records(keys, values)
    num_grown = sum(new is not old for new, old in zip(store.lines, before, strict=True))
    assert num_grown <= 5  # few buckets get more rows than their share plus three standard deviations
    found, exists = store.read_records(keys)
    assert exists.all()
    np.testing.assert_array_equal(found, values)


def test_a_bucket_grows_beyond_the_reserved_share() -> None:
    store = SparseStore(dim=1)
    store.make_room_evenly(_ROWS)
    crowd = SparseStore(dim=1)
    keys = np.random.default_rng(0).integers(0, 2**63, 2_000_000, dtype=np.uint64)
    crowd.write_records(keys, np.ones((keys.size, 1), np.float32))
    crowded, _ = crowd.bucket(7)
    store.write_records(crowded, np.ones((crowded.size, 1), np.float32))
    assert len(store) == crowded.size
    assert store.read_records(crowded)[1].all()


def test_a_model_loads_with_and_without_the_state_of_the_update_rule(tmp_path: Path) -> None:
    spec = TableSpec(name="lr", kind="sparse", update=to_fields(FTRL()), initializer=to_fields(Zeros()))
    random = np.random.default_rng(0)
    keys = random.permutation(np.arange(1, 3_000, dtype=np.uint64))
    records = random.standard_normal((keys.size, spec.record_words)).astype(np.float32)
    save_model(tmp_path / "model", [(spec, [(keys[:2000], records[:2000]), (keys[2000:], records[2000:])])], {})
    saved = read_model(tmp_path / "model")
    table = saved.table("lr")
    whole = fill_store(spec, saved.records(table), num_rows=table.rows)
    values = fill_store(spec, saved.records(table), num_rows=table.rows, values_only=True)
    np.testing.assert_array_equal(whole.read_records(keys)[0], records)
    np.testing.assert_array_equal(values.read_records(keys)[0], records[:, :1])
    assert values.num_bytes < whole.num_bytes
