"""The node of a process: it accepts and authenticates connections of other ranks, and passes them to its groups.

Each handshake runs in a short-lived thread, so that a silent client does not block other clients. If too many
connections are not authenticated, the oldest is dropped. The client's Hello (identity) contains the name of the group,
the client's rank in the group, and the purpose of the connection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal, Protocol, TypeAlias

import msgspec

from paceline.errors import (
    AddressError,
    ConnectionLostError,
    DeadlineError,
    GroupClosedError,
    PacelineError,
    PeerError,
)
from paceline.transport import TLS
from paceline.transport.addresses import (
    Address,
    Endpoint,
    bind_tcp,
    host_identity,
    namespace,
)
from paceline.transport.backoff import Backoff
from paceline.transport.client import open_socket, shut
from paceline.transport.decoding import read_meta
from paceline.transport.security.authentication import Hello, check_token
from paceline.transport.security.unauthenticated import UnauthenticatedConnections
from paceline.transport.streams import connect_stream, welcome_stream
from paceline.transport.unix_sockets import bind_unix, has_unix_sockets, is_other_user, remove_unix

Purpose: TypeAlias = Literal["collective", "p2p", "rpc", "status"]

_logger = logging.getLogger("paceline.meeting")
_HANDSHAKE_S = 10.0
_MAX_STRANGERS = 64
"""The maximum number of connections that are not authenticated yet."""
_NUM_ATTEMPTS = 4
"""The number of attempts to connect. An attempt fails if the node drops it because of too many connections."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.03, 0.12
_MAX_ANSWER_BYTES = 1 << 20
_KEEPALIVE = (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
"""The keepalive settings of TCP connections. With these settings the system detects the loss of a host after 40 s."""


class NodeInfo(msgspec.Struct, frozen=True):
    """The address and the properties of a node, which all ranks receive when they join the program."""

    id: str
    """A random id, which later nodes at the address of this node do not have."""
    endpoint: Endpoint
    pid: int
    memory_domain: str
    """A string that is equal for two nodes if and only if their processes can share memory."""
    algorithm: str = ""
    """The collective algorithm that the user of this rank selected; empty if the tuner chooses one."""

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> NodeInfo:
        """Decode the result of :meth:`encode`. Raises ProtocolError for other data."""
        info: NodeInfo = read_meta(data, cls, "a description of a node")
        return info


class ConnectionReceiver(Protocol):
    """An object that receives all connections of one group and purpose. The threads of the node call its methods."""

    def coming(self, rank: int) -> None:
        """Record that a connection of ``rank`` is in its handshake, so that ``arrived`` will be called.

        The method must not wait, and must not call methods of the node.
        """

    def arrived(self, rank: int, connected: socket.socket | None) -> None:
        """Take over a non-blocking connection of ``rank``. ``connected`` is None if the handshake failed."""


def memory_domain() -> str:
    """Return a string that is equal in two processes if and only if they can share memory.

    They must have the same host, user and process namespace.
    """
    try:
        shared = f"shm:{os.stat('/dev/shm').st_dev}"
    except OSError:
        shared = ""
    user = f"uid:{os.getuid()}" if hasattr(os, "getuid") else ""
    return "/".join(filter(None, (host_identity(), namespace("pid"), user, shared)))


class Node:
    """A listener for connections of other ranks, from its construction to :meth:`close`.

    A node is thread-safe. It cannot be used in a forked child process.
    """

    def __init__(self, token: str, *, host: str = "127.0.0.1", tls: TLS | None = None) -> None:
        """Listen on a free port of ``host`` and on a Unix socket. With ``tls``, TCP connections are encrypted.

        Raises AddressError if this process cannot listen on ``host``, and UsageError for an invalid file of ``tls``.
        """
        self._token = check_token(token)
        self._server_context = None if tls is None else tls.server_context()
        self._client_context = None if tls is None else tls.client_context()
        self._certificate = b"" if tls is None else tls.certificate()
        listening = bind_tcp(Address("tcp", host, 0))
        unix: Address | None = None
        if has_unix_sockets():
            try:
                on_host, unix = bind_unix()
                listening.append(on_host)
            except (AddressError, OSError) as error:
                _logger.warning("cannot create a Unix socket, so TCP is used on this host too: %s", error)
        number = secrets.token_hex(8)
        endpoint = Endpoint(Address("tcp", host, listening[0].getsockname()[1]), unix, host_identity(), number)
        self.info = NodeInfo(number, endpoint, os.getpid(), memory_domain())
        self._changed = threading.Condition()
        self._is_closed = False
        self._parked: dict[tuple[str, int, str], deque[socket.socket]] = {}
        self._receivers: dict[tuple[str, str], ConnectionReceiver] = {}
        self._statuses: dict[str, Callable[[], bytes]] = {}
        self._greeters: dict[threading.Thread, socket.socket | None] = {}  # each thread and its handshake's socket
        self._strangers: UnauthenticatedConnections[socket.socket] = UnauthenticatedConnections(_MAX_STRANGERS)
        self._waker, self._wakened = socket.socketpair()
        self._thread = threading.Thread(
            target=self._accept_all, args=(listening,), name="paceline-acceptor", daemon=True
        )
        self._thread.start()

    def connect(self, info: NodeInfo, group: str, rank: int, purpose: Purpose, deadline: float) -> socket.socket:
        """Connect to another node as rank ``rank`` of the group, and return a non-blocking socket.

        Raises AddressError (no process listens there), DeadlineError, AuthenticationError or another PeerError.
        """
        return ready(self._open(info, group, rank, purpose, deadline))

    def accept(self, group: str, rank: int, purpose: Purpose, deadline: float) -> socket.socket:
        """Wait until ``rank`` of the group connects, and return a non-blocking socket. Raises DeadlineError."""
        key = (group, rank, purpose)
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: self._is_closed or self._parked.get(key), max(deadline - time.monotonic(), 0.0)
            )
            if self._is_closed:
                raise GroupClosedError("the node was closed while it waited for a connection")
            if not arrived:
                raise DeadlineError(f"rank {rank} of group {group!r} did not connect in time")
            connected = self._parked[key].popleft()
            if not self._parked[key]:
                del self._parked[key]
            return connected

    def take(self, group: str, purpose: Purpose, receiver: ConnectionReceiver) -> None:
        """Pass all connections of this group and purpose to ``receiver``, including those that already wait."""
        with self._changed:
            self._receivers[group, purpose] = receiver
            waiting = [key for key in self._parked if key[0] == group and key[2] == purpose]
            parked = [(key[1], connected) for key in waiting for connected in self._parked.pop(key)]
        for rank, connected in parked:
            receiver.coming(rank)
            receiver.arrived(rank, connected)

    def set_status(self, group: str, status: Callable[[], bytes]) -> None:
        """Set the function that returns the answer to other ranks' :meth:`request_status`.

        A thread of the node calls the function, which must not wait.
        """
        with self._changed:
            self._statuses[group] = status

    def request_status(self, info: NodeInfo, group: str, timeout_s: float) -> bytes | None:
        """Request the status of another rank in a group, and return its answer. It is empty without such a group.

        Return None if there is no answer in time, because the process is stopped or its machine is unreachable. Raises
        AddressError if the process has ended, and PeerError if the connection broke.
        """
        deadline = time.monotonic() + timeout_s
        try:
            connected = self._open(info, group, -1, "status", deadline)
            with connected:
                parts = bytearray()
                while True:
                    connected.settimeout(max(deadline - time.monotonic(), 1e-3))
                    part = connected.recv(1 << 16)
                    if not part or len(parts) > _MAX_ANSWER_BYTES:
                        return bytes(parts)
                    parts += part
        except (DeadlineError, TimeoutError):
            return None
        except OSError as error:
            raise PeerError(f"the node at {info.endpoint} broke the connection ({error})") from None

    def is_listening(self, info: NodeInfo, timeout_s: float = 1.0) -> bool:
        """Return whether a process listens at another node's address. A stopped process still listens."""
        try:
            open_socket(info.endpoint.best(), timeout_s).close()
        except AddressError:
            return False
        except DeadlineError:
            pass
        return True

    def forget(self, group: str) -> None:
        """Close the waiting connections of a group, and answer no more status requests for the group."""
        with self._changed:
            self._statuses.pop(group, None)
            for taken in [key for key in self._receivers if key[0] == group]:
                del self._receivers[taken]
            for key in [key for key in self._parked if key[0] == group]:
                for connected in self._parked.pop(key):
                    connected.close()

    def close(self) -> None:
        """Stop listening, close waiting connections and remove the Unix socket. Idempotent."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
            for greeted in self._greeters.values():
                if greeted is not None:
                    shut(greeted)
            for parked in self._parked.values():
                for connected in parked:
                    connected.close()
            self._parked.clear()
        with contextlib.suppress(OSError):  # raised if the thread that accepts connections has already ended
            self._waker.send(b"\0")
        self._thread.join()
        for greeter in list(self._greeters):
            greeter.join()
        self._waker.close()
        if self.info.endpoint.unix is not None:
            remove_unix(self.info.endpoint.unix)

    def _open(self, info: NodeInfo, group: str, rank: int, purpose: Purpose, deadline: float) -> socket.socket:
        hello = Hello(role=purpose, rank=rank, name=self.info.id, extra={"group": group})
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, spread=0.5)
        for _ in range(_NUM_ATTEMPTS - 1):
            with contextlib.suppress(ConnectionLostError):
                return self._introduce(info, hello, deadline)
            time.sleep(backoff.next_s())
        return self._introduce(info, hello, deadline)

    def _introduce(self, info: NodeInfo, hello: Hello, deadline: float) -> socket.socket:
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineError(f"no time was left to connect to {info.endpoint}")
        address = info.endpoint.best()
        try:
            return self._stream(address, hello, left, info)
        except AddressError:
            if address == info.endpoint.tcp:
                raise
        left = max(deadline - time.monotonic(), 1e-3)
        return self._stream(info.endpoint.tcp, hello, left, info)

    def _stream(self, address: Address, hello: Hello, timeout_s: float, info: NodeInfo) -> socket.socket:
        context = self._client_context if address.scheme == "tcp" else None
        return connect_stream(address, self._token, hello, timeout_s, listener=info.id, context=context)[0]

    # The following methods run in the threads that accept connections and do handshakes.

    def _accept_all(self, listening: list[socket.socket]) -> None:
        with selectors.DefaultSelector() as selector:
            for listener in (*listening, self._wakened):
                selector.register(listener, selectors.EVENT_READ)
            while not self._is_closed:
                for key, _ in selector.select():
                    if key.fileobj is not self._wakened:
                        assert isinstance(key.fileobj, socket.socket)
                        self._accept(key.fileobj)
        for listener in (*listening, self._wakened):
            listener.close()

    def _accept(self, listening: socket.socket) -> None:
        try:
            connected, peer = listening.accept()
        except OSError as error:
            if not isinstance(error, (BlockingIOError, ConnectionError)):
                _logger.warning("cannot accept a connection: %s", error)
                time.sleep(0.05)  # probably all file descriptors are in use; wait until some are free
            return
        if is_other_user(connected):
            connected.close()
            return
        greeter = threading.Thread(target=self._greet, args=(connected,), name="paceline-greeter", daemon=True)
        with self._changed:
            if self._is_closed:
                connected.close()
                return
            self._greeters[greeter] = connected
            dropped = self._strangers.add(connected, peer[0] if isinstance(peer, tuple) else "")
            greeter.start()
        if dropped is not None:
            _logger.debug("too many connections before authentication; dropped the oldest")
            # Only the thread of the handshake may close the socket. Otherwise the thread could use the descriptor after
            # the system has given it to another connection.
            with contextlib.suppress(OSError):
                dropped.shutdown(socket.SHUT_RDWR)

    def _greet(self, connected: socket.socket) -> None:
        expected: list[tuple[ConnectionReceiver, int]] = []

        def expect(hello: Hello) -> None:
            with self._changed:
                self._strangers.remove(connected)
                receiver = self._receivers.get((_group_of(hello), hello.role))
            if receiver is not None:
                expected.append((receiver, hello.rank))
                receiver.coming(hello.rank)

        handed: socket.socket | None = None
        hello: Hello | None = None
        try:
            connected.setblocking(True)
            own_hello = Hello(role="node", name=self.info.id)
            stream, hello = welcome_stream(
                connected,
                self._token,
                own_hello,
                _HANDSHAKE_S,
                expect,
                listener=self.info.id,
                context=None if connected.family == getattr(socket, "AF_UNIX", None) else self._server_context,
                certificate=self._certificate,
            )
            if hello.role == "status":
                self._answer(stream, _group_of(hello))
                stream.close()
            else:
                handed = ready(stream)
        except (PacelineError, OSError) as error:
            _logger.debug("a connection was refused: %s", error)
        except Exception:
            _logger.exception("cannot answer a request")
        finally:
            with self._changed:
                self._greeters[threading.current_thread()] = None
                self._strangers.remove(connected)
                if handed is not connected:
                    connected.close()
                if handed is None or hello is None or self._is_closed:
                    if handed is not None:
                        handed.close()
                    handed = None
                elif not expected:
                    receiver = self._receivers.get((_group_of(hello), hello.role))
                    if receiver is not None:  # it was registered by take() during the handshake
                        expected.append((receiver, hello.rank))
                        receiver.coming(hello.rank)
                    else:
                        self._parked.setdefault((_group_of(hello), hello.rank, hello.role), deque()).append(handed)
                        self._changed.notify_all()
            for receiver, rank in expected:
                receiver.arrived(rank, handed)
            with self._changed:
                self._greeters.pop(threading.current_thread(), None)

    def _answer(self, connected: socket.socket, group: str) -> None:
        with self._changed:
            answer = self._statuses.get(group)
        connected.settimeout(_HANDSHAKE_S)
        if answer is not None:
            connected.sendall(answer())


def _group_of(hello: Hello) -> str:
    return str(hello.extra.get("group", ""))


def ready(connected: socket.socket) -> socket.socket:
    """Configure a connected socket: non-blocking, without delays, large buffers for Unix sockets, keepalive for TCP."""
    if connected.family == getattr(socket, "AF_UNIX", None):
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connected.setsockopt(socket.SOL_SOCKET, option, 1 << 22)
    else:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            if hasattr(socket, name):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connected.setblocking(False)
    return connected
