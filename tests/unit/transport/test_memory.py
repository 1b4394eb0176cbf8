from __future__ import annotations

import asyncio

import pytest
from tests.faulty import Fault, FaultPlan, FaultyTransport
from tests.memory_transport import MemoryTransport

from paceline.errors import AddressError, AuthenticationError, ConnectionLostError, UsageError
from paceline.testing import EchoHandler
from paceline.testing.transports import CLOSE, ECHO, SILENT
from paceline.transport import Handler, Header, Hello, Peer, frame_parts

TOKEN = "a token for tests"
WORKER = Hello(role="worker", rank=2)


def test_direct_transport_needs_no_thread_and_no_loop() -> None:
    transport = MemoryTransport(TOKEN, direct=True)
    handler = EchoHandler()
    listener = asyncio.run(transport.serve(handler, Hello(role="server"), address="memory://here"))
    channel = transport.connect("memory://here", WORKER)
    assert [peer.hello.rank for peer in handler.peers] == [2]
    channel.send(*frame_parts(SILENT))
    assert handler.num_frames == 1  # the frame has arrived when send returns
    assert not channel.poll(0)
    channel.send(*frame_parts(ECHO, body=b"x" * 1_000_000))
    assert channel.poll(0)
    assert channel.receive_frame(1).header.body_bytes == 1_000_000
    with pytest.raises(AuthenticationError, match="refused the token"):
        transport.with_token("another token for tests").connect(listener.endpoint, WORKER)
    with pytest.raises(UsageError, match="poll"):
        channel.fileno()
    channel.send(*frame_parts(CLOSE))
    assert handler.reasons == [None]
    with pytest.raises(ConnectionLostError):
        channel.receive_header(1)
    asyncio.run(listener.close())


class Chain(Handler):
    """Forwards all data in both directions."""

    def __init__(self) -> None:
        self.onward: Peer | None = None
        self.queried: Peer | None = None
        self.events: list[str] = []

    def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        self.events.append(f"{header.kind} begins")
        if peer is self.onward:
            assert self.queried is not None
            self.queried.send(*frame_parts(33, body=bytes(body)))
        else:
            assert self.onward is not None
            self.queried = peer
            self.onward.send(*frame_parts(ECHO, body=bytes(body)))
        self.events.append(f"{header.kind} ends")

    def disconnected(self, peer: Peer, reason: Exception | None) -> None:
        self.events.append(f"{peer.hello.role} disconnected: {reason}")


def test_open_direct_peers_need_no_loop() -> None:
    transport = MemoryTransport(TOKEN, direct=True)
    chain, echo = Chain(), EchoHandler()
    asyncio.run(transport.serve(chain, Hello(role="first"), address="memory://first"))
    listener = asyncio.run(transport.serve(echo, Hello(role="second"), address="memory://second"))
    chain.onward = asyncio.run(transport.open(chain, "memory://second", Hello(role="first", rank=5)))
    assert chain.onward.hello.role == "second"
    assert [peer.hello.rank for peer in echo.peers] == [5]
    channel = transport.connect("memory://first", WORKER)
    channel.send(*frame_parts(ECHO, body=b"x" * 500_000))
    assert chain.events == ["16 begins", "16 ends", "32 begins", "32 ends"]  # no frame within another frame
    assert channel.poll(0)
    assert channel.receive_frame(1).header.body_bytes == 500_000
    for target, token, kind in (
        ("memory://none", TOKEN, AddressError),
        ("memory://second", "another token for tests", AuthenticationError),
    ):
        with pytest.raises(kind):
            asyncio.run(transport.with_token(token).open(Chain(), target, WORKER))
    asyncio.run(listener.close())
    assert chain.events[4:] == ["second disconnected: None"]


def test_faults_are_injected_into_direct_peers() -> None:
    plan = FaultPlan([Fault(action="delay", rank=2, step=0, delay_s=0.01), Fault(action="cut", rank=2, step=1)])
    transport = FaultyTransport(MemoryTransport(TOKEN, direct=True), plan)
    echo, chain = EchoHandler(), Chain()
    asyncio.run(transport.serve(echo, Hello(role="server"), address="memory://here"))
    peer = asyncio.run(transport.open(chain, "memory://here", WORKER))
    peer.send(*frame_parts(SILENT))
    assert echo.num_frames == 1
    peer.send(*frame_parts(SILENT))
    assert echo.num_frames == 1
    assert len(chain.events) == 1
    assert "was cut" in chain.events[0]
    plan.check_all_fired()
