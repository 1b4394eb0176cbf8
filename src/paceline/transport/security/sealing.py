"""Frames between hosts that nobody in between can alter, replay, reorder or drop unseen.

Both ends derive a key for each direction from the token and their handshake (HKDF, RFC 5869). Behind every frame comes
a tag of 16 bytes: HMAC-SHA256, cut to half its length (RFC 2104, section 5), of the frame's number on this connection
and all its bytes. The number is not sent: whoever drops or repeats a frame makes every later tag wrong.

HMAC-SHA256 hashes 1.6 GB/s on a processor with SHA instructions, keyed BLAKE2b 0.9 GB/s and half a microsecond less for
a small frame (0.5 against 0.8 µs). At 1 Gbit/s the wire takes 8 ms for a megabyte, and the hash 0.6: large frames are
hashed piece by piece, while the pieces before are on their way.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any, NamedTuple

from paceline.errors import ConnectionLostError

TAG_BYTES = 16
PIECE_BYTES = 1 << 16
"""How much of a large frame is hashed at a time."""
_BLOCK_BYTES = 64


class Seal:
    """Makes the tags of one direction of a connection, or checks them. Not thread-safe."""

    def __init__(self, key: bytes) -> None:
        """``key``: 32 bytes, of this direction only."""
        padded = key.ljust(_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in padded))
        self._number = 0
        self._running: Any = None

    def update(self, data: Any) -> None:
        """Go on with the frame, or begin it."""
        if self._running is None:
            self._running = self._inner.copy()
            self._running.update(self._number.to_bytes(8, "little"))
            self._number += 1
        self._running.update(data)

    def end(self) -> bytes:
        """Return the tag of the frame that :meth:`update` was given."""
        outer = self._outer.copy()
        outer.update(self._running.digest())
        self._running = None
        return bytes(outer.digest()[:TAG_BYTES])

    def tag(self, parts: Sequence[Any]) -> bytes:
        """Return the tag of a frame given whole."""
        for part in parts:
            self.update(part)
        return self.end()

    def fits(self, tag: bytes | bytearray | memoryview) -> bool:
        """Whether the frame that :meth:`update` was given is the next one that the other end sent."""
        return hmac.compare_digest(self.end(), bytes(tag))


class Seals(NamedTuple):
    """One end's seals of one connection."""

    sending: Seal
    receiving: Seal


def derive_seals(token: str, nonces: bytes, transcript: bytes, *, connecting: bool) -> Seals:
    """Return the seals of one end; ``transcript`` is all that was said in the handshake."""
    secret = hmac.digest(nonces, token.encode(), "sha256")
    first = hmac.digest(secret, transcript + b"\x01", "sha256")
    second = hmac.digest(secret, first + transcript + b"\x02", "sha256")
    return Seals(Seal(first), Seal(second)) if connecting else Seals(Seal(second), Seal(first))


def not_sealed(who: str) -> ConnectionLostError:
    """Return the error for a frame whose tag is wrong. What is lost by it is sent again on a new connection."""
    return ConnectionLostError(
        f"a frame of {who} was altered, repeated or taken out on its way here; the connection is closed"
    )
