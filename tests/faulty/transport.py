"""A transport that fails as planned, at (rank, step, kind), and records its faults.

It wraps any other transport. Faults affect only the client's sends, on a channel or on an opened peer (`peer`). For the
client, ``cut`` after a frame is a lost reply.
"""

from __future__ import annotations

import time

from tests.faulty.peer import FaultyHandler
from tests.faulty.plan import FaultPlan
from typing_extensions import override

from paceline.errors import ConnectionLostError, ProtocolError, VersionError
from paceline.transport.addresses import Address, Endpoint
from paceline.transport.base import Channel, Frame, Handler, Listener, Peer, Statistics, Transport
from paceline.transport.frames import Buffer, Header, WritableBuffer, unpack_header, view_of
from paceline.transport.security.authentication import Hello


class FaultyTransport(Transport):
    """A transport with planned faults, around any transport."""

    def __init__(self, inner: Transport, plan: FaultPlan) -> None:
        self._inner = inner
        self.plan = plan

    @override
    def connect(self, target: Endpoint | Address | str, hello: Hello, *, timeout_s: float = 10.0) -> Channel:
        """Connect without faults in the handshake."""
        return FaultyChannel(self._inner.connect(target, hello, timeout_s=timeout_s), self.plan, hello)

    @override
    async def open(
        self, handler: Handler, target: Endpoint | Address | str, hello: Hello, *, timeout_s: float = 10.0
    ) -> Peer:
        """Open without faults in the handshake."""
        faulty = FaultyHandler(handler, self.plan, hello)
        return faulty.wrap(await self._inner.open(faulty, target, hello, timeout_s=timeout_s))

    @override
    async def serve(
        self, handler: Handler, hello: Hello, *, address: Address | str | None = None, unix: bool = True
    ) -> Listener:
        return await self._inner.serve(handler, hello, address=address, unix=unix)


class FaultyChannel(Channel):
    """A channel with planned faults, around any channel. Each ``send`` must be one frame, its header first."""

    def __init__(self, inner: Channel, plan: FaultPlan, hello: Hello) -> None:
        self._inner = inner
        self._plan = plan
        self._hello = hello
        self.address = inner.address
        self.peer = inner.peer

    @override
    def send(self, *parts: Buffer) -> None:
        try:
            kind = unpack_header(view_of(parts[0])).kind
        except (ProtocolError, VersionError):  # these bytes are invalid on purpose
            self._inner.send(*parts)
            return
        fault = self._plan.next_fault(self._hello, kind)
        if fault is None:
            self._inner.send(*parts)
            return
        if fault.action == "delay":
            time.sleep(fault.delay_s)
        goes_out = fault.action in ("delay", "duplicate") or (fault.action == "cut" and fault.when == "after")
        for _ in range(goes_out + (fault.action == "duplicate")):
            self._inner.send(*parts)
        if fault.action == "cut":
            self._inner.close()
            if fault.when == "before":
                raise ConnectionLostError(f"the connection to {self.address} was cut by {fault}")

    @override
    def receive(self, into: WritableBuffer, timeout_s: float) -> Header:
        try:
            return self._inner.receive(into, timeout_s)
        finally:
            self._copy_last()

    @override
    def receive_header(self, timeout_s: float) -> Header:
        try:
            return self._inner.receive_header(timeout_s)
        finally:
            self._copy_last()

    @override
    def receive_meta(self) -> bytes:
        return self._inner.receive_meta()

    @override
    def receive_into(self, buffer: WritableBuffer) -> None:
        self._inner.receive_into(buffer)

    @override
    def receive_frame(self, timeout_s: float) -> Frame:
        try:
            return self._inner.receive_frame(timeout_s)
        finally:
            self._copy_last()

    @override
    def poll(self, timeout_s: float) -> bool:
        return self._inner.poll(timeout_s)

    @override
    def has_ended(self) -> bool:
        return self._inner.has_ended()

    @override
    def fileno(self) -> int:
        return self._inner.fileno()

    @override
    def close(self) -> None:
        self._inner.close()

    @override
    def statistics(self) -> Statistics:
        return self._inner.statistics()

    def _copy_last(self) -> None:
        self.last_header = self._inner.last_header
        self.last_meta = self._inner.last_meta
