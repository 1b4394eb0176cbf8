"""Temporary folders that do not outlast the process that made them, however it ends.

A folder is removed when it is closed, when nobody refers to it any more, or when the interpreter ends. A process that
is killed does none of that: so a folder is locked (``flock``) as long as its process lives, and whoever makes the next
one removes those of the same user that nobody has locked.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
import re
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Final

from typing_extensions import override

from paceline.closing import Closing

_SUFFIX: Final = ".tmp"


def pattern_of(kind: str = "[a-z]+") -> str:
    """Return the regular expression of the names of folders of a kind, or of any."""
    return rf"{_prefix(kind)}\w+{re.escape(_SUFFIX)}"


def _prefix(kind: str) -> str:
    return f"paceline-{kind}-"


_NAME: Final = re.compile(pattern_of())


class _Lock(enum.Enum):
    """Who holds the lock of a folder."""

    OWN = enum.auto()
    OF_ANOTHER = enum.auto()
    NONE_HERE = enum.auto()
    """The file system has no locks."""


class TemporaryFolder(Closing):
    """A folder that only this user can enter. Use it as a context manager, or close it."""

    def __init__(self, path: Path, lock: int) -> None:
        """Take over a folder that is there, locked by this descriptor; :meth:`make` makes one."""
        self.path = path
        self._removal = weakref.finalize(self, _remove, path, lock, os.getpid())

    @classmethod
    def make(cls, kind: str, parent: Path | None = None) -> TemporaryFolder:
        """Make one in `parent`, or where temporary files are; `kind` is the word for its content in its name.

        Folders that killed processes have left there are removed. Raises OSError.
        """
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        remove_abandoned(parent)
        while True:
            path = Path(tempfile.mkdtemp(prefix=_prefix(kind), suffix=_SUFFIX, dir=parent))
            lock = _open(path)
            if lock is None:
                continue  # another process took it for one that was left, before it was locked
            if _lock(lock) is not _Lock.OF_ANOTHER and is_at(path, lock):
                return cls(path, lock)
            os.close(lock)  # that process is about to remove it, or has done so

    @override
    def close(self) -> None:
        """Remove it with all that is in it. Idempotent."""
        self._removal()


def remove_abandoned(parent: Path) -> None:
    """Remove the folders in `parent` whose processes are gone."""
    with contextlib.suppress(OSError):  # nothing depends on it
        for entry in os.scandir(parent):
            if _NAME.fullmatch(entry.name) and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                _remove_if_abandoned(Path(entry.path))


def is_at(path: Path, number: int) -> bool:
    """Return whether what a descriptor is of still lies at a path."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(number))
    return False


def _remove_if_abandoned(path: Path) -> None:
    number = _open(path)
    if number is None:
        return
    try:
        if _lock(number) is _Lock.OWN and is_at(path, number):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(number)


def _open(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None


def _lock(number: int) -> _Lock:
    """Lock the folder for this process, if no other has."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _Lock.OF_ANOTHER
    except OSError:
        return _Lock.NONE_HERE
    return _Lock.OWN


def _remove(path: Path, lock: int, pid: int) -> None:
    if os.getpid() == pid:  # and not in a fork, which has a copy of this object
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.close(lock)
