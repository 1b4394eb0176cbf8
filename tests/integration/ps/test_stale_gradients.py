"""Staleness of gradients in fixed orders of calls, and the effect of each policy."""

from __future__ import annotations

import numpy as np
import pytest
from tests.faulty import Fault, FaultPlan, FaultyTransport

from paceline.protocol import BoundedDelay, DelayCompensate, DropStale, Eventual, StalePolicy
from paceline.ps import SGD, Client, DenseTable, SparseTable
from paceline.ps.messages import FORWARD, PUSH, PUSH_PULL
from paceline.transport import SocketTransport

from .harness import TOKEN, Cluster, Floats, floats, keys_of, random_keys, statistics_of


def histogram(client: Client, table: str = "w", server: int = 0) -> dict[int, int]:
    """Return the number of gradients by staleness."""
    counts = statistics_of(client, table)[server].staleness
    return {staleness: count for staleness, count in enumerate(counts) if count}


def sparse(client: Client) -> SparseTable:
    return client.sparse_table("w", update=SGD(lr=1.0))


def test_staleness_counts_updates_between_pull_and_push() -> None:
    with Cluster(workers=2, consistency=Eventual()) as cluster:
        clients = cluster.connect_all()
        a, b = (sparse(client) for client in clients)
        one, key = floats(1), keys_of(1)
        a.push(key, one).wait()  # no pull: staleness 0
        assert histogram(clients[0]) == {0: 1}
        a.pull(key)
        b.pull(key)
        a.push(key, one, tick=True).wait()  # 0
        b.push(key, one).wait()  # the update of a: staleness 1
        b.push(key, one, tick=True).wait()  # the same pull; its own update is not counted: staleness 1
        assert histogram(clients[0]) == {0: 2, 1: 2}
        a.pull(key)
        for _ in range(5):
            b.push_pull(key, one, tick=True)  # staleness 0: each was pulled just before, and the first has no pull
        a.push(key, one, tick=True).wait()  # 5
        assert histogram(clients[0]) == {0: 7, 1: 2, 5: 1}
        a.pull(key)
        a.pull(key)  # only the last pull is used
        b.push(key, one).wait()  # b pulled for this iteration before the last push of a: staleness 1
        a.pull(key)
        a.push(key, one, tick=True).wait()  # 0
        assert histogram(clients[0]) == {0: 8, 1: 3, 5: 1}


def test_another_table_and_another_server_have_separate_versions() -> None:
    with Cluster(servers=2, workers=2, consistency=BoundedDelay(tau=4)) as cluster:
        clients = cluster.connect_all()
        a, b = (sparse(client) for client in clients)
        owner = clients[0].servers.routes.owners
        dense = clients[1].dense_table("d", size=2, update=SGD(lr=1.0))
        keys = np.arange(100, dtype=np.uint64)
        a.pull(keys)
        dense.push(floats(1, 1)).wait()  # updates of another table are not counted
        on_first = next(key for key in keys if _server(clients[0], int(key)) == 0)
        b.push([on_first], floats(1)).wait()
        a.push(keys, np.ones(100, np.float32)).wait()
        assert len(set(owner.tolist())) == 2
        assert histogram(clients[0], server=0) == {0: 1, 1: 1}
        assert histogram(clients[0], server=1) == {0: 1}


def _server(client: Client, key: int) -> int:
    from paceline.kernels import index

    bucket = np.empty(1, np.uint16)
    index.buckets_of(keys_of(key), bucket)
    return int(client.servers.routes.owners[bucket[0]])


def test_counts_are_not_dropped() -> None:
    with Cluster(servers=2, workers=2, consistency=Eventual(), stale=DropStale(beyond=0)) as cluster:
        a, b = (sparse(client) for client in cluster.connect_all())
        keys, ones = np.arange(50, dtype=np.uint64), np.ones(50, np.float32)
        a.pull(keys)
        a.is_count = True
        b.push(keys, -ones).wait()
        assert not a.push(keys, -2 * ones).dropped
        assert (b.pull(keys) == 3).all()
        a.is_count = False
        assert a.push(keys, -2 * ones).dropped
        assert [counted.dropped for counted in statistics_of(a._client, "w")] == [1, 1]


def test_large_staleness_is_counted_in_the_last_bin() -> None:
    with Cluster(workers=2, consistency=Eventual()) as cluster:
        clients = cluster.connect_all()
        a, b = (sparse(client) for client in clients)
        a.pull([1])
        for _ in range(150):
            b.push([1], floats(1))
        clients[1].flush()
        a.push([1], floats(1)).wait()
        assert histogram(clients[0]) == {0: 150, 128: 1}


def test_drop_beyond() -> None:
    with Cluster(servers=2, workers=2, consistency=Eventual(), stale=DropStale(beyond=2)) as cluster:
        clients = cluster.connect_all()
        a, b = (sparse(client) for client in clients)
        keys, ones = np.arange(50, dtype=np.uint64), np.ones(50, np.float32)
        a.pull(keys)
        for step in range(3):
            if step == 2:
                fresh = a.push(keys, ones)
                assert not fresh.dropped  # two other updates: still accepted
            b.push(keys, ones).wait()
        assert (b.pull(keys) == -4).all()
        assert a.push(keys, ones).dropped
        ticket = a.push_pull_async(keys, ones, tick=True)
        assert ticket.dropped
        assert (ticket.result() == -4).all()  # the table is untouched
        assert [counted.dropped for counted in statistics_of(clients[0], "w")] == [2, 2]
        assert [counted.pushes for counted in statistics_of(clients[0], "w")] == [6, 6]
        assert histogram(clients[0]) == {0: 3, 2: 1, 3: 2}
        assert not a.push(keys, ones).dropped  # for the next iteration, pulled with the previous push
        assert (b.pull(keys) == -5).all()


STRENGTH = 0.5


def compensated(grads: Floats, now: Floats, then: Floats) -> Floats:
    """Return the compensated gradients (Zheng et al. 2017, equation 10)."""
    return (grads + np.float32(STRENGTH) * grads * grads * (now - then)).astype(np.float32)


@pytest.fixture(params=[1, 3], ids=["1 server", "3 servers"])
def policy(request: pytest.FixtureRequest) -> tuple[int, StalePolicy]:
    return request.param, DelayCompensate(strength=STRENGTH)


def test_counts_are_not_compensated(policy: tuple[int, StalePolicy]) -> None:
    servers, stale = policy
    keys = np.arange(40, dtype=np.uint64)
    with Cluster(servers=servers, workers=2, consistency=Eventual(), stale=stale) as cluster:
        a, b = (sparse(client) for client in cluster.connect_all())
        a.pull(keys)
        a.is_count = b.is_count = True
        b.push(keys, np.full(40, -3, np.float32)).wait()
        a.push(keys, np.full(40, -2, np.float32)).wait()
        assert (b.pull(keys) == 5).all()
        a.is_count = False
        a.push(keys, np.full(40, -2, np.float32)).wait()
        assert (b.pull(keys) != 7).all()


@pytest.mark.parametrize("pushed", ["same", "permutation", "subset", "superset"])
@pytest.mark.parametrize("dim", [1, 3])
def test_delay_compensation_sparse(policy: tuple[int, StalePolicy], dim: int, pushed: str) -> None:
    servers, stale = policy
    random = np.random.default_rng(dim)
    every = random_keys(random, 58)
    keys = every[:40]
    chosen = {
        "same": keys,
        "permutation": random.permutation(keys),
        "subset": random.permutation(keys)[:13],
        "superset": random.permutation(every),
    }[pushed]
    with Cluster(servers=servers, workers=2, consistency=Eventual(), stale=stale) as cluster:
        a, b = (client.sparse_table("w", dim=dim, update=SGD(lr=1.0)) for client in cluster.connect_all())
        b.push(every, random.standard_normal((len(every), dim), np.float32)).wait()
        a.pull(keys)
        then = b.pull(chosen)
        b.push(every, random.standard_normal((len(every), dim), np.float32)).wait()
        now = b.pull(chosen)
        grads = random.standard_normal((len(chosen), dim), np.float32)
        a.push(chosen, grads).wait()
        was_pulled = np.isin(chosen, keys)[:, None]
        expected = now - np.where(was_pulled, compensated(grads, now, then), grads)
        np.testing.assert_allclose(b.pull(chosen), expected, rtol=1e-6, atol=1e-6)
        assert not np.allclose(expected, now - grads)


@pytest.mark.parametrize("pulled", ["all", "range", "keys"])
@pytest.mark.parametrize("pushed", ["all", "range", "keys"])
def test_delay_compensation_dense(policy: tuple[int, StalePolicy], pulled: str, pushed: str) -> None:
    servers, stale = policy
    size = 1500
    random = np.random.default_rng(3)
    subset = random.choice(size, 300, replace=False).astype(np.uint64)
    selections = {"all": np.arange(size), "range": np.arange(200, 1111), "keys": subset.astype(np.int64)}
    with Cluster(servers=servers, workers=2, consistency=Eventual(), stale=stale) as cluster:
        a, b = (client.dense_table("d", size=size, update=SGD(lr=1.0)) for client in cluster.connect_all())
        b.push(random.standard_normal(size, np.float32)).wait()
        then = b.pull()
        _pull(a, pulled, subset)
        b.push(random.standard_normal(size, np.float32)).wait()
        now = b.pull()
        grads = np.zeros(size, np.float32)
        grads[selections[pushed]] = random.standard_normal(len(selections[pushed]), np.float32)
        if pushed == "keys":
            a.push(grads[subset], keys=subset).wait()
        else:
            a.push(grads[selections[pushed]], start=int(selections[pushed][0])).wait()
        was_pulled = np.isin(np.arange(size), selections[pulled])
        expected = now - np.where(was_pulled, compensated(grads, now, then), grads)
        np.testing.assert_allclose(b.pull(), expected, rtol=1e-6, atol=1e-6)


def _pull(table: DenseTable, method: str, keys: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> None:
    if method == "keys":
        table.pull(keys=keys)
    elif method == "range":
        table.pull(start=200, stop=1111)
    else:
        table.pull()


def test_compensation_uses_the_pull_of_the_same_iteration() -> None:
    """A pull in advance for the next iteration is not the basis of this iteration's gradient."""
    stale = DelayCompensate(strength=STRENGTH)
    with Cluster(workers=2, consistency=BoundedDelay(tau=4), stale=stale) as cluster:
        a, b = (sparse(client) for client in cluster.connect_all())
        a.pull([1])
        b.push([1], floats(-4)).wait()
        a.pull_async([1], ahead=1).wait()
        b.push([1], floats(-2)).wait()
        a.push([1], floats(1), tick=True).wait()  # the pulled value was 0; it is 6 now
        assert a.pull([1]) == 6 - (1 + STRENGTH * 6)
        a.push([1], floats(0)).wait()


@pytest.mark.parametrize("kind", [PUSH, PUSH_PULL], ids=["push", "push_pull"])
def test_a_repeated_push_is_forwarded_as_it_was_applied(kind: int) -> None:
    plan = FaultPlan(
        (
            Fault(action="cut", role="server", rank=0, step=1, kind=FORWARD),
            Fault(action="duplicate", rank=0, step=0, kind=kind),
        )
    )
    transport, stale = FaultyTransport(SocketTransport(TOKEN), plan), DelayCompensate(strength=STRENGTH)
    with Cluster(servers=2, workers=2, replicas=1, consistency=Eventual(), stale=stale, transport=transport) as cluster:
        a = sparse(cluster.connect(rank=0))
        b = sparse(cluster.connect(rank=1, transport=SocketTransport(TOKEN)))
        keys, ones = np.arange(300, dtype=np.uint64), np.ones(300, np.float32)
        a.pull(keys)
        b.push(keys, -4 * ones).wait()
        expected = 4 - (1 + STRENGTH * 4)
        if kind == PUSH:
            a.push(keys, ones).wait()
        else:
            assert (a.push_pull(keys, ones) == expected).all()
        assert (b.pull(keys) == expected).all()
        plan.check_all_fired()
        assert cluster.compare_replicas()


@pytest.mark.parametrize("replicas", [0, 1])
def test_a_repeated_dropped_push_is_counted_once(replicas: int) -> None:
    plan = FaultPlan((Fault(action="duplicate", rank=0, step=0, kind=PUSH),))
    transport, stale = FaultyTransport(SocketTransport(TOKEN), plan), DropStale(beyond=0)
    with Cluster(
        servers=1 + replicas, workers=2, replicas=replicas, consistency=Eventual(), stale=stale, transport=transport
    ) as cluster:
        a = cluster.connect(rank=0)
        b = sparse(cluster.connect(rank=1, transport=SocketTransport(TOKEN)))
        table, key = sparse(a), keys_of(1)
        table.pull(key)
        b.push(key, floats(1)).wait()
        assert table.push(key, floats(1)).dropped
        plan.check_all_fired()
        assert table.pull(key) == -1
        assert sum(server.dropped for server in statistics_of(a, "w")) == 1
        assert sum(sum(server.staleness[1:]) for server in statistics_of(a, "w")) == 1


def test_a_fresh_gradient_is_unchanged() -> None:
    with Cluster(workers=1, consistency=Eventual(), stale=DelayCompensate(strength=100.0)) as cluster:
        table = sparse(cluster.connect())
        for step in range(5):
            assert table.pull([1]) == -step
            table.push([1], floats(1), tick=True)
