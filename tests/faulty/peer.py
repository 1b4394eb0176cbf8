"""Planned faults on a peer that an event loop opened."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tests.faulty.plan import Fault, FaultPlan
from typing_extensions import override

from paceline.errors import ConnectionLostError, ProtocolError, VersionError
from paceline.transport.base import Handler, Peer, Statistics
from paceline.transport.frames import Buffer, Header, size_of, unpack_header, view_of
from paceline.transport.security.authentication import Hello


class _Held(NamedTuple):
    """A delayed action."""

    action: Callable[[], None]
    size: int
    delay_s: float


class FaultyHandler(Handler):
    """Passes calls to another handler, with the wrapped peer."""

    def __init__(self, handler: Handler, plan: FaultPlan, hello: Hello) -> None:
        self._handler = handler
        self._plan = plan
        self._hello = hello
        self._peer: FaultyPeer | None = None

    def wrap(self, peer: Peer) -> FaultyPeer:
        """Return the wrapped peer."""
        if self._peer is None:
            self._peer = FaultyPeer(peer, self._plan, self._hello)
        return self._peer

    @override
    def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        self._handler.frame_received(self.wrap(peer), header, meta, body)

    @override
    def disconnected(self, peer: Peer, reason: Exception | None) -> None:
        wrapped = self.wrap(peer)
        wrapped.drop_held()
        self._handler.disconnected(wrapped, reason or wrapped.cut)


class FaultyPeer(Peer):
    """An opened peer with the faults of a plan. Each ``send`` must be one frame."""

    def __init__(self, inner: Peer, plan: FaultPlan, hello: Hello) -> None:
        self._inner = inner
        self._plan = plan
        self._own_hello = hello
        self.hello = inner.hello
        self.address = inner.address
        self.cut: ConnectionLostError | None = None
        """The error of a connection that a fault cut."""
        self._is_dropping = False
        self._held: deque[_Held] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @override
    def send(self, *parts: Buffer) -> None:
        try:
            kind = unpack_header(view_of(parts[0])).kind
        except (ProtocolError, VersionError):  # these bytes are invalid on purpose
            self._inner.send(*parts)
            return
        self._send(kind, sum(map(size_of, parts)), lambda: self._inner.send(*parts))

    @override
    def send_error(self, request: Header, error: Exception) -> None:
        self._inner.send_error(request, error)

    @property
    @override
    def write_backlog_bytes(self) -> int:
        return sum(held.size for held in self._held) + self._inner.write_backlog_bytes

    @override
    def pause_receiving(self) -> None:
        self._inner.pause_receiving()

    @override
    def resume_receiving(self) -> None:
        self._inner.resume_receiving()

    @override
    def close(self) -> None:
        self._enqueue(self._inner.close)

    @override
    def abort(self) -> None:
        self.drop_held()
        self._inner.abort()

    @override
    def statistics(self) -> Statistics:
        return self._inner.statistics()

    def drop_held(self) -> None:
        """Drop delayed and later frames, because the connection is closed."""
        self._is_dropping = True
        self._held.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _send(self, kind: int, size: int, send: Callable[[], None]) -> None:
        fault = self._plan.next_fault(self._own_hello, kind)
        if fault is None:
            self._enqueue(send, size)
            return
        if fault.action == "delay":
            self._enqueue(send, size, fault.delay_s)
        elif fault.action == "duplicate":
            self._enqueue(send, size)
            self._enqueue(send, size)
        elif fault.action == "cut":
            if fault.when == "after":
                self._enqueue(send, size)
            self._enqueue(lambda: self._cut(fault))

    def _cut(self, fault: Fault) -> None:
        self.cut = ConnectionLostError(f"the connection to {self.address} was cut by {fault}")
        self._inner.close()

    def _enqueue(self, action: Callable[[], None], size: int = 0, delay_s: float = 0.0) -> None:
        """Run an action after its delay and after all held actions, or immediately without a delay and held actions."""
        if self._is_dropping:
            return
        if delay_s or self._held:
            self._held.append(_Held(action, size, delay_s))
            if len(self._held) == 1:
                self._wait()
        else:
            action()

    def _wait(self) -> None:
        delay_s = self._held[0].delay_s
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # a memory transport without an event loop
            time.sleep(delay_s)
            self._run_held()
        else:
            self._timer = loop.call_later(delay_s, self._run_held)

    def _run_held(self) -> None:
        self._timer = None
        while self._held:
            self._held.popleft().action()
            if self._held and self._held[0].delay_s:
                self._wait()
                return
