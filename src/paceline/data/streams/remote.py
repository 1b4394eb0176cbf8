"""Files at URLs, such as ``s3://bucket/day1.tsv``, with the package fsspec (the extra ``paceline[remote]``)."""

from __future__ import annotations

import contextlib
import io
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import override

from paceline.errors import DataError, UsageError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_Result = TypeVar("_Result")

_FIRST_BLOCK_BYTES = 1 << 20
_BLOCK_BYTES = 4 << 20
_PAUSES_S = (0.2, 1.0, 5.0)
"""The pauses between the attempts to reach a server."""
_PERMANENT = (FileNotFoundError, PermissionError, ImportError, TypeError, ValueError)
"""Errors that another attempt would repeat."""
_MISSING_STATUSES = (404, 410)
_TEMPORARY_STATUSES = (408, 425, 429)
"""Statuses of HTTP for errors of the client (400 to 499) after which another attempt may succeed."""
_MARKS = ("ETag", "etag", "Last-Modified", "LastModified", "last_modified", "mtime", "created", "Content-MD5")
"""Fields in which file systems report the version of a file."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(?:::[A-Za-z][A-Za-z0-9+.-]+)*://")


@dataclass(frozen=True, slots=True)
class FileStatus:
    """The size of a file, and a text that changes if the file changes."""

    num_bytes: int
    version: str


def is_url(path: str | Path) -> bool:
    return isinstance(path, str) and _URL.match(path) is not None


def full_path(path: str | Path) -> str:
    """Return the URL, or the absolute path of a file, for processes with another current folder."""
    return str(path) if is_url(path) else os.path.abspath(path)


def check_local(path: str | Path, format: str) -> None:
    if is_url(path):
        raise UsageError(f"{path}: {format} files are memory-mapped and cannot be read from a URL. Copy the file first")


def stat_url(url: str) -> FileStatus:
    with _data_errors(url):
        system, path = _find_system(url)
        system.invalidate_cache(path)  # cached listings may have old sizes
        found = _try_again(lambda: system.info(path))
        version = " ".join([str(system.ukey(path)), *(str(found[mark]) for mark in _MARKS if mark in found)])
    if found["type"] != "file":
        raise DataError(f"{url} is a folder, not a data file. Pass the files in it, as in {url.rstrip('/')}/*")
    if found["size"] is None:
        raise DataError(f"{url}: the server does not report the size of the file. Copy the file first")
    if not found["size"]:
        raise DataError(f"{url} is empty: it has no line or row to read")
    return FileStatus(int(found["size"]), version)


def open_url(url: str) -> RemoteFile:
    """Open a file with a cache that reads ahead, for many small reads as of Parquet files."""
    with _data_errors(url):
        return RemoteFile(url, cache="readahead")


def expand_url(pattern: str) -> list[str]:
    """Return the URLs that match a pattern, or a URL that is not a pattern. Raises DataError if nothing matches."""
    from glob import has_magic

    if not has_magic(_URL.sub("", pattern)):
        return [pattern]
    with _data_errors(pattern):
        system, path = _find_system(pattern)
        if _try_again(lambda: system.exists(path)):
            return [pattern]
        found = _try_again(lambda: system.glob(path, detail=True))
        matching = [name for name, status in found.items() if status["type"] == "file"]
        if not matching:
            raise DataError(f"{pattern}: no file matches")
        return sorted(map(system.unstrip_protocol, matching))


class RemoteFile(io.RawIOBase):
    """A file at a URL, for random access. If a read fails, it is repeated with a new connection."""

    def __init__(self, url: str, *, cache: str = "none") -> None:
        super().__init__()
        self._url = url
        self._cache = cache
        self._position = 0
        self._file: Any = None
        self.num_bytes: int = _try_again(self._open)

    def _open(self) -> int:
        system, path = _find_system(self._url)
        self._file = system.open(path, "rb", block_size=_BLOCK_BYTES, cache_type=self._cache)
        size: int = self._file.seek(0, io.SEEK_END)
        return size

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._position

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.num_bytes}[whence]
        self._position = max(start + offset, 0)
        return self._position

    @override
    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        data = _try_again(lambda: self._read(len(view)))
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _read(self, num_bytes: int) -> bytes:
        if self._file is None:
            self._open()
        try:
            self._file.seek(self._position)
            data: bytes = self._file.read(num_bytes)
        except BaseException:
            self._close_file()
            raise
        return data

    def _close_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(Exception):
                self._file.close()
            self._file = None

    @override
    def close(self) -> None:
        self._close_file()
        super().close()


class UrlStream:
    """The bytes of a file at a URL. A thread reads the next block while the caller uses the current block."""

    def __init__(self, url: str) -> None:
        self.path = url
        self.position = 0
        with _data_errors(url):
            self._file = RemoteFile(url)
        self._block = memoryview(b"")  # the bytes from `position`
        self._next: Future[bytes] | None = None
        self._is_sequential = False

    def readinto(self, view: memoryview) -> int:
        if not self._block:
            with _data_errors(self.path):
                self._block = memoryview(self._read_block())
        count = min(len(view), len(self._block))
        view[:count] = self._block[:count]
        self._block = self._block[count:]
        self.position += count
        return count

    def _read_block(self) -> bytes:
        """Return the next block, and start to read the block after it. After a seek, read only one block at first."""
        if self._next is None:
            data = self._file.read(_BLOCK_BYTES if self._is_sequential else _FIRST_BLOCK_BYTES) or b""
        else:
            data = self._next.result()
            self._next = None
        if self._is_sequential and self._file.tell() < self._file.num_bytes:
            self._next = Future()
            threading.Thread(target=self._read_ahead, args=(self._next,), name="paceline-url", daemon=True).start()
        self._is_sequential = True
        return data

    def _read_ahead(self, block: Future[bytes]) -> None:
        try:
            block.set_result(self._file.read(_BLOCK_BYTES) or b"")
        except BaseException as error:
            block.set_exception(error)

    def seek(self, position: int) -> None:
        """Move to `position`, or to the end if the file is shorter."""
        position = min(position, self._file.num_bytes)
        skipped = position - self.position
        if 0 <= skipped <= len(self._block):
            self._block = self._block[skipped:]
        else:
            if self._next is not None:
                self._next.exception()  # wait for the thread, which moves in the same file
            self._file.seek(position)
            self._block, self._next, self._is_sequential = memoryview(b""), None, False
        self.position = position

    def close(self) -> None:
        if self._next is None:
            self._file.close()
        else:
            self._next.add_done_callback(lambda _: self._file.close())


def _try_again(action: Callable[[], _Result]) -> _Result:
    """Return the result of an action. If it fails, repeat it after pauses, because connections break."""
    for pause_s in _PAUSES_S:
        try:
            return action()
        except Exception as error:
            if _is_permanent(error):
                raise
        time.sleep(pause_s)
    return action()


def _is_permanent(error: BaseException) -> bool:
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        error = error.__cause__  # fsspec reports an unreachable server as a missing file
    status = _http_status(error)
    return isinstance(error, _PERMANENT) or (400 <= status < 500 and status not in _TEMPORARY_STATUSES)


def _http_status(error: BaseException | None) -> int:
    """Return the status in an error of aiohttp; 0 for other errors."""
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else 0


def _find_system(url: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError as error:
        raise UsageError(
            f"reading {url} needs fsspec, which is not installed: pip install 'paceline[remote]'"
        ) from error
    system, path = fsspec.core.url_to_fs(url)
    return system, path


@contextlib.contextmanager
def _data_errors(url: str) -> Iterator[None]:
    try:
        yield
    except (DataError, UsageError):
        raise
    except FileNotFoundError as error:
        is_missing = error.__cause__ is None or _http_status(error.__cause__) in _MISSING_STATUSES
        cause = "" if is_missing else f", or cannot be reached: {error.__cause__}"
        raise DataError(f"{url} does not exist{cause}") from error
    except PermissionError as error:
        raise DataError(f"{url} cannot be read: permission is denied") from error
    except ImportError as error:
        raise UsageError(f"{url} cannot be read: {error}") from error
    except Exception as error:
        if "range requests" in str(error):
            raise DataError(
                f"{url} cannot be read, because the server does not support byte ranges. Pass simplecache::{url}"
            ) from error
        text = str(error).partition("\n")[0] or type(error).__name__
        raise DataError(f"{url} cannot be read: {text}") from error
