"""Bytes of one file, plain or gunzipped, with a position that can be moved; what can be wrong with a file."""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path
from typing import Protocol

from paceline.errors import DataError

COMPRESSED_BYTES = 1 << 18
"""So much of a gzip file is read at a time."""

_GZIP_MAGIC = b"\x1f\x8b"


def is_gzip_name(path: str | Path) -> bool:
    """Whether the file is to be gunzipped: its name ends in ``.gz``."""
    return str(path).endswith(".gz")


def stat_file(path: str) -> os.stat_result:
    """The status of a regular, non-empty, readable file; :exc:`DataError` in a sentence for anything else."""
    try:
        status = os.stat(path)
        if os.path.isdir(path):
            raise DataError(f"{path} is a folder, not a data file: name the files in it, as in {path}/*")
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        raise _unreadable(path, error) from error
    if os.path.isfile(path) and status.st_size == 0:
        raise DataError(f"{path} is empty: it has no line to read")
    return status


def _unreadable(path: str, error: OSError) -> DataError:
    if error.errno == errno.ENOENT:
        return DataError(f"{path} does not exist")
    if error.errno in (errno.EACCES, errno.EPERM):
        return DataError(f"{path} cannot be read: permission is denied")
    return DataError(f"{path} cannot be read: {error.strerror or error}")


class ByteStream(Protocol):
    """A file's text from `position` on."""

    position: int

    def readinto(self, view: memoryview) -> int:
        """Fill `view` from its start; fewer bytes than asked for are possible, 0 only at the end."""

    def seek(self, position: int) -> None:
        """Go to `position`, or to the end if it lies behind that."""

    def close(self) -> None:
        """Close the file; again is allowed."""


def open_stream(path: str) -> ByteStream:
    """The text of `path`, gunzipped if its name says so."""
    return GzipStream(path) if is_gzip_name(path) else PlainStream(path)


class PlainStream:
    """A file as it is. Descriptors, not file objects: dropping an iterator half-way must not warn."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.position = 0
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise _unreadable(path, error) from error

    def readinto(self, view: memoryview) -> int:
        """Fill `view` as far as one read does."""
        try:
            count = os.readv(self._descriptor, [view])
        except OSError as error:
            raise _unreadable(self.path, error) from error
        self.position += count
        return count

    def seek(self, position: int) -> None:
        """Go to `position`."""
        position = min(position, os.fstat(self._descriptor).st_size)
        self.position = os.lseek(self._descriptor, position, os.SEEK_SET)

    def close(self) -> None:
        """Close the descriptor."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()


class GzipStream:
    """A gzip file's text, of one or several members. Going back starts over; going forward decompresses."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._restart(PlainStream(path))

    def _restart(self, raw: PlainStream) -> None:
        self._raw = raw
        self._compressed = memoryview(bytearray(COMPRESSED_BYTES))
        self._pending = b""
        self._inflate = zlib.decompressobj(wbits=31)
        self._members = 0
        self._ended = False
        self.position = 0

    def readinto(self, view: memoryview) -> int:
        """Fill `view` as far as one decompression does."""
        text = self.decompress(len(view))
        view[: len(text)] = text
        return len(text)

    def seek(self, position: int) -> None:
        """Go to `position`."""
        if position < self.position:
            self._raw.seek(0)
            self._restart(self._raw)
        while self.position < position and self.decompress(min(position - self.position, 1 << 20)):
            pass

    def close(self) -> None:
        """Close the file."""
        self._raw.close()

    def decompress(self, limit: int) -> bytes:
        """Return up to `limit` bytes of text; none at the end."""
        while not self._ended:
            self._check_magic()
            try:
                text = self._inflate.decompress(self._pending, limit)
            except zlib.error as error:
                raise DataError(
                    f"{self.path} is damaged: gunzipping it fails after {self.position:,} bytes of text ({error})"
                ) from error
            self._pending = self._inflate.unconsumed_tail
            if self._inflate.eof:
                self._next_member()
            if text:
                self.position += len(text)
                return text
            if not self._pending and not self._ended and not self._refill():
                raise DataError(
                    f"{self.path} is cut off: the gzip stream ends in the middle, after {self.position:,} bytes of text"
                )
        return b""

    def _refill(self) -> bool:
        count = self._raw.readinto(self._compressed)
        self._pending += bytes(self._compressed[:count])
        return count > 0

    def _check_magic(self) -> None:
        if self._raw.position == 0:
            while len(self._pending) < 2 and self._refill():
                pass
            if self._pending[:2] != _GZIP_MAGIC[: len(self._pending)]:
                raise DataError(f"{self.path} ends in .gz but is not a gzip file: unpack or rename it")

    def _next_member(self) -> None:
        """After a member's end: zeros are padding, anything else must be another member."""
        self._pending = self._inflate.unused_data.lstrip(b"\0")
        while len(self._pending) < 2 and self._refill():
            self._pending = self._pending.lstrip(b"\0")
        if not self._pending:
            self._ended = True
        elif self._pending[:2] != _GZIP_MAGIC[: len(self._pending)]:
            raise DataError(f"{self.path} is damaged: its gzip stream is followed by something else")
        else:
            self._inflate = zlib.decompressobj(wbits=31)


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


def line_number(path: str | Path, offset: int) -> int:
    """The number, from 1, of the line that byte `offset` of the (gunzipped) text is in."""
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
