"""If two live servers cannot reach each other, one server is expelled, and workers only pause."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np
import pytest
from tests.faulty import Fault, FaultPlan, FaultyTransport
from tests.faulty.peer import FaultyHandler
from tests.waiting import in_threads, wait_until

from paceline.errors import PacelineError
from paceline.protocol import BoundedDelay, Consistency, Eventual, Sequential
from paceline.ps import SGD, Client
from paceline.ps.messages import FORWARD, PING, PONG, TICK
from paceline.ps.server.replicator import ChainLinks
from paceline.testing import serve_in_thread
from paceline.transport import Address, Endpoint, Handler, Header, Hello, Peer, SocketTransport, frame_parts

from .harness import TOKEN, Cluster, ServerNode, key_of

KEYS = np.arange(300, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
TIMEOUT_S = 1.0
ITERATIONS = 100


class _Cable(FaultPlan):
    """Drops all data while the cable is cut."""

    def __init__(self, is_cut: Callable[[], bool]) -> None:
        super().__init__()
        self._is_cut = is_cut

    def next_fault(self, hello: Hello, kind: int) -> Fault | None:
        return Fault(action="drop", rank=hello.rank, step=0) if self._is_cut() else None


class Cables(SocketTransport):
    """Connections between servers that can be cut without an error on either end."""

    def __init__(self) -> None:
        super().__init__(TOKEN)
        self._cut: set[tuple[int, str]] = set()

    def cut(self, one: ServerNode, other: ServerNode) -> None:
        """Drop all later data from the first to the second server."""
        for source, target in ((one, other), (other, one)):
            self._cut.add((source.server.replicator.incarnation, target.netloc))

    async def open(
        self, handler: Handler, target: Endpoint | Address | str, hello: Hello, *, timeout_s: float = 10.0
    ) -> Peer:
        assert isinstance(target, Endpoint)
        way = (hello.incarnation, target.tcp.netloc)
        faulty = FaultyHandler(handler, _Cable(lambda: way in self._cut), hello)
        return faulty.wrap(await super().open(faulty, target, hello, timeout_s=timeout_s))


def count(client: Client) -> None:
    """Add 1 to all keys in every iteration."""
    table = client.sparse_table("counts", update=SGD(lr=1.0))
    for _ in range(ITERATIONS):
        table.push(KEYS, -np.ones((300, 1), np.float32), tick=True).wait()
        time.sleep(0.003)  # so that the cut happens between iterations
    client.flush()


@pytest.mark.parametrize(
    "consistency",
    [
        pytest.param(Eventual(), marks=pytest.mark.thorough),
        pytest.param(BoundedDelay(tau=1), marks=pytest.mark.thorough),
        Sequential(),
    ],
    ids=str,
)
def test_one_of_two_disconnected_servers_is_expelled_without_loss(consistency: Consistency) -> None:
    cables = Cables()
    with Cluster(
        servers=3, workers=2, replicas=1, consistency=consistency, heartbeat_timeout_s=TIMEOUT_S, transport=cables
    ) as cluster:
        clients = cluster.connect_all()
        older, younger, other = sorted(cluster.nodes, key=lambda node: node.server.replicator.incarnation)

        def cut() -> None:
            wait_until(lambda: clients[0].clock > ITERATIONS // 4)
            cables.cut(older, younger)

        in_threads(lambda: count(clients[0]), lambda: count(clients[1]), cut)
        wait_until(lambda: bool(younger.expelled))
        for client in clients:
            client.retire()
        found = clients[0].sparse_table("counts", update=SGD(lr=1.0)).pull(KEYS)
        assert (found == 2 * ITERATIONS).all()
        assert not older.expelled
        assert not other.expelled
        name = f"server {older.server.tables.rank}"
        assert younger.expelled == f"it and {name} could not reach each other for 1 s, although all are alive"


def test_without_cuts_no_server_reports_another_server() -> None:
    with Cluster(servers=3, workers=1, replicas=2, heartbeat_timeout_s=0.5) as cluster:
        table = cluster.connect().sparse_table("counts", update=SGD(lr=1.0))
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            table.push(KEYS, np.ones((300, 1), np.float32)).wait()
            assert all(node.server.unreachable() == () for node in cluster.nodes)


class _Deaf(Handler):
    """A server that processes every frame slowly and answers only PING."""

    def __init__(self) -> None:
        self.pause_s = 0.0
        self.answers = True

    def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        if header.kind == PING and self.answers:
            peer.send(*frame_parts(PONG))
        time.sleep(self.pause_s)


def _must_not(error: BaseException) -> None:
    raise error


def test_an_answering_or_receiving_server_is_reachable() -> None:
    """Data in flight delays a PING. The other end reads this data, so it is reachable."""
    handler, transport = _Deaf(), SocketTransport(TOKEN)
    period_s, size = 0.05, 1 << 22

    async def complaints_of(endpoint: Endpoint) -> None:
        ups: list[int] = []
        links = ChainLinks(
            transport, on_up=ups.append, on_down=lambda target: None, on_frame=lambda *frame: None, fail=_must_not
        )

        async def watch(seconds: float) -> list[tuple[int, ...]]:
            seen = []
            for _ in range(int(seconds / period_s)):
                await asyncio.sleep(period_s)
                seen.append(links.unreachable)
            return seen

        links.watch(period_s)
        links.connect_to({7: endpoint}, Hello(role="server"))
        try:
            assert set(await watch(0.6)) == {()}  # the peer replies
            peer = links.peer(7)
            assert peer is not None
            assert ups == [7]
            handler.answers, handler.pause_s = False, 0.1
            for _ in range(18):
                peer.send(*frame_parts(FORWARD, body=bytes(size)))
            while peer.write_backlog_bytes > 2 * size:  # the peer reads
                assert await watch(2 * period_s) == [(), ()]
            assert (await watch(1.5))[-1] == (7,)  # the peer reads the data, but no reply arrives
            handler.answers, handler.pause_s = True, 0.0
            assert (await watch(0.6))[-1] == ()
            links.connect_to({}, Hello(role="server"))
            assert (await watch(0.1))[-1] == ()
        finally:
            links.close()

    with serve_in_thread(handler, transport) as served:
        asyncio.run(complaints_of(served.endpoint))
        endpoint = served.endpoint

    async def no_complaints() -> tuple[int, ...]:
        links = ChainLinks(
            transport, on_up=lambda _: None, on_down=lambda _: None, on_frame=lambda *frame: None, fail=_must_not
        )
        links.watch(period_s)
        links.connect_to({7: endpoint}, Hello(role="server"))
        try:
            await asyncio.sleep(15 * period_s)
            return links.unreachable
        finally:
            links.close()

    assert asyncio.run(no_complaints()) == (7,)


def test_a_report_ends_with_the_connection() -> None:
    """The reply to the first PING ends the report immediately, and not at the next poll."""
    transport, period_s = SocketTransport(TOKEN), 0.3

    async def connect_late(endpoint: Endpoint) -> None:
        links = ChainLinks(
            transport, on_up=lambda _: None, on_down=lambda _: None, on_frame=lambda *frame: None, fail=_must_not
        )
        polls: list[tuple[int, ...]] = []
        links.connect_to({7: endpoint}, Hello(role="server"))
        for _ in range(6):  # without a pause, so the connection does not exist yet
            links._silence.poll((7,))
        polls.append(links.unreachable)
        links.watch(10 * period_s)
        try:
            await asyncio.sleep(period_s)
            polls.append(links.unreachable)
        finally:
            links.close()
        assert polls == [(7,), ()]

    with serve_in_thread(_Deaf(), transport) as served:
        asyncio.run(connect_late(served.endpoint))


def test_the_error_names_the_unreachable_server() -> None:
    """The client does not hang, although the scheduler receives heartbeats of both servers."""
    with Cluster(servers=2, replicas=1, heartbeat_timeout_s=TIMEOUT_S) as cluster:
        client = cluster.connect(timeout_s=1.0, reconnect_s=0.5)
        table = client.sparse_table("counts", update=SGD(lr=1.0))
        table.push(KEYS, np.ones((300, 1), np.float32)).wait()
        cluster.nodes[1].stop_serving()
        began = time.monotonic()
        with pytest.raises(PacelineError, match="server 1 was lost"):
            table.push(KEYS, np.ones((300, 1), np.float32)).wait()
        assert time.monotonic() < began + 20.0


def test_clients_detect_a_cut_while_they_wait_for_another_server() -> None:
    """Otherwise two workers wait for each other: one for a lost tick, and the other for this worker."""
    ticks = [Fault(action="drop", rank=0, step=step, kind=TICK) for step in (0, 2)]  # only to server 0
    plan = FaultPlan(ticks)
    transport = FaultyTransport(SocketTransport(TOKEN), plan)
    with Cluster(
        servers=2, workers=2, consistency=BoundedDelay(tau=0), heartbeat_timeout_s=TIMEOUT_S, transport=transport
    ) as cluster:
        clients = cluster.connect_all()
        tables = [client.sparse_table("counts", update=SGD(lr=1.0)) for client in clients]
        first, second = (node.server for node in cluster.nodes)
        keys = [key_of(clients[0], rank) for rank in (0, 1)]
        for client, num_ticks in zip(clients, (2, 1), strict=True):
            for _ in range(num_ticks):
                client.tick()

        def cut() -> None:
            wait_until(lambda: first.core.progress.num_waiting == second.core.progress.num_waiting == 1)
            plan.check_all_fired()
            cluster.nodes[0].call(lambda: [peer.close() for peer in first._traffic._peers if peer.hello.rank == 0])

        def last() -> None:
            tables[1].pull(keys[0])
            clients[1].tick()

        began = time.monotonic()
        in_threads(lambda: tables[0].pull(keys[1]), last, cut)
        assert time.monotonic() < began + 20.0
