"""What a process remembers for the scheduler, should a new one come in its place.

Every member keeps what it was told and what it said of itself: :class:`Memory` looks at the messages that go over its
line to the scheduler. Together, as :class:`messages.JobMemory`, the members know all that counts of the job.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from paceline.ps import messages
from paceline.ps.messages import JobMemory, KnownTable
from paceline.tables.bounds import TableNumber
from paceline.transport import read_meta


def _decode(meta: bytes, kind: Any) -> Any:
    return read_meta(meta, kind, "an answer of the scheduler")


class Account:
    """What is known of one job: the shards that are done, one byte each; ends of files; counters that count."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_workers = 0
        self.ended: dict[int, int] = {}
        self.settled: dict[int, dict[str, float]] = {}
        self.lost = 0
        self.failed: tuple[str, str] | None = None
        self._done: dict[tuple[int, int], bytearray] = {}

    def add(self, epoch: int, file: int, shard: int) -> None:
        """Note that a shard is done; again is as good as once."""
        marks = self._done.setdefault((epoch, file), bytearray())
        if shard >= len(marks):
            marks.extend(bytes(shard + 1 - len(marks)))
        marks[shard] = 1

    def settle(self, incarnation: int, counters: Mapping[str, float]) -> None:
        """Note a worker's counters at the end of a shard. They only rise: of two, the greater are the later ones."""
        known = self.settled.setdefault(incarnation, {})
        for name, value in counters.items():
            known[name] = max(value, known.get(name, value))

    def take_news(self, news: messages.JobNews) -> None:
        """Note what the scheduler tells."""
        self.num_workers = max(self.num_workers, news.num_workers)
        self.lost = max(self.lost, news.lost)
        self.ended.update(news.ended)
        for key in news.done:
            self.add(*key)
        for incarnation, counters in news.settled.items():
            self.settle(incarnation, counters)

    def merge(self, memory: JobMemory) -> None:
        """Note what another node knows."""
        self.num_workers = max(self.num_workers, memory.num_workers)
        self.lost = max(self.lost, memory.lost)
        self.failed = self.failed or memory.failed
        self.ended.update(memory.ended)
        for epoch, file, marks in memory.done:
            known = self._done.get((epoch, file), b"")
            both = int.from_bytes(known, "little") | int.from_bytes(marks, "little")
            self._done[epoch, file] = bytearray(both.to_bytes(max(len(known), len(marks)), "little"))
        for incarnation, counters in memory.settled.items():
            self.settle(incarnation, counters)

    def done(self) -> Iterator[tuple[int, int, int]]:
        """The shards that are done: epoch, file, shard."""
        for (epoch, file), marks in self._done.items():
            for shard, is_done in enumerate(marks):
                if is_done:
                    yield epoch, file, shard

    def export(self) -> JobMemory:
        """All of it, as it travels."""
        return JobMemory(
            number=self.number,
            num_workers=self.num_workers,
            done=tuple((epoch, file, bytes(marks)) for (epoch, file), marks in self._done.items()),
            ended=dict(self.ended),
            settled={incarnation: dict(counters) for incarnation, counters in self.settled.items()},
            lost=self.lost,
            failed=self.failed,
        )


class Memory:
    """What one process would tell a new scheduler. It looks at each message that goes out and each answer.

    Reports stay here until the next job: the scheduler may die with those that nobody has taken.
    """

    def __init__(self) -> None:
        self.incarnation = 0
        self._lock = threading.Lock()
        self._tables: dict[int, KnownTable] = {}
        self._account = Account(0)
        self._working = 0  # the number of the job that this worker was given last
        self._leases: dict[int, messages.Lease] = {}
        self._last_lease = -1
        self._progress: dict[str, float] = {}
        self._reports: list[tuple[messages.Report, tuple[Any, ...]]] = []
        self._num_reports = 0
        self._posted: messages.PostJob | None = None
        self._seconds = 0.0
        self._heard_seconds: float | None = None  # when, and that the job ran then
        self._taken: set[tuple[int, int]] = set()

    def sent(self, message: msgspec.Struct, body: Iterable[Any] = ()) -> msgspec.Struct:
        """Note a message before it is sent; return it as it is to be sent."""
        with self._lock:
            match message:
                case messages.Report():
                    self._num_reports += 1
                    message = msgspec.structs.replace(message, number=self._num_reports)
                    self._reports.append((message, tuple(body)))
                case messages.LeaseDone(job=job, lease=lease, progress=progress) if job == self._working:
                    self._note_progress(progress)
                    self._reports = [(msgspec.structs.replace(r, settled=True), parts) for r, parts in self._reports]
                    held = self._leases.pop(lease, None)
                    if held is not None and job == self._account.number:
                        self._account.add(held.epoch, held.file, held.shard)
                        self._account.settle(self.incarnation, progress)
                case messages.FileEnded(job=job, file=file, num_shards=num_shards) if job == self._account.number:
                    self._account.ended[file] = num_shards
                case messages.Heartbeat(progress=progress):
                    self._note_progress(progress)
                case messages.JobFailed(job=job, error=error, message=text) if job == self._account.number:
                    self._account.failed = self._account.failed or (error, text)
                case _:
                    pass
        return message

    def answered(self, message: msgspec.Struct, meta: bytes) -> None:
        """Note the answer to a message, in the thread that receives it: nothing is forgotten that has come."""
        with self._lock:
            match message:
                case messages.TakeLease(job=job) if job == self._working:
                    lease = _decode(meta, messages.Lease)
                    if lease.lease >= 0:
                        self._leases[lease.lease] = lease
                        self._last_lease = max(self._last_lease, lease.lease)
                case messages.GetJob():
                    number = _decode(meta, messages.Job).number
                    if number > self._working:
                        self._begin(number)
                        self._working, self._leases, self._last_lease = number, {}, -1
                        self._progress, self._reports = {}, []
                case messages.PostJob():
                    self._begin(_decode(meta, int))
                    self._posted, self._taken = message, set()
                    self._seconds, self._heard_seconds = 0.0, None
                case messages.JobStatus(job=job) if job == self._account.number:
                    state = _decode(meta, messages.JobState)
                    self._account.lost = max(self._account.lost, state.lost_workers)
                    self._seconds = state.seconds
                    self._heard_seconds = time.monotonic() if state.seconds and not state.finished else None
                case messages.TakeReports(job=job) if job == self._account.number:
                    report = _decode(meta, messages.TakenReport | None)
                    if report is not None:
                        self._taken.add((report.incarnation, report.number))
                        if report.done is not None:
                            self._account.add(*report.done)
                            self._account.settle(report.incarnation, report.settled)
                case messages.DeclareTable(spec=spec):
                    number = _decode(meta, TableNumber)
                    self._tables.setdefault(number, KnownTable(number=number, declared=spec, spec=spec))
                case _:
                    pass

    def told(self, news: messages.JobNews) -> None:
        """Note the scheduler's news."""
        with self._lock:
            self._begin(news.job)
            if news.job == self._account.number:
                self._account.take_news(news)

    def tables(self) -> tuple[KnownTable, ...]:
        """The tables that this process has declared."""
        with self._lock:
            return tuple(self._tables.values())

    def job(self) -> JobMemory | None:
        """What there is to tell of the latest job."""
        with self._lock:
            if not self._account.number:
                return None
            since = 0.0 if self._heard_seconds is None else time.monotonic() - self._heard_seconds
            is_mine = self._working == self._account.number
            return msgspec.structs.replace(
                self._account.export(),
                working=is_mine,
                leases=tuple(self._leases.values()) if is_mine else (),
                last_lease=self._last_lease if is_mine else -1,
                progress=self._progress if is_mine else {},
                posted=self._posted,
                seconds=self._seconds + since,
                taken=tuple(self._taken),
            )

    def reports(self) -> list[tuple[messages.Report, tuple[Any, ...]]]:
        """What this worker has reported of its job."""
        with self._lock:
            return list(self._reports)

    def _begin(self, number: int) -> None:
        """Turn to a later job."""
        if number > self._account.number:
            self._account = Account(number)
            self._posted = None

    def _note_progress(self, progress: dict[str, float]) -> None:
        if progress:
            self._progress = progress
