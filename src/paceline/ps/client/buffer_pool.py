"""A pool of memory for copies of pushes, because fresh pages cost more than the copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_MAX_FREE = 64
_ROUND_BYTES = 4096

Memory = npt.NDArray[np.uint8]


class Copies:
    """Copies of arrays, and a pool of released memory."""

    def __init__(self) -> None:
        self._free: dict[int, list[Memory]] = {}  # by size
        self.num_free = 0

    def copy(self, arrays: Sequence[npt.NDArray[Any]]) -> tuple[list[npt.NDArray[Any]], Memory]:
        """Return copies of C-contiguous arrays, and their memory for :meth:`give_back`."""
        size = 0
        for array in arrays:
            size += array.nbytes + 7 & -8
        size = -(-size // _ROUND_BYTES) * _ROUND_BYTES
        free = self._free.get(size)
        if free:
            memory = free.pop()
            self.num_free -= 1
        else:
            memory = np.empty(size, np.uint8)
        copies, at = [], 0
        for array in arrays:
            copy = memory[at : at + array.nbytes].view(array.dtype)
            copy[:] = array
            copies.append(copy)
            at += array.nbytes + 7 & -8
        return copies, memory

    def give_back(self, memory: Memory) -> None:
        """Release memory for later copies."""
        if self.num_free < _MAX_FREE:
            self._free.setdefault(len(memory), []).append(memory)
            self.num_free += 1
