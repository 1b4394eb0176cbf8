"""Authenticate both ends of a connection: each proves that it has the cluster's token, before any other frame.

1. The server sends a nonce (CHALLENGE).
2. The client sends its :class:`Hello`, its :class:`ConnectionIdentity`, its own nonce, and an HMAC-SHA256 of all these
   fields with the token as key (HELLO).
3. The server sends its own fields and an HMAC of the fields of both ends (WELCOME).

The token is never sent. An attacker cannot replay a recorded exchange, because each end chooses a nonce. It cannot send
a proof back to its sender, because the proof includes the label of its sender (client or server). It cannot move bytes
from one field to the next, because the HMAC includes the length of every field. A relay cannot use a proof for another
server, because the proof includes the address and the listener. On connections with a possible intermediary, every
later frame is sealed with a key derived from the token and this handshake (`sealing`).
"""

from __future__ import annotations

import hmac
import os
import secrets
import shlex
import stat
from typing import TypeVar

import msgspec

from paceline.errors import AuthenticationError, ProtocolError, UsageError, VersionError
from paceline.transport.decoding import UNREADABLE, register_type
from paceline.transport.frames import PROTOCOL_VERSION

NONCE_BYTES = 32
MIN_TOKEN_CHARS = 16
MAKE_TOKEN = 'python -c "import secrets; print(secrets.token_hex(16))"'
"""A command that prints a new token."""
PROTOCOL_NAME = b"paceline/%d" % PROTOCOL_VERSION

_Message = TypeVar("_Message", bound=msgspec.Struct)


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a process. Both ends of a connection send a Hello, which the token authenticates."""

    role: str
    """``scheduler``, ``server``, ``worker``, or an application's role."""
    rank: int = 0
    incarnation: int = 0
    """Distinguishes a restarted process from the previous process with the same rank."""
    name: str = ""
    """The node's name, for messages."""
    extra: dict[str, int | str] = {}
    """Additional fields of the application."""
    to: str = ""
    """The required role of the server; empty accepts any role. If the role differs, both ends close the connection."""
    cluster: str = ""
    """The cluster's id, if known. If the server has another id, both ends close the connection."""
    protocol: int = PROTOCOL_VERSION
    paceline: str = ""
    """The version of the package, set when the Hello is sent."""


class Challenge(msgspec.Struct, frozen=True):
    """The meta of a CHALLENGE frame."""

    nonce: bytes


class ConnectionIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """One end's view of the connection."""

    binding: bytes = b""
    """The channel binding, which only the two ends share (`sealing`); empty if an intermediary is possible."""
    address: str = ""
    """The address to which the client connected."""
    listener: str = ""
    """Client: the expected listener; empty if the client knows only an address. Server: its own listener."""


class Proof(msgspec.Struct, frozen=True):
    """The meta of HELLO and WELCOME frames."""

    hello: bytes
    """A :class:`Hello` as msgpack; the proof covers these bytes."""
    view: bytes
    """A :class:`ConnectionIdentity` as msgpack."""
    nonce: bytes
    proof: bytes


def make_token() -> str:
    """Return a new token: 43 characters, 256 bits of the system's randomness."""
    return secrets.token_urlsafe(32)


def read_token(path: str | os.PathLike[str]) -> str:
    """Read a token from a file, without surrounding white space.

    Raises UsageError for an unreadable file, or a file that other users can read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"cannot read the cluster's token from {path}: {reason}") from None
    if os.name == "posix" and stat.S_ISREG(mode) and mode & 0o077:
        raise UsageError(
            f"the token in {path} is open to other users (mode {stat.S_IMODE(mode):04o}), who could join the cluster. "
            f"Run: chmod 600 {shlex.quote(os.fspath(path))}"
        )
    return check_token(token, f"the token in {path}")


def check_token(token: str, source: str = "the token") -> str:
    """Return the token. Raises UsageError if it is too short.

    A short token is not safe: every peer and intermediary of a client receives a proof, and can test guesses of the
    token with the proof.
    """
    if len(token) < MIN_TOKEN_CHARS:
        raise UsageError(
            f"{source} has {len(token)} characters, but at least {MIN_TOKEN_CHARS} are needed against guessing. "
            f"Create one: {MAKE_TOKEN}"
        )
    return token


def encode_hello(hello: Hello) -> bytes:
    """Encode the Hello as msgpack, with this package's version."""
    from paceline.version import __version__

    return msgspec.msgpack.encode(msgspec.structs.replace(hello, paceline=hello.paceline or __version__))


def join_fields(*fields: bytes) -> bytes:
    """Join the fields, each with a length prefix, so that different lists give different bytes."""
    return b"".join(len(field).to_bytes(4, "little") + field for field in fields)


def prove(token: str, label: str, *fields: bytes) -> bytes:
    """Return the proof that the end called ``label`` has the token and sent these fields."""
    return hmac.digest(token.encode(), join_fields(PROTOCOL_NAME, label.encode(), *fields), "sha256")


def check_proof(token: str, label: str, proof: Proof, *fields: bytes) -> None:
    if not hmac.compare_digest(prove(token, label, *fields), proof.proof):
        raise AuthenticationError(f"the {label} does not hold this cluster's token")


def read_hello(label: str, data: bytes) -> Hello:
    """Decode an authenticated Hello. Raises VersionError for another version of paceline.

    The contents of frames have no version, so both ends must have the same version of the package.
    """
    from paceline.version import __version__

    hello = decode(data, Hello)
    if (hello.protocol, hello.paceline) != (PROTOCOL_VERSION, __version__):
        raise VersionError(
            f"the {label} has protocol version {hello.protocol} (paceline {hello.paceline}), but this "
            f"process has version {PROTOCOL_VERSION} (paceline {__version__}). Install the same version of "
            "paceline on both"
        )
    return hello


def decode(meta: bytes | memoryview, kind: type[_Message]) -> _Message:
    """Decode a handshake message. Raises ProtocolError if it is malformed."""
    try:
        return msgspec.msgpack.decode(meta, type=register_type(kind))
    except UNREADABLE as error:
        raise ProtocolError(f"got a handshake that cannot be read: {error}. The connection is closed") from None
