"""Prepare the arrays of a collective benchmark: known values for the check, zeros for the timing."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.bench.plan import ITEM_BYTES

_PERIOD = 251
"""The period of the known values: a prime, so that a misplaced block is detected."""


class Buffers:
    """One rank's arrays for one operation. All libraries use the same memory, so that conditions are equal."""

    def __init__(self, op: str, num_bytes: int, dtype: str, rank: int, num_ranks: int) -> None:
        self._op, self.rank, self._num_ranks = op, rank, num_ranks
        length = num_bytes // ITEM_BYTES[dtype]
        part = length // num_ranks
        self.given: np.ndarray[Any, Any] = np.zeros(part if op == "all_gather" else length, dtype)
        self.result = self.given
        """If the operation is in place, this is the same array as `given`."""
        if op in ("all_gather", "all_to_all"):
            self.result = np.zeros(length, dtype)
        elif op == "reduce_scatter":
            self.result = np.zeros(part, dtype)
        self.root = num_ranks - 1
        """Root of a broadcast. It is not rank 0, which measures: a root may finish before other ranks."""

    def fill(self) -> None:
        """Set the result to zero, and write this rank's input. :meth:`is_right` computes the result from it."""
        self.result[...] = 0
        if self._op == "broadcast" and self.rank != self.root:
            return
        self.given[...] = self._values(self.given.size)
        self.given *= self.rank + 1

    def is_right(self) -> bool:
        """Return whether the operation on the inputs of all ranks (:meth:`fill`) gave the expected result."""
        ranks, rank, result = self._num_ranks, self.rank, self.result
        if self._op == "barrier":
            return True
        total = ranks * (ranks + 1) // 2
        if self._op == "all_reduce":
            return np.array_equal(result, self._values(result.size) * total)
        if self._op == "broadcast":
            return np.array_equal(result, self._values(result.size) * (self.root + 1))
        if self._op == "reduce_scatter":
            own = slice(rank * result.size, (rank + 1) * result.size)
            return np.array_equal(result, self._values(self.given.size)[own] * total)
        part = result.size // ranks
        sent = self._values(part) if self._op == "all_gather" else self._values(result.size)[rank * part :][:part]
        return all(np.array_equal(result[i * part :][:part], sent * (i + 1)) for i in range(ranks))

    def clear(self) -> None:
        """Set all values to zero, because repeated in-place sums of other values would overflow."""
        self.given[...] = 0
        self.result[...] = 0

    def _values(self, count: int) -> np.ndarray[Any, Any]:
        return np.resize(np.arange(1, _PERIOD + 1, dtype=self.given.dtype), count)
