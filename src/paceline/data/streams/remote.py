"""Files at URLs, such as ``s3://bucket/day1.tsv``, by the package fsspec (the extra ``paceline[remote]``)."""

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
"""By what file systems tell that a file is another one, where they do."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(?:::[A-Za-z][A-Za-z0-9+.-]+)*://")


@dataclass(frozen=True, slots=True)
class FileStatus:
    """How large a file is, and a text that is another one once the file has changed."""

    num_bytes: int
    version: str


def is_url(path: str | Path) -> bool:
    """Whether a file is named by a URL."""
    return isinstance(path, str) and _URL.match(path) is not None


def full_path(path: str | Path) -> str:
    """The name by which other processes know a file."""
    return str(path) if is_url(path) else os.path.abspath(path)


def check_local(path: str | Path, format: str) -> None:
    """Raise UsageError for a URL of a file that is mapped into memory."""
    if is_url(path):
        raise UsageError(f"{path}: {format} files are mapped into memory, which goes with files alone: copy it first")


def stat_url(url: str) -> FileStatus:
    """The status of a non-empty file; :exc:`DataError` in a sentence for anything else."""
    with _problems_of(url):
        system, path = _find_system(url)
        system.invalidate_cache(path)  # of listings, which would say what once was
        found = system.info(path)
        version = " ".join([str(system.ukey(path)), *(str(found[mark]) for mark in _MARKS if mark in found)])
    if found["type"] != "file":
        raise DataError(f"{url} is a folder, not a data file: name the files in it, as in {url.rstrip('/')}/*")
    if found["size"] is None:
        raise DataError(f"{url}: the server does not say how large the file is: copy it first")
    if not found["size"]:
        raise DataError(f"{url} is empty: it has no line to read")
    return FileStatus(int(found["size"]), version)


def open_url(url: str) -> Any:
    """A file object to read from, with positions."""
    with _problems_of(url):
        system, path = _find_system(url)
        return system.open(path, "rb", block_size=_READ_AHEAD, cache_type="readahead")


def expand_url(pattern: str) -> list[str]:
    """The URLs that a pattern of `*`, `?` or `[...]` stands for, in order; of one that is none, itself.

    Raises DataError where no file fits.
    """
    from glob import has_magic

    if not has_magic(_URL.sub("", pattern)):
        return [pattern]
    with _problems_of(pattern):
        system, path = _find_system(pattern)
        if system.exists(path):
            return [pattern]
        fitting = [name for name, status in system.glob(path, detail=True).items() if status["type"] == "file"]
        if not fitting:
            raise DataError(f"no file fits {pattern}")
        return sorted(map(system.unstrip_protocol, fitting))


class UrlStream:
    """The bytes of a file at a URL."""

    def __init__(self, url: str) -> None:
        self.path = url
        self.position = 0
        self._file = open_url(url)
        with _problems_of(url):
            self._num_bytes = self._file.seek(0, os.SEEK_END)
            self._file.seek(0)

    def readinto(self, view: memoryview) -> int:
        """Fill `view` as far as one read does."""
        with _problems_of(self.path):
            data = self._file.read(len(view))
        view[: len(data)] = data
        self.position += len(data)
        return len(data)

    def seek(self, position: int) -> None:
        """Go to `position`, or to the end if it lies behind that."""
        with _problems_of(self.path):
            self.position = self._file.seek(min(position, self._num_bytes))

    def close(self) -> None:
        """Close the file; again is allowed."""
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
def _problems_of(url: str) -> Iterator[None]:
    """What fsspec and the packages behind it raise, which is of any kind, as :exc:`DataError`."""
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
