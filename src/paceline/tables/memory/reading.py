"""Rows that lie on the disk are read many at a time: a loop over them would wait for one page after the other.

Pages are touched by threads before a request goes through its rows, each of which waits for another page. That helps as
many reads as the disk takes at once; where nothing waits for the disk it would only cost, so it is done while it pays:
as long as requests have had to wait for pages (major faults, which the system counts).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.kernels import sparse
from paceline.kernels.index import ROW_WORDS
from paceline.tables.types import Keys

try:
    import resource
except ImportError:  # no Unix: the system does not tell
    resource = None  # type: ignore[assignment]

NUM_THREADS: Final = 32
_FEW_KEYS: Final = 64
_WORTH: Final = 1 / 64  # waits by key from which on it pays
_MEMORY: Final = 0.8  # how much of what was seen counts at the next request


class ReadAhead:
    """Has the rows of requests read in parallel, while requests wait for the disk."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._num_waits = _count_waits()
        self._num_keys = 1
        self._waits_by_key = 0.0

    def read(self, directory: npt.NDArray[np.uint64], layout: npt.NDArray[np.int64], keys: Keys) -> None:
        """Have the rows of `keys`, those that exist, in memory if that is worth it; call it before every request."""
        num_waits = _count_waits()
        self._waits_by_key = max(_MEMORY * self._waits_by_key, (num_waits - self._num_waits) / self._num_keys)
        self._num_waits, self._num_keys = num_waits, max(len(keys), 1)
        if self._waits_by_key < _WORTH or len(keys) < _FEW_KEYS:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="paceline-read-ahead")

        def touch(some: Keys) -> None:
            records = np.empty(len(some) * int(layout[ROW_WORDS]), np.float32)
            sparse.read_records(directory, layout, some, records, np.empty(len(some), np.uint8))

        size = -(-len(keys) // NUM_THREADS)
        list(self._pool.map(touch, (keys[at : at + size] for at in range(0, len(keys), size))))

    def close(self) -> None:
        """Have no threads any more: a process does not end before they do."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None


def _count_waits() -> int:
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_majflt
