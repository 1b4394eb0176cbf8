"""The scheduler's ledger of one job: leases, finished shards and the workers' results.

Members receive the ledger's facts (:meth:`JobLedger.take_news`), so that a new scheduler can restore the ledger.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from paceline.protocol.jobs import shards
from paceline.protocol.jobs.leases import Leases
from paceline.protocol.jobs.messages import LeaseDone
from paceline.protocol.jobs.records import (
    Counters,
    JobAccount,
    JobFacts,
    JobMemory,
    JobRecord,
    JobSpec,
    JobState,
    Key,
    TakenReport,
    done_shards,
    shards_in,
)
from paceline.protocol.jobs.results import Results
from paceline.protocol.jobs.shards import Shards
from paceline.protocol.membership import Member


@dataclass(frozen=True, slots=True)
class RejoinedMember:
    """A member of an earlier scheduler's cluster, its connection `peer`, and its record of the latest job."""

    peer: object
    member: Member
    memory: JobMemory | None


class JobLedger:
    """The ledger of job `number`. `ranks` are the live workers; a strided job is divided among `num_workers`."""

    def __init__(self, number: int, spec: JobSpec, num_workers: int, ranks: Collection[int] = ()) -> None:
        self.number = number
        self.spec = spec
        self.failed: tuple[str, str] | None = None
        self._lost = 0
        self._num_workers = max(num_workers, 1)
        self.leases = self._begin(ranks, spec.files, list(shards_in(spec.done)))
        self.results = Results(number, spec.progress)
        self._facts = JobFacts(number)  # the facts of the job that were sent to members
        self._news = JobFacts(number)
        self._has_news = True  # members must receive the job's first record, even without facts

    def _begin(
        self,
        ranks: Collection[int],
        files: Sequence[int | None],
        done: Collection[Key],
        held: Collection[shards.Granted] = (),
        last_lease: int = -1,
    ) -> Leases:
        """Create the leases. Until an absent worker comes, other workers get its shards of a strided job."""
        pool = Shards.restore(
            files,
            epochs=self.spec.epochs,
            assignment="strided" if self.spec.assignment == "strided" else "first-come",
            num_workers=self._num_workers,
            done=done,
            held=held,
            last_lease=last_lease,
        )
        if self.spec.assignment != "strided":
            return Leases(pool, ())
        leases = Leases(pool, ranks)
        for absent in set(range(self._num_workers)) - set(ranks):
            leases.reassign_shards(absent)
        return leases

    @classmethod
    def restore(
        cls,
        facts: JobFacts,
        posters: JobMemory,
        workers: Collection[RejoinedMember],
        *,
        dead: Collection[Member],
        num_workers: int,
        time_s: float,
    ) -> JobLedger:
        """Restore the ledger of an earlier scheduler.

        `facts` are merged from all members; `posters` and `workers` are the records of the poster and of each live
        worker; `dead` are the workers that did not reconnect. If no member recorded the number of workers,
        `num_workers` is used.
        """
        spec = posters.posted
        assert spec is not None
        self = cls(facts.number, spec, facts.num_workers or num_workers)
        at_work = {
            worker.member.rank: worker.memory
            for worker in workers
            if worker.memory is not None and worker.memory.number == self.number and worker.memory.working
        }
        held = [
            shards.Granted(rank, lease.lease, *lease.key) for rank, memory in at_work.items() for lease in memory.leases
        ]
        record = facts.export()
        done = [*shards_in(record.done), *shards_in(spec.done)]
        files = [facts.ended.get(file, size) for file, size in enumerate(spec.files)]
        last_lease = max((memory.last_lease for memory in at_work.values()), default=-1)
        self.leases = self._begin([worker.member.rank for worker in workers], files, done, held, last_lease)
        # In a job without shards, workers that have finished do not request a shard again, so the job counts as
        # started.
        has_started = bool(done or held or posters.seconds) or self.leases.pool.progress() == (0, 0)
        self.leases.resume(at_work, time_s - posters.seconds if has_started else None)
        self._lost, self.failed = facts.lost, facts.failed
        self.results.restore(record, posters.taken)
        self._news.merge(record)
        for worker in workers:
            if worker.memory is not None and worker.memory.number == self.number:
                self.results.record_progress(worker.member.incarnation, worker.memory.progress)
        for member in dead:
            self.removed(member, is_lost=True, time_s=time_s)
        if self.failed is not None:
            self.close()
        return self

    def lease_done(self, worker: Member, request: LeaseDone) -> None:
        key = self.leases.done(worker.rank, request.lease)
        self.results.record_progress(worker.incarnation, request.progress)
        if key is not None and self.results.shard_done(worker.incarnation, key, request.progress):
            self._record_done([key], worker.incarnation, request.progress)

    def file_ended(self, file: int, num_shards: int) -> None:
        self.leases.file_ended(file, num_shards)
        self._news.ended[file] = num_shards
        self._has_news = True

    def report_received(self) -> None:
        """Record that the poster has its last report, because the poster has sent another request."""
        found = self.results.report_received()
        if found is not None:
            self._record_done(found.later, found.incarnation, found.done_counters)

    def _record_done(self, keys: Collection[Key], incarnation: int, counters: Counters) -> None:
        """Add finished shards, and the worker's counters after these shards, to the news for members."""
        for key in keys:
            self._news.add_done(key)
        self._news.add_counters(incarnation, counters)
        self._has_news = True

    def take_report(self) -> tuple[TakenReport, object] | None:
        return self.results.take_report()

    def removed(self, worker: Member, *, is_lost: bool, time_s: float) -> None:
        """Free the leases of a worker that died or left, so that other workers read its unfinished shards."""
        if is_lost:
            self._lost += 1
            self._has_news = True
        if self.leases.left(worker.rank, time_s) or is_lost:
            self.results.forget_undone(worker.incarnation)

    def close(self) -> None:
        self.leases.close()

    def fail(self, error: str, message: str) -> None:
        """End the job with an error. A job keeps its first error, even under a later scheduler."""
        self.failed = self.failed or (error, message)
        self._has_news = True
        self.close()

    def take_news(self) -> JobRecord | None:
        if not self._has_news:
            return None
        news, self._news, self._has_news = self._news, JobFacts(self.number), False
        news.num_workers, news.lost, news.failed = self._num_workers, self._lost, self.failed
        record = news.export()
        self._facts.merge(record)
        return record

    def record(self) -> JobRecord:
        """Return the merged record of all news sent so far, for a member that may have missed some.

        The counters belong to exactly these finished shards, so the two must be sent together.
        """
        return self._facts.export()

    def account(self) -> JobAccount:
        """Return the finished shards; the servers have acknowledged all their pushes."""
        pool = self.leases.pool
        return JobAccount(files=pool.sizes, done=done_shards(pool.done()), progress=self.results.progress_of_done())

    def state(self, num_workers: int, time_s: float) -> JobState:
        done, total = self.leases.pool.progress()
        started_s, ended_s = self.leases.started_s, self.leases.ended_s
        until_s = time_s if ended_s is None else ended_s
        return JobState(
            done=done,
            total=total,
            finished=ended_s is not None,
            failed=self.failed,
            progress=self.results.progress(),
            seconds=0.0 if started_s is None else until_s - started_s,
            num_workers=num_workers,
            lost_workers=self._lost,
            num_reports=self.results.num_reports,
        )

    def validate(self) -> None:
        self.leases.validate()
