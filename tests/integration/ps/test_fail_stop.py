"""Servers that fail during an operation end. Servers without memory reject pushes. No acknowledged push is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.waiting import in_threads, wait_until

from paceline.errors import ConnectionLostError, NoRoomError, PacelineError, PeerError
from paceline.protocol import BoundedDelay, Consistency, Eventual, Sequential
from paceline.protocol.replication import Lead
from paceline.ps import SGD, Client, SparseTable
from paceline.tables.bucket_arrays import buckets_of_keys

from .harness import Cluster, Keys, ServerNode

KEYS = np.arange(300, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
ONES = -np.ones((300, 1), np.float32)


def fail_once(node: ServerNode, name: str, error: Exception) -> None:
    """Let the next call of a method of the server's part of the first table raise an error."""
    raise_once(node.server.tables.by_number[1].part, name, error)


def raise_once(of: Any, name: str, error: Exception) -> None:
    """Let the next call of a method of an object raise an error."""
    original = getattr(of, name)

    def fails(*arguments: Any) -> Any:
        setattr(of, name, original)
        raise error

    setattr(of, name, fails)


def led_by(node: ServerNode) -> Keys:
    """Return keys whose primary is a server."""
    primary = node.server.core.replication.primary
    return KEYS[[bool(buckets_of_keys(KEYS[i : i + 1]) & primary) for i in range(len(KEYS))]]


def end(node: ServerNode) -> BaseException:
    """Wait until a server has failed, and end its process; return the error."""
    wait_until(lambda: bool(node.failures))
    node.stop()
    (failure,) = node.failures
    node.failures.clear()
    return failure


def table_of(client: Client) -> SparseTable:
    return client.sparse_table("sparse", update=SGD(lr=1.0))


ERRORS = [MemoryError("no memory for the bucket to grow"), ZeroDivisionError(), PeerError("not any more")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("consistency", [Eventual(), BoundedDelay(tau=1), Sequential()], ids=str)
@pytest.mark.parametrize("role", ["primary", "replica"])
def test_a_server_ends_after_a_failed_push_and_nothing_is_lost(
    role: str, consistency: Consistency, error: Exception
) -> None:
    """A replica that continued would have the push only in its filter, and would acknowledge the repeated push."""
    with Cluster(servers=2, replicas=1, consistency=consistency) as cluster:
        client = cluster.connect()
        table = table_of(client)
        primary, replica = cluster.nodes
        keys = led_by(primary)
        ones = -np.ones((len(keys), 1), np.float32)
        table.push(keys, ones, tick=True)
        table.pull(keys)
        fails = primary if role == "primary" else replica
        fail_once(fails, "push", error)
        found, _ = in_threads(partial(end, fails), partial(table.push, keys, ones, tick=True))
        assert found is error
        assert set(table.pull(keys).reshape(-1)) == {2.0}


@pytest.mark.parametrize("consistency", [Eventual(), Sequential()], ids=str)
def test_a_failing_single_server_acknowledges_nothing(consistency: Consistency) -> None:
    with Cluster(consistency=consistency, workers=2) as cluster:
        clients = cluster.connect_all(timeout_s=5.0)
        tables = [table_of(client) for client in clients]
        (node,) = cluster.nodes
        fail_once(node, "push_sum" if node.server.core.progress.iterations is not None else "push", MemoryError())

        def push(table: SparseTable) -> None:
            with suppress(ConnectionLostError):  # the other worker's push may already have ended the server
                table.push(KEYS, ONES, tick=True)

        found, *_ = in_threads(partial(end, node), *(partial(push, table) for table in tables))
        assert isinstance(found, MemoryError)
        for table in tables:
            with pytest.raises(PacelineError):
                table.pull(KEYS)


@pytest.mark.parametrize("replicas", [0, 1])
def test_a_push_without_memory_is_refused_and_changes_nothing(replicas: int) -> None:
    with Cluster(servers=1 + replicas, replicas=replicas) as cluster:
        client = cluster.connect()
        table = table_of(client)
        table.push(KEYS, ONES).wait()
        for node in cluster.nodes:
            fail_once(node, "reserve", MemoryError())
        with pytest.raises(PeerError, match=r"server \d has no memory for this request. It was rejected without"):
            table.push(KEYS, ONES).wait()
        keys = led_by(cluster.nodes[0])
        refused = table.pull(keys)
        assert set(refused.reshape(-1)) == {1.0}
        table.push(keys, -np.ones((len(keys), 1), np.float32)).wait()
        assert set(table.pull(keys).reshape(-1)) == {2.0}


def raises(error: Exception) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        raise error

    return call


def test_an_impossible_view_ends_the_server() -> None:
    """Otherwise the server would use a version without its changes."""
    with Cluster(servers=2, replicas=1) as cluster:
        client = cluster.connect()
        table_of(client).push(KEYS, ONES).wait()
        goes, fails = cluster.nodes
        error = KeyError("Lead")
        fails.server.runtime._actions[Lead] = raises(error)
        goes.stop()
        assert end(fails) is error


def test_a_failing_link_ends_the_server() -> None:
    """Otherwise only the link's task would end without a report, and the connection would never be opened again."""
    with Cluster(servers=2, replicas=1) as cluster:
        client = cluster.connect()
        table_of(client).push(KEYS, ONES).wait()
        node = cluster.nodes[0]
        links = node.server.runtime.links
        assert links is not None
        error = KeyError("up")
        links._on_up = raises(error)
        node.call(lambda: [link.peer.abort() for link in links._links.values() if link.peer is not None])
        assert end(node) is error


def test_a_failing_scheduler_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with Cluster() as cluster:
        error = KeyError("members")
        monkeypatch.setattr(cluster.scheduler.core, "handle", raises(error))
        with pytest.raises(PacelineError):
            cluster.connect(timeout_s=1.0)
        wait_until(lambda: bool(cluster.failures))
        monkeypatch.undo()
        assert set(cluster.failures) == {error}
        cluster.failures.clear()


def test_waiting_calls_report_the_failed_connection_to_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the link's thread would end with the exception, and calls would wait until their timeout."""
    seen: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)

    def fails() -> None:
        raise KeyError("a fault")

    with Cluster() as cluster:
        client = cluster.connect()
        monkeypatch.setattr(client.link, "_receive", fails)
        with pytest.raises(PeerError, match=r"has failed \(KeyError: 'a fault'\)"):
            client.tables()
        wait_until(lambda: bool(seen))
        assert seen[0].exc_type is KeyError


@pytest.mark.parametrize("consistency", [Eventual(), BoundedDelay(tau=0), Sequential()], ids=str)
def test_a_rejected_push_ends_the_iteration_and_the_next_iteration_reports_it(consistency: Consistency) -> None:
    """Otherwise the other workers would wait a minute for the tick that was rejected with the push."""
    with Cluster(consistency=consistency, workers=2) as cluster:
        first, second = cluster.connect(), cluster.connect()
        tables = table_of(first), table_of(second)
        for table in tables:
            table.push(KEYS, ONES, tick=True).wait()
        tables[1].pull(KEYS)
        (node,) = cluster.nodes
        if node.server.runtime.sums is not None:
            raise_once(node.server.runtime.sums.buffer, "copy", MemoryError())
        else:
            fail_once(node, "reserve", MemoryError())
        ticket = tables[0].push(KEYS, ONES, tick=True)
        wait_until(ticket.done)
        tables[1].push(KEYS, ONES, tick=True).wait()
        for table in tables:
            assert set(table.pull(KEYS).reshape(-1)) == {3.0}
        with pytest.raises(NoRoomError, match="server 0 has no memory for this request"):
            tables[0].push(KEYS, ONES, tick=True)
        for table in tables:
            table.push(KEYS, ONES, tick=True).wait()
        assert set(tables[0].pull(KEYS).reshape(-1)) == {5.0}
