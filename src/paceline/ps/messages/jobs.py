"""What workers, the poster of a job and the scheduler say to each other of its shards."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from paceline.errors import UsageError
from paceline.storage.format import DoneShards
from paceline.tables.bounds import MAX_SHARDS, Assignment, Number, NumShards, Rank


class JobMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What one node knows of the latest job. All nodes' together are what the scheduler knew, or counts no more."""

    number: Number
    num_workers: Rank = 0
    """Strided: how many workers the shards are dealt to."""
    done: tuple[tuple[int, int, bytes], ...] = ()
    """Epoch, file and a byte for each of its shards: 1 where it is done."""
    ended: dict[int, NumShards] = {}
    """The numbers of shards that reading has shown, by file."""
    settled: dict[int, dict[str, float]] = {}
    """The counters of each worker (by incarnation) at the end of its last shard."""
    lost: Number = 0
    """How many workers have died."""
    failed: tuple[str, str] | None = None
    working: bool = False
    """Whether this node is a worker that was given the job."""
    leases: tuple[Lease, ...] = ()
    """Those that this worker holds."""
    last_lease: Annotated[int, msgspec.Meta(le=2**62)] = -1
    progress: dict[str, float] = {}
    """This worker's counters now."""
    posted: PostJob | None = None
    """The job itself, if this node has posted it."""
    seconds: float = 0.0
    """Since its beginning, as far as its poster knows."""
    taken: tuple[tuple[int, int], ...] = ()
    """The reports that its poster has: the worker's incarnation, the report's number."""


class PostJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Post work for the workers: `description` is theirs to understand, `files` are shards per file (None: unknown).

    Posting another job ends the one before. Answered by the job's number.
    """

    description: bytes
    files: tuple[NumShards | None, ...]
    epochs: NumShards
    assignment: Assignment
    done: tuple[DoneShards, ...] = ()
    """What is done already, as a snapshot says; and the counters of that."""
    progress: dict[str, float] = {}

    def __post_init__(self) -> None:
        total = self.epochs * sum(1 + (size or 0) for size in self.files)
        if total > MAX_SHARDS:
            raise UsageError(
                f"{len(self.files)} files in {self.epochs} epochs come to {total} shards: expected at most "
                f"{MAX_SHARDS}; use larger shards, or fewer epochs"
            )


class GetJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker asks for the first job after number `after`; answered by Job, held until there is one."""

    after: int


class Job(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A job, or its absence: number -1 means that the cluster is done and the worker may go."""

    number: int
    description: bytes = b""


class TakeLease(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker asks for a shard of job `job`; answered by Lease at once, or, with `wait`, when there is one."""

    job: int
    wait: bool


NOTHING_NOW: Final = -1
ALL_DONE: Final = -2


class Lease(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A shard of work; or, as its number, NOTHING_NOW (ask again with wait) or ALL_DONE."""

    lease: Annotated[int, msgspec.Meta(le=2**62)]
    epoch: int = 0
    file: int = 0
    shard: Annotated[int, msgspec.Meta(le=MAX_SHARDS)] = 0


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
    settled: bool = False
    """Whether the shard that it is of is done."""


class JobFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker found that the job cannot be done by anybody: the data is bad, say."""

    job: int
    error: str
    message: str


class JobStatus(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask for a job's state; answered by JobState."""

    job: int


class JobState(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How far a job is. `progress` sums what workers told, the dead included."""

    done: int
    total: int | None
    finished: bool
    failed: tuple[str, str] | None
    progress: dict[str, float]
    seconds: float
    """From the first shard leased to the last worker through."""
    num_workers: int
    lost_workers: int
    num_reports: int


class TakeReports(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take the next report of a job; answered by TakenReport, or None; the report's body is the answer's."""

    job: int


class TakenReport(msgspec.Struct, frozen=True, kw_only=True):
    """A report, and the incarnation of the worker that made it as its number `number`."""

    fields: dict[str, Any]
    incarnation: int
    number: int
    done: tuple[int, int, int] | None = None
    """The shard that it is of (epoch, file, shard), if that is done by it: who takes the report keeps that too."""
    settled: dict[str, float] = {}
    """The worker's counters at that shard's end."""


class JobNews(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """NOTICE from the scheduler to workers and the job's poster: what is new, so that it survives the scheduler."""

    job: int
    num_workers: int
    done: tuple[tuple[int, int, int], ...] = ()
    """Epoch, file and shard."""
    ended: dict[int, int] = {}
    settled: dict[int, dict[str, float]] = {}
    """As in JobMemory, and told with the shards that the counters include."""
    lost: int = 0
