"""A transport without sockets, for tests: same frames, handshake, limits and errors.

The server's side and opened peers use the same :class:`~paceline.transport.connection.Connection` as sockets, on an
imitation of an asyncio transport. The blocking client's side is a :class:`~paceline.transport.channel.StreamChannel` on
a queue of bytes. Handlers run in their event loop, as with sockets. With ``direct=True`` they run in the sender's
thread before ``send`` returns, so that a test in one thread is deterministic. If a handler sends, the receiving handler
runs after it.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override

from paceline.errors import AddressError, UsageError
from paceline.transport.addresses import Address, Endpoint, host_identity
from paceline.transport.base import Channel, Handler, Listener, Peer, Transport
from paceline.transport.channel import StreamChannel
from paceline.transport.client_handshake import ClientHandshake, authenticate
from paceline.transport.connection import Connection
from paceline.transport.frames import Limits, join
from paceline.transport.listening import AcceptedConnection, Service
from paceline.transport.opening import OpenedConnection
from paceline.transport.receiving import BufferPool
from paceline.transport.security.authentication import Hello, check_token
from paceline.transport.security.sealing import IN_MEMORY

Call = Callable[[Callable[[], None]], None]
"""Runs a function in the thread of one end of a connection, after earlier functions."""


class MemoryTransport(Transport):
    """Connects channels to the listeners of the same object."""

    def __init__(
        self,
        token: str = "the token of a memory transport",
        *,
        limits: Limits | None = None,
        direct: bool = False,
        handshake_timeout_s: float = 10.0,
        shared: MemoryTransport | None = None,
    ) -> None:
        """`shared`: a transport with the same listeners."""
        self._token = check_token(token)
        self._limits = limits or Limits()
        self.direct: _Direct | None = (_Direct() if direct else None) if shared is None else shared.direct
        self._handshake_timeout_s = handshake_timeout_s
        self.listeners: dict[str, _MemoryListener] = {} if shared is None else shared.listeners
        self._names = itertools.count()

    def with_token(self, token: str) -> MemoryTransport:
        """Return a transport with another token that reaches the same listeners."""
        return MemoryTransport(token, limits=self._limits, shared=self)

    @override
    def connect(self, target: Endpoint | Address | str, hello: Hello, *, timeout_s: float = 10.0) -> Channel:
        listener = self._find(target)
        channel = MemoryChannel(listener.endpoint.tcp, self._limits, listener)
        authenticate(channel, self._token, hello, timeout_s, listener=_listener_id(target))
        return channel

    @override
    async def open(
        self, handler: Handler, target: Endpoint | Address | str, hello: Hello, *, timeout_s: float = 10.0
    ) -> Peer:
        """Open a peer. In direct mode, the server's first frames may arrive before the peer is returned."""
        listener = self._find(target)
        call = self.direct.call if self.direct is not None else _caller(asyncio.get_running_loop())
        pool = BufferPool() if self.direct is not None else BufferPool.of_running_loop()
        handshake = ClientHandshake(listener.endpoint.tcp, self._token, hello, listener=_listener_id(target))
        connection = OpenedConnection(handler, self._limits, pool, handshake, call)
        client_end = _Pipe(connection, call, lambda data: server_end.receive(data))
        server_end = _Pipe(AcceptedConnection(listener.service), listener.call, client_end.receive)
        client_end.begin()
        server_end.begin()
        return await connection.wait_authenticated(timeout_s)

    def _find(self, target: Endpoint | Address | str) -> _MemoryListener:
        address = target.tcp if isinstance(target, Endpoint) else target
        address = Address.parse(address) if isinstance(address, str) else address
        listener = self.listeners.get(address.host)
        if listener is None:
            raise AddressError(f"cannot reach {address}: no process listens there")
        return listener

    @override
    async def serve(
        self, handler: Handler, hello: Hello, *, address: Address | str | None = None, unix: bool = True
    ) -> Listener:
        """Listen at an address ``memory://name``."""
        chosen = f"memory://{next(self._names)}" if address is None else address
        requested = Address.parse(chosen) if isinstance(chosen, str) else chosen
        if requested.host in self.listeners:
            raise AddressError(f"cannot listen on {requested}: the name is in use")
        call = self.direct.call if self.direct is not None else _caller(asyncio.get_running_loop())
        pool = BufferPool() if self.direct is not None else BufferPool.of_running_loop()
        service = Service(
            handler, self._token, hello, self._limits, self._handshake_timeout_s, pool, secrets.token_hex(8)
        )
        listener = _MemoryListener(requested, service, call, self.listeners)
        self.listeners[requested.host] = listener
        return listener


def _listener_id(target: Endpoint | Address | str) -> str:
    return target.listener if isinstance(target, Endpoint) else ""


class _Direct:
    """Runs the calls of all ends of a direct transport one after another, never nested."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._lock = threading.RLock()
        self._is_calling = False

    def call(self, function: Callable[[], None]) -> None:
        """Run a function in this thread, now or after the current function."""
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


def _caller(loop: asyncio.AbstractEventLoop) -> Call:

    def call(function: Callable[[], None]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(function)

    return call


class _MemoryListener(Listener):
    def __init__(self, address: Address, service: Service, call: Call, listeners: dict[str, _MemoryListener]) -> None:
        self.endpoint = Endpoint(address, None, host_identity(), service.listener)
        self.service = service
        self.call = call
        self.listeners = listeners

    @property
    def num_connections(self) -> int:
        return len(self.service.connections)

    def set_hello(self, hello: Hello) -> None:
        self.service.hello = hello

    async def close(self) -> None:
        self.listeners.pop(self.endpoint.tcp.host, None)
        for connection in list(self.service.connections):
            connection.close()
        while self.service.connections:
            await asyncio.sleep(0)


class _Pipe(asyncio.Transport):
    """Asyncio transport of a :class:`Connection`; ``deliver`` gets its written bytes and its end."""

    def __init__(self, connection: Connection, call: Call, deliver: Callable[[bytes | None], None]) -> None:
        super().__init__()
        self._connection = connection
        self._call = call
        self._deliver = deliver
        self._is_closed = False

    def begin(self) -> None:
        """Notify the connection that it is connected."""
        self._call(lambda: self._connection.connection_made(self))

    def receive(self, data: bytes | None) -> None:
        """Receive bytes or the end (None) from the other end; thread-safe."""
        self._call(self.close if data is None else lambda: self._feed(data))

    def _feed(self, data: bytes) -> None:
        view = memoryview(data)
        while view and not self._is_closed:
            buffer = self._connection.get_buffer(-1)
            got = min(len(buffer), len(view))
            buffer[:got] = view[:got]
            self._connection.buffer_updated(got)
            view = view[got:]

    def write(self, data: Any) -> None:
        if not self._is_closed:
            self._deliver(bytes(data))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._deliver(None)
            self._call(lambda: self._connection.connection_lost(None))

    def is_closing(self) -> bool:
        return self._is_closed

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
        self._pipe = _Pipe(AcceptedConnection(listener.service), listener.call, self._deliver)
        self._pipe.begin()

    @override
    def binding(self) -> bytes:
        return IN_MEMORY

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
            raise UsageError(f"the frame has {len(data)} bytes, at most {self._limits.max_frame_bytes} are allowed")
        if self._is_ended or self._is_closed:
            raise self._lost()
        self._pipe.receive(data)
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

    @override
    def poll(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: bool(self._returned or self._arrived or self._is_ended or self._is_closed), timeout_s
            )

    @override
    def has_ended(self) -> bool:
        return self._is_ended or self._is_closed

    def fileno(self) -> int:
        """Raise UsageError: a channel in memory has no file descriptor."""
        raise UsageError("a channel in memory has no file descriptor; wait with poll()")

    @override
    def close(self) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        self._pipe.receive(None)
