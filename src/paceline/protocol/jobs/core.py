"""The jobs of a cluster: the latest job's ledger, its poster, and the workers that wait for the next job.

The *poster* is the process that has posted the job.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Final

from paceline.errors import PeerError
from paceline.protocol.jobs import messages
from paceline.protocol.jobs.ledger import JobLedger, RejoinedMember
from paceline.protocol.jobs.messages import Answer, ReceivedRequest
from paceline.protocol.jobs.records import ALL_DONE, Job, JobFacts, JobRecord, Lease
from paceline.protocol.membership import Member, Membership, Role

_TERM_SHIFT: Final = 20  # number of low bits of a job number, which count the jobs of one term


class JobCore:
    """The latest job, and the workers that wait for the next job. The cluster starts with `num_workers` workers."""

    def __init__(self, num_workers: int) -> None:
        self.ledger: JobLedger | None = None
        self._num_workers = num_workers
        self.last_number = 0
        """The highest job number that this scheduler or an earlier one may have used."""
        self._poster: object = None
        self._claimant: object = None
        # peer → (its GetJob request, number of its last job)
        self._idle: dict[object, tuple[ReceivedRequest, int]] = {}
        self._busy: dict[int, int] = {}  # worker → number of its job, until the worker requests the next job
        self._has_ended = False

    def handle(self, received: ReceivedRequest, membership: Membership, time_s: float) -> list[Answer]:
        """Apply a request; return answers to this and other processes. Raises PeerError for an impossible request."""
        return [*self._answer(received, membership, time_s), *self._answers()]

    def _answers(self) -> list[Answer]:
        return [] if self.ledger is None else [*self.ledger.leases.take_answers(), *self._give(self.ledger)]

    def _give(self, job: JobLedger) -> list[Answer]:
        """Give the job to idle workers. If shards have become free, workers that finished the job receive it again.

        No worker gets the job while another worker still works on an earlier job. The last pushes of the earlier job
        may wait until all workers finish an iteration. A worker with the new job would not finish this iteration, so
        the two workers would wait for each other.
        """
        if not self._idle or any(at != job.number for at in self._busy.values()):
            return []
        answers, has_free = [], job.leases.has_free
        for peer, (received, after) in list(self._idle.items()):
            if after < job.number or has_free:
                del self._idle[peer]
                self._busy[received.incarnation] = job.number
                answers.append(Answer(received.call, Job(number=job.number, description=job.spec.description)))
        return answers

    def _at_another(self, job: JobLedger, membership: Membership) -> tuple[int, ...]:
        members = (membership.find(worker) for worker, at in self._busy.items() if at != job.number)
        return tuple(sorted(member.rank for member in members if member is not None))

    def _answer(self, received: ReceivedRequest, membership: Membership, time_s: float) -> list[Answer]:
        call = received.call
        if self.ledger is not None and received.peer is self._poster:
            self.ledger.report_received()
        match received.request:
            case messages.PostJob():
                return self._post(received, received.request, membership)
            case messages.GetJob(after=after):
                return self._get(received, after, membership, time_s)
            case messages.TakeLease(job=number, wait=wait):
                job = self._unless_over(number)
                if job is None:
                    return [Answer(call, Lease(lease=ALL_DONE))]
                job.leases.take(call, _worker(received, membership).rank, wait=wait, time_s=time_s)
                return []
            case messages.JobStatus(job=number):
                job = self._current(number)
                state = job.state(len(membership.of(Role.WORKER)), time_s)
                return [Answer(call, replace(state, busy_ranks=self._at_another(job, membership)))]
            case messages.GetAccount(job=number):
                return [Answer(call, self._current(number).account())]
            case messages.TakeReports(job=number):
                taken = self._current(number).take_report()
                return [Answer(call, None) if taken is None else Answer(call, *taken)]
            case messages.ClaimCluster():
                return [Answer(call, self._claim(received.peer))]
            case messages.CountersReceived(counters=counters):
                if self.ledger is not None and membership.find(received.incarnation) is not None:
                    self.ledger.results.record_progress(received.incarnation, counters)
                return []
        self._record(received, membership)
        return [Answer(call, None)]

    def _record(self, received: ReceivedRequest, membership: Membership) -> None:
        """Record a worker's message about its job; ignore messages about jobs that are over."""
        request = received.request
        assert isinstance(request, messages.LeaseDone | messages.FileEnded | messages.Report | messages.JobFailed)
        job = self._unless_over(request.job)
        if job is None:
            return
        match request:
            case messages.LeaseDone():
                job.lease_done(_worker(received, membership), request)
            case messages.FileEnded(file=file, num_shards=num_shards):
                job.file_ended(file, num_shards)
            case messages.Report():
                job.results.add_report(_worker(received, membership).incarnation, request, received.body)
            case messages.JobFailed(error=error, message=message):
                job.fail(error, message)

    def _claim(self, peer: object) -> bool:
        """Reserve the cluster for the jobs of a process; return False if another process has reserved it."""
        if self._claimant is not None and self._claimant is not peer:
            return False
        self._claimant = peer
        return True

    def _post(self, received: ReceivedRequest, request: messages.PostJob, membership: Membership) -> list[Answer]:
        if not self._claim(received.peer):
            raise PeerError(messages.OCCUPIED)
        self.last_number = number = self.last_number + 1
        answers = [Answer(received.call, number)]
        if self.ledger is not None:
            self.ledger.close()
            answers += self.ledger.leases.take_answers()
        ranks = [member.rank for member in membership.of(Role.WORKER)]
        # Strided shards are assigned by rank, so expected workers that are absent count too.
        self.ledger = JobLedger(number, request.spec, max(self._num_workers, max(ranks, default=-1) + 1), ranks)
        self._poster = received.peer
        return answers

    def _get(self, received: ReceivedRequest, after: int, membership: Membership, time_s: float) -> list[Answer]:
        if self._has_ended:
            return [Answer(received.call, Job(number=-1))]
        worker = _worker(received, membership)
        if self.ledger is not None and self.ledger.number <= after:
            self.ledger.leases.stop_work(worker.rank, time_s)
        self._busy.pop(received.incarnation, None)
        self._idle[received.peer] = received, after
        return []

    def _current(self, number: int) -> JobLedger:
        if self.ledger is None or self.ledger.number != number:
            raise PeerError(f"job {number} does not exist or is over")
        return self.ledger

    def _unless_over(self, number: int) -> JobLedger | None:
        """Return a job by number; None if it is over (a later job was posted, or its poster and scheduler died)."""
        is_over = number <= self.last_number and (self.ledger is None or number != self.ledger.number)
        return None if is_over else self._current(number)

    def removed(self, member: Member, peer: object, *, is_lost: bool, time_s: float) -> list[Answer]:
        """Record that a member died or left; return answers to other processes."""
        self._busy.pop(member.incarnation, None)
        if self.ledger is not None and member.role is Role.WORKER:
            self.ledger.removed(member, is_lost=is_lost, time_s=time_s)
        return self.forget(peer)

    def forget(self, peer: object) -> list[Answer]:
        self._idle.pop(peer, None)
        if peer is self._claimant:
            self._claimant = None
        if self.ledger is not None and peer is not None and peer is self._poster:
            self.ledger.fail("PeerError", "the process that posted the job has ended, or was silent for too long")
            self._poster = None
        return self._answers()

    def take_news(self) -> JobRecord | None:
        """Return the job's new facts, which the workers and the poster store; None without new facts."""
        return None if self.ledger is None else self.ledger.take_news()

    def record(self) -> JobRecord | None:
        """Return all facts so far, for members that connect or reconnect; None without a job."""
        return None if self.ledger is None else self.ledger.record()

    def concerns(self, peer: object) -> bool:
        return peer is self._poster

    def restore(
        self, rejoined: Collection[RejoinedMember], dead: Collection[Member], time_s: float, *, term: int
    ) -> None:
        """Restore the latest job from the members' records. `dead` are the members that did not reconnect.

        `term` is the term of this scheduler. The reconnected members may not know the latest job, whose number must not
        be used again. So new jobs get higher numbers than all jobs of earlier terms.
        """
        memories = [known.memory for known in rejoined if known.memory is not None]
        facts = JobFacts(max((memory.number for memory in memories), default=0))
        for memory in memories:
            if memory.number == facts.number:
                facts.merge(memory.record)
        self.last_number = max(facts.number, term << _TERM_SHIFT)
        workers = [known for known in rejoined if known.member.role is Role.WORKER]
        for worker in workers:
            if worker.memory is not None and worker.memory.is_busy:
                self._busy[worker.member.incarnation] = worker.memory.number if worker.memory.working else 0
        lost = [member for member in dead if member.role is Role.WORKER]
        ranks = [member.rank for member in (*(worker.member for worker in workers), *lost)]
        num_workers = max(self._num_workers, max(ranks, default=-1) + 1)
        for known in rejoined:
            posted = known.memory
            if posted is not None and posted.number == facts.number and posted.posted is not None:
                self.ledger = JobLedger.restore(
                    facts, posted, workers, dead=lost, num_workers=num_workers, time_s=time_s
                )
                self._poster = self._claimant = known.peer
                return

    def end(self) -> list[Answer]:
        """End all jobs, because the cluster ends; return answers to all workers."""
        self._has_ended = True
        answers = [Answer(received.call, Job(number=-1)) for received, _ in self._idle.values()]
        self._idle.clear()
        if self.ledger is not None:
            self.ledger.close()
        return [*answers, *self._answers()]


def _worker(received: ReceivedRequest, membership: Membership) -> Member:
    member = membership.find(received.incarnation)
    if member is None or member.role is not Role.WORKER:
        raise PeerError("this process is not a worker of the cluster, or is no longer one")
    return member
