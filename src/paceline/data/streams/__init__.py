"""The bytes of data files, here or elsewhere, compressed or not."""

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
    """The text of `path`, unpacked if its name says so."""
    return next((kind(path) for kind in PACKED if path.endswith(kind.suffix)), None) or open_bytes(path)


def read_head(path: str, num_bytes: int) -> tuple[bytes, bool]:
    """The first bytes of the text, and whether that is all of it."""
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
    """How long the text of a file of `num_bytes` is; None of a packed one that does not say so in several places."""
    if not is_packed(path):
        return num_bytes
    members = find_members(path)
    return None if members is None else members.num_bytes


def line_number(path: str | Path, offset: int) -> int:
    """The number, from 1, of the line that byte `offset` of the (unpacked) text is in."""
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
