"""Leases of small shards of the data.

A worker leases a shard, reads the shard and reports it as done. The leases of a lost worker are granted again, so each
(epoch, file, shard) is done exactly once. A slow worker leases fewer shards.

Source: OSDI'14 "Scaling Distributed Machine Learning with the Parameter Server", section 4.5 (the task scheduler);
leases as in MapReduce (Dean and Ghemawat, OSDI'04, section 3.3).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from paceline.errors import DataError, ProtocolError, UsageError
from paceline.protocol.jobs.records import Key
from paceline.protocol.jobs.shard_states import DONE, FREE, OPEN, RETURNED, ShardStates

Assignment: TypeAlias = Literal["first-come", "strided"]


@dataclass(frozen=True, slots=True)
class Granted:
    """The worker must read this shard."""

    worker: int
    lease: int
    epoch: int
    file: int
    shard: int


@dataclass(frozen=True, slots=True)
class Exhausted:
    """Every shard of every epoch is done."""

    worker: int


Instruction: TypeAlias = Granted | Exhausted


@dataclass(slots=True)
class _Cursor:
    """The position of one worker in the order of the shards: its next shard that was never leased."""

    epoch: int
    file: int
    shard: int


_LEASE_GAP: Final = 1 << 20
"""A restored pool adds this gap to the highest known lease number, because members may not know the last leases."""


class Shards:
    """The pool of shards, the open leases and the waiting workers.

    `files` has the number of shards of each file, None if unknown (a compressed stream). Shards of a file of unknown
    size are leased until a worker reports its end; later files wait for this report. `epochs` have no barrier between
    them.

    Under the `assignment` "first-come" each request gets the next shard. Under "strided" shard k in the order of an
    epoch belongs to worker k mod ``num_workers``, so in all runs without losses the same workers read the same shards.
    (In this order a file of unknown size counts as 0 shards, so that the order is known before the data is read.)
    Workers with a number of ``num_workers`` or above get only shards of lost workers.

    Raises UsageError for a negative number, 0 workers or an unknown assignment.
    """

    def __init__(
        self,
        files: Sequence[int | None],
        epochs: int = 1,
        assignment: Assignment = "first-come",
        num_workers: int = 1,
    ) -> None:
        if assignment not in ("first-come", "strided"):
            raise UsageError(f"Shards(assignment={assignment!r}): expected 'first-come' or 'strided'.")
        if epochs < 0 or num_workers < 1 or any(n is not None and n < 0 for n in files):
            raise UsageError(
                f"Shards(files={list(files)}, epochs={epochs}, num_workers={num_workers}): expected numbers "
                "of at least 0, and at least one worker."
            )
        self._states = ShardStates(files, epochs)
        self._strided = assignment == "strided"
        self._stride = num_workers if self._strided else 1
        self._offsets = [sum(n or 0 for n in files[:i]) for i in range(len(files))]
        self._cursors = [_Cursor(0, 0, self._first(0, p)) if files else _Cursor(0, 0, 0) for p in range(self._stride)]
        self._orphans: set[int] = set()  # positions of lost workers: any worker gets their shards
        self._returned: list[Key] = []  # a heap of the shards of revoked leases
        self._open: dict[int, tuple[int, Key]] = {}  # lease → worker, shard
        self._waiting: dict[int, None] = {}  # workers, in the order in which they began to wait
        self._next_lease = 0

    @classmethod
    def restore(
        cls,
        files: Sequence[int | None],
        epochs: int = 1,
        assignment: Assignment = "first-come",
        num_workers: int = 1,
        *,
        done: Iterable[tuple[int, int, int]] = (),
        held: Iterable[Granted] = (),
        last_lease: int = -1,
    ) -> Shards:
        """Restore the pool after the death of the scheduler, from the records of the members.

        `files` are the numbers of shards as in the constructor; numbers that workers have reported since are included.
        `done` are the finished shards as (epoch, file, shard); repetitions are allowed. `held` are the leases of live
        workers; the later of two leases for one shard is used. `last_lease` is the highest recorded lease number.

        Other leased shards are free again. New lease numbers are far above all earlier numbers, so that a late message
        never refers to a new lease.
        """
        self = cls(files, epochs, assignment, num_workers)
        highest = last_lease
        for key in done:
            if self._states.exists(key):
                self._states.set(key, DONE)
        for lease in sorted(held, key=lambda grant: grant.lease, reverse=True):
            highest = max(highest, lease.lease)
            key = (lease.epoch, lease.file, lease.shard)
            if self._states.exists(key) and self._states.of(key) == FREE:
                self._states.set(key, OPEN)
                self._open[lease.lease] = lease.worker, key
        self._next_lease = highest + _LEASE_GAP
        return self

    @property
    def waiting(self) -> tuple[int, ...]:
        return tuple(self._waiting)

    def request_shard(self, worker: int) -> list[Instruction]:
        """Request a shard for a worker. If none is free, a later call returns Granted or Exhausted for it."""
        self._orphans.discard(worker)
        answer = self._answer(worker)
        if answer is not None:
            self._waiting.pop(worker, None)
            return [answer]
        self._waiting.setdefault(worker)
        return []

    def finish(self, worker: int, lease: int) -> list[Instruction]:
        """Record that a worker has finished the shard of a lease. A revoked lease is ignored.

        Raises ProtocolError if the lease belongs to another worker; nothing has changed.
        """
        self._close(worker, lease)
        return self._serve()

    def worker_lost(self, worker: int) -> list[Instruction]:
        """Lease the shards of a worker that died or left to other workers; under "strided" also its later shards."""
        self._take_back(worker)
        return self._serve()

    def file_ended(self, file: int, num_shards: int) -> list[Instruction]:
        """Record the number of shards of a file that was read to its end.

        Raises DataError if the number contradicts the known number; nothing has changed.
        """
        self._end(file, num_shards)
        return self._serve()

    @property
    def sizes(self) -> tuple[int | None, ...]:
        return tuple(self._states.sizes)

    def shard_of(self, lease: int) -> tuple[int, int, int] | None:
        return self._open[lease][1] if lease in self._open else None

    def holds(self, worker: int) -> bool:
        return any(holder == worker for holder, _ in self._open.values())

    def done(self) -> Iterator[Key]:
        return self._states.all(DONE)

    def progress(self) -> tuple[int, int | None]:
        """Return the number of finished shards, and of all shards (None while the size of a file is unknown)."""
        states = self._states
        total = None if None in states.sizes else states.epochs * sum(n or 0 for n in states.sizes)
        return states.num_done, total

    def _answer(self, worker: int) -> Granted | Exhausted | None:
        key = self._next(worker)
        if key is None:
            return Exhausted(worker) if not (self._open or self.has_free) else None
        lease = self._next_lease
        self._next_lease += 1
        self._open[lease] = worker, key
        self._states.move(key, "want")
        return Granted(worker, lease, *key)

    def _next(self, worker: int) -> Key | None:
        # Rule 1: shards of revoked leases come before shards that were never leased.
        if self._returned:
            return heapq.heappop(self._returned)
        # Rule 2: then the earliest epoch with a shard for this worker; the worker's own shards come before the shards
        # of lost workers. Shards of live workers are never taken.
        own = worker if self._strided else 0
        best: tuple[int, bool, Key, int] | None = None
        for position in {own, *self._orphans}:
            key_of = self._peek(position) if 0 <= position < self._stride else None
            if key_of is not None:
                candidate = (key_of[0], position != own, key_of, position)
                best = candidate if best is None else min(best, candidate)
        if best is None:
            return None
        self._cursors[best[3]].shard += self._stride
        return best[2]

    def _peek(self, position: int) -> Key | None:
        cursor = self._cursors[position]
        while cursor.epoch < self._states.epochs:
            size = self._states.sizes[cursor.file]
            if size is None or cursor.shard < size:
                key = cursor.epoch, cursor.file, cursor.shard
                if self._states.of(key) == FREE:
                    return key
                cursor.shard += self._stride  # skip shards that were leased or done before the pool was restored
                continue
            cursor.file += 1
            if cursor.file == len(self._states.sizes):
                cursor.epoch, cursor.file = cursor.epoch + 1, 0
            cursor.shard = self._first(cursor.file, position)
        return None

    def _first(self, file: int, position: int) -> int:
        return (position - self._offsets[file]) % self._stride

    @property
    def has_free(self) -> bool:
        return bool(self._returned) or any(self._peek(position) is not None for position in range(self._stride))

    def _serve(self) -> list[Instruction]:
        # Rule 3: waiting workers are answered in order, at the first event that allows an answer.
        instructions: list[Instruction] = []
        for worker in list(self._waiting):
            answer = self._answer(worker)
            if answer is not None:
                del self._waiting[worker]
                instructions.append(answer)
        return instructions

    def _close(self, worker: int, lease: int) -> None:
        # Rule 4: a report for a lease that is not open is ignored. The shard of a revoked lease gets a new lease.
        if lease not in self._open:
            return
        holder, key = self._open[lease]
        if holder != worker:
            raise ProtocolError(
                f"Worker {worker} reports lease {lease} as done, but worker {holder} holds it; the report "
                "was ignored. A worker may report only its own leases."
            )
        del self._open[lease]
        self._states.move(key, "finish")

    def _take_back(self, worker: int) -> None:
        # Rule 5: the leases of a lost worker are revoked. Under "strided" other workers get the shards of this worker
        # until it returns.
        self._waiting.pop(worker, None)
        for lease in [lease for lease, (holder, _) in self._open.items() if holder == worker]:
            _, key = self._open.pop(lease)
            self._states.move(key, "worker_lost")
            heapq.heappush(self._returned, key)
        if self._strided and 0 <= worker < self._stride:
            self._orphans.add(worker)

    def _end(self, file: int, num_shards: int) -> None:
        if not 0 <= file < len(self._states.sizes) or num_shards < 0:
            raise DataError(f"File {file} was reported to end after {num_shards} shards: no such file.")
        size = self._states.sizes[file]
        if size is not None:
            if size == num_shards:
                return
            raise DataError(
                f"File {file} was reported to end after {num_shards} shards, but it has {size}; the report "
                "was ignored. The file has changed while it was read, or the workers read different files."
            )
        # Rule 6: shards past the end do not exist. The leases of such shards are dropped, and the shards do not count.
        self._states.end(file, num_shards)
        is_past = self._states.is_past
        self._open = {lease: (worker, key) for lease, (worker, key) in self._open.items() if not is_past(key)}
        self._returned = [key for key in self._returned if not is_past(key)]
        heapq.heapify(self._returned)

    def validate(self) -> None:
        keys = [key for _, key in self._open.values()]
        assert len(set(keys)) == len(keys), "two open leases of one shard"
        for state, expected in ((OPEN, set(keys)), (RETURNED, set(self._returned))):
            assert set(self._states.all(state)) == expected
        self._states.validate()
        assert not any(self._states.is_past(key) for key in [*keys, *self._returned])
        if self._waiting:
            assert not self._returned, "a worker waits while revoked shards are free"
            assert self._open or self.has_free, "a worker waits for nothing"
            assert all(self._peek(p) is None for p in self._orphans), (
                "a worker waits while a lost worker's shards are free"
            )
            positions = self._waiting if self._strided else [0]
            assert all(self._peek(p) is None for p in positions if 0 <= p < self._stride)
