"""Backpressure: a slow server, worker or scheduler does not fill a server's memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tests.waiting import in_threads, wait_until

from paceline.protocol import Consistency, Eventual, Sequential
from paceline.ps import SGD

from .harness import PATIENCE_S, Cluster, ServerNode, key_of

BUDGET = 1 << 20
DIM = 4096
NUM_PUSHES = 400
RECEIVED_BYTES = 1 << 19  # size of the receive buffer, which may be full when reading stops


@contextmanager
def stopped(node: ServerNode) -> Iterator[None]:
    """Block the event loop of a server, like SIGSTOP."""
    assert node.served is not None
    go_on, has_begun = threading.Event(), threading.Event()

    def block() -> None:
        has_begun.set()
        go_on.wait(PATIENCE_S)

    node.served.loop.call_soon_threadsafe(block)
    assert has_begun.wait(PATIENCE_S)
    try:
        yield
    finally:
        go_on.set()


def most_held(node: ServerNode, done: Any) -> int:
    """Return the largest number of bytes that a server holds until `done` is true."""
    most = 0

    def is_blocked() -> bool:
        nonlocal most
        is_done = bool(done())
        most = max(most, node.call(lambda: node.server.pressure.count_held() + node.server.pressure.count_ahead()))
        return is_done

    wait_until(is_blocked)
    return most


def test_a_blocked_replica_does_not_fill_the_memory_of_the_primary() -> None:
    with Cluster(servers=2, workers=2, replicas=1) as cluster:
        pusher, reader = cluster.connect_all(timeout_s=60.0)
        first = cluster.nodes[0]
        first.server.pressure.max_bytes = BUDGET
        tables = [client.sparse_table("w", dim=DIM, update=SGD(lr=1.0)) for client in (pusher, reader)]
        key = key_of(pusher, 0)
        tables[0].push(key, np.ones((1, DIM), np.float32)).wait()
        grads = np.ones((1, DIM), np.float32)
        thread = threading.Thread(target=lambda: [tables[0].push(key, grads) for _ in range(NUM_PUSHES)])
        with stopped(cluster.nodes[1]):
            thread.start()
            most = most_held(first, lambda: len(first.server.pressure.paused) == 1)
            assert not np.isnan(tables[1].pull(key)).any()  # other clients are served
            assert BUDGET < most <= BUDGET + RECEIVED_BYTES
        thread.join(PATIENCE_S)
        pusher.flush()
        assert (tables[0].pull(key) == -(NUM_PUSHES + 1)).all()
        assert most_held(first, lambda: len(first.server.pressure.paused) == 0) <= BUDGET + RECEIVED_BYTES


def test_a_fast_worker_waits_for_slow_workers_and_slow_workers_do_not_wait() -> None:
    with Cluster(servers=1, workers=2, consistency=Sequential()) as cluster:
        clients = cluster.connect_all(timeout_s=60.0)
        node = cluster.nodes[0]
        node.server.pressure.max_bytes = BUDGET
        tables = [client.sparse_table("w", dim=DIM, update=SGD(lr=1.0)) for client in clients]
        grads = np.ones((1, DIM), np.float32)

        def run(rank: int) -> None:
            for _ in range(NUM_PUSHES):
                tables[rank].push([5], grads, tick=True)

        ahead = threading.Thread(target=lambda: run(0))
        ahead.start()
        most = most_held(node, lambda: len(node.server.pressure.paused) == 1)
        assert BUDGET < most <= BUDGET + RECEIVED_BYTES
        run(1)
        ahead.join(PATIENCE_S)
        assert not ahead.is_alive()
        assert in_threads(*[lambda table=table: float(table.pull([5])[0, 0]) for table in tables]) == [
            -2.0 * NUM_PUSHES,
            -2.0 * NUM_PUSHES,
        ]


@pytest.mark.parametrize("consistency", [Eventual(), Sequential()], ids=str)
def test_the_death_of_a_replica_frees_the_primary(consistency: Consistency) -> None:
    with Cluster(servers=2, replicas=1, consistency=consistency, heartbeat_timeout_s=1.0) as cluster:
        client = cluster.connect(timeout_s=60.0)
        # Block the younger server. Its heartbeats continue, and the younger of two servers without a connection
        # is expelled.
        first, second = sorted(cluster.nodes, key=lambda node: node.server.replicator.incarnation)
        first.server.pressure.max_bytes = BUDGET
        table = client.sparse_table("w", dim=DIM, update=SGD(lr=1.0))
        key, grads = key_of(client, cluster.nodes.index(first)), np.ones((1, DIM), np.float32)
        table.push(key, grads, tick=True).wait()
        with stopped(second):
            for _ in range(NUM_PUSHES):
                table.push(key, grads, tick=True)
            assert (table.pull(key) == -(NUM_PUSHES + 1)).all()
            second.link.close()
