from __future__ import annotations

import asyncio
import time
from typing import Literal

import pytest
from tests.faulty import Fault, FaultPlan, FaultyTransport
from tests.memory_transport import MemoryTransport

from paceline.errors import ConnectionLostError, DeadlineError, UsageError
from paceline.testing import EchoHandler, serve_in_thread
from paceline.testing.opened_checks import Inbox
from paceline.testing.transports import ECHO, SILENT
from paceline.transport import Hello, SocketTransport, Transport, frame_parts, pack_header

TOKEN = "a token for tests"


@pytest.fixture(params=["sockets", "memory"])
def inner(request: pytest.FixtureRequest) -> Transport:
    return SocketTransport(TOKEN) if request.param == "sockets" else MemoryTransport(TOKEN)


def test_every_fault_happens_as_planned(inner: Transport) -> None:
    faults = [
        Fault(action="drop", rank=1, step=0, kind=ECHO),
        Fault(action="duplicate", rank=1, step=1, kind=ECHO),
        Fault(action="delay", rank=1, step=4, delay_s=0.05),
    ]
    plan = FaultPlan(faults)
    transport = FaultyTransport(inner, plan)
    with serve_in_thread(EchoHandler(), transport) as served:
        other = transport.connect(served.endpoint, Hello(role="worker", rank=0))
        channel = transport.connect(served.endpoint, Hello(role="worker", rank=1))
        other.send(*frame_parts(ECHO))
        assert other.receive_header(5).body_bytes == 0

        channel.send(*frame_parts(SILENT))
        channel.send(*frame_parts(ECHO, request=0))
        with pytest.raises(DeadlineError):
            channel.receive_header(0.05)
        channel.send(*frame_parts(ECHO, request=1, body=b"twice"))
        for _ in range(2):
            frame = channel.receive_frame(5)
            assert (frame.header.request, bytes(frame.body)) == (1, b"twice")
        assert plan.fired == faults[:2]
        with pytest.raises(UsageError, match="did not fire"):
            plan.check_all_fired()
        channel.send(*frame_parts(ECHO, request=2))
        start = time.monotonic()
        channel.send(*frame_parts(ECHO, request=3))
        assert time.monotonic() - start >= 0.05
        assert [channel.receive_header(5).request for _ in range(2)] == [2, 3]
        other.close()
        channel.close()
    plan.check_all_fired()


def test_connections_are_cut_before_or_after_a_frame(inner: Transport) -> None:
    plan = FaultPlan(
        [
            Fault(action="cut", rank=0, step=1),
            Fault(action="cut", rank=0, step=2, when="after"),
        ]
    )
    transport = FaultyTransport(inner, plan)
    handler = EchoHandler()
    with serve_in_thread(handler, transport) as served:
        channel = transport.connect(served.endpoint, Hello(role="worker"))
        channel.send(*frame_parts(SILENT))
        with pytest.raises(ConnectionLostError, match="was cut"):
            channel.send(*frame_parts(SILENT))
        handler.wait_until(lambda: handler.reasons == [None])
        assert handler.num_frames == 1

        channel = transport.connect(served.endpoint, Hello(role="worker", incarnation=1))
        channel.send(*frame_parts(SILENT))
        with pytest.raises(ConnectionLostError):
            channel.receive_header(5)
        handler.wait_until(lambda: handler.num_frames == 2 and len(handler.reasons) == 2)
    plan.check_all_fired()


def test_other_roles_have_no_faults(inner: Transport) -> None:
    plan = FaultPlan([Fault(action="drop", rank=0, step=0)])
    plan.add(Fault(action="drop", rank=0, step=0, role="server"))
    transport = FaultyTransport(inner, plan)
    with serve_in_thread(EchoHandler(), transport) as served:
        channel = transport.connect(served.endpoint, Hello(role="server"))
        channel.send(*frame_parts(ECHO, request=1))
        channel.send(*frame_parts(ECHO, request=2))
        assert channel.receive_header(5).request == 2
        channel.close()
    assert [fault.role for fault in plan.fired] == ["server"]


def test_faults_of_opened_peers(inner: Transport) -> None:
    faults = [
        Fault(action="drop", role="server", rank=1, step=0, kind=ECHO),
        Fault(action="duplicate", role="server", rank=1, step=1, kind=ECHO),
        Fault(action="delay", role="server", rank=1, step=4, delay_s=0.3),
    ]
    plan = FaultPlan(faults)
    transport = FaultyTransport(inner, plan)

    async def run() -> None:
        inbox, other_inbox = Inbox(), Inbox()
        peer = await transport.open(inbox, served.endpoint, Hello(role="server", rank=1))
        other = await transport.open(other_inbox, served.endpoint, Hello(role="server", rank=0))
        other.send(*frame_parts(ECHO))
        await other_inbox.wait_frames(1)
        peer.send(*frame_parts(SILENT))
        peer.send(*frame_parts(ECHO, request=0))  # this frame is dropped
        peer.send(*frame_parts(ECHO, request=1, body=b"twice"))
        frames = await inbox.wait_frames(2)
        assert [(frame.header.request, bytes(frame.body)) for frame in frames] == [(1, b"twice")] * 2
        peer.send(pack_header(ECHO, request=2))
        start = time.monotonic()
        peer.send(pack_header(ECHO, request=3))  # this frame and later frames are delayed
        peer.send(*frame_parts(ECHO, request=4, body=bytes(1000)))
        peer.send(*frame_parts(ECHO, request=5))
        assert peer.write_backlog_bytes >= 3 * 40 + 1000
        assert time.monotonic() - start < 0.25
        assert [frame.header.request for frame in await inbox.wait_frames(4)] == [2, 3, 4, 5]
        assert time.monotonic() - start >= 0.3
        assert peer.write_backlog_bytes == 0
        assert all(sender is peer for sender in inbox.peers)
        peer.close()
        other.close()
        assert await inbox.wait_end() is None
        await other_inbox.wait_end()

    with serve_in_thread(EchoHandler(), transport) as served:
        asyncio.run(run())
    assert plan.fired == faults


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("delayed", [False, True])
def test_opened_peers_are_cut(inner: Transport, when: Literal["before", "after"], delayed: bool) -> None:
    plan = FaultPlan([Fault(action="cut", rank=0, step=2, when=when)])
    if delayed:
        plan.add(Fault(action="delay", rank=0, step=1, delay_s=0.02))
    transport = FaultyTransport(inner, plan)
    handler = EchoHandler()

    async def run() -> None:
        inbox = Inbox()
        peer = await transport.open(inbox, served.endpoint, Hello(role="worker"))
        for _ in range(5):
            peer.send(*frame_parts(SILENT))
        reason = await inbox.wait_end()
        assert isinstance(reason, ConnectionLostError)
        assert "was cut by" in str(reason)
        assert inbox.ends[0][0] is peer
        peer.send(*frame_parts(SILENT))
        peer.close()

    with serve_in_thread(handler, transport) as served:
        asyncio.run(run())
        handler.wait_until(lambda: len(handler.reasons) == 1)
        assert handler.num_frames == (2 if when == "before" else 3)
    plan.check_all_fired()


def test_an_opened_peer_closed_while_a_frame_is_delayed_sends_it_first(inner: Transport) -> None:
    plan = FaultPlan([Fault(action="delay", rank=0, step=0, delay_s=0.02)])
    transport = FaultyTransport(inner, plan)
    handler = EchoHandler()

    async def run() -> None:
        closed, aborted = Inbox(), Inbox()
        peer = await transport.open(closed, served.endpoint, Hello(role="worker"))
        peer.send(*frame_parts(SILENT))
        peer.close()
        assert await closed.wait_end() is None
        handler.wait_until(lambda: handler.num_frames == 1)
        plan.add(Fault(action="delay", rank=0, step=1, delay_s=0.02))
        peer = await transport.open(aborted, served.endpoint, Hello(role="worker"))
        peer.send(*frame_parts(SILENT))
        peer.abort()
        await aborted.wait_end()
        await asyncio.sleep(0.04)

    with serve_in_thread(handler, transport) as served:
        asyncio.run(run())
        handler.wait_until(lambda: len(handler.reasons) == 2)
    assert handler.num_frames == 1
    plan.check_all_fired()
