"""The transport of the simulation: the product's frames and handshake on the virtual network.

As in :mod:`tests.memory_transport`, the connections are the product's own. This module replaces only the asyncio
transport and the socket, and simulates the effects of a real network.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Final

from typing_extensions import override

from paceline.errors import AddressError, DeadlineError, UsageError
from paceline.transport.addresses import Address, Endpoint
from paceline.transport.base import Channel, Handler, Listener, Peer, Transport
from paceline.transport.channel import StreamChannel
from paceline.transport.client_handshake import ClientHandshake, authenticate
from paceline.transport.connection import Connection
from paceline.transport.frames import Limits, join
from paceline.transport.listening import AcceptedConnection, Service
from paceline.transport.opening import OpenedConnection
from paceline.transport.receiving import BufferPool
from paceline.transport.security.authentication import Hello
from paceline.transport.security.sealing import IN_MEMORY
from simulator.network import Refused, VirtualNetwork
from simulator.product.streams import StreamEnd
from simulator.world import VirtualWorld

ADDRESS: Final = "memory://scheduler"
TOKEN: Final = "the token of a simulation"
_HANDSHAKE_S: Final = 10.0
_SEND_S: Final = 60.0
_RETRY_S: Final = 0.25
_REFUSAL_S: Final = 1e-4
"""Delay of a refused connection."""


class VirtualTransport(Transport):
    """Connects the running process to other processes of its world."""

    def __init__(self, network: VirtualNetwork) -> None:
        self._network = network
        self._limits = Limits()

    @override
    def connect(self, target: Endpoint | Address | str, hello: Hello, *, timeout_s: float = 10.0) -> Channel:
        world, address = self._network.world, address_of(target)
        end_s = world.time_s + timeout_s
        world.sleep(_REFUSAL_S)
        while (listener := self._reach(address)) is None:
            if world.time_s >= end_s:
                raise DeadlineError(f"{address} did not answer within {timeout_s:g} s")
            world.sleep(min(_RETRY_S, max(end_s - world.time_s, 1e-6)))
        near, far = self._network.connect(world.current.process, listener.process, StreamEnd)
        world.sleep(2 * self._network.delay_s(near.path))
        channel = VirtualChannel(address, self._limits, near, world)
        listener.accept(far)
        authenticate(channel, TOKEN, hello, timeout_s, listener=_wanted(target))
        return channel

    @override
    async def open(
        self, handler: Handler, target: Endpoint | Address | str, hello: Hello, *, timeout_s: float = 10.0
    ) -> Peer:
        world, address = self._network.world, address_of(target)
        end_s = world.time_s + timeout_s
        while (listener := self._reach(address)) is None:
            if world.time_s >= end_s:
                raise DeadlineError(f"{address} did not answer within {timeout_s:g} s")
            await asyncio.sleep(min(_RETRY_S, max(end_s - world.time_s, 1e-6)))
        process = world.current.process
        near, far = self._network.connect(process, listener.process, StreamEnd)
        await asyncio.sleep(2 * self._network.delay_s(near.path))
        handshake = ClientHandshake(address, TOKEN, hello, listener=_wanted(target))
        loop = asyncio.get_running_loop()
        connection = OpenedConnection(handler, self._limits, BufferPool.of_running_loop(), handshake, loop.call_soon)
        Pipe(connection, near, loop).begin()
        listener.accept(far)
        return await connection.wait_authenticated(timeout_s)

    def _reach(self, address: Address) -> _VirtualListener | None:
        """Return the listener at an address; None if it does not answer. Raises AddressError without a listener."""
        try:
            listener = self._network.reach(self._network.world.current.process.host, address.host)
        except Refused:
            raise AddressError(f"cannot reach {address}: no process listens there") from None
        assert listener is None or isinstance(listener, _VirtualListener)
        return listener

    @override
    async def serve(
        self, handler: Handler, hello: Hello, *, address: Address | str | None = None, unix: bool = True
    ) -> Listener:
        world = self._network.world
        process = world.current.process
        wanted = address_of(f"memory://{process.name}" if address is None else address)
        service = Service(
            handler, TOKEN, hello, self._limits, _HANDSHAKE_S, BufferPool.of_running_loop(),
            world.random.randbytes(8).hex(),
        )  # fmt: skip
        listener = _VirtualListener(wanted, service, self._network)
        self._network.listeners[wanted.host] = listener
        self._network.powerless.discard(wanted.host)
        return listener


def address_of(target: Endpoint | Address | str) -> Address:
    """Return the address of a target."""
    address = target.tcp if isinstance(target, Endpoint) else target
    return Address.parse(address) if isinstance(address, str) else address


def _wanted(target: Endpoint | Address | str) -> str:
    return target.listener if isinstance(target, Endpoint) else ""


class _VirtualListener(Listener):
    def __init__(self, address: Address, service: Service, network: VirtualNetwork) -> None:
        self.endpoint = Endpoint(address, None, network.world.current.process.host, service.listener)
        self.process = network.world.current.process
        self._service = service
        self._network = network
        self._loop = asyncio.get_running_loop()
        self._accepted: dict[AcceptedConnection, None] = {}  # a dict, whose order is the same in every run

    @property
    @override
    def num_connections(self) -> int:
        return len(self._service.connections)

    @override
    def set_hello(self, hello: Hello) -> None:
        self._service.hello = hello

    def accept(self, end: StreamEnd) -> None:
        """Accept a connection; may be called from any thread."""
        if self._loop.is_closed() or self._network.listeners.get(self.endpoint.tcp.host) is not self:
            end.abort()
            return
        connection = AcceptedConnection(self._service)
        self._accepted[connection] = None
        Pipe(connection, end, self._loop).begin()

    @override
    async def close(self) -> None:
        if self._network.listeners.get(self.endpoint.tcp.host) is self:
            del self._network.listeners[self.endpoint.tcp.host]
        for connection in self._accepted:
            if connection in self._service.connections:
                connection.close()
        for _ in range(100):
            if not self._service.connections:
                break
            await asyncio.sleep(0.01)


class Pipe(asyncio.Transport):
    """The asyncio transport of a :class:`Connection`."""

    def __init__(self, connection: Connection, end: StreamEnd, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._connection = connection
        self._end = end
        self._loop = loop
        self._random = end.network.world.random
        self._waiting = bytearray()
        self._is_closing = False
        self._is_lost = False
        self._is_reading = True
        self._is_paused = False
        self._is_planned = False
        end.changed = self._changed

    def begin(self) -> None:
        """Start the connection; may be called from any thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._connection.connection_made, self)
            self._loop.call_soon_threadsafe(self._process_input)

    def _changed(self) -> None:
        if not self._is_planned:
            self._is_planned = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._process_input)

    def _process_input(self) -> None:
        """Read, write and close, as far as this is possible now."""
        self._is_planned = False
        end = self._end
        if self._is_lost:
            return
        if end.is_reset:
            self._drop(ConnectionResetError(104, "Connection reset by peer"))
            return
        if self._waiting:
            self._write_waiting()
        if self._is_reading and not self._is_closing:
            if end.num_arrived:
                self._receive(end)
            elif end.has_ended:
                self._connection.eof_received()
                self.close()
        if self._is_reading and not self._is_closing and (end.num_arrived or end.has_ended):
            self._changed()

    def _receive(self, end: StreamEnd) -> None:
        try:
            buffer = memoryview(self._connection.get_buffer(-1))
            size = len(buffer) if self._random.random() < 0.8 else self._random.randint(1, len(buffer))
            self._connection.buffer_updated(end.read(buffer[:size]))
        except Exception as error:
            context = {"message": "Fatal error: buffer_updated", "exception": error, "protocol": self._connection}
            self._loop.call_exception_handler(context)
            self._drop(error)

    def _write_waiting(self) -> None:
        taken = self._end.write(memoryview(bytes(self._waiting)))
        del self._waiting[:taken]
        if self._waiting:
            return
        if self._is_paused:
            self._is_paused = False
            self._connection.resume_writing()
        if self._is_closing and not self._waiting:
            self._drop(None)

    def _drop(self, error: Exception | None) -> None:
        if self._is_lost:
            return
        self._is_lost = self._is_closing = True
        self._waiting.clear()
        if error is None:
            self._end.close()
        else:
            self._end.abort()
        self._loop.call_soon(self._connection.connection_lost, error)

    @override
    def write(self, data: Any) -> None:
        if self._is_closing or not len(data):
            return
        view = memoryview(data).cast("B")
        if not self._waiting:
            view = view[self._end.write(view) :]
        self._waiting += view
        if self._waiting and not self._is_paused:
            self._is_paused = True
            self._connection.pause_writing()

    @override
    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            if not self._waiting:
                self._drop(None)

    @override
    def abort(self) -> None:
        if not self._is_lost:
            self._is_lost = self._is_closing = True
            self._waiting.clear()
            self._end.abort()
            self._loop.call_soon(self._connection.connection_lost, None)

    @override
    def is_closing(self) -> bool:
        return self._is_closing

    @override
    def get_write_buffer_size(self) -> int:
        return len(self._waiting)

    @override
    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    @override
    def pause_reading(self) -> None:
        self._is_reading = False

    @override
    def resume_reading(self) -> None:
        self._is_reading = True
        self._changed()


class VirtualChannel(StreamChannel):
    """A blocking channel; other threads run while it waits."""

    def __init__(self, address: Address, limits: Limits, end: StreamEnd, world: VirtualWorld) -> None:
        super().__init__(address, limits)
        self._end = end
        self._world = world
        self._waiting: list[Any] = []
        self._is_closed = False
        end.changed = self._changed

    @override
    def binding(self) -> bytes:
        return IN_MEMORY

    def _changed(self) -> None:
        for thread in self._waiting:
            self._world.wake(thread)

    def _block(self, end_s: float) -> bool:
        """Wait for a change; return False after the timeout."""
        if self._world.time_s >= end_s:
            return False
        me = self._world.current
        self._waiting.append(me)
        try:
            self._world.block(end_s - self._world.time_s)
        finally:
            self._waiting.remove(me)
        return True

    @override
    def _write(self, buffers: Sequence[Any]) -> int:
        data = join(buffers)
        if len(data) > self._limits.max_frame_bytes:
            raise UsageError(
                f"a frame of {len(data)} bytes was to be sent, at most {self._limits.max_frame_bytes} are allowed"
            )
        view = memoryview(data)
        end_s = self._world.time_s + _SEND_S
        while True:
            if self._is_closed or self._end.is_reset:
                raise self._lost()
            taken = self._end.write(view)
            view = view[taken:]
            if not view:
                return len(data)
            if taken:
                end_s = self._world.time_s + _SEND_S
            if not self._block(end_s):
                self.close()
                raise DeadlineError(f"{self._peer_name()} accepted no data for {_SEND_S:g} s")

    @override
    def _read(self, view: memoryview) -> int:
        end_s = self._world.time_s + self._timeout_s
        while True:
            if self._is_closed or self._end.is_reset:
                raise self._lost()
            if self._end.num_arrived:
                return self._end.read(view)
            if self._end.has_ended:
                raise self._lost()
            if not self._block(end_s):
                raise self._late()

    @override
    def _read_first(self, size: int) -> int:
        return self._read(self._first_view[:size])

    @override
    def _read_scattered(self, buffers: Sequence[Any]) -> int:
        return self._read(memoryview(buffers[0]).cast("B"))

    @override
    def _set_timeout(self, timeout_s: float) -> None:
        pass

    @override
    def poll(self, timeout_s: float) -> bool:
        end, end_s = self._end, self._world.time_s + timeout_s
        while not (self._returned or end.num_arrived or end.has_ended or end.is_reset or self._is_closed):
            if not self._block(end_s):
                return False
        return True

    @override
    def has_ended(self) -> bool:
        return self._is_closed or self._end.has_ended or self._end.is_reset

    @override
    def fileno(self) -> int:
        raise UsageError("a channel of the simulation has no file descriptor; wait with poll()")

    @override
    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._end.close()
            self._changed()
