"""Broken connections to the scheduler have no effect while all processes live."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
from tests.waiting import in_threads, wait_until

from paceline.errors import ConnectionLostError
from paceline.protocol import Role, Sequential
from paceline.protocol.jobs import ALL_DONE, Job, JobSpec, JobState, Lease
from paceline.ps import SGD, SchedulerLink, messages
from paceline.ps.messages import NOTICE
from paceline.transport import Hello, frame_parts

from .harness import PATIENCE_S, Cluster


def cut_all(cluster: Cluster) -> int:
    """Break every connection of the scheduler; return their number."""

    def cut() -> int:
        peers: list[Any] = list(cluster.scheduler.core.sessions.connected)
        for peer in peers:
            peer.abort()
        return len(peers)

    found: int = cluster.served.call(cut)
    return found


def links_of(cluster: Cluster, *other_links: SchedulerLink) -> list[SchedulerLink]:
    return [*(node.link for node in cluster.nodes), *other_links]


@pytest.mark.parametrize("replicas", [0, 1, 2])
def test_a_cut_of_all_connections_has_no_effect(replicas: int) -> None:
    with Cluster(servers=3, workers=2, replicas=replicas, consistency=Sequential()) as cluster:
        clients = cluster.connect_all()
        tables = [client.sparse_table("w", update=SGD(lr=1.0)) for client in clients]
        keys, ones = np.arange(200, dtype=np.uint64), np.ones(200, np.float32)
        before = clients[0].link.get_view()
        for step in range(20):
            if step % 5 == 2:
                wait_until(lambda: cluster.served.call(lambda: len(cluster.scheduler.core.sessions.connected)) >= 5)
                assert cut_all(cluster) >= 5
            for table in tables:
                table.push(keys, ones, tick=True)
            for table in tables:
                assert (table.pull(keys) == -2 * (step + 1)).all()
        links = links_of(cluster, *(client.link for client in clients))
        wait_until(lambda: all(link.reconnections >= 1 and link.calls.is_connected for link in links))
        after = clients[0].link.get_view()
        assert (after.members, after.version, after.groups) == (before.members, before.version, before.groups)


def test_a_connection_broken_before_the_first_member_is_opened_again(cluster: Cluster) -> None:
    """A process that joins during a takeover waits long between its request and its registration."""
    hello = Hello(role="server", name="newcomer")
    link = SchedulerLink(cluster.transport, cluster.scheduler_address, hello, timeout_s=PATIENCE_S)
    try:
        cut_all(cluster)
        assert link.call(messages.GetSettings(), messages.ClusterSettings).replicas == 0
        cut_all(cluster)
        registering = messages.Register(node="newcomer", role=Role.OBSERVER)
        assert link.register(registering).incarnation > 0
        assert link.reconnections == 0  # the process was no member
    finally:
        link.close()


@pytest.mark.parametrize(
    ("timeout_s", "reconnect_s", "words"),
    [(PATIENCE_S, 0.3, r"the scheduler at .* within 0.3 s"), (0.3, PATIENCE_S, "is lost: ")],
)
def test_a_former_member_reports_an_unreachable_scheduler(timeout_s: float, reconnect_s: float, words: str) -> None:
    with Cluster(servers=1) as cluster:
        hello = Hello(role="server", name="newcomer")
        link = SchedulerLink(cluster.transport, cluster.scheduler_address, hello, timeout_s=5, reconnect_s=reconnect_s)
    try:
        with pytest.raises(ConnectionLostError, match=words):
            link.call(messages.GetSettings(), messages.ClusterSettings, timeout_s=timeout_s)
    finally:
        link.close()


def test_a_rejected_member_does_not_retry_forever(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection of the scheduler also breaks repeatedly."""
    connected: list[Any] = []

    def hang_up(peer: Any, *frame: Any) -> None:
        connected.append(peer)
        peer.abort()

    monkeypatch.setattr(cluster.scheduler, "frame_received", hang_up)
    hello = Hello(role="server", name="newcomer")
    link = SchedulerLink(cluster.transport, cluster.scheduler_address, hello, timeout_s=PATIENCE_S, reconnect_s=0.5)
    try:
        with pytest.raises(ConnectionLostError, match=r"within 0.5 s"):
            link.call(messages.GetSettings(), messages.ClusterSettings)
        assert 2 <= len(set(connected)) <= 12
    finally:
        monkeypatch.undo()
        link.close()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(servers=1, workers=3) as cluster:
        yield cluster


def test_every_shard_is_done_once_after_any_number_of_cuts(cluster: Cluster) -> None:
    """No call and no message is lost or handled twice."""
    poster, workers = cluster.link(role="observer"), [cluster.link(rank=rank) for rank in range(3)]
    job = messages.PostJob(spec=JobSpec(description=b"work", files=(40, None), epochs=2, assignment="first-come"))
    number = int(poster.call(job, int))
    done: list[tuple[int, int, int]] = []
    cuts: list[int] = []

    def work(worker: SchedulerLink) -> None:
        examples = 0.0
        worker.call(messages.GetJob(after=0), Job)
        worker.notify(messages.FileEnded(job=number, file=1, num_shards=5))
        while True:
            lease = worker.call(messages.TakeLease(job=number, wait=True), Lease)
            if lease.lease == ALL_DONE:
                return
            examples += 10
            report = messages.Report(job=number, fields={"shard": lease.shard}, shard=lease.key)
            worker.call(report, body=(bytes([lease.shard]),))
            progress = {"job": number, "examples": examples}
            worker.notify(messages.LeaseDone(job=number, lease=lease.lease, progress=progress))
            done.append((lease.epoch, lease.file, lease.shard))

    def cut() -> None:
        random = Random(5)
        while len(done) < 85:
            cuts.append(cut_all(cluster))
            wait_until(lambda: all(link.calls.is_connected for link in (*workers, poster)))
            target = len(done) + random.randint(1, 4)
            wait_until(lambda: len(done) >= min(target, 85))  # noqa: B023

    in_threads(*(lambda worker=worker: work(worker) for worker in workers), cut)
    assert len(cuts) > 2
    assert sorted(done) == sorted({*done})
    assert len(done) == 90
    found: JobState = poster.call(messages.JobStatus(job=number), JobState)
    assert (found.done, found.total, found.lost_workers) == (90, 90, 0)
    assert found.progress["examples"] == 900
    assert found.num_reports == 90


def test_requests_before_the_cut_are_answered_after_it(cluster: Cluster) -> None:
    seeker, poster = cluster.link(), cluster.link(role="observer")
    seeking = seeker.start(messages.GetJob(after=0), Job)
    seeker.call(messages.GetView())
    cut_all(cluster)
    wait_until(lambda: seeker.reconnections == 1 and poster.reconnections == 1)
    number = poster.call(
        messages.PostJob(spec=JobSpec(description=b"", files=(1,), epochs=1, assignment="first-come")), int
    )
    assert seeking().number == number


def test_the_scheduler_waits_for_a_server_with_a_long_cut() -> None:
    """The server has the only copy of its rows, so its declaration of death would lose them.

    It serves requests during the cut, because no new view starts a fill from a server that may not see the view.
    """
    with Cluster(servers=3, workers=1, heartbeat_timeout_s=1.5) as cluster:
        client = cluster.connect()
        table = client.sparse_table("w", update=SGD(lr=1.0))
        keys, ones = np.arange(200, dtype=np.uint64), np.ones(200, np.float32)
        table.push(keys, ones).wait()
        wait_until(lambda: all(client.incarnation in node.server.core.workers.named for node in cluster.nodes))
        link = cluster.nodes[1].link
        connect, link.transport = link.transport, _NoWay()  # type: ignore[assignment]
        incarnation = link.state.welcome.incarnation if link.state.welcome else 0
        cluster.served.call(lambda: cluster.scheduler.core.sessions.members[incarnation].peer.abort())
        wait_until(lambda: incarnation in cluster.scheduler.core.cluster.suspects.silent)
        assert (table.push_pull(keys, ones) == -2).all()
        link.transport = connect
        wait_until(lambda: incarnation not in cluster.scheduler.core.cluster.suspects.silent)
        assert (table.push_pull(keys, ones) == -3).all()
        found = client.link.get_view()
        assert (len(found.of_role(Role.SERVER)), found.num_lost) == (3, 0)
        assert not cluster.nodes[1].expelled


def test_leave_arrives_while_the_scheduler_sends() -> None:
    """Otherwise the scheduler would not read messages after a failed write, and others would wait for the worker."""
    with Cluster(servers=1, workers=1) as cluster:
        link = cluster.link()
        incarnation = link.state.welcome.incarnation if link.state.welcome else 0
        peer: Any = cluster.scheduler.core.sessions.members[incarnation].peer
        has_begun = threading.Event()

        def write() -> None:
            has_begun.set()
            time.sleep(0.2)
            peer.send(*frame_parts(NOTICE, meta=messages.encode(messages.CommitView(term=0, epoch=0))))

        cluster.served.loop.call_soon_threadsafe(write)
        assert has_begun.wait(PATIENCE_S)
        link.close()
        began = time.monotonic()
        wait_until(
            lambda: incarnation not in {member.incarnation for member in cluster.scheduler.core.cluster.newest.members}
        )
        assert time.monotonic() < began + 20.0  # the time-out is 30 s


class _NoWay:
    """A transport that reaches no process."""

    def connect(self, *_: object, **__: object) -> None:
        raise ConnectionError


def test_the_end_of_a_member_s_process_is_reported_immediately() -> None:
    with Cluster(servers=1, workers=2, consistency=Sequential(), heartbeat_timeout_s=60.0) as cluster:
        lives, ends = cluster.connect_all()
        table = lives.sparse_table("w", update=SGD(lr=1.0))
        cluster.kill(ends)
        table.push([1], np.ones(1, np.float32), tick=True)
        assert table.pull([1]) == -1  # no worker waits for another worker
