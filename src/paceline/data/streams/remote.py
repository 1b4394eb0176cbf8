"""Files at URLs, such as ``s3://bucket/day1.tsv``, with the package fsspec (the extra ``paceline[remote]``)."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import DataError, UsageError

_READ_AHEAD = 4 << 20
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
    """Return a file's name in a form that other processes can use."""
    return str(path) if is_url(path) else os.path.abspath(path)


def check_local(path: str | Path, format: str) -> None:
    if is_url(path):
        raise UsageError(f"{path}: {format} files are memory-mapped and cannot be read from a URL. Copy the file first")


def stat_url(url: str) -> FileStatus:
    with _data_errors(url):
        system, path = _find_system(url)
        system.invalidate_cache(path)  # cached listings may have old sizes
        found = system.info(path)
        version = " ".join([str(system.ukey(path)), *(str(found[mark]) for mark in _MARKS if mark in found)])
    if found["type"] != "file":
        raise DataError(f"{url} is a folder, not a data file. Pass the files in it, as in {url.rstrip('/')}/*")
    if found["size"] is None:
        raise DataError(f"{url}: the server does not report the size of the file. Copy it first")
    if not found["size"]:
        raise DataError(f"{url} is empty: it has no line or row to read")
    return FileStatus(int(found["size"]), version)


def open_url(url: str) -> Any:
    with _data_errors(url):
        system, path = _find_system(url)
        return system.open(path, "rb", block_size=_READ_AHEAD, cache_type="readahead")


def expand_url(pattern: str) -> list[str]:
    """Return the URLs that match a pattern, or a URL without a pattern. Raises DataError if none matches."""
    from glob import has_magic

    if not has_magic(_URL.sub("", pattern)):
        return [pattern]
    with _data_errors(pattern):
        system, path = _find_system(pattern)
        if system.exists(path):
            return [pattern]
        matching = [name for name, status in system.glob(path, detail=True).items() if status["type"] == "file"]
        if not matching:
            raise DataError(f"{pattern}: no file matches")
        return sorted(map(system.unstrip_protocol, matching))


class UrlStream:
    """The bytes of a file at a URL."""

    def __init__(self, url: str) -> None:
        self.path = url
        self.position = 0
        self._file = open_url(url)
        with _data_errors(url):
            self._num_bytes = self._file.seek(0, os.SEEK_END)
            self._file.seek(0)

    def readinto(self, view: memoryview) -> int:
        with _data_errors(self.path):
            data = self._file.read(len(view))
        view[: len(data)] = data
        self.position += len(data)
        return len(data)

    def seek(self, position: int) -> None:
        """Move to `position`, or to the end if the file is shorter."""
        with _data_errors(self.path):
            self.position = self._file.seek(min(position, self._num_bytes))

    def close(self) -> None:
        self._file.close()


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
        cause = "" if error.__cause__ is None else f", or cannot be reached: {error.__cause__}"
        raise DataError(f"{url} does not exist{cause}") from error
    except PermissionError as error:
        raise DataError(f"{url} cannot be read: permission is denied") from error
    except ImportError as error:
        raise UsageError(f"{url} cannot be read: {error}") from error
    except Exception as error:
        text = str(error).partition("\n")[0] or type(error).__name__
        raise DataError(f"{url} cannot be read: {text}") from error
