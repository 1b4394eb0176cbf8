"""Create memory segments that the ranks of one host share. No file remains after the ranks have ended.

On Linux a segment is an anonymous file (``memfd_create``), which the other ranks open through ``/proc``. On other
systems a segment is a temporary file, which is deleted as soon as all ranks have opened it. So killed ranks leave no
files. The size of ``/dev/shm`` does not limit a segment.

Before a rank maps a segment, it checks that the expected process of this user created the file.
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
    """Raised if a segment cannot be created or opened. The ranks then exchange data through sockets."""


class Segment(Closing):
    """A segment of shared memory, mapped at :attr:`address` in this process."""

    def __init__(self, descriptor: int, num_bytes: int, path: str) -> None:
        self._descriptor = descriptor
        self.num_bytes = num_bytes
        self.path = path
        """The path by which other ranks open the segment. It is valid until :meth:`hide` is called."""
        self._map = mmap.mmap(descriptor, num_bytes)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.address: int = self.bytes.ctypes.data

    @classmethod
    def create(cls, num_bytes: int) -> Segment:
        """Create a segment filled with zeros. Raises SegmentError if there is not enough memory."""
        try:
            if hasattr(os, "memfd_create"):
                descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
                path = f"/proc/{os.getpid()}/fd/{descriptor}"
            else:
                descriptor, path = tempfile.mkstemp(prefix=f"{_NAME}-")
        except OSError as error:
            raise SegmentError(f"cannot create shared memory: {error.strerror}") from None
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, num_bytes)  # otherwise a lack of memory would raise SIGBUS later
            else:
                os.ftruncate(descriptor, num_bytes)
            return cls(descriptor, num_bytes, path)
        except OSError as error:
            os.close(descriptor)
            _unlink(path)
            raise SegmentError(
                f"cannot allocate {num_bytes >> 20} MB of shared memory ({error.strerror}); free some memory or use "
                "fewer ranks on this host"
            ) from None

    @classmethod
    def open(cls, path: str, num_bytes: int, *, pid: int) -> Segment:
        """Open the segment that process ``pid`` of another rank created. Raises SegmentError if this fails."""
        if hasattr(os, "memfd_create") and not re.fullmatch(f"/proc/{pid}/fd/[0-9]+", path):
            raise SegmentError(f"got {path!r} for another rank's shared memory, expected a path of process {pid}")
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
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        _unlink(self.path)
        self.path = ""

    def close(self) -> None:
        self.hide()
        self.bytes = np.zeros(0, np.uint8)
        with contextlib.suppress(BufferError):  # raised if memoryviews exist; the memory then remains mapped
            self._map.close()


def _check(descriptor: int, path: str, num_bytes: int) -> None:
    found = os.fstat(descriptor)
    is_own = found.st_uid == os.getuid() and stat.S_ISREG(found.st_mode)
    if hasattr(os, "memfd_create"):
        # Only an anonymous file of memfd_create has this link text and a link count of 0.
        is_segment = found.st_nlink == 0 and os.readlink(f"/proc/self/fd/{descriptor}") == f"/memfd:{_NAME} (deleted)"
    else:
        is_segment = not found.st_mode & 0o077 and os.path.basename(path).startswith(f"{_NAME}-")
    if not (is_own and is_segment):
        raise SegmentError(f"another rank's path {path!r} is not a shared memory segment; it was not mapped")
    if found.st_size != num_bytes:
        raise SegmentError(f"another rank's shared memory has {found.st_size} bytes, expected {num_bytes}")


def _unlink(path: str) -> None:
    if path and not path.startswith("/proc/"):
        with contextlib.suppress(OSError):
            os.unlink(path)
