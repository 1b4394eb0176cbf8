"""Messages that no rank sends are rejected with an error that the group handles."""

from __future__ import annotations

import re
import socket
from typing import Any

import pytest

from paceline.collectives.calls import CollectiveCall
from paceline.collectives.network.frames import (
    HEADER,
    MAGIC,
    WIRE_VERSION,
    Head,
    MessageKind,
    unpack_abort,
    unpack_header,
)
from paceline.collectives.network.verdicts import CurrentCall, unexpected
from paceline.collectives.p2p.pending import ABORT, pack
from paceline.collectives.p2p.progress import READ
from paceline.collectives.p2p.streams import Outgoing
from paceline.errors import ProtocolError
from paceline.meeting.network_store import decode_request
from paceline.meeting.node import NodeInfo

NO_TEXT = b"\x91\xa1\xff"  # a list with one text that is not UTF-8
DEEP = b"\x91" * 100_000


@pytest.mark.parametrize("data", [NO_TEXT, DEEP, b"\xdd\xff\xff\xff\xff"], ids=["no text", "deep", "huge count"])
def test_invalid_text(data: bytes) -> None:
    header = unpack_header(HEADER.pack(MAGIC, WIRE_VERSION, MessageKind.ABORT, len(data), 3, 0, 0))
    with pytest.raises(ProtocolError, match="cannot be read"):
        unpack_abort(Head(header, data))
    with pytest.raises(ProtocolError, match="cannot be read"):
        NodeInfo.decode(data)
    with pytest.raises(ProtocolError, match="cannot be read"):
        decode_request(data)
    abort = unexpected(CurrentCall("g", 0, CollectiveCall("barrier"), 3), 1, Head(header, data))
    assert "rank 1 sent invalid bytes during barrier(), call 3 of group 'g'" in abort.message


def test_an_endless_final_message_is_not_buffered() -> None:
    class NoProgress:
        def watch(self, watched: Any, events: int) -> None:
            pass

    class Ends:
        def outgoing_lost(self, outgoing: Outgoing, error: Exception | None) -> None:
            lost.append(str(error))

    lost: list[str] = []
    own_end, peer_end = socket.socketpair()
    with own_end, peer_end:
        own_end.setblocking(False)
        outgoing = Outgoing(1, NoProgress(), Ends())  # type: ignore[arg-type]
        outgoing.attach(own_end)
        peer_end.send(pack(ABORT, 0, 1 << 40, ""))
        outgoing.ready(READ)
    assert re.search("1099511627776 bytes.* 1048576", "; ".join(lost))
