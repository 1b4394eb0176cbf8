"""A cluster with ``min_replicas`` acknowledges a push only if so many replicas have it."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import numpy as np
import pytest
from tests.waiting import wait_until

from paceline.errors import DeadlineError, UsageError
from paceline.protocol import BoundedDelay, Consistency, Eventual, Role, Sequential
from paceline.ps import SGD, Client, messages

from .harness import PATIENCE_S, Cluster, ServerNode
from .test_replication import KEYS, cluster_view, is_whole

ONES = -np.ones((300, 1), np.float32)


def kill_server(cluster: Cluster, client: Client) -> None:
    """End a server, and wait until all living members and this client have received the view without it."""
    cluster.nodes[1].stop()
    wait_until(lambda: len(cluster_view(client).of_role(Role.SERVER)) == 1)


def num_held(client: Client) -> int:
    """Return the number of requests that wait at the servers."""
    return sum(server.held for server in client.statistics())


@pytest.mark.parametrize("consistency", [Eventual(), BoundedDelay(tau=1)], ids=str)
def test_a_push_waits_for_a_new_replica(consistency: Consistency) -> None:
    with Cluster(servers=2, replicas=1, min_replicas=1, consistency=consistency) as cluster, ExitStack() as stack:
        client, observer = cluster.connect(), cluster.connect(observer=True)
        table = client.sparse_table("w", update=SGD(lr=1.0))
        table.push(KEYS, ONES).wait()
        kill_server(cluster, observer)
        late = table.push(KEYS, ONES)
        waiting = threading.Thread(target=late.wait)
        waiting.start()
        wait_until(lambda: num_held(observer) >= 1)  # two, if the death of the worker is not yet noticed
        assert waiting.is_alive()
        cluster.nodes.append(ServerNode(cluster, None, stack, extra=True).join())
        waiting.join(PATIENCE_S)
        assert not waiting.is_alive()
        late.wait()
        assert is_whole(observer, 2, 1)
        cluster.nodes[0].stop()  # the other server has the acknowledged pushes
        wait_until(lambda: len(cluster_view(observer).of_role(Role.SERVER)) == 1)
        assert (observer.sparse_table("w", update=SGD(lr=1.0)).pull(KEYS) == 2).all()


def test_a_push_without_a_replica_is_refused_at_the_deadline() -> None:
    with Cluster(servers=2, replicas=1, min_replicas=1) as cluster:
        client, observer = cluster.connect(timeout_s=0.5), cluster.connect(observer=True)
        table = client.sparse_table("w", update=SGD(lr=1.0))
        table.push(KEYS, ONES).wait()
        kill_server(cluster, observer)
        expected = r"worker 0 waited 0.5 s for .* to table 'w': bucket \d+ has no replica, .* with 1 \(--min-replicas\)"
        with pytest.raises(DeadlineError, match=expected):
            table.push(KEYS[:1], ONES[:1]).wait()
        assert num_held(observer) == 0


def test_without_min_replicas_the_last_copy_acknowledges_a_push() -> None:
    with Cluster(servers=2, replicas=1) as cluster:
        client, observer = cluster.connect(timeout_s=5.0), cluster.connect(observer=True)
        table = client.sparse_table("w", update=SGD(lr=1.0))
        kill_server(cluster, observer)
        table.push(KEYS, ONES).wait()


def test_a_sequential_iteration_waits_for_a_replica() -> None:
    with Cluster(servers=2, replicas=1, min_replicas=1, consistency=Sequential()) as cluster, ExitStack() as stack:
        client, observer = cluster.connect(), cluster.connect(observer=True)
        hasty = client.sparse_table("w", update=SGD(lr=1.0))
        hasty.push(KEYS, ONES, tick=True).wait()
        assert (hasty.pull(KEYS) == 1).all()
        kill_server(cluster, observer)
        hasty.push(KEYS, ONES, tick=True).wait()
        found: list[bool] = []
        reading = threading.Thread(target=lambda: found.append(bool((hasty.pull(KEYS) == 2).all())))
        reading.start()
        wait_until(lambda: num_held(observer) >= 1)  # two, if the death of the worker is not yet noticed
        assert not found
        cluster.nodes.append(ServerNode(cluster, None, stack, extra=True).join())
        reading.join(20.0)
        assert found == [True]
        hasty.push(KEYS, ONES, tick=True).wait()
        assert (hasty.pull(KEYS) == 3).all()


def test_a_sequential_read_without_a_replica_reports_it() -> None:
    with Cluster(servers=2, replicas=1, min_replicas=1, consistency=Sequential()) as cluster:
        client, observer = cluster.connect(timeout_s=0.5), cluster.connect(observer=True)
        table = client.sparse_table("w", update=SGD(lr=1.0))
        table.push(KEYS, ONES, tick=True).wait()
        table.pull(KEYS)
        kill_server(cluster, observer)
        table.push(KEYS, ONES, tick=True).wait()
        with pytest.raises(DeadlineError, match=r"still waits for .*bucket \d+ has no replica"):
            table.pull(KEYS)


@pytest.mark.parametrize("wrong", [-1, 2])
def test_min_replicas_is_at_most_replicas(wrong: int) -> None:
    with pytest.raises(UsageError, match=f"min_replicas={wrong} with replicas=1: .*expected 0 to 1"):
        messages.ClusterSettings(num_servers=2, replicas=1, min_replicas=wrong).check()
