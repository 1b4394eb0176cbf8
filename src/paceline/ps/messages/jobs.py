"""What workers, the poster of a job and the scheduler say to each other of its shards.

Each request is an event of :mod:`paceline.protocol.jobs.events`, as it travels (:func:`job_event`).
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from paceline.protocol.jobs import MAX_SHARDS, JobRecord, JobSpec, Key, events


class PostJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Post work for the workers. Posting another job ends the one before. Answered by the job's number."""

    spec: JobSpec


class GetJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker that has done what there was of job `after` asks for the next, or for more of that one.

    Answered by Job, held until there is one and no worker is at another job any more.
    """

    after: int


class TakeLease(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker asks for a shard of job `job`; answered by Lease at once, or, with `wait`, when there is one."""

    job: int
    wait: bool


class LeaseDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A shard is done: all that came of it is acknowledged by the servers."""

    job: int
    lease: int
    progress: dict[str, float] = {}


class FileEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reading has shown how many shards a file has."""

    job: int
    file: int
    num_shards: Annotated[int, msgspec.Meta(le=MAX_SHARDS)]


class Report(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker's findings for whoever posted the job; the frame's body goes with them."""

    job: int
    fields: dict[str, Any]
    number: int = 0
    """By which one that comes twice is known; the link counts them from 1."""
    shard: Key | None = None
    """The shard that it is of: it counts when that is done, and once. None: it counts at once."""


class JobFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker found that the job cannot be done by anybody: the data is bad, say."""

    job: int
    error: str
    message: str


class JobStatus(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask for a job's state; answered by JobState."""

    job: int


class HasOtherPoster(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask whether another process has posted the latest job, and may still return; answered by bool."""


class GetAccount(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask the scheduler what is done of a job; answered by JobAccount."""

    job: int


class TakeReports(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take the next report of a job; answered by TakenReport, or None; the report's body is the answer's."""

    job: int


class JobNews(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """NOTICE from the scheduler to workers and the job's poster: what is new, so that it survives the scheduler."""

    record: JobRecord


_EVENTS: Final[dict[type, Any]] = {
    PostJob: events.JobPosted,
    GetJob: events.JobRequested,
    TakeLease: events.LeaseRequested,
    LeaseDone: events.LeaseFinished,
    FileEnded: events.ShardCountReported,
    Report: events.ReportReceived,
    JobFailed: events.FailureFound,
    JobStatus: events.StatusRequested,
    GetAccount: events.AccountRequested,
    TakeReports: events.ReportRequested,
}


def job_event(message: msgspec.Struct, body: Any = None) -> events.Request | None:
    """Return a message as the event that it is to the jobs' rules; None if it is none of a job."""
    kind = _EVENTS.get(type(message))
    if kind is None:
        return None
    event: events.Request = kind(**msgspec.structs.asdict(message), **({} if body is None else {"body": body}))
    return event
