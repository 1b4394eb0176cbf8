"""The format of frames, the messages between processes. This module does no I/O.

A frame is a header of 40 bytes, ``meta`` (control data in msgpack) and ``body`` (raw little-endian arrays)::

    0      2        3     4      6      8        12     16     20        28          32          40
    | magic | version | kind | flags | table | request | epoch | clock | sequence | meta_bytes | body_bytes |

All fields are unsigned and little-endian. ``meta`` and ``body`` are each padded with zeros to a multiple of 8 bytes, so
that every part of a frame begins at a multiple of 8, and arrays can be used in place. ``meta_bytes`` and ``body_bytes``
do not include the padding. Kinds 0 to 15 belong to the transport (:class:`FrameKind`). Applications define the other
kinds.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ProtocolError, VersionError

Buffer: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]
"""A contiguous buffer to send."""
WritableBuffer: TypeAlias = memoryview | NDArray[Any]
"""A contiguous buffer to receive into."""

HEADER: Final = struct.Struct("<HBBHHIIIQIQ")
HEADER_BYTES: Final = HEADER.size
MAGIC: Final = 0x4C50
PROTOCOL_VERSION: Final = 2
FIRST_APPLICATION_KIND: Final = 16

PADS: Final = tuple(bytes(size) for size in range(8))
"""The possible paddings. ``PADS[-size & 7]`` follows a part of ``size`` bytes: parts begin at multiples of 8."""


class FrameKind(IntEnum):
    """Frame kinds reserved for the transport."""

    CHALLENGE = 1
    """The server's first frame. It requests a proof that the client has the token."""
    HELLO = 2
    """The client's reply to CHALLENGE: its identity, its proof, and a random number (nonce) for the server's proof."""
    WELCOME = 3
    """The server's reply to HELLO: its identity and its proof that it has the token."""
    REFUSED = 4
    """The server's last frame on a connection. It contains the reason for which the server closes the connection."""
    ERROR = 5
    """The server's report that the request with this number has failed. The connection stays open."""


class Header(NamedTuple):
    """The header of a frame. It is a NamedTuple, the fastest class with named fields."""

    magic: int = MAGIC
    version: int = PROTOCOL_VERSION
    kind: int = 0
    flags: int = 0
    table: int = 0
    request: int = 0
    epoch: int = 0
    clock: int = 0
    sequence: int = 0
    meta_bytes: int = 0
    body_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits on the memory that a peer can occupy. The receiver of a frame checks them before it allocates memory."""

    max_frame_bytes: int = 1 << 30
    """The maximum size of a frame, with header, meta, body and padding."""
    max_handshake_bytes: int = 4096
    """The maximum size of a frame from an unauthenticated peer."""
    max_meta_bytes: int = 1 << 26
    """The maximum size of the meta part of a frame."""
    max_backlog_bytes: int = 1 << 28
    """If a client's unread replies exceed this size, the server stops reading the client's requests."""


def pack_header(kind: int, **fields: int) -> bytes:
    """Return the 40 bytes of a header with these fields of :class:`Header`. The lengths do not include padding.

    This function is for frames that are sent in pieces, and for malformed frames in tests. `frame_parts` creates whole
    frames.
    """
    return HEADER.pack(*Header(kind=kind, **fields))


def unpack_header(buffer: bytes | bytearray | memoryview, offset: int = 0) -> Header:
    """Read a header. Raises ProtocolError for a wrong magic number, VersionError for another version."""
    if len(buffer) - offset < HEADER_BYTES:
        raise ProtocolError(
            f"a frame's header has {HEADER_BYTES} bytes, got {len(buffer) - offset}. The connection is closed"
        )
    header: Header = tuple.__new__(Header, HEADER.unpack_from(buffer, offset))
    if header[0] != MAGIC or header[1] != PROTOCOL_VERSION:
        raise not_a_header(header, bytes(memoryview(buffer)[offset : offset + 16]))
    return header


def not_a_header(header: Header, first: bytes) -> ProtocolError | VersionError:
    if header.magic != MAGIC:
        return ProtocolError(
            f"got bytes that are not a Paceline frame: they begin with {first!r}, but a frame begins with "
            f"{MAGIC.to_bytes(2, 'little')!r}. The connection is closed"
        )
    return VersionError(
        f"the peer has protocol version {header.version}, but this process has version {PROTOCOL_VERSION}. The "
        "connection is closed. Install the same version of paceline on both"
    )


def padded(size: int) -> int:
    """Return the number of bytes that a part of ``size`` bytes occupies in a frame, a multiple of 8."""
    return (size + 7) & -8


def frame_bytes(header: Header) -> int:
    return HEADER_BYTES + ((header[9] + 7) & -8) + ((header[10] + 7) & -8)


def view_of(buffer: Buffer) -> memoryview:
    given: Any = buffer  # typed as Any, because before Python 3.12 the type of arrays lacks the buffer protocol
    return memoryview(given).cast("B") if size_of(buffer) else memoryview(b"")


def size_of(buffer: Buffer) -> int:
    return len(buffer) if isinstance(buffer, (bytes, bytearray)) else buffer.nbytes


def frame_parts(
    kind: int,
    *,
    flags: int = 0,
    table: int = 0,
    request: int = 0,
    epoch: int = 0,
    clock: int = 0,
    sequence: int = 0,
    meta: Buffer = b"",
    body: Buffer | Sequence[Buffer] = (),
) -> list[Buffer]:
    """Return a frame as a list of buffers, including padding. The buffers are not copied.

    ``body`` is one buffer, or a sequence of buffers that together form the body.
    """
    parts = (body,) if isinstance(body, (bytes, bytearray, memoryview, np.ndarray)) else body
    meta_bytes, body_bytes = size_of(meta), 0
    for part in parts:
        body_bytes += size_of(part)
    header = HEADER.pack(
        MAGIC, PROTOCOL_VERSION, kind, flags, table, request, epoch, clock, sequence, meta_bytes, body_bytes
    )
    return [header, meta, PADS[-meta_bytes & 7], *parts, PADS[-body_bytes & 7]]


def join(parts: Sequence[Any]) -> bytes:
    return b"".join(parts)
