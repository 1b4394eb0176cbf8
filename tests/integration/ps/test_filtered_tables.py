"""Tables with filters: the servers' values, also after lost connections, view changes and dropped key lists."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.faulty import Fault, FaultPlan, FaultyTransport
from tests.waiting import in_threads

from paceline.errors import ConnectionLostError, ProtocolError, UsageError
from paceline.filters import (
    KKT,
    BFloat16,
    Compress,
    DeltaKeys,
    Filter,
    FilterChain,
    Float16,
    KeyCaching,
    KeyNumbers,
    Quantize,
    RandomK,
    RandomSkip,
    Significant,
    TopK,
    Zstd,
)
from paceline.filters.chain import NUMBERS, UnknownKeysError
from paceline.protocol import BoundedDelay, Consistency, Eventual, Sequential
from paceline.ps import FTRL, SGD, messages
from paceline.ps.messages import FILTERED_PULL, FILTERED_PUSH, PUSH, TICK
from paceline.ps.server.filtered import PeerFilters
from paceline.tables.rules import ProximalNewton
from paceline.transport import Header, SocketTransport

from .harness import TOKEN, Cluster, keys_of, random_keys

KEYS = random_keys(np.random.default_rng(5), 500)
ALL_EXACT: list[Filter] = [KeyCaching(), DeltaKeys(), Compress()]
CHAINS: list[list[Filter]] = [
    [KeyCaching()],
    [DeltaKeys()],
    [Compress()],
    [Float16()],
    [BFloat16()],
    [Quantize(8)],
    [KeyNumbers(), Compress()],
    [KeyCaching(), DeltaKeys(), Quantize(4), Compress()],
    [KeyCaching(), Zstd()],
    [TopK(0.5)],
    [RandomK(0.5), KeyCaching()],
    [RandomSkip(0.5)],
    [Significant(3.0), Quantize(8)],
]


def names(filters: Sequence[Filter]) -> str:
    return str(FilterChain(filters))


@pytest.mark.parametrize(
    ("servers", "consistency"),
    [
        (1, Eventual()),
        pytest.param(1, Sequential(), marks=pytest.mark.thorough),
        pytest.param(3, Eventual(), marks=pytest.mark.thorough),
        (3, Sequential()),
    ],
    ids=str,
)
@pytest.mark.parametrize("filters", CHAINS, ids=names)
def test_pushes_and_pulls(filters: list[Filter], servers: int, consistency: Consistency) -> None:
    """Use gradients that the filters of values do not change."""
    with Cluster(servers=servers, consistency=consistency) as cluster:
        client = cluster.connect()
        table = client.sparse_table("w", dim=2, update=SGD(lr=1.0), filters=filters)
        grads = np.where(np.arange(2 * len(KEYS)) % 3 > 0, -1, 1).astype(np.float32).reshape(-1, 2)
        rounds = 4
        for _ in range(rounds):
            table.push(KEYS, grads, tick=True)
            found = table.pull(KEYS)
        chain = FilterChain(filters)
        if not chain.rows:
            np.testing.assert_array_equal(found, -rounds * grads)
        again = np.concatenate([KEYS[::-1], KEYS[:7]])
        values = table.pull(again)
        np.testing.assert_array_equal(values[: len(KEYS)][::-1], found)
        np.testing.assert_array_equal(values[len(KEYS) :], found[:7])
        # A combined push and pull returns all rows, for any order of keys.
        before = table.pull(KEYS)
        found = table.push_pull(KEYS[::-1], np.ascontiguousarray(grads[::-1]), tick=True)
        np.testing.assert_array_equal(found, (before - grads)[::-1])


@pytest.mark.parametrize("filters", [ALL_EXACT, [KeyCaching()], [KeyCaching(), KeyNumbers()]], ids=names)
def test_exact_filters_do_not_change_values(filters: list[Filter]) -> None:
    random = np.random.default_rng(1)
    steps = [(random.permutation(KEYS)[:300], random.standard_normal((300, 3)).astype(np.float32)) for _ in range(5)]
    found = []
    for chosen in ([], filters):
        with Cluster(servers=2) as cluster:
            table = cluster.connect().sparse_table("w", dim=3, update=SGD(lr=0.1), filters=chosen)
            for keys, grads in [*steps, *steps]:
                table.push(keys, grads).wait()
            found.append(table.pull(KEYS))
    np.testing.assert_array_equal(found[0], found[1])


def bytes_of(client: Any, step: Any) -> int:
    before = sum(client.byte_counts())
    step()
    client.flush()
    return int(sum(client.byte_counts()) - before)


def test_saved_contents() -> None:
    with Cluster() as cluster:
        client = cluster.connect()
        keys = random_keys(np.random.default_rng(2), 5000)
        grads = np.random.default_rng(3).standard_normal((len(keys), 1)).astype(np.float32)

        def sizes(name: str, *filters: Filter) -> list[int]:
            table = client.sparse_table(name, update=SGD(lr=1.0), filters=filters)

            def step() -> None:
                table.pull(keys)
                table.push(keys, grads).wait()

            return [bytes_of(client, step) for _ in range(2)]

        plain = sizes("plain")
        cached = sizes("cached", KeyCaching())
        assert cached[0] < 0.7 * plain[0]
        assert cached[1] < 0.4 * plain[1]
        assert sizes("quantized", KeyCaching(), Quantize(8))[1] < 0.1 * plain[1]
        assert sizes("both", KeyCaching(), Quantize(2), Compress())[1] < 0.04 * plain[1]


def test_replies_may_have_separate_filters() -> None:
    with Cluster() as cluster:
        client = cluster.connect()
        table = client.sparse_table("w", update=SGD(lr=1.0), filters=[KeyCaching(), Quantize(1)], pull_filters=[])
        grads = np.array([0.25, 0.5, 1.0], np.float32)
        client.sparse_table("plain", update=SGD(lr=1.0)).push(KEYS[:3], -grads).wait()
        table.push(KEYS[:3], -grads).wait()
        np.testing.assert_array_equal(table.pull(KEYS[:3]), np.full((3, 1), np.mean(grads)))
        only = client.sparse_table("only", update=SGD(lr=1.0), pull_filters=[Float16()])
        only.push(KEYS[:3], np.full(3, 1 + 2**-15, np.float32)).wait()
        assert only.pull(KEYS[:3]).tolist() == [[-1], [-1], [-1]]
        exact = client.sparse_table("exact", update=SGD(lr=1.0))
        assert exact.filters is None


@pytest.mark.parametrize("step", [pytest.param(0, marks=pytest.mark.thorough), 3])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("replicas", [0, 1])
def test_a_cut_connection_resends_values(when: Any, step: int, replicas: int) -> None:
    plan = FaultPlan([Fault(action="cut", rank=0, step=step, kind=FILTERED_PUSH, when=when)])
    transport = FaultyTransport(SocketTransport(TOKEN), plan)
    with Cluster(servers=2, replicas=replicas, transport=transport) as cluster:
        client = cluster.connect()
        filters = [KeyCaching(), Quantize(2), Compress()]
        table = client.sparse_table("w", update=SGD(lr=1.0), filters=filters)
        exact = client.sparse_table("exact", update=SGD(lr=1.0))
        grads = np.ones((len(KEYS), 1), np.float32)
        for _ in range(6):
            table.push(KEYS, grads, tick=True)
            exact.push(KEYS, grads)
        client.flush()
        np.testing.assert_array_equal(table.pull(KEYS), -6 * grads)
        np.testing.assert_array_equal(exact.pull(KEYS), -6 * grads)
        plan.check_all_fired()
        if replicas:
            assert cluster.compare_replicas() > 0


def count_unknown(filters: PeerFilters, unknown: list[int]) -> None:
    """Count the frames whose keys the server lacks."""
    original = filters.decode

    def counted(*frame: Any) -> Any:
        try:
            return original(*frame)
        except UnknownKeysError:
            unknown.append(1)
            raise

    filters.decode = counted  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("about_keys", [KeyCaching(), KeyNumbers()], ids=str)
@pytest.mark.parametrize("consistency", [Eventual(), BoundedDelay(tau=0), Sequential()], ids=str)
def test_a_server_without_cached_lists_receives_all_pushes_again_in_order(
    consistency: Consistency, about_keys: Filter
) -> None:
    """Later pushes and ticks must not overtake the push whose keys the server lacks."""
    with Cluster(servers=2, workers=2, consistency=consistency) as cluster:
        clients = cluster.connect_all()
        for node in cluster.nodes:
            node.server.filters.max_key_bytes = 8 * len(KEYS)  # for both workers

        def work(rank: int) -> None:
            table = clients[rank].sparse_table("w", update=SGD(lr=1.0), filters=[about_keys, Quantize(4)])
            grads = np.ones((len(KEYS), 1), np.float32)
            for number in range(40):
                part = slice((number % 3) * 100, None)
                table.push(KEYS[part], grads[part])
                table.push(KEYS[:50], grads[:50], tick=number % 5 > 0)
                if number % 5 == 0:
                    clients[rank].tick()
                if number % 7 == 0:
                    assert (table.pull(KEYS[part]) <= 0).all()
            clients[rank].retire()

        unknown: list[int] = []
        for node in cluster.nodes:
            count_unknown(node.server.filters, unknown)
        in_threads(lambda: work(0), lambda: work(1))
        found = cluster.connect(observer=True).sparse_table("w", update=SGD(lr=1.0)).pull(KEYS)
        expected = np.full(len(KEYS), 14.0 * 2)
        expected[100:] += 13 * 2
        expected[200:] += 13 * 2
        expected[:50] += 80
        np.testing.assert_array_equal(found[:, 0], -expected)
        assert unknown, "no list was dropped"


def test_a_worker_resends_keys_while_it_waits_for_another_server() -> None:
    with Cluster(servers=2, workers=2, consistency=BoundedDelay(tau=0), heartbeat_timeout_s=1.0) as cluster:
        clients = cluster.connect_all()
        tables = [client.sparse_table("w", update=SGD(lr=1.0), filters=[KeyCaching()]) for client in clients]
        ones = np.ones((len(KEYS), 1), np.float32)
        in_threads(*(lambda table=table: table.push(KEYS, ones, tick=True).wait() for table in tables))
        cluster.nodes[1].call(cluster.nodes[1].server.filters.forget_keys)
        for _ in range(2):
            tables[0].push(KEYS, ones, tick=True)  # server 1 lacks the keys of the first push

        def follow() -> None:
            for _ in range(2):
                tables[1].pull(KEYS)  # server 1 waits for the push of worker 0
                tables[1].push(KEYS, ones, tick=True)

        # server 0 waits for worker 1
        in_threads(follow, lambda: np.testing.assert_array_equal(tables[0].pull(KEYS), -6 * ones))


@pytest.mark.parametrize("consistency", [pytest.param(Eventual(), marks=pytest.mark.thorough), Sequential()], ids=str)
def test_servers_join_and_leave(consistency: Consistency) -> None:
    with Cluster(servers=3, replicas=1, consistency=consistency, heartbeat_timeout_s=1.0) as cluster:
        client = cluster.connect()
        table = client.sparse_table("w", update=SGD(lr=1.0), filters=[KeyCaching(), DeltaKeys(), Quantize(2)])
        kept = client.sparse_table("kept", update=SGD(lr=1.0), filters=[Quantize(2)], pull_filters=[])
        grads, random, total = np.ones((len(KEYS), 1), np.float32), np.random.default_rng(3), np.zeros((len(KEYS), 1))
        for number in range(200):
            if number % 2 == 0:  # the last 50 pushes send only delayed rows
                part = random.standard_normal((len(KEYS), 1)).astype(np.float32) * np.float32(number < 100)
                kept.push(KEYS, part)
                total += part
            table.push(KEYS, grads, tick=True)
            if number == 50:
                cluster.nodes[1].stop()
            if number % 10 == 0:
                np.testing.assert_array_equal(table.pull(KEYS), -(number + 1.0) * grads)
        client.retire()
        np.testing.assert_array_equal(table.pull(KEYS), -200 * grads)
        np.testing.assert_allclose(kept.pull(KEYS), -total, atol=0.5)  # a lost push would change a value by up to 3
        assert cluster.compare_replicas() > 0


def test_stochastic_filters_give_equal_values_on_every_replica_and_in_every_run() -> None:
    random = np.random.default_rng(4)
    steps = [random.standard_normal((len(KEYS), 2)).astype(np.float32) for _ in range(10)]
    found = []
    for _ in range(2):
        with Cluster(servers=3, replicas=2, workers=2, consistency=Sequential()) as cluster:
            clients = cluster.connect_all()

            def work(rank: int) -> None:
                filters = [RandomSkip(0.7), Quantize(4)]
                table = clients[rank].sparse_table("w", dim=2, update=SGD(lr=0.1), filters=filters)  # noqa: B023
                for grads in steps:
                    table.pull(KEYS)
                    table.push(KEYS, grads, tick=True)
                clients[rank].retire()  # noqa: B023

            in_threads(lambda: work(0), lambda: work(1))
            assert cluster.compare_replicas() > 0
            observer = cluster.connect(observer=True)
            found.append(observer.sparse_table("w", dim=2, update=SGD(lr=0.1)).pull(KEYS))
    np.testing.assert_array_equal(found[0], found[1])


def test_unsupported_filters_are_reported_when_the_table_is_made() -> None:
    class Newer(Quantize, is_abstract=True):
        version = 2

    with Cluster() as cluster:
        client = cluster.connect()
        expected = "server 0 does not support these filters: filter 'quantize' has version 1 here and version 2 there"
        with pytest.raises(UsageError, match=expected):
            client.sparse_table("w", update=SGD(lr=1.0), filters=[Newer(8)])
        table = client.sparse_table("w", update=SGD(lr=1.0), filters=[Quantize(8)])
        assert client.sparse_table("w", update=SGD(lr=1.0)) is table
        assert client.sparse_table("w", update=SGD(lr=1.0), filters=[Quantize(8)]) is table
        with pytest.raises(UsageError, match=r"opened table .* with other filters"):
            client.sparse_table("w", update=SGD(lr=1.0), filters=[Quantize(4)])


def test_rows_fixed_at_0_are_not_sent() -> None:
    keys, strong = KEYS[:300], np.arange(300) % 3 == 0
    grads = np.where(strong, 2.0, 0.25).astype(np.float32)
    found, bytes_sent = [], []
    with Cluster(servers=2) as cluster:
        client = cluster.connect()
        for name, filters in (("plain", []), ("held", [KKT(margin=0.1)])):
            table = client.sparse_table(name, update=FTRL(l1=1.0), filters=filters)
            for _ in range(3):
                table.pull(keys)
                bytes_sent.append(bytes_of(client, lambda: table.push(keys, grads).wait()))  # noqa: B023
            found.append(table.pull(keys)[:, 0])
        np.testing.assert_array_equal(found[0], found[1])  # 0.75 is not above 1
        assert (found[0] != 0).tolist() == strong.tolist()
        assert max(bytes_sent[3:]) < 0.5 * bytes_sent[0]
        for _ in range(6):
            table.pull(keys)
            table.push(keys, grads).wait()
        assert (table.pull(keys) < 0).all()
        for wrong in (SGD(lr=1.0), FTRL(), ProximalNewton(l1=1.0)):
            expected = r"filter kkt:0.1 is for tables whose update rule has an L1 penalty, as .*: table 'w' has "
            with pytest.raises(UsageError, match=expected + type(wrong).__name__):
                client.sparse_table("w", dim=2, update=wrong, filters=[KKT()])
        other = client.sparse_table("other", update=SGD(lr=1.0))
        with pytest.raises(UsageError, match="table 'other' has SGD"):
            other.set_filters([KKT()])


def test_filters_change_while_a_pull_waits() -> None:
    """The reply to a waiting pull is decoded with the filters with which it was encoded."""
    with Cluster(consistency=Sequential(), workers=2) as cluster:
        first, second = cluster.connect(rank=0), cluster.connect(rank=1)
        table = first.sparse_table("w", update=SGD(lr=1.0), filters=[Float16()])
        other = second.sparse_table("w", update=SGD(lr=1.0))
        table.push(KEYS[:2], -np.ones((2, 1), np.float32), tick=True).wait()
        waiting = table.pull_async(KEYS[:2])
        table.set_filters([BFloat16()])
        other.push(KEYS[:2], -np.full((2, 1), 2, np.float32), tick=True)
        assert waiting.result().tolist() == [[3], [3]]
        assert table.pull(KEYS[:2]).tolist() == [[3], [3]]


def test_random_rounding_does_not_depend_on_other_keys() -> None:
    found = []
    for requests_keys in (False, True):
        with Cluster() as cluster:
            client = cluster.connect()
            table = client.sparse_table("w", update=SGD(lr=1.0), filters=[Quantize(4)])
            table.push(KEYS, np.random.default_rng(4).standard_normal((len(KEYS), 1)).astype(np.float32)).wait()
            if requests_keys:
                client.statistics()
            found.append(table.pull(KEYS))
    np.testing.assert_array_equal(found[0], found[1])


def test_a_message_with_too_few_bytes_for_its_keys_is_rejected() -> None:
    claim = messages.encode(messages.FilterInfo(requests=[KeyNumbers(1).describe()], answers=[]))
    filters = PeerFilters(max_key_bytes=1 << 20)
    peer: Any = object()
    keys, chain = np.arange(1000, dtype=np.uint64), FilterChain([KeyNumbers(1)])
    for body in (
        struct.pack("<IIIBBxx", 1 << 20, 0, 8, NUMBERS, 0) + bytes(8),  # the message claims a million keys in 8 bytes
        chain.encode(keys, np.empty(0, np.float32), 0, chain.memory(sends=True))[:-9],
    ):
        header = Header(kind=FILTERED_PULL, table=1, meta_bytes=len(claim), body_bytes=len(body))
        with pytest.raises(ProtocolError):
            filters.decode(peer, header, memoryview(claim), memoryview(bytes(body)))
        assert 0 <= filters.num_bytes < 1 << 15
    filters.disconnected(peer)
    assert filters.num_bytes == 0


@pytest.mark.parametrize("bits", [1, 2])
def test_rounding_errors_are_sent_with_the_next_push(bits: int) -> None:
    random = np.random.default_rng(9)
    with Cluster(servers=2) as cluster:
        client = cluster.connect()
        rows = client.sparse_table("rows", dim=3, update=SGD(lr=1.0), filters=[Quantize(bits)], pull_filters=[])
        dense = client.dense_table("dense", size=700, update=SGD(lr=1.0), filters=[Quantize(bits)], pull_filters=[])
        grads = random.uniform(-1, 1, (len(KEYS), 3)).astype(np.float32)
        elements = random.uniform(-1, 1, 700).astype(np.float32)
        rounds = 40
        for _ in range(rounds):
            rows.push(KEYS, grads).wait()
            dense.push(elements[:600]).wait()
            dense.push(elements[600:], keys=np.arange(600, 700)).wait()
        for found, exact in ((-rows.pull(KEYS), grads), (-dense.pull(), elements)):
            error = np.abs(found / rounds - exact)
            assert error.max() < 0.2  # without error feedback, 40 random roundings would give differences of 0.5
            assert error.mean() < 0.04
        before = rows.pull(KEYS)
        rows.push_pull(KEYS, np.zeros_like(grads))  # this call sends no delayed rows
        np.testing.assert_array_equal(rows.pull(KEYS), before)


def test_empty_pushes_with_filters() -> None:
    with Cluster(servers=2, consistency=BoundedDelay(tau=0)) as cluster:
        table = cluster.connect().sparse_table("w", update=SGD(lr=1.0), filters=[Significant(1e9), *ALL_EXACT])
        table.push(KEYS, np.ones((len(KEYS), 1), np.float32), tick=True).wait()
        table.push(KEYS[:0], np.ones((0, 1), np.float32)).wait()
        assert not table.pull(KEYS).any()
        assert table.pull(KEYS[:0]).shape == (0, 1)
        assert len(table) == 0


def test_forbidden_messages_of_a_peer() -> None:
    with Cluster() as cluster:
        cluster.connect().sparse_table("w", update=SGD(lr=1.0))
        channel = cluster.raw()
        from paceline.transport import frame_parts

        def exchange(meta: bytes, body: bytes, flags: int = 0) -> Any:
            epoch = cluster.nodes[0].server.core.replication.version
            number = next(iter(cluster.nodes[0].server.tables.by_number))
            parts = frame_parts(FILTERED_PUSH, table=number, request=1, epoch=epoch, meta=meta, body=body, flags=flags)
            channel.send(*parts)
            return channel.receive_frame(10.0).header.kind

        chain = FilterChain([Quantize(8)])
        info = messages.encode(messages.FilterInfo(requests=chain.describe(), answers=[]))
        body = chain.encode(keys_of(1, 2), np.ones(2, np.float32), 0, None).tobytes()
        with pytest.raises(ConnectionLostError):
            exchange(b"", body)
        channel = cluster.raw()
        assert exchange(info, body) == messages.ACK
        for meta, wrong, flags, message in (
            (b"\xc1", body, 0, "filters of a worker"),
            (messages.encode({"requests": [{"name": "x"}], "answers": []}), body, 0, "filter 'x' is unknown here"),
            (b"", body[:20], 0, "does not match its filters"),
            (b"", body, messages.RANGE, "has keys, or one for keys has a range"),
        ):
            with pytest.raises(Exception, match=message):
                exchange(meta, wrong, flags)
        assert {PUSH, TICK} < set(cluster.nodes[0].server._handlers)


@pytest.mark.parametrize("replicas", [pytest.param(0, marks=pytest.mark.thorough), 1])
@pytest.mark.parametrize(
    "filters",
    [[Float16()], [Quantize(8), Compress()], [KeyCaching(), BFloat16()], [KeyNumbers(), Quantize(2)]],
    ids=names,
)
def test_dense_tables(filters: list[Filter], replicas: int) -> None:
    plan = FaultPlan([Fault(action="cut", rank=0, step=4, kind=FILTERED_PUSH, when="after")])
    transport = FaultyTransport(SocketTransport(TOKEN), plan)
    with Cluster(servers=2, replicas=replicas, transport=transport) as cluster:
        client = cluster.connect()
        table = client.dense_table("w", size=3000, update=SGD(lr=1.0), filters=filters, pull_filters=[Compress()])
        expected = np.zeros(3000, np.float32)
        grads = np.where(np.arange(3000) % 3 > 0, -1, 1).astype(np.float32)
        keys = np.arange(0, 3000, 7)
        for _ in range(4):
            table.push(grads)
            table.push(grads[:1000], start=500)
            table.push(grads[: len(keys)], keys=keys, tick=True)
            expected -= grads
            expected[500:1500] -= grads[:1000]
            expected[keys] -= grads[: len(keys)]
            np.testing.assert_array_equal(table.pull(), expected)
            np.testing.assert_array_equal(table.pull(start=100, stop=2000), expected[100:2000])
            np.testing.assert_array_equal(table.pull(keys=keys[::-1].copy()), expected[keys[::-1]])
            found = table.push_pull(grads[:600], start=9)
            expected[9:609] -= grads[:600]
            np.testing.assert_array_equal(found, expected[9:609])
        plan.check_all_fired()
        if replicas:
            assert cluster.compare_replicas() > 0


@pytest.mark.parametrize("chosen", [TopK(0.5), DeltaKeys()], ids=str)
def test_filters_for_sparse_tables_only(chosen: Filter) -> None:
    with Cluster() as cluster:
        client = cluster.connect()
        with pytest.raises(UsageError, match="is for sparse tables: a dense one is pushed and pulled by ranges"):
            client.dense_table("w", size=10, update=SGD(lr=1.0), filters=[chosen])
        table = client.dense_table("w", size=10, update=SGD(lr=1.0))
        with pytest.raises(UsageError, match="is for sparse tables"):
            table.set_filters([chosen])
        table.set_filters([Quantize(8)])
        table.push(np.ones(10, np.float32)).wait()
        table.set_filters()
        np.testing.assert_allclose(table.pull(), -np.ones(10), rtol=1e-6)


@pytest.mark.parametrize("filters", [[KeyNumbers()], [KeyCaching(), KeyNumbers()]])
def test_calls_do_not_overtake_a_push_whose_keys_are_requested_again(filters: list[Filter]) -> None:
    """A server without the cached keys rejects the push. Later calls must not overtake its repetition."""
    with Cluster(servers=1) as cluster:
        table = cluster.connect().sparse_table("t", update=SGD(lr=1.0), filters=filters)
        keys, ones = np.arange(1000, dtype=np.uint64), np.ones((1000, 1), np.float32)
        table.push(keys, ones).wait()
        cluster.nodes[0].call(cluster.nodes[0].server.filters.forget_keys)
        table.push(keys + 500, ones)
        assert len(table) == 1500
        cluster.nodes[0].call(cluster.nodes[0].server.filters.forget_keys)
        table.push(keys, ones)
        table.set_update(SGD(lr=100.0))
        assert float(table.pull(keys).sum()) == -2500
