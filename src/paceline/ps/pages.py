"""Memory that grows in place: what holds the wide rows of a bucket.

On Linux it is an anonymous mapping that `mremap` enlarges by moving page tables, so growth copies nothing,
and what was never written takes no memory. Elsewhere it is copied.
"""

from __future__ import annotations

import ctypes
import mmap

_FLAGS = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", getattr(mmap, "MAP_ANON", 0))


class Pages:
    """`num_bytes` of zeroed memory that starts on a page; `address` is valid until the next `resize`."""

    def __init__(self, num_bytes: int) -> None:
        self._map = mmap.mmap(-1, num_bytes, flags=_FLAGS) if _FLAGS else mmap.mmap(-1, num_bytes)
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
        ):  # no mremap here: OSError where memory is out is raised again below
            larger = mmap.mmap(-1, num_bytes, flags=_FLAGS) if _FLAGS else mmap.mmap(-1, num_bytes)
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
