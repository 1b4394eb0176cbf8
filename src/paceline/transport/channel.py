"""The client's end of a connection that sends and receives frames on a byte stream."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from paceline.errors import ConnectionLostError, DeadlineError, ProtocolError, UsageError, VersionError
from paceline.transport.addresses import Address
from paceline.transport.base import Channel, Frame, Statistics
from paceline.transport.decoding import error_of
from paceline.transport.frames import (
    HEADER,
    HEADER_BYTES,
    MAGIC,
    PROTOCOL_VERSION,
    Buffer,
    FrameKind,
    Header,
    Limits,
    WritableBuffer,
    frame_bytes,
    join,
    size_of,
    unpack_header,
    view_of,
)
from paceline.transport.receiving import allocate
from paceline.transport.security.authentication import Hello
from paceline.transport.security.sealing import PIECE_BYTES, TAG_BYTES, Seal, Seals, not_sealed

_ERROR = int(FrameKind.ERROR)  # a constant, because each lookup in the enum takes as long as unpacking a header

SMALL_BYTES = 1 << 12
"""Up to this size, frames are copied into one buffer, which is cheaper than sendmsg and recvmsg_into."""


class StreamChannel(Channel):
    """A :class:`Channel` on a byte stream. This class is abstract; its subclasses send and receive the bytes."""

    def __init__(self, address: Address, limits: Limits) -> None:
        self.address = address
        self.peer = Hello(role="server")  # a placeholder until the server sends its Hello
        self._limits = limits
        self._first = bytearray(SMALL_BYTES)  # receives the next header, followed by a small body
        self._first_view = memoryview(self._first)
        self._head_view = self._first_view[:HEADER_BYTES]
        self._pad = memoryview(bytearray(8))
        self._returned = memoryview(b"")  # received bytes that the next read returns again
        self._meta_left = 0
        self._body_left = 0
        self._body_pad = 0
        self._sending: Seal | None = None
        self._receiving: Seal | None = None
        self._tag = memoryview(bytearray(TAG_BYTES))
        self._timeout_s = -1.0
        self._timeout_ms = 0
        self._bytes_received = self._bytes_sent = self._frames_received = self._frames_sent = 0

    def seal(self, seals: Seals) -> None:
        """Send an authentication tag with every later frame, and require tags from the other end."""
        self._sending, self._receiving = seals

    # Subclasses implement these methods. All except `binding` raise ConnectionLostError and DeadlineError.

    @abstractmethod
    def binding(self) -> bytes:
        """Return the channel binding, which only the two ends share (`sealing`)."""

    @abstractmethod
    def _write(self, buffers: Sequence[Any]) -> int:
        """Send all buffers; return their number of bytes."""

    @abstractmethod
    def _read_scattered(self, buffers: Sequence[Any]) -> int:
        """Wait for data, receive it into the buffers in order, and return the number of received bytes."""

    @abstractmethod
    def _read_first(self, size: int) -> int:
        """Wait for data, receive at most ``size`` bytes at the start of ``_first``, and return their number."""

    @abstractmethod
    def _read(self, view: memoryview) -> int:
        """Receive bytes into ``view`` and return their number, which may be smaller than the size of ``view``."""

    @abstractmethod
    def _set_timeout(self, timeout_s: float) -> None:
        """Set the timeout of later reads."""

    @override
    def send(self, *parts: Buffer) -> None:
        self._bytes_sent += self._write(parts) if self._sending is None else self._write_sealed(parts)
        self._frames_sent += 1

    def _write_sealed(self, parts: Sequence[Any]) -> int:
        """Send a frame and its authentication tag.

        Each piece of a large frame is hashed while the previous piece is in flight.
        """
        seal = self._sending
        assert seal is not None
        size = sum(map(size_of, parts))
        if size > self._limits.max_frame_bytes:
            raise too_long(size, self._limits)
        if size <= PIECE_BYTES:
            return self._write((*parts, seal.tag(parts)))
        sent = 0
        for part in parts:
            view = view_of(part)
            for start in range(0, len(view), PIECE_BYTES):
                piece = view[start : start + PIECE_BYTES]
                seal.update(piece)
                sent += self._write((piece,))
        return sent + self._write((seal.end(),))

    @override
    def receive(self, into: WritableBuffer, timeout_s: float) -> Header:
        if self._meta_left or self._body_left or self._returned or self._receiving is not None:
            return self._receive_in_steps(into, timeout_s)
        if timeout_s != self._timeout_s:
            self._change_timeout(timeout_s)
        body_bytes = into.nbytes
        pad = -body_bytes & 7
        size = HEADER_BYTES + body_bytes + pad
        is_small = size <= SMALL_BYTES
        if is_small:
            got = self._read_first(size)
        else:
            buffers = (self._head_view, into, self._pad[:pad]) if pad else (self._head_view, into)
            got = self._read_scattered(buffers)
        header: Header = tuple.__new__(Header, HEADER.unpack_from(self._first))
        if (
            got < HEADER_BYTES
            or header[10] != body_bytes
            or header[9]
            or header[2] == _ERROR
            or header[0] != MAGIC
            or header[1] != PROTOCOL_VERSION
        ):
            # The frame has a meta, or its body has not the expected size. So the received bytes are kept, and the
            # next reads of the meta and the body return them.
            read = self._first if is_small else join((self._head_view, into, self._pad))
            self._returned = memoryview(bytes(read[:got]))
            return self._receive_in_steps(into, timeout_s)
        if is_small:
            if got < size:
                self._fill(self._first_view[got:size], within_frame=True)
            if body_bytes:
                given: Any = into
                memoryview(given).cast("B")[:] = self._first_view[HEADER_BYTES : HEADER_BYTES + body_bytes]
        elif got < size:
            rest = min(got - HEADER_BYTES, body_bytes)
            self._fill(view_of(into)[rest:], within_frame=True)
            if pad:
                self._fill(self._pad[max(got - HEADER_BYTES - body_bytes, 0) : pad], within_frame=True)
        self._bytes_received += size
        self._frames_received += 1
        self.last_header = header
        self.last_meta = b""
        return header

    def _receive_in_steps(self, into: WritableBuffer, timeout_s: float) -> Header:
        header = self.receive_header(timeout_s)
        if header.body_bytes > into.nbytes:
            self.close()
            raise ProtocolError(
                f"{self._peer_name()} answered with a body of {header.body_bytes} bytes, but at most {into.nbytes} "
                "were expected. The connection is closed"
            )
        self.last_meta = self.receive_meta()
        if header.body_bytes:
            self.receive_into(view_of(into)[: header.body_bytes])
        return header

    @override
    def receive_header(self, timeout_s: float) -> Header:
        header = self.next_header(timeout_s)
        if header.kind == FrameKind.ERROR or header.kind == FrameKind.REFUSED:
            meta = self.receive_meta()
            if self._receiving is not None and self._body_left:
                self.receive_into(allocate(self._body_left))  # checks the tag before the error is trusted
            if header.kind == FrameKind.REFUSED:
                self.close()
            raise error_of(meta)
        return header

    def next_header(self, timeout_s: float) -> Header:
        """Receive the header of the next frame.

        Unlike :meth:`receive_header`, do not raise an error that it reports.
        """
        if timeout_s != self._timeout_s:
            self._change_timeout(timeout_s)
        if self._meta_left:
            self.receive_meta()
        if self._body_left:
            self.receive_into(allocate(self._body_left))
        self._fill(self._head_view, within_frame=False)
        header = self._checked_header()
        if self._receiving is not None:
            self._receiving.update(self._head_view)
        self._bytes_received += frame_bytes(header)
        self._frames_received += 1
        self.last_header = header
        self.last_meta = b""
        self._meta_left = header.meta_bytes
        self._body_left = header.body_bytes
        self._body_pad = -header.body_bytes & 7
        self._check_tag_if_complete()
        return header

    def _checked_header(self) -> Header:
        try:
            header = unpack_header(self._head_view)
        except VersionError as error:
            raise VersionError(f"{self._peer_name()} is incompatible: {error}") from None
        except ProtocolError as error:
            self.close()
            raise ProtocolError(f"{self._peer_name()} is not a Paceline server: {error}") from None
        if header.meta_bytes > self._limits.max_meta_bytes or frame_bytes(header) > self._limits.max_frame_bytes:
            self.close()
            raise ProtocolError(
                f"{self._peer_name()} sent a frame that claims {frame_bytes(header)} bytes, but at most "
                f"{self._limits.max_frame_bytes} are allowed. The connection is closed"
            )
        return header

    @override
    def receive_meta(self) -> bytes:
        size, self._meta_left = self._meta_left, 0
        if not size:
            return b""
        meta = bytearray((size + 7) & -8)
        self._fill_frame(memoryview(meta))
        self._check_tag_if_complete()
        return bytes(meta[:size])

    @override
    def receive_into(self, buffer: WritableBuffer) -> None:
        if self._meta_left:
            self.receive_meta()
        size = buffer.nbytes
        if size > self._body_left:
            raise UsageError(f"{size} bytes of the body were requested, but {self._body_left} are left")
        if not size:
            return
        self._fill_frame(view_of(buffer))
        self._body_left -= size
        if not self._body_left and self._body_pad:
            self._fill_frame(self._pad[: self._body_pad])
        self._check_tag_if_complete()

    @override
    def receive_frame(self, timeout_s: float) -> Frame:
        header = self.receive_header(timeout_s)
        meta = self.receive_meta()
        body = allocate(header.body_bytes)
        self.receive_into(body)
        return Frame(header, meta, body)

    @override
    def statistics(self) -> Statistics:
        return Statistics(self._bytes_received, self._bytes_sent, self._frames_received, self._frames_sent)

    def _fill_frame(self, view: memoryview) -> None:
        """Fill ``view`` with the next bytes of the frame. If frames have tags, hash bytes while more bytes arrive."""
        if self._receiving is None:
            self._fill(view, within_frame=True)
            return
        for start in range(0, len(view), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            self._fill(piece, within_frame=True)
            self._receiving.update(piece)

    def _check_tag_if_complete(self) -> None:
        if self._receiving is None or self._meta_left or self._body_left:
            return
        self._fill(self._tag, within_frame=True)
        self._bytes_received += TAG_BYTES
        if not self._receiving.matches(self._tag):
            self.close()
            raise not_sealed(self._peer_name())

    def _fill(self, view: memoryview, *, within_frame: bool) -> None:
        returned = self._returned
        if returned:
            got = min(len(returned), len(view))
            view[:got] = returned[:got]
            self._returned = returned[got:]
            view = view[got:]
            within_frame = True
        deadline = 0.0
        while view:
            try:
                got = self._read(view)
            except DeadlineError:
                if within_frame:
                    self.close()
                raise
            if got == len(view):
                return
            view = view[got:]
            within_frame = True
            # A slow peer may send one byte at a time, so the total time is limited too. The clock is read only after a
            # read that did not fill the view, which is rare.
            time_s = time.monotonic()
            deadline = deadline or time_s + self._timeout_s
            if time_s > deadline:
                self.close()
                raise self._late()

    def _change_timeout(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._set_timeout(max(timeout_s, 1e-6))  # for a socket, a timeout of 0 has another meaning

    def _peer_name(self) -> str:
        peer = self.peer
        return f"{peer.role} {peer.rank} at {self.address}" if peer.paceline else f"the server at {self.address}"

    def _late(self) -> DeadlineError:
        return DeadlineError(f"no answer from {self._peer_name()} within {self._timeout_s:g} s")

    def _lost(self, error: Exception | None = None) -> ConnectionLostError:
        self.close()  # a TLS server waits until the client closes the connection
        cause = f" ({error})" if error is not None else ""
        return ConnectionLostError(f"the connection to {self._peer_name()} was closed{cause}")


def too_long(size: int, limits: Limits) -> UsageError:
    return UsageError(f"the frame has {size} bytes, but at most {limits.max_frame_bytes} are allowed. Split the frame")
