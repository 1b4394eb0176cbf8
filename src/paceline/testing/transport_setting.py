"""Provide the server and the clients for the checks of transports."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from paceline.errors import StaleEpochError
from paceline.testing.serving import Served
from paceline.transport import Channel, Handler, Header, Hello, Peer, Transport, frame_parts

MakeTransport = Callable[[str], Transport]
"""Create a transport with the given token; transports with equal tokens must be able to connect."""

ECHO, SILENT, FAIL, FAIL_INTERNALLY, CLOSE = range(16, 21)
"""Kinds of frame that :class:`EchoHandler` handles."""
ANSWER = 32

TIMEOUT_S = 10.0


class EchoHandler(Handler):
    """Returns every frame to its sender, but SILENT, FAIL and CLOSE cause silence, an error or a close."""

    def __init__(self) -> None:
        self.peers: list[Peer] = []
        self.reasons: list[Exception | None] = []
        self.num_frames = 0
        self.changed = threading.Condition()

    def connected(self, peer: Peer) -> None:
        with self.changed:
            self.peers.append(peer)
            self.changed.notify_all()

    def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        with self.changed:
            self.num_frames += 1
            self.changed.notify_all()
        if header.kind == ECHO:
            aligned = body.nbytes == 0 or np.frombuffer(body, np.uint8).ctypes.data % 8 == 0
            peer.send(
                *frame_parts(
                    ANSWER,
                    flags=int(aligned),
                    table=header.table,
                    request=header.request,
                    epoch=header.epoch,
                    clock=header.clock,
                    sequence=header.sequence,
                    meta=bytes(meta),
                    body=bytes(body),
                )
            )
        elif header.kind == FAIL:
            raise StaleEpochError("the request has epoch 3, the current epoch is 4")
        elif header.kind == FAIL_INTERNALLY:
            raise KeyError("a bug")
        elif header.kind == CLOSE:
            peer.close()

    def disconnected(self, peer: Peer, reason: Exception | None) -> None:
        with self.changed:
            self.peers.remove(peer)
            self.reasons.append(reason)
            self.changed.notify_all()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, TIMEOUT_S), "waited too long"


class Setting:
    """A served echo handler and its clients."""

    def __init__(self, make: MakeTransport, transport: Transport, handler: EchoHandler, served: Served) -> None:
        self.make = make
        self.transport = transport
        self.handler = handler
        self.served = served
        self._channels: list[Channel] = []

    def connect(self, rank: int = 0) -> Channel:
        """Return a new channel, closed at the end of the check."""
        channel = self.transport.connect(
            self.served.endpoint, Hello(role="worker", rank=rank, incarnation=7), timeout_s=TIMEOUT_S
        )
        self._channels.append(channel)
        return channel

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
