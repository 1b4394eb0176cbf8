"""Bytes of one file, plain or unpacked, with a position that can be moved; what can be wrong with a file."""

from __future__ import annotations

import errno
import os
import zlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import override

from paceline.errors import DataError, UsageError


def is_packed(path: str | Path) -> bool:
    """Whether the file is to be unpacked as it is read: its name ends in ``.gz`` or ``.zst``."""
    return str(path).endswith(tuple(kind.suffix for kind in _PACKED))


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
    """The text of `path`, unpacked if its name says so."""
    return next((kind(path) for kind in _PACKED if path.endswith(kind.suffix)), None) or PlainStream(path)


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


class PackedStream(ABC):
    """A compressed file's text, of one or several members. Going back starts over; going forward decompresses."""

    suffix: str
    name: str
    magics: tuple[bytes, ...]
    """What a member begins with, of one length."""
    chunk_bytes: int
    """So much of the file is read at a time."""
    errors: tuple[type[Exception], ...]

    def __init__(self, path: str) -> None:
        self.path = path
        self._restart(PlainStream(path))

    def _restart(self, raw: PlainStream) -> None:
        self._raw = raw
        self._compressed = memoryview(bytearray(self.chunk_bytes))
        self._pending = self._surplus = b""
        self._decoder: Any = None
        self._ended = False
        self.position = 0

    @abstractmethod
    def _new_decoder(self) -> Any:
        """A decoder of one member, which has `eof` and `unused_data` as those of zlib."""

    @abstractmethod
    def _decode(self, data: bytes, limit: int) -> tuple[bytes, bytes]:
        """Text, of which there may be more than `limit` bytes, and what was not decoded of `data`."""

    @abstractmethod
    def _trim(self, data: bytes) -> bytes:
        """What there is without the padding that may be between members."""

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
        while not self._surplus and not self._ended:
            if self._decoder is None and not self._next_member():
                break
            try:
                self._surplus, self._pending = self._decode(self._pending, limit)
            except self.errors as error:
                raise DataError(
                    f"{self.path} is damaged: unpacking it fails after {self.position:,} bytes of text ({error})"
                ) from error
            if self._decoder.eof:
                self._pending, self._decoder = self._decoder.unused_data, None
            elif not self._surplus and not self._pending and not self._refill():
                raise DataError(
                    f"{self.path} is cut off: the {self.name} stream ends in the middle, after {self.position:,} bytes "
                    "of text"
                )
        text, self._surplus = self._surplus[:limit], self._surplus[limit:]
        self.position += len(text)
        return text

    def _refill(self) -> bool:
        count = self._raw.readinto(self._compressed)
        self._pending += bytes(self._compressed[:count])
        return count > 0

    def _next_member(self) -> bool:
        """Begin with the next member, if there is one; nothing but padding and members may be in the file."""
        is_first = self._raw.position == 0
        size = len(self.magics[0])
        self._pending = self._trim(self._pending)
        while len(self._pending) < size and self._refill():
            self._pending = self._trim(self._pending)
        if not self._pending and not is_first:
            self._ended = True
            return False
        if not any(self._pending[:size] == magic[: len(self._pending)] for magic in self.magics):
            if is_first:
                raise DataError(f"{self.path} ends in {self.suffix} but is not a {self.name} file: unpack or rename it")
            raise DataError(f"{self.path} is damaged: its {self.name} stream is followed by something else")
        self._decoder = self._new_decoder()
        return True


class GzipStream(PackedStream):
    """A gzip file's text."""

    suffix, name = ".gz", "gzip"
    magics = (b"\x1f\x8b",)
    chunk_bytes = 1 << 18
    errors = (zlib.error,)

    @override
    def _new_decoder(self) -> Any:
        return zlib.decompressobj(wbits=31)

    @override
    def _decode(self, data: bytes, limit: int) -> tuple[bytes, bytes]:
        text = self._decoder.decompress(data, limit)
        return text, self._decoder.unconsumed_tail

    @override
    def _trim(self, data: bytes) -> bytes:
        return data if self._raw.position == len(data) else data.lstrip(b"\0")


class ZstdStream(PackedStream):
    """A Zstandard file's text (RFC 8878), by the package zstandard (the extra ``paceline[zstd]``)."""

    suffix, name = ".zst", "zstd"
    magics = (b"\x28\xb5\x2f\xfd",)
    chunk_bytes = 1 << 13  # a block of 4 bytes may stand for 128 KiB, and what a call gives is not bounded otherwise

    def __init__(self, path: str) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise UsageError(
                f"reading {path} needs zstandard, which is not installed: pip install 'paceline[zstd]'"
            ) from error
        self._zstandard = zstandard
        self.errors = (zstandard.ZstdError,)
        super().__init__(path)

    @override
    def _new_decoder(self) -> Any:
        return self._zstandard.ZstdDecompressor().decompressobj()

    @override
    def _decode(self, data: bytes, limit: int) -> tuple[bytes, bytes]:
        return self._decoder.decompress(data), b""

    @override
    def _trim(self, data: bytes) -> bytes:
        """Without frames that are to be skipped, as parallel compressors write them."""
        self._pending = data
        while self._pending[1:4] == b"\x2a\x4d\x18" and self._pending[0] & 0xF0 == 0x50:
            while len(self._pending) < 8 and self._refill():
                pass
            end = 8 + int.from_bytes(self._pending[4:8], "little")
            while len(self._pending) < end and self._refill():
                pass
            self._pending = self._pending[end:]
            while len(self._pending) < 4 and self._refill():
                pass
        return self._pending


_PACKED: tuple[type[PackedStream], ...] = (GzipStream, ZstdStream)


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
