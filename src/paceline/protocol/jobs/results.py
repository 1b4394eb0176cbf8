"""The workers' reports and counters of one job; each shard counts once, even if a worker dies."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from paceline.protocol.jobs.messages import Report
from paceline.protocol.jobs.records import Counters, JobRecord, Key, TakenReport, later

_BEFORE = -1  # in place of an incarnation: what was done before this job, as a snapshot has it


@dataclass(slots=True)
class KeptReport:
    """A report, the shards that it completes for the poster, and the worker's counters then."""

    incarnation: int
    report: Report
    body: object
    done: list[Key] = field(default_factory=list)
    settled: Counters = field(default_factory=dict)
    num_told: int = 0
    """The number of these shards that were sent with the report."""

    @property
    def later(self) -> list[Key]:
        """The shards that were finished after the report was taken."""
        return self.done[self.num_told :]


class Results:
    """The counters and reports of one job, by the incarnation of the worker.

    If a worker and the scheduler die before the poster has a shard's report, the shard must be read again. So a shard
    counts as finished when the poster receives its report. The same holds for the worker's later shards, because
    counters have only totals, not shards.
    """

    def __init__(self, number: int, progress: Counters) -> None:
        self._number = number
        self._now: dict[int, Counters] = {_BEFORE: progress} if progress else {}
        self._of_done: dict[int, Counters] = {_BEFORE: progress}  # over the finished shards
        self._reports: deque[KeptReport] = deque()
        self._held: dict[tuple[int, Key], list[KeptReport]] = {}  # reports of unfinished shards
        self._unknown: dict[int, KeptReport] = {}  # the last report of each worker that completes a shard
        self._taken: KeptReport | None = None  # the last report sent, until the poster confirms it
        self._seen: set[tuple[int, int]] = set()  # reports: incarnation, number

    def restore(self, record: JobRecord, taken: tuple[tuple[int, int], ...]) -> None:
        """Restore the members' facts and the poster's reports."""
        self._seen.update(taken)
        self._of_done.update(record.settled)
        self._now.update((incarnation, dict(counters)) for incarnation, counters in record.settled.items())

    @property
    def num_reports(self) -> int:
        """The number of reports that the poster can take."""
        return len(self._reports)

    def note_progress(self, incarnation: int, counters: Counters) -> None:
        """Record a worker's current counters."""
        if counters.get("job") == self._number:
            self._now[incarnation] = later(self._now.get(incarnation, {}), counters)

    def shard_done(self, incarnation: int, key: Key, counters: Counters) -> bool:
        """Record a finished shard; return whether members may know it before the poster has its report."""
        self._of_done[incarnation] = later(self._of_done.get(incarnation, {}), counters)
        findings = self._held.pop((incarnation, key), [])
        self._reports.extend(findings)
        if findings:
            self._unknown[incarnation] = findings[-1]
        last = self._unknown.get(incarnation)
        if last is None:
            return True
        last.done.append(key)
        last.settled = counters
        return False

    def add_report(self, incarnation: int, report: Report, body: object) -> None:
        """Store a report for the poster; the report of a shard waits until the shard is finished."""
        if report.number:
            if (incarnation, report.number) in self._seen:
                return  # sent again, because its worker had no acknowledgement
            self._seen.add((incarnation, report.number))
        finding = KeptReport(incarnation, report, body)
        if report.shard is None:
            self._reports.append(finding)
        else:
            self._held.setdefault((incarnation, report.shard), []).append(finding)

    def take_report(self) -> tuple[TakenReport, object] | None:
        """Return the next report and its body."""
        if not self._reports:
            return None
        finding = self._taken = self._reports.popleft()
        finding.num_told = len(finding.done)
        report = TakenReport(
            fields=finding.report.fields,
            incarnation=finding.incarnation,
            number=finding.report.number,
            done=tuple(finding.done),
            settled=finding.settled,
        )
        return report, finding.body

    def report_received(self) -> KeptReport | None:
        """Record that the poster has its last report; return it if that completes further shards."""
        finding, self._taken = self._taken, None
        if finding is None:
            return None
        if self._unknown.get(finding.incarnation) is finding:
            del self._unknown[finding.incarnation]
        return finding if finding.later else None

    def forget_undone(self, incarnation: int) -> None:
        """Drop a worker's reports and counters of unfinished shards: other workers will read these."""
        self._held = {at: findings for at, findings in self._held.items() if at[0] != incarnation}
        self._now[incarnation] = self._of_done.get(incarnation, {})

    def progress(self) -> Counters:
        """The sum of all workers' counters."""
        return _sum(self._now)

    def progress_of_done(self) -> Counters:
        """The sum of all workers' counters over the finished shards."""
        return _sum(self._of_done)


def _sum(by_worker: dict[int, Counters]) -> Counters:
    total: Counters = {}
    for counters in by_worker.values():
        for name, value in counters.items():
            if name != "job":
                total[name] = total.get(name, 0.0) + value
    return total
