"""What a worker awaits at the end of its ``with`` block."""

from __future__ import annotations

import threading
import time
from functools import partial

import numpy as np
import pytest
from msgspec import structs
from tests.waiting import wait_until

from paceline.errors import UsageError
from paceline.protocol import BoundedDelay, Consistency, Sequential
from paceline.protocol.buckets import ALL
from paceline.ps import SGD, Client
from paceline.ps.messages import PUSH

from .harness import Cluster, ServerNode

KEYS = np.arange(300, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
ONES = -np.ones((300, 1), np.float32)


def clocks_of(node: ServerNode) -> dict[int, int]:
    return dict(node.server.core.workers.gate.clocks)


def push(client: Client) -> None:
    client.sparse_table("sparse", update=SGD(lr=1.0)).push(KEYS, ONES, tick=True)


def test_the_block_ends_when_the_replicas_have_the_last_iteration() -> None:
    with Cluster(servers=3, workers=2, replicas=1, consistency=Sequential()) as cluster:
        leaving, other = cluster.connect_all()
        observer = cluster.connect(observer=True)
        left = threading.Event()

        def work() -> None:
            with leaving:
                push(leaving)
            left.set()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            wait_until(lambda: leaving.clock == 1)
            assert not left.wait(0.2)  # the iteration is incomplete, so only one server has each push
        finally:
            push(other)
            other.flush()
            thread.join(60.0)
        assert left.is_set()
        cluster.nodes[0].stop()
        other.retire()
        values = observer.sparse_table("sparse", update=SGD(lr=1.0)).pull(KEYS)
        assert set(values.reshape(-1)) == {2.0}


@pytest.mark.parametrize("abrupt", [True, False])
def test_a_block_that_ends_by_an_exception_does_not_wait_for_other_workers(abrupt: bool) -> None:
    def fail(client: Client) -> None:
        with client:
            push(client)
            raise KeyError

    with Cluster(servers=2, workers=2, replicas=1, consistency=Sequential()) as cluster:
        client, _ = cluster.connect_all()
        began = time.monotonic()
        if abrupt:
            with pytest.raises(KeyError):
                fail(client)
        else:
            push(client)
            client.close()
        assert time.monotonic() - began < 20.0


def test_failures_are_raised() -> None:
    def refuse(*arguments: object) -> None:
        raise UsageError("not today")

    def work(client: Client) -> None:
        with client:
            push(client)

    with Cluster() as cluster:
        client = cluster.connect()
        cluster.nodes[0].server._handlers[PUSH] = refuse
        with pytest.raises(UsageError, match="not today"):
            work(client)
        with pytest.raises(UsageError, match="closed"):
            client.flush()


def test_a_client_may_be_closed_within_the_block() -> None:
    with Cluster() as cluster, cluster.connect() as client:
        push(client)
        client.close()


@pytest.mark.parametrize("is_missed", [False, True])
@pytest.mark.parametrize(
    "consistency", [Sequential(), pytest.param(BoundedDelay(tau=1), marks=pytest.mark.thorough)], ids=str
)
def test_a_server_in_no_chain_drops_clocks_and_receives_new_clocks(consistency: Consistency, is_missed: bool) -> None:
    """The new clocks may come from a server that missed the view without these chains and is still connected."""
    with Cluster(servers=2, workers=2, replicas=1, consistency=consistency) as cluster:
        first, second = clients = cluster.connect_all()
        for client in clients:
            push(client)
        for client in clients:
            client.flush()
        stays, goes = cluster.nodes
        known = {node: node.call(partial(clocks_of, node)) for node in cluster.nodes}
        assert known[goes] == known[stays]
        now = first.link.get_view()
        me = stays.server.replicator.incarnation

        def change(version: int, filling: int | None) -> None:
            groups = tuple(structs.replace(group, members=(me,), filling=filling) for group in now.groups)
            new = structs.replace(now, version=version, groups=groups)
            for node in cluster.nodes:
                if node is goes or filling is not None or not is_missed:
                    node.call(partial(node.server.view_changed, new))
            for client in clients:
                client.follower.take(new)

        change(now.version + 1, None)
        workers = goes.server.core.workers
        assert (dict(workers.gate.clocks), workers.ranks, workers.counted) == ({}, {}, set())
        for client in clients:
            push(client)  # the server does not receive this view
        change(now.version + 2, goes.server.replicator.incarnation)
        wait_until(lambda: goes.call(lambda: dict(workers.gate.clocks)) == dict.fromkeys(known[goes], 2))
        assert workers.ranks == stays.server.core.workers.ranks
        held = goes.server.core.replication
        wait_until(lambda: goes.call(lambda: held.held == ALL))
        second.retire()
        push(first)
        wait_until(lambda: goes.call(lambda: max(workers.gate.clocks.values())) == 3)
