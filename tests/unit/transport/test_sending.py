"""Sending on a connection that is lost during the send."""

from __future__ import annotations

import asyncio
from typing import Any, cast
from unittest.mock import Mock

from paceline.transport.frames import Limits
from paceline.transport.receiving import FrameReceiver
from paceline.transport.security.authentication import Hello
from paceline.transport.sending import TransportPeer


def test_a_large_frame_is_dropped_when_the_connection_is_lost_during_a_write() -> None:
    transport = Mock(spec=asyncio.Transport)
    writes: list[Any] = []
    transport.is_closing.side_effect = lambda: bool(writes)  # asyncio's transports close after a failed write
    transport.write.side_effect = writes.append
    peer = TransportPeer(transport, cast(FrameReceiver, Mock()), cast(Hello, None), "peer", Limits())
    peer.send(bytes(50_000_000))
    peer.send(bytes(50_000_000))
    assert len(writes) == 1
