"""Sealed frames: tags against altered, replayed, reordered or dropped frames between hosts.

Both ends derive a key for each direction from the token and their handshake (HKDF, RFC 5869). A tag of 16 bytes follows
every frame: HMAC-SHA256, truncated to half its length (RFC 2104, section 5), of the frame's number on this connection
and all its bytes. The number is not sent. If a frame is dropped or repeated, all later tags are wrong.

HMAC-SHA256 hashes 1.6 GB/s on a processor with SHA instructions. Keyed BLAKE2b hashes 0.9 GB/s, but needs 0.5 instead
of 0.8 µs for a small frame. At 1 Gbit/s the wire takes 8 ms for a megabyte, and the hash 0.6: large frames are hashed
in pieces, while earlier pieces are in flight.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any, NamedTuple

from paceline.errors import ConnectionLostError

TAG_BYTES = 16
PIECE_BYTES = 1 << 16
"""Size of the pieces in which large frames are hashed."""
_BLOCK_BYTES = 64


class Seal:
    """Creates or checks the tags of one direction of a connection. Not thread-safe."""

    def __init__(self, key: bytes) -> None:
        """``key``: 32 bytes, for this direction only."""
        padded = key.ljust(_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in padded))
        self._number = 0
        self._running: Any = None

    def update(self, data: Any) -> None:
        """Hash the next bytes of the frame, or begin a new one."""
        if self._running is None:
            self._running = self._inner.copy()
            self._running.update(self._number.to_bytes(8, "little"))
            self._number += 1
        self._running.update(data)

    def end(self) -> bytes:
        """Return the tag of the bytes given to :meth:`update`."""
        outer = self._outer.copy()
        outer.update(self._running.digest())
        self._running = None
        return bytes(outer.digest()[:TAG_BYTES])

    def tag(self, parts: Sequence[Any]) -> bytes:
        """Return the tag of a whole frame."""
        for part in parts:
            self.update(part)
        return self.end()

    def matches(self, tag: bytes | bytearray | memoryview) -> bool:
        """Return whether the bytes given to :meth:`update` are the other end's next frame."""
        return hmac.compare_digest(self.end(), bytes(tag))


class Seals(NamedTuple):
    """One end's seals of one connection."""

    sending: Seal
    receiving: Seal


def derive_seals(token: str, nonces: bytes, transcript: bytes, *, connecting: bool) -> Seals:
    """Return the seals of one end; ``transcript`` holds all fields of the handshake."""
    secret = hmac.digest(nonces, token.encode(), "sha256")
    first = hmac.digest(secret, transcript + b"\x01", "sha256")
    second = hmac.digest(secret, first + transcript + b"\x02", "sha256")
    return Seals(Seal(first), Seal(second)) if connecting else Seals(Seal(second), Seal(first))


def not_sealed(sender: str) -> ConnectionLostError:
    """Return the error for a wrong tag. The sender retries lost messages on a new connection."""
    return ConnectionLostError(
        f"a frame of {sender} was altered, repeated or dropped in transit; the connection is closed"
    )
