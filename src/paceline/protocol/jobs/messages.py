"""Requests about jobs, as they travel to the scheduler; its answers are :mod:`paceline.protocol.jobs.records`.

A request that asks for nothing is answered by None as soon as it is noted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from paceline.protocol.jobs.records import MAX_SHARDS, Counters, JobRecord, JobSpec, Key


class JobRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request about jobs."""


class PostJob(JobRequest, frozen=True, kw_only=True, tag=True):
    """Post work for the workers. Posting another job ends the one before. Answered by the job's number."""

    spec: JobSpec


class GetJob(JobRequest, frozen=True, kw_only=True, tag=True):
    """A worker that has finished its part of job `after` asks for the next job, or for more of that one.

    Answered by Job, as soon as there is one and no worker is at another job any more.
    """

    after: int


class TakeLease(JobRequest, frozen=True, kw_only=True, tag=True):
    """A worker asks for a shard. Answered by Lease at once, or, with `wait`, when there is one."""

    job: int
    wait: bool


class LeaseDone(JobRequest, frozen=True, kw_only=True, tag=True):
    """A worker has finished the shard of a lease: the servers have acknowledged all its pushes.

    The counters include this shard, and no unfinished one.
    """

    job: int
    lease: int
    progress: Counters = {}


class FileEnded(JobRequest, frozen=True, kw_only=True, tag=True):
    """Reading has shown how many shards a file has."""

    job: int
    file: int
    num_shards: Annotated[int, msgspec.Meta(le=MAX_SHARDS)]


class Report(JobRequest, frozen=True, kw_only=True, tag=True):
    """A worker's findings for the process that posted the job; the frame's body belongs to them."""

    job: int
    fields: dict[str, Any]
    number: int = 0
    """Identifies a repeated report: a worker counts its reports from 1."""
    shard: Key | None = None
    """The shard of the findings: they count once this worker has finished it. None: they count at once."""


class JobFailed(JobRequest, frozen=True, kw_only=True, tag=True):
    """A worker found that no worker can do the job: the data is bad, for example."""

    job: int
    error: str
    message: str


class JobStatus(JobRequest, frozen=True, kw_only=True, tag=True):
    """Ask for a job's state. Answered by JobState."""

    job: int


class HasOtherPoster(JobRequest, frozen=True, kw_only=True, tag=True):
    """Ask whether another process has posted the latest job and may still return. Answered by bool."""


class GetAccount(JobRequest, frozen=True, kw_only=True, tag=True):
    """Ask which shards of a job are done. Answered by JobAccount."""

    job: int


class TakeReports(JobRequest, frozen=True, kw_only=True, tag=True):
    """Take the next report of a job. Answered by TakenReport, with the report's body, or by None."""

    job: int


class JobNews(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Notice from the scheduler to workers and the job's poster, so that its news survive the scheduler."""

    record: JobRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class CountersReceived:
    """A worker's heartbeat has brought its counters; the counter "job" is the number of their job."""

    counters: Counters


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of a process. The runtime answers by `call`, and identifies the process by `peer`."""

    call: object
    peer: object
    incarnation: int
    """The member's; 0 for a process that is no member."""
    request: JobRequest | CountersReceived
    body: Any = b""
    """The body of the request's frame."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer a call: now, or when its process is connected again."""

    call: object
    content: Any
    body: Any = b""
