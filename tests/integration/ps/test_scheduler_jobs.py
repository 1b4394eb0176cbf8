"""Jobs of the scheduler: leases, lost workers, ends and reports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.waiting import in_threads, wait_until

from paceline.errors import DataError, PeerError
from paceline.protocol.jobs import ALL_DONE, NONE_FREE, Job, JobSpec, JobState, Lease, TakenReport
from paceline.ps import SchedulerLink, messages

from .harness import Cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(servers=0, workers=2) as cluster:
        yield cluster


@pytest.fixture
def poster(cluster: Cluster) -> SchedulerLink:
    return cluster.link(role="observer")


def post(poster: SchedulerLink, *files: int | None, epochs: int = 1, assignment: str = "first-come") -> int:
    job = messages.PostJob(spec=JobSpec(description=b"work", files=files, epochs=epochs, assignment=assignment))
    return int(poster.call(job, int))


def take(worker: SchedulerLink, job: int, *, wait: bool = False) -> Lease:
    lease: Lease = worker.call(messages.TakeLease(job=job, wait=wait), Lease)
    return lease


def done(worker: SchedulerLink, job: int, lease: Lease, **progress: float) -> None:
    worker.call(messages.LeaseDone(job=job, lease=lease.lease, progress={**progress, "job": job} if progress else {}))


def state(poster: SchedulerLink, job: int) -> JobState:
    found: JobState = poster.call(messages.JobStatus(job=job), JobState)
    return found


def wait_for_work(worker: SchedulerLink, after: int) -> None:
    """Request the next job like a finished worker, without waiting for it."""
    worker.start(messages.GetJob(after=after), Job)
    worker.call(messages.GetView())  # the reply proves that the scheduler has received the earlier messages


def test_a_job_from_end_to_end(cluster: Cluster, poster: SchedulerLink) -> None:
    workers = [cluster.link(rank=rank) for rank in range(2)]
    pending = [worker.start(messages.GetJob(after=0), Job) for worker in workers]
    number = post(poster, 3, 2, epochs=2)
    assert {answer() for answer in pending} == {Job(number=number, description=b"work")}
    late = cluster.link()
    assert late.call(messages.GetJob(after=0), Job).number == number
    seen = []
    for step in range(10):
        worker = workers[step % 2]
        lease = take(worker, number)
        assert lease.lease >= 0
        seen.append((lease.epoch, lease.file, lease.shard))
        assert not state(poster, number).finished
        done(worker, number, lease, examples=100.0 * (step // 2 + 1), loss=1.0)
        assert state(poster, number).done == step + 1
    assert sorted(seen) == [(e, f, s) for e in range(2) for f, n in enumerate((3, 2)) for s in range(n)]
    assert [take(worker, number).lease for worker in workers] == [ALL_DONE, ALL_DONE]
    assert not state(poster, number).finished  # workers may still have messages to send
    for worker in workers:
        wait_for_work(worker, number)
    ended = state(poster, number)
    assert ended.finished
    assert (ended.done, ended.total, ended.failed) == (10, 10, None)
    assert ended.progress == {"examples": 1000.0, "loss": 2.0}
    assert (ended.num_workers, ended.lost_workers, ended.num_reports) == (3, 0, 0)
    assert ended.seconds == state(poster, number).seconds > 0


def test_shards_of_a_lost_worker_are_leased_again(cluster: Cluster, poster: SchedulerLink) -> None:
    lives, dies = cluster.link(rank=0), cluster.link(rank=1)
    number = post(poster, 2)
    held, lost = take(lives, number), take(dies, number)
    done(lives, number, held)
    assert take(lives, number).lease == NONE_FREE
    waiting: list[Lease] = []
    in_threads(lambda: waiting.append(take(lives, number, wait=True)), lambda: cluster.lose(dies))
    assert waiting[0].lease not in (lost.lease, NONE_FREE, ALL_DONE)
    assert (waiting[0].file, waiting[0].shard) == (lost.file, lost.shard)
    done(lives, number, waiting[0])
    assert take(lives, number, wait=True).lease == ALL_DONE
    wait_for_work(lives, number)
    ended = state(poster, number)
    assert ended.finished
    assert (ended.done, ended.lost_workers, ended.num_workers) == (2, 1, 1)


def test_a_leaving_worker_returns_leases(cluster: Cluster, poster: SchedulerLink) -> None:
    stays, leaves = cluster.link(), cluster.link()
    number = post(poster, 1, assignment="strided")
    pending = stays.start(messages.TakeLease(job=number, wait=False), Lease)
    assert take(leaves, number).lease == NONE_FREE
    lease = pending()
    stays.close()
    again = take(leaves, number, wait=True)
    assert (again.file, again.shard) == (lease.file, lease.shard)
    done(leaves, number, again)
    wait_for_work(leaves, number)
    assert state(poster, number).finished
    assert state(poster, number).lost_workers == 0


def test_waiting_workers_are_notified_of_the_complete_job(cluster: Cluster, poster: SchedulerLink) -> None:
    works, waits = cluster.link(), cluster.link()
    number = post(poster, 1)
    lease = take(works, number)
    answer = waits.start(messages.TakeLease(job=number, wait=True), Lease)
    waits.call(messages.GetView())
    done(works, number, lease)
    assert answer().lease == ALL_DONE


def test_the_last_worker_dies_before_it_is_notified_of_the_end(cluster: Cluster, poster: SchedulerLink) -> None:
    worker = cluster.link()
    number = post(poster, 2)
    for _ in range(2):
        done(worker, number, take(worker, number))
    assert not state(poster, number).finished
    cluster.lose(worker)
    wait_until(lambda: state(poster, number).finished)


def test_a_job_continues_while_shards_are_left(cluster: Cluster, poster: SchedulerLink) -> None:
    worker = cluster.link()
    number = post(poster, 2)
    done(worker, number, take(worker, number))
    take(worker, number)
    cluster.lose(worker)
    wait_until(lambda: state(poster, number).num_workers == 0)
    assert not state(poster, number).finished
    heir = cluster.link()
    done(heir, number, take(heir, number))
    assert take(heir, number).lease == ALL_DONE
    wait_for_work(heir, number)
    assert state(poster, number).finished
    assert state(poster, number).done == 2


def test_strided_shards_are_leased_by_rank(cluster: Cluster, poster: SchedulerLink) -> None:
    first, second = cluster.link(rank=0), cluster.link(rank=1)
    number = post(poster, 4, assignment="strided")
    pending = second.start(messages.TakeLease(job=number, wait=False), Lease)
    assert [take(first, number).shard for _ in range(2)] == [0, 2]
    assert [pending().shard, take(second, number).shard] == [1, 3]


def test_shards_of_files_of_unknown_length(cluster: Cluster, poster: SchedulerLink) -> None:
    worker = cluster.link()
    number = post(poster, None, 1)
    assert state(poster, number).total is None
    first, second = take(worker, number), take(worker, number)
    assert (first.shard, second.shard) == (0, 1)
    worker.call(messages.FileEnded(job=number, file=0, num_shards=1))
    assert state(poster, number).total == 2
    with pytest.raises(DataError, match="File 0 was reported to end after 5 shards, but it has 1"):
        worker.call(messages.FileEnded(job=number, file=0, num_shards=5))
    done(worker, number, first)
    last = take(worker, number)
    assert (last.file, last.shard) == (1, 0)
    with pytest.raises(PeerError, match="reports lease"):
        done(cluster.link(), number, last)
    done(worker, number, last)
    done(worker, number, second)  # this shard is past the end, so it is not counted
    assert state(poster, number).done == 2
    assert take(worker, number).lease == ALL_DONE


def test_reports_arrive_with_bodies(cluster: Cluster, poster: SchedulerLink) -> None:
    worker = cluster.link()
    number = post(poster, 1)
    for index in range(3):
        worker.call(
            messages.Report(job=number, fields={"index": index, "name": "é"}), body=(bytes([index]) * 1000, b"!")
        )
    assert state(poster, number).num_reports == 3
    for index in range(3):
        report, body = poster.call_with_body(messages.TakeReports(job=number), TakenReport)
        assert report.fields == {"index": index, "name": "é"}
        assert bytes(body) == bytes([index]) * 1000 + b"!"
    report, body = poster.call_with_body(messages.TakeReports(job=number))
    assert report is None
    assert len(body) == 0


def test_an_impossible_job_is_rejected(cluster: Cluster, poster: SchedulerLink) -> None:
    worker = cluster.link()
    number = post(poster, 5)
    take(worker, number)
    worker.call(messages.JobFailed(job=number, error="DataError", message="x.gz is cut off"))
    worker.call(messages.JobFailed(job=number, error="DataError", message="another"))
    assert state(poster, number).failed == ("DataError", "x.gz is cut off")


def test_heartbeats_carry_progress(cluster: Cluster, poster: SchedulerLink) -> None:
    workers = [cluster.link(), cluster.link()]
    number = post(poster, 1)
    for worker in workers:
        worker.notify(messages.Heartbeat(progress={"job": number, "examples": 5.0}))
        worker.notify(messages.Heartbeat(progress={"job": number, "examples": 7.0}))
        worker.notify(messages.Heartbeat(progress={"job": number + 1, "examples": 1000.0}))
        worker.call(messages.GetView())
    assert state(poster, number).progress == {"examples": 14.0}
    done(workers[0], number, take(workers[0], number), examples=8.0)
    workers[0].notify(messages.Heartbeat(progress={"job": number, "examples": 9.0}))
    workers[0].call(messages.GetView())
    assert state(poster, number).progress == {"examples": 16.0}
    cluster.lose(workers[0])
    wait_until(lambda: state(poster, number).num_workers == 1)
    # Finished shards of the dead worker are counted. Its unfinished shards are counted when another worker ends them.
    assert state(poster, number).progress == {"examples": 15.0}


def test_another_job_ends_the_previous_job(cluster: Cluster, poster: SchedulerLink) -> None:
    works, waits, rests = (cluster.link() for _ in range(3))
    first = post(poster, 1)
    lease = take(works, first)
    waiting = waits.start(messages.TakeLease(job=first, wait=True), Lease)
    waits.call(messages.GetView())
    resting = rests.start(messages.GetJob(after=first), Job)
    rests.call(messages.GetView())
    second = post(poster, 1)
    assert second == first + 1
    assert waiting().lease == ALL_DONE
    assert resting().number == second
    # A worker of the old job is notified of its end.
    done(works, first, lease)
    works.call(messages.Report(job=first, fields={}))
    works.call(messages.FileEnded(job=first, file=0, num_shards=9))
    works.call(messages.JobFailed(job=first, error="DataError", message=""))
    assert take(works, first).lease == ALL_DONE
    assert works.call(messages.GetJob(after=first), Job).number == second
    found = state(poster, second)
    assert (found.done, found.failed, found.num_reports) == (0, None, 0)
    with pytest.raises(PeerError, match=f"job {first}"):
        state(poster, first)


def test_the_end_of_the_cluster(cluster: Cluster, poster: SchedulerLink) -> None:
    notices: list[Any] = []
    seeks, waits, late = (cluster.link() for _ in range(3))
    late.hooks.on_notice = notices.append
    number = post(poster, 1)
    take(late, number)
    seeking = seeks.start(messages.GetJob(after=number), Job)
    waiting = waits.start(messages.TakeLease(job=number, wait=True), Lease)
    for link in (seeks, waits):
        link.call(messages.GetView())
    poster.call(messages.EndCluster())
    assert seeking().number == -1
    assert waiting().lease == ALL_DONE
    wait_until(lambda: any(isinstance(notice, messages.Ended) for notice in notices))
    assert late.call(messages.GetJob(after=number), Job).number == -1
    assert cluster.scheduler.ended.is_set()
    assert len(cluster.scheduler.core.cluster.membership.members) == 4


def test_a_strided_job_starts_when_all_workers_have_requested_it(cluster: Cluster, poster: SchedulerLink) -> None:
    first, second = cluster.link(rank=0), cluster.link(rank=1)
    job = post(poster, 4, assignment="strided")
    pending = first.start(messages.TakeLease(job=job, wait=False), Lease)
    assert state(poster, job).seconds == 0.0  # no worker has a lease yet
    assert take(second, job).shard == 1
    assert pending().shard == 0


def test_a_strided_job_does_not_wait_for_a_dead_worker(cluster: Cluster, poster: SchedulerLink) -> None:
    first, second = cluster.link(rank=0), cluster.link(rank=1)
    job = post(poster, 2, assignment="strided")
    pending = first.start(messages.TakeLease(job=job, wait=False), Lease)
    cluster.lose(second)
    assert pending().shard == 0


def test_a_strided_job_distributes_the_share_of_an_absent_worker(cluster: Cluster, poster: SchedulerLink) -> None:
    only = cluster.link(rank=1)  # only one of two expected workers joins
    job = post(poster, 3, assignment="strided")
    shards = []
    for _ in range(3):
        lease = take(only, job)
        shards.append(lease.shard)
        done(only, job, lease)
    assert sorted(shards) == [0, 1, 2]
    assert take(only, job).lease == ALL_DONE
