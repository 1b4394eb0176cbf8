"""What processes ask and tell a scheduler about jobs. Its answers are values of :mod:`paceline.protocol.jobs.records`.

What asks for nothing is answered by None when it has been noted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from paceline.protocol.jobs.records import Counters, JobSpec, Key


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPosted:
    """A process posts work for the workers, which ends the job before. Answered by the job's number."""

    spec: JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequested:
    """A worker that has done what there was of job `after` asks for the next, or for more of that one.

    Answered by Job, when there is one and no worker is at another job any more.
    """

    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequested:
    """A worker asks for a shard. Answered by Lease: at once, or, with `wait`, when there is one."""

    job: int
    wait: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseFinished:
    """A worker has done the shard of a lease; its counters include that, and no shard that it has not done."""

    job: int
    lease: int
    progress: Counters = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCountReported:
    """Reading has shown how many shards a file has."""

    job: int
    file: int
    num_shards: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportReceived:
    """A worker's findings for whoever posted the job."""

    job: int
    fields: dict[str, Any]
    body: Any = b""
    number: int = 0
    """By which one that comes twice is known: a worker counts its reports from 1."""
    shard: Key | None = None
    """The shard that it is of: it counts once that is done by this worker. None: it counts at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureFound:
    """A worker has found that the job cannot be done by anybody: the data is bad, say."""

    job: int
    error: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CountersReceived:
    """A worker's counters now; the counter "job" is the number of their job."""

    counters: Counters


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRequested:
    """A process asks how far a job is. Answered by JobState."""

    job: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountRequested:
    """A process asks what is done of a job. Answered by JobAccount."""

    job: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRequested:
    """A process asks for the next report of a job. Answered by TakenReport, with the report's body, or by None."""

    job: int


Request: TypeAlias = (
    JobPosted | JobRequested | LeaseRequested | LeaseFinished | ShardCountReported | ReportReceived | FailureFound
    | CountersReceived | StatusRequested | AccountRequested | ReportRequested
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Asked:
    """A process has asked. The runtime answers by `call` and knows the process by `peer`, and is given both back."""

    call: object
    peer: object
    incarnation: int
    """The member's; 0 for a process that is no member."""
    request: Request


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer a call: now, or when its process is connected again."""

    call: object
    content: Any
    body: Any = b""
