"""Requests about jobs to the scheduler; :mod:`paceline.protocol.jobs.records` has the answers.

A request without a result is answered by None once the scheduler has recorded the request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec

from paceline.protocol.jobs.records import MAX_SHARDS, Counters, JobRecord, JobSpec, Key


class JobRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request about jobs."""


class PostJob(JobRequest, frozen=True, kw_only=True, tag=True):
    """Post work for the workers. A new job ends the previous one. The answer is the job's number."""

    spec: JobSpec


class GetJob(JobRequest, frozen=True, kw_only=True, tag=True):
    """A worker has finished its part of job `after` and requests the next job, or more of the same job.

    The answer is Job, once a job exists and no worker has another job.
    """

    after: int


class TakeLease(JobRequest, frozen=True, kw_only=True, tag=True):
    """A worker requests a shard. The answer is Lease, immediately or, with `wait`, once a shard is free."""

    job: int
    wait: bool


class LeaseDone(JobRequest, frozen=True, kw_only=True, tag=True):
    """A worker has finished the shard of a lease: the servers have acknowledged all its pushes.

    The counters include this shard, and no unfinished shard.
    """

    job: int
    lease: int
    progress: Counters = {}


class FileEnded(JobRequest, frozen=True, kw_only=True, tag=True):
    """Report the number of shards of a file, after a worker has read the file to its end."""

    job: int
    file: int
    num_shards: Annotated[int, msgspec.Meta(le=MAX_SHARDS)]


class Report(JobRequest, frozen=True, kw_only=True, tag=True):
    """A worker's results for the process that posted the job, in `fields` and in the body of the frame."""

    job: int
    fields: dict[str, Any]
    number: int = 0
    """The worker's number of this report, from 1, by which the scheduler recognizes a repeat."""
    shard: Key | None = None
    """The report is delivered once the worker has finished this shard; immediately if the shard is None."""


class JobFailed(JobRequest, frozen=True, kw_only=True, tag=True):
    """Report that no worker can do the job, for example because the data is malformed."""

    job: int
    error: str
    message: str


class JobStatus(JobRequest, frozen=True, kw_only=True, tag=True):
    """Request a job's state. The answer is JobState."""

    job: int


OCCUPIED: Final = "another training uses this cluster. Wait for its end, or start another cluster"


class ClaimCluster(JobRequest, frozen=True, kw_only=True, tag=True):
    """Reserve the cluster: until this process leaves, only it may post jobs. The answer is False if it is reserved."""


class GetAccount(JobRequest, frozen=True, kw_only=True, tag=True):
    """Request the finished shards of a job. The answer is JobAccount."""

    job: int


class TakeReports(JobRequest, frozen=True, kw_only=True, tag=True):
    """Take the next report of a job. The answer is TakenReport with the report's body, or None if no report waits."""

    job: int


class JobNews(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """New facts of a job, which the workers and the poster store for a new scheduler."""

    record: JobRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class CountersReceived:
    """The counters in a worker's heartbeat; the counter "job" is the number of the job."""

    counters: Counters


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """A request on the connection `peer`. The answer (:class:`Answer`) refers to the request by `call`."""

    call: object
    peer: object
    incarnation: int
    request: JobRequest | CountersReceived
    body: Any = b""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a call. The runtime sends the answer now, or after the process has reconnected."""

    call: object
    content: Any
    body: Any = b""
