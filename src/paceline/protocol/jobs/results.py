"""The workers' reports and counters of one job; each shard counts once, even if a worker dies."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from paceline.protocol.jobs.messages import Report
from paceline.protocol.jobs.records import Counters, JobRecord, Key, TakenReport, later

_BEFORE = -1  # key of the counters from a snapshot; other keys are incarnations


@dataclass(slots=True)
class StoredReport:
    """A report, and the shards that count as finished when the poster has it, with the counters after these shards."""

    incarnation: int
    report: Report
    body: object
    done: list[Key] = field(default_factory=list)
    done_counters: Counters = field(default_factory=dict)
    num_sent: int = 0
    """The number of shards of `done` that were sent with the report."""

    @property
    def later(self) -> list[Key]:
        """The shards of `done` that were added after the report was sent."""
        return self.done[self.num_sent :]


class Results:
    """The counters and reports of one job, by the incarnation of the worker.

    The poster is the process that posted the job. A shard counts as finished when the poster has the shard's report,
    because until then the report is lost if worker and scheduler die. The worker's later shards wait for this report
    too, because the worker's counters are totals over all its shards.
    """

    def __init__(self, number: int, progress: Counters) -> None:
        self._number = number
        self._current: dict[int, Counters] = {_BEFORE: progress} if progress else {}
        self._of_done: dict[int, Counters] = {_BEFORE: progress}  # incarnation → counters of its finished shards
        self._reports: deque[StoredReport] = deque()
        self._held: dict[tuple[int, Key], list[StoredReport]] = {}  # reports of unfinished shards
        self._unknown: dict[int, StoredReport] = {}  # each worker's last report that the poster lacks
        self._taken: StoredReport | None = None  # the last report sent, until the poster confirms it
        self._seen: set[tuple[int, int]] = set()  # (incarnation, number) of all received reports

    def restore(self, record: JobRecord, taken: tuple[tuple[int, int], ...]) -> None:
        self._seen.update(taken)
        self._of_done.update(record.done_counters)
        self._current.update((incarnation, dict(counters)) for incarnation, counters in record.done_counters.items())

    @property
    def num_reports(self) -> int:
        return len(self._reports)

    def record_progress(self, incarnation: int, counters: Counters) -> None:
        if counters.get("job") == self._number:
            self._current[incarnation] = later(self._current.get(incarnation, {}), counters)

    def shard_done(self, incarnation: int, key: Key, counters: Counters) -> bool:
        """Record a finished shard; return False if members must not record it before the poster has a report."""
        self._of_done[incarnation] = later(self._of_done.get(incarnation, {}), counters)
        completed = self._held.pop((incarnation, key), [])
        self._reports.extend(completed)
        if completed:
            self._unknown[incarnation] = completed[-1]
        last = self._unknown.get(incarnation)
        if last is None:
            return True
        last.done.append(key)
        last.done_counters = counters
        return False

    def add_report(self, incarnation: int, report: Report, body: object) -> None:
        """Store a report for the poster; the report of a shard waits until the shard is finished."""
        if report.number:
            if (incarnation, report.number) in self._seen:
                return  # a repeat: the worker received no acknowledgement of the first copy
            self._seen.add((incarnation, report.number))
        stored = StoredReport(incarnation, report, body)
        if report.shard is None:
            self._reports.append(stored)
        else:
            self._held.setdefault((incarnation, report.shard), []).append(stored)

    def take_report(self) -> tuple[TakenReport, object] | None:
        if not self._reports:
            return None
        stored = self._taken = self._reports.popleft()
        stored.num_sent = len(stored.done)
        report = TakenReport(
            fields=stored.report.fields,
            incarnation=stored.incarnation,
            number=stored.report.number,
            done=tuple(stored.done),
            done_counters=stored.done_counters,
        )
        return report, stored.body

    def report_received(self) -> StoredReport | None:
        """Record that the poster has the last sent report; return it if shards were added to it since it was sent."""
        stored, self._taken = self._taken, None
        if stored is None:
            return None
        if self._unknown.get(stored.incarnation) is stored:
            del self._unknown[stored.incarnation]
        return stored if stored.later else None

    def forget_undone(self, incarnation: int) -> None:
        """Drop a worker's reports and counters of unfinished shards, because other workers will read these shards."""
        self._held = {at: completed for at, completed in self._held.items() if at[0] != incarnation}
        self._current[incarnation] = self._of_done.get(incarnation, {})

    def progress(self) -> Counters:
        return _sum(self._current)

    def progress_of_done(self) -> Counters:
        return _sum(self._of_done)


def _sum(by_worker: dict[int, Counters]) -> Counters:
    total: Counters = {}
    for counters in by_worker.values():
        for name, value in counters.items():
            if name != "job":
                total[name] = total.get(name, 0.0) + value
    return total
