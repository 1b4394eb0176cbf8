"""The scheduler logs each member that it declares dead, with the reason."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.waiting import wait_until

from paceline.errors import PeerError
from paceline.protocol import Role
from paceline.ps import SGD, SchedulerLink, make_node_name, messages
from paceline.ps.scheduler.link import LinkHooks
from paceline.tables.settings import to_fields
from paceline.training.worker.worker import run_worker
from paceline.transport import Hello

from .harness import Cluster, floats, keys_of


def member(cluster: Cluster, rank: int, *, is_well: bool) -> SchedulerLink:
    node = make_node_name("worker")
    hello = Hello(role="worker", name=node)
    link = SchedulerLink(cluster.transport, cluster.scheduler_address, hello, hooks=LinkHooks(is_well=lambda: is_well))
    link.register(messages.Register(node=node, role=Role.WORKER, rank=rank))
    return link


@pytest.mark.parametrize("reports_ends", [True, False])
def test_a_death_is_reported_with_the_reason(reports_ends: bool) -> None:
    notes: list[str] = []
    with Cluster(servers=1, workers=3, heartbeat_timeout_s=2.0) as cluster:
        scheduler = cluster.scheduler
        scheduler.on_note, scheduler.reports_ends = notes.append, reports_ends
        member(cluster, 0, is_well=True).close()  # this worker sends Leave, so the scheduler reports no death
        silent, ended = member(cluster, 1, is_well=False), member(cluster, 2, is_well=True)
        welcome = ended.state.welcome
        assert welcome is not None
        cluster.served.call(lambda: scheduler.process_ended(welcome.incarnation))
        wait_until(lambda: any("worker 1" in note for note in notes))
        expected = [f"worker 1 ({silent.hello.name}) is declared dead: it was silent for 2 s"]
        if reports_ends:
            expected.insert(0, f"worker 2 ({ended.hello.name}) is declared dead: its process ended")
        for link in (silent, ended):
            link.close()
        lasting = member(cluster, 3, is_well=False)
        cluster.served.call(lambda: scheduler.end("the test ends the scheduler"))
        incarnation = lasting.state.welcome.incarnation if lasting.state.welcome is not None else 0
        cluster.served.call(lambda: scheduler.process_ended(incarnation))  # like an ended process
        lasting.close()
    assert notes == expected


def test_declaring_a_waiting_worker_dead_ends_it() -> None:
    """The scheduler gives it no further job, so it would wait until the cluster ends."""
    with Cluster(servers=1, workers=1) as cluster, ThreadPoolExecutor(1) as pool:
        ready: Future[int] = Future()
        over = pool.submit(run_worker, cluster.transport, str(cluster.scheduler_address), on_ready=ready.set_result)
        ready.result(30)
        membership = cluster.scheduler.core.cluster.membership
        worker = next(member for member in membership.members if member.role is Role.WORKER)
        cluster.served.call(lambda: cluster.scheduler.process_ended(worker.incarnation))
        with pytest.raises(PeerError, match=r"declared (it )?dead"):
            over.result(30)


def test_a_client_declared_dead_is_notified_by_the_scheduler() -> None:
    """The scheduler notifies the worker.

    Servers reject a dead worker's requests. If its server has died too, only this notice ends the wait for a view.
    """
    with Cluster(servers=2, workers=1, replicas=1) as cluster:
        client = cluster.connect()
        table = client.sparse_table("t", update=SGD(lr=1.0))
        table.push(keys_of(1), np.ones((1, 1), np.float32)).wait()
        cluster.served.call(lambda: cluster.scheduler.process_ended(client.incarnation))
        wait_until(lambda: client.servers.watch.has_failed)
        with pytest.raises(PeerError, match="this worker was declared dead: its process ended; connect again"):
            table.pull(keys_of(1))


def test_a_member_declared_dead_changes_nothing() -> None:
    """It may have been stopped during the loading of a model.

    The load would overwrite or erase later pushes of other clients.
    """
    with Cluster(servers=1, workers=2) as cluster:
        dead, living = cluster.connect_all()
        keys, ones = keys_of(1, 2), -np.ones((2, 1), np.float32)
        table = dead.sparse_table("t", update=SGD(lr=1.0))
        living.sparse_table("t", update=SGD(lr=1.0)).push(keys, ones).wait()
        cluster.served.call(lambda: cluster.scheduler.process_ended(dead.incarnation))
        wait_until(lambda: cluster.nodes[0].server.core.workers.is_excluded(dead.incarnation))
        calls: list[tuple[msgspec.Struct, tuple[np.ndarray[tuple[int, ...], np.dtype[Any]], ...]]] = [
            (messages.WriteRecords(table=table.number, rows=1), (keys_of(1), floats(77.0))),
            (messages.Erase(table=table.number), (keys_of(2),)),
            (messages.SetUpdate(table=table.number, update=to_fields(SGD(lr=5.0)), revision=1), ()),
        ]
        for message, body in calls:
            with pytest.raises(PeerError, match=r"declared (it )?dead"):
                dead.servers.connections[0].call(message, body=body, sequence=1)
        found = living.sparse_table("t", update=SGD(lr=1.0))
        found.push(keys, ones).wait()
        assert found.pull(keys).reshape(-1).tolist() == [2.0, 2.0]
