"""Memory in pages: blocks for wide rows, which grow without a copy, and large arrays that are written in part.

On Linux a block is an anonymous memory mapping. The system call `mremap` enlarges a mapping without a copy, and pages
that were never written use no memory. On other systems a growing block is copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
import sys

import numpy as np
import numpy.typing as npt

PAGE_BYTES = mmap.PAGESIZE
_FLAGS = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", getattr(mmap, "MAP_ANON", 0))
# The value of MAP_NORESERVE, which Python defines since 3.13. Without this flag, Linux rejects a mapping that is larger
# than the machine's memory.
_LINUX_NORESERVE = 0x4000 if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") else 0
_NORESERVE = getattr(mmap, "MAP_NORESERVE", _LINUX_NORESERVE)
_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)
_HUGE_LEAST_BYTES = 8 << 20  # if a range to be written has at least this length, it gets huge pages of 2 MiB
_FORGET = getattr(mmap, "MADV_DONTNEED", None)


def _map_pages(num_bytes: int, flags: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, max(1, num_bytes), flags=flags) if flags else mmap.mmap(-1, max(1, num_bytes))
    except (OSError, OverflowError):
        raise MemoryError(f"no memory for {num_bytes} bytes") from None


class Pages:
    """A block of `num_bytes` zero bytes that begins at a page boundary. `address` is valid until the next `resize`.

    The constructor and `resize` raise MemoryError if there is not enough memory. In this case `resize` changes nothing.
    """

    def __init__(self, num_bytes: int) -> None:
        self._map = _map_pages(num_bytes, _FLAGS)
        self.num_bytes = num_bytes
        self.address = self._find_address()

    def resize(self, num_bytes: int) -> None:
        """Enlarge the memory. The content stays, but the address may change."""
        try:
            self._map.resize(num_bytes)
        except (SystemError, ValueError, OSError):  # mremap is missing, or memory is full and the copy will fail too
            larger = _map_pages(num_bytes, _FLAGS)
            larger[: self.num_bytes] = self._map[:]
            self._map.close()
            self._map = larger
        self.num_bytes = num_bytes
        self.address = self._find_address()

    def _find_address(self) -> int:
        view = ctypes.c_char.from_buffer(self._map)
        address = ctypes.addressof(view)
        del view  # a mapping cannot be resized while a view of it exists
        return address


class LazyFloats:
    """An `array` (float32 [length]) of zeros. A page uses memory only between its first write and :meth:`forget`.

    The constructor raises MemoryError if the system has no memory for the `used` elements that will be written first.
    """

    def __init__(self, length: int, used: int) -> None:
        _map_pages(4 * used, _FLAGS).close()  # this checks the memory: the system never rejects the mapping below
        self._map = _map_pages(4 * length, _FLAGS and _FLAGS | _NORESERVE)
        self.array: npt.NDArray[np.float32] = np.frombuffer(self._map, np.float32, length)

    def expect(self, start: int, stop: int) -> None:
        """Notify the system that all elements [start, stop) will be written, so that large ranges get huge pages."""
        # Other elements get no huge pages, because a huge page uses 2 MiB even if it is only partly written.
        if 4 * (stop - start) >= _HUGE_LEAST_BYTES:
            self._advise(_HUGE, start, stop)

    def forget(self, start: int, stop: int) -> None:
        """Free the pages within elements [start, stop), whose values become undefined."""
        self._advise(_FORGET, start, stop)

    def _advise(self, advice: int | None, start: int, stop: int) -> None:
        first = -(-4 * start // PAGE_BYTES) * PAGE_BYTES
        length = (4 * stop - first) // PAGE_BYTES * PAGE_BYTES
        if advice is not None and length > 0:
            with contextlib.suppress(OSError):  # the system may not support huge pages
                self._map.madvise(advice, first, length)
