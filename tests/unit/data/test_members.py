"""Compressed files in which reading can start anywhere: BGZF, and Zstandard with several frames."""

from __future__ import annotations

import gzip
import random
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from paceline.data import Batch, open_dataset
from paceline.data.sampling import text_pieces
from paceline.data.streams import open_stream, text_size
from paceline.data.streams.members import find_members
from paceline.errors import DataError

TEXT = b"".join(b"%d %d:1 %d:0.5\n" % (row % 2, row % 97 + 1, row + 200) for row in range(20_000))


def bgzf(data: bytes, size: int = 10_000) -> bytes:
    """Return the data as bgzip compresses it: members, and an empty last member (SAM specification, section 4.1)."""
    members = []
    for part in [*(data[at : at + size] for at in range(0, len(data), size)), b""]:
        packer = zlib.compressobj(6, zlib.DEFLATED, -15)
        packed = packer.compress(part) + packer.flush()
        head = b"\x1f\x8b\x08\x04\0\0\0\0\0\xff\x06\0BC\x02\0" + struct.pack("<H", len(packed) + 25)
        members.append(head + packed + struct.pack("<II", zlib.crc32(part), len(part)))
    return b"".join(members)


def zstd_frames(data: bytes, size: int = 30_000) -> bytes:
    """Return the data as pzstd compresses it: frames of several kinds with skippable frames between them."""
    zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed: pip install 'paceline[zstd]'")
    frames = []
    for number, at in enumerate(range(0, len(data), size)):
        packer = zstandard.ZstdCompressor(level=1 + number % 3, write_checksum=number % 2 == 0)
        frames += [b"\x50\x2a\x4d\x18\x04\0\0\0abcd", packer.compress(data[at : at + size])]
    return b"".join(frames)


PACKED = {"x.svm.gz": bgzf, "x.svm.zst": zstd_frames}


@pytest.mark.parametrize("name", PACKED)
def test_reading_can_start_anywhere(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(PACKED[name](TEXT))
    members = find_members(str(path))
    assert members is not None
    assert members.num_bytes == text_size(str(path), path.stat().st_size) == len(TEXT)
    assert len(members.starts) == -(-len(TEXT) // (10_000 if name.endswith("gz") else 30_000))
    stream, draw = open_stream(str(path)), random.Random(1)
    for _ in range(200):
        at = draw.choice([0, draw.randrange(len(TEXT)), draw.choice(members.starts), len(TEXT) - 1])
        stream.seek(at)
        view = memoryview(bytearray(draw.randrange(1, 50_000)))
        count = stream.readinto(view)
        assert stream.position == at + count
        assert view[:count] == TEXT[at : at + count]
        assert count > 0
    stream.seek(len(TEXT) + 5)
    assert stream.readinto(memoryview(bytearray(9))) == 0
    stream.close()


@pytest.mark.parametrize("num_members", [1, 2, 5])
def test_a_file_cut_between_members_is_reported(tmp_path: Path, num_members: int) -> None:
    path, end = tmp_path / "x.svm.gz", 0
    whole = bgzf(TEXT)
    for _ in range(num_members):
        end += struct.unpack_from("<H", whole, end + 16)[0] + 1
    path.write_bytes(whole[:end])
    message = f"is truncated after {10_000 * num_members:,} bytes of text"
    with open_dataset(path) as dataset, pytest.raises(DataError, match=message):
        dataset.num_shards(0)


@pytest.mark.parametrize("name", PACKED)
def test_shards_equal_the_shards_of_the_text_in_any_order(tmp_path: Path, name: str) -> None:
    """Several workers can share one file, because each decompresses only its own shards."""
    path = tmp_path / name
    path.write_bytes(PACKED[name](TEXT))
    (tmp_path / "plain.svm").write_bytes(TEXT)
    with (
        open_dataset(path, shard_bytes=7000) as packed,
        open_dataset(tmp_path / "plain.svm", shard_bytes=7000) as plain,
    ):
        assert packed.can_enter(0)
        assert packed.num_shards(0) == plain.num_shards(0)
        shards = list(range(plain.num_shards(0) or 0))
        random.Random(2).shuffle(shards)
        for shard in shards:
            a, b = (Batch.concatenate(list(source.read(0, shard, 100))) for source in (packed, plain))
            np.testing.assert_array_equal(a.keys, b.keys)
            np.testing.assert_array_equal(a.indptr, b.indptr)
    assert [piece[1:] for piece in text_pieces([str(path)])] == [
        piece[1:] for piece in text_pieces([str(tmp_path / "plain.svm")])
    ]


def test_files_that_can_only_be_read_from_the_beginning(tmp_path: Path) -> None:
    path = tmp_path / "x.svm.gz"
    whole = bgzf(TEXT)
    ordinary = gzip.compress(TEXT)
    for data in (ordinary, ordinary + ordinary, whole + ordinary, b"", whole[:9], whole[:-40]):
        path.write_bytes(data)
        assert find_members(str(path)) is None
        assert text_size(str(path), len(data)) is None
    assert find_members(str(tmp_path / "none.gz")) is None
    path.write_bytes(ordinary)
    with open_dataset(path) as dataset:
        assert dataset.num_shards(0) is None
        assert sum(batch.num_examples for batch in dataset.batches(1000)) == 20_000
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 255
    path.write_bytes(damaged)
    with open_dataset(path, "libsvm", shard_bytes=10_000) as dataset, pytest.raises(DataError, match="is damaged"):
        list(dataset.batches(1000))
