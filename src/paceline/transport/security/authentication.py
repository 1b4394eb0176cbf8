"""Authenticate both ends of a connection: before any other frame, each end proves that it has the cluster's token.

1. The server sends a random number, its nonce (CHALLENGE).
2. The client sends its :class:`Hello`, its :class:`ConnectionIdentity`, its own nonce, and an HMAC-SHA256 of all these
   fields with the token as key (HELLO). The HMAC is the client's *proof*.
3. The server sends its own fields and an HMAC of the fields of both ends (WELCOME).

The token is never sent. An attacker cannot replay a recorded handshake, because each end chooses a new nonce. The
attacker cannot send a proof back to its sender, because the proof includes the label of its sender (client or server).
Bytes cannot be moved from one field to the next, because the HMAC includes the length of every field. A relay cannot
use a proof for another server, because the proof includes the address and the listener. If an intermediary between the
ends is possible, every later frame has a tag whose key is derived from the token and this handshake (see `sealing`).
"""

from __future__ import annotations

import hmac
import os
import secrets
import shlex
import stat
from typing import TypeVar

import msgspec

from paceline.decoded_types import register_type
from paceline.errors import AuthenticationError, ProtocolError, UsageError, VersionError
from paceline.transport.decoding import UNREADABLE
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
    """A number that distinguishes a restarted process from the previous process with the same rank."""
    name: str = ""
    """The node's name, for messages."""
    extra: dict[str, int | str] = {}
    """Additional fields that the application defines."""
    to: str = ""
    """The role that the client expects of the server; empty for any role. If it differs, the connection is closed."""
    cluster: str = ""
    """The id of the cluster, if known. If the client and the server have different ids, the connection is closed."""
    protocol: int = PROTOCOL_VERSION
    paceline: str = ""
    """The version of the package, set when the Hello is sent."""


class Challenge(msgspec.Struct, frozen=True):
    """The content of a CHALLENGE frame."""

    nonce: bytes


class ConnectionIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a connection as one end sees them. They differ if a relay is between the ends."""

    binding: bytes = b""
    """The channel binding, a value that only the two ends share (see `sealing`). Empty if a relay is possible."""
    address: str = ""
    """The address to which the client connected."""
    listener: str = ""
    """The id of the server's listener. The client sends the id that it expects, or an empty id if it knows none."""


class Proof(msgspec.Struct, frozen=True):
    """The content of HELLO and WELCOME frames."""

    hello: bytes
    """A :class:`Hello` as msgpack. The proof covers these bytes."""
    view: bytes
    """A :class:`ConnectionIdentity` as msgpack."""
    nonce: bytes
    proof: bytes


def make_token() -> str:
    """Return a new token of 43 characters with 256 random bits."""
    return secrets.token_urlsafe(32)


def read_token(path: str | os.PathLike[str]) -> str:
    """Read a token from a file, and remove white space around it.

    Raises UsageError if this process cannot read the file, or if other users can read it.
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

    A short token is not safe. Every process to which a client connects receives a proof, with which it can test guesses
    of the token.
    """
    if len(token) < MIN_TOKEN_CHARS:
        raise UsageError(
            f"{source} has {len(token)} characters, but at least {MIN_TOKEN_CHARS} are needed against guessing. "
            f"Create one: {MAKE_TOKEN}"
        )
    return token


def check_or_make_token(token: str | None, source: str = "the token") -> str:
    """Return the token, or a new token for None. Raises UsageError if the token is too short."""
    return make_token() if token is None else check_token(token, source)


def encode_hello(hello: Hello) -> bytes:
    """Encode the Hello as msgpack, with this package's version."""
    from paceline.version import __version__

    return msgspec.msgpack.encode(msgspec.structs.replace(hello, paceline=hello.paceline or __version__))


def join_fields(*fields: bytes) -> bytes:
    """Join the fields, each with a length prefix, so that different lists of fields give different bytes."""
    return b"".join(len(field).to_bytes(4, "little") + field for field in fields)


def prove(token: str, label: str, *fields: bytes) -> bytes:
    """Return the proof that the peer `label` ("client" or "server") has the token and sent these fields."""
    return hmac.digest(token.encode(), join_fields(PROTOCOL_NAME, label.encode(), *fields), "sha256")


def check_proof(token: str, label: str, proof: Proof, *fields: bytes) -> None:
    if not hmac.compare_digest(prove(token, label, *fields), proof.proof):
        raise AuthenticationError(f"the {label} does not hold this cluster's token")


def read_hello(label: str, data: bytes) -> Hello:
    """Decode an authenticated Hello. Raises VersionError for another version of paceline.

    The contents of frames have no version number of their own, so both ends must have one version of the package.
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
