"""The jobs of a cluster: requests to :class:`paceline.protocol.jobs.JobCore`, and its answers to those who asked."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from paceline.protocol import Membership
from paceline.protocol.jobs import JobCore, Remembered
from paceline.protocol.jobs.messages import Answer, CountersReceived, ReceivedRequest
from paceline.protocol.membership import Member
from paceline.protocol.scheduler.events import Removed
from paceline.ps import messages
from paceline.ps.scheduler.sessions import PendingCall, ProcessSession


class Jobs:
    """The jobs' rules, and the calls that wait for them. `num_workers` is how many the cluster begins with."""

    def __init__(self, num_workers: int) -> None:
        self.core = JobCore(num_workers)

    def serve(self, call: PendingCall, request: Any, body: memoryview, membership: Membership) -> None:
        """Carry out a request. Raises PeerError."""
        asked = ReceivedRequest(call, call.session, call.session.incarnation or 0, request, bytes(body))
        _answer(self.core.handle(asked, membership, time.monotonic()))

    def note_progress(self, session: ProcessSession, progress: dict[str, float], membership: Membership) -> None:
        """Take note of a worker's counters."""
        asked = ReceivedRequest(None, session, session.incarnation or 0, CountersReceived(counters=progress))
        _answer(self.core.handle(asked, membership, time.monotonic()))

    def removed(self, removed: Removed, session: ProcessSession | None) -> None:
        """Take note that a member is gone."""
        is_lost = removed.reason is not None
        _answer(self.core.removed(removed.member, session, is_lost=is_lost, time_s=time.monotonic()))

    def forget(self, session: ProcessSession) -> None:
        """Take note that a process does not come back."""
        _answer(self.core.forget(session))

    def take_news(self) -> messages.JobNews | None:
        """Return what is new of the job, for workers and poster to keep; None if nothing is."""
        record = self.core.take_news()
        return None if record is None else messages.JobNews(record=record)

    def record(self) -> messages.JobNews | None:
        """Return all that was news so far; None if there is no job."""
        record = self.core.record()
        return None if record is None else messages.JobNews(record=record)

    def concerns(self, session: ProcessSession) -> bool:
        """Whether a process has posted the latest job."""
        return self.core.concerns(session)

    def restore(
        self, rejoins: Iterable[tuple[ProcessSession, messages.Rejoin]], dead: Iterable[Member], *, term: int
    ) -> None:
        """Take over what the members know of the latest job in this term; `dead` are those that did not come back."""
        remembered = [Remembered(session, rejoin.member, rejoin.job) for session, rejoin in rejoins]
        self.core.restore(remembered, list(dead), time.monotonic(), term=term)

    def end(self) -> None:
        """Tell all workers that there is no more work."""
        _answer(self.core.end())


def _answer(answers: Iterable[Answer]) -> None:
    for answer in answers:
        assert isinstance(answer.call, PendingCall)
        answer.call.answer(answer.content, (answer.body,) if answer.body else ())
