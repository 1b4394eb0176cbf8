"""Read the bytes of data files, local or remote, compressed or not."""

from __future__ import annotations

from pathlib import Path

from paceline.data.streams.members import find_members
from paceline.data.streams.packed import PACKED, is_packed
from paceline.data.streams.plain import ByteStream, open_bytes, stat_file
from paceline.data.streams.remote import FileStatus, check_local, expand_url, full_path, is_url, open_url

__all__ = [
    "ByteStream",
    "FileStatus",
    "check_local",
    "expand_url",
    "full_path",
    "is_packed",
    "is_url",
    "line_number",
    "open_stream",
    "open_url",
    "read_head",
    "stat_file",
    "text_size",
]


def open_stream(path: str) -> ByteStream:
    """Open the text of `path`, decompressed if its name ends in ``.gz`` or ``.zst``."""
    return next((kind(path) for kind in PACKED if path.endswith(kind.suffix)), None) or open_bytes(path)


def read_head(path: str, num_bytes: int) -> tuple[bytes, bool]:
    """Return the first bytes of the text, and whether they are the whole text."""
    stream = open_stream(path)
    try:
        buffer = bytearray(num_bytes + 1)
        filled = 0
        while filled <= num_bytes and (count := stream.readinto(memoryview(buffer)[filled:])):
            filled += count
    finally:
        stream.close()
    return bytes(buffer[: min(filled, num_bytes)]), filled <= num_bytes


def text_size(path: str, num_bytes: int) -> int | None:
    """Return the length of the text in a file of `num_bytes`; None for compressed files without sizes of members."""
    if not is_packed(path):
        return num_bytes
    members = find_members(path)
    return None if members is None else members.num_bytes


def line_number(path: str | Path, offset: int) -> int:
    """Return the number, from 1, of the line that contains byte `offset` of the decompressed text."""
    stream = open_stream(str(path))
    try:
        buffer = bytearray(1 << 20)
        newlines = 0
        while left := min(offset - stream.position, len(buffer)):
            count = stream.readinto(memoryview(buffer)[:left])
            if not count:
                break
            newlines += buffer.count(b"\n", 0, count)
    finally:
        stream.close()
    return newlines + 1
