"""The leases of one job's shards, and the workers that request them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from paceline.protocol.jobs import shards
from paceline.protocol.jobs.messages import Answer
from paceline.protocol.jobs.records import ALL_DONE, NONE_FREE, Key, Lease
from paceline.protocol.jobs.shards import Shards


class Leases:
    """The leases of one job, by the rank of the worker. :meth:`take_answers` returns the answers to send.

    A strided job starts when all workers have requested a shard; workers join the iterations before this request. So no
    worker runs its first iterations alone, and the result does not depend on the workers' speed.
    """

    def __init__(self, pool: Shards, absent: Collection[int]) -> None:
        self.pool = pool
        self.started_s: float | None = None
        self.ended_s: float | None = None
        self.at_work: set[int] = set()
        """The workers that have requested a shard and not finished the job."""
        self._absent = set(absent)
        self._early: dict[int, tuple[object, bool]] = {}  # requests of a strided job that has not started
        self._granted: dict[int, Lease] = {}  # rank → lease to return at the worker's next call
        self._calls: dict[int, object] = {}  # workers that wait for a shard
        self._is_exhausted = self._is_closed = False
        self._answers: list[Answer] = []

    def take_answers(self) -> list[Answer]:
        answers, self._answers = self._answers, []
        return answers

    def take(self, call: object, rank: int, *, wait: bool, time_s: float) -> None:
        """Answer a worker's request for a shard: immediately, or with `wait` as soon as a shard is free."""
        if self._absent and not self._is_closed:
            self._early[rank] = call, wait
            self._worker_arrived(rank, time_s)
            return
        self.started_s = time_s if self.started_s is None else self.started_s
        self._calls[rank] = call
        if self._is_closed:
            self._send(rank, Lease(lease=ALL_DONE))
            return
        self.at_work.add(rank)
        if rank in self._granted:
            self._send(rank, self._granted.pop(rank))
        elif rank not in self.pool.waiting:
            self._carry_out(self.pool.request_shard(rank))
        if not wait and rank in self._calls:
            self._send(rank, Lease(lease=NONE_FREE))

    def done(self, rank: int, lease: int) -> Key | None:
        """Record a finished shard and return it; None if the worker does not hold this lease."""
        key = self.pool.shard_of(lease)
        self._carry_out(self.pool.finish(rank, lease))
        return key

    def file_ended(self, file: int, num_shards: int) -> None:
        self._carry_out(self.pool.file_ended(file, num_shards))

    def left(self, rank: int, time_s: float) -> bool:
        """Free the leases of a worker that died or left; return whether the worker had leases."""
        held = self.pool.holds(rank)
        self._calls.pop(rank, None)
        self._granted.pop(rank, None)
        self._carry_out(self.pool.worker_lost(rank))
        self._early.pop(rank, None)
        self._worker_arrived(rank, time_s)
        self.stop_work(rank, time_s)
        return held

    @property
    def has_free(self) -> bool:
        return not self._is_closed and self.pool.has_free

    def reassign_shards(self, rank: int) -> None:
        """Give an absent worker's shards of a strided job to the other workers until the absent worker comes."""
        self._carry_out(self.pool.worker_lost(rank))

    def stop_work(self, rank: int, time_s: float) -> None:
        self.at_work.discard(rank)
        if self.ended_s is not None or self.at_work:
            return
        done, total = self.pool.progress()
        # All shards may be done without an Exhausted, because the last worker may die before it receives this message.
        if self._is_exhausted or (self.started_s is not None and done == total):
            self.ended_s = time_s

    def resume(self, at_work: Collection[int], started_s: float | None) -> None:
        """Continue a job under a new scheduler, with its start time and the workers that have the job."""
        self.at_work = set(at_work)
        if started_s is not None:
            self._absent, self.started_s = set(), started_s

    def close(self) -> None:
        """Lease no more shards, because the job failed, another job follows, or the cluster ends."""
        self._is_closed = True
        self._calls.update((rank, call) for rank, (call, _) in self._early.items())
        self._absent, self._early = set(), {}
        for rank in list(self._calls):
            self._send(rank, Lease(lease=ALL_DONE))

    def _worker_arrived(self, rank: int, time_s: float) -> None:
        """Record that an expected worker came or left.

        Once every expected worker has come or left, answer the stored requests in the order of the ranks.
        """
        self._absent.discard(rank)
        if not self._absent:
            early, self._early = self._early, {}
            for early_rank, (call, wait) in sorted(early.items()):
                self.take(call, early_rank, wait=wait, time_s=time_s)

    def _carry_out(self, instructions: Iterable[shards.Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case shards.Granted(rank, lease, epoch, file, shard):
                    size = self.pool.sizes[file] or 0
                    self._send(rank, Lease(lease=lease, epoch=epoch, file=file, shard=shard, num_shards=size))
                case shards.Exhausted(rank):
                    self._is_exhausted = True
                    self._send(rank, Lease(lease=ALL_DONE))

    def _send(self, rank: int, lease: Lease) -> None:
        if rank in self._calls:
            self._answers.append(Answer(self._calls.pop(rank), lease))
        else:
            self._granted[rank] = lease

    def validate(self) -> None:
        self.pool.validate()
        assert not self._granted.keys() & self._calls.keys(), "a worker waits for a shard that was granted to it"
        assert not (self._early and not self._absent), "workers wait although all have come"
