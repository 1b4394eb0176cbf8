"""Lock a directory for one writing process, because concurrent runs would remove each other's files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import weakref
from pathlib import Path

from paceline.errors import UsageError
from paceline.temporary import is_at

LOCK = ".lock"
"""The name of the locked file. It exists while the directory is in use, and remains after a crash."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
"""Errors of file systems without locks. Directories on them are used without a lock."""


class DirectoryLock:
    """Exclusive use of a directory until :meth:`release` or the end of the process."""

    def __init__(self, path: Path, number: int) -> None:
        self._path = path
        self._release = weakref.finalize(self, _release, path, number)

    @classmethod
    def take(cls, folder: Path) -> DirectoryLock:
        path = folder / LOCK
        while True:
            number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
            try:
                _lock(folder, number)
                if is_at(path, number):
                    os.truncate(number, 0)
                    os.write(number, f"process {os.getpid()} on {socket.gethostname()}".encode())
                    return cls(path, number)
            except BaseException:
                os.close(number)
                raise
            os.close(number)  # another process removed the file, so this lock has no effect

    def release(self) -> None:
        self._release()


def _lock(folder: Path, number: int) -> None:
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(number, 200, 0).decode(errors="replace")
        description = f" ({holder})" if holder and holder.isprintable() else ""
        raise UsageError(
            f"{folder} is in use by another run{description}, and two runs in one directory would remove each other's "
            "files. Use another directory, or wait until the other run ends"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _release(path: Path, number: int) -> None:
    with contextlib.suppress(OSError):
        if is_at(path, number):
            path.unlink()
    os.close(number)
