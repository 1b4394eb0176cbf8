"""The format of the messages that ranks exchange in collectives. Pure.

A message is a header of 32 bytes, a text (in msgpack format) and a body (the raw bytes of blocks)::

    0       2         3      4            8          16          24       32
    | magic | version | kind | text_bytes | sequence | signature | nbytes | text, padded to 16 | body |

All fields are unsigned and little-endian. ``nbytes`` counts the body only. The text of a DATA message describes the
sender's call in about 60 bytes, so that the receiver of an unexpected message can report the sender's call and its own.
The receiver of a DATA message compares the header's bytes with the bytes that it expects, and parses the header only if
they differ. The text of an ABORT message is an :class:`Abort`. It has no body and is the last message on its link.
"""

from __future__ import annotations

import functools
import struct
from collections import deque
from enum import IntEnum
from typing import Final, NamedTuple

import msgspec

from paceline.collectives.aborts import Abort
from paceline.collectives.calls import CollectiveCall
from paceline.decoded_types import register_type
from paceline.errors import ProtocolError
from paceline.transport.decoding import UNREADABLE

HEADER: Final = struct.Struct("<HBBIQQQ")
HEADER_BYTES: Final = HEADER.size
MAGIC: Final = 0x4350
WIRE_VERSION: Final = 1
MAX_TEXT_BYTES: Final = 1 << 20
MAX_HEAD_BYTES: Final = 1 << 12
_ALIGNMENT: Final = 16


class MessageKind(IntEnum):
    """The kind of a message: data of a call, or the notification that the group has failed."""

    DATA = 1
    ABORT = 2


class MessageHeader(NamedTuple):
    """The header of a message."""

    magic: int
    version: int
    kind: int
    text_bytes: int
    sequence: int
    signature: int
    nbytes: int


class Head(NamedTuple):
    """A message without its body."""

    header: MessageHeader
    text: bytes


class Heads:
    """Creates the heads (header and text) of one call's messages. The heads differ only in the body's length."""

    __slots__ = ("_heads", "_padded", "_sequence", "_signature", "_text_bytes", "head_bytes")

    def __init__(self, call: CollectiveCall, sequence: int) -> None:
        self._signature, text = identify(call)
        self._sequence = sequence
        self._text_bytes = len(text)
        self._padded = _pad(text)
        self._heads: dict[int, bytes] = {}
        self.head_bytes = HEADER_BYTES + len(self._padded)
        assert self.head_bytes <= MAX_HEAD_BYTES

    def head(self, nbytes: int) -> bytes:
        head = self._heads.get(nbytes)
        if head is None:
            fields = (MAGIC, WIRE_VERSION, 1, self._text_bytes, self._sequence, self._signature, nbytes)
            head = self._heads[nbytes] = HEADER.pack(*fields) + self._padded
        return head


class Scanner:
    """A parser for the bytes that arrive on a link after an error. It keeps the heads of messages and skips bodies."""

    def __init__(self, skip: int = 0) -> None:
        self.frames: deque[Head] = deque()
        self._skip = skip
        self._held = bytearray()

    def feed(self, data: bytes | memoryview) -> None:
        used = min(self._skip, len(data))
        self._skip -= used
        held = self._held
        held += data[used:]
        while not self._skip and len(held) >= HEADER_BYTES:
            header = unpack_header(held)
            size = HEADER_BYTES + header.text_bytes + _num_pads(header.text_bytes)
            if len(held) < size:
                return
            self.frames.append(Head(header, bytes(held[HEADER_BYTES : HEADER_BYTES + header.text_bytes])))
            used = min(header.nbytes, len(held) - size)
            self._skip = header.nbytes - used
            del held[: size + used]


def unpack_header(buffer: bytes | bytearray | memoryview) -> MessageHeader:
    header = MessageHeader._make(HEADER.unpack_from(buffer))
    if (
        header.magic != MAGIC
        or header.version != WIRE_VERSION
        or header.kind not in (MessageKind.DATA, MessageKind.ABORT)
    ):
        raise ProtocolError(
            f"got magic {header.magic:#06x}, version {header.version} and kind {header.kind}, expected a message of a "
            f"collective (magic {MAGIC:#06x}, version {WIRE_VERSION})"
        )
    if header.text_bytes > MAX_TEXT_BYTES:
        raise ProtocolError(
            f"got a message with a text of {header.text_bytes} bytes, expected at most {MAX_TEXT_BYTES}"
        )
    return header


def pack_abort(abort: Abort) -> bytes:
    text = msgspec.msgpack.encode(abort)
    return HEADER.pack(MAGIC, WIRE_VERSION, MessageKind.ABORT, len(text), abort.sequence, 0, 0) + _pad(text)


def unpack_abort(frame: Head) -> Abort:
    try:
        return msgspec.msgpack.decode(frame.text, type=register_type(Abort))
    except UNREADABLE as error:
        raise ProtocolError(f"got an ABORT that cannot be read: {error}") from None


@functools.lru_cache(maxsize=1024)
def identify(call: CollectiveCall) -> tuple[int, bytes]:
    return call.signature, msgspec.msgpack.encode(call)


def _pad(text: bytes) -> bytes:
    return text + bytes(_num_pads(len(text)))


def _num_pads(nbytes: int) -> int:
    return -nbytes % _ALIGNMENT
