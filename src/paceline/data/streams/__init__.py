"""Read the bytes of data files, local or remote, compressed or not."""

from __future__ import annotations

from contextlib import closing
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
    "read_bytes",
    "read_head",
    "stat_file",
    "text_size",
]


def open_stream(path: str) -> ByteStream:
    """Open the text of `path`, decompressed if its name ends in ``.gz`` or ``.zst``."""
    return next((kind(path) for kind in PACKED if path.endswith(kind.suffix)), None) or open_bytes(path)


def read_head(path: str, num_bytes: int) -> tuple[bytes, bool]:
    """Return the first bytes of the text, and whether they are the complete text."""
    with closing(open_stream(path)) as stream:
        data = read_bytes(stream, num_bytes + 1)
    return data[:num_bytes], len(data) <= num_bytes


def read_bytes(stream: ByteStream, num_bytes: int) -> bytes:
    """Return the next bytes of a stream; fewer at the end."""
    buffer, filled = bytearray(num_bytes), 0
    while filled < num_bytes and (count := stream.readinto(memoryview(buffer)[filled:])):
        filled += count
    return bytes(buffer[:filled])


def text_size(path: str, num_bytes: int) -> int | None:
    """Return the text's length in a file of `num_bytes`; None if it is compressed without its members' sizes."""
    if not is_packed(path):
        return num_bytes
    members = find_members(path)
    return None if members is None else members.num_bytes


def line_number(path: str | Path, offset: int) -> int:
    """Return the number, from 1, of the line that has byte `offset` of the decompressed text."""
    newlines = 0
    with closing(open_stream(str(path))) as stream:
        while data := read_bytes(stream, min(offset - stream.position, 1 << 20)):
            newlines += data.count(b"\n")
    return newlines + 1
