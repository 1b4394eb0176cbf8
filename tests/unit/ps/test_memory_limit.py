"""Rows beyond a memory limit are stored in files. All values are equal bit by bit, and no file remains."""

from __future__ import annotations

import errno
import gc
import logging
import os
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import UsageError
from paceline.kernels import index
from paceline.tables.memory import blocks
from paceline.tables.memory import limit as limits
from paceline.tables.memory.blocks import RowMemory, SpillError
from paceline.tables.memory.limit import MemoryLimit, parse_size
from paceline.tables.rules import FTRL, Adagrad, UpdateRule
from paceline.tables.sparse_store import SparseStore

LIMIT_BYTES = 1 << 19


def keys_of(count: int, seed: int) -> np.ndarray:
    """Return keys (uint64) of only 8 buckets, so that each bucket becomes large enough for a separate file."""
    keys = np.random.default_rng(seed).integers(0, 2**64, 64 * count, np.uint64)
    buckets = np.empty(len(keys), np.uint16)
    index.buckets_of(keys, buckets)
    return keys[buckets < 8]


def mapped_files(folder: Path) -> int:
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize(("dim", "rule"), [(1, FTRL(alpha=0.05, l1=0.1)), (16, Adagrad(lr=0.1))])
def test_a_table_beyond_the_limit_is_bit_identical(
    tmp_path: Path, dim: int, rule: UpdateRule, caplog: pytest.LogCaptureFixture
) -> None:
    memory = RowMemory(MemoryLimit(num_bytes=LIMIT_BYTES, spill_dir=str(tmp_path)))
    spilled, plain = SparseStore(dim=dim, rule=rule, memory=memory), SparseStore(dim=dim, rule=rule)
    with caplog.at_level(logging.WARNING, "paceline.tables"):
        for seed in (0, 1, 0):  # the rows of the third pass exist
            keys = keys_of(40_000 // dim, seed)
            grads = np.random.default_rng(seed + 9).standard_normal(dim * len(keys)).astype(np.float32)
            for store in (spilled, plain):
                store.reserve(keys)
                store.push(keys, grads)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert memory.in_memory_bytes <= LIMIT_BYTES
    assert memory.spilled_bytes > 0
    assert mapped_files(tmp_path) > 0
    assert os.listdir(tmp_path) == []
    found, expected = np.empty(dim * len(keys), np.float32), np.empty(dim * len(keys), np.float32)
    spilled.pull(keys, found)
    plain.pull(keys, expected)
    np.testing.assert_array_equal(found, expected)
    for (bucket_keys, records), (same, plain_records) in zip(spilled.items(), plain.items(), strict=True):
        order, other_order = np.argsort(bucket_keys), np.argsort(same)  # the rows' order may differ
        np.testing.assert_array_equal(bucket_keys[order], same[other_order])
        np.testing.assert_array_equal(records[order], plain_records[other_order])
    assert spilled.erase(keys[:1000]) == 1000
    for bucket in range(8):
        spilled.drop_bucket(bucket)
    gc.collect()
    assert memory.spilled_bytes == 0
    assert mapped_files(tmp_path) == 0


def test_buckets_are_prefetched_before_lookups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = RowMemory(MemoryLimit(num_bytes=LIMIT_BYTES, spill_dir=str(tmp_path)))
    store, keys = SparseStore(dim=1, memory=memory), keys_of(40_000, 0)
    store.push(keys, np.ones(len(keys), np.float32))
    read = []
    monkeypatch.setattr(memory.read_ahead, "read", lambda directory, layout, bucket_keys: read.append(len(bucket_keys)))
    thrice = np.concatenate([keys, keys, keys])  # more keys than the table has: room is reserved for the absent keys
    limits = store.directory[index.LIMIT : index.USED].copy()
    store.reserve(thrice)
    assert read == [len(thrice)]
    np.testing.assert_array_equal(store.directory[index.LIMIT : index.USED], limits)


def test_a_push_fails_without_changes_if_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SparseStore(dim=1, memory=RowMemory(MemoryLimit(num_bytes=LIMIT_BYTES, spill_dir=str(tmp_path))))
    keys = keys_of(40_000, 0)
    store.push(keys[:1000], np.ones(1000, np.float32))
    before = {bucket: store.bucket(bucket) for bucket in range(8)}

    def is_full(number: int, start: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", is_full)
    with pytest.raises(SpillError, match=rf"{tmp_path}: No space left on device"):
        store.reserve(keys)
    for bucket, (bucket_keys, records) in before.items():
        found, same = store.bucket(bucket)
        np.testing.assert_array_equal(np.sort(found), np.sort(bucket_keys))
        assert records.sum() == same.sum()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4", 4),
        ("16K", 16 << 10),
        ("8g", 8 << 30),
        ("1T", 1 << 40),
        ("8X", None),
        ("0", None),
        ("-1", None),
        ("", None),
    ],
)
def test_sizes_are_parsed(text: str, size: int | None) -> None:
    assert parse_size(text) == size


def test_invalid_limits_are_rejected(tmp_path: Path) -> None:
    assert MemoryLimit.parse(None, None) is None
    with pytest.raises(UsageError, match="--memory-limit 8X: expected a positive number of bytes such as 512M"):
        MemoryLimit.parse("8X", None)
    with pytest.raises(UsageError, match="ass --memory-limit too"):
        MemoryLimit.parse(None, tmp_path)
    with pytest.raises(UsageError, match=rf"--spill-dir {tmp_path}/no: .*No such file or directory"):
        MemoryLimit.parse("8G", tmp_path / "no")
    with pytest.raises(UsageError, match="memory limit 0"):
        MemoryLimit(num_bytes=0)


def test_a_folder_in_memory_is_reported(tmp_path: Path) -> None:
    if not Path("/dev/shm").is_mount():
        pytest.skip("no tmpfs at /dev/shm")
    limit = MemoryLimit(num_bytes=1, spill_dir="/dev/shm")
    assert limit.warning is not None
    assert limit.warning.startswith("/dev/shm is a tmpfs")


def test_few_mappings_are_reported_at_the_start_and_when_exhausted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = MemoryLimit(num_bytes=1, spill_dir=str(tmp_path))
    for module in (limits, blocks):
        monkeypatch.setattr(module, "most_mappings", lambda: 9000)
    assert "9,000 mappings (vm.max_map_count)" in str(limit.warning)

    why = str(blocks.why_not_mapped(errno.ENOMEM))
    assert why.endswith("9,000 mappings (vm.max_map_count)")
    assert "mappings" not in str(blocks.why_not_mapped(errno.ENODEV))
