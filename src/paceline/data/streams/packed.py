"""The text of compressed files."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from typing_extensions import override

from paceline.data.streams.members import find_members
from paceline.data.streams.plain import ByteStream, open_bytes
from paceline.errors import DataError, UsageError


class PackedStream(ABC):
    """A compressed file's text, of one or several members.

    Going elsewhere starts at the member that has the place, where the file says which that is
    (:mod:`paceline.data.streams.members`); else going back starts over, and going forward decompresses.
    """

    suffix: str
    name: str
    magics: tuple[bytes, ...]
    """What a member begins with, of one length."""
    chunk_bytes: int
    """So much of the file is read at a time."""
    errors: tuple[type[Exception], ...]

    def __init__(self, path: str) -> None:
        self.path = path
        self._restart(open_bytes(path))

    def _restart(self, raw: ByteStream) -> None:
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
        members = find_members(self.path)
        start, offset = (0, 0) if members is None else members.before(position)
        if not start <= self.position <= position:
            self._raw.seek(offset)
            self._restart(self._raw)
            self.position = start
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


PACKED: tuple[type[PackedStream], ...] = (GzipStream, ZstdStream)


def is_packed(path: str | Path) -> bool:
    """Whether the file is to be unpacked as it is read: its name ends in ``.gz`` or ``.zst``."""
    return str(path).endswith(tuple(kind.suffix for kind in PACKED))
