"""Connections of workers that no view lists take no part in iterations."""

from __future__ import annotations

import numpy as np
import pytest
from tests.waiting import wait_until

from paceline.errors import PeerError
from paceline.protocol import BoundedDelay, Consistency, Sequential
from paceline.ps import SGD, messages
from paceline.ps.messages import CALL, SYNCED
from paceline.transport import Channel, Hello, frame_parts

from .harness import PATIENCE_S, Cluster

KEYS = np.arange(10, dtype=np.uint64)
ONES = -np.ones((10, 1), np.float32)


def connect(cluster: Cluster, incarnation: int) -> Channel:
    served = cluster.nodes[0].served
    assert served is not None
    hello = Hello(role="worker", rank=7, incarnation=incarnation)
    return cluster.transport.connect(served.endpoint.best(), hello, timeout_s=PATIENCE_S)


@pytest.mark.parametrize("consistency", [BoundedDelay(tau=1), Sequential()], ids=str)
def test_a_worker_in_no_view_delays_no_other_worker(consistency: Consistency) -> None:
    """Formerly, such a worker joined with a clock that never advanced, and all workers waited for it."""
    with Cluster(consistency=consistency) as cluster:
        client = cluster.connect()
        table = client.sparse_table("w", update=SGD(lr=1.0))
        ghost = connect(cluster, 10**9)
        ghost.send(*frame_parts(CALL, request=1, meta=messages.encode(messages.JoinClock(rank=7, clock=0))))
        ghost.send(*frame_parts(SYNCED, flags=1, epoch=client.servers.routes.version))
        wait_until(lambda: len(list(cluster.nodes[0].server.core.early)) == 2)
        for iteration in range(4):
            table.push(KEYS, ONES, tick=True)
            assert set(table.pull(KEYS).reshape(-1)) == {iteration + 1.0}
        assert cluster.num_counted() == 1
        ghost.close()
        wait_until(lambda: not list(cluster.nodes[0].server.core.early))


def test_a_worker_does_not_join_if_it_left_before_the_first_view() -> None:
    with Cluster(consistency=BoundedDelay(tau=1), workers=1) as cluster:
        client = cluster.connect()
        number = client.servers.newest()[0].session.server  # of a server, which is no worker
        channel = connect(cluster, number)
        channel.send(*frame_parts(CALL, request=1, meta=messages.encode(messages.JoinClock(rank=7, clock=0))))
        with pytest.raises(PeerError, match="left the cluster or was declared dead"):
            channel.receive_header(PATIENCE_S)
        channel.close()
        assert cluster.num_counted() == 1
