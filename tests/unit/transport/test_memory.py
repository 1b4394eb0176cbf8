from __future__ import annotations

import asyncio

import pytest

from paceline.errors import AuthenticationError, ConnectionLostError, UsageError
from paceline.testing import EchoHandler
from paceline.testing.transports import CLOSE, ECHO, SILENT
from paceline.transport import Hello, MemoryTransport

WORKER = Hello(role="worker", rank=2)


def test_direct_transport_needs_no_thread_and_no_loop() -> None:
    transport = MemoryTransport("token", direct=True)
    handler = EchoHandler()
    listener = asyncio.run(transport.serve(handler, Hello(role="server"), address="memory://here"))
    channel = transport.connect("memory://here", WORKER)
    assert [peer.hello.rank for peer in handler.peers] == [2]
    channel.send_frame(SILENT)
    assert handler.num_frames == 1  # by the time that send returns
    assert not channel.poll(0)
    channel.send_frame(ECHO, body=b"x" * 1_000_000)
    assert channel.poll(0)
    assert channel.receive_frame(1).header.body_bytes == 1_000_000
    with pytest.raises(AuthenticationError, match="refused the token"):
        transport.with_token("other").connect(listener.endpoint, WORKER)
    with pytest.raises(UsageError, match="poll"):
        channel.fileno()
    channel.send_frame(CLOSE)
    assert handler.reasons == [None]
    with pytest.raises(ConnectionLostError):
        channel.receive_header(1)
    asyncio.run(listener.close())
