"""The store of rank 0, and the clients with which the other ranks use it over the network.

The server is an event loop in a daemon thread, and the clients block. Each request and each answer is one frame. A
COLLECT request waits until all its keys are set or its timeout has passed, and returns the values that are set. A
client has one connection for each concurrent call, so that a waiting COLLECT does not block other calls.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import IntEnum
from typing import Annotated, Final, TypeVar

import msgspec
from typing_extensions import override

from paceline.errors import GroupClosedError, PacelineError, ProtocolError, UsageError
from paceline.meeting.store import Store, written_twice
from paceline.transport.addresses import Address
from paceline.transport.base import Channel, Handler, Listener, Peer
from paceline.transport.decoding import reader
from paceline.transport.frames import FIRST_APPLICATION_KIND, Header, Limits, frame_parts
from paceline.transport.security.authentication import Hello
from paceline.transport.sockets import SocketTransport
from paceline.transport.tls.contexts import TLS

_Result = TypeVar("_Result")
AGENT: Final = "agent"
"""The role of torchrun's agents, which use a scheduler or a coordinator as a store (:mod:`paceline.torch.rendezvous`).
"""
LIMITS = Limits(max_frame_bytes=1 << 26, max_meta_bytes=1 << 16)
_LINGER_S = 2.0
_ANSWER_S = 30.0
"""The maximum time until the answer to a request that need not wait for keys."""
_MAX_COLLECT_S: Final = 60.0


class StoreCall(IntEnum):
    """The kinds of the store's requests and answers."""

    SET = FIRST_APPLICATION_KIND
    DELETE = FIRST_APPLICATION_KIND + 1
    COLLECT = FIRST_APPLICATION_KIND + 2
    DONE = FIRST_APPLICATION_KIND + 3
    QUORUM = FIRST_APPLICATION_KIND + 4
    LAUNCHER = FIRST_APPLICATION_KIND + 5
    REPLACE = FIRST_APPLICATION_KIND + 6


class StoreRequest(msgspec.Struct, frozen=True, array_like=True):
    """The meta part of a SET, DELETE or REPLACE request."""

    key: str


class Replacement(msgspec.Struct, frozen=True, array_like=True):
    """The body of a REPLACE request."""

    expected: bytes | None
    value: bytes


class CollectRequest(msgspec.Struct, frozen=True, array_like=True):
    """The body of a COLLECT request, which may be too large for the meta part."""

    keys: tuple[str, ...]
    wait_s: Annotated[float, msgspec.Meta(ge=0.0, le=_MAX_COLLECT_S)]


decode_request = reader(StoreRequest, "a request to the store")
_decode_replacement = reader(Replacement, "a request to the store")
_decode_replaced = reader(tuple[bool, bytes | None], "an answer of the store")
_decode_wanted = reader(CollectRequest, "a request to the store")
_decode_values = reader(list[bytes | None], "an answer of the store")


class _Collecting:
    def __init__(self, peer: Peer, header: Header, keys: Sequence[str], missing: set[str]) -> None:
        self.peer, self.header, self.keys, self.missing = peer, header, keys, missing
        self.timer: asyncio.TimerHandle | None = None


class ServedStore(Handler):
    """The values of the store, and the requests that wait for values. Only the event loop's thread uses it."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._collecting: dict[str, list[_Collecting]] = {}
        """The waiting requests for each missing key."""

    def frame_received(self, peer: Peer, header: Header, meta: memoryview, body: memoryview) -> None:
        """Answer a request now, or when the keys for which it waits are set."""
        if header.kind == StoreCall.SET:
            self.set(decode_request(meta).key, bytes(body))
            peer.send(*frame_parts(StoreCall.DONE))
        elif header.kind == StoreCall.DELETE:
            self._values.pop(decode_request(meta).key, None)
            peer.send(*frame_parts(StoreCall.DONE))
        elif header.kind == StoreCall.COLLECT:
            self._collect(peer, header, body)
        elif header.kind == StoreCall.REPLACE:
            self._replace(peer, decode_request(meta).key, _decode_replacement(body))
        else:
            raise ProtocolError(f"got a request of the unknown kind {header.kind} for the store")

    def disconnected(self, peer: Peer, reason: Exception | None) -> None:
        for collecting in {request for waiting in self._collecting.values() for request in waiting}:
            if collecting.peer is peer:
                self._forget(collecting)

    def set(self, key: str, value: bytes) -> None:
        """Write a value, and answer the requests that wait for it. Raises UsageError for a different value."""
        self._check_key(key)
        if self._values.setdefault(key, value) != value:
            raise written_twice(key)
        for collecting in self._collecting.pop(key, ()):
            collecting.missing.discard(key)
            if not collecting.missing:
                self._answer(collecting)

    def _replace(self, peer: Peer, key: str, replacement: Replacement) -> None:
        is_replaced = self._values.get(key) == replacement.expected
        if is_replaced:
            self._values.pop(key, None)
            self.set(key, replacement.value)
        answer = is_replaced, self._values.get(key)
        peer.send(*frame_parts(StoreCall.DONE, body=msgspec.msgpack.encode(answer)))

    def drop(self, prefix: str, error: PacelineError) -> None:
        """Remove the keys with a prefix. Requests that wait for such keys fail with `error`."""
        self._values = {key: value for key, value in self._values.items() if not key.startswith(prefix)}
        waiting = [waiting for key, waiting in self._collecting.items() if key.startswith(prefix)]
        for collecting in {request for requests in waiting for request in requests}:
            self._forget(collecting)
            collecting.peer.send_error(collecting.header, error)

    def _check_key(self, key: str) -> None:
        """Raise a PacelineError if the key must not be used now."""

    def _collect(self, peer: Peer, header: Header, body: memoryview) -> None:
        wanted = _decode_wanted(body)
        for key in wanted.keys:
            self._check_key(key)
        missing = {key for key in wanted.keys if key not in self._values}
        collecting = _Collecting(peer, header, wanted.keys, missing)
        if not missing or not wanted.wait_s:
            self._answer(collecting)
            return
        for key in missing:
            self._collecting.setdefault(key, []).append(collecting)
        collecting.timer = asyncio.get_running_loop().call_later(wanted.wait_s, self._answer, collecting)

    def _answer(self, collecting: _Collecting) -> None:
        self._forget(collecting)
        values = [self._values.get(key) for key in collecting.keys]
        collecting.peer.send(*frame_parts(StoreCall.DONE, body=msgspec.msgpack.encode(values)))

    def _forget(self, collecting: _Collecting) -> None:
        if collecting.timer is not None:
            collecting.timer.cancel()
        for key in collecting.missing:
            left = [other for other in self._collecting.get(key, ()) if other is not collecting]
            if left:
                self._collecting[key] = left
            else:
                self._collecting.pop(key, None)


class StoreServer:
    """The server of a store at one address, until :meth:`close`. The constructor raises AddressError if it cannot
    listen.
    """

    def __init__(
        self, address: Address, token: str, hello: Hello, tls: TLS | None = None, *, store: ServedStore | None = None
    ) -> None:
        self._store = store or ServedStore()
        self._ready: Future[Listener] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._transport = SocketTransport(token, tls=tls, limits=LIMITS)
        self._thread = threading.Thread(
            target=self._run, args=(address, hello), name="paceline-store-server", daemon=True
        )
        self._thread.start()
        try:
            self._listener = self._ready.result()
        except BaseException:
            self._thread.join()
            raise
        self.address = Address("tcp", address.host, self._listener.endpoint.tcp.port)

    def _run(self, address: Address, hello: Hello) -> None:
        loop = asyncio.SelectorEventLoop()  # Ray's workers have uvloop as the default, which has other transports
        try:
            loop.run_until_complete(self._serve(address, hello))
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
        finally:
            loop.close()

    async def _serve(self, address: Address, hello: Hello) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        listener = await self._transport.serve(self._store, hello, address=address, unix=False)
        try:
            self._ready.set_result(listener)
            await self._stop.wait()
            deadline = time.monotonic() + _LINGER_S
            while listener.num_connections and time.monotonic() < deadline:
                await asyncio.sleep(0.005)  # other ranks may still read values until they disconnect
        finally:
            await listener.close()

    def call_soon(self, function: Callable[[], None]) -> None:
        """Call a function in the event loop's thread, unless the loop has ended. Thread-safe."""
        if self._thread.is_alive() and self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(function)
            except RuntimeError:
                pass  # the event loop has ended

    def call(self, function: Callable[[], _Result]) -> _Result:
        """Call a function in the event loop's thread. Return its result, or raise its error."""
        done: Future[_Result] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)

        self.call_soon(run)
        return done.result(_ANSWER_S)

    def close(self) -> None:
        """Stop serving when all clients have disconnected, or after two seconds. Idempotent."""
        if self._stop is not None:
            self.call_soon(self._stop.set)
        self._thread.join()


class NetworkStore(Store):
    """A client of rank 0's store. In the process of rank 0, the client also owns and closes the server."""

    server_rank = 0

    def __init__(
        self,
        address: Address,
        token: str,
        hello: Hello,
        *,
        timeout_s: float,
        server: StoreServer | None = None,
        answer_s: float = _ANSWER_S,
        tls: TLS | None = None,
    ) -> None:
        """Connect to the store. Raises the errors of :meth:`Transport.connect`.

        `answer_s` is the maximum time until an answer, in addition to the time for which the request itself may wait.
        """
        self.address, self.place = address, address.netloc
        self._answer_s = min(answer_s, _ANSWER_S)
        self._transport = SocketTransport(token, tls=tls, limits=LIMITS)
        self._hello = hello
        self._server = server
        self._lock = threading.Lock()
        self._is_closed = False
        self._busy: set[Channel] = set()
        first = self._transport.connect(address, hello, timeout_s=timeout_s)
        self.peer = first.peer
        """The Hello (identity) that the server sent in the handshake."""
        self._idle = [first]

    @override
    def set(self, key: str, value: bytes) -> None:
        self.call(StoreCall.SET, self._answer_s, meta=msgspec.msgpack.encode(StoreRequest(key)), body=value)

    @override
    def collect(self, keys: Sequence[str], deadline: float) -> list[bytes | None]:
        while True:
            left = min(max(deadline - time.monotonic(), 0.0), _MAX_COLLECT_S)
            request = CollectRequest(tuple(keys), left)
            answer = self.call(StoreCall.COLLECT, left + self._answer_s, body=msgspec.msgpack.encode(request))
            values: list[bytes | None] = _decode_values(answer)
            if len(values) != len(keys):
                raise ProtocolError(f"got {len(values)} values from the store for {len(keys)} keys")
            if None not in values or time.monotonic() >= deadline:
                return values

    def replace(self, key: str, expected: bytes | None, value: bytes) -> tuple[bool, bytes | None]:
        """If the value of a key is `expected` (None: the key is not set), replace it.

        Return whether the value was replaced, and the value afterwards.
        """
        meta, body = msgspec.msgpack.encode(StoreRequest(key)), msgspec.msgpack.encode(Replacement(expected, value))
        answer = self.call(StoreCall.REPLACE, self._answer_s, meta=meta, body=body)
        replaced: tuple[bool, bytes | None] = _decode_replaced(answer)
        return replaced

    def update(self, key: str, change: Callable[[bytes | None], bytes]) -> bytes:
        """Replace the value of a key by ``change(value)``, and return the new value.

        `change` is called again if another process has replaced the value in the meantime.
        """
        current = self.find(key)
        while True:
            value = change(current)
            is_replaced, current = self.replace(key, current, value)
            if is_replaced:
                return value

    @override
    def delete(self, key: str) -> None:
        self.call(StoreCall.DELETE, self._answer_s, meta=msgspec.msgpack.encode(StoreRequest(key)))

    def disown(self) -> None:
        """In a forked child, close the copies of the connections, so that the connections end with the parent."""
        self._is_closed = True
        null = os.open(os.devnull, os.O_RDWR)
        for number in [channel.fileno() for channel in (*self._idle, *self._busy)]:
            if number >= 0:
                os.dup2(null, number, inheritable=False)  # os.close() would free a number that the channel still uses
        os.close(null)

    @override
    def close(self) -> None:
        """Close the connections. Calls that wait in other threads then raise GroupClosedError."""
        with self._lock:
            self._is_closed = True
            channels = [*self._idle, *self._busy]
            self._idle = []
        for channel in channels:
            channel.close()
        if self._server is not None:
            self._server.close()

    def call(self, kind: StoreCall, timeout_s: float, *, meta: bytes = b"", body: bytes = b"") -> bytes:
        """Send a request on a connection that no other call uses, and return the body of the answer."""
        channel = self._take(timeout_s)
        is_answered = False
        try:
            channel.send(*frame_parts(kind, meta=meta, body=body))
            answer = channel.receive_frame(timeout_s)
            is_answered = True
            return bytes(answer.body)
        except PacelineError as error:
            is_answered = isinstance(error, UsageError)  # the server answered; other errors break the connection
            self._raise_if_closed()
            raise
        finally:
            with self._lock:
                self._busy.discard(channel)
                keep = is_answered and not self._is_closed
                if keep:
                    self._idle.append(channel)
            if not keep:
                channel.close()

    def _take(self, timeout_s: float) -> Channel:
        self._raise_if_closed()
        with self._lock:
            channel = self._idle.pop() if self._idle else None
            if channel is not None:
                self._busy.add(channel)
        if channel is not None:
            return channel
        channel = self._transport.connect(self.address, self._hello, timeout_s=min(timeout_s, self._answer_s))
        with self._lock:
            self._busy.add(channel)
        self._raise_if_closed(channel)
        return channel

    def _raise_if_closed(self, channel: Channel | None = None) -> None:
        if self._is_closed:
            if channel is not None:
                channel.close()
            raise GroupClosedError("the store was closed during a call") from None
