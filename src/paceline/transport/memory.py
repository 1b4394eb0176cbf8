"""A transport without sockets, for tests: the same frames, handshake, limits and errors, in one process.

The server's side is the very :class:`~paceline.transport.connection.Connection` of the sockets, on an asyncio
transport that is made up here; the client's side is a :class:`~paceline.transport.channel.StreamChannel` on a
queue of bytes. With ``direct=True`` the handler is called in the sender's thread before ``send`` returns, so
that a test in one thread is deterministic; else it is called by the event loop that serves, as with sockets.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from paceline.errors import AddressError, UsageError
from paceline.transport.addresses import Address, Endpoint, host_identity
from paceline.transport.authentication import Hello, check_token
from paceline.transport.base import Channel, Handler, Listener, Transport
from paceline.transport.channel import StreamChannel
from paceline.transport.connection import Connection, Service
from paceline.transport.frames import Limits, join
from paceline.transport.handshake import greet


class MemoryTransport(Transport):
    """Connects channels to the listeners of the same object."""

    def __init__(
        self,
        token: str = "memory",
        *,
        limits: Limits | None = None,
        direct: bool = False,
        handshake_timeout_s: float = 10.0,
    ) -> None:
        self._token = check_token(token)
        self._limits = limits or Limits()
        self._direct = direct
        self._handshake_timeout_s = handshake_timeout_s
        self._listeners: dict[str, _MemoryListener] = {}
        self._names = itertools.count()

    def with_token(self, token: str) -> MemoryTransport:
        """Return a transport that reaches the same listeners with another token."""
        other = MemoryTransport(token, limits=self._limits, direct=self._direct)
        other._listeners = self._listeners
        return other

    def connect(self, target: Endpoint | Address | str, hello: Hello, *, timeout_s: float = 10.0) -> Channel:
        """See :meth:`Transport.connect`."""
        address = target.tcp if isinstance(target, Endpoint) else target
        address = Address.parse(address) if isinstance(address, str) else address
        listener = self._listeners.get(address.host)
        if listener is None:
            raise AddressError(f"cannot reach {address}: nobody listens there")
        channel = MemoryChannel(address, self._limits, listener)
        greet(channel, self._token, hello, timeout_s)
        return channel

    async def serve(
        self, handler: Handler, hello: Hello, *, address: Address | str | None = None, unix: bool = True
    ) -> Listener:
        """See :meth:`Transport.serve`; the address is ``memory://name``."""
        chosen = f"memory://{next(self._names)}" if address is None else address
        wanted = Address.parse(chosen) if isinstance(chosen, str) else chosen
        if wanted.host in self._listeners:
            raise AddressError(f"cannot listen on {wanted}: the name is in use")
        service = Service(handler, self._token, hello, self._limits, self._handshake_timeout_s)
        loop = None if self._direct else asyncio.get_running_loop()
        listener = _MemoryListener(wanted, service, loop, self._listeners)
        self._listeners[wanted.host] = listener
        return listener


class _MemoryListener(Listener):
    def __init__(
        self,
        address: Address,
        service: Service,
        loop: asyncio.AbstractEventLoop | None,
        listeners: dict[str, _MemoryListener],
    ) -> None:
        self.endpoint = Endpoint(address, None, host_identity())
        self.service = service
        self._loop = loop
        self._listeners = listeners
        self._calls: deque[Callable[[], None]] = deque()
        self._lock = threading.RLock()
        self._is_calling = False

    @property
    def num_connections(self) -> int:
        return len(self.service.connections)

    def call(self, function: Callable[[], None]) -> None:
        """Run in the loop or, in direct mode, here: one after the other, none within another."""
        if self._loop is not None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(function)
            return
        with self._lock:
            self._calls.append(function)
            if self._is_calling:
                return
            self._is_calling = True
            try:
                while self._calls:
                    self._calls.popleft()()
            finally:
                self._is_calling = False

    async def close(self) -> None:
        self._listeners.pop(self.endpoint.tcp.host, None)
        for connection in list(self.service.connections):
            connection.close()
        while self.service.connections:
            await asyncio.sleep(0)


class _Pipe(asyncio.Transport):
    """What a :class:`Connection` takes for its asyncio transport; made on the client's side."""

    def __init__(self, listener: _MemoryListener, deliver: Callable[[bytes | None], None]) -> None:
        super().__init__()
        self._listener = listener
        self._deliver = deliver
        self._is_closed = False
        self.connection = Connection(listener.service)
        listener.call(lambda: self.connection.connection_made(self))

    def feed(self, data: bytes) -> None:
        """Give the connection bytes, as a socket would."""
        view = memoryview(data)
        while view and not self._is_closed:
            buffer = self.connection.get_buffer(-1)
            got = min(len(buffer), len(view))
            buffer[:got] = view[:got]
            self.connection.buffer_updated(got)
            view = view[got:]

    def write(self, data: Any) -> None:
        if not self._is_closed:
            self._deliver(bytes(data))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._deliver(None)
            self._listener.call(lambda: self.connection.connection_lost(None))

    def abort(self) -> None:
        self.close()

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class MemoryChannel(StreamChannel):
    """A channel whose bytes go through a queue."""

    def __init__(self, address: Address, limits: Limits, listener: _MemoryListener) -> None:
        super().__init__(address, limits)
        self._arrived: deque[memoryview] = deque()
        self._is_ended = False
        self._is_closed = False
        self._changed = threading.Condition()
        self._listener = listener
        self._pipe = _Pipe(listener, self._deliver)

    def _deliver(self, data: bytes | None) -> None:
        with self._changed:
            if data is None:
                self._is_ended = True
            else:
                self._arrived.append(memoryview(data))
            self._changed.notify_all()

    def _write(self, buffers: Sequence[Any]) -> int:
        data = join(buffers)
        if len(data) > self._limits.max_frame_bytes:
            raise UsageError(
                f"a frame of {len(data)} bytes was to be sent, at most {self._limits.max_frame_bytes} are allowed"
            )
        if self._is_ended or self._is_closed:
            raise self._lost()
        self._listener.call(lambda: self._pipe.feed(data))
        return len(data)

    def _read(self, view: memoryview) -> int:
        with self._changed:
            if not self.poll(self._timeout_s):
                raise self._late()
            if self._is_closed or not self._arrived:
                raise self._lost()
            data = self._arrived.popleft()
            got = min(len(data), len(view))
            view[:got] = data[:got]
            if got < len(data):
                self._arrived.appendleft(data[got:])
            return got

    def _read_first(self, size: int) -> int:
        return self._read(self._first_view[:size])

    def _read_scattered(self, buffers: Sequence[Any]) -> int:
        return self._read(memoryview(buffers[0]))

    def _set_timeout(self, timeout_s: float) -> None:
        pass

    def poll(self, timeout_s: float) -> bool:
        """See :meth:`Channel.poll`."""
        with self._changed:
            return self._changed.wait_for(
                lambda: bool(self._returned or self._arrived or self._is_ended or self._is_closed), timeout_s
            )

    def fileno(self) -> int:
        """Raise UsageError: there is no file descriptor here."""
        raise UsageError("a channel in memory has no file descriptor; wait with poll()")

    def close(self) -> None:
        """See :meth:`Channel.close`."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        self._listener.call(self._pipe.close)
