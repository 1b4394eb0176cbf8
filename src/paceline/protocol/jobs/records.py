"""Records of jobs that members and scheduler exchange and store.

Facts of a job only accumulate. So records merge in any order, and a repeated merge changes nothing. The records of all
members together contain the facts that a dead scheduler had.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from paceline.errors import UsageError
from paceline.protocol.bounds import MAX_RANK

Key: TypeAlias = tuple[int, int, int]
"""Epoch, file and number of a shard. Shards are leased in this order."""

Counters: TypeAlias = dict[str, float]
"""A worker's counters in a job, by name. Counters never decrease."""

MAX_SHARDS: Final = 1 << 26
"""The maximum number of shards of a job over all files and epochs. Each file counts as one additional shard."""

NONE_FREE: Final = -1
ALL_DONE: Final = -2

_MAX_NUMBER: Final = 1 << 62


def _check(name: str, number: int, highest: int, lowest: int = 0) -> None:
    if not lowest <= number <= highest:
        raise UsageError(f"{name} {number}: expected {lowest} to {highest}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A shard to read. `lease` is its lease's number, NONE_FREE (request again with `wait`) or ALL_DONE."""

    lease: int
    epoch: int = 0
    file: int = 0
    shard: int = 0
    num_shards: int = 0

    def __post_init__(self) -> None:
        _check("lease", self.lease, _MAX_NUMBER, ALL_DONE)
        _check("shard", self.shard, MAX_SHARDS)
        _check("num_shards", self.num_shards, MAX_SHARDS)

    @property
    def key(self) -> Key:
        return self.epoch, self.file, self.shard


@dataclass(frozen=True, slots=True, kw_only=True)
class DoneShards:
    """Finished shards of one file in one epoch: bit i of `shards` (little endian) is shard `first` + i."""

    epoch: int
    file: int
    shards: bytes
    first: int = 0

    def __post_init__(self) -> None:
        _check("shard", self.first, MAX_SHARDS)


def done_shards(keys: Iterable[Key]) -> tuple[DoneShards, ...]:
    masks: dict[tuple[int, int], int] = {}
    for epoch, file, shard in keys:
        masks[epoch, file] = masks.get((epoch, file), 0) | 1 << shard
    return tuple(_done_shards(epoch, file, mask) for (epoch, file), mask in sorted(masks.items()))


def _done_shards(epoch: int, file: int, mask: int) -> DoneShards:
    first = max((mask & -mask).bit_length() - 1, 0)
    mask >>= first
    return DoneShards(epoch=epoch, file=file, shards=mask.to_bytes(-(-mask.bit_length() // 8), "little"), first=first)


def shards_in(done: Iterable[DoneShards]) -> Iterator[Key]:
    for part in done:
        for index, byte in enumerate(part.shards):
            for bit in range(8) if byte else ():
                if byte >> bit & 1:
                    yield part.epoch, part.file, part.first + 8 * index + bit


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """Work for the workers, which decode `description`. `files` has the number of shards per file, None if unknown."""

    description: bytes
    files: tuple[int | None, ...]
    epochs: int
    assignment: str
    """An :data:`paceline.protocol.jobs.shards.Assignment`."""
    done: tuple[DoneShards, ...] = ()
    """The shards that were finished in the snapshot from which the job continues; `progress` has their counters.
    """
    progress: Counters = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.assignment not in ("first-come", "strided"):
            raise UsageError(f"assignment {self.assignment!r}: expected first-come or strided")
        _check("epochs", self.epochs, MAX_SHARDS)
        for size in self.files:
            _check("shards of a file:", size or 0, MAX_SHARDS)
        total = self.epochs * sum(1 + (size or 0) for size in self.files)
        if total > MAX_SHARDS:
            raise UsageError(
                f"{len(self.files)} files in {self.epochs} epochs have {total} shards in total: expected at most "
                f"{MAX_SHARDS}; use larger shards, or fewer epochs"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """Facts of a job, in the form in which processes send them."""

    number: int
    num_workers: int = 0
    """The number of workers that share the shards of a strided job."""
    done: tuple[DoneShards, ...] = ()
    ended: dict[int, int] = field(default_factory=dict)
    """File → number of its shards, for files that workers have read to the end."""
    done_counters: dict[int, Counters] = field(default_factory=dict)
    """Incarnation of a worker → its counters after its last finished shard."""
    lost: int = 0
    failed: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        _check("job", self.number, _MAX_NUMBER)
        _check("workers:", self.num_workers, MAX_RANK + 1)
        _check("lost workers:", self.lost, _MAX_NUMBER)
        for size in self.ended.values():
            _check("shards of a file:", size, MAX_SHARDS)


def later(known: Mapping[str, float], counters: Mapping[str, float]) -> Counters:
    """Return the greater value of each counter, because an older message may arrive after a newer message."""
    return {**known, **{name: max(value, known.get(name, value)) for name, value in counters.items()}}


class JobFacts:
    """Accumulated facts of one job."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_workers = 0
        self.ended: dict[int, int] = {}
        self.done_counters: dict[int, Counters] = {}
        self.lost = 0
        self.failed: tuple[str, str] | None = None
        self._done: dict[tuple[int, int], int] = {}  # epoch, file → a set of shards as a mask

    def add_done(self, key: Key) -> None:
        epoch, file, shard = key
        self._done[epoch, file] = self._done.get((epoch, file), 0) | 1 << shard

    def add_counters(self, incarnation: int, counters: Mapping[str, float]) -> None:
        self.done_counters[incarnation] = later(self.done_counters.get(incarnation, {}), counters)

    def merge(self, record: JobRecord) -> None:
        self.num_workers = max(self.num_workers, record.num_workers)
        self.lost = max(self.lost, record.lost)
        self.failed = self.failed or record.failed
        self.ended.update(record.ended)
        for part in record.done:
            at = part.epoch, part.file
            self._done[at] = self._done.get(at, 0) | int.from_bytes(part.shards, "little") << part.first
        for incarnation, counters in record.done_counters.items():
            self.add_counters(incarnation, counters)

    def export(self) -> JobRecord:
        return JobRecord(
            number=self.number,
            num_workers=self.num_workers,
            done=tuple(_done_shards(epoch, file, mask) for (epoch, file), mask in self._done.items()),
            ended=dict(self.ended),
            done_counters={incarnation: dict(counters) for incarnation, counters in self.done_counters.items()},
            lost=self.lost,
            failed=self.failed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMemory:
    """One member's record of the latest job. All members' records together restore the scheduler's ledger."""

    record: JobRecord
    working: bool = False  # whether this member has received this job as a worker
    is_busy: bool = False
    """Whether this member is a worker that has this job or an earlier job and has not requested the next job."""
    leases: tuple[Lease, ...] = ()
    last_lease: int = -1
    progress: Counters = field(default_factory=dict)
    posted: JobSpec | None = None
    seconds: float = 0.0
    """The poster's last known time since the start of the job."""
    taken: tuple[tuple[int, int], ...] = ()
    """Reports that this member has received as the job's poster: (incarnation of the worker, number of the report)."""

    def __post_init__(self) -> None:
        _check("lease", self.last_lease, _MAX_NUMBER, -1)

    @property
    def number(self) -> int:
        return self.record.number

    @property
    def has_worked(self) -> bool:
        """Whether this member is a worker that had shards of the job."""
        return self.working and self.last_lease >= 0


# Answers of the scheduler.


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job. Number -1 means that the cluster ends and the worker may exit."""

    number: int
    description: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """The progress of a job. `progress` sums the counters of all workers, including dead ones."""

    done: int
    total: int | None
    finished: bool
    failed: tuple[str, str] | None
    progress: Counters
    seconds: float
    num_workers: int
    lost_workers: int
    num_reports: int
    busy_ranks: tuple[int, ...] = ()
    """The ranks of workers with an earlier job; this job starts when they finish it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAccount:
    """The finished shards of a job at one moment; all their pushes are acknowledged."""

    files: tuple[int | None, ...]
    """The number of shards of each file, None if unknown."""
    done: tuple[DoneShards, ...]
    progress: Counters = field(default_factory=dict)
    """The sums of the workers' counters over the finished shards: examples, loss, bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenReport:
    """The answer to TakeReports: report `number` of the worker with this incarnation."""

    fields: dict[str, Any]
    incarnation: int
    number: int
    done: tuple[Key, ...] = ()
    """The shards that this report completes; its receiver records them."""
    done_counters: Counters = field(default_factory=dict)
    """The worker's counters after the last shard in `done`."""
