"""Send and receive frames on a connected socket, in the calling threads.

Received bytes first enter the receive buffer. A frame that fits into this buffer is copied out of it. For a larger
frame, only the bytes that are already in the buffer are copied. The other bytes are received directly into the frame's
own memory.

Over a network without TLS, every frame has an authentication tag (`security.sealing`). The key for the tags is derived
from the token and a random number (nonce) of each end.
"""

from __future__ import annotations

import secrets
import select
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from paceline.errors import ConnectionLostError, DeadlineError, ProtocolError, UsageError
from paceline.meeting.rendezvous import is_loopback
from paceline.rpc.wire.messages import LIMITS
from paceline.rpc.wire.shared_bodies import SMALLEST_BYTES, SharedBodies, can_share
from paceline.transport.frames import (
    HEADER,
    HEADER_BYTES,
    MAGIC,
    PADS,
    PROTOCOL_VERSION,
    Buffer,
    Header,
    frame_bytes,
    frame_parts,
    padded,
    size_of,
    unpack_header,
    view_of,
)
from paceline.transport.receiving import allocate
from paceline.transport.security.sealing import TAG_BYTES, Seals, derive_seals, not_sealed
from paceline.transport.spinning import Spinner

_BUFFER_BYTES = 1 << 14
_JOINED_BYTES = 1 << 13
"""Up to this size, a frame is copied into one buffer, because the copy is cheaper than sendmsg with several buffers."""
_IOV_MAX = 512
_STALL_S = 60.0
"""The maximum time without progress in the middle of a frame that is sent or received."""
_LONGEST_POLL_MS = 1 << 30
_NONCE_BYTES = 32
_OFFER = 31  # the kind of the internal frame with which the caller offers shared memory for bodies


class Received(NamedTuple):
    """A received frame, which owns its memory."""

    header: Header
    meta: bytes | memoryview
    body: memoryview


class FramedSocket:
    """One connection that sends and receives frames. Several threads may send at the same time, while one receives."""

    def __init__(self, connected: socket.socket, name: str) -> None:
        self.name = name
        self._socket = connected
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._sending = threading.Lock()
        self._poller = select.poll()
        self._poller.register(connected.fileno(), select.POLLIN)
        self._spin = Spinner().wait
        # Waits in the middle of a frame are short, because the remaining bytes are in flight. A spinner adapts to the
        # length of its waits, so these waits have their own spinner.
        self._within = Spinner().wait
        self._within_sending = Spinner().wait
        self._seals: Seals | None = None
        self._shared: SharedBodies | None = None
        self._may_offer = False
        self._has_large = False  # whether a large body has been received through the socket

    def agree_on_seals(self, token: str, *, connecting: bool, deadline: float) -> None:
        """If this is a network connection without TLS, add an authentication tag to all later frames.

        Both ends must call this method before their first frame.
        """
        if _is_on_host(self._socket):
            return
        own_nonce = secrets.token_bytes(_NONCE_BYTES)
        self._send_all([own_nonce], deadline)
        peer_nonce = allocate(_NONCE_BYTES)
        self._receive_into(peer_nonce, deadline)
        nonces = own_nonce + bytes(peer_nonce) if connecting else bytes(peer_nonce) + own_nonce
        self._seals = derive_seals(token, nonces, b"paceline rpc", connecting=connecting)

    def share_bodies(self) -> None:
        """Permit this end to offer shared memory to the callee at the first large body.

        Only the caller's end may call this method, and only if both ends are on one host.
        """
        self._may_offer = can_share()

    def send(
        self,
        kind: int,
        meta: Buffer = b"",
        body: Sequence[Buffer] = (),
        *,
        deadline: float,
        request: int = 0,
        context: int = 0,
        message: int = 0,
    ) -> None:
        """Send a frame. Return when the frame is in the system's send buffer or in shared memory.

        Raises UsageError if the frame is too long. After ConnectionLostError or DeadlineError, the connection is
        unusable.
        """
        body_bytes = sum(map(size_of, body)) if body else 0
        if body_bytes + len(meta) > LIMITS.max_frame_bytes - (1 << 12) or len(meta) > LIMITS.max_meta_bytes:
            raise UsageError(
                f"the message has {body_bytes + len(meta)} bytes, {len(meta)} outside its arrays; the limits are "
                f"{LIMITS.max_frame_bytes} and {LIMITS.max_meta_bytes}; send it in parts"
            )
        with self._sending:
            slot = 0
            if (body_bytes >= SMALLEST_BYTES or self._has_large) and (self._shared is not None or self._may_offer):
                slot, body, body_bytes = self._through_memory(body, body_bytes, deadline)
            header = HEADER.pack(
                MAGIC, PROTOCOL_VERSION, kind, slot, 0, request, message, 0, context, len(meta), body_bytes
            )
            parts: Sequence[Buffer] = (header, meta, PADS[-len(meta) & 7], *body, PADS[-body_bytes & 7])
            self._send_frame(parts, HEADER_BYTES + len(meta) + body_bytes, deadline)

    def _through_memory(
        self, body: Sequence[Buffer], body_bytes: int, deadline: float
    ) -> tuple[int, Sequence[Buffer], int]:
        """Copy the body to shared memory if possible. Return the frame's flags, and the body and its size to send.

        Flags 0 mean that the body is sent in the frame. Flags n mean that the body is in slot n - 1 of shared memory.
        """
        shared = self._shared
        if shared is None:
            self._may_offer = self._has_large = False
            shared = self._shared = SharedBodies.make()
            if shared is not None:
                path = shared.path.encode()
                offer = frame_parts(_OFFER, meta=path)
                self._send_frame(offer, HEADER_BYTES + len(path), deadline)
        elif (slot := shared.put(body, body_bytes)) is not None:
            return slot + 1, (body_bytes.to_bytes(8, "little"),), 8
        return 0, body, body_bytes

    def _send_frame(self, parts: Sequence[Buffer], size: int, deadline: float) -> None:
        if self._seals is not None:
            parts = [*parts, self._seals.sending.tag(parts)]
        try:
            if size <= _JOINED_BYTES:
                frame = b"".join(parts)  # type: ignore[arg-type]
                sent = self._socket.send(frame)
                if sent != len(frame):
                    self._send_all([frame[sent:]], deadline)
            else:
                self._send_all(parts, deadline)
        except BlockingIOError:
            self._send_all(parts, deadline)
        except OSError as error:
            raise self._lost(error) from None

    def wait_readable(self, timeout_s: float | None, *, spin: bool = True) -> bool:
        """Wait until data or the end of the connection arrives. Return False after the timeout (at most 12 days)."""
        if self._end > self._start:
            return True
        timeout_ms = None if timeout_s is None else _poll_ms(timeout_s)
        return bool(self._spin(self._poller.poll, timeout_ms) if spin else self._poller.poll(timeout_ms))

    def receive(self) -> Received:
        """Receive a frame. After ConnectionLostError, ProtocolError or DeadlineError the socket is unusable."""
        while True:
            received = self._receive_frame()
            header = received.header
            if header.kind == _OFFER:
                if self._shared is None:
                    self._shared = SharedBodies.attach(bytes(received.meta).decode("utf-8", "replace"), self._socket)
                continue
            if not header.flags:
                self._has_large = self._may_offer and (self._has_large or len(received.body) >= SMALLEST_BYTES)
                return received
            if self._shared is None or len(received.body) != 8:
                raise ProtocolError(f"{self.name} sent a body through memory that it does not share")
            size = int.from_bytes(received.body, "little")
            return Received(header, received.meta, self._shared.take(header.flags - 1, size))

    def _receive_frame(self) -> Received:
        deadline = 0.0
        tag_bytes = TAG_BYTES if self._seals is not None else 0
        while True:
            have = self._end - self._start
            if have >= HEADER_BYTES:
                header = unpack_header(self._buffer, self._start)
                size = frame_bytes(header)
                if size > LIMITS.max_frame_bytes or header.meta_bytes > LIMITS.max_meta_bytes:
                    raise ProtocolError(f"{self.name} sent a frame that claims {size} bytes; the connection is closed")
                if have >= size + tag_bytes:
                    return self._small(header, size, tag_bytes)
                if size + tag_bytes > _BUFFER_BYTES:
                    return self._large(header, size)
            if (self._start and self._end == _BUFFER_BYTES) or self._start == self._end:
                self._view[:have] = bytes(self._view[self._start : self._end])
                self._start, self._end = 0, have
            deadline = deadline or time.monotonic() + _STALL_S
            self._end += self._receive_available(self._view[self._end :], deadline)

    def close(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def release(self) -> None:
        with self._sending:
            self._socket.close()
            if self._shared is not None:
                self._shared.close()

    def _small(self, header: Header, size: int, tag_bytes: int) -> Received:
        start = self._start
        meta_at = start + HEADER_BYTES
        body_at = meta_at + padded(header.meta_bytes)
        if self._seals is not None:
            self._seals.receiving.update(self._view[start : start + size])
            self._check_tag(self._view[start + size : start + size + TAG_BYTES])
        meta = bytes(self._view[meta_at : meta_at + header.meta_bytes])
        body = memoryview(b"")
        if header.body_bytes:
            body = allocate(header.body_bytes)
            body[:] = self._view[body_at : body_at + header.body_bytes]
        self._start = start + size + tag_bytes
        if self._start == self._end:
            self._start = self._end = 0
        return Received(header, meta, body)

    def _large(self, header: Header, size: int) -> Received:
        have = min(self._end - self._start, size)
        memory = allocate(size)
        memory[:have] = self._view[self._start : self._start + have]
        self._start += have
        if self._start == self._end:
            self._start = self._end = 0
        self._receive_into(memory[have:], time.monotonic() + _STALL_S)
        if self._seals is not None:
            tag = allocate(TAG_BYTES)
            got = min(self._end - self._start, TAG_BYTES)
            tag[:got] = self._view[self._start : self._start + got]
            self._start += got
            self._receive_into(tag[got:], time.monotonic() + _STALL_S)
            self._seals.receiving.update(memory)
            self._check_tag(tag)
        body_at = HEADER_BYTES + padded(header.meta_bytes)
        return Received(
            header,
            memory[HEADER_BYTES : HEADER_BYTES + header.meta_bytes],
            memory[body_at : body_at + header.body_bytes],
        )

    def _check_tag(self, tag: memoryview) -> None:
        assert self._seals is not None
        if not self._seals.receiving.matches(tag):
            raise not_sealed(self.name)

    def _receive_into(self, view: memoryview, deadline: float) -> None:
        while view:
            got = self._receive_available(view, deadline)
            view = view[got:]
            if len(view):
                deadline = max(deadline, time.monotonic() + _STALL_S)

    def _receive_available(self, view: memoryview, deadline: float) -> int:
        while True:
            try:
                got = self._socket.recv_into(view)
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineError(f"{self.name} stopped in the middle of a message") from None
                self._within(self._poller.poll, _poll_ms(left))
            except OSError as error:
                raise self._lost(error) from None
            else:
                if not got:
                    raise self._lost()
                return got

    def _send_all(self, parts: Sequence[Buffer], deadline: float) -> None:
        views = [view_of(part) for part in parts if size_of(part)]
        first = 0
        while first < len(views):
            try:
                sent = self._socket.sendmsg(views[first : first + _IOV_MAX])
            except BlockingIOError:
                self._wait_writable(deadline)
                continue
            except OSError as error:
                raise self._lost(error) from None
            while first < len(views) and sent >= len(views[first]):
                sent -= len(views[first])
                first += 1
            if sent:
                views[first] = views[first][sent:]

    def _wait_writable(self, deadline: float) -> None:
        poller = select.poll()
        try:
            poller.register(self._socket.fileno(), select.POLLOUT)
        except (OSError, ValueError) as error:
            raise self._lost(error) from None
        left = min(deadline - time.monotonic(), _STALL_S)
        if not self._within_sending(poller.poll, _poll_ms(left)):
            self.close()
            raise DeadlineError(f"{self.name} does not read its messages; the connection is closed")

    def _lost(self, error: Exception | None = None) -> ConnectionLostError:
        cause = f" ({error})" if error is not None else ""
        return ConnectionLostError(f"the connection with {self.name} was closed{cause}")


def _poll_ms(seconds: float) -> float:
    """Convert a timeout to milliseconds for ``poll``, limited to the range of a C int."""
    return min(max(seconds * 1000, 0.0), _LONGEST_POLL_MS)


def _is_on_host(connected: socket.socket | Any) -> bool:
    """Return whether both ends of a connection are on this machine. The local end of a TLS relay counts as an end."""
    if connected.family == getattr(socket, "AF_UNIX", None):
        return True
    return all(is_loopback(place[0].partition("%")[0]) for place in (connected.getsockname(), connected.getpeername()))
