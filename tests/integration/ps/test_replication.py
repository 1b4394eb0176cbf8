"""Servers die, join and leave while workers count. The counts stay exact."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from functools import partial
from typing import Literal

import msgspec
import numpy as np
import pytest
from tests.waiting import in_threads, wait_until

from paceline.errors import ConnectionLostError, UsageError
from paceline.protocol import BoundedDelay, Consistency, Eventual, Role, Sequential
from paceline.ps import SGD, Adagrad, Client, messages
from paceline.tables.bucket_arrays import buckets_of_keys

from .harness import Cluster, Floats, ServerNode

KEYS = np.arange(300, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
ITERATIONS = 60
_OFTEN = ("eventualdense", "sequentialsparse")


def count(client: Client, kind: str, iterations: int = ITERATIONS, pause_s: float = 0.003) -> None:
    """Add 1 to all keys in every iteration, and read sometimes."""
    sparse = client.sparse_table("sparse", update=SGD(lr=1.0))
    dense = client.dense_table("dense", size=300, update=SGD(lr=1.0))
    for iteration in range(iterations):
        if kind == "sparse":
            sparse.push(KEYS, -np.ones((300, 1), np.float32), tick=True)
        else:
            dense.push(-np.ones(300, np.float32), tick=True)
        if iteration % 5 == 0:
            sparse.pull(KEYS[iteration:])
            dense.pull()
        time.sleep(pause_s)  # so that a server can be killed between iterations
    client.flush()


def values(client: Client, kind: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    if kind == "sparse":
        return client.sparse_table("sparse", update=SGD(lr=1.0)).pull(KEYS).reshape(-1)
    return client.dense_table("dense", size=300, update=SGD(lr=1.0)).pull()


def cluster_view(client: Client) -> messages.View:
    found: messages.View = client.link.get_view()
    return found


def is_whole(client: Client, servers: int, replicas: int) -> bool:
    found = cluster_view(client)
    full = all(len(group.members) == 1 + replicas and group.filling is None for group in found.groups)
    return full and len(found.of_role(Role.SERVER)) == servers


@pytest.mark.parametrize(
    ("consistency", "kind"),
    [
        pytest.param(consistency, kind, marks=[pytest.mark.thorough] * (str(consistency) + kind not in _OFTEN))
        for consistency in (Eventual(), BoundedDelay(tau=1), Sequential())
        for kind in ("sparse", "dense")
    ],
    ids=str,
)
def test_a_server_dies_and_nothing_is_lost(consistency: Consistency, kind: str) -> None:
    with Cluster(servers=3, workers=2, replicas=1, consistency=consistency) as cluster:
        clients = cluster.connect_all()

        def kill() -> None:
            wait_until(lambda: clients[0].clock > ITERATIONS // 4)
            cluster.nodes[1].stop()

        in_threads(lambda: count(clients[0], kind), lambda: count(clients[1], kind), kill)
        for client in clients:
            client.retire()
        assert (values(clients[0], kind) == 2 * ITERATIONS).all()
        wait_until(lambda: is_whole(clients[0], 2, 1))


@pytest.mark.parametrize("consistency", [pytest.param(Eventual(), marks=pytest.mark.thorough), Sequential()], ids=str)
def test_all_servers_are_replaced_one_after_the_other(consistency: Consistency) -> None:
    """At the end no initial server is left: values, filters and clocks have moved with the buckets."""
    with Cluster(servers=2, workers=2, replicas=1, consistency=consistency) as cluster, ExitStack() as stack:
        clients, observer = cluster.connect_all(), cluster.connect(observer=True)

        def replace() -> None:
            for node in list(cluster.nodes):
                cluster.nodes.append(ServerNode(cluster, None, stack, extra=True).join())
                wait_until(lambda: is_whole(observer, 3, 1))
                node.stop()
                wait_until(lambda: is_whole(observer, 2, 1))

        done = threading.Event()

        def work(client: Client) -> None:
            while not done.is_set():
                count(client, "sparse", 5, 0.04)
            client.retire()  # the other worker does not wait

        threads = [threading.Thread(target=work, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        try:
            replace()
        finally:
            done.set()
            for thread in threads:
                thread.join(60.0)
        total = sum(client.clock for client in clients)
        assert (values(observer, "sparse") == total).all()


def test_a_join_moves_the_fewest_buckets() -> None:
    with Cluster(servers=2, workers=1) as cluster, ExitStack() as stack:
        client = cluster.connect()
        count(client, "sparse")
        before = {group.members: group.buckets for group in cluster_view(client).groups}
        cluster.nodes.append(ServerNode(cluster, None, stack, extra=True).join())
        wait_until(lambda: is_whole(client, 3, 0) and len(cluster_view(client).groups) == 3)
        after = {group.members: group.buckets for group in cluster_view(client).groups}
        moved = 512 - sum((before[members] & after[members]).bit_count() for members in before)
        assert moved <= 1.2 * 512 / 3
        count(client, "sparse")
        assert (values(client, "sparse") == 2 * ITERATIONS).all()


def test_a_new_table_is_created_on_all_servers_of_the_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a joining server would lack a table that is declared meanwhile, and never acknowledge its pushes."""
    with Cluster(servers=3, workers=1, replicas=2) as cluster:
        client = cluster.connect()
        first, second, third = (node.server.replicator for node in cluster.nodes)
        send_clocks = first.send_clocks
        monkeypatch.setattr(first, "send_clocks", lambda to: None if to == third.incarnation else send_clocks(to))
        spec = client.sparse_table("t", update=SGD(lr=1.0)).spec
        made = messages.CreateTable(table=messages.KnownTable(number=77, declared=spec, spec=spec))
        connection = next(
            connection for connection in client.servers.connections if connection.session.server == first.incarnation
        )
        connection.call(made)
        wait_until(lambda: all(77 in replicator._tables.by_number for replicator in (second, third)))


def work_together(client: Client, stop_at: list[int]) -> list[Floats]:
    """Push equal values in every run, in two parts per iteration, until iteration `stop_at`; return the read values."""
    rule = Adagrad(lr=0.1)  # the result of this rule depends on the order of summation
    sparse, dense = (
        client.sparse_table("sparse", dim=2, update=rule),
        client.dense_table("dense", size=700, update=rule),
    )
    found: list[Floats] = []
    while not stop_at or client.clock < stop_at[0]:
        chance = np.random.default_rng((client.rank, client.clock))
        sparse.push(KEYS, chance.standard_normal((len(KEYS), 2), np.float32)).wait()
        time.sleep((0.002 if stop_at else 0.2) * chance.random())  # a move takes several iterations
        dense.push(chance.standard_normal(700, np.float32), tick=True)
        found += [sparse.pull(KEYS).reshape(-1), dense.pull()]
    client.retire()
    return found


def drain(cluster: Cluster, node: ServerNode, client: Client) -> None:
    """Let a server move its buckets to the other servers and end."""
    node.link.notify(messages.Drain())
    rank = node.server.rank
    cluster.nodes.remove(node)
    wait_until(lambda: is_whole(client, len(cluster.nodes), cluster.settings.replicas) and not leads(client, rank))
    node.stop()


def leads(client: Client, rank: int) -> bool:
    found = cluster_view(client)
    ranks = {member.incarnation: member.rank for member in found.of_role(Role.SERVER)}
    return any(ranks[group.members[0]] == rank for group in found.groups)


@pytest.mark.parametrize("aggregate", ["sum", pytest.param("mean", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("replicas", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_joining_and_leaving_servers_do_not_change_sequential_iterations(
    replicas: int, aggregate: Literal["sum", "mean"]
) -> None:
    consistency = Sequential(aggregate=aggregate)
    stop_at: list[int] = []
    with Cluster(servers=2, workers=2, replicas=replicas, consistency=consistency) as cluster, ExitStack() as stack:
        clients, observer = cluster.connect_all(), cluster.connect(observer=True)
        clocks = []

        def move() -> None:
            try:
                for _ in range(2):
                    wait_until(lambda: clients[0].clock > 5)
                    clocks.append(clients[0].clock)
                    cluster.nodes.append(ServerNode(cluster, None, stack, extra=True).join())
                    wait_until(lambda: is_whole(observer, 3, replicas))
                    drain(cluster, cluster.nodes[0], observer)
                    wait_until(lambda: is_whole(observer, 2, replicas))
            finally:
                stop_at.append(clients[0].clock + 5)

        *disturbed, _ = in_threads(*(lambda client=client: work_together(client, stop_at) for client in clients), move)
    with Cluster(workers=2, consistency=consistency) as cluster:
        quiet = in_threads(*(lambda client=client: work_together(client, stop_at) for client in cluster.connect_all()))
    assert clocks[0] < clocks[1] < stop_at[0] - 5
    for read, right in zip(disturbed, quiet, strict=True):
        assert len(read) == len(right) == 2 * stop_at[0]
        assert [index for index, pair in enumerate(zip(read, right, strict=True)) if not np.array_equal(*pair)] == []


def test_a_join_waits_for_an_iteration_and_not_for_pushes_of_a_retired_worker() -> None:
    with Cluster(workers=2, consistency=Sequential()) as cluster, ExitStack() as stack:
        goes, _ = workers = cluster.connect_all()
        observer = cluster.connect(observer=True)
        tables = [client.sparse_table("sparse", update=SGD(lr=1.0)) for client in workers]
        for table in tables:
            table.push(KEYS, -np.ones((300, 1), np.float32), tick=True)
        for table in tables:
            table.pull(KEYS)
        tables[0].push(KEYS, -np.ones((300, 1), np.float32))
        goes.flush()
        cluster.nodes.append(ServerNode(cluster, None, stack, extra=True).join())
        time.sleep(0.5)
        # the new server has the rows, but the scheduler is not notified
        wait_until(lambda: bool(cluster.nodes[0].server.core.progress._reports))
        assert not is_whole(observer, 2, 0)
        goes.retire()
        wait_until(lambda: is_whole(observer, 2, 0))
        assert set(values(observer, "sparse")) == {2.0}


def test_a_waiting_read_is_refused_when_the_buckets_move() -> None:
    """Otherwise the read would be answered with a sum that is not yet durable."""
    with Cluster(servers=2, workers=1, consistency=Sequential()) as cluster:
        client = cluster.connect()
        first = cluster_view(client)
        one, other = first.groups
        node = next(node for node in cluster.nodes if node.server.replicator.incarnation == one.members[0])

        def change(version: int, *members: int) -> messages.View:
            groups = (msgspec.structs.replace(one, members=members), other)
            new: messages.View = msgspec.structs.replace(first, version=version, groups=groups)
            node.call(lambda: node.server.view_changed(new))
            return new

        table = client.sparse_table("sparse", update=SGD(lr=1.0))
        keys = np.array([key for key in KEYS if buckets_of_keys(np.array([key])) & one.buckets])
        client.follower.take(change(2, *one.members, *other.members))  # the other client does not receive this view
        table.push(keys, -np.ones((len(keys), 1), np.float32), tick=True)
        read = table.pull_async(keys)
        wait_until(lambda: bool(node.call(lambda: len(node.server.core.reads))))
        change(3, *other.members)
        wait_until(lambda: read.done() or client.servers.watch.must_follow)
        assert not read.done()
        last = change(4, *one.members)  # so that all calls end
        for member in cluster.nodes:
            member.call(partial(member.server.view_changed, last))
        client.follower.take(last)


def test_without_replicas_the_lost_buckets_are_named() -> None:
    with Cluster(servers=2, workers=1) as cluster:
        client = cluster.connect(timeout_s=5.0)
        count(client, "sparse", 3)
        cluster.nodes[0].stop()
        wait_until(lambda: cluster_view(client).num_lost > 0)
        with pytest.raises(ConnectionLostError, match=r"server 0 died: \d+ of 512 buckets"):
            values(client, "sparse")


def test_only_permitted_members_join() -> None:
    with (
        Cluster(servers=1, workers=1) as cluster,
        ExitStack() as stack,
        pytest.raises(UsageError, match=r"has its 1 server\(s\): to add one while it runs, start it with 'paceline"),
    ):
        ServerNode(cluster, None, stack).join()
