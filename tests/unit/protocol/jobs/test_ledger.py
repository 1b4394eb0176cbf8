"""One job's ledger: leases of shards, counted reports, and restoring."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.protocol import Member, Role
from paceline.protocol.bounds import MAX_RANK
from paceline.protocol.jobs import (
    ALL_DONE,
    DoneShards,
    JobMemory,
    JobRecord,
    JobSpec,
    Lease,
    RejoinedMember,
    messages,
    shards_in,
)
from paceline.protocol.jobs.ledger import JobLedger
from paceline.protocol.jobs.records import JobFacts


def spec(files: tuple[int | None, ...], *, assignment: str = "first-come", **fields: Any) -> JobSpec:
    return JobSpec(description=b"", files=files, epochs=1, assignment=assignment, **fields)


class Worker:
    """A worker that takes leases of a ledger. Its incarnation is 10 + its rank."""

    def __init__(self, rank: int) -> None:
        self._answer: Lease | None = None
        self.member = Member(f"worker {rank}", Role.WORKER, rank, 10 + rank)

    def take(self, ledger: JobLedger) -> Lease | None:
        """Request a shard; return the immediate answer."""
        ledger.leases.take(self, self.member.rank, wait=True, time_s=1.0)
        return self.answer(ledger)

    def answer(self, ledger: JobLedger) -> Lease | None:
        """Return the answer to this worker."""
        for reply in ledger.leases.take_answers():
            assert isinstance(reply.call, Worker)
            assert reply.call._answer is None
            reply.call._answer = reply.content
        answer, self._answer = self._answer, None
        return answer

    def done(self, ledger: JobLedger, lease: Lease, examples: float = 1.0) -> None:
        progress = {"job": 1.0, "examples": examples}
        ledger.lease_done(self.member, messages.LeaseDone(job=1, lease=lease.lease, progress=progress))

    def predict(self, ledger: JobLedger, number: int, lease: Lease) -> None:
        report = messages.Report(job=1, fields={}, number=number, shard=lease.key)
        ledger.results.add_report(self.member.incarnation, report, b"scores")

    def rejoined(self, memory: JobMemory | None) -> RejoinedMember:
        return RejoinedMember(self, self.member, memory)


def news_of(ledger: JobLedger) -> list[tuple[int, int, int]] | None:
    """Return the finished shards that the ledger reports to members."""
    news = ledger.take_news()
    return None if news is None else list(shards_in(news.done))


def taken(worker: Worker, ledger: JobLedger) -> Lease:
    lease = worker.take(ledger)
    assert lease is not None
    assert lease.lease >= 0
    return lease


def test_a_job_of_the_largest_number_of_workers_has_a_record() -> None:
    ledger = JobLedger(1, spec((4,)), MAX_RANK + 1, [MAX_RANK])
    ledger.fail("DataError", "a file is missing")
    record = ledger.take_news()
    assert record is not None
    assert record.num_workers == MAX_RANK + 1


def test_strided_shards_are_leased_when_all_workers_have_requested() -> None:
    ledger = JobLedger(1, spec((4,), assignment="strided"), 2, [0, 1])
    first, second = Worker(0), Worker(1)
    assert second.take(ledger) is None
    lease = taken(first, ledger)
    other = second.answer(ledger)
    assert other is not None
    assert (lease.shard, other.shard) == (0, 1)


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_job_does_not_wait_for_a_worker_after_departure(is_dead: bool) -> None:
    ledger = JobLedger(1, spec((2,), assignment="strided"), 2, [0, 1])
    first = Worker(0)
    assert first.take(ledger) is None
    ledger.removed(Worker(1).member, is_lost=is_dead, time_s=1.0)
    assert first.answer(ledger) is not None


def test_shards_of_a_snapshot_are_not_read_again() -> None:
    done = DoneShards(epoch=0, file=0, shards=b"\5")
    ledger = JobLedger(1, spec((3,), done=(done,), progress={"examples": 8.0}), 1, [0])
    worker = Worker(0)
    lease = taken(worker, ledger)
    assert lease.shard == 1
    worker.done(ledger, lease, 3.0)
    answer = worker.take(ledger)
    assert answer is not None
    assert answer.lease == ALL_DONE
    assert ledger.account().progress == {"examples": 11.0}
    assert ledger.account().done == (DoneShards(epoch=0, file=0, shards=b"\7"),)


def test_members_are_notified_of_the_end_of_a_file() -> None:
    ledger = JobLedger(1, spec((None,)), 1, [0])
    worker = Worker(0)
    assert ledger.state(1, 2.0).total is None
    lease = taken(worker, ledger)
    ledger.file_ended(0, 1)
    worker.done(ledger, lease)
    assert (ledger.state(1, 2.0).done, ledger.state(1, 2.0).total) == (1, 1)
    news = ledger.take_news()
    assert news is not None
    assert news.ended == {0: 1}


def test_a_report_is_counted_after_the_shard_is_done() -> None:
    ledger = JobLedger(1, spec((1,)), 1, [0])
    worker = Worker(0)
    ledger.take_news()
    lease = taken(worker, ledger)
    worker.predict(ledger, 1, lease)
    assert ledger.take_report() is None
    worker.done(ledger, lease, 5.0)
    assert ledger.take_news() is None
    taken_report = ledger.take_report()
    assert taken_report is not None
    report, body = taken_report
    assert (report.incarnation, report.number, report.done, body) == (10, 1, ((0, 0, 0),), b"scores")
    assert report.done_counters == {"job": 1.0, "examples": 5.0}
    assert ledger.take_news() is None


def test_later_shards_are_reported_to_members_only_after_an_earlier_report() -> None:
    """The counters of a later shard include the earlier shard. If its report is lost, both shards are done again."""
    ledger = JobLedger(1, spec((4,)), 2, [0, 1])
    worker, other = Worker(0), Worker(1)
    first, second, foreign = taken(worker, ledger), taken(worker, ledger), taken(other, ledger)
    ledger.take_news()
    worker.predict(ledger, 1, first)
    worker.done(ledger, first, 5.0)
    worker.done(ledger, second, 7.0)
    assert ledger.take_news() is None
    other.done(ledger, foreign, 1.0)
    assert news_of(ledger) == [foreign.key]
    taken_report = ledger.take_report()
    assert taken_report is not None
    assert (taken_report[0].done, taken_report[0].done_counters["examples"]) == ((first.key, second.key), 7.0)
    worker.done(ledger, taken(worker, ledger), 8.0)
    assert ledger.take_news() is None, "the report to the poster may be lost"
    ledger.report_received()
    assert news_of(ledger) == [(0, 0, 3)]


def test_repeated_messages_do_not_lower_counters() -> None:
    ledger = JobLedger(1, spec((2,)), 1, [0])
    worker = Worker(0)
    leases = [taken(worker, ledger) for _ in range(2)]
    for lease, examples in zip(leases, (7.0, 5.0), strict=True):
        worker.done(ledger, lease, examples)
    assert ledger.account().progress == {"examples": 7.0}


@pytest.mark.parametrize("is_dead", [True, False])
def test_reports_and_counters_of_unfinished_shards_are_not_counted(is_dead: bool) -> None:
    ledger = JobLedger(1, spec((1,)), 2, [0, 1])
    first, second = Worker(0), Worker(1)
    lease = taken(first, ledger)
    first.predict(ledger, 1, lease)
    ledger.results.record_progress(first.member.incarnation, {"job": 1.0, "examples": 3.0})
    ledger.removed(first.member, is_lost=is_dead, time_s=1.0)
    state = ledger.state(1, 2.0)
    assert (state.num_reports, state.progress, state.lost_workers) == (0, {}, int(is_dead))
    assert taken(second, ledger).shard == 0


def test_reports_of_another_workers_lease_are_not_counted() -> None:
    ledger = JobLedger(1, spec((1,)), 1, [0])
    worker = Worker(0)
    ledger.take_news()
    worker.predict(ledger, 1, Lease(lease=99))
    worker.done(ledger, Lease(lease=99))
    assert (ledger.state(1, 2.0).num_reports, ledger.take_news()) == (0, None)


def test_counters_of_a_dead_worker_after_its_last_shard_are_not_counted() -> None:
    ledger = JobLedger(1, spec((2,)), 1, [0])
    worker = Worker(0)
    worker.done(ledger, taken(worker, ledger), 5.0)
    taken(worker, ledger)
    ledger.results.record_progress(worker.member.incarnation, {"job": 1.0, "examples": 8.0})
    assert ledger.state(1, 2.0).progress == {"examples": 8.0}
    ledger.removed(worker.member, is_lost=True, time_s=1.0)
    assert ledger.state(1, 2.0).progress == {"examples": 5.0}


def test_counters_of_another_job_are_not_counted() -> None:
    ledger = JobLedger(2, spec((2,)), 1, [0])
    ledger.results.record_progress(10, {"job": 1.0, "examples": 8.0})
    assert ledger.state(1, 2.0).progress == {}


def test_a_failed_job_grants_no_leases() -> None:
    ledger = JobLedger(1, spec((2,)), 2, [0, 1])
    first, second = Worker(0), Worker(1)
    taken(first, ledger)
    ledger.fail("DataError", "bad")
    for worker in (first, second):
        answer = worker.take(ledger)
        assert answer is not None
        assert answer.lease == ALL_DONE


def test_a_reconnected_member_receives_all_facts() -> None:
    ledger = JobLedger(1, spec((4,)), 1, [0])
    worker = Worker(0)
    for examples in (2.0, 5.0):
        worker.done(ledger, taken(worker, ledger), examples)
        ledger.take_news()
    worker.done(ledger, taken(worker, ledger), 9.0)
    record = ledger.record()
    assert list(shards_in(record.done)) == [(0, 0, 0), (0, 0, 1)]
    assert record.done_counters == {10: {"job": 1.0, "examples": 5.0}}


def test_members_are_notified_of_a_failure() -> None:
    ledger = JobLedger(1, spec((2,)), 1, [0])
    ledger.take_news()
    ledger.fail("DataError", "bad")
    news = ledger.take_news()
    assert news is not None
    assert news.failed == ("DataError", "bad")


def test_records_of_members_restore_the_ledger() -> None:
    ledger = JobLedger(1, spec((4,)), 2, [0, 1])
    first, second = Worker(0), Worker(1)
    done, held, lost = (taken(worker, ledger) for worker in (first, first, second))
    first.done(ledger, done, 5.0)
    facts = JobFacts(1)
    news = ledger.take_news()
    assert news is not None
    facts.merge(news)
    counters = {"job": 1.0, "examples": 5.0}
    memory = JobMemory(record=news, working=True, leases=(held,), last_lease=held.lease, progress=counters)
    posters = JobMemory(record=news, posted=spec((4,)), seconds=3.0)
    again = JobLedger.restore(facts, posters, [first.rejoined(memory)], dead=[second.member], num_workers=2, time_s=1.0)
    again.validate()
    state = again.state(1, 2.0)
    assert (state.done, state.total, state.lost_workers, state.progress) == (1, 4, 1, {"examples": 5.0})
    assert state.seconds == 4.0
    first.done(again, held, 6.0)
    shards = set()
    while (lease := first.take(again)) is not None and lease.lease != ALL_DONE:
        assert lease.lease > held.lease
        shards.add(lease.shard)
        first.done(again, lease)
    assert shards == {0, 1, 2, 3} - {done.shard, held.shard}
    assert lost.shard in shards


@pytest.mark.parametrize("assignment", ["first-come", "strided"])
@pytest.mark.parametrize("files", [(), (0,), (None,)])
def test_a_job_without_shards_ends_under_the_next_scheduler(assignment: str, files: tuple[int | None, ...]) -> None:
    """Its workers may have finished it, so they request the next job and no shard of this job."""
    record = JobRecord(number=1, num_workers=2, ended={0: 0} if files == (None,) else {})
    workers = [Worker(0), Worker(1)]
    posters = JobMemory(record=record, posted=spec(files, assignment=assignment))
    facts = JobFacts(1)
    facts.merge(record)
    rejoined = [worker.rejoined(JobMemory(record=record)) for worker in workers]
    ledger = JobLedger.restore(facts, posters, rejoined, dead=[], num_workers=2, time_s=1.0)
    ledger.validate()
    assert not ledger.state(2, 2.0).finished
    for worker in workers:
        ledger.leases.stop_work(worker.member.rank, 3.0)
    state = ledger.state(2, 5.0)
    assert (state.done, state.total, state.finished) == (0, 0, True)
