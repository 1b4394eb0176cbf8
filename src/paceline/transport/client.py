"""Channels (clients' blocking connections) on TCP and Unix sockets without TLS.

The socket stays in blocking mode. A poll() waits for the start of a frame. Within a frame, and for sends, the kernel
enforces the timeout (SO_RCVTIMEO, SO_SNDTIMEO). With this method, a round trip of 64 bytes over a Unix socket takes
14.0 µs. With a blocking receive instead of the poll() it takes 16.0 µs. With Python's ``settimeout``, which also polls
before every send, it takes 14.5 µs.
"""

from __future__ import annotations

import math
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from paceline.errors import AddressError, DeadlineError
from paceline.transport.addresses import Address
from paceline.transport.channel import SMALL_BYTES, StreamChannel, too_long
from paceline.transport.connection import enlarge_socket_buffers
from paceline.transport.frames import Limits, size_of, view_of
from paceline.transport.security.sealing import socket_binding
from paceline.transport.spinning import Spinner

_IOV_MAX = 512  # buffers per system call; Linux and macOS support 1024
# A waiting client sends nothing, so only the kernel's keepalive probes detect that the other end lost the connection.
# If the host is unreachable, the kernel closes the connection only after 100 probes, later than the deadline of a call.
_KEEPALIVE = (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 100))


def open_socket(address: Address, timeout_s: float, *, enlarge: bool = True) -> socket.socket:
    """Return a connected socket in blocking mode. Raises AddressError or DeadlineError.

    With ``enlarge``, the socket gets large buffers. Otherwise the system chooses the size of the buffers. For TCP, it
    adapts them to the network.
    """
    try:
        if address.scheme == "unix":
            connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connected.settimeout(timeout_s)
                connected.connect(address.unix_name)
            except BaseException:
                connected.close()
                raise
        else:
            connected = _connect_tcp(address, timeout_s)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _keep_alive(connected)
    except OSError as error:
        raise cannot_reach(address, error, timeout_s) from None
    if enlarge:
        enlarge_socket_buffers(connected)
    connected.settimeout(None)
    return connected


def _keep_alive(connected: socket.socket) -> None:
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _connect_tcp(address: Address, timeout_s: float) -> socket.socket:
    """Try to connect to each address of the host. Each attempt gets an equal share of the remaining time."""
    end = time.monotonic() + timeout_s
    sockaddrs = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    failure = OSError("the host has no address")
    for number, (family, kind, protocol, _, sockaddr) in enumerate(sockaddrs):
        connected = socket.socket(family, kind, protocol)
        try:
            connected.settimeout(max((end - time.monotonic()) / (len(sockaddrs) - number), 0.001))
            connected.connect(sockaddr)
        except OSError as error:
            connected.close()
            failure = error
        except BaseException:
            connected.close()
            raise
        else:
            return connected
    raise failure


def cannot_reach(address: Address, error: OSError, timeout_s: float) -> AddressError | DeadlineError:
    if isinstance(error, socket.gaierror):
        return AddressError(f"cannot reach {address}: the host is unknown ({error.strerror})")
    if isinstance(error, TimeoutError):
        return DeadlineError(f"cannot reach {address}: no answer within {timeout_s:g} s")
    if isinstance(error, (ConnectionRefusedError, FileNotFoundError)):
        return AddressError(
            f"cannot reach {address}: no process listens there. Check the address, and that the server is running"
        )
    return AddressError(f"cannot reach {address}: {error.strerror or error}")


_HUNG_UP = getattr(select, "POLLRDHUP", 0)  # poll() reports POLLHUP and POLLERR without a flag


class _ClosedPoll:
    """Replaces the poll object of a closed channel, because another file may already have the descriptor's number."""

    def register(self, descriptor: int, events: int) -> None:
        pass

    def poll(self, timeout_ms: int) -> list[tuple[int, int]]:
        return [(-1, select.POLLNVAL)]  # the following receive raises the error for a closed socket


_CLOSED_POLL = _ClosedPoll()


class PlainChannel(StreamChannel):
    """A channel on a TCP or Unix socket."""

    def __init__(self, connected: socket.socket, address: Address, limits: Limits, send_timeout_s: float) -> None:
        super().__init__(address, limits)
        self._socket = connected
        self._send_timeout_s = send_timeout_s
        self._kernel_timeout_s = 0.0
        self._wait = Spinner().wait
        self._poller: select.poll | _ClosedPoll = select.poll()
        self._poller.register(connected.fileno(), select.POLLIN)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(send_timeout_s))

    @override
    def binding(self) -> bytes:
        return socket_binding(self._socket, connecting=True)

    def _write(self, buffers: Sequence[Any]) -> int:
        size = 0
        for buffer in buffers:
            size += len(buffer) if type(buffer) is bytes else size_of(buffer)
        if size > self._limits.max_frame_bytes:
            raise too_long(size, self._limits)
        try:
            if size <= SMALL_BYTES:
                sent = self._socket.send(b"".join(buffers))
            else:
                sent = self._socket.sendmsg(buffers[:_IOV_MAX])
            if sent != size:
                self._write_remaining(buffers, sent)
        except BlockingIOError:
            self.close()
            raise DeadlineError(
                f"{self._peer_name()} read no messages for {self._send_timeout_s:g} s. The connection is closed"
            ) from None
        except OSError as error:
            raise self._lost(error) from None
        return size

    def _write_remaining(self, buffers: Sequence[Any], sent: int) -> None:
        for buffer in buffers:
            view = view_of(buffer)
            skipped = min(sent, len(view))
            sent -= skipped
            view = view[skipped:]
            while view:
                view = view[self._socket.send(view) :]

    def _read_first(self, size: int) -> int:
        try:
            if not self._wait(self._poller.poll, self._timeout_ms):
                raise self._late()
            got = self._socket.recv_into(self._first, size)
        except OSError as error:
            raise self._lost(error) from None
        if not got:
            raise self._lost()
        return got

    def _read_scattered(self, buffers: Sequence[Any]) -> int:
        try:
            if not self._wait(self._poller.poll, self._timeout_ms):
                raise self._late()
            got = self._socket.recvmsg_into(buffers)[0]
        except OSError as error:
            raise self._lost(error) from None
        if not got:
            raise self._lost()
        return got

    def _read(self, view: memoryview) -> int:
        if self._kernel_timeout_s != self._timeout_s:
            self._set_kernel_timeout()
        try:
            got = self._socket.recv_into(view, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise self._late() from None
        except OSError as error:
            raise self._lost(error) from None
        if not got:
            raise self._lost()
        return got

    def _set_kernel_timeout(self) -> None:
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(self._timeout_s))
        except OSError as error:
            raise self._lost(error) from None
        self._kernel_timeout_s = self._timeout_s

    def _set_timeout(self, timeout_s: float) -> None:
        self._timeout_ms = math.ceil(timeout_s * 1000)

    @override
    def poll(self, timeout_s: float) -> bool:
        return bool(self._returned) or wait_readable(self._socket, timeout_s)

    @override
    def has_ended(self) -> bool:
        return is_hung_up(self._socket)

    @override
    def fileno(self) -> int:
        return self._socket.fileno()

    @override
    def close(self) -> None:
        self._poller = _CLOSED_POLL
        shut(self._socket)


def closed_channel(address: Address) -> PlainChannel:
    """Return a channel that was never connected: every operation raises ConnectionLostError."""
    channel = PlainChannel(socket.socket(), address, Limits(), 1.0)
    channel.close()
    return channel


def _timeval(seconds: float) -> bytes:
    whole_seconds = int(seconds)
    return struct.pack("@ll", whole_seconds, max(int((seconds - whole_seconds) * 1e6), 0 if whole_seconds else 1))


def wait_readable(connected: socket.socket, timeout_s: float) -> bool:
    """Wait for data or the end of the connection; return False after the timeout."""
    number = connected.fileno()
    if number < 0:
        return True
    poller = select.poll()
    poller.register(number, select.POLLIN)
    return bool(poller.poll(max(timeout_s, 0.0) * 1000))


def is_hung_up(connected: socket.socket) -> bool:
    """Return whether a socket is closed, or its other end has hung up, even if data is unread."""
    number = connected.fileno()
    if number < 0:
        return True
    poller = select.poll()
    poller.register(number, _HUNG_UP)
    return bool(poller.poll(0))


def shut(connected: socket.socket) -> None:
    """Close a socket and wake the thread that waits for data on the socket."""
    try:
        # SSLSocket.shutdown would drop the TLS object, which another thread may be using. The method of the base class
        # does not.
        socket.socket.shutdown(connected, socket.SHUT_RDWR)
    except OSError:
        pass
    connected.close()
