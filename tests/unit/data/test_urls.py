"""Data at URLs, in fsspec's file system in memory."""

from __future__ import annotations

import gc
import gzip
import io
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from paceline.cli.data_arguments import expand_pattern
from paceline.data import open_dataset
from paceline.data.streams import full_path, is_url, open_stream, read_bytes, stat_file
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


class Network:
    """Counts the reads of the file system in memory, and lets some requests fail."""

    def __init__(self) -> None:
        self.num_reads = 0
        self.failures: list[str] = []

    def request(self, name: str) -> None:
        if name in self.failures:
            self.failures.remove(name)
            raise ConnectionResetError("the connection was reset")

    def open(self, file: Any) -> io.RawIOBase:
        network = self

        class File(io.RawIOBase):
            def seek(self, *position: int) -> int:
                return int(file.seek(*position))

            def read(self, num_bytes: int = -1) -> bytes:
                network.num_reads += 1
                network.request(f"read {network.num_reads}")
                return bytes(file.read(num_bytes))

        return File()


@pytest.fixture
def network(bucket: str, monkeypatch: pytest.MonkeyPatch) -> Network:
    network, system = Network(), fsspec.get_filesystem_class("memory")
    store(f"{bucket}/x.svm", LINES * 150)  # 6 MB
    info, opening = system.info, system.open

    def report(*arguments: Any, **options: Any) -> Any:
        network.request("status")
        return info(*arguments, **options)

    monkeypatch.setattr(system, "info", report)
    monkeypatch.setattr(system, "open", lambda *words, **options: network.open(opening(*words, **options)))
    return network


def test_a_broken_connection_is_opened_again(bucket: str, network: Network) -> None:
    url = f"{bucket}/x.svm"
    network.failures = ["status", "read 1", "read 3"]
    assert stat_file(url).num_bytes == 150 * len(LINES)
    with closing(open_stream(url)) as stream:
        assert read_bytes(stream, 10_000_000) == LINES * 150
    assert not network.failures


def test_the_next_block_is_read_while_the_caller_uses_the_current_block(bucket: str, network: Network) -> None:
    with closing(open_stream(f"{bucket}/x.svm")) as stream:
        read_bytes(stream, 10)
        assert network.num_reads == 1  # the head of a file is one block
        read_bytes(stream, 1 << 20)
        deadline = time.monotonic() + 10
        while network.num_reads < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        stream.seek(5)
        assert read_bytes(stream, 100) == LINES[5:105]


def test_a_server_without_byte_ranges(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    requests = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, _: str, *values: Any) -> None:
            requests.append(values)

    (tmp_path / "x.svm").write_bytes(LINES * 50)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=tmp_path)) as server:
        Thread(target=server.serve_forever).start()
        try:
            base = f"http://127.0.0.1:{server.server_port}"
            with pytest.raises(DataError, match=f"{base}/none.svm does not exist$"):
                stat_file(f"{base}/none.svm")
            assert len(requests) <= 4  # HEAD and GET once, each with a message about the error
            url = f"{base}/x.svm"
            with pytest.raises(DataError, match=f"does not support byte ranges. Pass simplecache::{url}"):
                list(open_dataset(url).batches(10_000))
            with open_dataset(f"simplecache::{url}") as dataset:
                assert sum(len(batch.labels) for batch in dataset.batches(10_000)) == 150_000
        finally:
            server.shutdown()
    fsspec.get_filesystem_class("simplecache").clear_instance_cache()
    gc.collect()


@pytest.mark.thorough
def test_training_reads_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data in a bucket of S3, here of moto's server, are the data of the file."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        address = "http://{}:{}".format(*server.get_host_and_port())
        for name, value in (("ENDPOINT_URL", address), ("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "x")):
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        fsspec.filesystem("s3").mkdir("clicks")
        url = store("s3://clicks/day1.svm", LINES * 150)
        path = tmp_path / "day1.svm"
        path.write_bytes(LINES * 150)
        assert expand_pattern("s3://clicks/day*.svm") == [url]
        with open_dataset(path, shard_bytes=2 << 20) as local, open_dataset(url, shard_bytes=2 << 20) as remote:
            for a, b in zip(local.batches(10_000), remote.batches(10_000), strict=True):
                np.testing.assert_array_equal(a.keys, b.keys)
        with pytest.raises(DataError, match="s3://clicks/none does not exist"):
            stat_file("s3://clicks/none")
    finally:
        server.stop()
