"""The assignment of jobs to workers."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from paceline.errors import PeerError
from paceline.protocol.jobs import Job, JobCore, JobMemory, JobRecord, JobSpec, JobState, RejoinedMember, messages
from paceline.protocol.jobs.messages import ReceivedRequest
from paceline.protocol.membership import Member, Membership, Role

SPEC = JobSpec(description=b"", files=(2,), epochs=1, assignment="first-come")


class Cluster:
    """A core and its members: a poster with incarnation 9, and workers."""

    def __init__(self, num_workers: int) -> None:
        self.core = JobCore(num_workers)
        self.membership = Membership(0)
        self.workers = [self.membership.register(f"w{rank}", Role.WORKER, 0.0) for rank in range(num_workers)]

    def send_request(
        self, incarnation: int, request: messages.JobRequest | messages.CountersReceived
    ) -> list[tuple[object, object]]:
        """Return the recipients and their replies."""
        received = ReceivedRequest(incarnation, incarnation, incarnation, request)
        return [(answer.call, answer.content) for answer in self.core.handle(received, self.membership, 1.0)]

    def post(self) -> list[tuple[object, object]]:
        return self.send_request(9, messages.PostJob(spec=SPEC))


def test_the_next_job_waits_for_workers_of_the_previous_job() -> None:
    """Workers of the previous job may wait for iterations of all workers, even of workers without a job."""
    cluster = Cluster(2)
    first, second = (worker.incarnation for worker in cluster.workers)
    cluster.post()
    assert cluster.send_request(first, messages.GetJob(after=0)) == [(first, Job(number=1))]
    assert cluster.send_request(second, messages.GetJob(after=0)) == [(second, Job(number=1))]
    assert cluster.post() == [(9, 2)]
    assert cluster.send_request(first, messages.GetJob(after=1)) == []
    ((_, state),) = cluster.send_request(9, messages.JobStatus(job=2))
    assert isinstance(state, JobState)
    assert state.busy_ranks == (1,)
    assert cluster.send_request(second, messages.GetJob(after=1)) == [(first, Job(number=2)), (second, Job(number=2))]


def test_a_departed_worker_is_not_waited_for() -> None:
    cluster = Cluster(2)
    first, second = cluster.workers
    cluster.post()
    for worker in cluster.workers:
        cluster.send_request(worker.incarnation, messages.GetJob(after=0))
    cluster.post()
    cluster.send_request(first.incarnation, messages.GetJob(after=1))
    answers = cluster.core.removed(second, second.incarnation, is_lost=True, time_s=1.0)
    assert [(answer.call, answer.content) for answer in answers] == [(first.incarnation, Job(number=2))]


def rejoined(member: Member, **memory: object) -> RejoinedMember:
    known = JobMemory(record=JobRecord(number=1), **memory)  # type: ignore[arg-type]
    return RejoinedMember(member.incarnation, member, known)


def test_a_finished_worker_gets_the_job_again_if_shards_are_returned() -> None:
    """The worker of these shards has died together with the scheduler, and its reports are lost."""
    cluster = Cluster(1)
    worker = cluster.workers[0]
    poster = Member("poster", Role.OBSERVER, 0, 9, None, None)
    cluster.core.restore([rejoined(poster, posted=SPEC), rejoined(worker, working=True)], [], 1.0, term=7)
    me = worker.incarnation
    assert cluster.send_request(me, messages.GetJob(after=1)) == [(me, Job(number=1))]


def test_the_next_scheduler_restores_busy_workers() -> None:
    cluster = Cluster(2)
    busy, idle = cluster.workers
    cluster.core.restore([rejoined(busy, working=True, is_busy=True), rejoined(idle)], [], 1.0, term=7)
    cluster.post()
    assert cluster.send_request(idle.incarnation, messages.GetJob(after=1)) == []
    assert len(cluster.send_request(busy.incarnation, messages.GetJob(after=1))) == 2


def test_a_job_number_is_never_reused() -> None:
    """Otherwise a poster that reconnects late would count the shards of another job as shards of its job."""
    cluster = Cluster(1)
    cluster.core.restore([rejoined(cluster.workers[0])], [], 1.0, term=7)
    ((_, number),) = cluster.post()
    assert number == (7 << 20) + 1
    poster = Member("poster", Role.OBSERVER, 0, 9, None, None)
    later = Cluster(1)
    later.core.restore([rejoined(poster, posted=SPEC)], [], 1.0, term=8)
    assert later.post() == [(9, (8 << 20) + 1)], "another poster may reconnect late with its job"


def test_a_departed_worker_gets_no_job_and_its_counters_are_ignored() -> None:
    """The connection of a departed worker may still exist. Its requests must not make the next job wait for it."""
    cluster = Cluster(2)
    lives, dead = cluster.workers
    cluster.post()
    cluster.membership.remove(dead.incarnation)
    cluster.core.removed(dead, dead.incarnation, is_lost=True, time_s=1.0)
    with pytest.raises(PeerError, match="not a worker of the cluster"):
        cluster.send_request(dead.incarnation, messages.GetJob(after=0))
    cluster.send_request(dead.incarnation, messages.CountersReceived(counters={"job": 1.0, "examples": 9.0}))
    ((_, state),) = cluster.send_request(9, messages.JobStatus(job=1))
    assert isinstance(state, JobState)
    assert state.progress == {}
    cluster.post()
    assert cluster.send_request(lives.incarnation, messages.GetJob(after=1)) == [(lives.incarnation, Job(number=2))]


def test_the_end_of_a_strided_job_is_fast_with_many_workers() -> None:
    """The time must not grow with the square of the number of workers."""
    num_workers = 300
    cluster = Cluster(num_workers)
    cluster.send_request(10**6, messages.PostJob(spec=replace(SPEC, files=(num_workers,), assignment="strided")))
    began_s = time.process_time()
    for event in (messages.GetJob(after=0), messages.TakeLease(job=1, wait=False)):
        for worker in cluster.workers:
            cluster.send_request(worker.incarnation, event)
    for lease, worker in enumerate(cluster.workers):
        cluster.send_request(worker.incarnation, messages.LeaseDone(job=1, lease=lease, progress={}))
        cluster.send_request(worker.incarnation, messages.GetJob(after=1))
    assert time.process_time() - began_s < 1.0  # usually 0.1 s


def test_a_cluster_belongs_to_one_poster_until_it_leaves() -> None:
    cluster = Cluster(1)
    assert cluster.send_request(9, messages.ClaimCluster()) == [(9, True)]
    assert cluster.send_request(8, messages.ClaimCluster()) == [(8, False)]
    with pytest.raises(PeerError, match="another training uses this cluster"):
        cluster.send_request(8, messages.PostJob(spec=SPEC))
    assert cluster.post() == [(9, 1)]
    assert cluster.send_request(9, messages.ClaimCluster()) == [(9, True)]
    with pytest.raises(PeerError, match="another training uses this cluster"):
        cluster.send_request(8, messages.PostJob(spec=SPEC))
    cluster.core.forget(9)
    assert cluster.send_request(8, messages.ClaimCluster()) == [(8, True)]
    cluster.core.forget(8)
    assert cluster.post() == [(9, 2)]
