"""Parsed shards on disk, so that later passes over the data need not parse text again.

One file per shard, written aside and renamed when the shard was read to its end. Sections of raw
little-endian arrays, each at a multiple of 64 bytes::

    per block   labels float32 [n]; indptr int64 [n+1] unless all rows are as wide; keys uint64;
                values float32, or nothing; weights float32 [n], or nothing
    footer      JSON: the shard's identity, the blocks, the bad lines
    trailer     of the footer: length (uint64) and CRC-32 (uint32); version (uint32); magic (8 bytes)

A file that is cut off, of another version, or made from a source that has changed since is ignored and
written anew. The arrays themselves have no checksum: it would cost more than all the rest of reading. But all
that says where they lie is checked, so that no kernel is led beyond them. Only the user may read the files:
they hold the data.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data.bad_lines import NUM_KEPT, BadLine
from paceline.data.batch import Batch

VERSION = 2
_MAGIC = b"PACELINE"
TRAILER = struct.Struct("<QII8s")
_ALIGNMENT = 64
_RAGGED = -1

_serial = itertools.count()


@dataclass(frozen=True, slots=True)
class CachedShard:
    """A shard read from the cache: its blocks, its bad lines, and the file's number of shards if known."""

    blocks: list[Batch]
    num_bad: int
    bad: list[BadLine]
    num_shards: int | None


class ShardCache:
    """The cache files of one dataset, in one folder that several datasets and processes may share."""

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._identity = identity

    def load(self, path: str, shard: int) -> CachedShard | None:
        """The shard as it was parsed before, or None. The arrays are the caller's to write."""
        try:
            with open(self.path_of(path, shard), "rb", opener=_open_now) as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            return _decode(mapped, self._describe(path, shard))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # missing, or not what we write: parse again
            return None

    def writer(self, path: str, shard: int) -> CacheWriter:
        """A writer for the shard; :exc:`OSError` if the folder cannot be written."""
        return CacheWriter(self.path_of(path, shard), self._describe(path, shard))

    def path_of(self, path: str, shard: int) -> Path:
        """Return where a file's shard is kept."""
        text = json.dumps([self._identity, path], sort_keys=True)
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}-{shard}.shard"

    def _describe(self, path: str, shard: int) -> dict[str, Any]:
        status = os.stat(path)
        return {
            **self._identity,
            "path": path,
            "shard": shard,
            "size": status.st_size,
            "mtime": status.st_mtime_ns,
        }


class CacheWriter:
    """Writes one shard's cache file, block by block; without :meth:`commit` nothing stays."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path_of = path
        self._aside = path.with_name(f"{path.name}.{os.getpid()}.{next(_serial)}.tmp")
        self._identity = identity
        self._blocks: list[list[int]] = []
        self._num_bad = 0
        self._bad: list[BadLine] = []
        self._file = open(self._aside, "wb", buffering=0, opener=_open_private)  # noqa: SIM115 - closed by discard

    def add_bad(self, count: int, first: Sequence[BadLine]) -> None:
        """Remember the shard's bad lines with it."""
        self._num_bad += count
        self._bad += first[: NUM_KEPT - len(self._bad)]

    def append(self, batch: Batch) -> None:
        """Write one block."""
        num_rows, num_pairs = batch.num_examples, len(batch.keys)
        width = num_pairs // num_rows
        if not np.array_equal(batch.indptr, np.arange(num_rows + 1, dtype=np.int64) * width):
            width = _RAGGED
        has_values, has_weights = batch.values is not None, batch.weights is not None
        self._blocks.append([self._file.tell(), num_rows, num_pairs, width, int(has_values), int(has_weights)])
        self._write_array(batch.labels)
        if width == _RAGGED:
            self._write_array(batch.indptr)
        self._write_array(batch.keys)
        if batch.values is not None:
            self._write_array(batch.values)
        if batch.weights is not None:
            self._write_array(batch.weights)

    def commit(self, num_shards: int | None) -> None:
        """The shard is complete: give the file its name."""
        footer = json.dumps(
            {
                "identity": self._identity,
                "end": self._file.tell(),
                "blocks": self._blocks,
                "num_bad": self._num_bad,
                "bad": [astuple(line) for line in self._bad],
                "num_shards": num_shards,
            }
        ).encode()
        self._write(footer)
        self._write(TRAILER.pack(len(footer), zlib.crc32(footer), VERSION, _MAGIC))
        self._file.close()
        os.replace(self._aside, self.path_of)

    def discard(self) -> None:
        """Remove what was written, unless it was committed."""
        self._file.close()
        self._aside.unlink(missing_ok=True)

    def _write_array(self, array: npt.NDArray[Any]) -> None:
        self._write(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
        self._write(bytes(-array.nbytes % _ALIGNMENT))

    def _write(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while len(left):
            left = left[self._file.write(left) :]


def _open_now(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # of a pipe nobody waits for the other end


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _decode(mapped: mmap.mmap, identity: dict[str, Any]) -> CachedShard | None:
    """The content of a cache file; None, ValueError, KeyError or TypeError if it is not this shard's."""
    end = len(mapped) - TRAILER.size
    if end < 0:
        return None
    length, checksum, version, magic = TRAILER.unpack(mapped[end:])
    footer = mapped[max(end - length, 0) : end]
    if magic != _MAGIC or version != VERSION or len(footer) != length or zlib.crc32(footer) != checksum:
        return None
    content = json.loads(footer)
    if content["identity"] != identity or content["end"] != end - length:
        return None
    sections = _Sections(mapped)
    blocks = [block for entry in content["blocks"] if (block := sections.block(*entry)) is not None]
    if len(blocks) != len(content["blocks"]):
        return None
    bad = [_bad_line(*line) for line in content["bad"]]
    num_bad, num_shards = content["num_bad"], content["num_shards"]
    if not _is_count(num_bad) or not (num_shards is None or _is_count(num_shards)):
        return None
    return CachedShard(blocks, num_bad, bad, num_shards)


def _bad_line(file: Any, offset: Any, row: Any, text: Any, reason: Any) -> BadLine:
    is_placed = all(place is None or _is_count(place) for place in (offset, row))
    if not is_placed or not all(isinstance(each, str) for each in (file, text, reason)):
        raise TypeError("no bad line")
    return BadLine(file, offset, row, text, reason)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


class _Sections:
    """Takes arrays from the mapped file, one behind the other."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped = mapped
        self._at = 0

    def block(
        self, at: int, num_rows: int, num_pairs: int, width: int, has_values: int, has_weights: int
    ) -> Batch | None:
        limit = len(self._mapped)
        if not all(_is_count(each) and each <= limit for each in (at, num_rows, num_pairs)) or at % _ALIGNMENT:
            return None
        self._at = at
        labels = self._take(np.float32, num_rows)
        if width == _RAGGED:
            indptr = self._take(np.int64, num_rows + 1)
            if indptr[0] != 0 or indptr[-1] != num_pairs or not (indptr[1:] >= indptr[:-1]).all():
                return None
        elif _is_count(width) and num_pairs == num_rows * width:
            indptr = np.arange(num_rows + 1, dtype=np.int64) * width
        else:
            return None
        keys = self._take(np.uint64, num_pairs)
        values = self._take(np.float32, num_pairs) if has_values else None
        return Batch(labels, indptr, keys, values, self._take(np.float32, num_rows) if has_weights else None)

    def _take(self, dtype: Any, count: int) -> npt.NDArray[Any]:
        array = np.frombuffer(self._mapped, dtype, count, self._at)
        self._at += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        return array
