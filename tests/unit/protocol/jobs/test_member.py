"""The records of a job that members keep for a new scheduler."""

from __future__ import annotations

from paceline.protocol.jobs import (
    NONE_FREE,
    DoneShards,
    Job,
    JobMemory,
    JobRecord,
    JobSpec,
    JobState,
    Lease,
    MemberLedger,
    TakenReport,
    messages,
    shards_in,
)
from paceline.protocol.jobs.records import JobFacts


def give_job(ledger: MemberLedger, number: int) -> None:
    ledger.answered(messages.GetJob(after=0), Job(number=number), 1.0)


def give_lease(ledger: MemberLedger, job: int, lease: int, shard: int) -> None:
    ledger.answered(messages.TakeLease(job=job, wait=False), Lease(lease=lease, shard=shard), 1.0)


def memory_of(ledger: MemberLedger, now_s: float = 1.0) -> JobMemory:
    memory = ledger.memory(now_s)
    assert memory is not None
    return memory


def test_a_worker_records_leases_and_finished_shards() -> None:
    ledger = MemberLedger()
    ledger.incarnation = 5
    assert ledger.memory(1.0) is None
    give_job(ledger, 3)
    for lease in range(3):
        give_lease(ledger, 3, lease, 10 + lease)
    give_lease(ledger, 3, NONE_FREE, 0)
    ledger.sent(messages.LeaseDone(job=3, lease=1, progress={"job": 3, "examples": 7.0}))
    ledger.sent(messages.LeaseDone(job=2, lease=2))  # a record of a finished job
    ledger.record_counters({"job": 3, "examples": 9.0})
    ledger.sent(messages.FileEnded(job=3, file=4, num_shards=2))
    memory = memory_of(ledger)
    assert (memory.number, memory.working, memory.last_lease) == (3, True, 2)
    assert [(lease.lease, lease.shard) for lease in memory.leases] == [(0, 10), (2, 12)]
    assert memory.record.done == (DoneShards(epoch=0, file=0, shards=b"\1", first=11),)
    assert memory.record.done_counters == {5: {"job": 3, "examples": 7.0}}
    assert memory.record.ended == {4: 2}
    assert memory.progress == {"job": 3, "examples": 9.0}
    give_job(ledger, 4)
    assert memory_of(ledger) == JobMemory(record=JobRecord(number=4), working=True, is_busy=True)


def test_reports_are_counted_and_kept_until_the_next_job() -> None:
    ledger = MemberLedger()
    give_job(ledger, 1)
    for shard in (0, 1):
        give_lease(ledger, 1, shard, shard)
        ledger.sent(messages.Report(job=1, fields={}, shard=(0, 0, shard)), (b"body",))
    done = messages.LeaseDone(job=1, lease=1)
    ledger.sent(done)
    ledger.sent(messages.Report(job=1, fields={}))
    *reports, last = ledger.requests_to_resend()
    assert [(report.number, body) for report, body in reports if isinstance(report, messages.Report)] == [
        (1, (b"body",)),
        (2, (b"body",)),
        (3, ()),
    ]
    assert (last[0], [lease.lease for lease in memory_of(ledger).leases]) == (done, [0, 1])
    give_job(ledger, 2)
    assert ledger.requests_to_resend() == []


def test_a_worker_is_busy_until_it_requests_the_next_job() -> None:
    ledger = MemberLedger()
    give_job(ledger, 1)
    assert memory_of(ledger).is_busy
    ledger.sent(messages.GetJob(after=1))
    assert not memory_of(ledger).is_busy
    give_job(ledger, 1)  # some shards were returned
    assert memory_of(ledger).is_busy


def test_a_poster_records_jobs_and_reports() -> None:
    ledger = MemberLedger()
    spec = JobSpec(description=b"work", files=(2,), epochs=1, assignment="strided")
    ledger.merge_news(JobRecord(number=1, num_workers=4))
    ledger.answered(messages.PostJob(spec=spec), 1, 1.0)
    done = (DoneShards(epoch=0, file=0, shards=b"\2"),)
    ledger.merge_news(JobRecord(number=1, num_workers=4, done=done, done_counters={2: {"examples": 3.0}}, lost=1))
    report = TakenReport(fields={}, incarnation=2, number=9, done=((1, 0, 0),), done_counters={"examples": 4.0})
    ledger.answered(messages.TakeReports(job=1), report, 1.0)
    ledger.answered(messages.TakeReports(job=1), None, 1.0)
    memory = memory_of(ledger)
    assert (memory.posted, memory.taken, memory.working) == (spec, ((2, 9),), False)
    assert (memory.record.num_workers, memory.record.lost) == (4, 1)
    assert (list(shards_in(memory.record.done)), memory.record.done_counters) == (
        [(0, 0, 1), (1, 0, 0)],
        {2: {"examples": 4.0}},
    )
    ledger.merge_news(JobRecord(number=2, num_workers=4))  # another poster's job
    assert memory_of(ledger).posted is None


def test_a_poster_records_the_duration_of_the_job() -> None:
    ledger = MemberLedger()
    spec = JobSpec(description=b"work", files=(2,), epochs=1, assignment="first-come")
    ledger.answered(messages.PostJob(spec=spec), 1, 1.0)
    runs = JobState(
        done=1,
        total=2,
        finished=False,
        failed=None,
        progress={},
        seconds=3.0,
        num_workers=1,
        lost_workers=2,
        num_reports=0,
    )
    ledger.answered(messages.JobStatus(job=1), runs, 10.0)
    assert (memory_of(ledger, 12.0).seconds, memory_of(ledger).record.lost) == (5.0, 2)


def test_records_can_be_merged_in_any_order_and_repeatedly() -> None:
    one = JobRecord(
        number=1, done=(DoneShards(epoch=0, file=0, shards=b"\5"),), done_counters={1: {"a": 5.0}}, ended={0: 3}, lost=1
    )
    other = JobRecord(
        number=1,
        done=(DoneShards(epoch=0, file=0, shards=b"\1", first=1), DoneShards(epoch=1, file=0, shards=b"\1")),
        done_counters={1: {"a": 4.0}, 2: {"a": 1.0}},
    )
    for records in ((one, other), (other, one, other)):
        facts = JobFacts(1)
        for record in records:
            facts.merge(record)
        merged = facts.export()
        assert list(shards_in(merged.done)) == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (1, 0, 0)]
        assert (merged.done_counters, merged.ended, merged.lost) == ({1: {"a": 5.0}, 2: {"a": 1.0}}, {0: 3}, 1)
