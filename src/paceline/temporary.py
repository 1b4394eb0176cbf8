"""Create temporary folders that are removed later even if their process was killed.

A folder is removed on close, at its garbage collection, or at the interpreter's exit. Each process locks its folders
(``flock``) while it lives. A process that creates a folder also removes the unlocked folders of its user, because their
processes were killed.
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
    """Return a regular expression for the names of folders of one kind (default: any kind)."""
    return rf"{_prefix(kind)}\w+{re.escape(_SUFFIX)}"


def _prefix(kind: str) -> str:
    return f"paceline-{kind}-"


_NAME: Final = re.compile(pattern_of())


class _Lock(enum.Enum):
    """The process that holds a folder's lock: this process, another, or none."""

    OWN = enum.auto()
    OF_ANOTHER = enum.auto()
    NONE_HERE = enum.auto()
    """The file system has no locks."""


class TemporaryFolder(Closing):
    """A private folder of this user. Use as a context manager, or close it."""

    def __init__(self, path: Path, lock: int) -> None:
        """Own an existing folder, locked by this descriptor; use :meth:`make` to create one."""
        self.path = path
        self._removal = weakref.finalize(self, _remove, path, lock, os.getpid())

    @classmethod
    def make(cls, kind: str, parent: Path | None = None) -> TemporaryFolder:
        """Create a folder in `parent` (default: the folder for temporary files), with `kind` in its name.

        Removes folders of killed processes there. Raises OSError.
        """
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        remove_abandoned(parent)
        while True:
            path = Path(tempfile.mkdtemp(prefix=_prefix(kind), suffix=_SUFFIX, dir=parent))
            lock = _open(path)
            if lock is None:
                continue  # another process removed the folder as abandoned before it was locked
            if _lock(lock) is not _Lock.OF_ANOTHER and is_at(path, lock):
                return cls(path, lock)
            os.close(lock)  # another process is removing the folder as abandoned, so create another one

    @override
    def close(self) -> None:
        """Remove the folder and its contents. Idempotent."""
        self._removal()


def remove_abandoned(parent: Path) -> None:
    """Remove the folders in `parent` whose processes have ended."""
    with contextlib.suppress(OSError):  # a folder that cannot be removed does no harm
        for entry in os.scandir(parent):
            if _NAME.fullmatch(entry.name) and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                _remove_if_abandoned(Path(entry.path))


def is_at(path: Path, number: int) -> bool:
    """Return whether a path still refers to the file of a descriptor."""
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
    """Lock the folder unless another process holds the lock."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _Lock.OF_ANOTHER
    except OSError:
        return _Lock.NONE_HERE
    return _Lock.OWN


def _remove(path: Path, lock: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has a copy of this object, and must not remove the folder
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.close(lock)
