"""What the nodes remember for a scheduler that comes in the place of another."""

from __future__ import annotations

import msgspec

from paceline.ps import messages
from paceline.ps.messages import JobMemory
from paceline.ps.scheduler.account import Account, Memory

encode = msgspec.msgpack.encode


def give_job(memory: Memory, number: int) -> None:
    memory.answered(messages.GetJob(after=0), encode(messages.Job(number=number)))


def give_lease(memory: Memory, job: int, lease: int, shard: int) -> None:
    answer = messages.Lease(lease=lease, epoch=0, file=0, shard=shard)
    memory.answered(messages.TakeLease(job=job, wait=False), encode(answer))


def told(memory: Memory) -> JobMemory:
    job = memory.job()
    assert job is not None
    return job


def test_a_worker_remembers_what_it_holds_and_what_it_has_done() -> None:
    memory = Memory()
    memory.incarnation = 5
    assert memory.job() is None
    give_job(memory, 3)
    for lease in range(3):
        give_lease(memory, 3, lease, 10 + lease)
    memory.answered(messages.TakeLease(job=3, wait=False), encode(messages.Lease(lease=messages.NOTHING_NOW)))
    memory.sent(messages.LeaseDone(job=3, lease=1, progress={"job": 3, "examples": 7.0}))
    memory.sent(messages.LeaseDone(job=2, lease=2))  # of a job that is over
    memory.sent(messages.Heartbeat(progress={"job": 3, "examples": 9.0}))
    memory.sent(messages.Heartbeat())
    memory.sent(messages.FileEnded(job=3, file=4, num_shards=2))
    job = told(memory)
    assert (job.number, job.working, job.last_lease) == (3, True, 2)
    assert [(lease.lease, lease.shard) for lease in job.leases] == [(0, 10), (2, 12)]
    assert job.done == ((0, 0, bytes(11) + b"\1"),)
    assert job.settled == {5: {"job": 3, "examples": 7.0}}
    assert job.progress == {"job": 3, "examples": 9.0}
    assert job.ended == {4: 2}
    give_job(memory, 4)
    assert told(memory) == JobMemory(number=4, working=True)


def test_reports_are_counted_and_kept_until_the_next_job() -> None:
    memory = Memory()
    give_job(memory, 1)
    give_lease(memory, 1, 0, 0)
    first = memory.sent(messages.Report(job=1, fields={"kind": "predictions"}), (b"body",))
    memory.sent(messages.LeaseDone(job=1, lease=0))
    second = memory.sent(messages.Report(job=1, fields={}))
    assert isinstance(first, messages.Report)
    assert isinstance(second, messages.Report)
    assert (first.number, second.number, first.settled) == (1, 2, False)
    assert [(r.number, r.settled, body) for r, body in memory.reports()] == [(1, True, (b"body",)), (2, False, ())]
    give_job(memory, 2)
    assert memory.reports() == []


def test_a_poster_remembers_its_job_and_what_it_has_taken() -> None:
    memory = Memory()
    post = messages.PostJob(description=b"work", files=(2,), epochs=1, assignment="strided")
    memory.told(messages.JobNews(job=1, num_workers=4))
    memory.answered(post, encode(1))
    memory.told(messages.JobNews(job=1, num_workers=4, done=((0, 0, 1),), settled={2: {"examples": 3.0}}, lost=1))
    report = messages.TakenReport(fields={}, incarnation=2, number=9)
    memory.answered(messages.TakeReports(job=1), encode(report))
    memory.answered(messages.TakeReports(job=1), encode(None))
    job = told(memory)
    assert (job.posted, job.taken, job.num_workers, job.lost) == (post, ((2, 9),), 4, 1)
    assert (job.done, job.settled, job.working) == (((0, 0, b"\0\1"),), {2: {"examples": 3.0}}, False)
    memory.told(messages.JobNews(job=2, num_workers=4))  # somebody else's
    assert told(memory).posted is None


def test_accounts_are_merged() -> None:
    account = Account(1)
    account.merge(JobMemory(number=1, done=((0, 0, b"\1\0\1"),), settled={1: {"a": 5.0}}, ended={0: 3}, lost=1))
    account.merge(JobMemory(number=1, done=((0, 0, b"\1\1"), (1, 0, b"\1")), settled={1: {"a": 4.0}, 2: {"a": 1.0}}))
    assert sorted(account.done()) == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (1, 0, 0)]
    assert account.settled == {1: {"a": 5.0}, 2: {"a": 1.0}}
    assert (account.ended, account.lost) == ({0: 3}, 1)
