"""Memory for the rows of a server's sparse tables: up to a limit, beyond which they lie in files.

Whom it talks to: stores ask :class:`RowMemory` for a block whenever a bucket grows. A block beyond the limit is a
mapping of a file that has no name (``O_TMPFILE``, or unlinked at once), so that nothing is left of it when the process
ends, however that comes about. The system keeps of it in memory what there is room for and writes the rest out; kernels
read and write it as they do any other memory. Its room on the disk is taken when the block is made: a full disk refuses
the block, and never ends the process in the midst of a write.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import tempfile
import weakref
from typing import Final

import numpy as np

from paceline.kernels.index import LINE_BYTES
from paceline.tables.memory.limit import MemoryLimit, most_mappings, system_may_refuse
from paceline.tables.memory.reading import ReadAhead

_SMALL_BYTES: Final = 1 << 14  # blocks below stay in memory: a file for each of 512 small buckets is not worth it
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED: Final = ctypes.c_void_p(-1).value
_logger = logging.getLogger("paceline.tables")


class SpillError(MemoryError):
    """The folder for rows beyond the limit has no room for more; nothing has changed."""


class RowBlock:
    """`num_bytes` of zeroed memory from `address` on, a multiple of a cache line; it lives as long as this object."""

    __slots__ = ("__weakref__", "_memory", "address", "is_spilled", "num_bytes")

    def __init__(self, address: int, num_bytes: int, memory: object, *, is_spilled: bool) -> None:
        self.address = address
        self.num_bytes = num_bytes
        self._memory = memory
        self.is_spilled = is_spilled

    def will_be_read(self) -> None:
        """Say that all of it is about to be read, from its begin to its end."""
        if self.is_spilled:
            _libc.madvise(self.address, self.num_bytes, mmap.MADV_WILLNEED)


class RowMemory:
    """Blocks for rows, of which those beyond the `limit` lie in files; None: there is no limit."""

    def __init__(self, limit: MemoryLimit | None = None) -> None:
        self.limit = limit
        self.in_memory_bytes = 0
        """Of the blocks in memory; 0 where there is no limit."""
        self.spilled_bytes = 0
        """Of the blocks in files."""
        self.read_ahead = ReadAhead()
        self._has_told = False

    def may_refuse(self) -> bool:
        """Return whether there may be no memory for a block: see :func:`system_may_refuse`."""
        return self.limit is not None or system_may_refuse()

    def zeros(self, num_bytes: int) -> RowBlock:
        """Return a new block. Raises MemoryError; SpillError if there is no room on the disk."""
        limit = self.limit
        if limit is None:
            return _block_in_memory(num_bytes)
        if num_bytes >= _SMALL_BYTES and self.in_memory_bytes + num_bytes > limit.num_bytes:
            block = _block_in_file(limit.spill_dir, num_bytes)
            self._tell(limit)
        else:
            block = _block_in_memory(num_bytes)
        self._count(num_bytes, block.is_spilled)
        weakref.finalize(block, self._count, -num_bytes, block.is_spilled).atexit = False
        return block

    def enlarged(self, block: RowBlock, num_bytes: int) -> RowBlock:
        """Return a new block that begins with what `block` holds."""
        larger = self.zeros(num_bytes)
        block.will_be_read()
        ctypes.memmove(larger.address, block.address, min(block.num_bytes, num_bytes))
        return larger

    def _count(self, num_bytes: int, is_spilled: bool) -> None:
        if is_spilled:
            self.spilled_bytes += num_bytes
        else:
            self.in_memory_bytes += num_bytes

    def _tell(self, limit: MemoryLimit) -> None:
        if not self._has_told:
            self._has_told = True
            _logger.warning(
                "paceline server: rows take more than the memory limit of %.3g MB: more of them lie in files in %s "
                "from now on, which is slower",
                limit.num_bytes / 1e6,
                limit.spill_dir,
            )


def _block_in_memory(num_bytes: int) -> RowBlock:
    memory = np.zeros(num_bytes + LINE_BYTES, np.uint8)
    address = memory.ctypes.data
    return RowBlock(address + -address % LINE_BYTES, num_bytes, memory, is_spilled=False)


def _block_in_file(folder: str, num_bytes: int) -> RowBlock:
    """Return a block in a file without a name. The mapping alone keeps the file: it costs no file descriptor."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            number = file.fileno()
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(number, 0, num_bytes)
            else:
                os.ftruncate(number, num_bytes)
            address = _libc.mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, number, 0)
            if address == _FAILED:
                raise why_not_mapped(ctypes.get_errno())
    except OSError as error:
        raise SpillError(f"{num_bytes / 1e6:.3g} MB of rows find no room in {folder}: {error.strerror}") from None
    _libc.madvise(address, num_bytes, mmap.MADV_RANDOM)
    mapping = _Mapping(address)
    weakref.finalize(mapping, _libc.munmap, address, num_bytes).atexit = False
    return RowBlock(address, num_bytes, mapping, is_spilled=True)


def why_not_mapped(number: int) -> OSError:
    """Return why a file could not be mapped, given the number of the system's error."""
    why = os.strerror(number)
    if number == errno.ENOMEM and (most := most_mappings()) is not None:
        why = f"{why}, or this process has all the {most:,} mappings that the system allows (vm.max_map_count)"
    return OSError(number, why)


class _Mapping:
    """A mapping that goes with this object."""

    __slots__ = ("__weakref__", "address")

    def __init__(self, address: int) -> None:
        self.address = address
