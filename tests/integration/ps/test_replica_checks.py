"""Servers compare their buckets with their predecessors, and report differences."""

from __future__ import annotations

import logging
import re
import threading
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from tests.waiting import in_threads, wait_until

from paceline.protocol import BoundedDelay, Consistency, Eventual, Sequential
from paceline.ps import FTRL, SGD, Adam, Client, DenseTable, SparseTable, UpdateRule
from paceline.tables.dense_part import DensePart

from .harness import Cluster, ServerNode, check_all_buckets
from .test_replication import is_whole

KEYS = np.arange(300, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
CASES = [
    pytest.param(Eventual(), Adam(lr=0.1), marks=pytest.mark.thorough),
    pytest.param(Eventual(), FTRL(alpha=0.1), marks=pytest.mark.thorough),
    (BoundedDelay(tau=1), SGD(lr=1.0)),
    (Sequential(), Adam(lr=0.1)),
]


def tables_of(client: Client, rule: UpdateRule, size: int = 3000) -> tuple[SparseTable, DenseTable]:
    return client.sparse_table("sparse", dim=2, update=rule), client.dense_table("dense", size=size, update=rule)


def work(client: Client, rule: UpdateRule, iterations: int) -> None:
    sparse, dense = tables_of(client, rule)
    random = np.random.default_rng(client.rank)
    for _ in range(iterations):
        keys = random.choice(KEYS, 100, replace=False)
        sparse.push(keys, random.standard_normal((100, 2), np.float32))
        dense.push(random.standard_normal(3000, np.float32), tick=True)
    client.flush()


@pytest.mark.parametrize(("consistency", "rule"), CASES, ids=str)
def test_replicas_are_equal_bit_by_bit_during_pushes(consistency: Consistency, rule: UpdateRule) -> None:
    with Cluster(servers=3, workers=2, replicas=2, consistency=consistency) as cluster:
        clients = cluster.connect_all()
        for client in clients:
            tables_of(client, rule)

        def compare() -> None:
            for _ in range(3):
                assert cluster.compare_replicas() >= 2 * 512

        in_threads(*(lambda client=client: work(client, rule, 20) for client in clients), compare)
        assert cluster.compare_replicas() >= 2 * 512
        statistics = clients[0].statistics()
        assert sum(server_statistics.num_compared for server_statistics in statistics) >= 4 * 2 * 512
        assert {
            (server_statistics.differences, server_statistics.num_unordered) for server_statistics in statistics
        } == {((), 0)}


@pytest.mark.thorough
@pytest.mark.parametrize("consistency", [Eventual(), Sequential()], ids=str)
def test_no_differences_are_reported_while_servers_join_and_leave(consistency: Consistency) -> None:
    with Cluster(servers=3, workers=2, replicas=1, consistency=consistency) as cluster, ExitStack() as stack:
        clients, observer = cluster.connect_all(), cluster.connect(observer=True)
        done = threading.Event()

        def push(client: Client) -> None:
            while not done.wait(0.1):
                work(client, Adam(lr=0.1), 2)
            client.retire()

        def move() -> None:
            try:
                cluster.nodes.append(ServerNode(cluster, None, stack, extra=True).join())
                wait_complete(4)
                cluster.nodes.pop(0).stop()
                wait_complete(3)
            finally:
                done.set()

        def wait_complete(num_servers: int) -> None:
            while not is_whole(observer, num_servers, 1):
                for node in cluster.nodes:
                    check_all_buckets(node)
                done.wait(0.3)

        in_threads(*(lambda client=client: push(client) for client in clients), move)
        assert cluster.compare_replicas() > 0


def test_a_push_missing_on_a_replica_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with Cluster(servers=2, workers=1, replicas=1) as cluster:
        client = cluster.connect()
        sparse, dense = tables_of(client, Adam(lr=0.1))
        part: Any = cluster.nodes[1].server.tables.by_number[2].part
        original, part.push = part.push, lambda selection, grads: None
        dense.push(np.ones(3000, np.float32)).wait()
        part.push = original
        sparse.push(KEYS, np.ones((300, 2), np.float32)).wait()
        with caplog.at_level(logging.ERROR, "paceline.ps"), pytest.raises(AssertionError):
            cluster.compare_replicas()
        first, second = (server_statistics.differences for server_statistics in client.statistics())
        assert len(first) + len(second) == 500  # buckets with elements
        expected = r"bucket \d+ differs between server 0 and its replica on server 1: the rows of table 'dense' "
        assert all(re.match(expected, line) for line in second)
        logged = {record.message for record in caplog.records}
        assert len(logged & {*first}) == len(logged & {*second}) == 8


def test_a_missing_push_is_reported() -> None:
    with Cluster(servers=2, workers=1, replicas=1) as cluster:
        client = cluster.connect()
        sparse, _ = tables_of(client, SGD(lr=1.0))
        replica = cluster.nodes[1]
        rules: Any = replica.server.core.replication
        original = rules.delivery.admit
        rules.delivery.admit = lambda *arguments: 0
        sparse.push(KEYS, np.ones((300, 2), np.float32)).wait()
        rules.delivery.admit = original
        with pytest.raises(AssertionError, match="was applied on only one"):
            cluster.compare_replicas()


def test_a_bucket_sent_as_a_view_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the bytes for the new server would change before they are sent, and contain a push twice."""
    read = DensePart.read_bucket
    with Cluster(servers=1, workers=1, replicas=1) as cluster, ExitStack() as stack:
        client = cluster.connect()
        _, dense = tables_of(client, SGD(lr=1.0))
        dense.push(np.ones(3000, np.float32)).wait()

        def with_a_push_more(part: DensePart, bucket: int) -> Any:
            keys, records = read(part, bucket)
            return keys, records + (bucket == 7)

        monkeypatch.setattr(DensePart, "read_bucket", with_a_push_more)
        cluster.nodes.append(ServerNode(cluster, None, stack, extra=True).join())
        wait_until(lambda: is_whole(client, 2, 1))
        monkeypatch.undo()
        with pytest.raises(AssertionError, match="bucket 7 differs between server 0 and its replica on server 1"):
            cluster.compare_replicas()
