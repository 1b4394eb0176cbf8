"""A piece of memory that the ranks of one host share. It has no name that could outlive them.

On Linux it is an anonymous file (``memfd_create``) that the others open through ``/proc``; elsewhere a temporary file
that is unlinked as soon as all have opened it. So nothing is left in ``/dev/shm`` or anywhere else, whoever is killed,
and a small or full ``/dev/shm`` (64 MB in a container) does not matter.

Nobody can be led to map something else: what is opened must be such a file, of this user and of the process that it
is said to be of.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import stat
import tempfile
from typing import Final

import numpy as np

from paceline.closing import Closing
from paceline.errors import CollectiveError

_NAME: Final = "paceline"


class SegmentError(CollectiveError):
    """Memory could not be shared; the ranks talk over sockets instead."""


class Segment(Closing):
    """Shared memory, mapped; :attr:`address` is where it begins in this process."""

    def __init__(self, descriptor: int, num_bytes: int, path: str) -> None:
        self._descriptor = descriptor
        self.num_bytes = num_bytes
        self.path = path
        """Where the other ranks open it, until :meth:`hide`."""
        self._map = mmap.mmap(descriptor, num_bytes)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.address: int = self.bytes.ctypes.data

    @classmethod
    def create(cls, num_bytes: int) -> Segment:
        """Make a segment of zeros. Raises CollectiveError if there is no memory for it."""
        try:
            if hasattr(os, "memfd_create"):
                descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
                path = f"/proc/{os.getpid()}/fd/{descriptor}"
            else:
                descriptor, path = tempfile.mkstemp(prefix=f"{_NAME}-")
        except OSError as error:
            raise SegmentError(f"cannot make shared memory: {error.strerror}") from None
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, num_bytes)  # else a lack of memory would be a SIGBUS later
            else:
                os.ftruncate(descriptor, num_bytes)
            return cls(descriptor, num_bytes, path)
        except OSError as error:
            os.close(descriptor)
            _unlink(path)
            raise SegmentError(
                f"cannot have {num_bytes >> 20} MB of shared memory ({error.strerror}); free some memory or use fewer "
                "ranks on this host"
            ) from None

    @classmethod
    def open(cls, path: str, num_bytes: int, *, pid: int) -> Segment:
        """Open the segment of the process ``pid``, another rank. Raises SegmentError."""
        if hasattr(os, "memfd_create") and not re.fullmatch(f"/proc/{pid}/fd/[0-9]+", path):
            raise SegmentError(f"got {path!r} for the shared memory of another rank, expected one of process {pid}")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | (0 if path.startswith("/proc/") else os.O_NOFOLLOW))
        except OSError as error:
            raise SegmentError(f"cannot open the shared memory of another rank ({error.strerror})") from None
        try:
            _check(descriptor, path, num_bytes)
            return cls(descriptor, num_bytes, "")
        except OSError as error:
            os.close(descriptor)
            raise SegmentError(f"cannot map the shared memory of another rank ({error.strerror})") from None
        except SegmentError:
            os.close(descriptor)
            raise

    def hide(self) -> None:
        """Make it impossible to open: all have it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        _unlink(self.path)
        self.path = ""

    def close(self) -> None:
        """Unmap it. Idempotent."""
        self.hide()
        self.bytes = np.zeros(0, np.uint8)
        with contextlib.suppress(BufferError):  # somebody still has a view: it goes with the last
            self._map.close()


def _check(descriptor: int, path: str, num_bytes: int) -> None:
    """Raise SegmentError if this is no file that :meth:`Segment.create` makes, of this user."""
    found = os.fstat(descriptor)
    is_own = found.st_uid == os.getuid() and stat.S_ISREG(found.st_mode)
    if hasattr(os, "memfd_create"):
        # No file with a name has no links and this one: memory that some process has made as create() does.
        is_ours = found.st_nlink == 0 and os.readlink(f"/proc/self/fd/{descriptor}") == f"/memfd:{_NAME} (deleted)"
    else:
        is_ours = not found.st_mode & 0o077 and os.path.basename(path).startswith(f"{_NAME}-")
    if not (is_own and is_ours):
        raise SegmentError(f"what another rank says is its shared memory, {path!r}, is something else: not mapped")
    if found.st_size != num_bytes:
        raise SegmentError("the shared memory of another rank has another size")


def _unlink(path: str) -> None:
    if path and not path.startswith("/proc/"):
        with contextlib.suppress(OSError):
            os.unlink(path)
