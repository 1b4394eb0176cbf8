"""Find the members of a compressed file without decompression, so that reading can start at any member.

BGZF files (``bgzip``; SAM/BAM Format Specification, section 4.1) are gzip members of up to 64 KiB of text, with their
sizes in the headers. Zstandard files with several frames (``pzstd``) have the size of the text in each frame's header
(RFC 8878, section 3.1.1). If a file has one member, or no sizes, reading must start at the beginning.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from paceline.data.streams.remote import is_url
from paceline.errors import DataError

_MOST_FRAME_BYTES = 16 << 20  # after decompression; larger frames take too long
_BGZF_HEADER = struct.Struct("<4s6xH2sHH")
_ZSTD_MAGIC, _SKIPPED = b"\x28\xb5\x2f\xfd", b"\x2a\x4d\x18"


@dataclass(frozen=True, slots=True)
class Members:
    """The offset of each member in the text (`starts`, ascending) and in the file (`offsets`)."""

    starts: tuple[int, ...]
    offsets: tuple[int, ...]
    num_bytes: int

    def before(self, position: int) -> tuple[int, int]:
        """Return the offsets, in text and file, of the last member that starts at or before `position` in the text."""
        at = max(bisect_right(self.starts, position) - 1, 0)
        return self.starts[at], self.offsets[at]


def find_members(path: str) -> Members | None:
    """Return the members of a local file; None if it has no sizes, or only one member.

    Raises DataError for a truncated BGZF file, which lacks the final empty member.
    """
    if is_url(path):
        return None
    try:
        status = os.stat(path)
        return _find_members(path, status.st_size, status.st_mtime_ns)
    except OSError:
        return None  # opening the file raises this error again


@lru_cache(maxsize=64)
def _find_members(path: str, size: int, mtime_ns: int) -> Members | None:
    walk = _bgzf_members if path.endswith(".gz") else _zstd_frames
    starts, offsets, text = [], [], 0
    num_bytes: int | None = 0
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for offset, num_bytes in walk(descriptor, size):
            if num_bytes is None or num_bytes > _MOST_FRAME_BYTES:
                return None
            if num_bytes:
                starts.append(text)
                offsets.append(offset)
            text += num_bytes
        if walk is _bgzf_members and num_bytes:
            raise DataError(
                f"{path} is truncated after {text:,} bytes of text: bgzip's empty block at the end is missing. Make or "
                "copy it again"
            )
    finally:
        os.close(descriptor)
    return Members(tuple(starts), tuple(offsets), text) if len(starts) > 1 else None


def _bgzf_members(descriptor: int, size: int) -> Iterator[tuple[int, int | None]]:
    """Yield the offset of each member and the size of its text. A missing size is None."""
    at = 0
    while at < size:
        header = os.pread(descriptor, _BGZF_HEADER.size, at)
        if len(header) < _BGZF_HEADER.size:
            yield at, None
            return
        magic, num_extra, name, length, last = _BGZF_HEADER.unpack(header)
        end = at + last + 1
        if magic != b"\x1f\x8b\x08\x04" or num_extra < 6 or name != b"BC" or length != 2 or not at + 26 <= end <= size:
            yield at, None
            return
        yield at, int.from_bytes(os.pread(descriptor, 4, end - 4), "little")
        at = end


def _zstd_frames(descriptor: int, size: int) -> Iterator[tuple[int, int | None]]:
    """Yield the offset and text size of each frame. Skippable frames have no text."""
    at = 0
    while at < size:
        head = os.pread(descriptor, 18, at)
        if len(head) >= 8 and head[1:4] == _SKIPPED and head[0] & 0xF0 == 0x50:
            yield at, 0
            at += 8 + int.from_bytes(head[4:8], "little")
            continue
        if len(head) < 6 or head[:4] != _ZSTD_MAGIC:
            yield at, None
            return
        flags = head[4]
        is_single = bool(flags & 0x20)
        skipped = 5 + (not is_single) + (0, 1, 2, 4)[flags & 3]
        width = (1 if is_single else 0, 2, 4, 8)[flags >> 6]
        num_bytes = int.from_bytes(head[skipped : skipped + width], "little") + 256 * (width == 2)
        yield at, num_bytes if width else None
        at = _end_of_blocks(descriptor, at + skipped + width, size) + 4 * bool(flags & 4)


def _end_of_blocks(descriptor: int, at: int, size: int) -> int:
    is_last = False
    while not is_last and at < size:
        header = int.from_bytes(os.pread(descriptor, 3, at), "little")
        is_last, is_repeated = bool(header & 1), header >> 1 & 3 == 1
        at += 3 + (1 if is_repeated else header >> 3)
    return at
