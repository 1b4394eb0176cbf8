"""Check the guarantees of a cluster after every event.

All processes report their actions to the :class:`Oracle`. So it has every push, every acknowledgement, and the members
and chains of every view. It raises :class:`Violation` if a guarantee does not hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Protocol, TypeAlias

from paceline.protocol.chains import ChainGroup
from paceline.protocol.jobs import DoneShards, JobState, Key, shards_in
from paceline.protocol.scheduler.views import View
from simulator.settings import RunSettings

Value: TypeAlias = tuple[int, int, int]
"""A worker's push to one bucket: (bucket, index, number). The index counts the worker's pushes to the bucket from 1."""


class DataLost(Exception):  # noqa: N818 - ends a run without an error
    """Buckets are lost, as expected when too many servers fail."""


class Violation(AssertionError):  # noqa: N818 - the command prints this word
    """A guarantee does not hold."""


class Pushing(Protocol):
    """The oracle's record of a worker."""

    is_dead: bool

    @property
    def finished_clock(self) -> int:
        """The number of finished iterations."""

    @property
    def is_counted(self) -> bool:
        """Whether servers wait for this worker."""

    @property
    def incarnation(self) -> int:
        """The worker's incarnation."""


class Data:
    """One bucket on one server: the sum of the pushes, and the index of each worker's last push (the *marks*)."""

    __slots__ = ("marks", "value")

    def __init__(self, value: int = 0, marks: dict[int, int] | None = None) -> None:
        self.value = value
        self.marks: dict[int, int] = {} if marks is None else marks

    def apply(self, worker: int, index: int, value: int, where: str) -> None:
        """Add one push."""
        before = self.marks.get(worker, 0)
        if index != before + 1:
            problem = "is applied again" if index <= before else f"is applied, but push {before + 1} is missing"
            raise Violation(f"{where}: push {index} of worker {worker} {problem} (exactly once)")
        self.marks[worker] = index
        self.value += value


class Oracle:
    """All pushes, acknowledgements, reads and views of a run."""

    def __init__(self, settings: RunSettings, *, allow_loss: bool = False) -> None:
        self.tau = settings.consistency.tau
        self.is_sequential = settings.is_sequential
        self._allow_loss = allow_loss
        self.view = View()
        """The newest committed view of any scheduler."""
        self.workers: list[Pushing] = []
        self.num_reads = 0
        self.num_compared = 0
        self.num_pushes = 0
        self._before: set[Key] = set()
        self._reported: Counter[Key] = Counter()
        self.lost = 0
        # (bucket, worker) → iteration and sum of the first n pushes, n = 0, 1, …
        self._pushes: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._by_bucket: dict[int, dict[int, list[tuple[int, int]]]] = {}
        self._acknowledged: dict[int, dict[int, int]] = {}  # bucket → worker → index
        self._reads: dict[tuple[int, int], int] = {}
        self._refused: dict[int, str] = {}  # workers that a server rejected as departed → the server
        self._views: dict[int, tuple[ChainGroup, ...]] = {}

    def record_loss(self, buckets: int) -> None:
        """Record lost buckets. Raises DataLost if buckets may be lost (`allow_loss`), else Violation."""
        self.lost |= buckets
        if self._allow_loss:
            raise DataLost
        raise Violation(f"buckets {buckets:b} are lost, although enough servers were alive")

    # Pushes.

    def push(self, worker: int, iteration: int, bucket: int, value: int) -> int:
        """Record a worker's push; return its index."""
        pushes = self._by_bucket.setdefault(bucket, {}).setdefault(worker, [(-1, 0)])
        pushes.append((iteration, pushes[-1][1] + value))
        self.num_pushes += 1
        return len(pushes) - 1

    def acknowledged(self, worker: int, values: tuple[Value, ...]) -> None:
        """Record that a push is acknowledged and stable."""
        for bucket, index, _ in values:
            acknowledged = self._acknowledged.setdefault(bucket, {})
            acknowledged[worker] = max(index, acknowledged.get(worker, 0))

    # Reads.

    def read(self, bucket: int, data: Data, reader: int, clock: int, version: int, server: int, where: str) -> None:
        """Check the answer of a server in view `version` to the worker `reader` in iteration `clock`."""
        self.num_reads += 1
        if version == self.view.version:
            self.check_acknowledged(bucket, data, where)
        members = {member.incarnation for member in self.view.members}
        if self.tau is None or reader not in members or server not in members:
            return  # a process that was declared dead may still read or answer old values
        needed = clock - self.tau
        for worker in self.workers:
            if not worker.is_counted or worker.is_dead or worker.incarnation not in members:
                continue
            if worker.finished_clock < needed:
                raise Violation(
                    f"{where}: bucket {bucket} is read in iteration {clock} while worker {worker.incarnation} has "
                    f"finished {worker.finished_clock} (gate)"
                )
            pushes = self._by_bucket.get(bucket, {}).get(worker.incarnation)
            if pushes is None:
                continue
            mark = data.marks.get(worker.incarnation, 0)
            if mark + 1 < len(pushes) and pushes[mark + 1][0] < needed:
                raise Violation(
                    f"{where}: bucket {bucket} is read in iteration {clock} without push {mark + 1} of worker "
                    f"{worker.incarnation}, of iteration {pushes[mark + 1][0]} (gate)"
                )
        # The check is for counted workers: a retired worker reads only to wait for stability, and may get later values.
        if self.is_sequential and any(
            worker.incarnation == reader and worker.is_counted and worker.finished_clock == clock
            for worker in self.workers
        ):
            self._read_sequential(bucket, data, clock, where)

    def _read_sequential(self, bucket: int, data: Data, clock: int, where: str) -> None:
        before = self._reads.setdefault((bucket, clock), data.value)
        if before != data.value:
            raise Violation(
                f"{where}: bucket {bucket} is read in iteration {clock} as {data.value} {data.marks}, but was "
                f"read before as {before} (sequential)"
            )
        for worker, mark in data.marks.items():
            if self._by_bucket[bucket][worker][mark][0] >= clock:
                raise Violation(f"{where}: bucket {bucket} in iteration {clock} has a later push (sequential)")

    def check_acknowledged(self, bucket: int, data: Data, where: str) -> None:
        """Check that a bucket has all acknowledged pushes."""
        for worker, index in self._acknowledged.get(bucket, {}).items():
            if data.marks.get(worker, 0) < index:
                raise Violation(
                    f"{where}: bucket {bucket} has {data.marks.get(worker, 0)} pushes of worker {worker}, {index} were "
                    "acknowledged (no acknowledged push is lost)"
                )

    def check_equal(self, bucket: int, first: Data, data: Data, where: str) -> None:
        """Check that a replica equals its primary, except for unacknowledged pushes of dead workers.

        Under sequential consistency only sums are forwarded along a chain, so replica and primary are always equal.
        """
        for worker in first.marks.keys() | data.marks.keys():
            last = len(self._by_bucket[bucket][worker]) - 1
            is_open = not self.is_sequential and self._acknowledged.get(bucket, {}).get(worker, 0) < last
            if first.marks.get(worker, 0) != data.marks.get(worker, 0) and not is_open:
                raise Violation(
                    f"{where} has {data.marks} in bucket {bucket}, its primary {first.marks} (replicas are equal)"
                )

    def check_value(self, bucket: int, data: Data, where: str) -> None:
        """Check that the value is the sum of the pushes in the marks."""
        pushes = self._by_bucket.get(bucket, {})
        if data.value != sum(pushes[worker][mark][1] for worker, mark in data.marks.items()):
            raise Violation(f"{where}: bucket {bucket} is not the sum of its pushes")

    # Views.

    def published(self, view: View) -> None:
        """Record that a scheduler has committed a view."""
        self.view = max(self.view, view, key=lambda known: known.order)
        self._check_refused()

    def refused(self, worker: int, where: str) -> None:
        """Record that a server rejects a worker as departed, which must be true in all later views."""
        self._refused[worker] = where
        self._check_refused()

    def _check_refused(self) -> None:
        for member in self.view.members if self._refused else ():
            if member.incarnation in self._refused:
                raise Violation(
                    f"{self._refused[member.incarnation]}: worker {member.incarnation} is rejected as departed, but is "
                    f"a member in view {self.view.order} (live members are served)"
                )

    def record_view(self, version: int, groups: tuple[ChainGroup, ...], where: str) -> None:
        """Record that a process applied a view."""
        known = self._views.setdefault(version, groups)
        if known is not groups and known != groups:
            raise Violation(f"{where}: two views of version {version} (one primary)")

    def leads(self, version: int, buckets: int, server: int, where: str) -> None:
        """Record that a server acts as the primary of buckets."""
        for group in self._views[version]:
            if buckets & group.buckets and (not group.members or group.members[0] != server):
                raise Violation(
                    f"{where}: server {server} leads buckets of another primary, view {version} (one primary)"
                )

    # The job.

    def posted(self, done: Iterable[DoneShards]) -> None:
        """Record a posted job with its finished shards."""
        self._before, self._reported = set(shards_in(done)), Counter()

    def reported(self, key: Key) -> None:
        """Record that the poster of the job has received the report of a shard."""
        self._reported[key] += 1

    def finished(self, state: JobState, expected: Mapping[Key, float], with_reports: Collection[Key]) -> None:
        """Check a finished job. `expected` has the number of examples of each shard."""
        if state.done != len(expected) or state.progress.get("examples", 0) != sum(expected.values()):
            raise Violation(
                f"{state.done} shards of {len(expected)} are done, and {state.progress} of {sum(expected.values())} "
                "examples are counted (each example once)"
            )
        reports = Counter({key: 1 for key in with_reports if key not in self._before})
        if self._reported != reports:
            raise Violation(
                f"of shards {sorted((self._reported - reports) + (reports - self._reported))} the poster has too many "
                "or too few reports (each example once)"
            )
