"""What a frame looks like on the wire. Pure: bytes in, values out.

A frame is a header of 40 bytes, ``meta`` (msgpack, for control) and ``body`` (raw little-endian arrays)::

    0      2        3     4      6      8        12     16     20        28          32          40
    | magic | version | kind | flags | table | request | epoch | clock | sequence | meta_bytes | body_bytes |

All fields are unsigned and little-endian. ``meta`` and ``body`` are each padded with zeros to a multiple of 8
bytes, which the two lengths do not count: so every part of every frame begins 8-aligned, and an array can be
used where it was received. Kinds 0 to 15 belong to the transport (:class:`FrameKind`); what the others mean, it
does not know.
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
"""Something contiguous that can be sent."""
WritableBuffer: TypeAlias = memoryview | NDArray[Any]
"""Something contiguous that can be received into."""

HEADER: Final = struct.Struct("<HBBHHIIIQIQ")
HEADER_BYTES: Final = HEADER.size
MAGIC: Final = 0x4C50
PROTOCOL_VERSION: Final = 2
FIRST_APPLICATION_KIND: Final = 16

PADS: Final = tuple(bytes(size) for size in range(8))
"""What is put behind a part of a frame of so many bytes, by ``-size & 7``: parts begin at multiples of 8."""


class FrameKind(IntEnum):
    """The kinds of frames that the transport keeps for itself."""

    CHALLENGE = 1
    """Server to client, the first frame of a connection: prove that you hold the token."""
    HELLO = 2
    """Client to server: who I am, my proof, and prove that you hold it."""
    WELCOME = 3
    """Server to client: who I am, and my proof."""
    REFUSED = 4
    """Server to client, the last frame of a connection: why it is being closed."""
    ERROR = 5
    """Server to client: the request of this number failed; the connection lives on."""


class Header(NamedTuple):
    """The header of a frame. A tuple, because nothing that has names is built faster."""

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
    """What a peer may ask of our memory. Checked from the header, before any memory is taken."""

    max_frame_bytes: int = 1 << 30
    """The longest frame: header, meta, body and padding."""
    max_handshake_bytes: int = 4096
    """The longest frame of a peer that has not yet proved that it holds the token."""
    max_meta_bytes: int = 1 << 26
    """The longest meta part."""
    max_backlog_bytes: int = 1 << 28
    """Replies that wait for a peer to read them, beyond which the server stops reading its requests."""


def pack_header(kind: int, **fields: int) -> bytes:
    """Return the 40 bytes of a header, given by the names of :class:`Header`; lengths are without padding.

    For frames that are sent in pieces, or are wrong on purpose: `frame_parts` makes whole ones.
    """
    return HEADER.pack(*Header(kind=kind, **fields))


def unpack_header(buffer: bytes | bytearray | memoryview, offset: int = 0) -> Header:
    """Read a header; raise ProtocolError on another magic, VersionError on another version."""
    if len(buffer) - offset < HEADER_BYTES:
        raise ProtocolError(
            f"a frame's header is {HEADER_BYTES} bytes, {len(buffer) - offset} were got; the connection is closed"
        )
    header: Header = tuple.__new__(Header, HEADER.unpack_from(buffer, offset))
    if header[0] != MAGIC or header[1] != PROTOCOL_VERSION:
        raise not_a_header(header, bytes(memoryview(buffer)[offset : offset + 16]))
    return header


def not_a_header(header: Header, first: bytes) -> ProtocolError | VersionError:
    """Return the error for a header whose magic or version is not ours; ``first`` are its first bytes."""
    if header.magic != MAGIC:
        return ProtocolError(
            f"got bytes that are no Paceline frame: they begin with {first!r}, a frame begins with "
            f"{MAGIC.to_bytes(2, 'little')!r}; the connection is closed"
        )
    return VersionError(
        f"the peer speaks protocol version {header.version}, this process version {PROTOCOL_VERSION}; the "
        "connection is closed: install the same version of paceline on both"
    )


def padded(size: int) -> int:
    """Return ``size`` in bytes with the padding that follows it on the wire."""
    return (size + 7) & -8


def frame_bytes(header: Header) -> int:
    """Return the size of the whole frame on the wire, in bytes."""
    return HEADER_BYTES + ((header[9] + 7) & -8) + ((header[10] + 7) & -8)


def view_of(buffer: Buffer) -> memoryview:
    """Return the memory of a buffer as bytes."""
    given: Any = buffer  # that an array is a buffer, its type says only from Python 3.12 on
    return memoryview(given).cast("B") if size_of(buffer) else memoryview(b"")


def size_of(buffer: Buffer) -> int:
    """Return the size of a buffer in bytes, whatever the type of its items."""
    return len(buffer) if isinstance(buffer, (bytes, bytearray)) else buffer.nbytes


def body_parts(body: Buffer | Sequence[Buffer]) -> Sequence[Buffer]:
    """Return a body given whole or in parts as its parts."""
    return (body,) if isinstance(body, (bytes, bytearray, memoryview, np.ndarray)) else body


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
    """Return a frame as the buffers that make it up, padding included, without copying any of them.

    ``body`` is one buffer or several that follow each other without gaps.
    """
    parts = body_parts(body)
    meta_bytes, body_bytes = size_of(meta), 0
    for part in parts:
        body_bytes += size_of(part)
    header = HEADER.pack(
        MAGIC, PROTOCOL_VERSION, kind, flags, table, request, epoch, clock, sequence, meta_bytes, body_bytes
    )
    return [header, meta, PADS[-meta_bytes & 7], *parts, PADS[-body_bytes & 7]]


def join(parts: Sequence[Any]) -> bytes:
    """Return the buffers as one, copied."""
    return b"".join(parts)
