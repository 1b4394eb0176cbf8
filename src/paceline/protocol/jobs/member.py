"""A member's record of the latest job, from which a new scheduler restores it."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.protocol.jobs import messages
from paceline.protocol.jobs.records import (
    Counters,
    Job,
    JobFacts,
    JobMemory,
    JobRecord,
    JobSpec,
    JobState,
    Key,
    Lease,
    TakenReport,
)


class MemberLedger:
    """The record of one worker or poster, updated with each request and each answer.

    Reports are stored until the next job, because the scheduler may die with reports that the poster has not received.
    If a worker has sent reports about a shard, a new scheduler waits until the worker has resent these reports. Only
    then do this shard and the worker's later shards count as finished. If the worker dies first, they are read again.
    """

    def __init__(self) -> None:
        self.incarnation = 0
        self._facts = JobFacts(0)
        self._working = 0  # the number of this worker's latest job
        self._is_busy = False  # whether this worker has the job, and has not requested the next job
        self._leases: dict[int, Lease] = {}
        self._last_lease = -1
        self._progress: Counters = {}
        self._reports: dict[int, tuple[messages.Report, Any]] = {}  # number → report, body
        self._reported: set[Key] = set()  # the shards that have a report
        # lease → its LeaseDone, if the poster may lack reports of the shard, or an earlier LeaseDone is stored
        self._unknown: dict[int, messages.LeaseDone] = {}
        self._num_reports = 0
        self._posted: JobSpec | None = None
        self._seconds = 0.0
        self._answer_s: float | None = None  # time of the last status of a running job
        self._taken: set[tuple[int, int]] = set()

    def record_counters(self, counters: Counters) -> None:
        self._progress = counters

    def sent(self, request: messages.JobRequest, body: Any = ()) -> messages.JobRequest:
        """Record a request and a report's body; return the request to send."""
        facts = self._facts
        match request:
            case messages.Report(shard=shard):
                self._num_reports += 1
                request = msgspec.structs.replace(request, number=self._num_reports)
                self._reports[request.number] = request, body
                if shard is not None:
                    self._reported.add(shard)
            case messages.LeaseDone(job=job) if job == self._working:
                self._done(request)
            case messages.FileEnded(job=job, file=file, num_shards=num_shards) if job == facts.number:
                facts.ended[file] = num_shards
            case messages.GetJob():
                self._is_busy = False
            case messages.JobFailed(job=job, error=error, message=message) if job == facts.number:
                facts.failed = facts.failed or (error, message)
            case _:
                pass
        return request

    def _done(self, request: messages.LeaseDone) -> None:
        self._progress = request.progress or self._progress
        lease = self._leases.get(request.lease)
        if lease is None:
            return
        if self._unknown or lease.key in self._reported:
            self._unknown[request.lease] = request
            return
        del self._leases[request.lease]
        if request.job == self._facts.number:
            self._facts.add_done(lease.key)
            self._facts.add_counters(self.incarnation, request.progress)

    def answered(self, request: messages.JobRequest, answer: Any, time_s: float) -> None:
        facts = self._facts
        match request, answer:
            case messages.TakeLease(job=job), Lease(lease=number) if job == self._working and number >= 0:
                self._leases[number] = answer
                self._last_lease = max(self._last_lease, number)
            case messages.GetJob(), Job(number=number) if number <= self._working:
                self._is_busy = number > 0  # number > 0: the same job again, because its shards became free
            case messages.GetJob(), Job(number=number):
                self._is_busy = True
                self._begin(number)
                self._working, self._leases, self._last_lease = number, {}, -1
                self._progress, self._reports, self._reported, self._unknown = {}, {}, set(), {}
            case messages.PostJob(spec=spec), int():
                self._begin(answer)
                self._posted, self._taken = spec, set()
                self._seconds, self._answer_s = 0.0, None
            case messages.JobStatus(job=job), JobState() if job == facts.number:
                facts.lost = max(facts.lost, answer.lost_workers)
                self._seconds = answer.seconds
                self._answer_s = time_s if answer.seconds and not answer.finished else None
            case messages.TakeReports(job=job), TakenReport() if job == facts.number:
                self._taken.add((answer.incarnation, answer.number))
                for key in answer.done:
                    facts.add_done(key)
                if answer.done:
                    facts.add_counters(answer.incarnation, answer.done_counters)

    def merge_news(self, news: JobRecord) -> None:
        self._begin(news.number)
        if news.number == self._facts.number:
            self._facts.merge(news)

    def memory(self, time_s: float) -> JobMemory | None:
        """Return the record of the latest job for a new scheduler; None without a job."""
        if not self._facts.number:
            return None
        is_own = self._working == self._facts.number
        return JobMemory(
            record=self._facts.export(),
            working=is_own,
            is_busy=self._is_busy,
            leases=tuple(self._leases.values()) if is_own else (),
            last_lease=self._last_lease if is_own else -1,
            progress=self._progress if is_own else {},
            posted=self._posted,
            seconds=self._seconds + (0.0 if self._answer_s is None else time_s - self._answer_s),
            taken=tuple(sorted(self._taken)),
        )

    def requests_to_resend(self) -> list[tuple[messages.Report | messages.LeaseDone, Any]]:
        """Return the requests to resend to a new scheduler, with their bodies: first Reports, then LeaseDones."""
        return [*self._reports.values(), *((done, ()) for done in self._unknown.values())]

    def _begin(self, number: int) -> None:
        if number > self._facts.number:
            self._facts = JobFacts(number)
            self._posted = None
