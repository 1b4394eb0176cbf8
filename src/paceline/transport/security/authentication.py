"""Who may talk to us: both ends prove that they hold the cluster's token before any other frame.

The server sends a nonce (CHALLENGE). The client answers with its :class:`Hello`, its :class:`ConnectionIdentity`, a
nonce of its own and an HMAC-SHA256 of all that under the token; the server answers with its own and an HMAC of all that
both have said. The token never goes over the wire, a recorded exchange cannot be replayed (each end chose a nonce), an
answer cannot be reflected (the labels differ), nothing can be altered (fields have their lengths in front), and a relay
gains nothing: the proof says for whom it is meant, and where somebody may be in between, every later frame is sealed
with a key that follows from the token and this handshake (`sealing`).
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
from paceline.transport.decoding import UNREADABLE, known
from paceline.transport.frames import PROTOCOL_VERSION

NONCE_BYTES = 32
MIN_TOKEN_CHARS = 16
MAKE_TOKEN = 'python -c "import secrets; print(secrets.token_hex(16))"'
"""A command that prints a token."""
PROTOCOL_NAME = b"paceline/%d" % PROTOCOL_VERSION

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
    to: str = ""
    """The role that must answer; empty: any. Others refuse, and are refused."""
    cluster: str = ""
    """The cluster's id, if it is known yet. Who knows another one refuses, and is refused."""
    protocol: int = PROTOCOL_VERSION
    paceline: str = ""
    """The version of the package; filled in when it is sent."""


class Challenge(msgspec.Struct, frozen=True):
    """The meta of a CHALLENGE frame."""

    nonce: bytes


class ConnectionIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """How one end sees the connection."""

    binding: bytes = b""
    """What only the two ends of one connection see alike (`binding`); empty where somebody may be in between."""
    address: str = ""
    """Where the client has connected to, as it was told."""
    listener: str = ""
    """Of the client: the listener that it wants, empty if it only knows an address. Of the server: its own."""


class Proof(msgspec.Struct, frozen=True):
    """The meta of a HELLO and of a WELCOME frame."""

    hello: bytes
    """A :class:`Hello` as msgpack; kept as bytes because the proof covers them."""
    view: bytes
    """A :class:`ConnectionIdentity` as msgpack."""
    nonce: bytes
    proof: bytes


def make_token() -> str:
    """Return a fresh token: 43 characters, 256 bits of the system's randomness."""
    return secrets.token_urlsafe(32)


def read_token(path: str | os.PathLike[str]) -> str:
    """Read a token from a file, without the white space around it.

    Raises UsageError when there is none, or the file is not closed to other users.
    """
    try:
        with open(path, encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"cannot read the cluster's token from {path}: {reason}") from None
    if os.name == "posix" and stat.S_ISREG(mode) and mode & 0o077:
        raise UsageError(
            f"the token in {path} is open to other users (mode {stat.S_IMODE(mode):04o}), who could join the cluster; "
            f"run: chmod 600 {shlex.quote(os.fspath(path))}"
        )
    return check_token(token, f"the token in {path}")


def check_token(token: str, source: str = "the token") -> str:
    """Return the token, or raise UsageError if it is so short that it could be guessed.

    Whoever a client connects to, or meets on its way, gets a proof on which guesses can be tried without being seen.
    """
    if len(token) < MIN_TOKEN_CHARS:
        raise UsageError(
            f"{source} has {len(token)} characters, at least {MIN_TOKEN_CHARS} are needed so that nobody can guess it; "
            f"make one: {MAKE_TOKEN}"
        )
    return token


def encode_hello(hello: Hello) -> bytes:
    """Return the Hello as msgpack, with this package's version filled in."""
    from paceline.version import __version__

    return msgspec.msgpack.encode(msgspec.structs.replace(hello, paceline=hello.paceline or __version__))


def join_fields(*fields: bytes) -> bytes:
    """Return the fields as one, each with its length in front: no two lists of fields give the same bytes."""
    return b"".join(len(field).to_bytes(4, "little") + field for field in fields)


def prove(token: str, label: str, *said: bytes) -> bytes:
    """Return the proof that the end called ``label`` holds the token and means what was said."""
    return hmac.digest(token.encode(), join_fields(PROTOCOL_NAME, label.encode(), *said), "sha256")


def check_proof(token: str, label: str, given: Proof, *said: bytes) -> None:
    """Raise AuthenticationError unless ``given`` proves it of what was said."""
    if not hmac.compare_digest(prove(token, label, *said), given.proof):
        raise AuthenticationError(f"the {label} does not hold this cluster's token")


def read_hello(label: str, data: bytes) -> Hello:
    """Return the Hello that was proved; raise VersionError if its sender is of another version of paceline.

    What goes in frames has no versions of its own.
    """
    from paceline.version import __version__

    hello = decode(data, Hello)
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
        return msgspec.msgpack.decode(meta, type=known(kind))
    except UNREADABLE as error:
        raise ProtocolError(f"got a handshake that cannot be read: {error}; the connection is closed") from None
