"""The jobs of a cluster: assignment, and the loss of posters and workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from paceline.errors import PeerError
from paceline.protocol import Member, Role
from paceline.protocol.jobs import (
    ALL_DONE,
    NONE_FREE,
    DoneShards,
    JobCore,
    JobMemory,
    JobRecord,
    JobSpec,
    JobState,
    Lease,
    RejoinedMember,
    messages,
    shards_in,
)
from paceline.protocol.membership import Membership


class Cluster:
    """Some workers and a poster, each with a session."""

    def __init__(self, num_workers: int = 1) -> None:
        self.jobs = JobCore(num_workers)
        self.membership = Membership(0)
        self.workers = [self.join() for _ in range(num_workers)]
        self.poster = JobClient(self, None)

    def join(self) -> JobClient:
        number = len(self.membership.members)
        return JobClient(self, self.membership.register(f"worker {number}", Role.WORKER, 0.0))

    def post(self, files: tuple[int | None, ...] = (2,), *, assignment: str = "first-come") -> int:
        post = messages.PostJob(spec=JobSpec(description=b"do", files=files, epochs=1, assignment=assignment))
        (number,) = self.poster.send_request(post)
        assert isinstance(number, int)
        return number

    def state(self, number: int) -> JobState:
        (state,) = self.poster.send_request(messages.JobStatus(job=number))
        assert isinstance(state, JobState)
        return state

    def remove(self, worker: JobClient, reason: str | None) -> None:
        assert worker.member is not None
        self.membership.remove(worker.member.incarnation)
        self.deliver(self.jobs.removed(worker.member, worker, is_lost=reason is not None, time_s=0.0))

    def deliver(self, answers: Iterable[messages.Answer]) -> None:
        for answer in answers:
            assert isinstance(answer.call, JobClient)
            answer.call.received.append(answer)


class JobClient:
    """A process that sends the scheduler requests about jobs."""

    def __init__(self, cluster: Cluster, member: Member | None) -> None:
        self.cluster, self.member = cluster, member
        self.received: list[messages.Answer] = []
        self.examples = 0.0

    def send_request(self, request: messages.JobRequest, body: bytes = b"") -> list[Any]:
        """Make a request; return all replies that have arrived, to this request or to earlier requests."""
        incarnation = 0 if self.member is None else self.member.incarnation
        received = messages.ReceivedRequest(self, self, incarnation, request, body)
        self.cluster.deliver(self.cluster.jobs.handle(received, self.cluster.membership, 0.0))
        return self.answers()

    def answers(self) -> list[Any]:
        answers, self.received = self.received, []
        return [answer.content for answer in answers]

    def get_job(self, after: int = 0) -> list[int]:
        return [answer.number for answer in self.send_request(messages.GetJob(after=after))]

    def take_lease(self, job: int, *, wait: bool = False) -> list[int]:
        return [answer.lease for answer in self.send_request(messages.TakeLease(job=job, wait=wait))]

    def done(self, job: int, lease: int) -> None:
        self.examples += 1.0
        progress = {"job": job, "examples": self.examples}
        assert self.send_request(messages.LeaseDone(job=job, lease=lease, progress=progress)) == [None]


def test_a_waiting_worker_gets_the_next_job() -> None:
    cluster = Cluster()
    (worker,) = cluster.workers
    assert worker.get_job() == []
    number = cluster.post()
    assert [answer.number for answer in worker.answers()] == [number]
    assert worker.get_job() == [number]
    assert worker.get_job(after=number) == [number]  # the job has free shards
    for _ in range(2):
        (lease,) = worker.take_lease(number)
        worker.done(number, lease)
    assert worker.get_job(after=number) == []


def test_a_job_is_done_if_all_shards_are_done_and_all_workers_wait() -> None:
    cluster = Cluster()
    (worker,) = cluster.workers
    number = cluster.post()
    for _ in range(2):
        (lease,) = worker.take_lease(number)
        assert not cluster.state(number).finished
        worker.done(number, lease)
    assert worker.take_lease(number) == [ALL_DONE]
    worker.get_job(after=number)
    state = cluster.state(number)
    assert (state.done, state.total, state.finished) == (2, 2, True)
    assert state.progress == {"examples": 2.0}
    news = cluster.jobs.take_news()
    assert news is not None
    assert sorted(shards_in(news.done)) == [(0, 0, 0), (0, 0, 1)]
    assert cluster.jobs.take_news() is None


def test_a_dead_workers_shards_are_leased_again() -> None:
    cluster = Cluster(2)
    first, second = cluster.workers
    number = cluster.post((1,))
    first.take_lease(number)
    assert second.take_lease(number) == [NONE_FREE]
    assert second.take_lease(number, wait=True) == []
    cluster.remove(first, "its process ended")
    (answer,) = second.answers()
    assert answer.lease >= 0
    assert cluster.state(number).lost_workers == 1
    with pytest.raises(PeerError, match="not a worker of the cluster"):
        first.take_lease(number)


def test_a_leaving_worker_does_not_count_as_lost() -> None:
    cluster = Cluster(2)
    number = cluster.post((1,))
    cluster.workers[0].take_lease(number)
    cluster.remove(cluster.workers[0], None)
    assert cluster.state(number).lost_workers == 0
    assert cluster.workers[1].take_lease(number)[0] >= 0


def test_another_job_ends_the_previous_job() -> None:
    cluster = Cluster(2)
    first, second = cluster.workers
    old = cluster.post((1,))
    (lease,) = first.take_lease(old)
    assert second.take_lease(old, wait=True) == []
    new = cluster.post()
    assert [answer.lease for answer in second.answers()] == [ALL_DONE]
    assert first.take_lease(old) == [ALL_DONE]
    first.done(old, lease)  # no worker is affected
    assert cluster.state(new).done == 0
    with pytest.raises(PeerError, match=f"job {old}"):
        cluster.state(old)
    with pytest.raises(PeerError, match=f"job {new + 1}"):
        first.take_lease(new + 1)


def test_a_job_fails_with_the_poster() -> None:
    cluster = Cluster()
    number = cluster.post()
    assert cluster.jobs.concerns(cluster.poster)
    cluster.jobs.forget(cluster.poster)
    failed = cluster.state(number).failed
    assert failed is not None
    assert failed[0] == "PeerError"
    assert cluster.workers[0].take_lease(number) == [ALL_DONE]


def test_the_first_of_two_failures_is_reported() -> None:
    cluster = Cluster()
    number = cluster.post()
    for error in ("DataError", "UsageError"):
        cluster.workers[0].send_request(messages.JobFailed(job=number, error=error, message="bad"))
    assert cluster.state(number).failed == ("DataError", "bad")


def test_a_duplicate_report_is_counted_once() -> None:
    cluster = Cluster()
    number = cluster.post()
    report = messages.Report(job=number, fields={"kind": "loss"}, number=1)
    for _ in range(2):
        cluster.workers[0].send_request(report, b"body")
    assert cluster.state(number).num_reports == 1
    poster = cluster.poster
    received = messages.ReceivedRequest(poster, poster, 0, messages.TakeReports(job=number))
    (answer,) = cluster.jobs.handle(received, cluster.membership, 0.0)
    assert answer.body == b"body"
    assert answer.content.fields == {"kind": "loss"}
    assert cluster.poster.send_request(messages.TakeReports(job=number)) == [None]


def test_the_end_of_the_cluster_answers_all_waiting_job_requests() -> None:
    cluster = Cluster(2)
    first, second = cluster.workers
    assert first.get_job() == []
    cluster.deliver(cluster.jobs.end())
    assert [answer.number for answer in first.answers()] == [-1]
    assert second.get_job() == [-1]


def rejoined(client: JobClient, job: JobMemory | None) -> RejoinedMember:
    return RejoinedMember(client, client.member or Member("poster", Role.OBSERVER, 0, 99), job)


def test_a_new_scheduler_continues_the_job_of_the_members() -> None:
    cluster = Cluster()
    (worker,) = cluster.workers
    posted = JobSpec(description=b"do", files=(3,), epochs=1, assignment="first-come")
    done = (DoneShards(epoch=0, file=0, shards=b"\1"),)
    held = Lease(lease=7, shard=1)
    cluster.jobs.restore(
        [
            rejoined(cluster.poster, JobMemory(record=JobRecord(number=4, done=done), posted=posted)),
            rejoined(worker, JobMemory(record=JobRecord(number=4), working=True, leases=(held,), last_lease=7)),
        ],
        (),
        0.0,
        term=2,
    )
    assert cluster.jobs.concerns(cluster.poster)
    worker.done(4, 7)
    (lease,) = worker.take_lease(4)
    assert lease > 7
    worker.done(4, lease)
    assert worker.take_lease(4) == [ALL_DONE]
    assert cluster.state(4).done == 3
    assert cluster.post() > 5, "another poster may have posted this job"


def test_a_job_of_a_lost_poster_ends_for_the_workers() -> None:
    cluster = Cluster()
    (worker,) = cluster.workers
    cluster.jobs.restore([rejoined(worker, JobMemory(record=JobRecord(number=4), working=True))], (), 0.0, term=2)
    assert worker.take_lease(4) == [ALL_DONE]
    assert cluster.post() > 5, "the poster may have posted a further job"
