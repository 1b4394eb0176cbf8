"""Memory in pages of the system: what grows in place, for the wide rows of a bucket, and what is written in parts only.

On Linux it is an anonymous mapping that `mremap` enlarges by moving page tables, so growth copies nothing,
and what was never written takes no memory. Elsewhere it is copied.
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
# Python names it from 3.13 on. Without it Linux refuses a mapping larger than the memory, however little is written.
_LINUX_NORESERVE = 0x4000 if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") else 0
_NORESERVE = getattr(mmap, "MAP_NORESERVE", _LINUX_NORESERVE)
_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)
_HUGE_LEAST_BYTES = 8 << 20  # of memory in use at a stretch: four huge pages
_FORGET = getattr(mmap, "MADV_DONTNEED", None)


def _map_pages(num_bytes: int, flags: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, max(1, num_bytes), flags=flags) if flags else mmap.mmap(-1, max(1, num_bytes))
    except (OSError, OverflowError):
        raise MemoryError(f"no memory for {num_bytes} bytes") from None


class Pages:
    """`num_bytes` of zeroed memory that starts on a page; `address` is valid until the next `resize`.

    Raises MemoryError, as `resize` does, which then has changed nothing.
    """

    def __init__(self, num_bytes: int) -> None:
        self._map = _map_pages(num_bytes, _FLAGS)
        self.num_bytes = num_bytes
        self.address = self._find_address()

    def resize(self, num_bytes: int) -> None:
        """Make it larger; what is there stays, the address may change."""
        try:
            self._map.resize(num_bytes)
        except (
            SystemError,
            ValueError,
            OSError,
        ):  # no mremap here; where memory is out there is none for a copy either
            larger = _map_pages(num_bytes, _FLAGS)
            larger[: self.num_bytes] = self._map[:]
            self._map.close()
            self._map = larger
        self.num_bytes = num_bytes
        self.address = self._find_address()

    def _find_address(self) -> int:
        view = ctypes.c_char.from_buffer(self._map)
        address = ctypes.addressof(view)
        del view  # a mapping cannot be resized while a view of it lives
        return address


class LazyFloats:
    """`array`, float32 [length], zeros at first; a page of it takes memory from its first write on, until forgotten.

    Raises MemoryError where the system would not give memory for `used` elements, which are the first to be written.
    """

    def __init__(self, length: int, used: int) -> None:
        _map_pages(4 * used, _FLAGS).close()  # only to be told: of the whole, which is not reserved, one is not
        self._map = _map_pages(4 * length, _FLAGS and _FLAGS | _NORESERVE)
        self.array: npt.NDArray[np.float32] = np.frombuffer(self._map, np.float32, length)

    def expect(self, start: int, stop: int) -> None:
        """Say that all the elements [start, stop) will be written: in huge pages, where there are enough of them."""
        # Not for the whole mapping: a huge page of which a small part is written takes 2 MiB all the same.
        if 4 * (stop - start) >= _HUGE_LEAST_BYTES:
            self._advise(_HUGE, start, stop)

    def forget(self, start: int, stop: int) -> None:
        """Give back the pages that lie within the elements [start, stop); what these read as is not defined."""
        self._advise(_FORGET, start, stop)

    def _advise(self, advice: int | None, start: int, stop: int) -> None:
        first = -(-4 * start // PAGE_BYTES) * PAGE_BYTES
        length = (4 * stop - first) // PAGE_BYTES * PAGE_BYTES
        if advice is not None and length > 0:
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self._map.madvise(advice, first, length)
