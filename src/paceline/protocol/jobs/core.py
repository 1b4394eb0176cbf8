"""The jobs of a cluster: one ledger after another, who has posted the latest, and the workers that wait for the next.

A scheduler holds one :class:`JobCore` beside its :class:`paceline.protocol.scheduler.SchedulerCore`, and so does each
simulated one. Its runtime feeds it what processes ask, and who is gone; it returns what is to be answered.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Final

from paceline.errors import PeerError
from paceline.protocol.jobs import messages
from paceline.protocol.jobs.ledger import JobLedger, Remembered
from paceline.protocol.jobs.messages import Answer, Asked
from paceline.protocol.jobs.records import ALL_DONE, Job, JobFacts, JobRecord, Lease
from paceline.protocol.membership import Member, Membership, Role

_TERM_SHIFT: Final = 20  # fewer jobs are posted in a term than this many bits count


class JobCore:
    """The latest job, and the workers that wait for the next one. `num_workers` is how many the cluster begins with."""

    def __init__(self, num_workers: int) -> None:
        self.ledger: JobLedger | None = None
        """The latest job's."""
        self._num_workers = num_workers
        self.last_number = 0
        """The highest that may have been given, by this scheduler or a former one."""
        self._poster: object = None
        self._seekers: dict[object, tuple[Asked, int]] = {}  # peer → what it asked, after which job
        self._busy: dict[int, int] = {}  # worker → the job that it was given, until it asks for the next
        self._has_ended = False

    def handle(self, asked: Asked, membership: Membership, now_s: float) -> list[Answer]:
        """Take a request; return what to answer, to this or to others. Raises PeerError."""
        return [*self._answer(asked, membership, now_s), *self._answers()]

    def _answers(self) -> list[Answer]:
        return [] if self.ledger is None else [*self.ledger.take_answers(), *self._give(self.ledger)]

    def _give(self, job: JobLedger) -> list[Answer]:
        """Give the job to the workers that seek one: also to those that are through, if shards came back since.

        A worker that is still at a job before may wait, for its last pushes, for iterations of all others. They would
        wait for it at the beginning of this job.
        """
        if not self._seekers or any(at != job.number for at in self._busy.values()):
            return []
        answers, has_free = [], job.has_free
        for peer, (asked, after) in list(self._seekers.items()):
            if after < job.number or has_free:
                del self._seekers[peer]
                self._busy[asked.incarnation] = job.number
                answers.append(Answer(asked.call, Job(number=job.number, description=job.spec.description)))
        return answers

    def _at_another(self, job: JobLedger, membership: Membership) -> tuple[int, ...]:
        """Return the ranks of the workers that are at another job."""
        members = (membership.find(worker) for worker, at in self._busy.items() if at != job.number)
        return tuple(sorted(member.rank for member in members if member is not None))

    def _answer(self, asked: Asked, membership: Membership, now_s: float) -> list[Answer]:
        call = asked.call
        if self.ledger is not None and asked.peer is self._poster:
            self.ledger.report_came()
        match asked.request:
            case messages.PostJob():
                return self._post(asked, asked.request, membership)
            case messages.GetJob(after=after):
                return self._get(asked, after, membership, now_s)
            case messages.TakeLease(job=number, wait=wait):
                job = self._unless_over(number)
                if job is None:
                    return [Answer(call, Lease(lease=ALL_DONE))]
                job.take_lease(call, _worker(asked, membership).rank, wait=wait, now_s=now_s)
                return []
            case messages.JobStatus(job=number):
                job = self._current(number)
                state = job.state(len(membership.of(Role.WORKER)), now_s)
                return [Answer(call, replace(state, awaited=self._at_another(job, membership)))]
            case messages.GetAccount(job=number):
                return [Answer(call, self._current(number).account())]
            case messages.TakeReports(job=number):
                taken = self._current(number).take_report()
                return [Answer(call, None) if taken is None else Answer(call, *taken)]
            case messages.HasOtherPoster():
                return [Answer(call, self._poster not in (None, asked.peer))]
            case messages.CountersReceived(counters=counters):
                if self.ledger is not None and membership.find(asked.incarnation) is not None:
                    self.ledger.results.note_progress(asked.incarnation, counters)
                return []
        self._note(asked, membership)
        return [Answer(call, None)]

    def _note(self, asked: Asked, membership: Membership) -> None:
        """Record a message of a worker about its job; one about a finished job is ignored."""
        request = asked.request
        assert isinstance(request, messages.LeaseDone | messages.FileEnded | messages.Report | messages.JobFailed)
        job = self._unless_over(request.job)
        if job is None:
            return
        match request:
            case messages.LeaseDone():
                job.lease_done(_worker(asked, membership), request)
            case messages.FileEnded(file=file, num_shards=num_shards):
                job.file_ended(file, num_shards)
            case messages.Report():
                job.results.add_report(_worker(asked, membership).incarnation, request, asked.body)
            case messages.JobFailed(error=error, message=message):
                job.fail(error, message)

    def _post(self, asked: Asked, request: messages.PostJob, membership: Membership) -> list[Answer]:
        self.last_number = number = self.last_number + 1
        answers = [Answer(asked.call, number)]
        if self.ledger is not None:
            self.ledger.close()
            answers += self.ledger.take_answers()
        ranks = [member.rank for member in membership.of(Role.WORKER)]
        # Strided work is dealt by rank: whoever is expected has a place in it, here or not.
        self.ledger = JobLedger(number, request.spec, max(self._num_workers, max(ranks, default=-1) + 1), ranks)
        self._poster = asked.peer
        return answers

    def _get(self, asked: Asked, after: int, membership: Membership, now_s: float) -> list[Answer]:
        if self._has_ended:
            return [Answer(asked.call, Job(number=-1))]
        worker = _worker(asked, membership)  # whom nobody will take for gone: others wait for it
        if self.ledger is not None and self.ledger.number <= after:
            self.ledger.rests(worker.rank, now_s)
        self._busy.pop(asked.incarnation, None)
        self._seekers[asked.peer] = asked, after
        return []

    def _current(self, number: int) -> JobLedger:
        if self.ledger is None or self.ledger.number != number:
            raise PeerError(f"there is no job {number}, or it is over")
        return self.ledger

    def _unless_over(self, number: int) -> JobLedger | None:
        """Return a job; None if another one was posted since, or it died with its poster."""
        is_over = number <= self.last_number and (self.ledger is None or number != self.ledger.number)
        return None if is_over else self._current(number)

    # What becomes of processes.

    def removed(self, member: Member, peer: object, *, is_lost: bool, now_s: float) -> list[Answer]:
        """Take note that a member is gone, dead or by its own wish; return what to answer others."""
        self._busy.pop(member.incarnation, None)
        if self.ledger is not None and member.role is Role.WORKER:
            self.ledger.removed(member, is_lost=is_lost, now_s=now_s)
        return self.forget(peer)

    def forget(self, peer: object) -> list[Answer]:
        """Take note that a process does not come back; return what to answer others."""
        self._seekers.pop(peer, None)
        if self.ledger is not None and peer is not None and peer is self._poster:
            self.ledger.fail("PeerError", "whoever posted the job is gone")
            self._poster = None
        return self._answers()

    def take_news(self) -> JobRecord | None:
        """Return what is new of the job, for workers and poster to keep; None if nothing is."""
        return None if self.ledger is None else self.ledger.take_news()

    def record(self) -> JobRecord | None:
        """Return all that was news so far, for members that are connected (again); None if there is no job."""
        return None if self.ledger is None else self.ledger.record()

    def concerns(self, peer: object) -> bool:
        """Whether a process has posted the latest job."""
        return peer is self._poster

    # Beginning and end.

    def restore(self, remembered: Collection[Remembered], dead: Collection[Member], now_s: float, *, term: int) -> None:
        """Take over what members know of the latest job; `dead` are those that did not come back.

        `term` is this scheduler's: nobody who has come may know of the latest job, and its number is not to be given
        again to another one.
        """
        memories = [each.memory for each in remembered if each.memory is not None]
        facts = JobFacts(max((memory.number for memory in memories), default=0))
        for memory in memories:
            if memory.number == facts.number:
                facts.merge(memory.record)
        self.last_number = max(facts.number, term << _TERM_SHIFT)
        workers = [each for each in remembered if each.member.role is Role.WORKER]
        for each in workers:
            if each.memory is not None and each.memory.is_busy:
                self._busy[each.member.incarnation] = each.memory.number if each.memory.working else 0
        lost = [member for member in dead if member.role is Role.WORKER]
        num_workers = max([self._num_workers, *(each.member.rank + 1 for each in workers), *(m.rank + 1 for m in lost)])
        for each in remembered:
            known = each.memory
            if known is not None and known.number == facts.number and known.posted is not None:
                self.ledger = JobLedger.restore(facts, known, workers, dead=lost, num_workers=num_workers, now_s=now_s)
                self._poster = each.peer
                return

    def end(self) -> list[Answer]:
        """Return what to answer all workers: there is no more work."""
        self._has_ended = True
        answers = [Answer(asked.call, Job(number=-1)) for asked, _ in self._seekers.values()]
        self._seekers.clear()
        if self.ledger is not None:
            self.ledger.close()
        return [*answers, *self._answers()]


def _worker(asked: Asked, membership: Membership) -> Member:
    member = membership.find(asked.incarnation)
    if member is None or member.role is not Role.WORKER:
        raise PeerError("this process is no worker of the cluster (any more)")
    return member
