"""Parsed shards on disk."""

from __future__ import annotations

import json
import os
import resource
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.data import Batch, Dataset, open_dataset, open_spec
from paceline.data import text as text_reader
from paceline.data.binary.blocks import TRAILER, VERSION
from paceline.data.binary.cache import ShardCache
from paceline.data.formats import FORMATS
from paceline.data.streams import stat_file
from paceline.errors import DataError, UsageError

LINES = [b"%d %d:1 %d:%d" % (i % 2, i, i + 1, i % 3 + 1) + b" 9999:1" * (i % 5 == 0) + b"\n" for i in range(3000)]
TEXT = b"".join(line * (1 + i % 2) for i, line in enumerate(LINES))
BAD = b"1 x:1\n"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "x.svm"
    path.write_bytes(TEXT + BAD)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def read(dataset: Dataset, batch_size: int = 100) -> Batch:
    shards = dataset.num_shards(0)
    assert shards is not None
    return Batch.concatenate([b for s in range(shards) for b in dataset.read(0, s, batch_size)])


def assert_same(a: Batch, b: Batch) -> None:
    assert np.array_equal(a.labels, b.labels)
    assert np.array_equal(a.indptr, b.indptr)
    assert np.array_equal(a.keys, b.keys)
    assert (a.values is None) == (b.values is None)
    assert a.values is None or b.values is None or np.array_equal(a.values, b.values)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record one entry for each block that is parsed from text."""
    calls: list[int] = []
    original = text_reader.TextReader.parse_block

    def counted(self: text_reader.TextReader, block: text_reader.Block, report: Any) -> Any:
        calls.append(block.base)
        return original(self, block, report)

    monkeypatch.setattr(text_reader.TextReader, "parse_block", counted)
    return calls


def test_the_second_pass_reads_the_cache_of_the_first(source: Path, folder: Path, parsed: list[int]) -> None:
    plain = read(open_dataset(source, shard_bytes=10_000))
    first = open_dataset(source, shard_bytes=10_000, cache_dir=folder)
    assert_same(read(first), plain)
    count = len(parsed)
    for batch_size in (1, 77, 10_000):
        again = open_dataset(source, shard_bytes=10_000, cache_dir=folder)
        assert_same(read(again, batch_size), plain)
        assert again.bad_lines == first.bad_lines
        assert again.bad_lines.count == 1
        assert again.cache_error is None
    assert len(parsed) == count
    assert not list(folder.glob("*.tmp"))


def test_cached_arrays_can_be_written_without_changing_the_cache(source: Path, folder: Path) -> None:
    for _ in range(3):
        dataset = open_dataset(source, cache_dir=folder)
        batch = next(dataset.read(0, 0, 10))
        list(dataset.read(0, 0, 10))
        assert batch.labels.tolist() == [0, 1, 1, 0, 1, 1, 0, 1, 1, 0]
        for array in (batch.labels, batch.keys, batch.indptr):
            assert array.flags.aligned
            array[:] = 0
        dataset.close()


def test_values_stay_none_and_empty_shards_stay_empty(tmp_path: Path, folder: Path, parsed: list[int]) -> None:
    path = tmp_path / "y.svm"
    path.write_bytes(b"1\n0\n" + b"1 " + b" ".join(b"%d:1" % i for i in range(500)) + b"\n0 1:1\n")
    for _ in range(2):
        dataset = open_dataset(path, "libsvm", shard_bytes=500, cache_dir=folder)
        batch = read(dataset)
        assert batch.values is None
        assert batch.indptr.tolist() == [0, 0, 0, 500, 501]
        count = len(parsed)
    assert len(list(folder.iterdir())) == dataset.num_shards(0)
    assert count == len(parsed)


def damage_nothing(path: Path) -> None:
    path.write_bytes(path.read_bytes())


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_footer(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-60] ^= 1
    path.write_bytes(content)


def cut_inside(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:128] + content[192:])


def flip_label(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[64] ^= 1
    path.write_bytes(content)


def flip_version(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[8] ^= 1
    path.write_bytes(content)


def flip_indptr(path: Path) -> None:
    content = bytearray(path.read_bytes())
    at = content.index(np.array([0, 3, 5, 7], np.int64).tobytes())
    content[at + 8 : at + 16] = b"\xff" * 8
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage", [damage_nothing, cut, empty, flip_footer, cut_inside, flip_indptr, flip_label, flip_version]
)
def test_a_broken_cache_is_ignored_and_written_again(
    source: Path, folder: Path, parsed: list[int], damage: Any
) -> None:
    plain = read(open_dataset(source, cache_dir=folder))
    (entry,) = folder.iterdir()
    good = entry.read_bytes()
    damage(entry)
    before = len(parsed)
    dataset = open_dataset(source, cache_dir=folder)
    assert_same(read(dataset), plain)
    assert (len(parsed) > before) == (damage is not damage_nothing)
    assert entry.read_bytes() == good
    assert dataset.cache_error is None


def test_a_changed_source_is_parsed_again(source: Path, folder: Path, parsed: list[int]) -> None:
    read(open_dataset(source, cache_dir=folder))
    status = source.stat()
    source.write_bytes(TEXT.replace(b"2999:", b"7777:") + BAD)
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert 7777 in read(open_dataset(source, cache_dir=folder)).keys
    count = len(parsed)
    read(open_dataset(source, cache_dir=folder, shard_bytes=9999))
    assert len(parsed) > count


def test_changed_labels_next_to_arrays_are_read_again(tmp_path: Path, folder: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((4, 2)))
    for labels in ([0, 1, 0, 1], [1, 0, 1, 0]):
        np.save(tmp_path / "x.y.npy", labels)
        with open_dataset(tmp_path / "x.npy", cache_dir=folder) as dataset:
            assert read(dataset).labels.tolist() == labels
            status = FORMATS["numpy"].stat(dataset.files[0])
    (tmp_path / "x.y.npy").unlink()
    assert FORMATS["numpy"].stat(str(tmp_path / "x.npy")).num_bytes < status.num_bytes


@pytest.mark.parametrize("after", [TEXT.replace(b"2999:", b"7777:"), TEXT[:40_000], TEXT + TEXT])
def test_a_source_changed_during_the_reading_is_reported_and_not_cached(
    source: Path, folder: Path, after: bytes
) -> None:
    """The dataset still has the old file open when a new file replaces it under the same name."""
    dataset = open_dataset(source, shard_bytes=10_000, cache_dir=folder)
    spec = json.loads(json.dumps(dataset.spec()))
    list(dataset.read(0, 0, 100))
    source.with_name("new").write_bytes(after)
    source.with_name("new").replace(source)
    with pytest.raises(DataError, match=r"(has changed|was written to) during its use"):
        list(dataset.read(0, 1, 100))
    dataset.close()
    if len(after) != len(TEXT):
        with open_spec(spec) as elsewhere, pytest.raises(DataError, match=f" to {len(after):,} bytes"):
            list(elsewhere.read(0, 2, 100))
    found = read(open_dataset(source, shard_bytes=10_000, cache_dir=folder))
    source.with_name("plain.svm").write_bytes(after)
    assert_same(found, read(open_dataset(source.with_name("plain.svm"), shard_bytes=10_000)))


def test_strict_does_not_use_a_cache_with_bad_lines(source: Path, folder: Path) -> None:
    read(open_dataset(source, cache_dir=folder))
    with pytest.raises(DataError, match="is malformed"):
        read(open_dataset(source, cache_dir=folder, strict=True))


def test_a_partly_read_shard_is_not_cached(source: Path, folder: Path) -> None:
    dataset = open_dataset(source, cache_dir=folder)
    batches = dataset.read(0, 0, 10)
    next(batches)
    assert len(list(folder.glob("*.tmp"))) == 1
    del batches
    assert list(folder.iterdir()) == []


def test_a_full_disk_ends_caching_but_not_reading(source: Path, folder: Path) -> None:
    plain = read(open_dataset(source))
    dataset = open_dataset(source, cache_dir=folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        batch = read(dataset)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_same(batch, plain)
    assert dataset.cache_error is not None
    assert dataset.cache_error.startswith(f"parsed shards are not stored in {folder}: File too large")
    assert list(folder.iterdir()) == []


def test_an_unusable_folder_ends_caching_but_not_reading(source: Path) -> None:
    dataset = open_dataset(source, cache_dir=source / "cache")
    assert read(dataset).num_examples == 4500
    assert dataset.cache_error is not None


def test_gzip_shards_are_cached_with_the_shard_number(tmp_path: Path, folder: Path) -> None:
    import gzip

    path = tmp_path / "x.svm.gz"
    path.write_bytes(gzip.compress(TEXT))
    keys = []
    for _ in range(2):
        dataset, shard, found = open_dataset(path, shard_bytes=20_000, cache_dir=folder), 0, []
        while (count := dataset.ended(0)) is None or shard < count:
            found += [b.keys for b in dataset.read(0, shard, 1000)]
            shard += 1
        keys.append(np.concatenate(found))
        dataset.close()
    assert np.array_equal(keys[0], keys[1])


def test_a_spec_opens_the_same_dataset(source: Path, folder: Path) -> None:
    import json

    dataset = open_dataset(source, shard_bytes=12_345, strict=False, cache_dir=folder)
    spec = json.loads(json.dumps(dataset.spec()))
    twin = open_spec(spec)
    assert twin.spec() == dataset.spec()
    assert_same(read(twin), read(dataset))
    with pytest.raises(UsageError, match="the spec lacks format"):
        open_spec({name: value for name, value in spec.items() if name != "format"})
    source.unlink()
    with pytest.raises(DataError, match="does not exist"):
        open_spec(spec)


def test_only_the_user_can_read_the_cache(source: Path, folder: Path) -> None:
    read(open_dataset(source, cache_dir=folder))
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


@pytest.mark.parametrize(
    "change",
    [
        {"block": (0, -64)},
        {"block": (0, 4)},
        {"block": (0, 1.0)},
        {"block": (1, -1)},
        {"block": (2, -1)},
        {"block": (2, 10**15)},
        {"block": (3, 1)},
        {"block": (3, 10**12)},
        {"block": (3, -2)},
        {"block": (3, True)},
        {"num_bad": -1},
        {"num_bad": "many"},
        {"num_shards": -1},
        {"num_shards": 1.5},
        {"blocks": [[[[]]]]},
        {"bad": [[1, 2, 3, 4, 5, 6, 7]]},
    ],
    ids=str,
)
@pytest.mark.parametrize("ragged", [False, True])
def test_a_cache_with_invalid_numbers_is_not_used(
    tmp_path: Path, folder: Path, change: dict[str, Any], ragged: bool
) -> None:
    """A cache with invalid numbers is ignored, so no kernel accesses memory outside of the arrays."""
    source = tmp_path / "x.svm"
    source.write_bytes(b"".join(b"1 %d:1 2:1%s\n" % (i + 3, b" 9999:1" * (ragged and i % 2)) for i in range(100)))
    plain = read(open_dataset(source, cache_dir=folder))
    [path] = folder.iterdir()
    data = path.read_bytes()
    trailer = struct.Struct("<QII8s")
    length, _, version, magic = trailer.unpack(data[-trailer.size :])
    start = len(data) - trailer.size - length
    content = json.loads(data[start : start + length])
    if "block" in change:
        at, value = change["block"]
        content["blocks"][0][at] = value
    else:
        content.update(change)
    footer = json.dumps(content).encode()
    path.write_bytes(data[:start] + footer + trailer.pack(len(footer), zlib.crc32(footer), version, magic))
    assert_same(read(open_dataset(source, cache_dir=folder)), plain)
    assert path.read_bytes() == data  # written again


def test_a_pipe_in_place_of_a_cache_file_is_not_opened(source: Path, folder: Path) -> None:
    plain = read(open_dataset(source, cache_dir=folder))
    [path] = folder.iterdir()
    path.unlink()
    os.mkfifo(path)
    assert_same(read(open_dataset(source, cache_dir=folder)), plain)


@pytest.mark.parametrize(
    ("part", "value"),
    [("blocks", [[1 << 63, 2, 4, 2, 1, 0, 0]]), ("blocks", [[64, 1 << 62, 4, 2, 1, 0, 0]]), ("bad", [[1, 2, 3, 4, 5]])],
)
def test_invalid_shard_numbers(tmp_path: Path, part: str, value: Any) -> None:
    source = tmp_path / "data"
    source.write_text("x")
    cache = ShardCache(tmp_path / "cache", {})
    status = stat_file(source)
    writer = cache.writer(str(source), status, 0)
    writer.commit(1)
    path = cache.path_of(str(source), 0)
    data = path.read_bytes()
    footer = {**json.loads(data[64 : -TRAILER.size]), part: value}
    text = json.dumps(footer).encode()
    assert cache.load(str(source), status, 0) is not None
    path.write_bytes(data[:64] + text + TRAILER.pack(len(text), zlib.crc32(text), VERSION, b"PACELINE"))
    assert cache.load(str(source), status, 0) is None


def test_labels_are_read_as_clicks_or_as_numbers(tmp_path: Path, folder: Path) -> None:
    """One cache, which stores labels unchanged, serves both."""
    path = tmp_path / "x.svm"
    path.write_text("-1 1:1\n2.5 1:1\n0 1:1\n0.5 1:2\n")
    expected = {"clicks": [0, 1, 0, 1], "numbers": [-1, 2.5, 0, 0.5]}
    for labels in ("clicks", "numbers", "numbers", "clicks"):
        with open_dataset(path, cache_dir=folder, labels=labels) as dataset:
            assert read(dataset).labels.tolist() == expected[labels]
            assert [batch.labels.tolist() for batch in dataset.batches(4)] == [expected[labels]]
    assert len(list(folder.iterdir())) == 1
    with pytest.raises(UsageError, match="labels='words': expected numbers, clicks, or clicks:2"):
        open_dataset(path, labels="words")


def test_weights_are_cached(tmp_path: Path, folder: Path, source: Path) -> None:
    batch = Batch(
        np.zeros(2, np.float32), np.array([0, 1, 2]), np.ones(2, np.uint64), weights=np.array([1, 2.5], np.float32)
    )
    cache = ShardCache(folder, {"format": "x"})
    writer = cache.writer(str(source), stat_file(source), 0)
    writer.append(batch)
    writer.commit(1)
    found = cache.load(str(source), stat_file(source), 0)
    assert found is not None
    assert found.blocks[0].weights is not None
    assert found.blocks[0].weights.tolist() == [1, 2.5]
    unweighted = Batch(batch.labels[:1], np.array([0, 1]), batch.keys[:1])
    joined = Batch.concatenate([batch.slice(1, 2), unweighted])
    assert joined.weights is not None
    assert joined.weights.tolist() == [2.5, 1]
