"""A file format for blocks of examples as arrays, with checksums.

All numbers are little-endian, and sections begin at multiples of 64 bytes::

    header      magic (8 bytes); version (uint32)
    per block   labels float32 [n]; indptr int64 [n+1] unless all rows have the same width; keys uint64;
                values float32, or nothing; weights float32 [n], or nothing; fields uint32, or nothing
    ...         further sections, listed in the footer with the CRC-32 of their bytes
    footer      JSON: the blocks, each with the XXH64 of its bytes, and the writer's own content
    trailer     of the footer: length (uint64) and CRC-32 (uint32); version (uint32); magic

A file may be malicious. Therefore all sizes and offsets are checked, so that no kernel reads beyond an array.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.closing import Closing
from paceline.data.bad_lines import BadLine
from paceline.data.batch import Batch

VERSION = 3
MAGIC = b"PACELINE"
TRAILER = struct.Struct("<QII8s")
_ALIGNMENT = 64
_HEADER = (MAGIC + struct.pack("<I", VERSION)).ljust(_ALIGNMENT, b"\0")
_RAGGED = -1


@dataclass(frozen=True, slots=True)
class BlockEntry:
    """Position and content of a block. `width` is the number of pairs in each row, or -1 if rows differ."""

    offset: int
    num_rows: int
    num_pairs: int
    width: int
    has_values: int
    has_weights: int
    checksum: int
    has_fields: int = 0

    @property
    def num_bytes(self) -> int:
        sizes = [4 * self.num_rows, 8 * self.num_pairs]
        if self.width == _RAGGED:
            sizes.append(8 * (self.num_rows + 1))
        if self.has_values:
            sizes.append(4 * self.num_pairs)
        if self.has_weights:
            sizes.append(4 * self.num_rows)
        if self.has_fields:
            sizes.append(4 * self.num_pairs)
        return sum(map(_padded, sizes))

    def is_within(self, end: int) -> bool:
        counts = (self.offset, self.num_rows, self.num_pairs, self.has_values, self.has_weights, self.has_fields)
        return (
            all(map(is_count, counts))
            and type(self.width) is int
            and type(self.checksum) is int
            and (self.width == _RAGGED or (self.width >= 0 and self.num_pairs == self.num_rows * self.width))
            and self.offset % _ALIGNMENT == 0
            and self.offset + self.num_bytes <= end
        )


@dataclass(frozen=True, slots=True)
class Section:
    """Position and CRC-32 of a section other than a block."""

    offset: int
    num_bytes: int
    checksum: int

    @classmethod
    def from_fields(cls, fields: Sequence[Any], end: int) -> Section:
        """Create a section from these fields; the footer begins at `end`. Raises TypeError, ValueError."""
        section = cls(*fields)
        if not all(map(is_count, fields)) or section.offset + section.num_bytes > end:
            raise ValueError("a section is invalid")
        return section


class BlockWriter(Closing):
    """Writes a file block by block. Only :meth:`finish` makes the file valid. Raises OSError."""

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        self._entries: list[BlockEntry] = []
        self._file = open(path, "wb", buffering=0, opener=lambda name, flags: os.open(name, flags, mode))  # noqa: SIM115
        self._write(_HEADER)

    def close(self) -> None:
        self._file.close()

    @property
    def position(self) -> int:
        return self._file.tell()

    def append(self, batch: Batch) -> None:
        from paceline.kernels.checksum import xxh64

        num_rows, num_pairs = batch.num_examples, len(batch.keys)
        width = num_pairs // num_rows
        if not np.array_equal(batch.indptr, np.arange(num_rows + 1, dtype=np.int64) * width):
            width = _RAGGED
        has_values, has_weights = batch.values is not None, batch.weights is not None
        entry = BlockEntry(
            *(self.position, num_rows, num_pairs, width),
            *(int(has_values), int(has_weights), 0, int(batch.fields is not None)),
        )
        data = np.zeros(_padded(max(entry.num_bytes, 1)), np.uint8)
        at = 0
        indptr = batch.indptr if width == _RAGGED else None
        for array in (batch.labels, indptr, batch.keys, batch.values, batch.weights, batch.fields):
            if array is not None:
                data[at : at + array.nbytes].view(array.dtype)[:] = array
                at += _padded(array.nbytes)
        checksum = int(xxh64(data.view(np.uint64)))
        self._entries.append(replace(entry, checksum=checksum))
        self._write(data[: entry.num_bytes].data)

    def write_section(self, data: bytes) -> Section:
        section = Section(self.position, len(data), zlib.crc32(data))
        self._write(data)
        self._write(bytes(-len(data) % _ALIGNMENT))
        return section

    def finish(self, content: dict[str, Any], *, sync: bool = False) -> None:
        """Write the footer with `content` and close the file. If `sync`, wait until the data is on the disk."""
        content = {**content, "end": self.position, "blocks": [astuple(entry) for entry in self._entries]}
        footer = json.dumps(content).encode()
        self._write(footer)
        self._write(TRAILER.pack(len(footer), zlib.crc32(footer), VERSION, MAGIC))
        if sync:
            os.fsync(self._file.fileno())
        self._file.close()

    def _write(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while len(left):
            left = left[self._file.write(left) :]


class NotBlocksError(ValueError):
    """The file is not a file of blocks."""


class BlockFile(Closing):
    """A file of blocks, open for reading.

    The constructor raises OSError for a missing file, and ValueError for a truncated file, another version or another
    format.
    """

    def __init__(self, path: str | Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # open a pipe without waiting
        try:
            self.content = self._read_footer()
            """The part of the footer that the writer passed as `content`."""
            self.entries = tuple(_entry(fields, self.content["end"]) for fields in self.content.pop("blocks"))
        except (KeyError, TypeError, RecursionError, struct.error) as error:
            self.close()
            raise ValueError("the footer is invalid") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file. Arrays already read remain valid."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            self.close()

    def read(self, at: int) -> Batch | None:
        """Return the examples of block `at` in new arrays; None if they are damaged. Raises OSError."""
        from paceline.kernels.checksum import xxh64

        entry = self.entries[at]
        if not entry.num_bytes:
            return Batch(np.empty(0, np.float32), np.zeros(1, np.int64), np.empty(0, np.uint64))
        # Read, because a memory map would be slower: each page causes a page fault.
        data = np.empty(entry.num_bytes, np.uint8)
        num_read = 0
        while num_read < len(data):
            count = os.preadv(self._descriptor, [data[num_read:].data], entry.offset + num_read)
            if not count:  # the file was truncated
                return None
            num_read += count
        if int(xxh64(data.view(np.uint64))) != entry.checksum:
            return None
        return _take(data, entry)

    def read_section(self, section: Section) -> bytes:
        data = os.pread(self._descriptor, section.num_bytes, section.offset)
        if zlib.crc32(data) != section.checksum:
            raise ValueError("a section's checksum is wrong")
        return data

    def _read_footer(self) -> dict[str, Any]:
        header = os.pread(self._descriptor, len(_HEADER), 0)
        if not header.startswith(MAGIC):
            raise NotBlocksError
        if header != _HEADER:
            raise ValueError("the header is invalid")
        end = os.fstat(self._descriptor).st_size - TRAILER.size
        trailer = os.pread(self._descriptor, TRAILER.size, max(end, 0))
        length, checksum, version, magic = TRAILER.unpack(trailer)
        if magic != MAGIC or version != VERSION or length > end:
            raise ValueError("the end is missing or invalid")
        footer = os.pread(self._descriptor, length, end - length)
        if zlib.crc32(footer) != checksum:
            raise ValueError("the footer is damaged")
        content = json.loads(footer)
        if not isinstance(content, dict) or content["end"] != end - length:
            raise ValueError("the footer is invalid")
        return content


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def bad_line_of(fields: Sequence[Any]) -> BadLine:
    file, offset, row, text, reason = fields
    is_placed = all(place is None or is_count(place) for place in (offset, row))
    if not is_placed or not all(isinstance(value, str) for value in (file, text, reason)):
        raise TypeError("not a bad line")
    return BadLine(file, offset, row, text, reason)


def _entry(fields: Sequence[Any], end: int) -> BlockEntry:
    entry = BlockEntry(*fields)
    if not entry.is_within(end):
        raise ValueError("a block is invalid")
    return entry


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _take(data: npt.NDArray[np.uint8], entry: BlockEntry) -> Batch | None:
    """Return the examples of a block, whose arrays are contiguous; None if they are invalid."""
    at = 0

    def take(dtype: Any, count: int) -> npt.NDArray[Any]:
        nonlocal at
        array = np.frombuffer(data, dtype, count, at)
        at += _padded(array.nbytes)
        return array

    num_rows, num_pairs = entry.num_rows, entry.num_pairs
    labels = take(np.float32, num_rows)
    if entry.width == _RAGGED:
        indptr = take(np.int64, num_rows + 1)
        if indptr[0] != 0 or indptr[-1] != num_pairs or not (indptr[1:] >= indptr[:-1]).all():
            return None
    else:
        indptr = np.arange(num_rows + 1, dtype=np.int64) * entry.width
    keys = take(np.uint64, num_pairs)
    values = take(np.float32, num_pairs) if entry.has_values else None
    weights = take(np.float32, num_rows) if entry.has_weights else None
    return Batch(labels, indptr, keys, values, weights, take(np.uint32, num_pairs) if entry.has_fields else None)
