"""The vector clock: the number of finished iterations of each worker, and their minimum.

Source: Lamport 1978 and Mattern 1988 for the clock; OSDI'14 "Scaling Distributed Machine Learning with the
Parameter Server", section 4.1, for its use.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


class VectorClock:
    """Worker id → number of finished iterations, with the minimum over the counted workers.

    ``num_expected`` workers that have not joined yet count with clock ``first_clock``, so that the first workers wait
    for them. If no worker counts, the minimum is the highest clock so far. The minimum never decreases.
    """

    def __init__(self, num_expected: int = 0, first_clock: int = 0) -> None:
        self._clocks: dict[int, int] = {}  # every member
        self._finished: set[int] = set()  # members that do not count
        self._seen: set[int] = set()  # workers that stood in for an expected one
        self._num_missing = num_expected
        self._first_clock = first_clock
        self._tally: dict[int, int] = {first_clock: num_expected} if num_expected else {}  # clock → how many count
        self._minimum = first_clock
        self._highest = first_clock

    @property
    def minimum(self) -> int:
        """The smallest clock that counts. O(1)."""
        return self._minimum

    @property
    def num_missing(self) -> int:
        """The number of expected workers that have not joined yet."""
        return self._num_missing

    @property
    def clocks(self) -> Mapping[int, int]:
        """Every member's clock, finished ones included; a live read-only view."""
        return MappingProxyType(self._clocks)

    def counts(self, worker: int) -> bool:
        """Whether the other workers wait for this worker."""
        return worker in self._clocks and worker not in self._finished

    def join(self, worker: int, clock: int = 0) -> int:
        """Add a worker, or raise the clock of a member; return its clock."""
        if worker in self._clocks:
            self.tick(worker, clock)
            return self._clocks[worker]
        start = max(self._minimum, clock)
        self._clocks[worker] = start
        self._highest = max(self._highest, start)
        self._add(start)
        if self._num_missing and worker not in self._seen:
            self._seen.add(worker)
            self._num_missing -= 1
            self._remove(self._first_clock)
        return start

    def leave(self, worker: int) -> None:
        """Remove a worker; unknown ones are ignored."""
        counted = self.counts(worker)
        clock = self._clocks.pop(worker, None)
        self._finished.discard(worker)
        if counted and clock is not None:
            self._remove(clock)

    def finish(self, worker: int) -> None:
        """Stop counting a member."""
        if self.counts(worker):
            self._finished.add(worker)
            self._remove(self._clocks[worker])

    def resume(self, worker: int) -> int | None:
        """Count a finished member again; return its clock, None if it had not finished."""
        if worker not in self._finished:
            return None
        self._finished.remove(worker)
        start = self._clocks[worker] = max(self._minimum, self._clocks[worker])
        self._add(start)
        return start

    def tick(self, worker: int, clock: int) -> bool:
        """Raise a member's clock; return False for other workers and if it would not rise. O(1) for a rise by one."""
        before = self._clocks.get(worker)
        if before is None or clock <= before:
            return False
        self._clocks[worker] = clock
        self._highest = max(self._highest, clock)
        if worker not in self._finished:
            self._add(clock)
            self._remove(before)
        elif not self._tally:
            self._minimum = self._highest
        return True

    def lagging(self, below: int) -> tuple[int, ...]:
        """Return the counted workers with a clock below `below`, ascending. O(workers)."""
        return tuple(sorted(w for w, c in self._clocks.items() if c < below and w not in self._finished))

    def _add(self, clock: int) -> None:
        if not self._tally:
            self._minimum = clock
        self._tally[clock] = self._tally.get(clock, 0) + 1

    def _remove(self, clock: int) -> None:
        self._tally[clock] -= 1
        if self._tally[clock]:
            return
        del self._tally[clock]
        if clock == self._minimum:
            # A worker that leaves the minimum by a tick of one is itself the next minimum, so the common case is
            # O(1). Only a leave, a finish or a jump searches the distinct clocks.
            self._minimum = clock + 1 if clock + 1 in self._tally else min(self._tally, default=self._highest)

    def validate(self) -> None:
        """Assert the invariants."""
        counted = [c for w, c in self._clocks.items() if w not in self._finished]
        counted += [self._first_clock] * self._num_missing
        assert self._minimum == min(counted, default=self._highest)
        assert sum(self._tally.values()) == len(counted)
        assert all(n == counted.count(c) and n > 0 for c, n in self._tally.items())
        assert self._finished <= self._clocks.keys()
        assert self._highest >= max(self._clocks.values(), default=self._minimum)
