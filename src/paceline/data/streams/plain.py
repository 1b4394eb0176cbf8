"""Read the bytes of one file from any position, and describe errors about files."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Protocol

from paceline.data.streams.remote import FileStatus, UrlStream, is_url, stat_url
from paceline.errors import DataError


def stat_file(path: str | Path) -> FileStatus:
    """Return the status of a regular, readable, nonempty file. Raises DataError for other files."""
    if is_url(path):
        return stat_url(str(path))
    try:
        status = os.stat(path)
        if os.path.isdir(path):
            raise DataError(f"{path} is a folder, not a data file. Pass the files in it, as in {path}/*")
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        raise _unreadable(path, error) from error
    if os.path.isfile(path) and status.st_size == 0:
        raise DataError(f"{path} is empty: it has no line or row to read")
    return FileStatus(status.st_size, str(status.st_mtime_ns))


def open_bytes(path: str) -> ByteStream:
    return UrlStream(path) if is_url(path) else PlainStream(path)


def _unreadable(path: str | Path, error: OSError) -> DataError:
    if error.errno == errno.ENOENT:
        return DataError(f"{path} does not exist")
    if error.errno in (errno.EACCES, errno.EPERM):
        return DataError(f"{path} cannot be read: permission is denied")
    return DataError(f"{path} cannot be read: {error.strerror or error}")


class ByteStream(Protocol):
    """The text of a file from `position`."""

    position: int

    def readinto(self, view: memoryview) -> int:
        """Fill the start of `view`. Return the number of bytes, which is 0 only at the end of the file."""

    def seek(self, position: int) -> None:
        """Move to `position`, or to the end if the file is shorter."""

    def close(self) -> None:
        """Close the file. May be called again."""


class PlainStream:
    """An uncompressed file. It is a descriptor, because Python warns if a file object is not closed."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.position = 0
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise _unreadable(path, error) from error

    def readinto(self, view: memoryview) -> int:
        try:
            count = os.readv(self._descriptor, [view])
        except OSError as error:
            raise _unreadable(self.path, error) from error
        self.position += count
        return count

    def seek(self, position: int) -> None:
        position = min(position, os.fstat(self._descriptor).st_size)
        self.position = os.lseek(self._descriptor, position, os.SEEK_SET)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()
