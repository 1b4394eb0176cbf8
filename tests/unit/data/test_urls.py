"""Data at URLs, in fsspec's file system in memory."""

from __future__ import annotations

import gc
import gzip
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from paceline.cli.data_arguments import expand_pattern
from paceline.data import open_dataset
from paceline.data.streams import full_path, is_url, stat_file
from paceline.errors import DataError, UsageError

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed: pip install 'paceline[remote]'")

LINES = b"".join(b"%d %d:1 %d:0.5\n" % (row % 2, row % 7 + 1, row % 11 + 20) for row in range(3000))
ROWS = b"click,site,price\n" + b"".join(b"%d,s%d,%d.5\n" % (row % 2, row % 5, row % 13) for row in range(3000))


@pytest.fixture
def bucket() -> Iterator[str]:
    system = fsspec.filesystem("memory")
    yield "memory://bucket"
    system.rm("/bucket", recursive=True)
    fsspec.get_filesystem_class("simplecache").clear_instance_cache()
    gc.collect()  # the local copies are removed with the file system object


def store(url: str, data: bytes) -> str:
    with fsspec.open(url, "wb") as file:
        file.write(data)
    return url


@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize(
    ("name", "data"), [("x.svm", LINES), ("x.svm.gz", gzip.compress(LINES)), ("x.csv", ROWS), ("x.parquet", b"")]
)
def test_data_equals_the_data_of_a_file(bucket: str, tmp_path: Path, name: str, data: bytes, is_copied: bool) -> None:
    path = tmp_path / name
    if name.endswith("parquet"):
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        table = arrow.table({"click": [0, 1] * 50, "site": ["a", "b", "a", "c"] * 25})
        parquet.write_table(table, path, row_group_size=30)
        data = path.read_bytes()
    path.write_bytes(data)
    url = store(f"{bucket}/{name}", data)
    if is_copied:
        url = f"simplecache::{url}"
    with open_dataset(path, shard_bytes=2000) as local, open_dataset(url, shard_bytes=2000) as remote:
        assert (local.format, local.columns, *remote.files) == (remote.format, remote.columns, url)
        assert local.num_shards(0) == remote.num_shards(0)
        for a, b in zip(local.batches(100), remote.batches(100), strict=True):
            np.testing.assert_array_equal(a.labels, b.labels)
            np.testing.assert_array_equal(a.keys, b.keys)


def test_the_cached_copy_matches_the_current_file(bucket: str, tmp_path: Path) -> None:
    for lines, labels in ((b"1 1:1\n0 2:1\n", [1, 0]), (b"1 1:1\n1 2:1\n", [1, 1])):
        url = store(f"{bucket}/x.svm", lines)
        for _ in range(2):
            with open_dataset(url, cache_dir=tmp_path) as dataset:
                assert next(iter(dataset.batches(2))).labels.tolist() == labels


@pytest.mark.parametrize("after", [LINES[: len(LINES) // 3], LINES.replace(b"0.5", b"0.7")])
def test_a_file_changed_during_the_reading_is_reported(bucket: str, after: bytes) -> None:
    url = store(f"{bucket}/x.svm", LINES)
    with open_dataset(url, shard_bytes=5000) as dataset:
        shards = iter(range(dataset.num_shards(0) or 0))
        list(dataset.read(0, next(shards), 100))
        store(url, after)
        with pytest.raises(DataError, match=r"memory://bucket/x.svm (has changed|was written to)"):
            list(dataset.read(0, next(shards), 100))


def test_patterns(bucket: str) -> None:
    for day in (2, 1):
        store(f"{bucket}/day{day}.tsv", b"x\n")
    assert expand_pattern(f"{bucket}/day*.tsv") == ["memory:///bucket/day1.tsv", "memory:///bucket/day2.tsv"]
    assert expand_pattern(f"{bucket}/day1.tsv") == [f"{bucket}/day1.tsv"]
    with pytest.raises(DataError, match=r"memory://bucket/night.*no file matches"):
        expand_pattern(f"{bucket}/night*")


def test_errors_are_reported(bucket: str) -> None:
    store(f"{bucket}/empty", b"")
    with pytest.raises(DataError, match="memory://bucket/none does not exist"):
        stat_file(f"{bucket}/none")
    with pytest.raises(DataError, match="memory://bucket is a folder, not a data file"):
        stat_file(bucket)
    with pytest.raises(DataError, match="memory://bucket/empty is empty"):
        stat_file(f"{bucket}/empty")
    with pytest.raises(DataError, match="nothing://x cannot be read: Protocol not known"):
        stat_file("nothing://x")
    url = store(f"{bucket}/x.npz", b"PK\x03\x04")
    with pytest.raises(UsageError, match="NumPy's files are memory-mapped"):
        open_dataset(url).num_shards(0)


def test_urls_are_recognized() -> None:
    assert all(is_url(path) for path in ("s3://a/b", "simplecache::s3://a/b", "https://a/b?c"))
    assert not any(is_url(path) for path in ("a", "/a://b", "C:/a", "a:b", Path("s3://a")))
    assert full_path("x").startswith("/")
