"""Memory for the rows of a server's sparse tables: blocks in memory up to a limit, then blocks in files.

When a bucket of a table grows, its store requests a block from :class:`RowMemory`. A block above the limit is a memory
mapping of a file without a name (``O_TMPFILE``, or a file that is deleted immediately). So no file remains, even if the
process is killed. Kernels use the mapping like other memory. The system keeps parts of the file in free memory, and
writes the rest to disk. The disk space is allocated together with the block, so a full disk is reported when a block is
requested. Otherwise a later write to the mapping would kill the process.
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

_SMALL_BYTES: Final = 1 << 14  # smaller blocks stay in memory: a small table should not use 512 files
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED: Final = ctypes.c_void_p(-1).value
_logger = logging.getLogger("paceline.tables")


class SpillError(MemoryError):
    """The folder for rows above the memory limit is full. No row has changed."""


class RowBlock:
    """A block of `num_bytes` zero bytes at `address`, which is a multiple of 64. It is freed with this object."""

    __slots__ = ("__weakref__", "_memory", "address", "is_spilled", "num_bytes")

    def __init__(self, address: int, num_bytes: int, memory: object, *, is_spilled: bool) -> None:
        self.address = address
        self.num_bytes = num_bytes
        self._memory = memory
        self.is_spilled = is_spilled

    def will_be_read(self) -> None:
        if self.is_spilled:
            _libc.madvise(self.address, self.num_bytes, mmap.MADV_WILLNEED)


class RowMemory:
    """Provides blocks for rows. Blocks above the memory `limit` are in files; None means no limit."""

    def __init__(self, limit: MemoryLimit | None = None) -> None:
        self.limit = limit
        self.in_memory_bytes = 0
        """The total size of the blocks in memory. It is counted only if there is a limit; otherwise it is 0."""
        self.spilled_bytes = 0
        """The total size of the blocks in files."""
        self.read_ahead = ReadAhead()
        self._has_warned = False

    def may_refuse(self) -> bool:
        return self.limit is not None or system_may_refuse()

    def zeros(self, num_bytes: int) -> RowBlock:
        """Return a new block of zeros. Raises MemoryError if memory is full, and SpillError if the disk is full."""
        limit = self.limit
        if limit is None:
            return _block_in_memory(num_bytes)
        if num_bytes >= _SMALL_BYTES and self.in_memory_bytes + num_bytes > limit.num_bytes:
            block = _block_in_file(limit.spill_dir, num_bytes)
            self._warn_once(limit)
        else:
            block = _block_in_memory(num_bytes)
        self._count(num_bytes, block.is_spilled)
        weakref.finalize(block, self._count, -num_bytes, block.is_spilled).atexit = False
        return block

    def enlarged(self, block: RowBlock, num_bytes: int) -> RowBlock:
        larger = self.zeros(num_bytes)
        block.will_be_read()
        ctypes.memmove(larger.address, block.address, min(block.num_bytes, num_bytes))
        return larger

    def _count(self, num_bytes: int, is_spilled: bool) -> None:
        if is_spilled:
            self.spilled_bytes += num_bytes
        else:
            self.in_memory_bytes += num_bytes

    def _warn_once(self, limit: MemoryLimit) -> None:
        if not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "paceline server: rows exceed the memory limit of %.3g MB. Further rows are stored in files in %s, "
                "which is slower",
                limit.num_bytes / 1e6,
                limit.spill_dir,
            )


def _block_in_memory(num_bytes: int) -> RowBlock:
    memory = np.zeros(num_bytes + LINE_BYTES, np.uint8)
    address = memory.ctypes.data
    return RowBlock(address + -address % LINE_BYTES, num_bytes, memory, is_spilled=False)


def _block_in_file(folder: str, num_bytes: int) -> RowBlock:
    """Return a block in a file without a name. The file needs no open descriptor, and disappears with the mapping."""
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
        raise SpillError(f"no space for {num_bytes / 1e6:.3g} MB of rows in {folder}: {error.strerror}") from None
    _libc.madvise(address, num_bytes, mmap.MADV_RANDOM)
    mapping = _Mapping(address)
    weakref.finalize(mapping, _libc.munmap, address, num_bytes).atexit = False
    return RowBlock(address, num_bytes, mapping, is_spilled=True)


def why_not_mapped(number: int) -> OSError:
    why = os.strerror(number)
    if number == errno.ENOMEM and (most := most_mappings()) is not None:
        why = f"{why}, or this process has reached the limit of {most:,} mappings (vm.max_map_count)"
    return OSError(number, why)


class _Mapping:
    """A memory mapping that is removed when this object is deleted."""

    __slots__ = ("__weakref__", "address")

    def __init__(self, address: int) -> None:
        self.address = address
