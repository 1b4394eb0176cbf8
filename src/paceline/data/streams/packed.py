"""Read the text of compressed files."""

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
    """The text of a compressed file with one or several members.

    If the members' sizes are known (:mod:`paceline.data.streams.members`), `seek` starts at the member that contains
    the position. Otherwise it decompresses all text before the position: from the current position if it is earlier,
    else from the beginning of the file.
    """

    suffix: str
    name: str
    magics: tuple[bytes, ...]
    """The possible first bytes of a member, all of the same length."""
    chunk_bytes: int
    """The number of bytes to read from the file in one step."""
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
        """Return a decoder of one member. Like zlib's decoders, it has `eof` and `unused_data`."""

    @abstractmethod
    def _decode(self, data: bytes, limit: int) -> tuple[bytes, bytes]:
        """Return text, and the remainder of `data`. The text may exceed `limit` bytes."""

    @abstractmethod
    def _trim(self, data: bytes) -> bytes:
        """Return `data` without the padding at its start."""

    def readinto(self, view: memoryview) -> int:
        text = self.decompress(len(view))
        view[: len(text)] = text
        return len(text)

    def seek(self, position: int) -> None:
        members = find_members(self.path)
        start, offset = (0, 0) if members is None else members.before(position)
        if not start <= self.position <= position:
            self._raw.seek(offset)
            self._restart(self._raw)
            self.position = start
        while self.position < position and self.decompress(min(position - self.position, 1 << 20)):
            pass

    def close(self) -> None:
        self._raw.close()

    def decompress(self, limit: int) -> bytes:
        while not self._surplus and not self._ended:
            if self._decoder is None and not self._next_member():
                break
            try:
                self._surplus, self._pending = self._decode(self._pending, limit)
            except self.errors as error:
                raise DataError(
                    f"{self.path} is damaged: decompression fails after {self.position:,} bytes of text ({error})"
                ) from error
            if self._decoder.eof:
                self._pending, self._decoder = self._decoder.unused_data, None
            elif not self._surplus and not self._pending and not self._refill():
                raise DataError(
                    f"{self.path} is truncated: its {self.name} stream ends after {self.position:,} bytes of text"
                )
        text, self._surplus = self._surplus[:limit], self._surplus[limit:]
        self.position += len(text)
        return text

    def _refill(self) -> bool:
        count = self._raw.readinto(self._compressed)
        self._pending += bytes(self._compressed[:count])
        return count > 0

    def _next_member(self) -> bool:
        """Start the next member. Return whether there is one. Raises DataError for bytes that are not padding."""
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
                raise DataError(f"{self.path} ends in {self.suffix} but is not a {self.name} file. Rename it")
            raise DataError(f"{self.path} is damaged: other bytes follow its {self.name} stream")
        self._decoder = self._new_decoder()
        return True


class GzipStream(PackedStream):
    """The text of a gzip file."""

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
    """The text of a Zstandard file (RFC 8878), with the package zstandard (the extra ``paceline[zstd]``)."""

    suffix, name = ".zst", "zstd"
    magics = (b"\x28\xb5\x2f\xfd",)
    chunk_bytes = 1 << 13  # limits the text per call, because 4 bytes may decompress to 128 KiB

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
        """Return `data` without the skippable frames of parallel compressors."""
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
    return str(path).endswith(tuple(kind.suffix for kind in PACKED))
