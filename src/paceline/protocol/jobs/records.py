"""What is known of a job: the values that members and scheduler exchange, and remember for one another.

Facts of a job only accumulate, so records of them merge in any order, and the same record twice is as good as once.
What all members know together is what a scheduler knew that died (:meth:`paceline.protocol.jobs.JobLedger.restore`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from paceline.errors import UsageError

Key: TypeAlias = tuple[int, int, int]
"""Epoch, file and number of a shard: their order is the order of leasing."""

Counters: TypeAlias = dict[str, float]
"""What a worker has done in a job, by name; counters only rise."""

MAX_SHARDS: Final = 1 << 26
"""Of a job: those of all its files in all its epochs, and one more for each file in each epoch."""

NOTHING_NOW: Final = -1
ALL_DONE: Final = -2

_MAX_NUMBER: Final = 1 << 62


def _check(what: str, number: int, highest: int, lowest: int = 0) -> None:
    if not lowest <= number <= highest:
        raise UsageError(f"{what} {number}: expected {lowest} to {highest}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A shard for a worker to read; or, as its number, NOTHING_NOW (ask again and wait) or ALL_DONE."""

    lease: int
    epoch: int = 0
    file: int = 0
    shard: int = 0
    num_shards: int = 0
    """How many the file has; 0 while that is unknown."""

    def __post_init__(self) -> None:
        _check("lease", self.lease, _MAX_NUMBER, ALL_DONE)
        _check("shard", self.shard, MAX_SHARDS)
        _check("num_shards", self.num_shards, MAX_SHARDS)

    @property
    def key(self) -> Key:
        """The shard."""
        return self.epoch, self.file, self.shard


@dataclass(frozen=True, slots=True, kw_only=True)
class DoneShards:
    """Shards of one file that are done in one epoch: bit i of `shards` (little endian) stands for shard `first` + i."""

    epoch: int
    file: int
    shards: bytes
    first: int = 0

    def __post_init__(self) -> None:
        _check("shard", self.first, MAX_SHARDS)


def done_shards(keys: Iterable[Key]) -> tuple[DoneShards, ...]:
    """Return shards that are done as they travel."""
    masks: dict[tuple[int, int], int] = {}
    for epoch, file, shard in keys:
        masks[epoch, file] = masks.get((epoch, file), 0) | 1 << shard
    return tuple(_done_shards(epoch, file, mask) for (epoch, file), mask in sorted(masks.items()))


def _done_shards(epoch: int, file: int, mask: int) -> DoneShards:
    first = max((mask & -mask).bit_length() - 1, 0)
    mask >>= first
    return DoneShards(epoch=epoch, file=file, shards=mask.to_bytes(-(-mask.bit_length() // 8), "little"), first=first)


def shards_in(done: Iterable[DoneShards]) -> Iterator[Key]:
    """Yield the shards that are done."""
    for each in done:
        for index, byte in enumerate(each.shards):
            for bit in range(8) if byte else ():
                if byte >> bit & 1:
                    yield each.epoch, each.file, each.first + 8 * index + bit


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """Work for the workers: `description` is theirs to understand, `files` are shards per file (None: unknown)."""

    description: bytes
    files: tuple[int | None, ...]
    epochs: int
    assignment: str
    """An :data:`paceline.protocol.jobs.shards.Assignment`."""
    done: tuple[DoneShards, ...] = ()
    """What is done already, as a snapshot says; and the counters of that."""
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
                f"{len(self.files)} files in {self.epochs} epochs come to {total} shards: expected at most "
                f"{MAX_SHARDS}; use larger shards, or fewer epochs"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """Facts of a job, as they travel."""

    number: int
    num_workers: int = 0
    """Strided: how many workers the shards are dealt to."""
    done: tuple[DoneShards, ...] = ()
    ended: dict[int, int] = field(default_factory=dict)
    """The numbers of shards that reading has shown, by file."""
    settled: dict[int, Counters] = field(default_factory=dict)
    """The counters of each worker (by incarnation) at the end of its last shard that is done."""
    lost: int = 0
    """How many workers have died."""
    failed: tuple[str, str] | None = None
    """The kind and text of the error for which it has failed."""

    def __post_init__(self) -> None:
        _check("job", self.number, _MAX_NUMBER)
        _check("workers:", self.num_workers, 65535)
        _check("lost workers:", self.lost, _MAX_NUMBER)
        for size in self.ended.values():
            _check("shards of a file:", size, MAX_SHARDS)


def later(known: Mapping[str, float], counters: Mapping[str, float]) -> Counters:
    """Return the later of a worker's counters, which are the greater ones: some is said again, and late."""
    return {**known, **{name: max(value, known.get(name, value)) for name, value in counters.items()}}


class JobFacts:
    """Facts of one job, as somebody collects them."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_workers = 0
        self.ended: dict[int, int] = {}
        self.settled: dict[int, Counters] = {}
        self.lost = 0
        self.failed: tuple[str, str] | None = None
        self._done: dict[tuple[int, int], int] = {}  # epoch, file → a set of shards as a mask

    def add_done(self, key: Key) -> None:
        """Note that a shard is done."""
        epoch, file, shard = key
        self._done[epoch, file] = self._done.get((epoch, file), 0) | 1 << shard

    def settle(self, incarnation: int, counters: Mapping[str, float]) -> None:
        """Note a worker's counters at the end of a shard: of two, the greater are the later ones."""
        self.settled[incarnation] = later(self.settled.get(incarnation, {}), counters)

    def merge(self, record: JobRecord) -> None:
        """Note what somebody else knows."""
        self.num_workers = max(self.num_workers, record.num_workers)
        self.lost = max(self.lost, record.lost)
        self.failed = self.failed or record.failed
        self.ended.update(record.ended)
        for each in record.done:
            at = each.epoch, each.file
            self._done[at] = self._done.get(at, 0) | int.from_bytes(each.shards, "little") << each.first
        for incarnation, counters in record.settled.items():
            self.settle(incarnation, counters)

    def export(self) -> JobRecord:
        """All of it, as it travels."""
        return JobRecord(
            number=self.number,
            num_workers=self.num_workers,
            done=tuple(_done_shards(epoch, file, mask) for (epoch, file), mask in self._done.items()),
            ended=dict(self.ended),
            settled={incarnation: dict(counters) for incarnation, counters in self.settled.items()},
            lost=self.lost,
            failed=self.failed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMemory:
    """What one member knows of the latest job. All members' together are what the scheduler knew, or counts no more."""

    record: JobRecord
    working: bool = False
    """Whether this member is a worker that was given the job."""
    is_busy: bool = False
    """Whether this member is a worker that was given a job, this or one before, and has not asked for the next."""
    leases: tuple[Lease, ...] = ()
    """Those that this worker holds."""
    last_lease: int = -1
    progress: Counters = field(default_factory=dict)
    """This worker's counters now."""
    posted: JobSpec | None = None
    """The job itself, if this member has posted it."""
    seconds: float = 0.0
    """Since its beginning, as far as its poster knows."""
    taken: tuple[tuple[int, int], ...] = ()
    """The reports that its poster has: the worker's incarnation, the report's number."""

    def __post_init__(self) -> None:
        _check("lease", self.last_lease, _MAX_NUMBER, -1)

    @property
    def number(self) -> int:
        """The job's."""
        return self.record.number

    @property
    def has_worked(self) -> bool:
        """Whether this member is a worker that was given shards of the job."""
        return self.working and self.last_lease >= 0


# Answers of the scheduler.


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job, or its absence: number -1 means that the cluster is done and the worker may go."""

    number: int
    description: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """How far a job is. `progress` sums what workers told, the dead included."""

    done: int
    total: int | None
    finished: bool
    failed: tuple[str, str] | None
    progress: Counters
    seconds: float
    """From the first shard leased to the last worker through."""
    num_workers: int
    lost_workers: int
    num_reports: int
    awaited: tuple[int, ...] = ()
    """The ranks of workers that are at the job before: this one begins when they are through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAccount:
    """What was done of a job at one moment: all pushes that came of the done shards are acknowledged."""

    files: tuple[int | None, ...]
    """Shards of each file, where known."""
    done: tuple[DoneShards, ...]
    progress: Counters = field(default_factory=dict)
    """The workers' counters over the done shards: examples, loss, bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenReport:
    """A report, and the incarnation of the worker that made it as its number `number`."""

    fields: dict[str, Any]
    incarnation: int
    number: int
    done: tuple[Key, ...] = ()
    """The shards that are done by it: who takes the report keeps that too."""
    settled: Counters = field(default_factory=dict)
    """The worker's counters at the end of the last of these shards."""
