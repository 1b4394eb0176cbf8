"""Load rows that are on disk in parallel, before a kernel reads them one after another.

Before a request is processed, several threads touch the rows of the request, so that the disk reads many pages at the
same time. If all pages are in memory, the threads only cost time. Therefore they run only if recent requests had to
wait for pages from the disk. The system counts these waits as major page faults.
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
except ImportError:  # page faults are counted only on Unix
    resource = None  # type: ignore[assignment]

NUM_THREADS: Final = 32
_FEW_KEYS: Final = 64
_WORTH: Final = 1 / 64  # waits for the disk per key; above this number, parallel reads save time
_MEMORY: Final = 0.8  # at each request, the recorded number of waits per key is multiplied by this factor


class ReadAhead:
    """Loads the rows of requests from disk in parallel, if recent requests had to wait for the disk."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._num_waits = _count_waits()
        self._num_keys = 1
        self._waits_by_key = 0.0

    def read(self, directory: npt.NDArray[np.uint64], layout: npt.NDArray[np.int64], keys: Keys) -> None:
        """Load the rows of `keys` into memory if this saves time. The caller must call this before every request."""
        num_waits = _count_waits()
        self._waits_by_key = max(_MEMORY * self._waits_by_key, (num_waits - self._num_waits) / self._num_keys)
        self._num_waits, self._num_keys = num_waits, max(len(keys), 1)
        if self._waits_by_key < _WORTH or len(keys) < _FEW_KEYS:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="paceline-read-ahead")

        def touch(part: Keys) -> None:
            records = np.empty(len(part) * int(layout[ROW_WORDS]), np.float32)
            sparse.read_records(directory, layout, part, records, np.empty(len(part), np.uint8))

        size = -(-len(keys) // NUM_THREADS)
        list(self._pool.map(touch, (keys[at : at + size] for at in range(0, len(keys), size))))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None


def _count_waits() -> int:
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_majflt
