"""The jobs of a cluster: one board after another, and who asks for them."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.errors import PeerError
from paceline.protocol import Membership, Role
from paceline.protocol.scheduler import events
from paceline.ps import messages
from paceline.ps.messages import ALL_DONE, JobMemory
from paceline.ps.scheduler.account import Account
from paceline.ps.scheduler.job import JobBoard
from paceline.ps.scheduler.sessions import Call, Session


class Jobs:
    """The latest job, and the workers that wait for the next one. `num_workers` is how many the cluster begins with."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._board: JobBoard | None = None
        self._last = 0  # the number of the latest, also where its board died with a former scheduler
        self._poster: Session | None = None
        self._seekers: dict[Session, tuple[Call, int]] = {}
        self._has_ended = False

    def serve(self, call: Call, request: msgspec.Struct, body: memoryview, membership: Membership) -> None:
        """Carry out a request. Raises PeerError."""
        match request:
            case messages.PostJob():
                self._post(call, request, membership)
            case messages.GetJob(after=after):
                self._get(call, after, membership)
            case messages.TakeLease(job=number, wait=wait):
                job = self._unless_over(number)
                if job is None:
                    call.answer(messages.Lease(lease=ALL_DONE))
                else:
                    job.take_lease(call, _rank(call, membership), wait)
            case messages.JobStatus(job=number):
                call.answer(self._current(number).state(len(membership.of(Role.WORKER))))
            case messages.GetAccount(job=number):
                call.answer(self._current(number).account())
            case messages.TakeReports(job=number):
                report = self._current(number).take_report()
                call.answer(*((None,) if report is None else (report[0], (report[1],))))
            case _:
                self._note(call, request, body, membership)
                call.answer(None)

    def _note(self, call: Call, request: Any, body: memoryview, membership: Membership) -> None:
        """Take note of what a worker says of its job; of one that is over it concerns nobody."""
        job = self._unless_over(request.job)
        if job is None:
            return
        incarnation = call.session.incarnation or 0
        match request:
            case messages.LeaseDone(progress=progress):
                job.lease_done(_rank(call, membership), incarnation, request)
                job.note_progress(incarnation, progress)
            case messages.FileEnded(file=file, num_shards=num_shards):
                job.file_ended(file, num_shards)
            case messages.Report():
                job.add_report(_rank(call, membership), incarnation, request, bytes(body))
            case messages.JobFailed(error=error, message=message):
                job.fail(error, message)

    def _post(self, call: Call, request: messages.PostJob, membership: Membership) -> None:
        self._last = number = self._last + 1
        if self._board is not None:
            self._board.end()
        ranks = [member.rank for member in membership.of(Role.WORKER)]
        # Strided work is dealt by rank: whoever is expected has a place in it, here or not.
        self._board = JobBoard(number, request, max(self._num_workers, max(ranks, default=-1) + 1), ranks)
        self._poster = call.session
        call.answer(number)
        for session, (seeker, after) in list(self._seekers.items()):
            if after < number:
                del self._seekers[session]
                seeker.answer(messages.Job(number=number, description=request.description))

    def _get(self, call: Call, after: int, membership: Membership) -> None:
        job = self._board
        if self._has_ended:
            call.answer(messages.Job(number=-1))
        elif job is not None and job.number > after:
            call.answer(messages.Job(number=job.number, description=job.description))
        else:
            if job is not None:
                job.worker_rests(_rank(call, membership))
            self._seekers[call.session] = (call, after)

    def _current(self, number: int) -> JobBoard:
        if self._board is None or self._board.number != number:
            raise PeerError(f"there is no job {number}, or it is over")
        return self._board

    def _unless_over(self, number: int) -> JobBoard | None:
        """Return a job; None if another one was posted since, or it died with its poster."""
        is_over = number <= self._last and (self._board is None or number != self._board.number)
        return None if is_over else self._current(number)

    # What becomes of members.

    def note_progress(self, incarnation: int, progress: dict[str, float]) -> None:
        """Take note of a worker's counters."""
        if self._board is not None and progress:
            self._board.note_progress(incarnation, progress)

    def removed(self, removed: events.Removed, session: Session | None) -> None:
        """Take note that a member is gone: a worker's leases go back, what nobody awaits any more is not done."""
        member = removed.member
        if self._board is not None and member.role is Role.WORKER:
            if removed.reason is None:
                self._board.worker_left(member.rank)
            else:
                self._board.worker_lost(member.rank, member.incarnation)
        if session is not None:
            self.forget(session)

    def forget(self, session: Session) -> None:
        """Take note that a process does not come back."""
        self._seekers.pop(session, None)
        if self._board is not None and session is self._poster:
            self._board.fail("PeerError", "whoever posted the job is gone")

    def take_news(self) -> messages.JobNews | None:
        """Return what is new of the job, for workers and poster to keep; None if nothing is."""
        return None if self._board is None else self._board.take_news()

    def concerns(self, session: Session) -> bool:
        """Whether a process has posted the latest job."""
        return session is self._poster

    # Beginning and end.

    def restore(self, rejoins: list[tuple[Session, messages.Rejoin]], dead: dict[int, int]) -> None:
        """Take over what the members know of the latest job; `dead` are lost workers, by rank their incarnation."""
        account = _account_of([rejoin for _, rejoin in rejoins])
        self._last = account.number
        memories = {
            rejoin.rank: (rejoin.incarnation, _known(rejoin.job, account.number))
            for _, rejoin in rejoins
            if rejoin.role == "worker"
        }
        for session, rejoin in rejoins:
            if rejoin.job is not None and rejoin.job.number == account.number and rejoin.job.posted is not None:
                num_workers = max(self._num_workers, *(rank + 1 for rank in (*memories, *dead)), 1)
                board = JobBoard.restore(account, rejoin.job, memories, dead=dead, num_workers=num_workers)
                self._board, self._poster = board, session
                return

    def end(self) -> None:
        """Tell all workers that there is no more work."""
        self._has_ended = True
        for call, _ in self._seekers.values():
            call.answer(messages.Job(number=-1))
        self._seekers.clear()
        if self._board is not None:
            self._board.end()


def _rank(call: Call, membership: Membership) -> int:
    incarnation = call.session.incarnation
    member = None if incarnation is None else membership.find(incarnation)
    if member is None or member.role is not Role.WORKER:
        raise PeerError("this process is no worker of the cluster (any more)")
    return member.rank


def _account_of(rejoins: list[messages.Rejoin]) -> Account:
    memories = [rejoin.job for rejoin in rejoins if rejoin.job is not None]
    account = Account(max((job.number for job in memories), default=0))
    for job in memories:
        if job.number == account.number:
            account.merge(job)
    return account


def _known(job: JobMemory | None, number: int) -> JobMemory:
    return job if job is not None and job.number == number else JobMemory(number=0)
