"""The shards of one job, and the workers that ask for them."""

from __future__ import annotations

from collections.abc import Collection

from paceline.protocol.jobs import shards
from paceline.protocol.jobs.messages import Answer
from paceline.protocol.jobs.records import ALL_DONE, NOTHING_NOW, Key, Lease
from paceline.protocol.jobs.shards import Shards


class Leases:
    """The leases of one job. Workers are known by their ranks, and answered by :meth:`take_answers`.

    The first shards of a strided job are given out when all of `awaited` have asked: each has joined the iterations by
    then, so that none runs its first ones alone, and the job's result does not depend on who was quicker.
    """

    def __init__(self, pool: Shards, awaited: Collection[int]) -> None:
        self.pool = pool
        self.started_s: float | None = None
        """When the first shard was leased."""
        self.ended_s: float | None = None
        """When the last worker was through."""
        self.at_work: set[int] = set()
        """The workers that have asked, and are not through."""
        self._awaited = set(awaited)
        self._early: dict[int, tuple[object, bool]] = {}  # who has asked while others were awaited
        self._granted: dict[int, Lease] = {}  # while nobody was listening
        self._calls: dict[int, object] = {}  # those that wait for a shard
        self._is_exhausted = self._is_closed = False
        self._answers: list[Answer] = []

    def take_answers(self) -> list[Answer]:
        """Return what is to be answered since the last call."""
        answers, self._answers = self._answers, []
        return answers

    def take(self, call: object, rank: int, *, wait: bool, now_s: float) -> None:
        """Answer a worker that wants a shard; with `wait`, when there is one."""
        if self._awaited and not self._is_closed:
            self._early[rank] = call, wait
            self._await_no_more(rank, now_s)
            return
        self.started_s = now_s if self.started_s is None else self.started_s
        self._calls[rank] = call
        if self._is_closed:
            self._tell(rank, Lease(lease=ALL_DONE))
            return
        self.at_work.add(rank)
        if rank in self._granted:
            self._tell(rank, self._granted.pop(rank))
        elif rank not in self.pool.waiting:
            self._handle(shards.ShardWanted(rank))
        if not wait and rank in self._calls:
            self._tell(rank, Lease(lease=NOTHING_NOW))

    def done(self, rank: int, lease: int) -> Key | None:
        """Note that a shard is done; return it, or None if the worker does not hold this lease (any more)."""
        key = self.pool.shard_of(lease)
        self._handle(shards.Done(rank, lease))
        return key

    def file_ended(self, file: int, num_shards: int) -> None:
        """Note the number of shards of a file whose end has been read."""
        self._handle(shards.ShardCountFound(file, num_shards))

    def left(self, rank: int, now_s: float) -> bool:
        """Lease again what a worker held that is gone; return whether it held anything."""
        held = self.pool.holds(rank)
        self._calls.pop(rank, None)
        self._granted.pop(rank, None)
        self._handle(shards.WorkerLost(rank))
        self._early.pop(rank, None)
        self._await_no_more(rank, now_s)
        self.rests(rank, now_s)
        return held

    @property
    def has_free(self) -> bool:
        """Whether there is a shard for somebody to take."""
        return not self._is_closed and self.pool.has_free

    def give_away(self, rank: int) -> None:
        """Give the stride of a worker that is not there to the others, until it comes."""
        self._handle(shards.WorkerLost(rank))

    def rests(self, rank: int, now_s: float) -> None:
        """Note that a worker is through with the job."""
        self.at_work.discard(rank)
        if self.ended_s is not None or self.at_work:
            return
        done, total = self.pool.progress()
        if self._is_exhausted or (self.started_s is not None and done == total):  # the last may die before it hears
            self.ended_s = now_s

    def resume(self, at_work: Collection[int], started_s: float | None) -> None:
        """Go on with a job that has begun at that time, under another scheduler; these workers were given it."""
        self.at_work = set(at_work)
        if started_s is not None:
            self._awaited, self.started_s = set(), started_s

    def close(self) -> None:
        """Give out nothing more: the job has failed or another follows, or the cluster ends."""
        self._is_closed = True
        self._calls.update((rank, call) for rank, (call, _) in self._early.items())
        self._awaited, self._early = set(), {}
        for rank in list(self._calls):
            self._tell(rank, Lease(lease=ALL_DONE))

    def _await_no_more(self, rank: int, now_s: float) -> None:
        """Note that a worker has asked or is gone; when all have, answer them in the order of their ranks."""
        self._awaited.discard(rank)
        if not self._awaited:
            early, self._early = self._early, {}
            for asker, (call, wait) in sorted(early.items()):
                self.take(call, asker, wait=wait, now_s=now_s)

    def _handle(self, event: shards.Event) -> None:
        for instruction in self.pool.handle(event):
            match instruction:
                case shards.Granted(rank, lease, epoch, file, shard):
                    size = self.pool.sizes[file] or 0
                    self._tell(rank, Lease(lease=lease, epoch=epoch, file=file, shard=shard, num_shards=size))
                case shards.Exhausted(rank):
                    self._is_exhausted = True
                    self._tell(rank, Lease(lease=ALL_DONE))
                case shards.Wait():
                    pass

    def _tell(self, rank: int, lease: Lease) -> None:
        if rank in self._calls:
            self._answers.append(Answer(self._calls.pop(rank), lease))
        else:
            self._granted[rank] = lease

    def validate(self) -> None:
        """Assert the invariants."""
        self.pool.validate()
        assert not self._granted.keys() & self._calls.keys(), "a worker waits for what it was granted"
        assert not (self._early and not self._awaited), "workers wait for nobody"
