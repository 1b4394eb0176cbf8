"""Shards of line formats: every line once, for any borders, and bounded memory."""

from __future__ import annotations

import gzip
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.random_examples import num_examples

from paceline.data import Dataset, line_number, open_dataset
from paceline.data.streams.packed import GzipStream
from paceline.data.text import LineReader
from paceline.errors import UsageError


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def write(path: Path, text: bytes) -> Path:
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def keys_of(dataset: Dataset, file: int, shard: int, batch_size: int = 3) -> list[int]:
    return [key for batch in dataset.read(file, shard, batch_size) for key in batch.keys.tolist()]


def all_keys(dataset: Dataset, file: int = 0) -> list[int]:
    keys, shard = [], 0
    dataset.num_shards(file)
    while dataset.ended(file) is None or shard < (dataset.ended(file) or 0):
        keys += keys_of(dataset, file, shard)
        shard += 1
    return keys


_line = st.sampled_from([b"", b"a", b"bc", b"\r", b"defghij\r", b"k" * 20])


@num_examples(150)
@given(
    st.lists(_line, max_size=12),
    st.booleans(),
    st.integers(1, 40),
    st.integers(1, 30),
    st.sampled_from(["t.txt", "t.gz"]),
    st.randoms(use_true_random=False),
)
def test_every_line_is_in_one_shard(
    folder: Path, lines: list[bytes], final: bool, shard_bytes: int, block_bytes: int, name: str, order: Any
) -> None:
    text = b"\n".join(lines) + (b"\n" if final else b"")
    path = write(folder / name, text)
    starts = [at for at in range(len(text)) if at == 0 or text[at - 1] == 10]
    reader = LineReader(str(path), block_bytes)
    shards = list(range(-(-len(text) // shard_bytes) + 1))
    order.shuffle(shards)
    for shard in shards:
        start, stop = shard * shard_bytes, (shard + 1) * shard_bytes
        blocks = [bytes(b.buffer[b.start : b.stop]) for b in reader.blocks(start, stop)]
        line_starts = [at for at in starts if start <= at < stop]
        whole = b"".join(text[at:].partition(b"\n")[0] + b"\n" for at in line_starts)
        assert b"".join(blocks) == whole
    reader.close()


@num_examples(60)
@given(
    st.lists(st.sampled_from([0, 1, 2, 5]), min_size=1, max_size=12),
    st.sampled_from([b"\n", b"\r\n", b"\n\n"]),
    st.booleans(),
    st.integers(1, 60),
    st.sampled_from(["t.svm", "t.svm.gz"]),
)
def test_the_shards_together_have_every_line_of_the_file(
    folder: Path, widths: list[int], newline: bytes, final: bool, shard_bytes: int, name: str
) -> None:
    lines = [b" ".join([b"1", *(b"%d:1" % (10 * i + j) for j in range(n))]) for i, n in enumerate(widths)]
    path = write(folder / name, newline.join(lines) + (newline if final else b""))
    with open_dataset(path, "libsvm", shard_bytes=shard_bytes) as dataset:
        assert all_keys(dataset) == [10 * i + j for i, n in enumerate(widths) for j in range(n)]
        size = len(gzip.decompress(path.read_bytes())) if name.endswith("gz") else path.stat().st_size
        assert dataset.ended(0) == dataset.num_shards(0) == -(-size // shard_bytes)
        assert dataset.bad_lines.count == 0


def numbered(count: int) -> bytes:
    return b"".join(b"%d %d:1\n" % (i % 2, i) for i in range(count))


def test_files_are_read_in_order_and_batches_are_full(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.svm", numbered(100)), write(tmp_path / "b.svm.gz", numbered(33))]
    dataset = open_dataset(paths, shard_bytes=1 << 20)
    sizes = [[b.num_examples for b in dataset.read(file, 0, 16)] for file in range(2)]
    assert sizes == [[16] * 6 + [4], [16, 16, 1]]
    assert dataset.format == "libsvm"
    assert dataset.files == tuple(str(path) for path in paths)
    assert (dataset.num_shards(0), dataset.num_shards(1)) == (1, 1)
    batch = next(dataset.read(0, 0, 16))
    assert [str(a.dtype) for a in (batch.labels, batch.indptr, batch.keys)] == ["float32", "int64", "uint64"]
    assert batch.values is None
    dataset.close()


def test_a_shard_after_the_end_is_empty(tmp_path: Path) -> None:
    for name in ("a.svm", "a.svm.gz"):
        with open_dataset(write(tmp_path / name, numbered(50)), shard_bytes=64) as dataset:
            assert dataset.ended(0) is None
            assert keys_of(dataset, 0, 99) == []
            assert dataset.num_shards(0) == 6
            assert keys_of(dataset, 0, 6) == []


def test_shards_in_rising_order_decompress_a_gzip_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked = 0
    original = GzipStream.decompress

    def counted(self: GzipStream, limit: int) -> bytes:
        nonlocal unpacked
        text = original(self, limit)
        unpacked += len(text)
        return text

    text = numbered(60_000)
    path = write(tmp_path / "a.svm.gz", text)
    with open_dataset(path, "libsvm", shard_bytes=50_000) as dataset:
        monkeypatch.setattr(GzipStream, "decompress", counted)
        assert all_keys(dataset) == list(range(60_000))
        assert unpacked == len(text)
        assert keys_of(dataset, 0, 2)[0] > 0  # an earlier shard: decompression starts again at the beginning
        assert len(text) < unpacked < 2 * len(text)
        again = unpacked
        assert keys_of(dataset, 0, 5)[0] > 0  # a later shard: decompression continues, and skips the shards between
        assert unpacked < again + len(text)


def test_an_iterator_may_be_dropped_and_two_may_run_concurrently(tmp_path: Path) -> None:
    for name in ("a.svm", "a.svm.gz"):
        with open_dataset(write(tmp_path / name, numbered(2000)), shard_bytes=4000) as dataset:
            expected = [keys_of(dataset, 0, shard) for shard in range(3)]
            dropped = dataset.read(0, 1, 5)
            next(dropped)
            other = dataset.read(0, 0, 7)
            first = next(other).keys.tolist()
            del dropped
            assert keys_of(dataset, 0, 2) == expected[2]
            assert first + [key for batch in other for key in batch.keys.tolist()] == expected[0]
            assert keys_of(dataset, 0, 1) == expected[1]


def test_gzip_files_of_several_members_and_with_padding(tmp_path: Path) -> None:
    path = tmp_path / "a.svm.gz"
    text = numbered(1000)
    path.write_bytes(gzip.compress(text[:777]) + gzip.compress(b"") + gzip.compress(text[777:]) + bytes(100))
    with open_dataset(path, shard_bytes=1000) as dataset:
        assert all_keys(dataset) == list(range(1000))


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    with open_dataset(write(tmp_path / "a.svm", b"\xef\xbb\xbf" + numbered(3))) as dataset:
        assert all_keys(dataset) == [0, 1, 2]


def test_a_line_longer_than_a_block_is_read(tmp_path: Path) -> None:
    count = 400_000
    line = b"1 " + b" ".join(b"%d:1" % i for i in range(count)) + b"\n"
    assert len(line) > 1 << 21
    path = write(tmp_path / "a.svm", b"1 1:1\n" + line + b"0 2:1\n")
    with open_dataset(path, "libsvm", shard_bytes=1000) as dataset:
        assert len(all_keys(dataset)) == count + 2


def test_memory_stays_bounded(tmp_path: Path) -> None:
    row = b"1\t" + b"\t".join([b"5"] * 13 + [b"05db9164"] * 26) + b"\n"
    path = write(tmp_path / "a.tsv", row * 60_000)
    with open_dataset(path, shard_bytes=1 << 30) as dataset:
        for _ in dataset.read(0, 0, 256):
            break
        tracemalloc.start()
        rows = sum(batch.num_examples for batch in dataset.read(0, 0, 256))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert rows == 60_000
    assert peak < 16 << 20


def test_the_default_size_of_shards_depends_on_the_size_of_all_files(tmp_path: Path) -> None:
    small = write(tmp_path / "a.svm", numbered(10))
    assert open_dataset(small).shard_bytes == 256 << 10
    large = tmp_path / "b.svm"
    with open(large, "wb") as file:
        file.truncate(64 << 20)
    assert open_dataset([small, large], "libsvm").shard_bytes == (64 << 20) // 64
    with open(large, "wb") as file:
        file.truncate(1 << 40)
    assert open_dataset([small, large], "libsvm").shard_bytes == 16 << 20


def test_line_number(tmp_path: Path) -> None:
    for name in ("a.txt", "a.txt.gz"):
        path = write(tmp_path / name, b"one\ntwo\r\n\nfour")
        assert [line_number(path, at) for at in (0, 3, 4, 8, 9, 10, 13, 99)] == [1, 1, 2, 2, 3, 4, 4, 4]


def test_invalid_arguments(tmp_path: Path) -> None:
    path = write(tmp_path / "a.svm", numbered(3))
    with pytest.raises(UsageError, match=r"'tsv' is unknown. Choose one of criteo, libsvm"):
        open_dataset(path, "tsv")
    with pytest.raises(UsageError, match="no data file is given"):
        open_dataset([])
    with pytest.raises(UsageError, match="at least 1 byte, not 0"):
        open_dataset(path, shard_bytes=0)
    dataset = open_dataset(path)
    for file, shard, size in ((1, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 0, 0)):
        with pytest.raises(UsageError):
            dataset.read(file, shard, size)
