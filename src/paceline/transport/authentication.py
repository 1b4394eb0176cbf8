"""Who may talk to us: both ends prove that they hold the cluster's token before any other frame.

The server sends a nonce (CHALLENGE). The client answers with its :class:`Hello`, a nonce of its own and
``HMAC-SHA256(token, "client" | both nonces | hello)``; the server answers with its Hello and the same under
the label "server". The token never goes over the wire, a recorded exchange cannot be replayed (each end chose
a nonce), an answer cannot be reflected (the labels differ), and a Hello cannot be altered. Without TLS the
frames after it are neither encrypted nor signed.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import TypeVar

import msgspec

from paceline.errors import AuthenticationError, ProtocolError, UsageError, VersionError
from paceline.transport.decoding import UNREADABLE
from paceline.transport.frames import PROTOCOL_VERSION

NONCE_BYTES = 32

_Message = TypeVar("_Message", bound=msgspec.Struct)


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """What a process says of itself when it connects, and what a server answers. Known to be true of a
    token's holder.
    """

    role: str
    """``scheduler``, ``server``, ``worker``, or what the application calls it."""
    rank: int = 0
    incarnation: int = 0
    """Tells a restarted process from the one that had its rank before."""
    name: str = ""
    """The node's name for people."""
    extra: dict[str, int | str] = {}
    """What else the application wants to say."""
    protocol: int = PROTOCOL_VERSION
    paceline: str = ""
    """The version of the package; filled in when it is sent."""


class Challenge(msgspec.Struct, frozen=True):
    """The meta of a CHALLENGE frame."""

    nonce: bytes


class Proof(msgspec.Struct, frozen=True):
    """The meta of a HELLO and of a WELCOME frame."""

    hello: bytes
    """A :class:`Hello` as msgpack; kept as bytes because the proof covers them."""
    nonce: bytes
    proof: bytes


def make_token() -> str:
    """Return a fresh token: 43 characters, 256 bits of the system's randomness."""
    return secrets.token_urlsafe(32)


def read_token(path: str | os.PathLike[str]) -> str:
    """Read a token from a file, without the white space around it. Raises UsageError when there is none."""
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"cannot read the cluster's token from {path}: {reason}") from None
    return check_token(token, str(path))


def check_token(token: str, source: str = "the token") -> str:
    """Return the token, or raise UsageError if it is empty: an empty one would let everybody in."""
    if not token:
        raise UsageError(f"{source} is empty; make a token with paceline.transport.make_token()")
    return token


def encode_hello(hello: Hello) -> bytes:
    """Return the Hello as msgpack, with this package's version filled in."""
    from paceline.version import __version__

    return msgspec.msgpack.encode(msgspec.structs.replace(hello, paceline=hello.paceline or __version__))


def prove(token: str, label: str, client_nonce: bytes, server_nonce: bytes, hello: bytes) -> bytes:
    """Return the proof that the one who says ``hello`` in the role ``label`` holds the token."""
    text = b"paceline/%d/%s\0%s%s%s" % (PROTOCOL_VERSION, label.encode(), client_nonce, server_nonce, hello)
    return hmac.new(token.encode(), text, hashlib.sha256).digest()


def verify(token: str, label: str, client_nonce: bytes, server_nonce: bytes, given: Proof) -> Hello:
    """Return the Hello that a valid proof comes with; raise Authentication-, Version- or ProtocolError.

    Both ends must be of one version of paceline: what goes in frames has no versions of its own.
    """
    from paceline.version import __version__

    expected = prove(token, label, client_nonce, server_nonce, given.hello)
    if len(given.nonce) != NONCE_BYTES or not hmac.compare_digest(expected, given.proof):
        raise AuthenticationError(f"the {label} does not hold this cluster's token")
    hello = decode(given.hello, Hello)
    if (hello.protocol, hello.paceline) != (PROTOCOL_VERSION, __version__):
        raise VersionError(
            f"the {label} speaks protocol version {hello.protocol} (paceline {hello.paceline}), this "
            f"process version {PROTOCOL_VERSION} (paceline {__version__}); install the same version of "
            "paceline on both"
        )
    return hello


def decode(meta: bytes | memoryview, kind: type[_Message]) -> _Message:
    """Decode a handshake message; raise ProtocolError when it is none."""
    try:
        return msgspec.msgpack.decode(meta, type=kind)
    except UNREADABLE as error:
        raise ProtocolError(f"got a handshake that cannot be read: {error}; the connection is closed") from None
